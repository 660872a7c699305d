"""The kernels of norms, of cutting and of splitting beside their PyTorch forms."""

import math

import pytest
import torch

from prokl.algorithm.stages import Residual
from prokl.backends.torch_ops import TorchStages
from prokl.kernels.combine import samples
from prokl.kernels.norms import TILE, cut, inverse_norm
from prokl.kernels.split import split
from tests.kernel_cases import DEVICE, gaps

TORCH = TorchStages(True)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE, dtype)


def test_c_comes_twice_and_not_as_its_square():
    """Of c = 1e-25 the square is zero in float32."""
    size, one = torch.tensor([1e-25], device=DEVICE), torch.ones(1, 2, 3, device=DEVICE)
    X, Z, whitened = samples(1e25 * one, 1e25 * one, one[..., 0], one[:, 0], size, 0.5)
    assert torch.allclose(X, one) and torch.allclose(Z, X) and torch.allclose(whitened, 0.5 * X)


@pytest.mark.parametrize("size", [(2, 5, 7), (1, 33, TILE // 8)])
def test_columns_are_scaled_by_roots_before_they_are_split(size):
    x, a = randn(*size), randn(size[0], size[2], seed=1).abs()
    found = split(x, a)
    expected = x.double() * a.double().sqrt()[:, None, :]
    # 2^-17 of an entry for the halves, and a rounding each of root and product.
    assert ((found.whole().double() - expected).abs() <= (2**-17 + 2**-23) * expected.abs()).all()
    assert torch.equal(split(gaps(x), gaps(a)).both, found.both)
    with pytest.raises(ValueError, match=r"a has shape \(1,\); must be"):
        split(x, a[0, :1])
    with pytest.raises(ValueError, match=r"x has shape .* must be \(B, m, n\) for its columns"):
        split(x[0], a)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(  # which of these meet makes no difference to either
    "shape, dtype", [((7, 9), torch.float32), ((1, 1), torch.float64), ((40, TILE // 16 + 1), torch.float32)], ids=str
)
def test_matrices_are_cut_as_by_the_pytorch_form(shape, dtype, out):
    t = randn(4, *shape, dtype=dtype) * torch.tensor([0.5, 1.0, 30.0, 0.0], dtype=dtype, device=DEVICE)[:, None, None]
    largest = 2.0 * math.sqrt(shape[0] * shape[1])
    bounded = torch.tensor([True, False, False, False], device=DEVICE)
    clipped = torch.tensor([3.0, 2.0, 1.0, 0.0], dtype=dtype, device=DEVICE)
    found, count = cut(t, largest, out, bounded, clipped)
    expected, expected_count = TORCH.cut(t, largest, out, bounded, clipped)
    assert torch.equal(count, expected_count) and count.tolist() == [4, 2, 2, 0] and found.dtype == out
    # The factors differ by the order of a sum in float64; rounded to the dtype of t that may be one unit, and as much
    # of the result's where it is on the edge. In float64 itself some of them.
    eps = max(torch.finfo(dtype).eps, torch.finfo(out).eps)
    torch.testing.assert_close(found, expected, rtol=(4 if eps < 1e-12 else 1.01) * eps, atol=0)
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])  # which are only converted
    assert (torch.linalg.matrix_norm(found.double()) <= largest * (1 + 2 * eps)).all()
    assert torch.equal(cut(gaps(t), largest, out, gaps(bounded), gaps(clipped))[0], found)


def test_squares_of_what_is_cut_may_overflow():
    t = torch.full((1, 8, 8), 1e30, device=DEVICE)
    none = torch.zeros(1, dtype=torch.bool, device=DEVICE)
    found, count = cut(t, 16.0, torch.float32, none, none.float())
    assert count.item() == 1 and float(found.norm()) == pytest.approx(16.0, rel=1e-6)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("parts", [1, 7, 1500])
def test_the_inverse_norm_adds_up_parts_and_is_zero_for_what_is_negligible(parts, dtype):
    energy, size, whole = (randn(5, parts, dtype=dtype, seed=i).abs() + 0.1 for i in range(3))
    size[1] = 1e-9 * whole[1]
    size[2], whole[2] = 0.0, 0.0
    energy[3] = torch.finfo(dtype).tiny / (2 * parts)
    energy[4] = torch.finfo(dtype).max / (2 * parts)
    found = inverse_norm(energy, size, whole, 1e-6)
    assert found.dtype == dtype and (found[1:] == 0).all()
    # A tree of ten levels and a second tile, of half an eps each, halved by the root, which is rounded twice itself.
    assert float(found[0]) == pytest.approx(float(energy[0].double().sum().rsqrt()), rel=5 * torch.finfo(dtype).eps)
    negligible = Residual(energy, size, whole, 1e-6).negligible()
    assert negligible.tolist() == [False, True, True, False, False]
    assert torch.equal(inverse_norm(gaps(energy), gaps(size), gaps(whole), 1e-6), found)


def test_wrong_arguments_raise_with_their_names():
    t, flag = randn(2, 3, 4), torch.zeros(2, dtype=torch.bool, device=DEVICE)
    for call, message in (
        (lambda: cut(t[0], 1.0, torch.float32, flag, flag.float()), r"t has shape \(3, 4\); must be \(B, m, n\)"),
        (lambda: cut(t, 1.0, torch.int8, flag, flag.float()), "Invalid out_dtype=torch.int8"),
        (lambda: cut(t, 1.0, torch.float32, flag[:1], flag.float()), r"bounded has shape \(1,\); must be \(2,\)"),
        (lambda: cut(t, 1.0, torch.float32, flag, flag), "clipped has dtype torch.bool; must be one of"),
        (lambda: inverse_norm(t[0], t[0], t[0, :, :1], 0.0), r"full_size has shape \(3, 1\); must be \(3, 4\)"),
        (lambda: inverse_norm(t, t[0], t[0], 0.0), r"must be \(B, parts\)"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
