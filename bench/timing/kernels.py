"""Times what a step launches, kernel by kernel, by PyTorch's profiler: where a step's time goes.

These are this package's default form, whole and by heads, at a set's largest rank, and Muon in batches, all without
CUDA graphs, in which a launch has the same kernels. On a CPU they are PyTorch's operators.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from bench import rows
from bench.rivals import BatchedMuon, emulated
from bench.shapes import ParameterSet, Problem
from bench.timing.entries import PERIOD, Entry, by_heads_of, pro
from bench.timing.runs import TimedRun
from bench.timing.steps import head

MAIN = ("gpt2-124m", "llama-450m")  # the sets that are profiled on a GPU
LEAST = 1e-3
"""Milliseconds a step; kernels that take less are summed up as "others"."""


def measure(s: ParameterSet, device: torch.device) -> list[rows.Row]:
    """Return a row for every kernel of every optimizer on a set, of ordinary steps and of one that refreshes."""
    polar = torch.float32 if emulated(device) else torch.bfloat16
    whole = pro("triton" if device.type == "cuda" else "torch", s.ranks[-1], polar)
    whole = replace(whole, settings=(*whole.settings, ("cuda_graphs", False)))
    muon = Entry("batched Muon", BatchedMuon, (("lr", 0.02),), polar=torch.bfloat16)
    problem = Problem(s, device)
    return [row for entry in (whole, by_heads_of(whole, s), muon) for row in _rows(entry, problem)]


def _rows(entry: Entry, problem: Problem) -> Iterator[rows.Row]:
    run = TimedRun(entry, problem)
    run.steps(1 + 2 * PERIOD)  # begins the state, compiles, and ends as a period does
    for metric, steps in (("step without refresh", PERIOD - 1), ("refresh step", 1)):
        found = {name: (count, ms) for name, count, ms in _launches(run, steps)}
        small = [name for name, (_, ms) in found.items() if ms < LEAST]
        counts, times = zip(*([found.pop(name) for name in small] or [(0, 0.0)]), strict=True)
        ordered = sorted(found.items(), key=lambda each: -each[1][1])
        for name, (count, ms) in [*ordered, ("others", (sum(counts), sum(times)))]:
            own = {"kernel": name, "metric": metric, "unit": "ms", "launches": count, "median": ms}
            yield head(entry, problem.parameters) | own


def _launches(run: TimedRun, steps: int) -> Iterator[tuple[str, int, float]]:
    """Yield every kernel of the next steps, its launches and milliseconds a step; gradients stay where they are."""
    cuda = run.problem.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiled:
        for _ in range(steps):
            run.optimizer.step()
        if cuda:
            torch.cuda.synchronize()
    for event in profiled.key_averages():
        took = event.self_device_time_total if cuda else event.self_cpu_time_total
        if took > 0:
            yield event.key, round(event.count / steps), took / steps / 1e3
