"""Batched matrix product with an addend, scales, the energies of rows and a bound; in PyTorch: ``torch.baddbmm``.

Factors are tensors or pairs of bfloat16 (:class:`prokl.pair.Pair`), whose product is the sum of the products
of their halves but for lo lo: one after another, each over plain bfloat16 that nothing touches between its copy into
shared memory and the tensor cores.

batch: matrices; M: rows; N: columns; K: depth.
"""

from __future__ import annotations

from typing import NamedTuple

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
from prokl.kernels.split import empty_pair
from prokl.pair import Operand, Pair


@triton.jit
def product_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    alpha_ptr,
    energy_ptr,
    bounded_ptr,
    clipped_ptr,
    count_ptr,
    M,
    N,
    K,
    PARTS_OF_B,
    alpha: tl.float64,
    beta: tl.float64,
    largest: tl.float64,
    stride_A_lo,
    stride_A_b,
    stride_A_m,
    stride_A_k,
    stride_B_lo,
    stride_B_b,
    stride_B_k,
    stride_B_n,
    stride_C_b,
    stride_C_m,
    stride_C_n,
    stride_D_lo,
    stride_alpha_b,
    A_LO: tl.constexpr,
    B_LO: tl.constexpr,
    D_LO: tl.constexpr,
    HAS_C: tl.constexpr,
    ENERGY: tl.constexpr,
    BOUNDED: tl.constexpr,
    ALPHA_PER_MATRIX: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = alpha A B + beta C, (TILE_M, TILE_N) of one matrix a program.

    A (M, K), B (K, N), C (M, N) have any strides; A and B are pairs where A_LO and B_LO, and are multiplied as OPERAND.
    D (M, N), a pair where D_LO, is contiguous. Where ENERGY, energy (tiles_n, M) takes the sums of squares of its rows.
    Where BOUNDED, energy (PARTS_OF_B,) holds those of B, which is brought down to the norm largest where it
    is beyond: count = clipped + 1 there, and where bounded; all of them (batch,).
    """
    i = tl.program_id(0)
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    i_b = (i // (tiles_m * tiles_n)).to(tl.int64)
    i_tile = i % (tiles_m * tiles_n)
    # Column by column within GROUP rows of tiles: programs that run together share rows of A and columns of B in L2.
    first = i_tile // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    i_m = first + i_tile % (GROUP * tiles_n) % rows
    i_n = i_tile % (GROUP * tiles_n) // rows
    o_m = i_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_n = i_n * TILE_N + tl.arange(0, TILE_N)  # in 32 bits: fewer registers through the loop

    acc = tl.zeros((TILE_M, TILE_N), SUM)
    acc = add_product(
        acc, A_ptr + i_b * stride_A_b, B_ptr + i_b * stride_B_b, o_m, o_n.to(tl.int64), M, N, K,
        stride_A_lo, stride_A_m, stride_A_k, stride_B_lo, stride_B_k, stride_B_n,
        A_LO, B_LO, OPERAND, TILE_K,
    )  # fmt: skip

    scale = scale_of(alpha_ptr, alpha, stride_alpha_b, i_b, ALPHA_PER_MATRIX, SUM)
    # A wide tile is stored by halves of its columns, by quarters with energies: what is added and what is stored then
    # takes as much less of the registers.
    PARTS: tl.constexpr = (4 if ENERGY else 2) if TILE_N > 64 else 1
    columns = (acc, acc, acc, acc)
    if PARTS > 1:
        left, right = halves_of_columns(acc)
        columns = (left, right, left, right)  # of which two are stored
        if PARTS == 4:
            columns = halves_of_columns(left) + halves_of_columns(right)
    if BOUNDED:
        sums = tl.zeros((BOUND_TILE,), tl.float64)
        for first_part in range(0, PARTS_OF_B, BOUND_TILE):
            o_part = first_part + tl.arange(0, BOUND_TILE)
            sums += tl.load(energy_ptr + i_b * PARTS_OF_B + o_part, o_part < PARTS_OF_B, 0.0).to(tl.float64)
        norm = tl.sqrt(tl.sum(sums))
        beyond = (norm <= largest) == 0  # NaN is
        finite = norm < (2.0**127 if SUM == tl.float32 else 2.0**1023)  # half the largest, so that A B is
        one = tl.full((), 1.0, tl.float64)
        down = tl.where(finite, largest / tl.where(beyond & finite, norm, one), 0.0)
        scale *= tl.where(beyond, down, one).to(SUM)
        if i_tile == 0:
            more = (tl.load(bounded_ptr + i_b) | beyond).to(SUM)
            tl.store(count_ptr + i_b, tl.load(clipped_ptr + i_b) + more)
    squares = tl.zeros((TILE_M,), SUM)
    for part in tl.static_range(PARTS):
        d = columns[part] * scale
        if BOUNDED:
            d = tl.where(scale == 0, 0.0, d)  # of a B that is not finite, too
        o = i_n.to(tl.int64) * TILE_N + part * (TILE_N // PARTS) + tl.arange(0, TILE_N // PARTS)
        mask = (o_m[:, None] < M) & (o[None, :] < N)
        if HAS_C:
            C_at = C_ptr + i_b * stride_C_b + o_m[:, None] * stride_C_m + o[None, :] * stride_C_n
            c = tl.load(C_at, mask, 0.0).to(SUM)
            d += c * tl.full((), beta, SUM)
        if ENERGY:
            squares += tl.sum(d * d, 1)  # outside the matrix d is zero
        store_result(D_ptr, stride_D_lo, (i_b * M + o_m[:, None]) * N + o[None, :], d, mask, D_LO)
    if ENERGY:
        tl.store(energy_ptr + (i_b * tiles_n + i_n) * M + o_m, squares, o_m < M)


BOUND_TILE: tl.constexpr = tl.constexpr(512)  # energies that a program holds at a time
GROUP = 8  # rows of tiles: 64 programs read 8 strips of A and 8 of B, where along a row they would read 1 and 64

# Wide tiles do most arithmetic for a byte read. 128 divides m = 768 and 3072; (128 + 128) x 64 elements in three
# stages are 96 KB in half precision, so that two programs fit a processor of sm_90. On an H200 four warps took 0.71 to
# 1.04 of the time of eight in half precision, mostly 0.82 to 0.93; 128 x 256 gained 3 to 10 % of G_perp and of m x m by
# m x n, and lost elsewhere. In float32, where 128 x 128 spills on sm_80, 128 x 64 x 16 took 0.83 to 1.06 of the time of
# 128 x 64 x 32 with eight warps, and 0.89 of large ones.
UNALIGNED = Tile(64, 64, 32, 8, 3)
TF32 = Tile(64, 64, 16, 4, 4)  # of a product of parts a warp takes 16 rows: eight warps would compute everything twice
TILES_HALF: tuple[Tile, ...] = (Tile(128, 128, 64, 4, 3), Tile(64, 64, 64, 4, 4), UNALIGNED)
TILES_FP32: tuple[Tile, ...] = (Tile(128, 64, 16, 4, 4), TF32)
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)
TILES: tuple[Tile, ...] = tuple(dict.fromkeys((*TILES_HALF, *TILES_FP32, *TILES_FP64)))


def choose_tile(batch: int, m: int, n: int, operand: torch.dtype, wide: bool = True) -> Tile:
    """Return the largest tile of this dtype that still gives every processor a program, or the smallest.

    Args:
        batch: number of matrices.
        m: rows of the result.
        n: columns of the result.
        operand: dtype that is multiplied.
        wide: whether all that is read and written is :func:`aligned`.
    """
    if operand == torch.float64:
        return TILES_FP64[0]
    if not wide:
        return TF32 if operand == torch.float32 else UNALIGNED
    tiles = TILES_FP32 if operand == torch.float32 else TILES_HALF[:-1]
    for tile in tiles:
        if m >= tile.m and n >= tile.n and batch * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n) >= PROGRAMS:
            return tile
    return tiles[-1]


class Bound(NamedTuple):
    """A bound on the norm of a product's right factor, which is scaled down to it before the product."""

    energies: Tensor
    """(batch,parts,k), contiguous, of each of its rows: they add up to its squared norm."""
    largest: float
    """The norm that it is brought down to where it is beyond."""
    bounded: Tensor
    """(batch,) bool."""
    clipped: Tensor
    """(batch,): how often a matrix was bounded before."""


def _launch(
    A: Operand,
    B: Operand,
    C: Tensor | None,
    alpha: float | Tensor,
    beta: float,
    tile: Tile | None,
    out_dtype: torch.dtype | None,
    energy: bool = False,
    bound: Bound | None = None,
) -> tuple[Operand, Tensor]:
    """Launch the kernel; return D, a pair without a dtype, and the parts of its rows' energies or a bound's count."""
    (A_hi, A_lo, has_A_lo), (B_hi, B_lo, has_B_lo) = stored(A), stored(B)
    batch, m, k = launch.matrices("A", A)
    n, device = launch.matrices("B", B)[2], A_hi.device
    given: launch.Shapes = {"A": (A, (batch, m, k)), "B": (B, (batch, k, n)), "C": (C, (batch, m, n))}
    launch.check(device, given | scales(batch, alpha=alpha))
    if beta == 0:
        C = None
    sum_dtype, operand = operand_dtypes((A, B), *(() if C is None else (C,)))
    A_hi, B_hi = (launch.multiplicable(t, sum_dtype) for t in (A_hi, B_hi))
    pair = out_dtype is None
    assert not pair or sum_dtype == torch.float32
    D: Operand
    D = empty_pair((batch, m, n), device) if pair else torch.empty((batch, m, n), dtype=out_dtype, device=device)
    D_hi, D_lo, has_D_lo = stored(D)
    tile = tile or choose_tile(batch, m, n, operand, aligned(A_hi, B_hi, D_hi, *(() if C is None else (C,))))
    tiles_m, tiles_n = triton.cdiv(m, tile.m), triton.cdiv(n, tile.n)
    parts = torch.empty((batch, tiles_n if energy else 0, m), dtype=sum_dtype, device=device)
    flags = (parts if energy else D_hi, D_hi, D_hi, D_hi)  # D: neither read nor written as such
    count = parts
    if bound is not None:
        of_bound: launch.Shapes = {"energies": (bound.energies, (batch, *bound.energies.shape[1:2], k))}
        launch.check(device, of_bound | scales(batch, clipped=bound.clipped))
        launch.check(device, scales(batch, bounded=bound.bounded), (torch.bool,))
        count = torch.empty(batch, dtype=bound.clipped.dtype, device=device)
        flags = (bound.energies, bound.bounded.contiguous(), bound.clipped.contiguous(), count)
    alpha_at, alpha_value, stride_alpha = scale_arguments(alpha, A_hi)
    if batch:
        # A square contracted into a sum across lanes would leave each lane its own rounding of one number.
        fusion = {"enable_fp_fusion": False} if energy or bound else {}
        launch.start(
            product_kernel,
            (batch * tiles_m * tiles_n,),
            device,
            A_hi,
            B_hi,
            A_hi if C is None else C,  # not read
            D_hi,
            alpha_at,
            *flags,
            m,
            n,
            k,
            0 if bound is None else bound.energies[:1].numel(),
            alpha_value,
            float(beta),
            0.0 if bound is None else float(bound.largest),
            A_lo,
            *A_hi.stride(),
            B_lo,
            *B_hi.stride(),
            *((0, 0, 0) if C is None else C.stride()),
            D_lo,
            stride_alpha,
            A_LO=has_A_lo,
            B_LO=has_B_lo,
            D_LO=has_D_lo,
            HAS_C=C is not None,
            ENERGY=energy,
            BOUNDED=bound is not None,
            ALPHA_PER_MATRIX=isinstance(alpha, Tensor),
            OPERAND=TRITON_DTYPES[operand],
            SUM=TRITON_DTYPES[sum_dtype],
            GROUP=GROUP,
            TILE_M=tile.m,
            TILE_N=tile.n,
            TILE_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **fusion,
        )
    return D, count


def product(
    A: Operand,
    B: Operand,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Compute D = alpha A B + beta C for every matrix of a batch.

    Any strides, sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor. The sum is in
    float64 where A, B or C is, else in float32; A and B of one half precision are multiplied as they are where the
    sum is in float32, others in the dtype of the sum. A pair is multiplied by its halves; the other factor is
    a pair, too, or bfloat16, and nothing is float64.

    Args:
        A: left factors (batch,m,k).
        B: right factors (batch,k,n).
        C: addends (batch,m,n), or None. Not read where ``beta`` is 0, as in ``torch.baddbmm``.
        alpha: scale of the product: a number, or (batch,) on the device, one a matrix.
        beta: scale of C.
        out_dtype: dtype of D; by default the wider of A's and B's, float32 of pairs.
        tile: block sizes, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,n), contiguous.
    """
    D, _ = _launch(A, B, C, alpha, beta, tile, _stored_dtype(A, B, out_dtype))
    assert isinstance(D, Tensor)
    return D


def split_product(A: Operand, B: Operand, *, tile: Tile | None = None) -> Pair:
    """Compute A B, as :func:`product` does, as a pair."""
    D, _ = _launch(A, B, None, 1.0, 1.0, tile, None)
    assert isinstance(D, Pair)
    return D


def _stored_dtype(A: Operand, B: Operand, out_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a product; by default the wider of A's and B's, float32 of pairs."""
    if out_dtype is None:
        whole = [t.dtype for t in (A, B) if isinstance(t, Tensor)]
        out_dtype = torch.promote_types(*whole) if len(whole) == 2 else torch.float32
    return out_dtype


def product_with_energies(
    A: Operand,
    B: Operand,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute D = alpha A B + C and the squared norms of its rows, before they are rounded.

    Factors, the other arguments and errors are those of :func:`product`.

    Args:
        A: left factors (batch,m,k). B: right factors (batch,k,n).
        out_dtype: dtype of D; by default that of the sum.

    Returns:
        D (batch,m,n), contiguous; and parts (batch,tiles,m) that add up, in the dtype of the sum.
    """
    dtype = out_dtype or operand_dtypes((A, B), *(() if C is None else (C,)))[0]
    D, parts = _launch(A, B, C, alpha, 1.0, tile, dtype, energy=True)
    assert isinstance(D, Tensor)
    return D, parts


def bounded_product(
    A: Operand,
    B: Operand,
    energies: Tensor,
    *,
    largest: float,
    bounded: Tensor,
    clipped: Tensor,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute D = A B of a B that is brought down to the norm ``largest`` where it is beyond, and count that.

    Factors, the other arguments and errors are those of :func:`product`.

    Args:
        A: left factors (batch,m,k). B: right factors (batch,k,n).
        energies: (batch,parts,k), of B's rows, which add up to its squared norm.
        largest: not negative.
        bounded: (batch,) bool.
        clipped: (batch,).

    Returns:
        D (batch,m,n), contiguous; and clipped + 1 where a norm was beyond, or ``bounded``, else clipped.
    """
    bound = Bound(energies.contiguous(), largest, bounded, clipped)
    D, count = _launch(A, B, None, 1.0, 1.0, tile, _stored_dtype(A, B, out_dtype), bound=bound)
    assert isinstance(D, Tensor)
    return D, count
