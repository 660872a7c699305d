"""Symmetric products from their lower triangles; in PyTorch: ``A @ A.mT`` and ``torch.baddbmm(C, A, B.mT)``.

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
    halves_of_columns,
    operand_dtypes,
    scale_arguments,
    scale_of,
    scales,
    store_result,
    stored,
)
from prokl.kernels.product import TF32, UNALIGNED
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
def _load_lower(ptr, i_b, stride_b, stride_m, stride_n, o_m, o_n, mask, diagonal, SUM: tl.constexpr):
    """Return a tile of a symmetric matrix, of which the lower half alone is read."""
    at = ptr + i_b * stride_b
    if diagonal:
        row = tl.maximum(o_m[:, None], o_n[None, :])
        x = tl.load(at + row * stride_m + tl.minimum(o_m[:, None], o_n[None, :]) * stride_n, mask, 0.0)
    else:
        x = tl.load(at + o_m[:, None] * stride_m + o_n[None, :] * stride_n, mask, 0.0)
    return x.to(SUM)


@triton.jit
def _store_twice(D_ptr, at, d, o_m, o_n, M, mask, diagonal):
    """Store a tile of a symmetric matrix, and its mirror image where it is another tile."""
    if not diagonal:
        mirrored = (o_n[:, None] < M) & (o_m[None, :] < M)
        store_result(D_ptr, 0, at + o_n[:, None] * M + o_m[None, :], tl.trans(d), mirrored, False)
    store_result(D_ptr, 0, at + o_m[:, None] * M + o_n[None, :], d, mask, False)


@triton.jit
def _total(ptr, PARTS):
    """Return the sum of the parts of one matrix's squared norm, which are contiguous."""
    o = tl.arange(0, 512)
    total = tl.zeros((512,), tl.float32)
    for first in range(0, PARTS, 512):
        total += tl.load(ptr + first + o, first + o < PARTS, 0.0)
    return tl.sum(total)


@triton.jit
def _inverse_norm(squares_ptr, stride_squares, PARTS, noise):
    """Return 1 / ||X||, or zero where X is negligible, or its squared norm too small or too large to be multiplied.

    squares: parts of the squared norms of X, of what X was made from, and of that of which this is a residual.
    """
    energy = _total(squares_ptr, PARTS)
    full = _total(squares_ptr + 2 * stride_squares, PARTS)
    negligible = _total(squares_ptr + stride_squares, PARTS) <= tl.full((), noise, tl.float32) * full
    vanishes = (negligible & (full < float("inf"))) | (energy < SMALLEST) | (energy > LARGEST)
    return tl.where(vanishes, 0.0, 1.0 / tl.sqrt(tl.where(vanishes, 1.0, energy)))


# Of float32: below the smallest normal number the square of the inverse norm, which the product takes, overflows.
# Newton-Schulz takes the norm of a row up to twice X's own, as its singular values overshoot 1.
SMALLEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max / 4)


@triton.jit
def symmetric_product_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    E_ptr,
    D_ptr,
    shifted_ptr,
    alpha_ptr,
    beta_ptr,
    squares_ptr,
    inverse_ptr,
    M,
    K,
    K_OF_E,
    PARTS_OF_NORM,
    alpha: tl.float64,
    beta: tl.float64,
    gamma: tl.float64,
    shift: tl.float64,
    ahead: tl.float64,
    noise: tl.float64,
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
    stride_E_lo,
    stride_alpha_b,
    stride_beta_b,
    stride_squares,
    LO: tl.constexpr,
    HAS_C: tl.constexpr,
    HAS_E: tl.constexpr,
    SHIFTED: tl.constexpr,
    AHEAD: tl.constexpr,
    SQUARED: tl.constexpr,
    NORMALISED: tl.constexpr,
    ALPHA_PER_MATRIX: tl.constexpr,
    BETA_PER_MATRIX: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = alpha A B^T + gamma E E^T + beta C, symmetric: a lower tile and its mirror image a program.

    A, B (M, K), both pairs where LO, and C (M, M) have any strides; D (M, M) is contiguous. Where HAS_E, B is A, and A
    and E (M, K_OF_E), a pair as A, are contiguous. Where SQUARED alpha counts twice. Where NORMALISED it is what
    _inverse_norm says, which inverse (batch, 2) takes, and alpha times it. Where SHIFTED, D + ahead (D - C) + shift I
    is stored besides, from one sum.
    """
    i = tl.program_id(0)
    tiles = tl.cdiv(M, TILE)
    triangle = tiles * (tiles + 1) // 2
    i_b = (i // triangle).to(tl.int64)
    i_m, i_n = lower_tile(i % triangle)
    o_m = i_m * TILE + tl.arange(0, TILE)
    o_n = i_n * TILE + tl.arange(0, TILE)

    acc = tl.zeros((TILE, TILE), SUM)
    scale = scale_of(alpha_ptr, alpha, stride_alpha_b, i_b, ALPHA_PER_MATRIX, SUM)
    if HAS_E:
        # One loop serves both: of two, each one's addresses would take registers through the other, and spill on sm_80.
        gamma = tl.full((), gamma, SUM)
        for second in range(2):
            of_E = second > 0
            depth = tl.where(of_E, K_OF_E, K)
            at = tl.where(of_E, E_ptr, A_ptr) + i_b * M * depth
            lo = tl.where(of_E, stride_E_lo, stride_A_lo)
            acc = add_product(
                acc, at, at, o_m, o_n, M, M, depth, lo, depth, 1, lo, 1, depth, LO, LO, OPERAND, SUM, PRECISION, TILE_K
            )
            acc *= tl.where(of_E, gamma, scale / gamma)
        scale = tl.full((), 1.0, SUM)
    else:
        acc = add_product(
            acc, A_ptr + i_b * stride_A_b, B_ptr + i_b * stride_B_b, o_m, o_n, M, M, K,
            stride_A_lo, stride_A_m, stride_A_k, stride_B_lo, stride_B_k, stride_B_m,
            LO, LO, OPERAND, SUM, PRECISION, TILE_K,
        )  # fmt: skip

    diagonal = i_m == i_n
    if diagonal:  # its halves can differ in rounding: the lower one is taken for both
        acc = tl.where(o_m[:, None] >= o_n[None, :], acc, tl.trans(acc))
    if NORMALISED:
        size = scale
        scale = _inverse_norm(squares_ptr + i_b * PARTS_OF_NORM, stride_squares, PARTS_OF_NORM, noise)
        if i % triangle == 0:
            tl.store(inverse_ptr + 2 * i_b, scale)
            tl.store(inverse_ptr + 2 * i_b + 1, scale * size)
    if SQUARED:
        acc = tl.where(scale == 0, tl.zeros_like(acc), acc)  # which may be infinite there
        scale = scale * scale
    to = i_b * M * M
    # A wide tile is stored by quarters of its columns: what is added and what is stored then takes a quarter of the
    # registers.
    PARTS: tl.constexpr = 4 if TILE > 64 else 1
    quarters = (acc, acc, acc, acc)
    if PARTS == 4:
        left, right = halves_of_columns(acc)
        quarters = halves_of_columns(left) + halves_of_columns(right)
    for part in tl.static_range(PARTS):
        d = quarters[part] * scale
        o = i_n * TILE + part * (TILE // PARTS) + tl.arange(0, TILE // PARTS)
        mask = (o_m[:, None] < M) & (o[None, :] < M)
        if HAS_C:
            c = _load_lower(C_ptr, i_b, stride_C_b, stride_C_m, stride_C_n, o_m, o, mask, diagonal, SUM)
            d += c * scale_of(beta_ptr, beta, stride_beta_b, i_b, BETA_PER_MATRIX, SUM)
        _store_twice(D_ptr, to, d, o_m, o, M, mask, diagonal)
        if SHIFTED:
            if AHEAD:
                d += tl.full((), ahead, SUM) * (d - c)
            d = tl.where(o_m[:, None] == o[None, :], d + tl.full((), shift, SUM), d)
            _store_twice(shifted_ptr, to, d, o_m, o, M, mask, diagonal)


# Square, so that a tile has a mirror image. At m = 768, 128 gives six whole tiles a side, of whose square 21/36 are
# computed; 64 computes 78/144 and reads twice the bytes for a product; 256 spills. (128 + 128) x 64 elements in three
# stages are 96 KB in half precision: two programs fit a processor of sm_90. On an H200 four warps took 0.74 to 0.91 of
# the time of eight, and TURNED 0.75 of that of TF32 where columns are multiplied. In float32 128 spills on sm_80, and
# 64 at odd sizes where two matrices are stored.
TILES_HALF: tuple[Tile, ...] = (Tile(128, 128, 64, 4, 3), Tile(64, 64, 64, 4, 4), UNALIGNED)
TURNED = Tile(32, 32, 32, 2, 3)  # of two warps: the tensor cores take all operands from registers
TILES_FP32: tuple[Tile, ...] = (TF32, TURNED, Tile(32, 32, 16, 2, 3))
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)
TILES: tuple[Tile, ...] = tuple(dict.fromkeys((*TILES_HALF, *TILES_FP32, *TILES_FP64)))


def lower_tiles(m: int, tile: int) -> int:
    """Return the number of tiles on and below the diagonal of an m x m matrix."""
    side = triton.cdiv(m, tile)
    return side * (side + 1) // 2


def choose_tile(
    batch: int,
    m: int,
    operand: torch.dtype,
    wide: bool = True,
    turned: bool = False,
    twice: bool = False,
) -> Tile:
    """Return the largest tile of this dtype that still gives every processor a program, or the smallest.

    Args:
        batch: number of matrices.
        m: rows and columns of the result.
        operand: widest dtype that is multiplied.
        wide: whether all that is read and written is :func:`prokl.kernels.operands.aligned`.
        turned: whether what is multiplied lies in columns.
        twice: whether two matrices are stored.
    """
    if operand == torch.float64:
        return TILES_FP64[0]
    if operand == torch.float32:
        return TILES_FP32[2] if twice and not wide else TURNED if turned and wide else TF32
    if not wide:
        return UNALIGNED
    tiles = TILES_HALF[:-1]
    return next((tile for tile in tiles if m >= tile.m and batch * lower_tiles(m, tile.m) >= PROGRAMS), tiles[-1])


def _compute(
    A: Operand,
    B: Operand,
    C: Tensor | None,
    alpha: float | Tensor,
    beta: float | Tensor,
    out_dtype: torch.dtype,
    tile: Tile | None,
    *,
    E: Operand | None = None,
    gamma: float = 1.0,
    shift: float | None = None,
    ahead: float = 0.0,
    squared: bool = False,
    norm: tuple[Tensor, float, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; return D in ``out_dtype`` and, with a ``shift``, D moved, else D.

    A ``norm`` is parts of squares, noise, and where to store.
    """
    (A_hi, A_lo, paired), (B_hi, B_lo, _), (E_hi, E_lo, _) = stored(A), stored(B), stored(A if E is None else E)
    batch, m, k = launch.matrices("A", A)
    given: launch.Shapes = {"A": (A, (batch, m, k)), "B": (B, (batch, m, k)), "C": (C, (batch, m, m))}
    given["E"] = E, (batch, m, E_hi.shape[-1])
    launch.check(A_hi.device, given | scales(batch, alpha=alpha, beta=beta))
    if isinstance(A, Pair) != isinstance(B, Pair):
        raise ValueError("A and B must both be pairs, or neither.")
    assert E is None or E_hi.dtype == A_hi.dtype
    if not isinstance(beta, Tensor) and beta == 0 and ahead == 0:
        C = None
    D = torch.empty((batch, m, m), dtype=out_dtype, device=A_hi.device)
    shifted = D if shift is None else torch.empty_like(D)
    if batch == 0:
        return D, shifted
    added = () if C is None else (C,)
    sum_dtype, operand = operand_dtypes((A, B) if E is None else (A, E), *added)
    A_hi, B_hi, E_hi = (launch.multiplicable(t, sum_dtype) for t in (A_hi, B_hi, E_hi))
    wide, turned = aligned(A_hi, B_hi, E_hi, *added, D), A_hi.stride(2) != 1
    tile = tile or choose_tile(batch, m, operand, wide, turned, shift is not None)
    alpha_at, alpha_value, stride_alpha = scale_arguments(alpha, A_hi)
    beta_at, beta_value, stride_beta = scale_arguments(beta, A_hi)
    squares, noise, inverse = norm or (D, 0.0, D)  # D: neither read nor written as such
    launch.start(
        symmetric_product_kernel,
        (batch * lower_tiles(m, tile.m),),
        A_hi.device,
        A_hi,
        B_hi,
        A_hi if C is None else C,  # A: not read
        E_hi,
        D,
        shifted,
        alpha_at,
        beta_at,
        squares,
        inverse,
        m,
        k,
        E_hi.shape[2],
        squares.shape[2],
        alpha_value,
        beta_value,
        float(gamma),
        float(shift or 0.0),
        float(ahead),
        float(noise),
        A_lo,
        *A_hi.stride(),
        B_lo,
        *B_hi.stride(),
        *((0, 0, 0) if C is None else C.stride()),
        E_lo,
        stride_alpha,
        stride_beta,
        squares.stride(0),
        LO=paired,
        HAS_C=C is not None,
        HAS_E=E is not None,
        SHIFTED=shift is not None,
        AHEAD=ahead != 0,
        SQUARED=squared,
        NORMALISED=norm is not None,
        ALPHA_PER_MATRIX=isinstance(alpha, Tensor),
        BETA_PER_MATRIX=isinstance(beta, Tensor) and C is not None,
        OPERAND=TRITON_DTYPES[operand],
        SUM=TRITON_DTYPES[sum_dtype],
        PRECISION=launch.input_precision(operand),
        TILE=tile.m,
        TILE_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return D, shifted


def symmetric_product(
    A: Operand,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
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
        tile: block sizes, square, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,m), contiguous.
    """
    return symmetric_polynomial(A, A, C=C, alpha=alpha, beta=beta, out_dtype=out_dtype, tile=tile)


def symmetric_products(
    A: Operand, E: Operand, *, C: Tensor, alpha: Tensor, gamma: float, beta: float, tile: Tile | None = None
) -> Tensor:
    """Compute D = alpha A A^T + gamma E E^T + beta C in one launch; D equals D^T exactly.

    Strides, dtypes and the other arguments are those of :func:`symmetric_product`.

    Args:
        A: (batch,m,k). E: (batch,m,l), of A's dtype.
        C: symmetric (batch,m,m).
        alpha: (batch,). gamma: above 0. beta: a number.
    """
    A, E = (Pair(t.both.contiguous()) if isinstance(t, Pair) else t.contiguous() for t in (A, E))
    out_dtype = torch.float32 if isinstance(A, Pair) else A.dtype
    return _compute(A, A, C, alpha, beta, out_dtype, tile, E=E, gamma=gamma)[0]


def symmetric_polynomial(
    A: Operand,
    B: Operand,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Compute D = alpha A B^T + beta C where that is symmetric, as of polynomials of one matrix; D equals D^T exactly.

    Half of it is computed. B is (batch,m,k), a pair where A is; all else is as of :func:`symmetric_product`.
    """
    if isinstance(A, Pair) or isinstance(B, Pair):
        out_dtype = out_dtype or torch.float32
    else:
        out_dtype = out_dtype or torch.promote_types(A.dtype, B.dtype)
    return _compute(A, B, C, alpha, beta, out_dtype, tile)[0]


def shifted_polynomial(
    A: Tensor, B: Tensor, *, C: Tensor, alpha: float, beta: float, shift: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute D = alpha A B^T + beta C as :func:`symmetric_polynomial` does, and D + shift I, each rounded once."""
    return _compute(A, B, C, alpha, beta, torch.promote_types(A.dtype, B.dtype), tile, shift=shift)


def extrapolated(
    A: Tensor, *, C: Tensor, alpha: float, beta: float, ahead: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute D = alpha A A^T + beta C as :func:`symmetric_product` does, and D + ahead (D - C), each rounded once."""
    return _compute(A, A, C, alpha, beta, A.dtype, tile, shift=0.0, ahead=ahead)


def gram(X: Tensor, scale: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Compute scale^2 X X^T (batch,m,m), in the dtype of X; a scale of zero takes X away whatever it holds.

    Args:
        X: (batch,m,k). scale: (batch,). tile: block sizes, by default from the sizes and the dtypes.
    """
    return _compute(X, X, None, scale, 1.0, X.dtype, tile, squared=True)[0]


def normalised_gram(
    X: Tensor, squares: Tensor, noise: float, size: Tensor, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute s^2 X X^T as :func:`gram` does, for s = 1 / ||X||, or 0 where X is negligible or its norm out of range.

    Args:
        X: (batch,m,k).
        squares: (3,batch,parts) float32, contiguous, parts that add up to squared norms: of X, of what X was made from,
            and of that of which this is a residual.
        noise: ratio of the last two up to which X is negligible; nothing is where the last overflows.
        size: (batch,).

    Returns:
        The product (batch,m,m), in the dtype of X; s, and size s (batch,), in float32.
    """
    launch.check(X.device, {"squares": (squares, (3, X.shape[0], squares.shape[-1]))}, (torch.float32,))
    inverse = torch.empty((X.shape[0], 2), dtype=torch.float32, device=X.device)
    norm = squares.contiguous(), noise, inverse
    D, _ = _compute(X, X, None, size, 1.0, X.dtype, tile, squared=True, norm=norm)
    return D, inverse[:, 0], inverse[:, 1]
