"""What follows from norms of whole matrices: a bound on one, and the factor that normalises another.

In PyTorch: ``Algebra.bounded_rows`` and ``.momentum``. B: matrices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES
from prokl.kernels.operands import store_result, stored
from prokl.kernels.split import empty_pair
from prokl.pair import Operand

TILE = 2048
WARPS = 8
ROOM = 4
"""How many times the squared norm of X that of a row may be in Newton-Schulz, whose singular values overshoot."""


@triton.jit
def bound_rows_kernel(
    t_ptr,
    rows_ptr,
    bounded_ptr,
    out_ptr,
    flag_ptr,
    M,
    N,
    largest: tl.float64,
    stride_lo,
    PAIR: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute diag(rows) t (M, N) of one matrix a program, scaled down to the norm largest where it is beyond.

    All is contiguous; out is of DTYPE, or a pair where PAIR. The flag (B,) is set there, and where bounded (B,) is.
    """
    i_b = tl.program_id(0).to(tl.int64)
    COUNT = tl.full((), M, tl.int64) * N  # a size of one is a constant
    squares = tl.zeros((TILE,), tl.float64)
    for first in range(0, COUNT, TILE):
        o = first + tl.arange(0, TILE)
        x = tl.load(t_ptr + i_b * COUNT + o, o < COUNT, 0.0).to(DTYPE)
        x *= tl.load(rows_ptr + i_b * M + o // N, o < COUNT, 0.0).to(DTYPE)
        squares += x.to(tl.float64) * x.to(tl.float64)
    norm = tl.sqrt(tl.sum(squares))
    one = tl.full((), 1.0, tl.float64)
    factor = tl.where(norm > largest, largest / tl.where(norm > largest, norm, one), one)
    tl.store(flag_ptr + i_b, tl.load(bounded_ptr + i_b) | (norm > largest))
    for first in range(0, COUNT, TILE):
        o = first + tl.arange(0, TILE)
        x = tl.load(t_ptr + i_b * COUNT + o, o < COUNT, 0.0).to(DTYPE)
        x *= tl.load(rows_ptr + i_b * M + o // N, o < COUNT, 0.0).to(DTYPE)
        store_result(out_ptr, stride_lo, i_b * COUNT + o, x * factor.to(DTYPE), o < COUNT, PAIR)


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


def bound_rows(t: Tensor, rows: Tensor, largest: float, bounded: Tensor, pair: bool = False) -> tuple[Operand, Tensor]:
    """Compute diag(rows) t, brought down to the norm ``largest`` where it is beyond, in one launch.

    Norms are in float64.

    Args:
        t: (B,m,n), of any strides and any of float16, bfloat16, float32 and float64.
        rows: (B,m), likewise.
        largest: not negative.
        bounded: (B,) bool.
        pair: whether the matrices are wanted as a pair.

    Returns:
        The matrices (B,m,n), contiguous, in float64 where t or rows is, else in float32; and (B,) bool, whether one was
        beyond, or ``bounded``.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    if t.ndim != 3 or 0 in t.shape[1:]:
        raise ValueError(f"t has shape {tuple(t.shape)}; must be (B, m, n) with m, n >= 1.")
    launch.check("t", t, tuple(t.shape), t.device)
    launch.check("rows", rows, tuple(t.shape[:2]), t.device, like="t")
    launch.check("bounded", bounded, (t.shape[0],), t.device, (torch.bool,), like="t")
    dtype = launch.arithmetic_dtype(t, rows)
    t, rows, bounded = t.contiguous(), rows.contiguous(), bounded.contiguous()
    if pair and dtype != torch.float32:
        raise ValueError("A result in float64 was to be split; pairs hold float32.")
    out: Operand = empty_pair(tuple(t.shape), t.device) if pair else torch.empty(t.shape, dtype=dtype, device=t.device)
    (to, lo, _), flag = stored(out), torch.empty_like(bounded)
    if len(t):
        arguments = (t, rows, bounded, to, flag, *t.shape[1:], float(largest), lo)
        constants = {"PAIR": pair, "DTYPE": TRITON_DTYPES[dtype], "TILE": TILE, "num_warps": WARPS}
        launch.start(bound_rows_kernel, (len(t),), t.device, *arguments, **constants)
    return out, flag


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
