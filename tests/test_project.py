"""The projection kernel beyond what tests/test_kernels.py asks of every kernel: tensor cores and tiles."""

from dataclasses import replace

import pytest
import torch
from triton.runtime import interpreter

from bench.micro.case import Sizes
from bench.micro.states import H
from prokl.algorithm.evidence import Admitted, Roots
from prokl.kernels import launch, operands
from prokl.kernels.project import TILES, TILES_PAIR, choose_tile, project
from prokl.pair import Pair
from tests import tensor_cores
from tests.kernel_cases import DOUBLE, PROJECT, SINGLE
from tests.tensor_cores import PairedTensorCores, TensorCores


def arguments(B, M, N, R, dtypes=()):
    return [*PROJECT.make(Sizes(B, M, N, R), dtypes).values()]


@pytest.mark.skipif(not launch.INTERPRETED, reason="looks into the interpreter")
@pytest.mark.parametrize("balanced", [False, True], ids=["faithful", "balanced"])
def test_tensor_cores_sum_the_parts_of_every_tile_from_zero(balanced, monkeypatch):
    """Not into the whole, of which they would cut off a little every time: 3 n / 16 times of pairs."""
    monkeypatch.setattr(operands, "INTERPRETED", False)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", tensor_cores.dot)
    G, momentum, U = arguments(2, 5, 333, 20)
    U = Pair.split(U) if balanced else U
    both, factor = project(G, momentum, U)
    wanted = TensorCores(False).projections(G, momentum, U, torch.eye(20).expand(2, 20, 20))
    assert torch.equal(both[:, 0], wanted.G) and torch.equal(both[:, 1], wanted.M)
    if balanced:
        assert torch.equal(factor.both, Pair.split(wanted.G).both)


@pytest.mark.slow
@pytest.mark.parametrize("balanced", [False, True], ids=["faithful", "balanced"])
def test_a_matrix_in_the_subspace_leaves_no_complement(balanced):
    """The products are tensor cores'; measured, of what counts as rounding: at most 0.35, balanced 0.05.

    For a column of equal entries every tile's sum is the same, and is rounded to the whole in the same direction.
    """
    n, r = 50304, 32
    g = torch.Generator().manual_seed(0)
    ops = (PairedTensorCores if balanced else TensorCores)(host_readable=False)
    basis = torch.cat((torch.ones(n, 1), torch.randn(n, r, generator=g)), dim=1).double()
    basis = torch.linalg.qr(basis)[0].mT
    weights = torch.randn(2, 2, r, generator=g, dtype=DOUBLE)
    weights[1, :, 1:] = 0  # the first gradients lie in all of the subspace, the second ones in the equal entries
    G = weights @ basis[:r]
    U = basis[:r].mT.float().expand(2, n, r)
    U = Pair.split(U) if balanced else U
    noise, one, eye = ops.noise(n, SINGLE, SINGLE), torch.ones(2), torch.eye(r).expand(2, r, r)
    roots = Roots(torch.ones(2, 2), one[:, None], one)
    admitted = Admitted(None, roots, roots, roots.L, roots.S, one, {}, None, None)
    h = replace(H, ns_dtype=SINGLE)
    for complement in (0.0, 2 * noise):
        X = (G + complement * G.norm(dim=2, keepdim=True) * basis[r]).float()
        M = torch.zeros_like(X)
        G_par = ops.subspace_parts(ops.projections(X, M, U, eye), admitted, h, eye, 1.0)[0]
        _, found, _ = ops.momentum(X, M, G_par, U, admitted, h, None)
        assert [bool(x.any()) for x in found] == [complement > 0] * 2


def test_the_tile_is_the_widest_that_fits_the_rank(monkeypatch):
    tiles = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: tiles.append((kwargs["TILE_M"], kwargs["TILE_R"])))
    large, middle, small = ((tile.m, tile.n) for tile in TILES)
    G, momentum, U = arguments(2, 48, 80, 64)
    wide, turned = torch.cat((G, G), 2), G.mT.contiguous().mT
    for tile, given in (
        (large, (G, momentum, U)),
        (large, (turned, turned, U)),
        (middle, (wide[:, :, 1:81], momentum, U)),
        (middle, (G, wide[:, :, ::2], U)),
        (middle, (G, momentum, U.mT.contiguous().mT)),
        (middle, (G, momentum, U[:, :, :40])),  # the results are unaligned
        (middle, (G, momentum, U[:, :, :32])),
        (middle, (G, momentum, U[:, :, :17])),
        (small, (G, momentum, U[:, :, :16])),
    ):
        project(*given)
        assert tiles.pop() == tile
    assert {choose_tile(r, SINGLE, wide=False, paired=True) for r in range(1, 300)} == {TILES_PAIR[2]}  # others spill
    for r in (1, 16, 17, 32, 33, 64):
        assert choose_tile(r, SINGLE).n >= r  # one read of G and M
