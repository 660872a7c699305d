"""Newton-Schulz: both forms against the reference, over PyTorch and over the kernels, and the dtype that it is in."""

from unittest.mock import patch

import pytest
import torch

import prokl
from prokl.algorithm import newton_schulz as forms
from prokl.algorithm import settings
from prokl.algorithm.algebra import Algebra
from prokl.algorithm.newton_schulz import use_gram
from prokl.algorithm.polynomials import each
from prokl.algorithm.reference import newton_schulz
from prokl.backends.triton_ops import TritonAlgebra
from tests.inputs import normal
from tests.transcription import polar

TORCH = Algebra(host_readable=True)
KERNELS = TritonAlgebra(use_cuda_qr=False, host_readable=False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MUON = (3.4445, -4.7750, 2.0315)
OTHER = (2.0, -1.5, 0.5)
NAMED = {"polar-express": 5, "deepseek-v4": 10}
"""Sets of polynomials, each with how many iterations it is tried at."""
SIZES = [(3, 24, 70), (2, 33, 33), (1, 1, 1), (2, 1, 9), (1, 40, 70), (2, 16, 64)]


def problem(B, m, n, dtype=torch.float64, smallest=-3.0):
    """Matrices with singular values from 1 down to a power of ten, times 3."""
    g = torch.Generator().manual_seed(0)
    X = torch.linalg.qr(torch.randn(B, m, m, generator=g, dtype=torch.float64))[0]
    Y = torch.linalg.qr(torch.randn(B, n, m, generator=g, dtype=torch.float64))[0]
    return (3 * (X * torch.logspace(0, smallest, m, dtype=torch.float64)) @ Y.mT).to(DEVICE, dtype)


def inverse_norm(X):
    return 1 / torch.linalg.vector_norm(X.double(), dim=(-2, -1))


def batched(X, scale, steps, coefficients, stages, gram=None):
    """The result in float64."""
    ones = torch.ones(len(X), dtype=torch.float64, device=X.device)
    Y, factor = forms.newton_schulz(X, scale, ones, each(coefficients, steps), stages, gram=gram)
    return Y.double() * factor.double()[:, None, None]


def normalised(X):
    return X * inverse_norm(X)[:, None, None].to(X.dtype)


def exact(X, steps, coefficients):
    X = X.double() * inverse_norm(X)[:, None, None]
    return torch.stack([newton_schulz(x.cpu(), each(coefficients, steps)) for x in X]).to(X.device)


def error(D, truth):
    return (torch.linalg.matrix_norm(D - truth, 2) / torch.linalg.matrix_norm(truth, 2)).max().item()


# Every number of steps is taken in tests/test_against_paper.py.
CASES = [
    (stages, size, steps, coefficients, gram)
    for stages, sizes in ((TORCH, SIZES), (KERNELS, SIZES[:2]))
    for size in sizes
    for coefficients, steps in ((MUON, 5), (OTHER, 2), *NAMED.items())
    for gram in (True, False)
]


def case_id(value):
    """Name backends by their classes: the ids of processes that share the tests have to be alike."""
    return type(value).__name__ if value in (TORCH, KERNELS) else str(value)


@pytest.mark.parametrize("stages, size, steps, coefficients, gram", CASES, ids=case_id)
def test_both_forms_equal_the_reference(stages, size, steps, coefficients, gram):
    X = problem(*size)
    truth = exact(X, steps, coefficients)
    for given, scale in ((X, inverse_norm(X)), (normalised(X), None)):
        found = batched(given, scale, steps, coefficients, stages, gram)
        assert error(found, truth) <= 1e-10  # rounding, times a at most per iteration, of which the largest is 8.2


@pytest.mark.parametrize("m, n, r", [(4, 9, 3), (6, 8, 5), (5, 5, 2), (1, 4, 2)])  # n - r above, at and below m
def test_the_reference_goes_to_the_polar_factor(m, n, r):
    """A complement's; the coefficients converge, and the default ones stop where singular values lie around 1."""
    X = normal(m, n, seed=2, dtype=torch.float64)
    U = torch.linalg.qr(normal(n, r, seed=1, dtype=torch.float64)).Q
    X -= X @ U @ U.mT
    # Each step multiplies rounding outside the range by 1.5; measured: at most 8e-13.
    assert (newton_schulz(X, [(1.5, -0.5, 0.0)] * 20) - polar(X)).norm() < 1e-11
    # 0.68 to 1.13 once a singular value has come up from zero, as Muon's quintic leaves them.
    sigma = torch.linalg.svdvals(newton_schulz(X, [MUON] * 8))[: min(m, n - r)]
    assert 0.65 < sigma.min() and sigma.max() < 1.25


LOW = [(dtype, size) for dtype in (torch.float32, torch.float16) for size in SIZES[:2]]
LOW += [pytest.param(torch.bfloat16, (4, 256, n), marks=pytest.mark.gpu) for n in (256, 1024)]


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("dtype, size", LOW, ids=str)
def test_low_precision_error_is_at_most_twice_the_torch_forms(dtype, size, gram):
    X = problem(*size, dtype=dtype)
    truth = exact(X, 5, MUON)
    rounded = (X * inverse_norm(X)[:, None, None]).to(dtype)
    plain = error(batched(rounded, None, 5, MUON, TORCH, gram), truth)
    given = (rounded, None) if dtype == torch.float16 else (X, inverse_norm(X).float())
    assert error(batched(*given, 5, MUON, KERNELS, gram), truth) <= 2 * plain


@pytest.mark.parametrize("gram", [True, False])
def test_an_inverse_norm_of_zero_gives_zero(gram):
    X = problem(3, 24, 40, torch.float32)
    inverse = inverse_norm(X).float()
    good = batched(X, inverse, 5, MUON, KERNELS, gram)
    inverse[1] = 0
    X[1] *= 1e18  # whose square float32 holds, but not that of ten times it
    found = batched(X, inverse, 5, MUON, KERNELS, gram)
    assert not found[1].any()
    assert torch.equal(found[0], good[0]) and torch.equal(found[2], good[2])


@pytest.mark.parametrize("m, n", [(16, 16), (16, 23), (16, 24), (16, 64)])
def test_the_form_is_chosen_by_aspect_and_can_be_asked_for(m, n):
    X = problem(1, m, n)
    for gram, wanted in ((None, use_gram(m, n)), (True, True), (False, False)):
        with patch.object(forms, "gram_runs", wraps=forms.gram_runs) as runs:
            batched(X, inverse_norm(X), 5, MUON, KERNELS, gram)
        assert runs.called == wanted
    assert use_gram(m, n) == (n >= 1.5 * m)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_products_of_bfloat16_matrices_are_torchs(dtype):
    X = problem(2, 16, 32, dtype)
    for gram, products in ((True, 3), (False, 5)):
        with patch("torch.bmm", wraps=torch.bmm) as plain:
            batched(X, inverse_norm(X).float(), 5, MUON, KERNELS, gram)
        assert plain.call_count == products * (dtype == torch.bfloat16)


# Over PyTorch, how far apart the forms are


def off(X, dtype, gram, steps=5, coefficients=MUON):
    """Return the error of a form in ``dtype`` for each matrix."""
    found, exact = (batched(x, None, steps, coefficients, TORCH, g) for x, g in ((X.to(dtype), gram), (X, False)))
    return torch.linalg.matrix_norm(found - exact)


def falling(smallest):
    return normalised(problem(4, 64, 256, smallest=smallest))


def nearly_rank_one(m, rows):
    """Rank one in the first ``rows`` rows plus noise from 3e-4 to 0.1 of it everywhere."""
    g, B, n = torch.Generator().manual_seed(1), 300, 2 * m
    X = torch.zeros(B, m, n, dtype=torch.float64)
    X[:, :rows] = torch.randn(B, rows, 1, generator=g) @ torch.randn(B, 1, n, generator=g)
    X += torch.logspace(-3.5, -1, B)[:, None, None] * torch.randn(B, m, n, generator=g)
    return normalised(X)


# Measured gram / standard, of singular values down to 1e-2 and to 1e-4: half precisions 1.13 and 0.81, float32 1.7 and
# 1.03. Nearly rank one: 0.95 to 0.99; with a restart after three iterations up to 1e5 in bfloat16.
HALVES = [(dtype, falling, (smallest,)) for dtype in (torch.bfloat16, torch.float16) for smallest in (-2.0, -4.0)]
HALVES += [(torch.bfloat16, nearly_rank_one, own) for own in ((2, 2), (3, 3), (24, 24), (64, 6))]
HALVES += [(torch.float16, nearly_rank_one, (24, 24))]
# Falling ones have at most 1.49 and 2.35 with Polar Express, 0.92 and 1.66 with DeepSeek-V4's; nearly rank one 1.03.
ACCURACY = [(MUON, 5, *half, 1.4) for half in HALVES]
ACCURACY += [(MUON, 5, torch.float32, falling, (smallest,), 2.2) for smallest in (-2.0, -4.0)]
ACCURACY += [(name, steps, *half, 1.75) for name, steps in NAMED.items() for half in HALVES]
ACCURACY += [(name, steps, torch.float32, falling, (-2.0,), 2.75) for name, steps in NAMED.items()]


@pytest.mark.slow
@pytest.mark.parametrize("coefficients, steps, dtype, make, arguments, bound", ACCURACY)
def test_gram_form_is_about_as_accurate_as_the_standard_form(coefficients, steps, dtype, make, arguments, bound):
    X = make(*arguments)
    gram, standard = (off(X, dtype, form, steps, coefficients).max() for form in (True, False))
    assert gram <= bound * standard


@pytest.mark.parametrize(
    "coefficients, steps, runs",
    [
        (MUON, 5, [2, 2, 1]),
        ("polar-express", 5, [1, 1, 2, 1]),
        ("deepseek-v4", 10, [2] * 5),
        ((15.0, -1, 0.1), 2, [1, 1]),
    ],
)
def test_the_gram_form_restarts_before_its_gain_is_too_large(coefficients, steps, runs):
    assert [len(run) for run in forms.gram_runs(each(coefficients, steps))] == runs


@pytest.mark.parametrize("name, steps", [("polar-express", 8), ("deepseek-v4", 10)])
def test_named_polynomials_bring_singular_values_to_one(name, steps):
    """Singular values from 1e-3 on, the least that Polar Express is made for, come to 1 within 5e-4.

    Muon's five steps leave them from 0.47 to 1.14.
    """
    sigma = torch.logspace(-3, 0, 200, dtype=torch.float64)
    for a, b, c in each(name, steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    assert (sigma - 1).abs().max() < 6e-4


def products_dtype(device, dtype=torch.float32, **own):
    """The dtype of Newton-Schulz's products for weights with an arithmetic."""
    optimizer = prokl.ProKLShampoo([torch.nn.Parameter(torch.ones(2, 3))], **own)
    return settings.pro_hyper(optimizer.defaults, 2, 3, dtype, torch.device(device)).ns_dtype


@pytest.mark.parametrize("capable", [True, False])
def test_newton_schulz_is_float32_where_a_cpu_lacks_bfloat16(capable, monkeypatch):
    found = {"avx2": True, "avx512_bf16": capable, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    settings.cpu_has_bfloat16.cache_clear()
    try:
        assert products_dtype("cpu") == (torch.bfloat16 if capable else torch.float32)
        assert products_dtype("meta") == torch.bfloat16
        assert products_dtype("cpu", torch.float64) == torch.float64
        assert products_dtype("cpu", ns_dtype=torch.bfloat16) == torch.bfloat16
    finally:
        settings.cpu_has_bfloat16.cache_clear()


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_newton_schulz_is_float32_where_a_gpu_lacks_bfloat16(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert products_dtype("cuda:0") == dtype
