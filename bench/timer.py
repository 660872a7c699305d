"""The time of a call, by the timers of Triton on a GPU and of PyTorch on a CPU."""

from collections.abc import Callable

import torch
from torch.utils.benchmark import Timer

FEWEST = 3
"""Figures at least."""


def call_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Return the seconds of single calls, for about ``seconds`` altogether after warming up.

    On a GPU they lie between two events, each call after the L2 cache has been emptied. On a CPU a call too short for
    the clock is a mean over several.
    """
    if device.type == "cuda":
        from triton.testing import do_bench

        milliseconds: list[float] = do_bench(run, rep=1e3 * seconds, return_mode="all")
        return [1e-3 * ms for ms in milliseconds]
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    found = timer.blocked_autorange(min_run_time=seconds)
    more = range(FEWEST - len(found.times))
    return [*found.times, *(timer.timeit(found.number_per_run).mean for _ in more)]
