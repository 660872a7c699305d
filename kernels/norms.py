"""The factor that normalises a matrix, from the parts of its norm; in PyTorch: ``Algebra.momentum``.

B: matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES

ROOM = 4
"""Largest squared norm of a row in Newton-Schulz, in units of X's own: its singular values overshoot 1."""


@triton.jit
def inverse_norm_kernel(
    energy_ptr,
    size_ptr,
    full_size_ptr,
    inverse_ptr,
    ENERGIES,
    NORMS,
    noise: tl.float64,
    tiny: tl.float64,
    largest: tl.float64,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add up the parts of one matrix a program, contiguous, and store the inverse root of its energy.

    Or zero: where the matrix is negligible, and of an energy below tiny or beyond largest.
    """
    i_b = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, TILE)
    energy = tl.zeros((TILE,), DTYPE)
    for first in range(0, ENERGIES, TILE):
        energy += tl.load(energy_ptr + i_b * ENERGIES + first + o, first + o < ENERGIES, 0.0).to(DTYPE)
    size = tl.zeros((TILE,), DTYPE)
    full_size = tl.zeros((TILE,), DTYPE)
    for first in range(0, NORMS, TILE):
        size += tl.load(size_ptr + i_b * NORMS + first + o, first + o < NORMS, 0.0).to(DTYPE)
        full_size += tl.load(full_size_ptr + i_b * NORMS + first + o, first + o < NORMS, 0.0).to(DTYPE)
    total, full = tl.sum(energy), tl.sum(full_size)
    negligible = (tl.sum(size) <= tl.full((), noise, DTYPE) * full) & (full < float("inf"))
    vanishes = negligible | (total < tl.full((), tiny, DTYPE)) | (total > tl.full((), largest, DTYPE))
    one = tl.full((), 1.0, DTYPE)
    tl.store(inverse_ptr + i_b, tl.where(vanishes, one * 0.0, one / tl.sqrt(tl.where(vanishes, one, total))))


def inverse_norm(energy: Tensor, size: Tensor, full_size: Tensor, noise: float) -> Tensor:
    """Return 1 / sqrt(energy) in one launch, or zero: of what is negligible, or so small that its square vanishes.

    Below the smallest normal number the square of the inverse norm, which the first product takes, overflows.

    Args:
        energy: parts (B,k) of the squared norm of X.
        size: parts (B,l) of the squared norm of what X was made from.
        full_size: parts (B,l) of the squared norm of which that is a residual.
        noise: ratio of the last two up to which it is negligible; nothing is where the last overflows.

    Returns:
        (B,) in float64 where one of them is, else in float32; 0 where X is negligible, or its squared norm too small
        or too large for what is multiplied next.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    if energy.ndim != 2 or size.ndim != 2:
        raise ValueError(f"energy and size have shapes {tuple(energy.shape)}, {tuple(size.shape)}; must be (B, parts).")
    batch, parts = len(energy), size.shape[1]
    launch.check("energy", energy, tuple(energy.shape), energy.device)
    for name, t in (("size", size), ("full_size", full_size)):
        launch.check(name, t, (batch, parts), energy.device, like="energy")
    energy, size, full_size = (t.contiguous() for t in (energy, size, full_size))
    dtype = launch.arithmetic_dtype(energy, size, full_size)
    inverse = torch.empty(batch, dtype=dtype, device=energy.device)
    if batch:
        widest = max(energy.shape[1], parts)
        tile = min(1024, triton.next_power_of_2(max(widest, 1)))
        scalars = energy.shape[1], parts, float(noise), torch.finfo(dtype).tiny, torch.finfo(dtype).max / ROOM
        arguments = (energy, size, full_size, inverse, *scalars)
        constants = {"DTYPE": TRITON_DTYPES[dtype], "TILE": tile, "num_warps": 4}
        launch.start(inverse_norm_kernel, (batch,), energy.device, *arguments, **constants)
    return inverse
