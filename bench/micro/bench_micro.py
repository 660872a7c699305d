"""The microbenchmarks: ``pytest bench --benchmark-only``; with ``--benchmark-disable`` the results are only checked.

Every form of every group is a test. Where its results are wrong it fails, and nothing is timed. CUDA events take the
time on a GPU and PyTorch's timer on a CPU; pytest-benchmark shows it.
"""

from copy import deepcopy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the cases are those of the Triton kernels")

from bench.clock import call_seconds  # noqa: E402
from bench.micro.case import Case, Dtypes, Expected, Inputs, Sizes, complaint, expect, numbers  # noqa: E402
from bench.micro.groups import Form, Group, Results, groups, row  # noqa: E402
from bench.rivals import emulated  # noqa: E402
from bench.rows import quartiles  # noqa: E402
from bench.shapes import SETS  # noqa: E402


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
