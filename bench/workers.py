"""Runs that each have a process of their own: what a package has changed in torch for its own sake is gone with it."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


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
    others, ended = set(multiprocessing.active_children()), threading.Event()

    def end_runs() -> None:  # also one that begins while others still end
        while not ended.wait(0.1):
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()

    try:
        yield pool
    except BaseException:
        threading.Thread(target=end_runs, daemon=True).start()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ended.set()


def asked_to_stop() -> Callable[[], bool]:
    """Return what says, in a run's own process, whether it is to end: it was told so, or its parent is gone."""
    told: list[bool] = []
    parent = multiprocessing.parent_process()
    if parent is None:  # in the command's own process Ctrl-C does that
        return lambda: False
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(True))
    return lambda: bool(told) or not parent.is_alive()
