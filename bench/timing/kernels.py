"""Where the time of a step goes, kernel by kernel: one period of Pro-KLShampoo in PyTorch's profiler.

On a CPU it is PyTorch's operators that are listed. What a step takes longer than all kernels together, the GPU stands
idle.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench import rows
from bench.shapes import ParameterSet
from bench.timing.entries import PERIOD, backends, pro
from bench.timing.problem import Problem
from bench.timing.runs import TimedRun, enter

SLOWEST = 20.0
"""Seconds that a period may take."""
TOP = 25
"""Kernels listed."""


def kernel_times(run: TimedRun) -> list[tuple[str, float, int]]:
    """Return name, milliseconds and calls of every kernel in a period, or on a CPU operator, the longest first."""
    device = run.problem.device
    cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with profile(activities=activities):  # the first profile of a process also starts the profiler
        torch.ones(1, device=device).add_(1).sum().item()
    with profile(activities=activities) as recorded:
        run.steps(PERIOD)

    def own(e: Any) -> bool:
        # The optimizer's own annotation is repeated on the device.
        annotation = e.key.startswith(("Optimizer.", "ProfilerStep")) or getattr(e, "is_user_annotation", False)
        return (e.device_type == torch.autograd.DeviceType.CUDA) == cuda and not annotation

    time = "self_device_time_total" if cuda else "self_cpu_time_total"
    found = [(e.key, getattr(e, time) / 1e3, e.count) for e in recorded.key_averages() if own(e)]
    return sorted(found, key=lambda kernel: -kernel[1])


def measure(s: ParameterSet, device: torch.device) -> Iterator[rows.Row]:
    """Yield a step, all kernels, and those that take the most, at the largest rank; or why there is no figure."""
    entry = pro(backends(device)[-1], s.ranks[-1], torch.bfloat16 if device.type == "cuda" else torch.float32)
    row = {"model": s.name, "optimizer": entry.optimizer, "backend": entry.backend, "rank": entry.rank}
    row |= {"dtype": entry.dtypes, "note": ""}
    runs, left_out = enter([entry], Problem(s, device), SLOWEST)
    for _, why in left_out:
        yield row | {"metric": "kernel time", "note": why}
    for run in runs:
        step = 1e3 * sum(run.steps(PERIOD)) / PERIOD
        yield row | {"metric": "step", "unit": "ms", "median": step, "rounds": 1}
        found = kernel_times(run)
        total = sum(ms for _, ms, _ in found) / PERIOD
        row |= {"metric": "kernel time", "unit": "ms", "rounds": 1}
        yield row | {"median": total, "ratio": total / step, "note": "all; ratio is to the step"}
        launches = sum(calls for _, _, calls in found) / PERIOD
        yield row | {"metric": "kernel calls", "unit": "1", "median": launches, "note": "all, a step"}
        for name, ms, calls in found[:TOP]:
            note = f"{calls / PERIOD:.3g} calls a step: {name[:120]}"
            yield row | {"median": ms / PERIOD, "ratio": ms / PERIOD / total, "note": note}
