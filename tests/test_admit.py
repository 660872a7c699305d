"""The kernel of the decision about a gradient and of the eigenvalue EMA beside its PyTorch form.

Whole steps hold that form to the reference and to a transcription: tests/test_batched_step.py, test_against_paper.py.

B: matrices; M: short side; N: long side; R: rank.
"""

import math

import pytest
import torch

from prokl.algorithm import evidence
from prokl.kernels.admit import ELEMENTS, MAX_TILE_ROWS
from tests.kernel_cases import BF16, DEVICE, DOUBLE, HALF, SINGLE, TRITON, decided, flat

SIZES = [
    (1, 1, 2, 1),
    (3, 5, 9, 4),
    (2, 70, 130, 33),
    (1, MAX_TILE_ROWS + 7, MAX_TILE_ROWS + 100, ELEMENTS // 64 + 1),
]  # B, M, N, R
KINDS = ("usual", "beyond", "silent", "row", "column")
"""Kinds of gradients by a matrix's state: of a usual size, ten times it, a thousandth, or with one large row or
column."""


def arguments(B, M, N, R, *, dtype=SINGLE, auto=True, kinds=KINDS, seed=0):
    """A, G_tilde, e_res and a state that predicts gradients of size one; ceilings act on some values only."""
    g = torch.Generator().manual_seed(seed)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=g, dtype=DOUBLE)

    s_L, s_S, s_mu = uniform(0.5, 2, B, M), uniform(0.5, 2, B, R), uniform(0.5, 2, B)
    A = torch.randn(B, M, R, generator=g, dtype=DOUBLE) / s_L[:, :, None] / s_S[:, None, :]
    e_res = (N - R) * uniform(0.5, 1.5, B, M) / (s_L * s_mu[:, None]).square()
    for b in range(B):
        kind = kinds[b % len(kinds)]
        size = {"beyond": 10.0, "silent": 1e-3}.get(kind, 1.0)
        A[b] *= size
        e_res[b] *= size**2
        if kind == "row":
            A[b, 0] *= 12
        if kind == "column":
            A[b, :, 0] *= 12
    given = {"A": A, "G_tilde": A * uniform(0.9, 1.1, B, M, R), "e_res": e_res}
    given |= {"inv_sqrt_lambda_L": s_L, "inv_sqrt_lambda_S": s_S, "inv_sqrt_mu": s_mu}
    given |= {"lambda_0": uniform(0.5, 1.5, B)} if auto else {}
    return {name: t.to(DEVICE, dtype) for name, t in given.items()} | {"n": N, "M": dtype}


def agree(got, expected):
    """Both compute in float64, with sums in another order, and round once: one unit in the last place of float32.

    Of float64 the sums, none of whose terms is negative, are over 1031 rows, some 33 tiles after one another and a tree
    in each, and over 65 columns: some 40 roundings of half an eps on either side, which the roots halve, and a few
    more. Measured: 3.2 eps, of float32 0.98.
    """
    got, expected = flat(got), flat(expected)
    assert got.keys() == expected.keys()
    for name, x in got.items():
        y = expected[name]
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        if x.dtype == torch.bool:
            assert torch.equal(x, y), name
        else:
            limit = (1.01 if x.dtype == SINGLE else 16) * torch.finfo(x.dtype).eps
            error = (x - y).abs() / y.abs().clamp(min=torch.finfo(x.dtype).tiny)
            assert float(error.max()) <= limit, (name, float(error.max()))


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_decides_and_averages_as_the_pytorch_form(size, dtype):
    for k, kind in enumerate(KINDS):  # with a start and without it in turn
        a = arguments(*size, dtype=dtype, auto=(k + SIZES.index(size)) % 2 == 0, kinds=(kind, "usual"))
        agree(decided(TRITON.admit, a), decided(evidence.admit, a))


@pytest.mark.parametrize("admit", [TRITON.admit, evidence.admit], ids=["kernel", "PyTorch form"])
def test_energies_in_parts_count_as_their_sum(admit):
    """Halves and quarters add up without rounding. lambda_0 is one that comes down to 100 rms of the gradient."""
    a = arguments(3, 5, 9, 4)
    a["lambda_0"] = 100 / 0.97 * ((a["G_tilde"].square().sum(dim=(1, 2)) + a["e_res"].sum(dim=1)) / (5 * 9)).sqrt()
    parts = torch.stack([a["e_res"] / 2, a["e_res"] / 4, a["e_res"] / 4], dim=1)
    agree(decided(admit, a | {"e_res": parts}), decided(admit, a))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_lambda_0_falls_to_the_rms_of_the_whole_gradient(size):
    """Energy beside the subspace is a millionth of it here, so that lambda_0 is what G~ says."""
    a = arguments(*size, dtype=DOUBLE, kinds=("usual",))
    a["e_res"] *= 1e-6
    energy = a["G_tilde"].square().sum(dim=(1, 2)) + a["e_res"].sum(dim=1)
    falls_to = evidence.UNITS * (energy / (size[1] * size[2])).sqrt()
    a["lambda_0"] = falls_to / 0.97  # beta2 is less
    found = decided(TRITON.admit, a)
    assert torch.allclose(found.changed["lambda_0"], falls_to, rtol=1e-12)
    agree(found, decided(evidence.admit, a))


def test_the_cases_that_are_compared_differ():
    a = arguments(5, 20, 24, 12)
    found = decided(TRITON.admit, a)
    assert found.bounded.tolist() == [False, True, False, True, True]
    assert (found.changed["lambda_0"] < a["lambda_0"]).tolist() == [False, False, True, False, False]
    assert found.evident.all()
    assert (found.scale < 1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE], ids=str)
def test_the_paper_s_form_averages_and_decides_nothing(dtype):
    a = arguments(3, 5, 9, 4, dtype=dtype)
    found = decided(TRITON.admit, a, kappa=None)
    assert (found.scale, found.bounded, found.evident, found.changed) == (None, None, None, {})
    agree(found, decided(evidence.admit, a, kappa=None))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # NumPy's
def test_a_matrix_that_is_not_finite_is_no_evidence(value):
    a = arguments(3, 5, 9, 4, kinds=("usual",))
    undisturbed = flat(decided(TRITON.admit, a))
    for name in ("A", "e_res"):
        b = a | {name: a[name].clone()}
        b[name][1].view(-1)[2] = value
        found = decided(TRITON.admit, b)
        assert found.evident.tolist() == [True, False, True] and float(found.scale[1]) == 0
        for key, x in flat(found).items():
            assert torch.equal(x[[0, 2]], undisturbed[key][[0, 2]]), key


@pytest.mark.parametrize("storage", [BF16, HALF, SINGLE], ids=str)
def test_roots_beyond_what_the_state_can_hold_are_no_evidence(storage):
    """Eigenvalues far below the dtype's smallest square root; c and the roots stay what they are."""
    small = 1 / torch.finfo(storage).max
    for key in ("inv_sqrt_lambda_L", "inv_sqrt_mu", "inv_sqrt_lambda_S"):
        b = arguments(2, 5, 9, 4, kinds=("usual",))
        b = {k: t.double() if isinstance(t, torch.Tensor) else t for k, t in b.items()} | {"M": storage}
        b[key][1] /= small * 0.01
        b["lambda_0"][1] *= (small * 0.001) ** 2  # the ceilings move along
        b |= {name: b[name] * 1e-300 for name in ("A", "G_tilde", "e_res")}
        expected = decided(evidence.admit, b)
        assert expected.evident.tolist()[1] is False
        assert decided(TRITON.admit, b).evident.tolist() == expected.evident.tolist()


@pytest.mark.parametrize("admit", [evidence.admit, TRITON.admit], ids=["torch", "triton"])
@pytest.mark.parametrize("storage", [BF16, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("side", ["lambda_L", "lambda_S", "mu"])
def test_evidence_ends_where_the_eigenvalues_sum_overflows(admit, storage, side):
    """As a factor's trace may be: of a matrix whose least root is within 5 % of where n eigenvalues would be so large.

    In units of c the whitened gradient stays what it is, and the new roots do, but for the damping's thousandth.
    """
    usual = arguments(1, 5, 9, 4, dtype=DOUBLE, auto=False, kinds=("usual",)) | {"M": storage}
    roots = decided(evidence.admit, usual).s
    lowest = {"lambda_L": roots.L, "lambda_S": roots.S, "mu": roots.mu}[side].min()
    for apart, evident in ((1.05, True), (0.95, False)):
        c = apart * (9 / torch.finfo(storage).max) ** 0.5 / lowest
        b = usual | {f"inv_sqrt_{side}": usual[f"inv_sqrt_{side}"] * c}
        if side != "mu":
            b |= {name: usual[name] / c for name in ("A", "G_tilde")}
        if side != "lambda_S":
            b["e_res"] = usual["e_res"] / c**2
        assert decided(admit, b).evident.tolist() == [evident]


def test_a_gradient_whose_square_overflows_is_bounded():
    a = arguments(2, 5, 9, 4, kinds=("usual",))
    for name, factor in (("A", 1e25), ("G_tilde", 1e25), ("e_res", 1e38)):
        a[name] = a[name] * factor
    found = decided(TRITON.admit, a)
    agree(found, decided(evidence.admit, a))
    assert found.evident.all() and ((found.scale > 0) & (found.scale < 1e-20)).all()
    usual = flat(decided(TRITON.admit, arguments(2, 5, 9, 4, kinds=("beyond",))))
    assert float((found.s.L / usual["s.L"] - 1).abs().max()) < 3  # of c G alone, whatever G is
