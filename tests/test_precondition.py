"""The kernel alpha P G_par Q_S diag(a_S) Q_S^T, in one launch, against float64.

B: matrices; M: short side; R: rank.
"""

import math

import pytest
import torch

from prokl.backends.torch_ops import TorchStages
from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.precondition import TILES, TILES_FP64, can_use_precondition, choose_tile, precondition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(2, 70, 33), (3, 130, 16), (1, 7, 60), (2, 1, 1), (2, 1, 40), (1, 40, 1)]  # B, M, R
HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
NAMES = ("P", "G_par", "Q_S", "a_S")
DTYPES = [(SINGLE,) * 4, (SINGLE, SINGLE, HALF, HALF), (SINGLE, SINGLE, torch.bfloat16, SINGLE), (DOUBLE,) * 4]
DTYPES.append((SINGLE, HALF, SINGLE, DOUBLE))


def arguments(B, M, R, dtypes=DTYPES[0], seed=0):
    """P and Q_S as any matrices: a mistaken transpose of either shows."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, M, M), (B, M, R), (B, R, R), (B, R))
    a = {
        name: torch.randn(shape, generator=generator, dtype=DOUBLE).to(DEVICE, dtype)
        for name, shape, dtype in zip(NAMES, shapes, dtypes, strict=True)
    }
    return a | {"a_S": a["a_S"].abs() + 0.1}


def truth(a, alpha):
    return TorchStages(True).precondition(*(a[k].double() for k in NAMES), alpha)


def assert_close(got, a, alpha):
    """Hold the result against float64 within its rounding.

    To first order, in units u of the arithmetic: the sums of M, R and R products err by M + 2 R of the same
    expression in absolute values, the two factors by 4; twice that for tensor cores that truncate and for a
    reference that rounds as well. Each product by TF32 in three parts adds less than 2^-19.
    Measured in the interpreter: at most 0.10 of the bound.
    """
    dtype = launch.arithmetic_dtype(*(a[k] for k in NAMES))
    M, R = a["G_par"].shape[-2:]
    unit = (M + 2 * R + 4) * torch.finfo(dtype).eps + (3 * 2**-19 if dtype == SINGLE and not launch.INTERPRETED else 0)
    assert got.dtype == dtype
    assert got.is_contiguous()
    bound = unit * truth({k: t.abs() for k, t in a.items()}, abs(alpha))
    error = (got.double() - truth(a, alpha)).abs()
    assert (error <= bound).all(), f"{(error / bound).max().item():.2g} of the bound"


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda d: "-".join(str(x)[6:] for x in d))
@pytest.mark.parametrize("B, M, R", SIZES)
def test_result(B, M, R, dtypes):
    a = arguments(B, M, R, dtypes)
    assert_close(precondition(**a, alpha=-0.3), a, -0.3)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("less", [0, 3])
@pytest.mark.parametrize("tile", [*TILES, *TILES_FP64], ids=str)
def test_every_tile(tile, less):
    # Several tiles along every side, with and without a part of one.
    m = tile.m + 2 * tile.k if less == 0 else 2 * tile.m + less
    a = arguments(2, m, tile.n - less, [DOUBLE if tile in TILES_FP64 else SINGLE] * 4)
    assert_close(precondition(**a, alpha=0.7, tile=tile), a, 0.7)


def test_every_tile_is_chosen_for_the_ranks_that_it_holds():
    for tiles, dtype in ((TILES, SINGLE), (TILES_FP64, DOUBLE)):
        most = tiles[0].n
        assert {choose_tile(r, dtype) for r in range(1, most + 1)} == set(tiles)
        assert all(choose_tile(r, dtype).n >= r for r in range(1, most + 1))
        assert choose_tile(most + 1, dtype) is None


def test_float64_scalar_is_not_rounded_to_float32():
    a = arguments(2, 37, 11, (DOUBLE,) * 4)
    assert_close(precondition(**a, alpha=0.1), a, 0.1)


@pytest.mark.usefixtures("poisoned_empty")
def test_a_nan_shows_in_its_matrix_and_nowhere_else():
    a = arguments(2, 70, 11)
    expected = precondition(**a, alpha=0.7)
    a["P"][1, 5, 69] = math.nan
    got = precondition(**a, alpha=0.7)
    assert torch.isnan(got[1, 5]).all()
    got[1, 5] = expected[1, 5]
    assert torch.equal(got, expected)


@pytest.mark.usefixtures("poisoned_empty")
def test_strides_do_not_matter():
    a = arguments(3, 37, 19)

    def gaps(t):
        wide = torch.full((2 * t.shape[0], *(3 * k for k in t.shape[1:])), math.nan, device=DEVICE, dtype=t.dtype)
        return (wide[1::2, 2::3] if t.ndim == 2 else wide[1::2, ::3, 2::3]).copy_(t)

    expected = precondition(**a, alpha=0.7)
    for change in (gaps, lambda t: t.mT.contiguous().mT):
        # All, then one alone: no tensor may be read with another's strides.
        for which in (NAMES, *((name,) for name in NAMES)):
            changed = {k: change(t) if k in which else t for k, t in a.items()}
            assert not any(changed[k].is_contiguous() for k in which)
            got = precondition(**changed, alpha=0.7)
            assert got.is_contiguous()
            assert torch.equal(got, expected)
    for dim in range(3):  # stride 0
        same = {k: t.narrow(dim, 0, 1).expand_as(t) if dim < t.ndim else t for k, t in a.items()}
        expected = precondition(**{k: t.contiguous() for k, t in same.items()}, alpha=0.7)
        assert torch.equal(precondition(**same, alpha=0.7), expected)


@pytest.mark.parametrize("size, stride", [(3, 2**30 + 8), (18, 2**27 + 8)])  # beyond 2^31 in a tile, and at the next
@pytest.mark.parametrize("which, dim", [(name, dim) for name in NAMES for dim in range(2 if name == "a_S" else 3)])
def test_offsets_beyond_32_bits(which, dim, size, stride):
    a = arguments(3, size, size)
    a[which] = a[which].to(HALF)
    expected = precondition(**a, alpha=0.7)
    strides = [size, 1] if a[which].ndim == 3 else [1]
    strides.insert(dim, 2**30 + 8 if dim == 0 else stride)
    base = torch.empty(2**31 + 2**28, device=DEVICE, dtype=HALF)  # virtual memory: few pages are touched
    a[which] = base.as_strided(a[which].shape, strides).copy_(a[which])
    assert torch.equal(precondition(**a, alpha=0.7), expected)


def test_inputs_are_not_written():
    a = arguments(3, 37, 11)
    before = {k: t.clone() for k, t in a.items()}
    precondition(**a, alpha=0.7)
    assert all(torch.equal(a[k], before[k]) for k in NAMES)


def test_no_matrices_give_an_empty_result(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    assert precondition(**arguments(0, 5, 4), alpha=0.7).shape == (0, 5, 4)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_tensor_raises_with_its_name(name):
    a = arguments(3, 37, 11)
    wrong = {
        "shape": a[name][..., None],
        "dtype": a[name].to(torch.int64),
        "is on": a[name].to("meta"),
    }
    for what, t in wrong.items():
        message = rf"^{name} (has )?{what}"
        if name == "P" and what == "is on":
            message = "^P is on meta; must be on one of|^G_par is on"
        with pytest.raises(ValueError, match=message):
            precondition(**(a | {name: t}), alpha=0.7)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"G_par": torch.ones(3, 37, 0)}, r"G_par has shape \(3, 37, 0\); must be \(B, m, r\) with m, r >= 1"),
        ({"P": torch.ones(3, 37, 36, device=DEVICE)}, r"P has shape \(3, 37, 36\); must be \(3, 37, 37\)"),
        ({"Q_S": torch.ones(3, 11, 10, device=DEVICE)}, r"Q_S has shape \(3, 11, 10\); must be \(3, 11, 11\)"),
        ({"precision": "fp32"}, "Invalid precision='fp32'"),
        (arguments(1, 2, TILES[0].n + 1), rf"G_par has r={TILES[0].n + 1}; must be at most {TILES[0].n} in torch.f"),
        ({"tile": Tile(32, 8, 16, 4, 2)}, r"G_par has r=11; must be at most 8 in torch.float32"),
    ],
)
def test_a_value_out_of_bounds_raises_with_the_bound(change, message):
    with pytest.raises(ValueError, match=message):
        precondition(**({"alpha": 0.7} | arguments(3, 37, 11) | change))


def test_the_predicate_says_what_the_launcher_takes():
    for tiles, dtype in ((TILES, SINGLE), (TILES_FP64, DOUBLE)):
        for r in (tiles[0].n, tiles[0].n + 1):
            assert can_use_precondition(*arguments(1, 2, r, (dtype,) * 4).values()) == (r == tiles[0].n)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2]], ids=str)
@pytest.mark.parametrize("precision", launch.PRECISIONS)
def test_error_is_at_most_twice_that_of_torch(dtypes, precision):
    a = arguments(4, 500, 120, dtypes)
    unit = {"ieee": 2**-24, "tf32x3": 2**-22, "tf32": 2**-11}[precision]  # rounding of an operand
    plain = TorchStages(True).precondition(*(a[k].float() for k in NAMES), 0.7)
    got, value = precondition(**a, alpha=0.7, precision=precision), truth(a, 0.7)
    size = truth({k: t.abs() for k, t in a.items()}, 0.7).norm()
    assert (got.double() - value).norm() <= 2 * (plain.double() - value).norm() + 3 * unit * size
