"""The first two minutes on a GPU: every line is asked, what is wrong is told, and nothing stops what comes after."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from bench import first
from bench.micro.case import Sizes
from bench.micro.kernels import KERNELS
from prokl.backends import triton_ops
from prokl.backends.select import select
from prokl.engine.graphs import Graphs, Recorded
from prokl.kernels import launch, product
from prokl.pair import Pair

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = Sizes(B=2, m=8, n=12, r=4)
GIVEN = ["--device", DEVICE.type]
interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.slow
@interpreted
def test_all_is_asked_and_right_at_small_sizes(monkeypatch, capsys):
    """Every kernel and whole steps of both precisions, as a GPU is asked; a CPU records no graphs, so steps are few."""
    monkeypatch.setattr(first, "SIZES", SMALL)
    monkeypatch.setattr(first, "STEPS", 3)
    monkeypatch.setattr(first, "PERIOD", 2)  # the last of them refreshes
    assert first.main([*GIVEN, "--seconds", "600"]) == 0
    said = capsys.readouterr().out.splitlines()
    for what in ("doctor: torch", "doctor: extension", "steps: balanced, eager: "):
        assert any(line.startswith(what) for line in said), what
    right = [line.rpartition(": right")[0] for line in said if line.startswith("kernel: ")]
    assert right == [f"kernel: {case.name}" for case in KERNELS]
    assert sum(line.startswith("steps: ") for line in said) == 4
    assert said[-1] == "0 wrong, 0 not begun within 600 s"


@interpreted
def test_a_wrong_kernel_and_a_wrong_step_are_noticed_and_what_fails_is_a_line(monkeypatch, capsys):
    monkeypatch.setattr(first, "STEPS", 1)
    ops = {p: select("triton", DEVICE, p).stages["pro-klshampoo"] for p in ("balanced", "faithful")}
    case = next(case for case in KERNELS if case.name == "product")
    assert first.kernel(case, SMALL, DEVICE, ops).startswith("right")
    for stages in map(type, ops.values()):  # of pairs first: theirs calls the other
        product = stages.product
        monkeypatch.setattr(stages, "product", lambda self, *a, product=product, **k: product(self, *a, **k) * 1.01)
    with pytest.raises(ArithmeticError):
        first.kernel(case, SMALL, DEVICE, ops)
    for precision, most in (("balanced", "0.0039"), ("faithful", "0.00098")):
        with pytest.raises(ArithmeticError, match=f"of the way from PyTorch's, may be {most}"):
            first.steps(SMALL, DEVICE, lambda: [torch.ones(W) for W in ((8, 12), (12, 8), (8, 8), (8, 8))], precision)
    monkeypatch.setattr(first, "SIZES", SMALL)
    monkeypatch.setattr(first, "KERNELS", [case])
    assert first.main(GIVEN) == 1  # the steps, too: a single one moves nothing
    said = capsys.readouterr().out
    assert "kernel: product: WRONG: ArithmeticError: error " in said and said.splitlines()[-1].startswith("5 wrong, 0")


@interpreted
@pytest.mark.parametrize("case", ["product G_perp of pairs", "product of pairs"])
def test_a_pair_that_lost_its_smaller_half_is_noticed(case, monkeypatch):
    """What a kernel stores or takes as a pair is held to what a pair holds, not to what bfloat16 does."""
    case = next(own for own in KERNELS if own.name == case)
    ops = {p: select("triton", DEVICE, p).stages["pro-klshampoo"] for p in ("faithful", "balanced")}
    for module, name in ((triton_ops, "product"), (product, "product_pair")):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, kernel=kernel, **k: one_half(kernel(*map(one_half, a), **k)))
    with pytest.raises(ArithmeticError, match="error .*e-03 in float32, may be .*e-0[56]"):
        first.kernel(case, SMALL, DEVICE, ops)


def one_half(x):
    """Without lo, of what is a pair."""
    return Pair(torch.stack((x.hi, torch.zeros_like(x.hi)))) if isinstance(x, Pair) else x


def test_steps_that_were_to_come_from_graphs_and_did_not_are_noticed():
    some = Recorded(lambda: None, None)
    optimizer = SimpleNamespace(engine=SimpleNamespace(graphs=Graphs()))
    for replays, fine in (({"one": {"ordinary": some, "refresh": None}}, True), ({}, False), ({"one": {}}, False)):
        optimizer.engine.graphs.replays = replays
        with contextlib.nullcontext() if fine else pytest.raises(RuntimeError, match="no graph was recorded"):
            first.check_recorded(optimizer)
