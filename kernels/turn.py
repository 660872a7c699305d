"""S and Q_S turned by T, in one launch; in PyTorch: ``Algebra.turned``.

B: matrices; R: rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile


@triton.jit
def _tile(ptr, o_m, o_n, R, SUM: tl.constexpr):
    """Return a tile of a contiguous matrix (R, R)."""
    return tl.load(ptr + o_m[:, None] * R + o_n[None, :], (o_m[:, None] < R) & (o_n[None, :] < R), 0.0).to(SUM)


@triton.jit
def turn_kernel(
    T_ptr,
    S_ptr,
    Q_ptr,
    both_ptr,
    R,
    SUM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute a (TILE, TILE) tile of T^T S T, or of T^T Q, a program, which makes what it needs of S T itself.

    T, S, Q (R, R), and both (2, R, R), of a matrix are contiguous.
    """
    i = tl.program_id(0)
    tiles = tl.cdiv(R, TILE)
    of_Q = i // (tiles * tiles) % 2
    matrix = (i // (2 * tiles * tiles)).to(tl.int64) * R * R
    o_m = i // tiles % tiles * TILE + tl.arange(0, TILE)
    o_n = i % tiles * TILE + tl.arange(0, TILE)
    acc = tl.zeros((TILE, TILE), SUM)
    # With prokl.kernels.operands.dot Triton 3.6 spills here on sm_80. The precision does not act on float64.
    for k in range(0, R, TILE_K):
        o_k = k + tl.arange(0, TILE_K)
        if of_Q == 1:
            x = _tile(Q_ptr + matrix, o_k, o_n, R, SUM)
        else:
            x = tl.zeros((TILE_K, TILE), SUM)
            for first in range(0, R, TILE_K):
                o = first + tl.arange(0, TILE_K)
                s = _tile(S_ptr + matrix, o_k, o, R, SUM)
                x = tl.dot(s, _tile(T_ptr + matrix, o, o_n, R, SUM), x, input_precision="tf32x3", out_dtype=SUM)
        t = tl.trans(_tile(T_ptr + matrix, o_k, o_m, R, SUM))
        acc = tl.dot(t, x, acc, input_precision="tf32x3", out_dtype=SUM)
    at = both_ptr + 2 * matrix + of_Q * R * R + o_m[:, None] * R + o_n[None, :]
    tl.store(at, acc, (o_m[:, None] < R) & (o_n[None, :] < R))


MOST = 128  # columns, up to which what is computed several times costs less than two more launches
TILES: tuple[Tile, ...] = (Tile(64, 64, 32, 4, 3), Tile(64, 64, 16, 4, 4))
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)


def choose_tile(r: int, dtype: torch.dtype) -> Tile:
    """Return the tile for this rank and the dtype of the sum; the larger one spills at odd sizes."""
    return TILES_FP64[0] if dtype == torch.float64 else TILES[r % 16 > 0]


def turned(T: Tensor, S: Tensor, Q: Tensor, *, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Compute T^T S T and T^T Q in one launch.

    Any strides, sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor; the sum is in
    float64 where one of them is, else in float32, of three TF32 products.

    Args:
        T, S, Q: (B,r,r).
        tile: block sizes, square, by default from r and the dtypes.

    Returns:
        Both (B,r,r), matrices of which are contiguous, in the dtype of the sum.
    """
    B, _, r = launch.matrices("T", T)
    launch.check(T.device, {name: (t, (B, r, r)) for name, t in (("T", T), ("S", S), ("Q", Q))})
    dtype = launch.arithmetic_dtype(T, S, Q)
    T, S, Q = (launch.multiplicable(t, dtype).contiguous() for t in (T, S, Q))
    both = torch.empty((B, 2, r, r), dtype=dtype, device=T.device)
    tile = tile or choose_tile(r, dtype)
    if B:
        launch.start(
            turn_kernel,
            (2 * B * triton.cdiv(r, tile.m) ** 2,),
            T.device,
            T,
            S,
            Q,
            both,
            r,
            SUM=TRITON_DTYPES[dtype],
            TILE=tile.m,
            TILE_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return both[:, 0], both[:, 1]
