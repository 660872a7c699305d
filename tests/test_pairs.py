"""Pairs of bfloat16 and the kernels over them, against float64 and against PyTorch's form of the same halves.

The halves must be those of PyTorch bit for bit: what training pays for balanced products is studied there.
"""

import pytest
import torch

import prokl
from prokl.backends.torch_pairs import PairedStages
from prokl.kernels.launch import Tile
from prokl.kernels.momentum import TILES_HALF as MOMENTUM_TILES
from prokl.kernels.momentum import momentum
from prokl.kernels.product import TILES_HALF, product, product_pair, row_energies
from prokl.kernels.project import TILES_PAIR, project
from prokl.kernels.split import split
from prokl.kernels.symmetric_product import TILES_HALF as SYMMETRIC_TILES
from prokl.kernels.symmetric_product import symmetric_product, symmetric_product_pair
from prokl.pair import Pair, parts
from tests.problems import made

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = torch.finfo(torch.float32).eps
SMALL = [Tile(16, 16, 16, 4, 2), Tile(32, 16, 32, 4, 2)]
OPS = PairedStages(host_readable=False)


def randn(*shape, seed=0, spread=3.0):
    """Draw numbers of many sizes."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * torch.exp(spread * torch.randn(shape, generator=g))).to(DEVICE)


def bound(left, right, depth):
    """Return what float32 sums of the parts of left right may be off by, element by element: (depth eps) |A| |B|."""
    return 4 * (depth + 2) * EPS * (left.whole().double().abs() @ right.whole().double().abs())


def exact(left, right):
    """Return left right in float64 but for lo lo, which no product of pairs has."""
    return sum(a.double() @ b.double() for a, b in parts(left, right))


def test_a_pair_holds_sixteen_bits_and_its_sum_is_exact():
    x = randn(4, 999, spread=20.0)
    pair = Pair.split(x)
    error = (pair.whole().double() - x.double()).abs() / x.double().abs()
    assert error.max() <= 2**-17  # eight bits and half of a unit in the last place, twice
    assert torch.equal(pair.whole().double(), pair.hi.double() + pair.lo.double())
    assert torch.equal(Pair.split(pair.whole()).whole(), pair.whole())
    assert not Pair.split(x.bfloat16().float()).lo.any()


def test_the_parts_of_a_product_are_those_that_count():
    x, y = Pair.split(randn(1, 5, 7)), Pair.split(randn(1, 7, 3, seed=1))
    assert [(a is not None, b is not None) for a, b in parts(x, y)] == [(True, True)] * 3
    whole = x.whole().double() @ y.whole().double()
    left_out = (exact(x, y) - whole).abs()
    assert 0 < (left_out / (x.whole().double().abs() @ y.whole().double().abs())).max() <= 2**-16
    bf16 = x.hi
    assert len(parts(bf16, y)) == 2 and len(parts(bf16, y.hi)) == 1
    assert torch.equal(exact(bf16, y), bf16.double() @ y.whole().double())  # nothing is left out beside bfloat16


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", [(3,), (2, 5, 7), (1, 64, 65), (4, 0, 3)])
def test_the_kernel_splits_as_pytorch_bit_for_bit(shape):
    x = randn(*shape, spread=20.0)
    assert torch.equal(split(x).both, Pair.split(x).both)
    if x.ndim == 3:
        assert torch.equal(split(x.mT).both, Pair.split(x.mT).both)


def test_only_float32_is_split():
    with pytest.raises(ValueError, match="x has dtype torch.float64"):
        split(torch.ones(2, dtype=torch.float64, device=DEVICE))


SHAPES = [(2, 33, 47, 20), (1, 5, 130, 70), (3, 1, 1, 1), (1, 64, 64, 64)]  # batch, m, k, n
SIDED = [
    *(("both", shape, tile) for shape in SHAPES for tile in (None, *SMALL)),
    *((side, shape, None) for shape in SHAPES for side in ("left", "right")),
    *((side, SHAPES[0], SMALL[0]) for side in ("left", "right")),
]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("side, shape, tile", SIDED, ids=str)
def test_a_product_of_pairs_is_the_sum_of_its_parts(side, shape, tile):
    batch, m, k, n = shape
    A, B = Pair.split(randn(batch, m, k)), Pair.split(randn(batch, n, k, seed=1)).mT
    if side != "both":  # the other holds bfloat16 numbers, and stands there as such
        A, B = (A, Pair.split(B.hi.float())) if side == "left" else (Pair.split(A.hi.float()), B)
    given = {"both": (A, B), "left": (A, B.hi), "right": (A.hi, B)}[side]
    C = randn(batch, m, n, seed=2)
    wanted, allowed = exact(A, B), bound(A, B, k)
    assert ((product(*given, tile=tile).double() - wanted).abs() <= allowed).all()
    D = product(*given, C=C, alpha=-0.5, beta=2.0, tile=tile)
    full = 2.0 * C.double() - 0.5 * wanted
    assert ((D.double() - full).abs() <= allowed + 4 * EPS * (full.abs() + C.double().abs())).all()
    assert torch.equal(product_pair(*given, C=C, tile=tile).both, split(product(*given, C=C, tile=tile)).both)
    assert ((D - OPS.product(*given, C=C, alpha=-0.5, beta=2.0)).abs() <= 2 * (allowed + 8 * EPS * C.abs())).all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", [None, *SMALL], ids=str)
@pytest.mark.parametrize("batch, m, k, n", SHAPES)
def test_row_energies_are_the_squared_norms_of_rows_that_are_not_stored(batch, m, k, n, tile):
    A, B = Pair.split(randn(batch, k, m)).mT, Pair.split(randn(batch, k, n, seed=1))
    found = row_energies(A, B, tile=tile).sum(dim=1)  # of parts
    D = exact(A, B)
    allowed = (2 * D.abs() * bound(A, B, k)).sum(-1) + 4 * (n + 2) * EPS * D.square().sum(-1)
    assert found.shape == (batch, m)
    assert ((found.double() - D.square().sum(-1)).abs() <= allowed).all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", [None, SMALL[0]], ids=str)
@pytest.mark.parametrize("batch, m, k, n", SHAPES)
def test_a_symmetric_product_of_a_pair(batch, m, k, n, tile):
    A = Pair.split(randn(batch, m, k))
    C = randn(batch, m, m, seed=3)
    C = C + C.mT
    D = symmetric_product(A, C=C, alpha=0.5, beta=0.25, tile=tile)
    wanted, allowed = exact(A, A.mT), bound(A, A.mT, k)
    full = 0.5 * wanted + 0.25 * C.double()
    assert torch.equal(D, D.mT)
    assert ((D.double() - full).abs() <= allowed + 4 * EPS * (full.abs() + C.double().abs())).all()
    pair = symmetric_product_pair(A, tile=tile)
    assert torch.equal(pair.both, split(symmetric_product(A, tile=tile)).both)
    assert torch.equal(pair.both, pair.mT.both)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", [*TILES_HALF, *SYMMETRIC_TILES], ids=str)
def test_every_tile_of_a_product_takes_pairs(tile):
    A, B = Pair.split(randn(1, tile.m + 3, 2 * tile.k + 5)), Pair.split(randn(1, 2 * tile.k + 5, tile.n + 2, seed=1))
    assert ((product(A, B, tile=tile).double() - exact(A, B)).abs() <= bound(A, B, A.shape[2])).all()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("gradient", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [None, *TILES_PAIR], ids=str)
def test_the_projection_onto_a_pair(gradient, state, tile):
    m, n, r = (70, 45, 9) if tile is None else (tile.m + 3, 2 * tile.k + 5, tile.n + 2)
    G, M, U = randn(2, m, n).to(gradient), randn(2, m, n, seed=1).to(state), randn(2, n, r, seed=2)
    active = torch.tensor([True, False], device=DEVICE)
    GU, MU, both = project(G, M, split(U), active, tile=tile)
    assert torch.equal(both.both, Pair.split(GU).both)
    U = Pair.split(U)
    for found, x in ((GU[:1], G[:1]), (MU, M)):
        x, u = Pair.split(x.float()), Pair(U.both[:, : len(x)])
        assert ((found.double() - exact(x, u)).abs() <= bound(x, u, n)).all()
    assert not GU[1].any()


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("tile", [None, *MOMENTUM_TILES, SMALL[0]], ids=str)
def test_the_residual_of_the_momentum_is_stored_as_a_pair(tile, scaled):
    G, M, U, G_par = randn(2, 70, 75), randn(2, 70, 75, seed=1), randn(2, 75, 9, seed=2), randn(2, 70, 9, seed=3)
    scale = torch.tensor([0.5, 1.0], device=DEVICE) if scaled else None
    fixed = {"momentum": 0.9, "weights": (1.0, 1.0, 0.9), "scale": scale}
    c = 1.0 if scale is None else scale[:, None, None]
    old = M.double()
    residual, size, whole = momentum(G, M, split(G_par), split(U), tile=tile, **fixed)
    # The momentum itself takes no product: at most four roundings, of 0.9, of two products and of their sum.
    assert ((M - (0.9 * old + c * G)).abs() <= 2 * EPS * (0.9 * old.abs() + (c * G).abs())).all()
    G_hat = (c * G).double() + 0.9 * M.double()
    par, u = Pair.split(G_par), Pair.split(U).mT
    wanted = G_hat - exact(par, u)
    allowed = bound(par, u, 9) + 8 * EPS * (G_hat.abs() + (c * G).double().abs()) + 2**-16 * wanted.abs()
    assert isinstance(residual, Pair)
    assert ((residual.whole().double() - wanted).abs() <= allowed).all()
    assert torch.allclose(size.double().sum(1), wanted.square().sum((1, 2)), rtol=1e-3)
    assert torch.allclose(whole.double().sum(1), G_hat.square().sum((1, 2)), rtol=1e-5)


def test_beside_a_pair_stands_a_pair_or_bfloat16():
    A, B = Pair.split(randn(1, 3, 4)), randn(1, 4, 5)
    with pytest.raises(ValueError, match="B has dtype torch.float32; must be one of .*bfloat16"):
        product(A, B)
    with pytest.raises(ValueError, match="Only one of G_par and U is a pair"):
        momentum(
            randn(1, 3, 4), randn(1, 3, 4), randn(1, 3, 2), split(randn(1, 4, 2)), momentum=0.9, weights=(1.0, 1.0, 0.9)
        )
    with pytest.raises(ValueError, match="float64 was to be split"):
        product_pair(randn(1, 3, 4).double(), randn(1, 4, 5).double())


@pytest.mark.parametrize("structure", ["equal columns", "signs", "two columns"])
def test_a_gradient_inside_the_subspace_leaves_no_residual_for_newton_schulz(structure):
    """The roundings of pairs add up where entries are alike: 2.7e-5 of the gradient was seen, above float32's bound."""
    g = torch.Generator().manual_seed(0)
    for n in range(9, 40):
        W = torch.nn.Parameter(torch.zeros(8, n))
        optimizer = made(prokl.ProKLShampoo, [W], lr=1.0, rank=4, alpha_kl=0.0, backend="torch", precision="balanced")
        row = {"equal columns": torch.ones(n), "two columns": (torch.arange(n) < 2).float()}.get(
            structure, torch.randn(n, generator=g).sign()
        )
        for _ in range(6):
            W.grad = torch.randn(8, 1, generator=g) * row
            optimizer.step()
        assert not W.any(), n
