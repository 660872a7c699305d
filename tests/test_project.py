"""The projection kernel, G @ U and M @ U in one launch, against float64.

B: matrices; M: short side; N: long side; R: rank.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import interpreter

from prokl.algorithm.stages import Projected
from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.project import TILES, TILES_FP64, TILES_PAIR, choose_tile, project
from prokl.pair import Pair
from tests import tensor_cores
from tests.tensor_cores import PairedTensorCores, TensorCores

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(2, 70, 130, 33), (3, 65, 64, 130), (1, 7, 101, 1), (2, 1, 1, 1), (2, 1, 40, 5), (1, 40, 1, 1)]  # B, M, N, R
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
# Gradient, momentum and basis: those of training in full and in half precision, and mixtures.
DTYPES = [
    (SINGLE, SINGLE, SINGLE),
    (HALF, SINGLE, SINGLE),
    (torch.bfloat16, SINGLE, SINGLE),
    (HALF, HALF, HALF),
    (SINGLE, HALF, torch.bfloat16),
    (DOUBLE, DOUBLE, DOUBLE),
    (HALF, SINGLE, DOUBLE),
]


def arguments(B, M, N, R, dtypes=(SINGLE, SINGLE, SINGLE), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, M, N), (B, M, N), (B, N, R))
    return [
        torch.randn(shape, generator=generator, dtype=DOUBLE).to(DEVICE, dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def assert_is_projection(got, X, U):
    """Hold X U against float64 within the rounding of a sum of N products, element by element.

    N products and sums in the dtype of the sum err by at most N u |X| |U| to first order, twice that where tensor
    cores truncate or where the float64 reference rounds as well; leaving out the product of the two low parts of
    TF32, and rounding these, by less than 2^-19 |X| |U|. Measured in the interpreter: at most 0.48 of the bound.
    """
    assert got.is_contiguous()
    X, U = X.double(), U.double()
    unit = X.shape[-1] * torch.finfo(got.dtype).eps + (2**-19 if got.dtype == SINGLE and not launch.INTERPRETED else 0)
    bound = unit * (X.abs() @ U.abs())
    error = (got.double() - X @ U).abs()
    assert (error <= bound).all(), f"{(error / bound).max().item():.2g} of the bound"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("B, M, N, R", SIZES)
def test_both_products(B, M, N, R, dtypes):
    G, momentum, U = arguments(B, M, N, R, dtypes)
    GU, MU, _ = project(G, momentum, U)
    assert GU.shape == MU.shape == (B, M, R)
    assert GU.dtype == MU.dtype == (DOUBLE if DOUBLE in dtypes else SINGLE)
    assert_is_projection(GU, G, U)
    assert_is_projection(MU, momentum, U)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", [*TILES, *TILES_FP64], ids=str)
def test_every_tile(tile):
    dtype = DOUBLE if tile in TILES_FP64 else SINGLE
    # More than one tile, and a part of one, along every side.
    G, momentum, U = arguments(2, tile.m + 3, 2 * tile.k + 5, tile.n + 2, (dtype,) * 3)
    GU, MU, _ = project(G, momentum, U, tile=tile)
    assert_is_projection(GU, G, U)
    assert_is_projection(MU, momentum, U)


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
    n, r = 50304, 128
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


def test_a_live_nan_shows_in_its_row_and_nowhere_else():
    G, momentum, U = arguments(2, 37, 50, 11)
    GU, MU, _ = project(G, momentum, U)
    G[1, 5, 49] = math.nan
    got = project(G, momentum, U)
    assert torch.isnan(got[0][1, 5]).all()
    got[0][1, 5] = GU[1, 5]
    assert torch.equal(got[0], GU)
    assert torch.equal(got[1], MU)


@pytest.mark.usefixtures("poisoned_empty")
def test_strides_do_not_matter():
    inputs = arguments(3, 37, 50, 19)

    def gaps(t):
        wide = torch.full((2 * t.shape[0], 2 * t.shape[1], 3 * t.shape[2]), math.nan, device=DEVICE, dtype=t.dtype)
        return wide[1::2, ::2, 2::3].copy_(t)

    expected = project(*inputs)
    for change in (gaps, lambda t: t.mT.contiguous().mT, lambda t: t.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        changed = [change(t) for t in inputs]
        assert not any(t.is_contiguous() for t in changed)
        # All, then one alone: no tensor may be read with another's strides.
        for which in (range(3), [0], [1], [2]):
            got = project(*(changed[i] if i in which else inputs[i] for i in range(3)))
            assert all(torch.equal(x, y) and x.is_contiguous() for x, y in zip(got, expected, strict=True))
    for dim in range(3):  # stride 0
        same = [t.narrow(dim, 0, 1).expand_as(t) for t in inputs]
        got = project(*same)
        expected = project(*(t.contiguous() for t in same))
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("size, stride", [(3, 2**30 + 8), (18, 2**27 + 8)])  # beyond 2^31 in a tile, and at the next
@pytest.mark.parametrize("which", range(3), ids="GMU")
@pytest.mark.parametrize("dim", range(3))
def test_offsets_beyond_32_bits(which, dim, size, stride):
    dtypes = [SINGLE] * 3
    dtypes[which] = HALF
    inputs = arguments(3, size, size, size, dtypes)
    expected = project(*inputs)
    strides = [size, 1]
    strides.insert(dim, 2**30 + 8 if dim == 0 else stride)
    base = torch.empty(2**31 + 2**28, device=DEVICE, dtype=HALF)  # virtual memory: few pages are touched
    inputs[which] = base.as_strided((3, size, size), strides).copy_(inputs[which])
    assert all(torch.equal(x, y) for x, y in zip(project(*inputs), expected, strict=True))


def test_inputs_are_not_written():
    inputs = [*arguments(3, 37, 50, 11), torch.tensor([True, False, True], device=DEVICE)]
    before = [t.clone() for t in inputs]
    project(*inputs[:3], active=inputs[3])
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


def test_no_matrices_give_empty_results(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    GU, MU, _ = project(*arguments(0, 5, 9, 4))
    assert GU.shape == MU.shape == (0, 5, 4)


def test_half_operands_are_multiplied_in_half_only_where_all_three_are(monkeypatch):
    constants = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.append(kwargs))
    for dtypes in ((HALF, HALF, HALF), (torch.bfloat16,) * 3, (HALF, HALF, torch.bfloat16), (HALF, HALF, SINGLE)):
        project(*arguments(1, 4, 4, 4, dtypes), precision="tf32")
    project(*arguments(1, 4, 4, 4, (HALF, HALF, DOUBLE)), precision="tf32")
    bf16 = ("fp32", "tf32") if launch.INTERPRETED else ("bf16", "ieee")  # the interpreter's bfloat16 products are wrong
    assert [str(c["OPERAND"]) for c in constants] == ["fp16", bf16[0], "fp32", "fp32", "fp64"]
    assert [c["PRECISION"] for c in constants] == ["ieee", bf16[1], "tf32", "tf32", "ieee"]


@pytest.mark.parametrize("name", ["G", "M", "U", "active"])
def test_a_wrong_tensor_raises_with_its_name(name):
    a = dict(zip("GMU", arguments(3, 37, 50, 11), strict=True))
    a["active"] = torch.ones(3, dtype=torch.bool, device=DEVICE)
    wrong = {
        "shape": a[name][..., None],
        "dtype": a[name].to(SINGLE if name == "active" else torch.int64),
        "is on": a[name].to("meta"),
    }
    for what, t in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name} (has )?{what}"):
            project(**(a | {name: t}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"G": torch.ones(3, 0, 50)}, r"G has shape \(3, 0, 50\); must be \(B, m, n\) with m, n >= 1"),
        ({"U": torch.ones(3, 50, 0)}, r"U has shape \(3, 50, 0\); must be \(B, n, r\) with r >= 1"),
        ({"U": torch.ones(3, 49, 11, device=DEVICE)}, r"U has shape \(3, 49, 11\); must be \(3, 50, 11\)"),
        ({"M": torch.ones(2, 37, 50, device=DEVICE)}, r"M has shape \(2, 37, 50\); must be \(3, 37, 50\)"),
        ({"precision": "fp32"}, "Invalid precision='fp32'"),
    ],
)
def test_a_value_out_of_bounds_raises_with_the_bound(change, message):
    with pytest.raises(ValueError, match=message):
        project(**(dict(zip("GMU", arguments(3, 37, 50, 11), strict=True)) | change))


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 3, (torch.bfloat16, SINGLE, SINGLE), (SINGLE,) * 3], ids=str)
@pytest.mark.parametrize("precision", launch.PRECISIONS)
def test_error_is_at_most_twice_that_of_torch(dtypes, precision):
    G, momentum, U = arguments(4, 200, 700, 120, dtypes)
    unit = {"ieee": 2**-24, "tf32x3": 2**-22, "tf32": 2**-11}[precision]
    for X, got in zip((G, momentum), project(G, momentum, U, precision=precision), strict=False):
        truth = X.double() @ U.double()
        # torch rounds a bfloat16 result, the kernel does not; TF32 rounds each operand.
        plain = (X.to(U.dtype) @ U).double()
        size = (X.double().abs() @ U.double().abs()).norm()
        assert (got.double() - truth).norm() <= 2 * (plain - truth).norm() + unit * size


def test_a_tile_given_by_hand_is_the_one_that_is_launched(monkeypatch):
    constants = {}
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.update(kwargs, grid=args[1]))
    project(*arguments(2, 70, 40, 20), tile=Tile(32, 16, 8, 2, 5))
    names = ("TILE_M", "TILE_R", "TILE_N", "num_warps", "num_stages", "grid")
    assert [constants[k] for k in names] == [32, 16, 8, 2, 5, (2 * 3 * 2,)]
