"""Run tasks: one after another, or several at a time in processes of one thread each."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.study import units
from bench.study.scales import Scale
from bench.study.units import Place, Result, Task
from bench.training.loop import Interrupt
from bench.training.processes import ALONE, Processes


class Interrupted(Exception):
    """Ctrl-C; everything that was done is kept."""


_place: Place  # of a worker


def _start_worker(scale: Scale, data: Path | None, checkpoint_seconds: float, stopped: Any) -> None:
    """Prepare a process for its tasks; Ctrl-C reaches it through the event, so that it ends after a whole step."""
    global _place
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    _place = Place(scale.open(data), lambda: stopped.is_set() or not parent.is_alive(), checkpoint_seconds)


def _run_in_worker(task: Task) -> dict[str, Result] | None:
    return None if _place.stop() else units.run(task, _place)


@dataclass
class Runner:
    """The tasks of one scale's experiments, in this process or in others."""

    place: Place  # of tasks that run in this process
    workers: ProcessPoolExecutor | None = None  # the other processes, if there are any

    def run(self, tasks: Sequence[Task], what: str) -> list[dict[str, Result]]:
        """Return the results of every task, in their order.

        Raises:
            Interrupted: after Ctrl-C.
        """
        results: dict[int, dict[str, Result]] = {}
        silent = not self.place.processes.first
        with tqdm(desc=what, total=len(tasks), disable=True if silent else None, leave=False) as bar:
            for i, found in self._results(tasks):
                if found is None:
                    raise Interrupted
                results[i] = found
                bar.update()
                if not silent:
                    bar.write(f"{what} {len(results)}/{len(tasks)}, {_summary(tasks[i], found)}")
        return [results[i] for i in range(len(tasks))]

    def _results(self, tasks: Sequence[Task]) -> Iterator[tuple[int, dict[str, Result] | None]]:
        if self.workers is None:
            for i, task in enumerate(tasks):
                yield i, units.run(task, self.place)
            return
        futures = {self.workers.submit(_run_in_worker, task): i for i, task in enumerate(tasks)}
        for future in as_completed(futures):
            yield futures[future], future.result()


def _summary(task: Task, found: dict[str, Result]) -> str:
    losses = []
    for key, hyper in task.settings.hyper.items():
        values = {"r": hyper.rank, "start": hyper.init_eigenvalue, "lr": hyper.lr, "alpha_kl": hyper.alpha_kl}
        given = " ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        losses.append(f"{hyper.method} {given}: {found[key].record.final_loss:.4f}")
    return f"seed {task.seed}: " + "; ".join(losses)


@contextmanager
def runner(
    scale: Scale,
    data: Path | None,
    jobs: int,
    interrupt: Interrupt,
    checkpoint_seconds: float,
    processes: Processes = ALONE,
) -> Iterator[Runner]:
    """Yield a runner with ``jobs`` processes at a time, which end with it."""
    place = Place(scale.open(data), lambda: interrupt.requested, checkpoint_seconds, processes, shown=jobs == 1)
    if jobs == 1:
        yield Runner(place)
        return
    context = multiprocessing.get_context("spawn")
    stopped = context.Event()
    interrupt.then.append(stopped.set)
    workers = ProcessPoolExecutor(jobs, context, _start_worker, (scale, data, checkpoint_seconds, stopped))
    try:
        yield Runner(place, workers)
    finally:
        stopped.set()  # after an error in one, the others end after a step, and leave their checkpoints
        workers.shutdown(cancel_futures=True)
