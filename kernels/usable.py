"""Decide which gradients a step takes, from the sums of ``stack``; in PyTorch: ``prokl.backends.io.usable``.

B: matrices; PARTS: partial squared norms of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES

LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)
ELEMENTS = 1024  # of a block: eight a thread, unless a member has more matrices


@triton.jit
def usable_kernel(
    energy_ptr,
    starts_ptr,
    finite_ptr,
    usable_ptr,
    skipped_ptr,
    PARTS,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Judge the gradient of one member a program: matrices starts[i] to starts[i + 1], of which ROWS are enough.

    energy (B, PARTS); starts (members + 1,); finite, usable (B,); skipped (members,); all contiguous.
    """
    i = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + i)
    rows = start + tl.arange(0, ROWS)
    in_member = rows < tl.load(starts_ptr + i + 1)
    total = tl.zeros((ROWS, TILE), DTYPE)
    for first in range(0, PARTS, TILE):
        part = first + tl.arange(0, TILE)
        total += tl.load(energy_ptr + rows[:, None] * PARTS + part, in_member[:, None] & (part < PARTS), 0.0)
    energy = tl.sum(total, axis=1)
    good = tl.min((energy <= LARGEST).to(tl.int32), axis=0)  # NaN is not
    tl.store(finite_ptr + rows, (rows >= 0) & (good > 0), in_member)
    tl.store(usable_ptr + rows, (energy > 0) & (good > 0), in_member)
    tl.store(skipped_ptr + i, tl.load(skipped_ptr + i) + 1 - good)


def usable(energy: Tensor, starts: Tensor, most: int, skipped: Tensor) -> tuple[Tensor, Tensor]:
    """Judge the gradients of all members in one launch.

    Args:
        energy: (B,k) float32 or float64, contiguous: parts of the squared norm of each matrix.
        starts: (members + 1,) int64: the first matrix of every member, and B.
        most: matrices of the largest member.
        skipped: (members,) int64; goes up by one where a member's gradient is not finite.

    Returns:
        (B,) bool, False for every matrix of a member of which the squared norm of one is not a finite float32; and
        likewise False besides where a matrix is zero, or too small to square.
    """
    (B, parts), device, members = energy.shape, energy.device, len(skipped)
    assert most >= 1
    launch.check(device, {"energy": (energy, (B, parts))}, (torch.float32, torch.float64))
    launch.check(device, {"starts": (starts, (members + 1,)), "skipped": (skipped, (members,))}, (torch.int64,))
    finite, nonzero = (torch.empty(B, dtype=torch.bool, device=device) for _ in range(2))
    rows = triton.next_power_of_2(most)
    if members:
        launch.start(
            usable_kernel,
            (members,),
            device,
            energy.contiguous(),
            starts,
            finite,
            nonzero,
            skipped,
            parts,
            DTYPE=TRITON_DTYPES[energy.dtype],
            ROWS=rows,
            TILE=max(1, ELEMENTS // rows),
        )
    return finite, nonzero
