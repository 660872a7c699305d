"""The kernel that updates the momentum and forms the residual of its lookahead, against float64.

B: matrices; M: short side; N: long side; R: rank.
"""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from prokl.algorithm.stages import Projected
from prokl.backends.torch_ops import TorchStages
from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.momentum import TILES, TILES_FP64, choose_tile, momentum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(2, 70, 130, 33), (3, 65, 64, 70), (1, 7, 101, 1), (2, 1, 1, 1), (2, 1, 40, 5), (1, 40, 1, 1)]  # B, M, N, R
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
# Gradient, momentum, projection, basis and scale: training in full and in half precision, and mixtures.
DTYPES = [
    (SINGLE, SINGLE, SINGLE, SINGLE, SINGLE),
    (HALF, SINGLE, SINGLE, SINGLE, SINGLE),
    (torch.bfloat16, SINGLE, SINGLE, torch.bfloat16, SINGLE),
    (HALF, HALF, SINGLE, HALF, DOUBLE),
    (DOUBLE, DOUBLE, DOUBLE, DOUBLE, DOUBLE),
    (HALF, SINGLE, DOUBLE, SINGLE, SINGLE),
]
NAMES = ("G", "M", "G_par", "U", "scale")
SCALES = (0.7, 0.0, 1.0)  # of the matrices in turn: bounded, of unknown size, usual
SETTINGS = {"momentum": 0.95, "weights": (0.3, 0.7, 0.9)}  # no two alike, none exact in binary


def arguments(B, M, N, R, dtypes=DTYPES[0], seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, M, N), (B, M, N), (B, M, R), (B, N, R))
    values = [torch.randn(shape, generator=generator, dtype=DOUBLE) for shape in shapes]
    values.append(torch.tensor(SCALES, dtype=DOUBLE).repeat(B)[:B])
    return {name: t.to(DEVICE, dtype) for name, t, dtype in zip(NAMES, values, dtypes, strict=True)}


def call(a, **settings):
    """The momentum after the launch, and what is returned; the arguments stay as they are."""
    new = a["M"].clone(memory_format=torch.preserve_format)
    return [new, *momentum(**(a | {"M": new} | SETTINGS | settings))]


def norms2(t):
    return t.square().sum(dim=(-2, -1))


def truth(a, momentum, weights, **_):
    """New momentum, G_hat_perp, size2 and whole2 in float64, and the sizes that their errors scale with."""
    g, alpha, beta = weights
    G, old, G_par, U = (a[k].double() for k in NAMES[:4])
    if a["scale"] is not None:
        G = G * a["scale"].double()[:, None, None]
    new = momentum * old + g * G
    G_hat = alpha * G + beta * new
    G_hat_perp = G_hat - G_par @ U.mT
    new_size = momentum * old.abs() + g * G.abs()
    hat_size = alpha * G.abs() + beta * new_size
    perp_size = hat_size + G_par.abs() @ U.abs().mT
    return [new, G_hat_perp, norms2(G_hat_perp), norms2(G_hat)], [
        new_size,
        perp_size,
        norms2(perp_size),
        norms2(hat_size),
    ]


def assert_close(got, a, **settings):
    """Hold all four results against float64 within their rounding.

    To first order, in units u of the arithmetic: R products and sums, then at most 8 operations with scalars that
    are rounded once; twice that for tensor cores that truncate and for a reference that rounds as well. A square
    doubles an error, and its sum over a tile and over tiles adds at most 44 u, 22 in each pairwise sum. TF32 in
    three products adds less than 2^-19. The momentum is rounded to its own dtype besides.
    Bits are not compared: for other strides the compiler fuses other multiply-adds, and sums in another order.
    Measured in the interpreter: at most 0.18 of the bounds, but for the momentum's own rounding, which attains it.
    """
    dtype = launch.arithmetic_dtype(*(a[k] for k in NAMES[:4]))
    u = torch.finfo(dtype).eps / 2
    element = 2 * (a["U"].shape[-1] + 8) * u + (2**-19 if dtype == SINGLE and not launch.INTERPRETED else 0)
    units = [10 * u + torch.finfo(a["M"].dtype).eps / 2, element, 2 * element + 44 * u, 20 * u + 44 * u]
    got = [*got[:2], *(parts.sum(dim=1) for parts in got[2:])]
    names = ("M", "G_hat_perp", "size2", "whole2")
    values, sizes = truth(a, **(SETTINGS | settings))
    for name, x, value, size, unit in zip(names, got, values, sizes, units, strict=True):
        assert x.shape == value.shape
        assert x.dtype == (a["M"].dtype if name == "M" else dtype), name
        error = (x.double() - value).abs()
        bound = unit * size + torch.finfo(x.dtype).tiny
        assert (error <= bound).all(), f"{name}: {(error / bound).max().item():.2g} of the bound"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("B, M, N, R", SIZES)
@pytest.mark.parametrize("scaled", [True, False])
def test_all_results(B, M, N, R, dtypes, scaled):
    a = arguments(B, M, N, R, dtypes)
    a |= {} if scaled else {"scale": None}
    got = call(a)
    assert_close(got, a)
    assert all(t.is_contiguous() for t in got[1:])


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("tile", [*TILES, *TILES_FP64], ids=str)
def test_every_tile(tile):
    # More than one tile, and a part of one, along every side.
    a = arguments(2, tile.m + 3, 2 * tile.n + 5, tile.k + 2, [DOUBLE if tile in TILES_FP64 else SINGLE] * 5)
    assert_close(call(a, tile=tile), a)


def test_every_tile_is_chosen_for_some_dtype():
    assert {choose_tile(SINGLE, wide) for wide in (True, False)} == set(TILES)
    assert {choose_tile(DOUBLE, wide) for wide in (True, False)} == set(TILES_FP64)


def test_the_wide_tile_is_only_for_loads_of_16_bytes(monkeypatch):
    widths = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: widths.append(kwargs["TILE_N"]))
    a = arguments(2, 48, 80, 32)
    narrow = {"U": a["U"][:, :, ::2], "G_par": a["G_par"][:, :, ::2]}
    for changed in ({}, {"G": a["G"].mT.contiguous().mT}, narrow, {"G": torch.cat((a["G"],) * 2, 2)[:, :, 1:81]}):
        call(a | changed)
    assert widths == [TILES[0].n] * 2 + [TILES[1].n] * 2


def torch_form(a, momentum, weights):
    """The new momentum, G^ U for some projections, and the residual of it."""
    G, M, G_tilde, U = (a[k].clone() for k in NAMES[:4])  # G and M are overwritten
    h = SimpleNamespace(momentum=momentum, gradient_weights=weights, variant="pro-klshampoo")
    projected = Projected(G_tilde, G_tilde.flip(1), None, U, None)
    M, ahead = TorchStages(True).momentum(G, projected, a["scale"], {"M": M}, h, None)
    return M, ahead.G_par, ahead.residual.G_hat_perp


@pytest.mark.parametrize("weights", [(1, 1, 0.95), (0.05, 0, 1), (1, 0, 1)])
def test_the_same_as_the_torch_form(weights):
    # The three ways that momentum is put together; float64 shows any difference in the algebra.
    a = arguments(2, 37, 50, 11, [DOUBLE] * 5)
    for scale in (a["scale"], None):
        M, G_par, residual = torch_form(a | {"scale": scale}, 0.95, weights)
        for x, y in zip(call(a | {"scale": scale, "G_par": G_par}, weights=weights), (M, residual), strict=False):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_scale_of_one_changes_nothing_and_one_of_zero_takes_the_gradient_away():
    a = arguments(2, 37, 50, 11)
    for value, other in ((1.0, a), (0.0, a | {"G": torch.zeros_like(a["G"])})):
        assert_close(call(a | {"scale": torch.full((2,), value, device=DEVICE)}), other | {"scale": None})


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("masked", [False, True])
def test_the_scale_is_its_matrix_own_and_comes_before_any_square(masked):
    # Such a gradient's own squares are beyond float32; bounded, it is of the momentum's size.
    a = arguments(3, 37, 50, 11)
    a["G"][0] *= 1e23
    a["scale"] = torch.tensor([1e-23, 1.0, 0.5], device=DEVICE)
    if not masked:
        assert_close(call(a), a)
        return
    got = call(a, active=torch.tensor([True, True, False], device=DEVICE))
    assert torch.equal(got[0][2], a["M"][2])
    a["G"][2] = 0
    assert_close([torch.cat((got[0][:2], call(a)[0][2:])), *got[1:]], a)


def test_the_momentum_enters_before_it_is_rounded():
    a, settings = arguments(2, 37, 50, 11, (HALF, HALF, SINGLE, SINGLE, SINGLE)), {"weights": (0.3, 0.0, 1.0)}
    got = call(a, **settings)
    assert_close(got, a, **settings)
    got[1] = got[0].float() - a["G_par"] @ a["U"].mT  # what the rounded one would leave
    with pytest.raises(AssertionError, match="G_hat_perp"):
        assert_close(got, a, **settings)


def test_float64_scalars_are_not_rounded_to_float32():
    a = arguments(2, 37, 50, 11, [DOUBLE] * 5)
    settings = {"momentum": 0.95 + 2**-40, "weights": (0.1 + 2**-40, 0.7 - 2**-40, 0.9 + 2**-40)}
    assert_close(call(a, **settings), a, **settings)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("hat", [True, False])
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_dead_gradient_counts_as_zero_and_leaves_the_momentum_bit_for_bit(dtype, hat):
    a = arguments(4, 37, 50, 11, (dtype, dtype, SINGLE, SINGLE, SINGLE))
    a["M"][1, 2, 3] = -0.0
    active = torch.tensor([True, False, True, False], device=DEVICE)
    zero = a | {"G": torch.where(active[:, None, None], a["G"], 0)}
    a |= {} if hat else {"G_par": None}
    expected = call(zero | {"G_par": a["G_par"]})
    a["G"][1], a["G"][3, 5, 7] = math.nan, math.inf
    for mask in (active, torch.stack((active, ~active), dim=1)[:, 0]):  # contiguous, then with gaps
        got = call(a, active=mask)
        assert torch.equal(got[0][~active].view(torch.uint8), a["M"][~active].view(torch.uint8))
        assert torch.equal(got[0][active], expected[0][active])
        for x, y in itertools.islice(zip(got, expected, strict=True), 1, None):
            assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.usefixtures("poisoned_empty")
def test_without_hat_only_the_momentum():
    a = arguments(2, 70, 130, 33)
    new, *rest = call(a | {"G_par": None})
    assert rest == [None] * 3
    assert torch.equal(new, call(a)[0])


def test_a_live_nan_shows_in_its_matrix_and_nowhere_else():
    a = arguments(2, 37, 50, 11)
    expected = call(a)
    a["G"][1, 5, 49] = math.nan
    for x, y in zip(call(a), expected, strict=True):
        assert torch.equal(x[0], y[0])
        assert torch.isnan(x[1]).sum() == 1


@pytest.mark.usefixtures("poisoned_empty")
def test_strides_do_not_matter():
    a = arguments(3, 37, 50, 19)

    def gaps(t):
        wide = torch.full([2 * x + 1 for x in t.shape], math.nan, device=DEVICE, dtype=t.dtype)
        return wide[(slice(1, None, 2),) * t.ndim].copy_(t)

    def transposed(t):
        return t.mT.contiguous().mT if t.ndim == 3 else gaps(t)

    def permuted(t):
        return t.permute(1, 2, 0).contiguous().permute(2, 0, 1) if t.ndim == 3 else gaps(t)

    def updated(b):
        return [b["M"], *momentum(**b, **SETTINGS)]

    for change in (gaps, transposed, permuted):
        # All, then one alone: no tensor may be read with another's strides.
        for which in (NAMES, *((name,) for name in NAMES)):
            changed = {k: change(t) if k in which else t.clone() for k, t in a.items()}
            assert not any(changed[k].is_contiguous() for k in which)
            got = updated(changed)
            assert_close(got, a)
            assert all(t.is_contiguous() for t in got[1:])
    for dim in range(3):  # stride 0
        same = {k: t.narrow(dim if t.ndim == 3 else 0, 0, 1).expand_as(t) for k, t in a.items()}
        assert_close(updated(same | {"M": same["M"].contiguous()}), same)


@pytest.mark.parametrize("size, stride", [(3, 2**30 + 8), (18, 2**27 + 8)])  # beyond 2^31 in a tile, and at the next
@pytest.mark.parametrize("which", NAMES[:4])
@pytest.mark.parametrize("dim", range(3))
def test_offsets_beyond_32_bits(which, dim, size, stride):
    a = arguments(3, size, size, size)
    a[which] = a[which].to(HALF)
    near = a | {"M": a["M"].clone()}
    strides = [size, 1]
    strides.insert(dim, 2**30 + 8 if dim == 0 else stride)
    base = torch.empty(2**31 + 2**28, device=DEVICE, dtype=HALF)  # virtual memory: few pages are touched
    a[which] = base.as_strided((3, size, size), strides).copy_(a[which])
    assert_close([a["M"], *momentum(**a, **SETTINGS)], near)


def test_offsets_of_scale_and_active_beyond_32_bits():
    a = arguments(3, 5, 7, 3)
    active = torch.tensor([True, False, True], device=DEVICE)
    expected = call(a, active=active)
    far = {
        "scale": torch.empty(2**31 + 2**28, device=DEVICE, dtype=SINGLE),  # virtual memory: few pages are touched
        "active": torch.empty(2**31 + 2**28, device=DEVICE, dtype=torch.bool),
    }
    for name, t in {"scale": a["scale"], "active": active}.items():
        moved = far[name].as_strided((3,), (2**30 + 8,)).copy_(t)
        got = call(a, **({"active": active} | {name: moved}))
        assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_only_the_momentum_is_written():
    a = arguments(3, 37, 50, 11) | {"active": torch.tensor([True, False, True], device=DEVICE)}
    before = {k: t.clone() for k, t in a.items()}
    momentum(**a, **SETTINGS)
    assert [k for k in a if not torch.equal(a[k], before[k])] == ["M"]


def test_no_matrices_give_empty_results(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    got = momentum(**arguments(0, 5, 9, 4), **SETTINGS)
    assert [tuple(t.shape) for t in got] == [(0, 5, 9), (0, 1), (0, 1)]


@pytest.mark.parametrize("name", [*NAMES, "active"])
def test_a_wrong_tensor_raises_with_its_name(name):
    a = arguments(3, 37, 50, 11) | {"active": torch.ones(3, dtype=torch.bool, device=DEVICE)}
    wrong = {
        "shape": a[name][..., None],
        "dtype": a[name].to(SINGLE if name == "active" else torch.int64),
        "is on": a[name].to("meta"),
    }
    for what, t in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name} (has )?{what}"):
            momentum(**(a | SETTINGS | {name: t}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"G": torch.ones(3, 0, 50)}, r"G has shape \(3, 0, 50\); must be \(B, m, n\) with m, n >= 1"),
        ({"U": torch.ones(3, 50, 0)}, r"U has shape \(3, 50, 0\); must be \(B, n, r\) with r >= 1"),
        ({"U": torch.ones(3, 49, 11, device=DEVICE)}, r"U has shape \(3, 49, 11\); must be \(3, 50, 11\)"),
        ({"M": torch.ones(3, 37, 1, device=DEVICE).expand(3, 37, 50)}, r"M has strides \(37, 1, 0\); must not be exp"),
        ({"scale": torch.ones(1, device=DEVICE)}, r"scale has shape \(1,\); must be \(3,\)"),
        ({"scale": torch.tensor(1.0, device=DEVICE)}, r"scale has shape \(\); must be \(3,\)"),
        ({"precision": "fp32"}, "Invalid precision='fp32'"),
    ],
)
def test_a_value_out_of_bounds_raises_with_the_bound(change, message):
    with pytest.raises(ValueError, match=message):
        momentum(**(arguments(3, 37, 50, 11) | SETTINGS | change))


def test_a_tile_given_by_hand_is_the_one_that_is_launched(monkeypatch):
    constants = {}
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: constants.update(kwargs, grid=args[1]))
    momentum(**arguments(2, 70, 40, 20), **SETTINGS, tile=Tile(32, 16, 8, 2, 5))
    names = ("TILE_M", "TILE_N", "TILE_R", "num_warps", "num_stages", "grid")
    assert [constants[k] for k in names] == [32, 16, 8, 2, 5, (2 * 3 * 3,)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [DTYPES[0], (torch.bfloat16, *DTYPES[0][1:]), DTYPES[2]], ids=str)
@pytest.mark.parametrize("precision", launch.PRECISIONS)
def test_error_is_at_most_twice_that_of_torch(dtypes, precision):
    a = arguments(4, 200, 700, 120, dtypes)
    unit = {"ieee": 2**-24, "tf32x3": 2**-22, "tf32": 2**-11}[precision]  # rounding of an operand
    M, G_par, residual = torch_form(a | {k: a[k].float() for k in NAMES[:4]}, *SETTINGS.values())
    a["G_par"] = G_par
    plain = M, residual
    values, sizes = truth(a, **SETTINGS)
    for x, y, value, size in zip(call(a, precision=precision), plain, values, sizes, strict=False):
        rounding = max(unit, torch.finfo(x.dtype).eps / 2)  # the plain momentum is not rounded to its dtype
        assert (x.double() - value).norm() <= 2 * (y.double() - value).norm() + rounding * size.norm()
