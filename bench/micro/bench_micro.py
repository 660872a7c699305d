"""The microbenchmarks: ``pytest bench --benchmark-only``; with ``--benchmark-disable`` the results are only checked.

Every form of every group is a test. Where its results are wrong it fails, and nothing is timed. CUDA events take the
time on a GPU and PyTorch's timer on a CPU; pytest-benchmark shows it.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from time import perf_counter
from typing import Any

import pytest
import torch
from torch.utils.benchmark import Timer

pytest.importorskip("triton", reason="the cases are those of the Triton kernels")

from bench.micro.case import Case, Dtypes, Expected, Inputs, Sizes, complaint, expect, numbers  # noqa: E402
from bench.micro.groups import Form, Group, Results, groups, row  # noqa: E402
from bench.rivals import emulated  # noqa: E402
from bench.rows import quartiles  # noqa: E402
from bench.shapes import SETS  # noqa: E402

FEWEST, MOST = 3, 100
"""Figures of a form at least, and at most on a GPU."""


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


class Clock:
    """A clock of pytest-benchmark's that shows what another timer measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: list[float]) -> None:
        self.now += seconds.pop()


CLOCK = Clock()


@lru_cache(maxsize=4)
def prepared(case: Case, sizes: Sizes, d: Dtypes, device: torch.device) -> tuple[Inputs, Expected]:
    """Return inputs, and what results are compared with: the same for all forms of a group."""
    inputs = case.inputs(sizes, d, numbers(device))
    return inputs, expect(case, partial(deepcopy, inputs))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.option
    device = torch.device(option.device)
    found = []
    for group in groups([SETS[name] for name in option.sets], device):
        marks = pytest.mark.benchmark(group=group.name, timer=CLOCK)
        for form in group.forms(device):
            name = f"{group.name}: {form.name} {form.backend}".strip()
            found.append(pytest.param(group, form, id=name, marks=marks))
    metafunc.parametrize("group, form", found)


def test_operation(group: Group, form: Form, benchmark: Any, results: Results) -> None:
    device = results.device
    d = replace(group.dtypes, polar=torch.float32) if emulated(device) else group.dtypes
    found = row(form, group, d, device)
    if benchmark.enabled and results.has(found):
        pytest.skip("in the file of --rows already")
    ops = form.primitives(device)
    # In half precision a good form is some percent off, and so may a bad one be: float32 tells them apart.
    exact = replace(d, polar=torch.float32) if form.case.polar else d
    for own in dict.fromkeys((exact, d)):
        inputs, expected = prepared(form.case, group.sizes, own, device)
        wrong = complaint(form.called, ops, partial(deepcopy, inputs), expected)
        assert not wrong, f"{group.name}, {form.name} {form.backend}: {wrong}"
    inputs = deepcopy(inputs)
    run = form.called.bind(inputs, ops) if ops else form.case.formula(inputs)
    if not benchmark.enabled:
        benchmark(run)  # called once
        return
    seconds = call_seconds(run, device, results.seconds)
    figures = {name: 1e3 * value for name, value in quartiles(seconds).items()}
    results.add(found | figures | {"rounds": len(seconds)})
    benchmark.pedantic(CLOCK.advance, args=(seconds[::-1],), rounds=len(seconds))
