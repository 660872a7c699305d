"""The projection kernel beyond what tests/test_kernels.py asks of every kernel: tensor cores, tiles, dead gradients."""

import math
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import interpreter

from bench.micro.case import Sizes
from prokl.algorithm.stages import Projected
from prokl.kernels import launch
from prokl.kernels.project import TILES, TILES_FP64, TILES_PAIR, choose_tile, project
from prokl.pair import Pair
from tests import tensor_cores
from tests.kernel_cases import BF16, DEVICE, DOUBLE, HALF, PROJECT, SINGLE
from tests.tensor_cores import PairedTensorCores, TensorCores


def arguments(B, M, N, R, dtypes=()):
    return [*PROJECT.make(Sizes(B, M, N, R), dtypes).values()]


@pytest.mark.skipif(not launch.INTERPRETED, reason="looks into the interpreter")
@pytest.mark.parametrize("balanced", [False, True], ids=["faithful", "balanced"])
def test_tensor_cores_sum_the_parts_of_every_tile_from_zero(balanced, monkeypatch):
    """Not into the whole, of which they would cut off a little every time: 3 n / 16 times of pairs."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", tensor_cores.dot)
    G, momentum, U = arguments(2, 5, 333, 20)
    U = Pair.split(U) if balanced else U
    got, wanted = project(G, momentum, U), TensorCores(False).projections(G, momentum, U, None)
    assert all(torch.equal(x, y) for x, y in zip(got[:2], wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True], ids=["faithful", "balanced"])
def test_what_lies_in_the_subspace_leaves_no_complement_whatever_the_long_side(balanced):
    """By tensor cores; measured, of what counts as rounding: at most 0.35, balanced 0.05.

    Of a column of equal entries every tile's sum is the same, and is rounded to the whole in the same direction.
    """
    n, r = 50304, 32
    g = torch.Generator().manual_seed(0)
    stages = (PairedTensorCores if balanced else TensorCores)(host_readable=False)
    basis = torch.cat((torch.ones(n, 1), torch.randn(n, r, generator=g)), dim=1).double()
    basis = torch.linalg.qr(basis)[0].mT
    weights = torch.randn(2, 2, r, generator=g, dtype=DOUBLE)
    weights[1, :, 1:] = 0  # the first gradients lie in all of the subspace, the second ones in the equal entries
    G = weights @ basis[:r]
    U = basis[:r].mT.float().expand(2, n, r)
    U = Pair.split(U) if balanced else U
    noise = stages.noise(n, SINGLE, SINGLE) ** 0.5
    for complement in (0.0, 2 * noise):
        X = (G + complement * G.norm(dim=2, keepdim=True) * basis[r]).float()
        state, h = {"M": torch.zeros_like(X)}, SimpleNamespace(momentum=0.9, gradient_weights=(1.0, 1.0, 0.9))
        h.variant = "pro-klshampoo"
        projected = Projected(*stages.projections(X, state["M"], U, None), None, U, None)
        ahead = stages.momentum(X, projected, None, state, h, None)[1]
        assert ahead.residual.negligible().tolist() == [complement == 0] * 2


def test_every_tile_is_chosen_for_some_rank():
    assert {choose_tile(r, SINGLE) for r in range(1, 300)} == set(TILES)
    assert {choose_tile(r, SINGLE, paired=True) for r in range(1, 300)} == set(TILES_PAIR)
    assert {choose_tile(r, SINGLE, wide=False, paired=True) for r in range(1, 300)} == {TILES_PAIR[2]}  # others spill
    assert {choose_tile(r, DOUBLE) for r in range(1, 300)} == set(TILES_FP64)
    for r in (1, 16, 17, 32, 33, 64):
        assert choose_tile(r, SINGLE).n >= r  # one read of G and M


def test_the_large_tile_is_only_for_loads_of_16_bytes(monkeypatch):
    tiles = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: tiles.append((kwargs["TILE_M"], kwargs["TILE_R"])))
    large, middle, small = ((tile.m, tile.n) for tile in TILES)
    G, momentum, U = arguments(2, 48, 80, 64)
    turned = G.mT.contiguous().mT
    calls = {
        large: [(G, momentum, U), (turned, turned, U), (G[:, :5], momentum[:, :5], U), (G, momentum, U[:, :, :48])],
        middle: [
            (torch.cat((G, G), 2)[:, :, 1:81], momentum, U),
            (G, torch.cat((G, G), 2)[:, :, ::2], U),
            (G, momentum, torch.cat((U, U), 2)[:, :, 1:65]),
            (G, momentum, U.mT.contiguous().mT),
            (G, momentum, U[:, :, :40]),  # the results are unaligned
            (G[:, :, :70].contiguous(), momentum[:, :, :70].contiguous(), U[:, :70]),
            (G, momentum, U[:, :, :32]),
            (G, momentum, U[:, :, :17]),
        ],
        small: [(G, momentum, U[:, :, :16]), (G, momentum, U[:, :, :1])],
    }
    for tile, inputs in calls.items():
        for i in inputs:
            project(*i)
            assert tiles.pop() == tile
    for precision, r, tile in (("tf32", 64, large), ("tf32", 32, middle), ("ieee", 64, large), ("ieee", 32, small)):
        project(G, momentum, U[:, :, :r], precision=precision)
        assert tiles.pop() == tile


@pytest.mark.usefixtures("poisoned_empty")
def test_a_dead_gradient_counts_as_zero_whatever_it_holds():
    G, momentum, U = arguments(4, 37, 50, 11)
    GU, MU, _ = project(G, momentum, U)
    active = torch.tensor([True, False, True, False], device=DEVICE)
    G[1], G[3, 5, 7] = math.nan, math.inf
    for mask in (active, torch.stack((active, ~active), dim=1)[:, 0]):  # contiguous, then with gaps
        got = project(G, momentum, U, active=mask)
        assert torch.equal(got[0][active], GU[active])
        assert not got[0][~active].any()
        assert torch.equal(got[1], MU)


def test_half_operands_are_multiplied_in_half_only_where_all_three_are(monkeypatch):
    constants = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.append(kwargs))
    for dtypes in ((HALF, HALF, HALF), (BF16,) * 3, (HALF, HALF, BF16), (HALF, HALF, SINGLE)):
        project(*arguments(1, 4, 4, 4, dtypes), precision="tf32")
    project(*arguments(1, 4, 4, 4, (HALF, HALF, DOUBLE)), precision="tf32")
    bf16 = ("fp32", "tf32") if launch.INTERPRETED else ("bf16", "ieee")  # the interpreter's bfloat16 products are wrong
    assert [str(c["OPERAND"]) for c in constants] == ["fp16", bf16[0], "fp32", "fp32", "fp64"]
    assert [c["PRECISION"] for c in constants] == ["ieee", bf16[1], "tf32", "tf32", "ieee"]
