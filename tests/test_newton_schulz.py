"""Newton-Schulz over the kernels against the same over PyTorch in float64, in both forms."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prokl.algorithm.newton_schulz import newton_schulz_factors, standard, use_gram
from prokl.backends import triton_ops
from prokl.backends.torch_ops import TorchStages
from prokl.backends.triton_ops import TritonStages

TORCH = TorchStages(host_readable=True)
KERNELS = TritonStages(use_cuda_qr=False, host_readable=False)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MUON = (3.4445, -4.7750, 2.0315)
OTHER = (2.0, -1.5, 0.5)
SIZES = [(3, 24, 70), (2, 33, 33), (1, 1, 1), (2, 1, 9), (1, 70, 130)]


def problem(B, m, n, dtype=torch.float64, seed=0):
    """Matrices with singular values from 1 down to 1e-3, times 3."""
    g = torch.Generator().manual_seed(seed)
    X = torch.linalg.qr(torch.randn(B, m, m, generator=g, dtype=torch.float64))[0]
    Y = torch.linalg.qr(torch.randn(B, n, m, generator=g, dtype=torch.float64))[0]
    return (3 * (X * torch.logspace(0, -3, m, dtype=torch.float64)) @ Y.mT).to(DEVICE, dtype)


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
CASES = [
    pytest.param(size, *STEPS[(i + 2 * gram) % 4], gram, marks=[pytest.mark.slow] if size[2] > 100 else [])
    for i, size in enumerate(SIZES)
    for gram in (True, False)
]


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
