"""The microbenchmarks: ``pytest bench --benchmark-only``; with ``--benchmark-disable`` the results are only checked.

Every contender of every group is a test. Where its results are wrong it fails, and nothing is timed.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the cases are those of the Triton kernels")

from bench.micro.checks import complaint  # noqa: E402
from bench.micro.groups import (  # noqa: E402
    Contender,
    Group,
    fitted,
    flusher,
    fresh,
    groups,
    left_out_row,
    measured_row,
    once,
    timer,
)
from bench.micro.ledger import Ledger  # noqa: E402
from bench.shapes import SETS  # noqa: E402

FEWEST, MOST = 3, 50
"""Rounds."""
SLOW = 5.0
"""Seconds that one call may take; what takes longer is not timed."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.option
    device = torch.device(option.device)
    found = []
    for group in groups([SETS[name] for name in option.sets], device):
        contenders = group.contenders(device)
        marks = pytest.mark.benchmark(group=group.name, timer=timer(device))
        for place, c in enumerate(contenders):
            found.append(
                pytest.param(group, contenders, place, id=f"{group.name}: {c.name} {c.backend}".strip(), marks=marks)
            )
    metafunc.parametrize("group, contenders, place", found)


def test_primitive(group: Group, contenders: list[Contender], place: int, benchmark: Any, ledger: Ledger) -> None:
    c, device = contenders[place], ledger.device
    if benchmark.enabled and ledger.has(group.name):
        pytest.skip("in the file of --rows already; --again measures it anew")
    d = fitted(group.dtypes, device, ledger.rates if benchmark.enabled else None)

    def leave_out(why: str) -> None:
        ledger.add(group.name, place, len(contenders), left_out_row(c, group, d, why))
        pytest.skip(why)

    if c.obstacle:
        leave_out(c.obstacle)
    # In half precision a good form is some percent off, and so may a bad one be: float32 tells them apart.
    exact = replace(d, polar=torch.float32) if c.case.polar_flops(group.sizes) else d
    for own in dict.fromkeys((d, exact)):
        wrong = complaint(c.case, c.run, lambda own=own: fresh(c, group, own, device))
        if wrong:
            ledger.fail(group.name)
        assert not wrong, f"{group.name}, {c.name} {c.backend}: {wrong}"
    i = fresh(c, group, d, device)
    rounds = 1
    if benchmark.enabled:
        took = once(c, i, device)
        if took > SLOW:
            leave_out(f"a call took {took:.1f} s, may take {SLOW:g}")
        rounds = min(MOST, max(FEWEST, int(ledger.seconds / took)))
    benchmark.pedantic(c.run, args=(i,), setup=flusher(device), rounds=rounds)
    if benchmark.enabled:
        row = measured_row(c, group, d, benchmark.stats.stats.data, ledger.rates)
        ledger.add(group.name, place, len(contenders), row)
