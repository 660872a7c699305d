"""Times on a device without a wait between them: marks, which are read when the device has reached the last one."""

from time import perf_counter
from typing import Any

import torch

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
