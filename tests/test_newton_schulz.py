"""Newton-Schulz: both forms against the reference, over PyTorch and over the kernels, and the dtype that it is in."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import prokl
from prokl.algorithm import settings
from prokl.algorithm.newton_schulz import newton_schulz_factors, standard, use_gram
from prokl.algorithm.reference import newton_schulz, polar
from prokl.backends import triton_ops
from prokl.backends.torch_ops import TorchStages
from prokl.backends.triton_ops import TritonStages

TORCH = TorchStages(host_readable=True)
KERNELS = TritonStages(use_cuda_qr=False, host_readable=False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MUON = (3.4445, -4.7750, 2.0315)
OTHER = (2.0, -1.5, 0.5)
CUBIC = (1.5, -0.5, 0.0)
SIZES = [(3, 24, 70), (2, 33, 33), (1, 1, 1), (2, 1, 9), (1, 40, 70)]


def problem(B, m, n, dtype=torch.float64, smallest=-3.0):
    """Matrices with singular values from 1 down to a power of ten, times 3."""
    g = torch.Generator().manual_seed(0)
    X = torch.linalg.qr(torch.randn(B, m, m, generator=g, dtype=torch.float64))[0]
    Y = torch.linalg.qr(torch.randn(B, n, m, generator=g, dtype=torch.float64))[0]
    return (3 * (X * torch.logspace(0, smallest, m, dtype=torch.float64)) @ Y.mT).to(DEVICE, dtype)


def matrices(B, m, n, smallest=-4.0):
    """The same, of unit Frobenius norm, on the CPU."""
    X = problem(B, m, n, smallest=smallest).cpu()
    return X / torch.linalg.matrix_norm(X)[:, None, None]


def inverse_norm(X):
    return 1 / torch.linalg.vector_norm(X.double(), dim=(-2, -1))


def dense(factors):
    Q, Y, scale = factors
    D = Y.double() if Q is None else Q.double() @ Y.double()
    return D if scale is None else D * scale.double()[:, None, None]


def exact(X, steps, coefficients):
    return standard(X.double() * inverse_norm(X)[:, None, None], None, steps, coefficients, TORCH)


def error(D, truth):
    return (torch.linalg.matrix_norm(D - truth, 2) / torch.linalg.matrix_norm(truth, 2)).max().item()


STEPS = [(1, MUON), (3, MUON), (5, MUON), (7, OTHER)]
# Both forms at every size and with every number of steps; which of these meet makes no difference to either.
CASES = [(size, *STEPS[(i + 2 * gram) % 4], gram) for i, size in enumerate(SIZES) for gram in (True, False)]


@pytest.mark.parametrize("size, steps, coefficients, gram", CASES, ids=str)
def test_equals_the_standard_iteration_in_float64(size, steps, coefficients, gram):
    X = problem(*size)
    truth = exact(X, steps, coefficients)
    found = dense(newton_schulz_factors(X, inverse_norm(X), steps, coefficients, KERNELS, gram=gram))
    assert error(found, truth) <= 1e-10  # rounding, times a = 3.4445 at most per iteration
    normalised = X * inverse_norm(X)[:, None, None]
    assert (
        error(dense(newton_schulz_factors(normalised, None, steps, coefficients, KERNELS, gram=gram)), truth) <= 1e-10
    )


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("size", SIZES[:2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_low_precision_error_is_at_most_twice_the_torch_forms(dtype, size, gram):
    X = problem(*size)
    X = (X * inverse_norm(X)[:, None, None]).to(dtype)
    truth = exact(X, 5, MUON)
    plain = error(dense(newton_schulz_factors(X, None, 5, MUON, TORCH, gram=gram)), truth)
    assert error(dense(newton_schulz_factors(X, None, 5, MUON, KERNELS, gram=gram)), truth) <= 2 * plain


@pytest.mark.gpu
@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("size", [(4, 256, 256), (4, 256, 1024)], ids=str)
def test_bfloat16_error_is_at_most_twice_the_torch_forms(size, gram):
    X = problem(*size, dtype=torch.bfloat16)
    truth = exact(X, 5, MUON)
    normalised = (X * inverse_norm(X)[:, None, None]).bfloat16()
    plain = error(dense(newton_schulz_factors(normalised, None, 5, MUON, TORCH, gram=gram)), truth)
    found = newton_schulz_factors(X, inverse_norm(X).float(), 5, MUON, KERNELS, gram=gram)
    assert error(dense(found), truth) <= 2 * plain


@pytest.mark.parametrize("gram", [True, False])
def test_an_inverse_norm_of_zero_gives_zero_and_leaves_the_others_alone(gram):
    X = problem(3, 24, 40, torch.float32)
    inverse = inverse_norm(X).float()
    good = dense(newton_schulz_factors(X, inverse, 5, MUON, KERNELS, gram=gram))
    inverse[1] = 0
    found = dense(newton_schulz_factors(X, inverse, 5, MUON, KERNELS, gram=gram))
    assert not found[1].any()
    assert torch.equal(found[0], good[0]) and torch.equal(found[2], good[2])


@pytest.mark.parametrize("m, n", [(16, 16), (16, 23), (16, 24), (16, 64)])
def test_the_form_is_chosen_by_aspect_and_can_be_asked_for(m, n):
    X = problem(1, m, n)
    Q, Y, _ = newton_schulz_factors(X, inverse_norm(X), 5, MUON, KERNELS)
    assert (Q is not None) == use_gram(m, n) == (n >= 1.5 * m)
    assert newton_schulz_factors(X, inverse_norm(X), 5, MUON, KERNELS, gram=False)[0] is None
    assert newton_schulz_factors(X, inverse_norm(X), 5, MUON, KERNELS, gram=True)[0] is not None


@pytest.mark.parametrize("steps, restarts", [(2, 0), (3, 1), (5, 2), (6, 2)])
def test_the_gram_form_restarts_after_two_iterations(steps, restarts):
    products = []

    class Counting(TorchStages):
        def product(self, *args, **kwargs):
            products.append(1)
            return super().product(*args, **kwargs)

        def gram(self, X, scale):
            return super().product(X, X.mT, alpha=1.0 if scale is None else scale.square())

        symmetric_polynomial = TorchStages.product

    X = problem(1, 8, 16)
    newton_schulz_factors(X, inverse_norm(X), steps, MUON, Counting(True), gram=True)
    assert len(products) == restarts


@pytest.mark.parametrize(
    "X, inverse, message",
    [
        (torch.ones(2, 3, 4, dtype=torch.float16), torch.ones(2), r"A float16 X came with a scale"),
        (torch.ones(2, 3, 4), torch.ones(3), r"scale has shape \(3,\); must be \(2,\)"),
    ],
)
def test_wrong_arguments_raise(X, inverse, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz_factors(X.to(DEVICE), inverse.to(DEVICE), 5, MUON, KERNELS)


def calls(function):
    """The names of PyTorch's operators that a call runs, and what it returns."""
    with Operators() as seen:
        result = function()
    return seen.names, result


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("gram", [True, False])
def test_cublas_multiplies_the_shapes_of_its_table_alone(gram, monkeypatch):
    X = problem(2, 16, 32, torch.bfloat16)

    def run():
        return newton_schulz_factors(X, inverse_norm(X).float(), 5, MUON, KERNELS, gram=gram)

    names, kernels = calls(run)
    assert "baddbmm" not in names and "bmm" not in names  # nothing is in the table before a GPU has decided
    monkeypatch.setattr(triton_ops, "CUBLAS", frozenset({(16, 16, 32)}))
    names, cublas = calls(run)
    # Four updates of X have one scale for all matrices, the first has one for each; of two restarts one has.
    assert (names.count("baddbmm"), names.count("bmm")) == ((0, 1) if gram else (4, 0))
    truth = exact(X, 5, MUON)
    assert error(dense(cublas), truth) <= 1.5 * error(dense(kernels), truth)  # both round to bfloat16 once a product
    monkeypatch.setattr(triton_ops, "CUBLAS", frozenset({(16, 16, 33)}))
    assert torch.equal(dense(run()), dense(kernels))


# Over PyTorch


def result(X, steps, coefficients, gram):
    Q, Y, _ = newton_schulz_factors(X, None, steps, coefficients, TORCH, gram=gram)
    return Y if Q is None else Q @ Y


# Every shape with every form, and with every number of steps; both coefficients of each.
OVER_TORCH = [
    (shape, 1 + (i + k) % 7, (MUON, CUBIC)[k % 2], (i + k // 2) % 2 == 0)
    for i, shape in enumerate([(1, 1), (1, 7), (5, 9), (12, 12), (16, 64)])
    for k in range(7)
]


@pytest.mark.parametrize("shape, steps, coefficients, gram", OVER_TORCH, ids=str)
def test_both_forms_equal_the_reference(shape, steps, coefficients, gram):
    X = matrices(3, *shape)
    wanted = torch.stack([newton_schulz(x, steps, coefficients) for x in X])
    # float64 rounding, multiplied by at most a = 3.4445 an iteration: 3.4445^7 * 1e-16 * sqrt(m n) < 1e-10
    assert (result(X, steps, coefficients, gram) - wanted).abs().max() <= 1e-10


@pytest.mark.parametrize("smallest", [-2.0, -4.0])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1.6), (torch.float16, 1.6), (torch.float32, 4.0)])
def test_gram_form_is_about_as_accurate_as_the_standard_form(dtype, bound, smallest):
    X = matrices(4, 64, 256, smallest=smallest)
    exact = result(X, 5, MUON, False)
    gram, standard = (
        torch.linalg.matrix_norm(result(X.to(dtype), 5, MUON, form).double() - exact).mean() for form in (True, False)
    )
    # Measured gram / standard, down to 1e-2 and to 1e-4: half precisions 1.3 and 0.85, float32 2.7 and 1.4.
    assert gram <= bound * standard


def nearly_rank_one(B, m, n, rows):
    """Rank one in the first ``rows`` rows plus noise from 3e-4 to 0.1 of it everywhere."""
    g = torch.Generator().manual_seed(1)
    X = torch.zeros(B, m, n, dtype=torch.float64)
    X[:, :rows] = torch.randn(B, rows, 1, generator=g) @ torch.randn(B, 1, n, generator=g)
    X += torch.logspace(-3.5, -1, B)[:, None, None] * torch.randn(B, m, n, generator=g)
    return X / torch.linalg.matrix_norm(X)[:, None, None]


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, m, rows",
    [
        *((torch.bfloat16, m, rows) for m, rows in ((2, 2), (3, 3), (8, 8), (24, 24), (64, 3), (64, 6))),
        *((torch.float16, m, rows) for m, rows in ((3, 3), (24, 24))),
    ],
)
def test_gram_form_never_does_much_worse_than_the_standard_form_on_nearly_rank_one_matrices(dtype, m, rows):
    X = nearly_rank_one(300, m, 2 * m, rows)
    exact = result(X, 5, MUON, False)
    gram, standard = (
        torch.linalg.matrix_norm(result(X.to(dtype), 5, MUON, form).double() - exact).max() for form in (True, False)
    )
    # Measured: 0.96 to 1.05; with a restart after three iterations up to 1e5 times it in bfloat16.
    assert gram <= 2 * standard


def test_enough_cubic_steps_reach_the_polar_factor():
    X = matrices(1, 8, 20, smallest=-1.0)
    assert (result(X, 20, CUBIC, True)[0] - polar(X[0])).abs().max() <= 1e-10


@pytest.mark.parametrize("capable", [True, False])
def test_newton_schulz_is_in_float32_where_a_cpu_would_emulate_bfloat16(capable, monkeypatch):
    found = {"avx2": True, "avx512_bf16": capable, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    settings.cpu_has_bfloat16.cache_clear()
    try:
        like = torch.empty(2, 3)
        optimizer = prokl.ProKLShampoo([torch.nn.Parameter(torch.ones(2, 3))])
        h = settings.ProHyper.of(optimizer.param_groups[0])
        assert h.polar_dtype(like) == (torch.bfloat16 if capable else torch.float32)
        assert h.polar_dtype(like.to("meta")) == torch.bfloat16
        assert h.polar_dtype(like.double()) == torch.float64
        assert replace(h, ns_dtype=torch.bfloat16).polar_dtype(like) == torch.bfloat16
    finally:
        settings.cpu_has_bfloat16.cache_clear()


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_newton_schulz_is_in_float32_where_a_gpu_would_emulate_bfloat16(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    h = settings.ProHyper.of(prokl.ProKLShampoo([torch.nn.Parameter(torch.ones(2, 3))]).param_groups[0])
    assert h.polar_dtype(SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 0))) == dtype
