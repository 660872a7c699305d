"""The kernels of norms beside their PyTorch forms: a bound on one, and the factor that normalises another."""

import pytest
import torch

from prokl.algorithm.algebra import Algebra
from prokl.kernels.norms import bound_rows, inverse_norm
from prokl.pair import Pair
from tests.kernel_cases import DEVICE, gaps


def parts_of(count, dtype, seed):
    drawn = torch.randn(5, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.abs().to(DEVICE, dtype) + 0.1


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("parts", [1, 7, 1500])
def test_the_inverse_norm_adds_up_parts_and_is_zero_for_what_is_negligible(parts, dtype):
    energy, size, whole = (parts_of(parts, dtype, seed) for seed in range(3))
    size[1] = 1e-9 * whole[1]
    size[2], whole[2] = 0.0, 0.0
    energy[3] = torch.finfo(dtype).tiny / (2 * parts)
    energy[4] = torch.finfo(dtype).max / (2 * parts)
    found = inverse_norm(energy, size, whole, 1e-6)
    assert found.dtype == dtype and (found[1:] == 0).all()
    # A tree of ten levels and a second tile, of half an eps each, halved by the root, which is rounded twice itself.
    assert float(found[0]) == pytest.approx(float(energy[0].double().sum().rsqrt()), rel=5 * torch.finfo(dtype).eps)
    assert torch.equal(inverse_norm(gaps(energy), gaps(size), gaps(whole), 1e-6), found)


def test_wrong_arguments_raise_with_their_names():
    t = parts_of(4, torch.float32, 0)
    with pytest.raises(ValueError, match=r"full_size has shape \(5, 1\); must be \(5, 4\)"):
        inverse_norm(t, t, t[:, :1], 0.0)
    with pytest.raises(ValueError, match=r"must be \(B, parts\)"):
        inverse_norm(t[0], t, t, 0.0)


def bounded_inputs(dtype, m=7, n=300):
    g = torch.Generator().manual_seed(3)
    t = torch.randn(4, m, n, generator=g, dtype=torch.float64)
    t[2] *= 1e25 if dtype == torch.float32 else 1e160  # whose square leaves the range of the dtype
    t[3] = 0.0
    rows = torch.rand(4, m, generator=g, dtype=torch.float64) + 0.5
    return t.to(DEVICE, dtype), rows.to(DEVICE, dtype), torch.tensor([False, True, False, False], device=DEVICE)


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("largest", [1e-3, 30.0, 1e9])
def test_rows_are_scaled_and_held_to_a_norm(largest, dtype):
    t, rows, bounded = bounded_inputs(dtype)
    if dtype == torch.float64:
        t[2] = t[0]  # float64 has no wider dtype to take the square in
    found, flags = bound_rows(t, rows, largest, bounded)
    wanted, expected = Algebra(True).bounded_rows(t, rows, largest, bounded)
    assert found.dtype == dtype and torch.equal(flags, expected)
    # A rounding of each factor, and of the sum of squares, which the root halves.
    torch.testing.assert_close(found, wanted, rtol=8 * torch.finfo(dtype).eps, atol=0)
    again, _ = bound_rows(gaps(t), gaps(rows), largest, gaps(bounded))
    assert torch.equal(again, found)


def test_bounded_rows_may_be_a_pair():
    t, rows, bounded = bounded_inputs(torch.float32)
    whole, _ = bound_rows(t, rows, 1.0, bounded)
    pair, _ = bound_rows(t, rows, 1.0, bounded, pair=True)
    assert isinstance(pair, Pair)
    assert torch.equal(pair.both, Pair.split(whole).both)


def test_wrong_arguments_of_bounded_rows_raise_with_their_names():
    t, rows, bounded = bounded_inputs(torch.float32)
    with pytest.raises(ValueError, match=r"rows has shape \(4, 6\); must be \(4, 7\)"):
        bound_rows(t, rows[:, 1:], 1.0, bounded)
    with pytest.raises(ValueError, match="bounded has dtype torch.float32"):
        bound_rows(t, rows, 1.0, bounded.float())
    with pytest.raises(ValueError, match=r"t has shape .*must be \(B, m, n\)"):
        bound_rows(t[0], rows, 1.0, bounded)
    with pytest.raises(ValueError, match="float64 was to be split"):
        bound_rows(t.double(), rows, 1.0, bounded, pair=True)
