"""The decision about a gradient with the eigenvalue EMA: its PyTorch form against a transcription, its kernel by that.

B: matrices; M: short side; N: long side; R: rank.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import prokl
from prokl.algorithm import admission
from prokl.algorithm.algebra import Roots
from prokl.algorithm.shapes import ceiling
from prokl.kernels.admit import ELEMENTS, NUMBERS
from tests.kernel_cases import BF16, DEVICE, DOUBLE, HALF, SINGLE, TRITON, decided, flat

SIZES = [
    (1, 1, 2, 1),
    (3, 5, 9, 4),
    (2, 70, 130, 33),
    (1, NUMBERS + 7, NUMBERS + 100, ELEMENTS // 64 + 1),
]  # B, M, N, R
KINDS = ("usual", "beyond", "silent", "row", "column")
"""What the gradient of a matrix is by its state: of a usual size, ten times it, a thousandth, or with one large row or
column."""


def arguments(B, M, N, R, *, dtype=SINGLE, auto=True, kinds=KINDS, seed=0):
    """A, QtG, e_res and a state that predicts gradients of size one; ceilings act on some values and not on others."""
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
    given = {"A": A, "QtG": A * uniform(0.9, 1.1, B, M, R), "e_res": e_res}
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
        agree(decided(TRITON.admit, a), decided(admission.admit, a))


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
    agree(found, decided(admission.admit, a, kappa=None))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")  # NumPy's
def test_what_is_not_finite_is_no_evidence_and_leaves_the_others_alone(value):
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
        b |= {name: b[name] * 1e-300 for name in ("A", "QtG", "e_res")}
        expected = decided(admission.admit, b)
        assert expected.evident.tolist()[1] is False
        assert decided(TRITON.admit, b).evident.tolist() == expected.evident.tolist()


def test_a_gradient_whose_square_leaves_float32_is_bounded_all_the_same():
    a = arguments(2, 5, 9, 4, kinds=("usual",))
    for name, factor in (("A", 1e25), ("QtG", 1e25), ("e_res", 1e38)):
        a[name] = a[name] * factor
    found = decided(TRITON.admit, a)
    agree(found, decided(admission.admit, a))
    assert found.evident.all() and ((found.scale > 0) & (found.scale < 1e-20)).all()
    usual = flat(decided(TRITON.admit, arguments(2, 5, 9, 4, kinds=("beyond",))))
    assert float((found.s.L / usual["s.L"] - 1).abs().max()) < 3  # of c G alone, whatever G is


# --- the PyTorch form ---


def transcription(s, ell, rho, e_res, eps, factor, beta2, n):
    """The EMA as Algorithm 2 (3) with (P2) reads, one eigenvalue after another in Python floats."""
    new_L, new_S, new_mu = [], [], []
    s_L, s_S, s_mu, ell, rho, e_res, eps, factor = (t.tolist() for t in (*s, ell, rho, e_res, eps, factor))
    for b in range(len(s_mu)):
        m, r = len(s_L[b]), len(s_S[b])

        def damped(x, b=b):
            return 1 / (1 / x + eps[b])

        def clipped(x, dim, b=b):
            return min(x**-0.5, ceiling(dim) * factor[b])

        tail = damped(s_mu[b]) ** 2
        new_L.append(
            [
                clipped(beta2 / x**2 + (1 - beta2) * (y + tail * e) / n, m)
                for x, y, e in zip(s_L[b], ell[b], e_res[b], strict=True)
            ]
        )
        new_S.append([clipped(beta2 / x**2 + (1 - beta2) * y, n) for x, y in zip(s_S[b], rho[b], strict=True)])
        tail = math.fsum(e * damped(x) ** 2 for x, e in zip(new_L[-1], e_res[b], strict=True)) / (m * (n - r))
        new_mu.append(clipped(beta2 / s_mu[b] ** 2 + (1 - beta2) * tail, n))
    return [torch.tensor(x, dtype=DOUBLE) for x in (new_L, new_S, new_mu)]


@pytest.mark.parametrize("beta2", [0.0, 0.5, 0.95, 0.999])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_average_is_algorithm_2_s(size, beta2):
    a = arguments(*size, dtype=DOUBLE)
    n, roots = size[2], admission.inverse_roots(a)
    s = Roots(*(t.cpu() for t in roots))
    ell, rho = admission.row_and_column_energies(a["A"].cpu(), s)
    for most in (0.01, 1.0, 100.0):  # all, some and no values are clipped
        factor = most / ceiling(n)
        rest = torch.full((size[0],), 0.1, dtype=DOUBLE), torch.full((size[0],), factor, dtype=DOUBLE)
        got = admission.averaged(s, ell, rho, a["e_res"].cpu(), *rest, SimpleNamespace(beta2=beta2), n)
        expected = transcription(s, ell, rho, a["e_res"].cpu(), *rest, beta2, n)
        for x, y, side in zip(got, expected, (size[1], n, n), strict=True):
            # Some thirty roundings, and one for each term of a sum of squares in another order, halved by the root.
            torch.testing.assert_close(x, y, rtol=(30 + size[1] / 2) * 2.3e-16, atol=0)
            assert most != 0.01 or bool((x == ceiling(side) * factor).all())


def test_the_sizes_are_those_of_the_whitened_gradient():
    a = arguments(2, 6, 9, 4, dtype=DOUBLE, kinds=("usual", "row"))
    roots, n = admission.inverse_roots(a), 9
    ell, rho = admission.row_and_column_energies(a["A"], roots)
    sizes = admission.whitened_sizes(ell, rho, a["e_res"], torch.ones_like(roots.mu), roots, n)
    inside = (a["A"] * roots.L[:, :, None] * roots.S[:, None, :]).square()
    beside = a["e_res"] * (roots.L * roots.mu[:, None]).square()
    torch.testing.assert_close(sizes.rows.square(), (inside.sum(dim=2) + beside) / n)
    torch.testing.assert_close(sizes.columns.square(), inside.mean(dim=1))
    whole = torch.maximum(inside.mean(dim=(1, 2)), beside.sum(dim=1) / (6 * (n - 4)))
    torch.testing.assert_close(sizes.overall.square(), whole)


def test_lambda_0_falls_by_beta2_to_what_the_gradient_allows():
    a = arguments(3, 6, 9, 4, kinds=("usual", "usual", "beyond"))
    for name, factor in (("A", 1e-3), ("QtG", 1e-3), ("e_res", 1e-6)):
        a[name] = a[name] * factor
    rms = ((a["QtG"].square().sum(dim=(1, 2)) + a["e_res"].sum(dim=1)) / (6 * 9)).sqrt()
    a["lambda_0"] = rms * torch.tensor([1000.0, 101.0, 99.0], device=DEVICE)
    for form in (TRITON.admit, admission.admit):
        found = decided(form, a).changed["lambda_0"] / rms
        torch.testing.assert_close(found.cpu(), torch.tensor([950.0, 100.0, 99.0]))


@pytest.mark.slow
def test_without_the_interpreter_cpu_tensors_are_refused(tmp_path):
    script = """
import sys, torch, prokl
assert not any(name.startswith("prokl.kernels") for name in sys.modules)
from prokl.kernels.admit import admit
ones, one = torch.ones(1, 1, 1), torch.ones(1)
rest = {"beta2": 0.9, "damping": 0.0, "n": 2, "ceilings": (1.0, 1.0), "largest": 1e38}
try:
    admit(ones, ones, ones[0], (ones[0], ones[0], one), None, kappa=None, units=1.0, **rest)
except ValueError as error:
    print(error)
"""
    paths = [str(Path(prokl.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (
        0, "A is on cpu; must be on one of ('cuda',): use the PyTorch form elsewhere."
    ), done.stderr  # fmt: skip
