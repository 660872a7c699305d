"""Ranks of a gloo process group, started once for many tests.

Each rank is a :class:`concurrent.futures.ProcessPoolExecutor` of one process: it is sent functions by their qualified
names, with arguments that can be pickled, and its exceptions come back with their traceback. Multiprocessing's fork
server starts the processes, and imports torch once: the first pool of a session takes about five seconds on two
cores, each later one about one. Every pool has a folder and a FileStore of its own, and no port is chosen here, so that
the workers of pytest-xdist do not meet; each of them has its own pools.
"""

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict"]
TIMEOUT = 60.0  # seconds for one call, far beyond what any takes on a busy machine
GRACE = 5.0  # seconds that ranks get to end once one of them has failed


class RanksFailed(Exception):
    """The errors of ranks that failed, with their tracebacks."""


def join(rank, world, store, timeout):
    """Make this process a rank."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # the machine's name need not be an address
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )


class Ranks:
    """Processes of one group, which start on the first call.

    Args:
        world: how many.
        timeout: seconds after which torch gives up waiting for a rank.
    """

    def __init__(self, world, timeout=TIMEOUT):
        self.world, self.timeout = world, timeout
        self._executors, self._pids = [], []

    def _start(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        store = Path(self._folder) / "store"
        self._executors = [
            ProcessPoolExecutor(1, context, initializer=join, initargs=(rank, self.world, store, self.timeout))
            for rank in range(self.world)
        ]
        self._removed = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._pids = [future.result(TIMEOUT) for future in [e.submit(os.getpid) for e in self._executors]]

    def attempt(self, function, *args, timeout=TIMEOUT, grace=GRACE, **kwargs):
        """Call a function of a module on all ranks; return (values by rank, exceptions by rank).

        Where a rank has failed, or the time is up, the processes are killed, and the next call starts new ones.
        """
        if not self._executors:
            self._start()
        futures = {e.submit(function, *args, **kwargs): rank for rank, e in enumerate(self._executors)}
        pending, end, failed = set(futures), time.monotonic() + timeout, False
        while pending and (left := end - time.monotonic()) > 0:
            done, pending = wait(pending, left, FIRST_COMPLETED)
            if not failed and any(future.exception() is not None for future in done):
                failed, end = True, min(end, time.monotonic() + grace)
        if pending or failed:
            self.kill()
            wait(futures, GRACE)  # what is pending breaks
        errors = {rank: future.exception() for future, rank in futures.items() if future.exception() is not None}
        late = {futures[future] for future in pending}
        for rank in late:
            errors[rank] = TimeoutError(f"had not ended when {'another rank failed' if failed else 'the time was up'}")
        return {rank: future.result() for future, rank in futures.items() if rank not in errors}, errors

    def run(self, function, *args, **kwargs):
        """Call a function of a module on all ranks; return its values in the order of ranks.

        Raises:
            RanksFailed: some rank raised, died or did not end; says which, with their tracebacks.
        """
        values, errors = self.attempt(function, *args, **kwargs)
        if errors:
            lines = [f"{function.__module__}.{function.__qualname__} failed."]
            for rank, error in sorted(errors.items()):
                lines += [f"--- rank {rank} ---", "".join(traceback.format_exception(error)).rstrip()]
            raise RanksFailed("\n".join(lines))
        return [values[rank] for rank in range(self.world)]

    def kill(self):
        """End the processes at once, and remove their folder."""
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        executors, self._executors, self._pids = self._executors, [], []
        for executor in executors:
            executor.shutdown(wait=True, cancel_futures=True)
        if executors:
            self._removed()


@pytest.fixture(scope="session")
def pools():
    """Pools by number of ranks, for the whole session: ``pools[4].run(function, argument)``."""
    made = {world: Ranks(world) for world in (2, 4)}
    yield made
    for pool in made.values():
        pool.kill()
