"""Times on a device without a wait between them: marks, which are read when the device has reached the last one."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.utils.benchmark import Timer

ROUNDS, PRODUCTS = 4, 10
"""Rounds of :func:`product_rate`, and products of each. It returns the quickest round's rate, as a device may have to
raise its clocks first."""


def mark(device: torch.device) -> Any:
    """Return the time, or an event of the device's own."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def between(start: Any, end: Any) -> float:
    """Return the seconds from one mark to another; the device must have reached both."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the FLOP/s of square products of random matrices of a dtype."""
    A = torch.randn(size, size, device=device).to(dtype)
    B = torch.randn(size, size, device=device).to(dtype)
    out = A @ B  # which chooses the kernel
    took = []
    for _ in range(ROUNDS):
        start = mark(device)
        for _ in range(PRODUCTS):
            torch.matmul(A, B, out=out)
        end = mark(device)
        wait(device)
        took.append(between(start, end))
    return 2 * size**3 * PRODUCTS / min(took)


FEWEST, MOST = 3, 100
"""Figures of a call at least, and at most on a GPU."""


def call_seconds(run: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Return the seconds of single calls, for about ``seconds`` altogether after warming up.

    On a GPU they lie between two events, each call after the L2 cache has been emptied, and the device waits until the
    host has launched all of a call: a launch takes the host longer than a short kernel the device. On a CPU a call too
    short for the clock is a mean over several.
    """
    if device.type == "cuda":
        return device_seconds(run, seconds)
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    found = timer.blocked_autorange(min_run_time=seconds)
    more = range(FEWEST - len(found.times))
    return [*found.times, *(timer.timeit(found.number_per_run).mean for _ in more)]


CACHE = 256 * 2**20
"""Bytes that are written before a call, more than any L2 cache holds."""
CYCLES = 2e9
"""Cycles of a GPU's clock in a second, at most."""
LAUNCHING = 0.01
"""Seconds of launching that the device waits for; a call that takes longer is bound by the host anyway."""


def device_seconds(run: Callable[[], object], seconds: float) -> list[float]:
    """Return what :func:`call_seconds` does, of the current CUDA device."""
    cache = torch.empty(CACHE, dtype=torch.uint8, device="cuda")
    for _ in range(2):  # the first compiles
        torch.cuda.synchronize()
        begun = perf_counter()
        run()
        launched = perf_counter() - begun
        torch.cuda.synchronize()
        took = perf_counter() - begun
    marks = []
    for _ in range(max(FEWEST, min(MOST, int(seconds / took)))):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(int(2 * min(launched, LAUNCHING) * CYCLES))
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [1e-3 * start.elapsed_time(end) for start, end in marks]
