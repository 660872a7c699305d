"""The kernel of the factor that normalises a matrix beside its PyTorch form."""

import pytest
import torch

from prokl.kernels.norms import inverse_norm
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
