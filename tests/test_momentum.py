"""The kernel of the momentum beyond what tests/test_kernels.py asks of every kernel: bounds and tiles."""

import pytest
import torch

from bench.micro.case import Sizes
from prokl.kernels import launch
from prokl.kernels.momentum import TILES
from tests.kernel_cases import DEVICE, HALF, MOMENTUM, SINGLE, assert_close


def arguments(B, M, N, R, dtypes=()):
    return MOMENTUM.make(Sizes(B, M, N, R), dtypes, variant=2)


def call(a, **settings):
    """The momentum after the launch, and what is returned; the arguments stay as they are."""
    return MOMENTUM.run(**(a | {"M": a["M"].clone()} | settings))


def test_the_wide_tile_is_only_for_loads_of_16_bytes(monkeypatch):
    widths = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: widths.append(kwargs["TILE_N"]))
    a = arguments(2, 48, 80, 32)
    narrow = {"U": a["U"][:, :, ::2], "G_par": a["G_par"][:, :, ::2]}
    for changed in ({}, {"G": a["G"].mT.contiguous().mT}, narrow, {"G": torch.cat((a["G"],) * 2, 2)[:, :, 1:81]}):
        call(a | changed)
    assert widths == [TILES[0].n] * 2 + [TILES[1].n] * 2


@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("active", [None, torch.tensor([True, True, False], device=DEVICE)], ids=["all", "some"])
def test_the_scale_is_its_matrix_own_and_comes_before_any_square(active):
    # Such a gradient's own squares are beyond float32; bounded, it is of the momentum's size.
    a = arguments(3, 37, 50, 11)
    a["G"][0] *= 1e23
    a |= {"scale": torch.tensor([1e-23, 1.0, 0.5], device=DEVICE), "active": active}
    assert_close(MOMENTUM, call(a), a)


def test_the_momentum_enters_before_it_is_rounded():
    a = arguments(2, 37, 50, 11, (HALF, HALF, SINGLE, SINGLE, SINGLE)) | {"weights": (0.3, 0.0, 1.0)}
    got = call(a)
    assert_close(MOMENTUM, got, a)
    left = got[0].float() - a["G_par"] @ a["U"].mT  # by the rounded one
    got[1] = a["rows"][:, :, None] * left
    with pytest.raises(AssertionError, match="result 1"):
        assert_close(MOMENTUM, got, a)
