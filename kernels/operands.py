"""Helpers that kernels of products share: pairs of bfloat16, scales, and the checks of factors.

batch: matrices; M: rows; N: columns; K: depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.split import INTERPRETED, converted, halves
from prokl.pair import Operand, Pair

PROGRAMS = 132  # processors of an H100 or H200; fewer programs than this leave some of them idle


@triton.jit
def scale_of(ptr, value, stride, i_b, PER_MATRIX: tl.constexpr, SUM: tl.constexpr):
    """Return the scale of matrix i_b: its element at ptr, or value (fp64, rounded once) for all of them."""
    if PER_MATRIX:
        return tl.load(ptr + i_b * stride).to(SUM)
    else:
        return tl.full((), value, SUM)


@triton.jit
def _tf32(x):
    """Return x (float32) with the ten bits behind the first that TF32 has, halves rounded away from zero."""
    return ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, acc):
    """Return acc + a b of tiles, of float32 as three products of TF32 parts, about as exact as float32.

    Tensor cores cut sums off: those of parts start at zero and are rounded to acc. Triton's "tf32x3" makes the same
    bits from factors below TF32's largest number, but it looks for NaN in every sum: loops took 1.3 to 1.7 times as
    many instructions. The interpreter multiplies float32 as it is.
    """
    if a.dtype == tl.float32 and not INTERPRETED:
        a_hi = _tf32(a)
        b_hi = _tf32(b)
        sums = tl.dot(a - a_hi, b_hi, input_precision="tf32")
        sums = tl.dot(a_hi, b - b_hi, sums, input_precision="tf32")
        return acc + tl.dot(a_hi, b_hi, sums, input_precision="tf32")
    return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def add_product(
    acc,
    A_ptr,
    B_ptr,
    o_m,
    o_n,
    M,
    N,
    K,
    stride_A_lo,
    stride_A_m,
    stride_A_k,
    stride_B_lo,
    stride_B_k,
    stride_B_n,
    A_LO: tl.constexpr,
    B_LO: tl.constexpr,
    OPERAND: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Return acc + A[o_m] B[:, o_n] of one matrix: A (M, K), B (K, N).

    Where A_LO or B_LO, lo lies stride_A_lo or stride_B_lo behind hi, and the loop goes over the depth once for each of
    lo hi, hi lo and hi hi that there is: one loop, so that loads run ahead across its parts.
    """
    o_k = tl.arange(0, TILE_K).to(tl.int64)
    m_m = o_m[:, None] < M
    m_n = o_n[None, :] < N
    A_at = A_ptr + o_m[:, None] * stride_A_m + o_k[None, :] * stride_A_k
    B_at = B_ptr + o_k[:, None] * stride_B_k + o_n[None, :] * stride_B_n
    if A_LO:
        A_at += stride_A_lo
    elif B_LO:
        B_at += stride_B_lo
    PARTS: tl.constexpr = 1 + (1 if A_LO else 0) + (1 if B_LO else 0)
    step = tl.full((), TILE_K, tl.int64)
    steps = tl.cdiv(K, TILE_K)
    back = (steps - 1) * step
    k = 0
    part = 0
    for _ in range(0, PARTS * steps):
        m_k = o_k < K - k
        a = tl.load(A_at, m_m & m_k[None, :], 0.0).to(OPERAND)
        b = tl.load(B_at, m_k[:, None] & m_n, 0.0).to(OPERAND)
        acc = dot(a, b, acc)
        k += TILE_K
        if PARTS == 1:
            A_at += step * stride_A_k
            B_at += step * stride_B_k
        else:
            over = k >= K
            to_A = -back * stride_A_k
            to_B = -back * stride_B_k
            if A_LO:
                to_A -= tl.where(part == 0, stride_A_lo, 0)
            if B_LO:
                to_B -= tl.where(part == 0, -stride_B_lo, stride_B_lo) if A_LO else stride_B_lo
            A_at += tl.where(over, to_A, step * stride_A_k)
            B_at += tl.where(over, to_B, step * stride_B_k)
            part = tl.where(over, part + 1, part)
            k = tl.where(over, 0, k)
    return acc


@triton.jit
def halves_of_columns(x):
    """Return the left and the right half of a tile."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def store_result(D_ptr, stride_lo, offsets, d, mask, LO: tl.constexpr):
    """Store d in the dtype of D, or where LO as a pair, its lo stride_lo behind hi."""
    if LO:
        hi, lo = halves(d)
        tl.store(D_ptr + offsets, hi, mask)
        tl.store(D_ptr + stride_lo + offsets, lo, mask)
    else:
        tl.store(D_ptr + offsets, converted(d, D_ptr.dtype.element_ty), mask)


def aligned(*tensors: Tensor) -> bool:
    """Return True if 16 bytes of every tensor can be loaded at once, as far as Triton can tell from its strides.

    Elsewhere every element has an address in registers, which large tiles have none left for.
    """
    return all(
        1 in t.stride()[1:]
        and all(stride % 16 == 0 or stride == 1 for stride in t.stride()[1:])
        and t.stride(0) % 16 == 0
        and t.storage_offset() * t.element_size() % 16 == 0
        for t in tensors
    )


def scale_arguments(scale: float | Tensor, dummy: Tensor) -> tuple[Tensor, float, int]:
    """Return pointer (dummy where it is not read), value and stride of a scale, for :func:`scale_of`."""
    return (scale, 0.0, scale.stride(0)) if isinstance(scale, Tensor) else (dummy, float(scale), 0)


def stored(t: Operand) -> tuple[Tensor, int, bool]:
    """Return a factor as a kernel takes it: the tensor, or hi, how far lo lies behind it, and whether there is a lo."""
    return (t.hi, t.both.stride(0), True) if isinstance(t, Pair) else (t, 0, False)


def operand_dtypes(operands: tuple[Operand, ...], *others: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the sum and of what is multiplied, of factors and of what is added to their product.

    Beside a pair there is a pair or bfloat16, and nothing of float64.
    """
    tensors = [stored(t)[0] for t in operands]
    sum_dtype = launch.arithmetic_dtype(*tensors, *others)
    if any(isinstance(t, Pair) for t in operands):
        assert sum_dtype == torch.float32 and all(t.dtype == torch.bfloat16 for t in tensors), tensors
    return sum_dtype, launch.operand_dtype(sum_dtype, *tensors)


def scales(batch: int, **given: float | Tensor) -> launch.Shapes:
    """Return the scales of matrices that are tensors, for :func:`launch.check`."""
    return {name: (t, (batch,)) for name, t in given.items() if isinstance(t, Tensor)}
