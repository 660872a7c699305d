"""Symmetric results by tiles of their lower triangle: their order, how they are stored, and which tiles ship.

batch: matrices; M: rows and columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile
from prokl.kernels.operands import PROGRAMS, aligned, halves_of_columns, store_result
from prokl.kernels.product import TF32, UNALIGNED


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
def lower_place(i, M, TILE: tl.constexpr):
    """Return the matrix of program i, and row and column of its tile."""
    tiles = tl.cdiv(M, TILE)
    triangle = tiles * (tiles + 1) // 2
    row, column = lower_tile(i % triangle)
    return (i // triangle).to(tl.int64), row, column


@triton.jit
def _load_lower(ptr, stride_m, stride_n, o_m, o_n, mask, diagonal):
    """Return a tile of a symmetric matrix, of which the lower half alone counts."""
    x = tl.load(ptr + o_m[:, None] * stride_m + o_n[None, :] * stride_n, mask, 0.0)
    if diagonal:  # both halves by rows: neighbours in the lower one's mirror image lie a row apart
        mirrored = tl.load(ptr + o_n[:, None] * stride_m + o_m[None, :] * stride_n, tl.trans(mask), 0.0)
        x = tl.where(o_m[:, None] >= o_n[None, :], x, tl.trans(mirrored))
    return x


@triton.jit
def _store_twice(D_ptr, d, o_m, o_n, M, mask, diagonal):
    """Store a tile of a symmetric matrix, and its mirror image where it is another tile."""
    if not diagonal:
        mirrored = (o_n[:, None] < M) & (o_m[None, :] < M)
        store_result(D_ptr, 0, o_n[:, None] * M + o_m[None, :], tl.trans(d), mirrored, False)
    store_result(D_ptr, 0, o_m[:, None] * M + o_n[None, :], d, mask, False)


@triton.jit
def store_symmetric(
    acc, scale, C_ptr, beta, D_ptr, shifted_ptr, shift, ahead, i_m, i_n, M, stride_C_m, stride_C_n,
    HAS_C: tl.constexpr, SHIFTED: tl.constexpr, ALONE: tl.constexpr, AHEAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store a tile of D = scale acc + beta C twice, itself and its mirror image; pointers are those of a matrix.

    C has any strides, D is contiguous. Where SHIFTED, D + ahead (D - C) + shift I is stored besides, from one sum. It
    is all that is stored where ALONE.
    """
    o_m = i_m * TILE + tl.arange(0, TILE)
    o_n = i_n * TILE + tl.arange(0, TILE)
    diagonal = i_m == i_n
    if diagonal:  # its halves can differ in rounding: the lower one is taken for both
        acc = tl.where(o_m[:, None] >= o_n[None, :], acc, tl.trans(acc))
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
            c = _load_lower(C_ptr, stride_C_m, stride_C_n, o_m, o, mask, diagonal).to(acc.dtype)
            d += c * tl.full((), beta, acc.dtype)
        if not ALONE:
            _store_twice(D_ptr, d, o_m, o, M, mask, diagonal)
        if SHIFTED:
            if AHEAD:
                d += tl.full((), ahead, acc.dtype) * (d - c)
            d = tl.where(o_m[:, None] == o[None, :], d + tl.full((), shift, acc.dtype), d)
            _store_twice(shifted_ptr, d, o_m, o, M, mask, diagonal)


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


def start(
    kernel: Any,
    D: Tensor,
    read: tuple[Tensor, ...],
    dtypes: tuple[torch.dtype, torch.dtype],
    tile: Tile | None,
    *arguments: Any,
    twice: bool = False,
    **constants: Any,
) -> None:
    """Launch a kernel over the lower tiles of D (batch,m,m), with ``tile`` or the one that is chosen.

    ``read`` has what is multiplied, the left factor first, and what is added; ``dtypes`` that of the sum and that of
    what is multiplied; ``twice`` says whether two matrices are stored.
    """
    batch, m, _ = D.shape
    total, operand = dtypes
    if not batch:
        return
    tile = tile or choose_tile(batch, m, operand, aligned(*read, D), read[0].stride(2) != 1, twice)
    launch.start(
        kernel,
        (batch * lower_tiles(m, tile.m),),
        D.device,
        *arguments,
        **constants,
        OPERAND=TRITON_DTYPES[operand],
        SUM=TRITON_DTYPES[total],
        TILE=tile.m,
        TILE_K=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
