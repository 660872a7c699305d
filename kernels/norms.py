"""What follows from norms of whole matrices: a bound on one, and the factor that normalises another.

In PyTorch: ``ProKLShampooStages.cut`` and ``.whiten``. B: matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES
from prokl.kernels.operands import check_out_dtype
from prokl.kernels.split import converted

TILE = 2048
WARPS = 8
ROOM = 4
"""How many times the squared norm of X that of a row may be in Newton-Schulz, whose singular values overshoot."""


@triton.jit
def cut_kernel(t_ptr, bounded_ptr, clipped_ptr, out_ptr, count_ptr, COUNT, largest: tl.float64, TILE: tl.constexpr):
    """Scale one matrix of COUNT elements a program down to the norm largest, where it is beyond; all contiguous.

    The count (B,) is clipped (B,), and one more there or where bounded (B,) is.
    """
    i_b = tl.program_id(0).to(tl.int64)
    squares = tl.zeros((TILE,), tl.float64)
    for first in range(0, COUNT, TILE):
        o = first + tl.arange(0, TILE)
        x = tl.load(t_ptr + i_b * COUNT + o, o < COUNT, 0.0).to(tl.float64)
        squares += x * x
    norm = tl.sqrt(tl.sum(squares))
    one = tl.full((), 1.0, tl.float64)
    factor = tl.where(norm > largest, largest / tl.where(norm > largest, norm, one), one)
    clipped = tl.load(clipped_ptr + i_b)
    tl.store(count_ptr + i_b, clipped + (tl.load(bounded_ptr + i_b) | (norm > largest)).to(clipped.dtype))
    for first in range(0, COUNT, TILE):
        o = first + tl.arange(0, TILE)
        x = tl.load(t_ptr + i_b * COUNT + o, o < COUNT, 0.0)
        x = converted(x * factor.to(x.dtype), out_ptr.dtype.element_ty)
        tl.store(out_ptr + i_b * COUNT + o, x, o < COUNT)


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


def cut(t: Tensor, largest: float, dtype: torch.dtype, bounded: Tensor, clipped: Tensor) -> tuple[Tensor, Tensor]:
    """Bring matrices down to the norm ``largest`` where they are beyond, in one launch; norms are in float64.

    Args:
        t: (B,m,n), of any strides and any of float16, bfloat16, float32 and float64.
        largest: not negative.
        dtype: of the result.
        bounded: (B,) bool.
        clipped: count (B,), float32 or float64.

    Returns:
        The matrices (B,m,n), contiguous, and the count, one more where they were beyond, or where ``bounded`` is set.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    if t.ndim != 3 or 0 in t.shape[1:]:
        raise ValueError(f"t has shape {tuple(t.shape)}; must be (B, m, n) with m, n >= 1.")
    launch.check("t", t, tuple(t.shape), t.device)
    launch.check("bounded", bounded, (t.shape[0],), t.device, (torch.bool,), like="t")
    launch.check("clipped", clipped, (t.shape[0],), t.device, (torch.float32, torch.float64), like="t")
    check_out_dtype(dtype)
    t, bounded, clipped = t.contiguous(), bounded.contiguous(), clipped.contiguous()
    out = torch.empty(t.shape, dtype=dtype, device=t.device)
    count = torch.empty_like(clipped)
    if len(t):
        arguments = (t, bounded, clipped, out, count, t.shape[1] * t.shape[2], float(largest))
        launch.start(cut_kernel, (len(t),), t.device, *arguments, TILE=TILE, num_warps=WARPS)
    return out, count


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
