"""Kernels that take norms of whole matrices agree with their PyTorch form: one normalises, one is held to a bound."""

import math

import pytest
import torch

from prokl.algorithm.algebra import Algebra
from prokl.backends.torch_pairs import PairedAlgebra
from prokl.backends.triton_ops import PairedTritonAlgebra, TritonAlgebra
from prokl.kernels import launch
from prokl.kernels.gram import normalised_gram
from prokl.kernels.symmetric_product import symmetric_product
from prokl.pair import Pair
from tests.kernel_cases import DEVICE, gaps


def parts_of(count, dtype, seed):
    drawn = torch.randn(5, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.abs().to(DEVICE, dtype) + 0.1


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("parts", [1, 7, 1500])
def test_a_gram_matrix_is_normalised_or_zero_if_negligible(parts):
    energy, size, whole = (parts_of(parts, torch.float32, seed) for seed in range(3))
    size[1] = 1e-9 * whole[1]
    size[2], whole[2] = 0.0, 0.0
    energy[3] = torch.finfo(torch.float32).tiny / (2 * parts)
    energy[4] = torch.finfo(torch.float32).max / (2 * parts)
    squares = torch.stack((energy, size, whole), dim=1)
    X, c = (torch.randn(5, *shape, generator=torch.Generator().manual_seed(4)).to(DEVICE) for shape in ((70, 20), ()))
    D, square, scaled = normalised_gram(X, squares, 1e-6, c)
    inverse = square.sqrt()  # which is what was squared
    assert (inverse[1:] == 0).all() and torch.equal(scaled, inverse * c)
    assert torch.equal(D, symmetric_product(X, alpha=square)) and torch.equal(D, D.mT)
    # Nine levels of a sum of 512, and two tiles of it, half an eps each, halved by the root, rounded twice itself.
    assert float(inverse[0]) == pytest.approx(float(energy[0].double().sum().rsqrt()), rel=1e-6)
    assert all(map(torch.equal, normalised_gram(gaps(X), gaps(squares), 1e-6, gaps(c)), (D, square, scaled)))


def test_wrong_squares_raise_with_their_shape():
    X, c = torch.ones(5, 3, 4, device=DEVICE), torch.ones(5, device=DEVICE)
    with pytest.raises(ValueError, match=r"squares has shape \(4, 3, 2\); must be \(5, 3, 2\)"):
        normalised_gram(X, torch.ones(4, 3, 2, device=DEVICE), 0.0, c)


@pytest.mark.parametrize("paired", [False, True], ids=["faithful", "balanced"])
@pytest.mark.parametrize("bad", [math.inf, math.nan, 3e38])
def test_a_factor_beyond_the_range_makes_zeros(bad, paired):
    """Also one whose product may be; whatever else it holds. The one beside it, which is within the norm, stays."""
    g = torch.Generator().manual_seed(3)
    left, T = (torch.randn(2, *size, generator=g).to(DEVICE) for size in ((9, 70), (70, 67)))
    T[0, 69, 66] = bad
    given = {"largest": 1e9, "dtype": torch.float32, "bounded": torch.zeros(2, dtype=torch.bool, device=DEVICE)}
    given["clipped"] = torch.zeros(2, device=DEVICE)
    triton, torch_ = (PairedTritonAlgebra, PairedAlgebra) if paired else (TritonAlgebra, Algebra)
    for ops in (triton(use_cuda_qr=False, host_readable=launch.INTERPRETED), torch_(host_readable=True)):
        launched = isinstance(ops, TritonAlgebra)
        factor = Pair.split(left) if paired and launched else left
        split = (Pair.split(T) if paired else T, T.double().square().sum(dim=-1)[:, None]) if launched else T.clone()
        found, count = ops.bounded_product(factor, split, **given)
        assert not found[0].any() and count.tolist() == [1.0, 0.0]
        usual = ops.bounded_product(factor, split if launched else T.clone(), **given | {"bounded": None})
        assert torch.equal(found[1], usual[0][1])


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("largest", [1e-3, 30.0, 1e9])
@pytest.mark.parametrize("paired", [False, True], ids=["faithful", "balanced"])
def test_a_product_takes_a_factor_that_is_held_to_a_norm(largest, dtype, paired):
    if paired and dtype == torch.float64:
        pytest.skip("float64 has no pairs")
    g = torch.Generator().manual_seed(3)
    drawn = [torch.randn(4, *size, generator=g, dtype=torch.float64) for size in ((9, 70), (70, 67))]
    left, T = (t.to(DEVICE, dtype) for t in drawn)
    if dtype == torch.float32:  # float64 has no wider dtype to take the square in
        T[2] *= 1e25
    T[3] = 0.0
    bounded = torch.tensor([False, True, False, False], device=DEVICE)
    given = {"largest": largest, "dtype": dtype, "bounded": bounded}
    given |= {"clipped": torch.arange(4.0, dtype=dtype, device=DEVICE)}
    triton, torch_ = (PairedTritonAlgebra, PairedAlgebra) if paired else (TritonAlgebra, Algebra)
    ops = triton(use_cuda_qr=False, host_readable=launch.INTERPRETED)
    factor = Pair.split(left) if paired else left
    split = Pair.split(T) if paired else T, T.double().square().sum(dim=-1)[:, None]
    found, count = ops.bounded_product(factor, split, **given)
    wanted, expected = torch_(host_readable=True).bounded_product(factor, T.clone(), **given)
    assert found.dtype == dtype and found.isfinite().all() and torch.equal(count, expected)
    assert count.tolist() == [0.0 + (largest < 1e9), 2.0, 2.0 + (largest < 1e9 or dtype == torch.float32), 3.0]
    # Sums of 70 products; a factor, a norm, and each half of a pair are rounded.
    unit = 80 * torch.finfo(dtype).eps + 2.0**-16 * paired
    down = (largest / T.double().norm(dim=(1, 2))).clamp(max=1.0).nan_to_num(1.0)[:, None, None]
    assert ((found - wanted).abs() <= unit * down * (left.abs().double() @ T.abs().double())).all()
    usual, same = ops.bounded_product(factor, split, **given | {"bounded": None})
    assert same is given["clipped"] and bool((usual.abs() >= found.abs()).all())
