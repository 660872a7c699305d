"""The first two minutes on a GPU: every line is asked, what is wrong is told, and nothing stops what comes after."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch

from bench import first
from bench.micro.case import Sizes
from bench.micro.kernels import KERNELS
from bench.shapes import ParameterSet
from bench.timing import agreement
from prokl.backends import triton_ops
from prokl.backends.select import select
from prokl.engine.graphs import Graphs, Recorded
from prokl.kernels import launch
from prokl.pair import Pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Sizes(B=2, m=8, n=12, r=4)
ONE = ParameterSet("one", ((1, 12, 8),), (4,))
GIVEN = ["--device", DEVICE.type]
interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.slow
@interpreted
def test_all_is_asked_and_right_at_small_sizes(monkeypatch, capsys):
    """Every kernel and whole steps of both precisions, as a GPU is asked; a CPU records no graphs, so steps are few."""
    monkeypatch.setattr(first, "SIZES", SMALL)
    monkeypatch.setattr(first, "weights_of", lambda sizes: ONE)
    monkeypatch.setattr(first, "STEPS", 3)
    monkeypatch.setattr(first, "PERIOD", 2)  # the last of them refreshes
    assert first.main([*GIVEN, "--seconds", "600"]) == 0
    output = capsys.readouterr().out.splitlines()
    asked = "doctor: torch", "doctor: extension", "step: balanced, 12 x 8: right ", "graphs: faithful: 0 of the "
    for what in asked:
        assert any(line.startswith(what) for line in output), what
    right = [line.rpartition(": right")[0] for line in output if line.startswith("kernel: ")]
    assert right == [f"kernel: {case.name}" for case in KERNELS]
    assert output[-1] == "0 wrong, 0 not begun within 600 s"


@pytest.mark.slow
@interpreted
def test_a_wrong_kernel_and_a_wrong_step_are_noticed(monkeypatch, capsys):
    agreement.complaint.cache_clear()
    ops = {p: select("triton", DEVICE, p).ops for p in ("balanced", "faithful")}
    case = next(case for case in KERNELS if case.name == "product")
    assert first.kernel(case, SMALL, DEVICE).startswith("right")
    for stages in map(type, ops.values()):  # of pairs first: theirs calls the other
        product = stages.product
        monkeypatch.setattr(stages, "product", lambda self, *a, product=product, **k: product(self, *a, **k) * 1.01)
    monkeypatch.setattr(first, "SIZES", SMALL)
    monkeypatch.setattr(first, "weights_of", lambda sizes: ONE)
    monkeypatch.setattr(first, "KERNELS", [case])
    monkeypatch.setattr(first, "graphs", lambda *given: "not asked")
    assert first.main(GIVEN) == 1
    output = capsys.readouterr().out
    assert "kernel: product: WRONG: ArithmeticError: error " in output
    for precision in ops:
        assert re.search(f"step: {precision}, 12 x 8: WRONG: .* from the reference in float64, may be 1e-06", output)
    assert output.splitlines()[-1].startswith("3 wrong, 0 not begun")
    agreement.complaint.cache_clear()


@interpreted
def test_graphs_that_go_elsewhere_are_noticed(monkeypatch):
    monkeypatch.setattr(first, "STEPS", 1)  # which moves nothing
    with pytest.raises(ArithmeticError, match="nan of the way from the steps without, may be 0.00098"):
        first.graphs(SMALL, "faithful", DEVICE)


@interpreted
@pytest.mark.parametrize("case", ["residual of pairs", "product of pairs"])
def test_a_pair_that_lost_its_smaller_half_is_noticed(case, monkeypatch):
    """The bound on what a kernel stores or takes as a pair is that of a pair, not that of bfloat16."""
    case = next(own for own in KERNELS if own.name == case)
    for name in ("product", "product_with_energies"):
        kernel = getattr(triton_ops, name)
        monkeypatch.setattr(triton_ops, name, lambda *a, kernel=kernel, **k: one_half(kernel(*map(one_half, a), **k)))
    with pytest.raises(ArithmeticError, match="error .*e-03 in float32, may be .*e-0[56]"):
        first.kernel(case, SMALL, DEVICE)


def one_half(x):
    """Without lo, of what is a pair or has one."""
    if isinstance(x, tuple) and not isinstance(x, Pair):
        return (*map(one_half, x),)
    return Pair(torch.stack((x.hi, torch.zeros_like(x.hi)))) if isinstance(x, Pair) else x


def test_steps_that_missed_their_graphs_are_noticed():
    some = Recorded(lambda: None, None)
    optimizer = SimpleNamespace(engine=SimpleNamespace(graphs=Graphs()))
    for replays, fine in (({"one": {"ordinary": some, "refresh": None}}, True), ({}, False), ({"one": {}}, False)):
        optimizer.engine.graphs.replays = replays
        with contextlib.nullcontext() if fine else pytest.raises(RuntimeError, match="no graph was recorded"):
            first.check_recorded(optimizer)
