"""Symmetric products from their lower triangles; in PyTorch: ``torch.baddbmm(C, A, B.mT)``, B often A.

batch: matrices; M: rows and columns; K: depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch, triangle
from prokl.kernels.launch import Tile
from prokl.kernels.operands import add_product, operand_dtypes, scale_arguments, scale_of, scales, stored
from prokl.kernels.triangle import lower_place, store_symmetric
from prokl.pair import Operand, Pair


@triton.jit
def symmetric_product_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    shifted_ptr,
    alpha_ptr,
    M,
    K,
    alpha: tl.float64,
    beta: tl.float64,
    shift: tl.float64,
    ahead: tl.float64,
    stride_A_lo,
    stride_A_b,
    stride_A_m,
    stride_A_k,
    stride_B_lo,
    stride_B_b,
    stride_B_m,
    stride_B_k,
    stride_C_b,
    stride_C_m,
    stride_C_n,
    stride_alpha_b,
    LO: tl.constexpr,
    HAS_C: tl.constexpr,
    SHIFTED: tl.constexpr,
    ALONE: tl.constexpr,
    AHEAD: tl.constexpr,
    ALPHA_PER_MATRIX: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = alpha A B^T + beta C, symmetric: a lower tile and its mirror image a program.

    A, B (M, K), both pairs where LO, and C (M, M) have any strides; D (M, M), and shifted where SHIFTED, are
    contiguous. Where ALONE, D is not stored.
    """
    i_b, i_m, i_n = lower_place(tl.program_id(0), M, TILE)
    o_m = i_m * TILE + tl.arange(0, TILE)
    o_n = i_n * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), SUM)
    acc = add_product(
        acc, A_ptr + i_b * stride_A_b, B_ptr + i_b * stride_B_b, o_m, o_n, M, M, K,
        stride_A_lo, stride_A_m, stride_A_k, stride_B_lo, stride_B_k, stride_B_m,
        LO, LO, OPERAND, TILE_K,
    )  # fmt: skip
    scale = scale_of(alpha_ptr, alpha, stride_alpha_b, i_b, ALPHA_PER_MATRIX, SUM)
    if ALPHA_PER_MATRIX:
        acc = tl.where(scale == 0, tl.zeros_like(acc), acc)  # which may be infinite there
    to = i_b * M * M
    store_symmetric(
        acc, scale, C_ptr + i_b * stride_C_b, beta, D_ptr + to, shifted_ptr + to, shift, ahead, i_m, i_n, M,
        stride_C_m, stride_C_n, HAS_C, SHIFTED, ALONE, AHEAD, TILE,
    )  # fmt: skip


def _compute(
    A: Operand,
    B: Operand,
    C: Tensor | None,
    alpha: float | Tensor,
    beta: float,
    tile: Tile | None,
    out_dtype: torch.dtype | None = None,
    shift: float | None = None,
    ahead: float = 0.0,
    alone: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; return D and, with a ``shift``, D + ahead (D - C) + shift I, else D; ``alone`` only that."""
    (A_hi, A_lo, paired), (B_hi, B_lo, _) = stored(A), stored(B)
    batch, m, k = launch.matrices("A", A)
    given: launch.Shapes = {"A": (A, (batch, m, k)), "B": (B, (batch, m, k)), "C": (C, (batch, m, m))}
    launch.check(A_hi.device, given | scales(batch, alpha=alpha))
    if isinstance(A, Pair) != isinstance(B, Pair):
        raise ValueError("A and B must both be pairs, or neither.")
    if beta == 0 and ahead == 0:
        C = None
    added = () if C is None else (C,)
    dtypes = operand_dtypes((A, B), *added)
    out_dtype = out_dtype or (torch.float32 if paired else torch.promote_types(A_hi.dtype, B_hi.dtype))
    A_hi, B_hi = (launch.multiplicable(t, dtypes[0]) for t in (A_hi, B_hi))
    D = torch.empty((batch, m, m), dtype=out_dtype, device=A_hi.device)
    shifted = D if shift is None or alone else torch.empty_like(D)
    alpha_at, alpha_value, stride_alpha = scale_arguments(alpha, A_hi)
    triangle.start(
        symmetric_product_kernel,
        D,
        (A_hi, B_hi, *added),
        dtypes,
        tile,
        A_hi,
        B_hi,
        A_hi if C is None else C,  # A: not read
        D,
        shifted,
        alpha_at,
        m,
        k,
        alpha_value,
        float(beta),
        float(shift or 0.0),
        float(ahead),
        A_lo,
        *A_hi.stride(),
        B_lo,
        *B_hi.stride(),
        *((0, 0, 0) if C is None else C.stride()),
        stride_alpha,
        twice=shifted is not D,
        LO=paired,
        HAS_C=C is not None,
        SHIFTED=shift is not None,
        ALONE=alone,
        AHEAD=ahead != 0,
        ALPHA_PER_MATRIX=isinstance(alpha, Tensor),
    )
    return D, shifted


def symmetric_product(
    A: Operand,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Compute D = alpha A A^T + beta C for every matrix of a batch; D equals D^T exactly.

    Any strides, sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor. The sum is in
    float64 where a tensor is, else in float32. A of half precision is multiplied as it is where the sum is in
    float32, a pair by its halves; all else is in the dtype of the sum. Half of the products are computed, and half of
    C counts.

    Args:
        A: factors (batch,m,k).
        C: symmetric addends (batch,m,m), or None. Not read where ``beta`` is 0.
        alpha: scale of the product: a number, or (batch,) on the device, one a matrix; 0 there takes A away, whatever
            it holds.
        beta: scale of C.
        out_dtype: dtype of D; by default A's, float32 of a pair.
        tile: block sizes, square, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,m), contiguous.
    """
    return _compute(A, A, C, alpha, beta, tile, out_dtype)[0]


def symmetric_polynomial(
    A: Operand,
    B: Operand,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float = 1.0,
    shift: float | None = None,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Compute D = alpha A B^T + beta C + shift I where that is symmetric, as of polynomials of one matrix.

    D equals D^T exactly, and half of it is computed. B is (batch,m,k), a pair where A is; all else is as of
    :func:`symmetric_product`.
    """
    return _compute(A, B, C, alpha, beta, tile, out_dtype, shift, alone=shift is not None)[0]


def shifted_polynomial(
    A: Tensor, B: Tensor, *, C: Tensor, alpha: float, beta: float, shift: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute D = alpha A B^T + beta C as :func:`symmetric_polynomial` does, and D + shift I, each rounded once."""
    return _compute(A, B, C, alpha, beta, tile, shift=shift)


def extrapolated(
    A: Tensor, *, C: Tensor, alpha: float, beta: float, ahead: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute D = alpha A A^T + beta C as :func:`symmetric_product` does, and D + ahead (D - C), each rounded once."""
    return _compute(A, A, C, alpha, beta, tile, shift=0.0, ahead=ahead)
