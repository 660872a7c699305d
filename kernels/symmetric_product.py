"""Symmetric products from their lower triangles; in PyTorch: ``A @ A.mT`` and ``torch.baddbmm(C, A, B)``.

batch: matrices; M: rows and columns; K: depth.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile
from prokl.kernels.operands import (
    PROGRAMS,
    add_product,
    aligned,
    check_operands,
    check_out_dtype,
    check_scales,
    operand_dtypes,
    scale_arguments,
    scale_of,
    store_result,
    stored,
)
from prokl.kernels.product import IEEE, UNALIGNED
from prokl.kernels.split import empty_pair
from prokl.pair import Operand, Pair


@triton.jit
def settle_row(row, i):
    """Return the row of tile i, given a guess that is off by at most one; all in integers."""
    row = tl.where(row * (row + 1) // 2 > i, row - 1, row)
    return tl.where((row + 1) * (row + 2) // 2 <= i, row + 1, row)


@triton.jit
def lower_tile(i):
    """Return row and column of tile i of a lower triangle, counted row by row: (0,0), (1,0), (1,1), (2,0), ..."""
    # Below i = 2^31 the root in float32, on a GPU an approximate one, is off by far less than one before it is cut.
    row = settle_row(((tl.sqrt(8.0 * i.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int64), i)
    return row, i - row * (row + 1) // 2


@triton.jit
def symmetric_product_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    shifted_ptr,
    alpha_ptr,
    beta_ptr,
    M,
    K,
    alpha: tl.float64,
    beta: tl.float64,
    shift: tl.float64,
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
    stride_D_lo,
    stride_alpha_b,
    stride_beta_b,
    LO: tl.constexpr,
    D_LO: tl.constexpr,
    HAS_C: tl.constexpr,
    SHIFTED: tl.constexpr,
    ALPHA_PER_MATRIX: tl.constexpr,
    BETA_PER_MATRIX: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = alpha A B^T + beta C, known to be symmetric: a lower tile and its mirror image a program.

    A, B (M, K), both pairs where LO, and C (M, M) have any strides; D (M, M), a pair where D_LO, is contiguous. Where
    SHIFTED, D + shift I is stored besides.
    """
    i = tl.program_id(0)
    tiles = tl.cdiv(M, TILE)
    triangle = tiles * (tiles + 1) // 2
    i_b = (i // triangle).to(tl.int64)
    i_m, i_n = lower_tile(i % triangle)
    o_m = i_m * TILE + tl.arange(0, TILE)
    o_n = i_n * TILE + tl.arange(0, TILE)

    acc = tl.zeros((TILE, TILE), SUM)
    acc = add_product(
        acc, A_ptr + i_b * stride_A_b, B_ptr + i_b * stride_B_b, o_m, o_n, M, M, K,
        stride_A_lo, stride_A_m, stride_A_k, stride_B_lo, stride_B_k, stride_B_m,
        LO, LO, OPERAND, SUM, PRECISION, TILE_K,
    )  # fmt: skip

    mask = (o_m[:, None] < M) & (o_n[None, :] < M)
    d = acc * scale_of(alpha_ptr, alpha, stride_alpha_b, i_b, ALPHA_PER_MATRIX, SUM)
    if HAS_C:
        C_at = C_ptr + i_b * stride_C_b + o_m[:, None] * stride_C_m + o_n[None, :] * stride_C_n
        c = tl.load(C_at, mask, 0.0).to(SUM)
        d += c * scale_of(beta_ptr, beta, stride_beta_b, i_b, BETA_PER_MATRIX, SUM)
    at_D = i_b * M * M
    if i_m == i_n:
        # Its halves can differ in rounding: the lower one is taken for both.
        d = tl.where(o_m[:, None] >= o_n[None, :], d, tl.trans(d))
    else:
        mirrored = (o_n[:, None] < M) & (o_m[None, :] < M)
        store_result(D_ptr, stride_D_lo, at_D + o_n[:, None] * M + o_m[None, :], tl.trans(d), mirrored, D_LO)
        if SHIFTED:  # off the diagonal
            at = at_D + o_n[:, None] * M + o_m[None, :]
            tl.store(shifted_ptr + at, tl.trans(d).to(shifted_ptr.dtype.element_ty), mirrored)
    store_result(D_ptr, stride_D_lo, at_D + o_m[:, None] * M + o_n[None, :], d, mask, D_LO)
    if SHIFTED:
        d = tl.where(o_m[:, None] == o_n[None, :], d + tl.full((), shift, SUM), d)
        at = at_D + o_m[:, None] * M + o_n[None, :]
        tl.store(shifted_ptr + at, d.to(shifted_ptr.dtype.element_ty), mask)


# Square, so that a tile has a mirror image. At m = 768, 128 gives six whole tiles a side, of whose square 21/36 are
# computed; 64 computes 78/144 and reads twice the bytes for a product; 256 spills. (128 + 128) x 64 elements in three
# stages are 96 KB in half precision: two programs fit a processor of sm_90 (one where C is added, by its registers).
# In float32 128 spills on sm_80.
TILES_HALF: tuple[Tile, ...] = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), UNALIGNED)
TILES_FP32: tuple[Tile, ...] = (UNALIGNED, IEEE)
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)
TILES: tuple[Tile, ...] = tuple(dict.fromkeys((*TILES_HALF, *TILES_FP32, *TILES_FP64)))


def lower_tiles(m: int, tile: int) -> int:
    """Return the number of tiles on and below the diagonal of an m x m matrix."""
    side = triton.cdiv(m, tile)
    return side * (side + 1) // 2


def choose_tile(batch: int, m: int, operand: torch.dtype, precision: str = "tf32x3", wide: bool = True) -> Tile:
    """Return the largest tile of this dtype that still gives every processor a program, or the smallest.

    Args:
        batch: number of matrices.
        m: rows and columns of the result.
        operand: widest dtype that is multiplied.
        precision: of float32 operands.
        wide: whether all that is read and written is :func:`prokl.kernels.product.aligned`.
    """
    if operand == torch.float64:
        return TILES_FP64[0]
    if operand == torch.float32 and precision == "ieee":
        return IEEE
    if operand == torch.float32 or not wide:
        return UNALIGNED
    tiles = TILES_HALF[:-1]
    return next((tile for tile in tiles if m >= tile.m and batch * lower_tiles(m, tile.m) >= PROGRAMS), tiles[-1])


def _launch(
    A: Operand,
    B: Operand,
    C: Tensor | None,
    alpha: float | Tensor,
    beta: float | Tensor,
    out_dtype: torch.dtype | None,
    precision: str,
    tile: Tile | None,
    shift: float | None = None,
) -> tuple[Operand, Tensor | None]:
    # D = alpha A B^T + beta C for checked A and B, in out_dtype; as a pair where that is None. And D + shift I.
    (A_hi, A_lo, paired), (B_hi, B_lo, _) = stored(A), stored(B)
    batch, m, k = A_hi.shape
    if C is not None:
        launch.check("C", C, (batch, m, m), A_hi.device, like="A")
    check_scales(batch, A_hi.device, alpha=alpha, beta=beta)
    if tile is not None and tile.m != tile.n:
        raise ValueError(f"Invalid tile={tile}: must be square, m = n.")
    if not isinstance(beta, Tensor) and beta == 0:
        C = None
    D: Operand
    if out_dtype is None:
        D = empty_pair((batch, m, m), A_hi.device)
    else:
        check_out_dtype(out_dtype)
        D = torch.empty((batch, m, m), dtype=out_dtype, device=A_hi.device)
    D_hi, D_lo, has_D_lo = stored(D)
    shifted = None if shift is None else torch.empty_like(D_hi)
    if batch == 0:
        return D, shifted
    added = () if C is None else (C,)
    sum_dtype, operand = operand_dtypes((A, B), *added)
    tile = tile or choose_tile(batch, m, operand, precision, aligned(A_hi, B_hi, *added, D_hi))
    alpha_at, alpha_value, stride_alpha = scale_arguments(alpha, A_hi)
    beta_at, beta_value, stride_beta = scale_arguments(beta, A_hi)
    launch.start(
        symmetric_product_kernel,
        (batch * lower_tiles(m, tile.m),),
        A_hi.device,
        A_hi,
        B_hi,
        A_hi if C is None else C,  # not read
        D_hi,
        D_hi if shifted is None else shifted,  # D: not written as such
        alpha_at,
        beta_at,
        m,
        k,
        alpha_value,
        beta_value,
        shift or 0.0,
        A_lo,
        *A_hi.stride(),
        B_lo,
        *B_hi.stride(),
        *((0, 0, 0) if C is None else C.stride()),
        D_lo,
        stride_alpha,
        stride_beta,
        LO=paired,
        D_LO=has_D_lo,
        HAS_C=C is not None,
        SHIFTED=shifted is not None,
        ALPHA_PER_MATRIX=isinstance(alpha, Tensor),
        BETA_PER_MATRIX=isinstance(beta, Tensor) and C is not None,
        OPERAND=TRITON_DTYPES[operand],
        SUM=TRITON_DTYPES[sum_dtype],
        PRECISION=precision if operand == torch.float32 else "ieee",
        TILE=tile.m,
        TILE_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return D, shifted


def _check_factor(A: Operand) -> None:
    hi, _, _ = stored(A)
    if hi.ndim != 3 or 0 in hi.shape[1:]:
        raise ValueError(f"A has shape {tuple(A.shape)}; must be (batch, m, k) with m, k >= 1.")
    check_operands(A=(A, tuple(hi.shape), hi.device))


def symmetric_product(
    A: Operand,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    precision: str = "tf32x3",
    tile: Tile | None = None,
) -> Tensor:
    """Compute D = alpha A A^T + beta C for every matrix of a batch; D equals D^T exactly.

    Any strides, sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor. The sum is in
    float64 where a tensor is, else in float32. A of half precision is multiplied as it is where the sum is in
    float32, a pair by its halves; all else is in the dtype of the sum. Half of the products are computed, and half of
    C is read.

    Args:
        A: factors (batch,m,k).
        C: symmetric addends (batch,m,m), or None. Not read where ``beta`` is the number 0.
        alpha: scale of the product: a number, or (batch,) on the device, one a matrix.
        beta: likewise, scale of C.
        out_dtype: dtype of D; by default A's, float32 of a pair.
        precision: how float32 operands are multiplied, one of :data:`prokl.kernels.launch.PRECISIONS`.
        tile: block sizes, square, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,m), contiguous.

    Raises:
        ValueError: a shape, a dtype, a device or a value; the message names the argument and the bound.
    """
    launch.check_precision(precision)
    _check_factor(A)
    out_dtype = out_dtype or (torch.float32 if isinstance(A, Pair) else A.dtype)
    D, _ = _launch(A, A, C, alpha, beta, out_dtype, precision, tile)
    assert isinstance(D, Tensor)
    return D


def symmetric_product_pair(A: Pair, *, tile: Tile | None = None) -> Pair:
    """Compute A A^T of a pair and split it as it is stored; arguments and errors as of :func:`symmetric_product`."""
    _check_factor(A)
    D, _ = _launch(A, A, None, 1.0, 1.0, None, "tf32x3", tile)
    assert isinstance(D, Pair)
    return D


def symmetric_polynomial(
    A: Tensor,
    B: Tensor,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    precision: str = "tf32x3",
    tile: Tile | None = None,
) -> Tensor:
    """Compute D = alpha A B + beta C for symmetric A and B that commute and symmetric C; D equals D^T exactly.

    A B is then symmetric, as for two polynomials of one symmetric matrix, and half of it is computed. B is read
    along its rows, as A is: what comes out for a B that is not symmetric is the lower half of alpha A B^T + beta C.
    Strides, dtypes and the other arguments are those of :func:`symmetric_product`.

    Args:
        A: symmetric (batch,m,m).
        B: symmetric (batch,m,m), A B = B A.
        C: symmetric addends (batch,m,m), or None. Not read where ``beta`` is the number 0.
        alpha: scale of the product: a number, or (batch,) on the device, one a matrix.
        beta: likewise, scale of C.
        out_dtype: dtype of D; by default the wider of A's and B's.
        precision: how float32 operands are multiplied, one of :data:`prokl.kernels.launch.PRECISIONS`.
        tile: block sizes, square, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,m), contiguous.

    Raises:
        ValueError: a shape, a dtype, a device or a value; the message names the argument and the bound.
    """
    _check_polynomial(A, B)
    launch.check_precision(precision)
    out_dtype = out_dtype or torch.promote_types(A.dtype, B.dtype)
    D, _ = _launch(A, B, C, alpha, beta, out_dtype, precision, tile)
    assert isinstance(D, Tensor)
    return D


def shifted_polynomial(
    A: Tensor, B: Tensor, *, C: Tensor, alpha: float, beta: float, shift: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute D as :func:`symmetric_polynomial` does, and D + shift I, each rounded once, from the same sum."""
    _check_polynomial(A, B)
    D, shifted = _launch(A, B, C, alpha, beta, torch.promote_types(A.dtype, B.dtype), "tf32x3", tile, shift)
    assert isinstance(D, Tensor) and shifted is not None
    return D, shifted


def _check_polynomial(A: Tensor, B: Tensor) -> None:
    if A.ndim != 3 or A.shape[1] != A.shape[2] or A.shape[1] == 0:
        raise ValueError(f"A has shape {tuple(A.shape)}; must be (batch, m, m) with m >= 1.")
    launch.check("A", A, tuple(A.shape), A.device)
    launch.check("B", B, tuple(A.shape), A.device, like="A")
