"""The kernel that says which gradients a step may take, against its PyTorch form."""

import math

import pytest
import torch

from prokl.backends.io import usable as by_torch
from prokl.kernels import launch
from prokl.kernels.usable import usable
from tests.kernel_cases import DEVICE

MEMBERS = [[1], [1, 1, 1], [3, 1, 1, 5], [64], [1, 40, 2]]
FLOAT32 = torch.finfo(torch.float32).max


def starts_of(counts):
    return torch.tensor([0, *counts], device=DEVICE).cumsum(0)


def positive(B, parts, dtype):
    return torch.rand(B, parts, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(DEVICE) + 0.1


def both(energy, counts, skipped=5):
    """finite, usable and skipped of the kernel, once those of PyTorch are the same."""
    owner = torch.arange(len(counts), device=DEVICE).repeat_interleave(torch.tensor(counts, device=DEVICE))
    count = torch.full((2, len(counts)), skipped, device=DEVICE)
    wanted = by_torch(energy.sum(dim=1), None if max(counts) == 1 else owner, count[0])
    found = usable(energy, starts_of(counts), max(counts), count[1])
    for x, y in zip((*found, count[1]), (*wanted, count[0]), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
    return [t.tolist() for t in (*found, count[1])]


@pytest.mark.parametrize(
    "dtype, parts", [(torch.float32, 1), (torch.float64, 7), (torch.float32, 576), (torch.float64, 1500)], ids=str
)
@pytest.mark.parametrize("counts", MEMBERS, ids=str)
def test_a_bad_part_stops_its_member_and_a_zero_matrix_itself(counts, parts, dtype):
    B, energy = sum(counts), positive(sum(counts), parts, dtype)
    assert both(energy, counts) == [[True] * B, [True] * B, [5] * len(counts)]
    bad, zero = B - 1, 0
    energy[zero] = 0.0
    energy[bad, parts // 2] = math.nan
    finite = [b < B - counts[-1] for b in range(B)]
    found = both(energy, counts)
    assert found[0] == finite
    assert found[1] == [own and b != zero for b, own in enumerate(finite)]
    assert found[2] == [5] * (len(counts) - 1) + [6]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", [0, 1023, 1024, 1499])
def test_any_part_may_be_the_bad_one(part, bad):
    energy = positive(3, 1500, torch.float32)
    energy[1, part] = bad
    assert both(energy, [1, 1, 1]) == [[True, False, True]] * 2 + [[5, 6, 5]]


@pytest.mark.filterwarnings("ignore:overflow encountered")  # NumPy's, in the interpreter
def test_parts_that_are_finite_overflow_in_their_sum():
    energy = torch.full((2, 3), 0.4 * FLOAT32, device=DEVICE)
    energy[1, 0] = 0.1 * FLOAT32
    assert both(energy, [1, 1]) == [[False, True]] * 2 + [[6, 5]]


def test_float64_gradients_beyond_float32_are_not_finite():
    energy = torch.tensor([[1e39], [FLOAT32], [1e-300], [0.0]], dtype=torch.float64, device=DEVICE)
    finite, found, _ = both(energy, [1] * 4)
    assert finite == [False, True, True, True] and found == [False, True, True, False]


def test_no_members_start_no_kernel(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert [len(t) for t in usable(torch.zeros(0, 1, device=DEVICE), starts_of([]), 1, nothing)] == [0, 0]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"energy": torch.ones(4, 6, dtype=torch.float16)}, r"^energy has dtype torch.float16"),
        ({"starts": torch.zeros(4, dtype=torch.int64)}, r"^starts has shape \(4,\); must be \(3,\)"),
        ({"skipped": torch.zeros(2)}, r"^skipped has dtype torch.float32"),
        ({"starts": torch.zeros(3, dtype=torch.int64, device="meta")}, r"^starts is on meta; must be on"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    change = {
        key: t.to(DEVICE) if getattr(t, "device", None) == torch.device("cpu") else t for key, t in change.items()
    }
    skipped = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    given = {"energy": torch.ones(4, 6, device=DEVICE), "starts": starts_of([1, 3]), "most": 3, "skipped": skipped}
    with pytest.raises(ValueError, match=message):
        usable(**given | change)
