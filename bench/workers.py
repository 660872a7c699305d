"""Runs that each have a process of their own: what a package has changed in torch for its own sake is gone with it."""

import multiprocessing
import signal
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager


@contextmanager
def one_run_each(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of ``jobs`` processes at a time, a new one for every run.

    Whatever leaves the block by an exception, Ctrl-C among them, ends the runs under way at once.
    """
    pool = ProcessPoolExecutor(
        jobs,
        multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # a terminal sends Ctrl-C to all; who ends them is the parent
        max_tasks_per_child=1,
    )
    before = set(multiprocessing.active_children())
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
