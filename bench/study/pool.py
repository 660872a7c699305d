"""Run tasks: one after another, or several at a time in processes of one thread each."""

from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from bench.study import units
from bench.study.scales import Scale
from bench.study.units import Place, Result, Task
from bench.training.loop import Interrupt
from bench.training.processes import ALONE, Processes
from bench.workers import asked_to_stop, one_run_each


class Interrupted(Exception):
    """Ctrl-C; everything that was done is kept."""


def _run_alone(task: Task, scale: Scale, data: Path | None, checkpoint_seconds: float) -> dict[str, Result] | None:
    """Run a task in a process of its own."""
    torch.set_num_threads(1)
    return units.run(task, Place(scale.open(data), asked_to_stop(), checkpoint_seconds))


@dataclass
class Runner:
    """The tasks of one scale's experiments, in this process or in others."""

    place: Place  # of tasks that run in this process
    scale: Scale  # of the tasks
    data: Path | None  # that they train on
    jobs: int  # processes at a time; one is this process

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
        if self.jobs == 1:
            for i, task in enumerate(tasks):
                yield i, units.run(task, self.place)
            return
        given = self.scale, self.data, self.place.checkpoint_seconds
        with one_run_each(self.jobs) as pool:
            futures = {pool.submit(_run_alone, task, *given): i for i, task in enumerate(tasks)}
            for future in as_completed(futures):
                yield futures[future], future.result()


def _summary(task: Task, found: dict[str, Result]) -> str:
    losses = []
    for key, hyper in task.settings.hyper.items():
        values = {"r": hyper.rank, "start": hyper.init_eigenvalue, "lr": hyper.lr, "alpha_kl": hyper.alpha_kl}
        given = " ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        losses.append(f"{hyper.method} {given}: {found[key].record.final_loss:.4f}")
    return f"seed {task.seed}: " + "; ".join(losses)


def runner(
    scale: Scale,
    data: Path | None,
    jobs: int,
    interrupt: Interrupt,
    checkpoint_seconds: float,
    processes: Processes = ALONE,
) -> Runner:
    """Return a runner with ``jobs`` processes at a time; Ctrl-C ends those after a step, and they leave checkpoints."""
    place = Place(scale.open(data), lambda: interrupt.requested, checkpoint_seconds, processes, shown=jobs == 1)
    if jobs > 1:
        interrupt.then.append(_interrupt)
    return Runner(place, scale, data, jobs)


def _interrupt() -> None:
    raise KeyboardInterrupt
