"""What kernels of products share: accumulating and storing pairs of bfloat16, scales, and the checks of factors.

batch: matrices; M: rows; N: columns; K: depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.algorithm.pair import Operand, Pair
from prokl.kernels import launch
from prokl.kernels.split import halves

PROGRAMS = 132  # processors of an H100 or H200; fewer programs than this leave some of them idle


@triton.jit
def scale_of(ptr, value, stride, i_b, PER_MATRIX: tl.constexpr, SUM: tl.constexpr):
    """Return the scale of matrix i_b: its element at ptr, or value (fp64, rounded once) for all of them."""
    if PER_MATRIX:
        return tl.load(ptr + i_b * stride).to(SUM)
    else:
        return tl.full((), value, SUM)


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
    stride_A_m,
    stride_A_k,
    stride_B_k,
    stride_B_n,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Return acc + A[o_m] B[:, o_n] of one matrix: A (M, K), B (K, N)."""
    o_k = tl.arange(0, TILE_K).to(tl.int64)
    m_m = o_m[:, None] < M
    m_n = o_n[None, :] < N
    A_at = A_ptr + o_m[:, None] * stride_A_m + o_k[None, :] * stride_A_k
    B_at = B_ptr + o_k[:, None] * stride_B_k + o_n[None, :] * stride_B_n
    step = tl.full((), TILE_K, tl.int64)
    for k in range(0, K, TILE_K):
        m_k = o_k < K - k
        a = tl.load(A_at, m_m & m_k[None, :], 0.0).to(OPERAND)
        b = tl.load(B_at, m_k[:, None] & m_n, 0.0).to(OPERAND)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=SUM)
        A_at += step * stride_A_k
        B_at += step * stride_B_k
    return acc


@triton.jit
def add_products(
    acc,
    A_ptr,
    A_lo_ptr,
    B_ptr,
    B_lo_ptr,
    o_m,
    o_n,
    M,
    N,
    K,
    stride_A_m,
    stride_A_k,
    stride_B_k,
    stride_B_n,
    A_LO: tl.constexpr,
    B_LO: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Return acc + A B as :func:`add_product`, of factors with halves lo where A_LO, B_LO; the smallest terms first."""
    if A_LO:
        acc = add_product(
            acc, A_lo_ptr, B_ptr, o_m, o_n, M, N, K,
            stride_A_m, stride_A_k, stride_B_k, stride_B_n, OPERAND, SUM, PRECISION, TILE_K,
        )  # fmt: skip
    if B_LO:
        acc = add_product(
            acc, A_ptr, B_lo_ptr, o_m, o_n, M, N, K,
            stride_A_m, stride_A_k, stride_B_k, stride_B_n, OPERAND, SUM, PRECISION, TILE_K,
        )  # fmt: skip
    return add_product(
        acc, A_ptr, B_ptr, o_m, o_n, M, N, K,
        stride_A_m, stride_A_k, stride_B_k, stride_B_n, OPERAND, SUM, PRECISION, TILE_K,
    )  # fmt: skip


@triton.jit
def store_result(D_ptr, D_lo_ptr, offsets, d, mask, LO: tl.constexpr):
    """Store d in the dtype of D, or as a pair where LO."""
    if LO:
        hi, lo = halves(d)
        tl.store(D_ptr + offsets, hi, mask)
        tl.store(D_lo_ptr + offsets, lo, mask)
    else:
        tl.store(D_ptr + offsets, d.to(D_ptr.dtype.element_ty), mask)


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


def check_scales(batch: int, device: torch.device, **scales: float | Tensor) -> None:
    """Raise ValueError unless every scale is a number or one number a matrix on this device."""
    for name, scale in scales.items():
        if isinstance(scale, Tensor):
            launch.check(name, scale, (batch,), device, like="A")


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """Raise ValueError unless results can be stored in this dtype."""
    if out_dtype not in launch.FLOATS:
        raise ValueError(f"Invalid out_dtype={out_dtype}: must be one of {launch.FLOATS}.")


def scale_arguments(scale: float | Tensor, dummy: Tensor) -> tuple[Tensor, float, int]:
    """Return pointer (dummy where it is not read), value and stride of a scale, for :func:`scale_of`."""
    return (scale, 0.0, scale.stride(0)) if isinstance(scale, Tensor) else (dummy, float(scale), 0)


def halves_of(t: Operand) -> tuple[Tensor, Tensor, bool]:
    """Return hi and lo (of a tensor, the tensor twice) and whether there is a lo."""
    return (t.hi, t.lo, True) if isinstance(t, Pair) else (t, t, False)


def check_operands(like: str = "A", **operands: tuple[Operand, tuple[int, ...], torch.device]) -> None:
    """Raise ValueError unless factors have their shapes, and beside a pair there is a pair or bfloat16."""
    paired = any(isinstance(t, Pair) for t, _, _ in operands.values())
    for name, (t, shape, device) in operands.items():
        if isinstance(t, Pair):
            launch.check(f"{name}.hi", t.hi, shape, device, (torch.bfloat16,), like)
            launch.check(f"{name}.lo", t.lo, shape, device, (torch.bfloat16,), like)
            if t.hi.stride() != t.lo.stride():
                raise ValueError(f"{name} has strides {t.hi.stride()} in hi and {t.lo.stride()} in lo; must be equal.")
        else:
            launch.check(name, t, shape, device, (torch.bfloat16,) if paired else launch.FLOATS, like)


def operand_dtypes(operands: tuple[Operand, ...], *others: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of the sum and of what is multiplied, of factors and of what is added to their product."""
    tensors = [halves_of(t)[0] for t in operands]
    sum_dtype = launch.arithmetic_dtype(*tensors, *others)
    return sum_dtype, launch.operand_dtype(sum_dtype, *tensors)
