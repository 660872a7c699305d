"""Gradient and momentum projected onto the subspace from one read of both; in PyTorch: ``G @ U, M @ U``.

The gradient's projection is split besides where U is, as the residual's product takes it.

B: matrices; M: short side; N: long side; R: rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile
from prokl.kernels.operands import aligned, dot, store_result, stored
from prokl.kernels.split import empty_pair, halves
from prokl.pair import Operand


@triton.jit
def _add(acc, x, u, u_lo, U_LO: tl.constexpr, OPERAND: tl.constexpr):
    # acc + x u of tiles; where u has a half lo, x is split here unless it is bfloat16. Sums of parts start as dot's.
    if U_LO:
        if x.dtype == tl.bfloat16:
            x_hi = x.to(OPERAND)
            low_parts = tl.dot(x_hi, u_lo)
        else:
            hi, lo = halves(x.to(tl.float32))
            x_hi = hi.to(OPERAND)
            low_parts = tl.dot(lo.to(OPERAND), u)
            low_parts = tl.dot(x_hi, u_lo, low_parts)
        return acc + tl.dot(x_hi, u, low_parts)
    return dot(x.to(OPERAND), u, acc)


@triton.jit
def project_kernel(
    G_ptr,
    M_ptr,
    U_ptr,
    projected_ptr,
    GU_pair_ptr,
    M,
    N,
    R,
    stride_G_b,
    stride_G_m,
    stride_G_n,
    stride_M_b,
    stride_M_m,
    stride_M_n,
    stride_U_lo,
    stride_U_b,
    stride_U_n,
    stride_U_r,
    stride_GU_lo,
    U_LO: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Compute GU = G U and MU = M U, (TILE_M, TILE_R) of each a program.

    G, the momentum (M, N) and U (N, R), a pair where U_LO, have any strides and are multiplied as OPERAND. projected
    (2, M, R), GU before MU, is contiguous, of SUM; where U_LO the pair takes GU, too.
    """
    i = tl.program_id(0)
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_r = tl.cdiv(R, TILE_R)
    # Programs that read the same rows of G and M run side by side, so that the second read hits the L2 cache.
    i_r = i % tiles_r
    i_m = (i // tiles_r) % tiles_m
    i_b = (i // (tiles_r * tiles_m)).to(tl.int64)
    o_m = i_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_r = i_r * TILE_R + tl.arange(0, TILE_R)  # in 32 bits, as o_n: fewer registers through the loop
    o_n = tl.arange(0, TILE_N)
    m_m = o_m[:, None] < M
    m_r = o_r[None, :] < R

    n = o_n.to(tl.int64)
    G_at = G_ptr + i_b * stride_G_b + o_m[:, None] * stride_G_m + n[None, :] * stride_G_n
    M_at = M_ptr + i_b * stride_M_b + o_m[:, None] * stride_M_m + n[None, :] * stride_M_n
    U_at = U_ptr + i_b * stride_U_b + n[:, None] * stride_U_n + o_r[None, :].to(tl.int64) * stride_U_r
    step = tl.full((), TILE_N, tl.int64)
    GU = tl.zeros((TILE_M, TILE_R), SUM)
    MU = tl.zeros((TILE_M, TILE_R), SUM)
    for k in range(0, N, TILE_N):
        m_n = o_n < N - k
        u = tl.load(U_at, m_n[:, None] & m_r, 0.0).to(OPERAND)
        u_lo = tl.load(U_at + stride_U_lo, m_n[:, None] & m_r, 0.0).to(OPERAND) if U_LO else u
        GU = _add(GU, tl.load(G_at, m_m & m_n[None, :], 0.0), u, u_lo, U_LO, OPERAND)
        MU = _add(MU, tl.load(M_at, m_m & m_n[None, :], 0.0), u, u_lo, U_LO, OPERAND)
        G_at += step * stride_G_n
        M_at += step * stride_M_n
        U_at += step * stride_U_n
    at = (2 * i_b * M + o_m[:, None]) * R + o_r[None, :]
    tl.store(projected_ptr + at, GU, m_m & m_r)
    tl.store(projected_ptr + at + tl.full((), M, tl.int64) * R, MU, m_m & m_r)
    if U_LO:
        store_result(GU_pair_ptr, stride_GU_lo, (i_b * M + o_m[:, None]) * R + o_r[None, :], GU, m_m & m_r, True)


# m: rows of a program; n: its columns of U; k: how much of the long side is added at a time.
# No tile is 128 wide, though two programs then share the rows of G and M, in L2, at rank 128: two accumulators of that
# width in TF32 parts compile to nothing but a trap on sm_100 in Triton 3.6. Deeper tiles spill on sm_80. A warp takes
# 16 rows: eight would compute every product of 64 rows twice where one is added to another, as those of parts are.
# 64 x 64 x 64 in three stages took 0.85 to 0.98 of the time of 64 x 64 x 32 on an H200, but spills on sm_80.
TILES: tuple[Tile, ...] = (Tile(128, 64, 16, 8, 3), Tile(64, 32, 16, 4, 4), Tile(64, 16, 16, 4, 4))
TILES_PAIR: tuple[Tile, ...] = (Tile(64, 64, 32, 4, 4), Tile(64, 32, 32, 4, 4), Tile(64, 16, 32, 4, 4))
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)


def choose_tile(r: int, dtype: torch.dtype, wide: bool = True, paired: bool = False) -> Tile:
    """Return the narrowest tile that holds rank ``r``, or the widest that does not spill.

    Args:
        r: rank.
        dtype: that of the sum.
        wide: whether all that is read and written is :func:`prokl.kernels.operands.aligned`, and U in rows.
        paired: whether U is a pair.
    """
    if dtype == torch.float64:
        return TILES_FP64[0]
    large, middle, small = TILES_PAIR if paired else TILES
    if r > middle.n and wide:
        return large
    # The addresses of unaligned pairs are held in registers: too many for the middle one.
    return middle if r > small.n and (wide or not paired) else small


def project(
    G: Tensor,
    M: Tensor,
    U: Operand,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Operand]:
    """Compute G U and M U from one read of G and M.

    Any strides and sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor. The sum is
    in float64 where one of them is, else in float32; operands of unlike or float32 dtypes are multiplied in it too,
    unless U is a pair: G and M are split then, but for bfloat16.

    Args:
        G: gradients (B,m,n).
        M: momentum (B,m,n).
        U: bases (B,n,r).
        tile: block sizes, by default from r, the dtypes and the strides.

    Returns:
        G U and M U (B,2,m,r), contiguous, in the dtype of the sum; and G U (B,m,r), a pair where U is.
    """
    (B, m, n), r = launch.matrices("G", G), launch.matrices("U", U)[2]
    U_hi, U_lo, paired = stored(U)
    launch.check(G.device, {"G": (G, (B, m, n)), "M": (M, (B, m, n)), "U": (U, (B, n, r))})
    dtype = launch.arithmetic_dtype(G, M, U_hi)
    if paired and dtype != torch.float32:
        raise ValueError(f"U is a pair beside {G.dtype} and {M.dtype}; must be beside float32 or less.")
    G, M, U_hi = (launch.multiplicable(t, dtype) for t in (G, M, U_hi))
    projected = torch.empty((B, 2, m, r), dtype=dtype, device=G.device)
    GU: Operand = empty_pair((B, m, r), G.device) if paired else projected[:, 0]
    if B == 0:
        return projected, GU
    tile = tile or choose_tile(r, dtype, aligned(G, M, U_hi, projected[:, 0]) and U_hi.stride(2) == 1, paired)
    operand = launch.operand_dtype(dtype, U_hi) if paired else launch.operand_dtype(dtype, G, M, U_hi)
    launch.start(
        project_kernel,
        (B * triton.cdiv(m, tile.m) * triton.cdiv(r, tile.n),),
        G.device,
        G,
        M,
        U_hi,
        projected,
        stored(GU)[0],
        m,
        n,
        r,
        *G.stride(),
        *M.stride(),
        U_lo,
        *U_hi.stride(),
        stored(GU)[1],
        U_LO=paired,
        OPERAND=TRITON_DTYPES[operand],
        SUM=TRITON_DTYPES[dtype],
        TILE_M=tile.m,
        TILE_R=tile.n,
        TILE_N=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return projected, GU
