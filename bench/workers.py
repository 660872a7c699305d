"""The one pool: runs that each have a process of their own, so that what one changes in torch is gone with it."""

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import TypeVar

T, R = TypeVar("T"), TypeVar("R")
GOES_ON = "Interrupted; the same command goes on."


@contextmanager
def one_run_each(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of ``jobs`` processes at a time, a new one for every run.

    Whatever leaves the block by an exception, Ctrl-C among them, ends the runs under way: at once, or after a step and
    a checkpoint where they look at :func:`asked_to_stop`.
    """
    pool = ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # a terminal sends Ctrl-C to all; who ends them is the parent
        max_tasks_per_child=1,
    )
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def work_off(
    wanted: Callable[[], Iterable[T]], call: Callable[[T], Callable[[], R]], done: Callable[[T, R], object], jobs: int
) -> None:
    """Run what is wanted, ``jobs`` runs at a time, until nothing is.

    Args:
        wanted: gives what can be run now and is not done, the most urgent first; asked again when a run has ended.
        call: what a process is to call for it; such a call travels to that process.
        done: takes what came of it.
        jobs: runs at a time.
    """
    busy: dict[Future[R], T] = {}
    try:
        with one_run_each(jobs) as pool:
            while True:
                for unit in wanted():
                    if len(busy) == jobs:
                        break
                    if unit not in busy.values():
                        busy[pool.submit(call(unit))] = unit
                if not busy:
                    return
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    done(busy.pop(future), future.result())
    except KeyboardInterrupt:
        raise KeyboardInterrupt(GOES_ON) from None


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], bool]]:
    """Yield what says whether a run is to end after its step, since half a step could not be resumed bit for bit.

    In the command's own process Ctrl-C asks for that, and a second one is not waited for. In a process of the pool the
    parent does, again and again, or its end.
    """
    told: list[bool] = []
    if parent := multiprocessing.parent_process():
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(True))  # until it has ended
        yield lambda: bool(told) or not parent.is_alive()
        return

    def handler(number: int, frame: object) -> None:
        if told:
            raise KeyboardInterrupt(GOES_ON)
        told.append(True)
        print("\nFinishing this step; Ctrl-C again gives up what the last checkpoint lacks.", file=sys.stderr)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(told)
    finally:
        signal.signal(signal.SIGINT, before)
