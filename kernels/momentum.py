"""Momentum update and the whitened residual of its lookahead in one pass over the gradient.

In PyTorch: ``prokl.algorithm.algebra.Algebra.momentum``.

B: matrices; M: short side; N: long side; R: rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile
from prokl.kernels.operands import (
    add_product,
    aligned,
    operand_dtypes,
    store_result,
    stored,
)
from prokl.kernels.split import converted, empty_pair
from prokl.pair import Operand, Pair


@triton.jit
def momentum_kernel(
    G_ptr,
    M_ptr,
    G_par_ptr,
    U_ptr,
    rows_ptr,
    scale_ptr,
    active_ptr,
    X_ptr,
    squares_ptr,
    M,
    N,
    R,
    momentum: tl.float64,
    g: tl.float64,
    a: tl.float64,
    b: tl.float64,
    stride_G_b,
    stride_G_m,
    stride_G_n,
    stride_M_b,
    stride_M_m,
    stride_M_n,
    stride_G_par_lo,
    stride_G_par_b,
    stride_G_par_m,
    stride_G_par_r,
    stride_U_lo,
    stride_U_b,
    stride_U_n,
    stride_U_r,
    stride_rows_b,
    stride_rows_m,
    stride_X_lo,
    stride_scale_b,
    stride_active_b,
    HAS_SCALE: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    HAT: tl.constexpr,
    LO: tl.constexpr,
    X_LO: tl.constexpr,
    OPERAND: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """Do one (TILE_M, TILE_N) tile of everything m x n a program, which alone reads and writes that tile of M.

    M <- momentum M + g c G where active; X = rows (a c G + b M - G_par U^T); G counts as zero where not active, and c
    is the matrix's scale. squares (3, tiles) takes the tile's sums of squares of X, of X without rows, and of
    a c G + b M. G, the momentum (M, N), G_par (M, R), U (N, R) and rows (M,) have any strides. G_par and U, pairs where
    LO, are multiplied as OPERAND. X is contiguous, a pair where X_LO.
    """
    i = tl.program_id(0)
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    i_n = i % tiles_n
    i_m = (i // tiles_n) % tiles_m
    i_b = (i // (tiles_n * tiles_m)).to(tl.int64)
    o_m = i_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_n = i_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m[:, None] < M
    m_n = o_n[None, :] < N
    mask = m_m & m_n
    m_active = mask
    if HAS_ACTIVE:  # an inactive matrix has no row to read of G or to write of M
        m_active = (o_m[:, None] < tl.where(tl.load(active_ptr + i_b * stride_active_b), M, 0)) & m_n

    par = tl.zeros((TILE_M, TILE_N), DTYPE)
    if HAT:
        par = add_product(
            par, G_par_ptr + i_b * stride_G_par_b, U_ptr + i_b * stride_U_b, o_m, o_n, M, N, R,
            stride_G_par_lo, stride_G_par_m, stride_G_par_r, stride_U_lo, stride_U_r, stride_U_n,
            LO, LO, OPERAND, TILE_R,
        )  # fmt: skip

    G_at = G_ptr + i_b * stride_G_b + o_m[:, None] * stride_G_m + o_n[None, :] * stride_G_n
    M_at = M_ptr + i_b * stride_M_b + o_m[:, None] * stride_M_m + o_n[None, :] * stride_M_n
    # Scalars come as fp64 and are rounded once; tl.full also takes the interpreter's Python floats.
    x = tl.load(G_at, m_active, 0.0).to(DTYPE)
    if HAS_SCALE:
        x = x * tl.load(scale_ptr + i_b * stride_scale_b).to(DTYPE)
    y = tl.load(M_at, mask, 0.0).to(DTYPE)
    y = tl.full((), momentum, DTYPE) * y + tl.full((), g, DTYPE) * x
    tl.store(M_at, converted(y, M_ptr.dtype.element_ty), m_active)
    if HAT:
        y = tl.full((), a, DTYPE) * x + tl.full((), b, DTYPE) * y
        tiles = tiles_n * tiles_m
        squares_at = squares_ptr + 2 * i_b * tiles + i
        tl.store(squares_at + 2 * tiles, tl.sum(y * y))
        y -= par
        tl.store(squares_at + tiles, tl.sum(y * y))
        y *= tl.load(rows_ptr + i_b * stride_rows_b + o_m * stride_rows_m, o_m < M, 0.0).to(DTYPE)[:, None]
        tl.store(squares_at, tl.sum(y * y))
        # The address as late as it is needed: before, it takes registers, which spilt on sm_100.
        store_result(X_ptr, stride_X_lo, (i_b * M + o_m[:, None]) * N + o_n[None, :], y, mask, X_LO)


# m, n: block of M and of the residual; k: how much of r is added at a time.
# The accumulator and the tile of G, M and the output share the registers: twice as wide, they spill at odd sizes, where
# halves need eight warps. With four they took 0.82 of the time on an H200. A warp takes 16 rows of a product of
# parts: eight warps would compute everything twice.
TILES: tuple[Tile, ...] = (Tile(64, 64, 16, 4, 3), Tile(64, 32, 16, 4, 3))
TILES_HALF: tuple[Tile, ...] = (Tile(64, 64, 64, 4, 3), Tile(64, 64, 64, 8, 3))
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)


def choose_tile(operand: torch.dtype, wide: bool = True) -> Tile:
    """Return the tile for the dtype that G_par and U are multiplied as, and for whether all is :func:`aligned`."""
    tiles = {torch.float64: TILES_FP64, torch.float32: TILES}.get(operand, TILES_HALF)
    return tiles[0] if wide else tiles[-1]


def momentum(
    G: Tensor,
    M: Tensor,
    G_par: Operand | None,
    U: Operand,
    rows: Tensor,
    *,
    momentum: float,
    weights: tuple[float, float, float],
    scale: Tensor | None = None,
    active: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    pair: bool = False,
    tile: Tile | None = None,
) -> tuple[Operand | None, Tensor]:
    """Do M <- momentum M + g c G in place and X = diag(rows) (G^ - G^par U^T), G^ = a c G + b M, in one launch.

    Any strides and sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor. Arithmetic
    is in float64 where one of them is, else in float32; G^ takes the new M before it is rounded to its dtype.

    Args:
        G: gradients (B,m,n).
        M: momentum (B,m,n); updated in place.
        G_par: G^ U (B,m,r), or None where X is not wanted.
        U: bases (B,n,r); a pair where G_par is.
        rows: factors (B,m).
        momentum: weight of the old M.
        weights: (g, a, b).
        scale: c (B,); None is 1.
        active: (B,) bool; where False, M keeps its bits and G counts as zero, whatever it holds. None: all step.
        out_dtype: dtype of X; by default that of the arithmetic.
        pair: whether X is a pair, in place of a dtype.
        tile: block sizes, by default from the dtypes and the strides.

    Returns:
        X (B,m,n), contiguous, None without ``G_par``; and squared Frobenius norms (B,3,tiles), parts that add up, in
        the dtype of the arithmetic: of X before it is rounded, of X without ``rows``, and of G^.
    """
    (B, m, n), r = launch.matrices("G", G), launch.matrices("U", U)[2]
    U_hi, U_lo, paired = stored(U)
    given = {"G": (G, (B, m, n)), "M": (M, (B, m, n)), "U": (U, (B, n, r)), "G_par": (G_par, (B, m, r))}
    launch.check(G.device, given | {"rows": (rows, (B, m)), "scale": (scale, (B,))})
    launch.check(G.device, {"active": (active, (B,))}, (torch.bool,))
    if any(stride == 0 and size > 1 for stride, size in zip(M.stride(), M.shape, strict=True)):
        raise ValueError(f"M has strides {M.stride()}; two programs would write one element of it.")
    hat = G_par is not None
    assert not hat or isinstance(G_par, Pair) == paired
    dtype, operand = operand_dtypes((U,) if G_par is None else (G_par, U), G, M, rows)
    assert not pair or dtype == torch.float32
    out_dtype = dtype if out_dtype is None else out_dtype
    par_hi, par_lo, _ = stored(G if G_par is None else G_par)  # G: not read as such
    par_hi, U_hi = (launch.multiplicable(t, dtype) for t in (par_hi, U_hi))
    X: Operand = M  # not written
    if hat:
        X = empty_pair((B, m, n), G.device) if pair else torch.empty((B, m, n), dtype=out_dtype, device=G.device)
    X_hi, X_lo, _ = stored(X)
    tile = tile or choose_tile(operand, aligned(G, M, par_hi, U_hi, X_hi))
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    squares = torch.empty((B, 3, tiles if hat else 0), dtype=dtype, device=G.device)
    if B > 0:
        launch.start(
            momentum_kernel,
            (B * tiles,),
            G.device,
            G,
            M,
            par_hi,
            U_hi,
            rows,
            *(G if t is None else t for t in (scale, active)),  # G: not read as such
            X_hi,
            squares if hat else G,  # G: not written
            m,
            n,
            r,
            float(momentum),
            *(float(w) for w in weights),
            *G.stride(),
            *M.stride(),
            par_lo,
            *((0, 0, 0) if G_par is None else par_hi.stride()),
            U_lo,
            *U_hi.stride(),
            *rows.stride(),
            X_lo,
            *(0 if t is None else t.stride(0) for t in (scale, active)),
            HAS_SCALE=scale is not None,
            HAS_ACTIVE=active is not None,
            HAT=hat,
            LO=paired,
            X_LO=pair,
            OPERAND=TRITON_DTYPES[operand],
            DTYPE=tl.float64 if dtype == torch.float64 else tl.float32,
            TILE_M=tile.m,
            TILE_N=tile.n,
            TILE_R=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return (X if hat else None), squares
