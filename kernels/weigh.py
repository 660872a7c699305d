"""All that an admitted gradient is on the subspace, weighed, as products take it: ``Algebra.subspace_parts``.

B: matrices; M: short side; R: rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile
from prokl.kernels.operands import dot, store_result, stored
from prokl.kernels.split import empty_pair
from prokl.pair import Operand

# Rows and columns of a program's results, and the depth of a product at a time. A warp takes 16 rows.
TILES: tuple[Tile, ...] = (Tile(64, 64, 16, 4, 3), Tile(64, 32, 16, 4, 3))
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)


@triton.jit
def weigh_kernel(
    G_ptr,
    M_ptr,
    A_ptr,
    B_ptr,
    rows_ptr,
    columns_ptr,
    used_ptr,
    scale_ptr,
    Q_ptr,
    used_rows_ptr,
    G_par_ptr,
    T_ptr,
    energy_ptr,
    onto_ptr,
    Z_ptr,
    Y_ptr,
    M,
    R,
    of_G: tl.float64,
    of_M: tl.float64,
    alpha: tl.float64,
    stride_G_b,
    stride_G_m,
    stride_G_r,
    stride_M_b,
    stride_M_m,
    stride_M_r,
    stride_A_b,
    stride_A_m,
    stride_A_r,
    stride_B_b,
    stride_B_m,
    stride_B_r,
    stride_rows_b,
    stride_rows_m,
    stride_columns_b,
    stride_columns_r,
    stride_used_b,
    stride_used_r,
    stride_Q_b,
    stride_Q_m,
    stride_Q_r,
    stride_used_rows_b,
    stride_used_rows_m,
    stride_scale_b,
    stride_lo,
    HAS_SCALE: tl.constexpr,
    HAS_T: tl.constexpr,
    PAIR: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute a (TILE_M, TILE_R) tile of all five a program, of G, M, A, B (M, R) with any strides.

    G_par = of_G c G + of_M M; onto = A columns; Z = rows G; Y = rows Z; and where HAS_T, of Q (R, R) with any strides,
    T = alpha used_rows ((of_G c A + of_M B) used) Q^T, of which energy (tiles_r, M) takes the sums of squares of rows.
    rows, used_rows (M,), columns and used (R,); c is 1 without HAS_SCALE. The results are contiguous; G_par, T and Y
    are pairs where PAIR.
    """
    i = tl.program_id(0)
    tiles_r = tl.cdiv(R, TILE_R)
    tiles = tl.cdiv(M, TILE_M) * tiles_r
    i_b = (i // tiles).to(tl.int64)
    o_m = (i % tiles // tiles_r).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_r = (i % tiles % tiles_r).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    mask = (o_m[:, None] < M) & (o_r[None, :] < R)
    at = (i_b * M + o_m[:, None]) * R + o_r[None, :]
    of_old = tl.full((), of_M, DTYPE)
    of_new = tl.full((), of_G, DTYPE)
    if HAS_SCALE:
        of_new *= tl.load(scale_ptr + i_b * stride_scale_b).to(DTYPE)
    x = tl.load(G_ptr + i_b * stride_G_b + o_m[:, None] * stride_G_m + o_r[None, :] * stride_G_r, mask, 0.0).to(DTYPE)
    y = tl.load(M_ptr + i_b * stride_M_b + o_m[:, None] * stride_M_m + o_r[None, :] * stride_M_r, mask, 0.0).to(DTYPE)
    store_result(G_par_ptr, stride_lo, at, of_new * x + of_old * y, mask, PAIR)
    rows = tl.load(rows_ptr + i_b * stride_rows_b + o_m * stride_rows_m, o_m < M, 0.0).to(DTYPE)[:, None]
    x *= rows
    store_result(Z_ptr, 0, at, x, mask, False)
    store_result(Y_ptr, stride_lo, at, rows * x, mask, PAIR)
    x = tl.load(A_ptr + i_b * stride_A_b + o_m[:, None] * stride_A_m + o_r[None, :] * stride_A_r, mask, 0.0).to(DTYPE)
    columns = tl.load(columns_ptr + i_b * stride_columns_b + o_r * stride_columns_r, o_r < R, 0.0).to(DTYPE)[None, :]
    store_result(onto_ptr, 0, at, x * columns, mask, False)
    if HAS_T:
        acc = tl.zeros((TILE_M, TILE_R), DTYPE)
        for first in range(0, R, TILE_K):
            o_k = first + tl.arange(0, TILE_K).to(tl.int64)
            m_k = (o_m[:, None] < M) & (o_k[None, :] < R)
            a_at = A_ptr + i_b * stride_A_b + o_m[:, None] * stride_A_m + o_k[None, :] * stride_A_r
            b_at = B_ptr + i_b * stride_B_b + o_m[:, None] * stride_B_m + o_k[None, :] * stride_B_r
            half = of_new * tl.load(a_at, m_k, 0.0).to(DTYPE) + of_old * tl.load(b_at, m_k, 0.0).to(DTYPE)
            half *= tl.load(used_ptr + i_b * stride_used_b + o_k * stride_used_r, o_k < R, 0.0).to(DTYPE)[None, :]
            q_at = Q_ptr + i_b * stride_Q_b + o_r[None, :] * stride_Q_m + o_k[:, None] * stride_Q_r
            q = tl.load(q_at, (o_k[:, None] < R) & (o_r[None, :] < R), 0.0).to(DTYPE)
            acc = dot(half, q, acc)
        used_rows = tl.load(used_rows_ptr + i_b * stride_used_rows_b + o_m * stride_used_rows_m, o_m < M, 0.0)
        acc *= tl.full((), alpha, DTYPE) * used_rows.to(DTYPE)[:, None]
        store_result(T_ptr, stride_lo, at, acc, mask, PAIR)
        wide = acc.to(tl.float64)
        tl.store(energy_ptr + (i_b * tiles_r + i % tiles_r) * M + o_m, tl.sum(wide * wide, 1), o_m < M)


def choose_tile(r: int, dtype: torch.dtype) -> Tile:
    """Return the tile for this rank and the dtype of the arithmetic; the larger one spills at odd sizes."""
    return TILES_FP64[0] if dtype == torch.float64 else TILES[r <= 32 or r % 16 > 0]


def weigh(
    G: Tensor,
    M: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    rows: Tensor,
    columns: Tensor,
    used_rows: Tensor,
    used: Tensor,
    Q: Tensor | None,
    alpha: float,
    scale: Tensor | None,
    weights: tuple[float, float],
    pair: bool = False,
    tile: Tile | None = None,
) -> tuple[Operand, tuple[Operand, Tensor] | None, Tensor, Tensor, Operand]:
    """Compute, in one launch and with weights (g, b), what a step takes of a gradient and its momentum on the subspace.

    Any strides, and any of float16, bfloat16, float32 and float64 for each tensor; arithmetic is in float64 where one
    of them is, else in float32.

    Args:
        G: the gradient (B,m,r). M: the momentum. A, B: both, in the basis of S.
        rows, used_rows: (B,m). columns, used: (B,r).
        Q: (B,r,r), or None where T is not wanted.
        alpha: scale of T.
        scale: c (B,), or None for 1.
        weights: of c G and of M.
        pair: whether the third is wanted in bfloat16, and all others but the fourth as pairs.
        tile: block sizes, by default from r and the dtypes.

    Returns:
        g c G + b M; T = alpha diag(used_rows) (g c A + b B) diag(used) Q^T, and parts (B,tiles,m) of its rows'
        squared norms in float64; A diag(columns); diag(rows) G; and diag(rows)^2 G: (B,m,r), contiguous.
    """
    batch, m, r = launch.matrices("G", G)
    Q_ = G.new_empty(()).expand(batch, r, r) if Q is None else Q  # of no elements: not read
    shapes = ((batch, m, r),) * 4 + ((batch, m), (batch, r), (batch, r), (batch, r, r), (batch, m), (batch,))
    names = ("G", "M", "A", "B", "rows", "columns", "used", "Q", "used_rows", "scale")
    tensors = (G, M, A, B, rows, columns, used, Q_, used_rows)
    launch.check(G.device, dict(zip(names, zip((*tensors, scale), shapes, strict=True), strict=True)))
    dtype = launch.arithmetic_dtype(*tensors, *(() if scale is None else (scale,)))
    assert not pair or dtype == torch.float32
    converted = [launch.multiplicable(t, dtype) for t in tensors]  # which may lie otherwise then
    tile = tile or choose_tile(r, dtype)
    tiles_r = triton.cdiv(r, tile.n)
    Z = torch.empty((batch, m, r), dtype=dtype, device=G.device)
    onto = torch.empty_like(Z, dtype=torch.bfloat16 if pair else dtype)
    factors: list[Operand]
    factors = [empty_pair((batch, m, r), G.device) if pair else torch.empty_like(Z) for _ in range(2 + (Q is not None))]
    G_par, Y, T = factors[0], factors[1], factors[-1]
    energy = torch.empty((batch, tiles_r, m), dtype=torch.float64, device=G.device)
    if batch:
        launch.start(
            weigh_kernel,
            (batch * triton.cdiv(m, tile.m) * tiles_r,),
            G.device,
            *converted[:7],
            G if scale is None else scale,  # G: not read as such
            *converted[7:],
            *(stored(t)[0] for t in (G_par, T)),
            energy,
            onto,
            Z,
            stored(Y)[0],
            m,
            r,
            *(float(w) for w in weights),
            float(alpha),
            *(stride for t in converted for stride in t.stride()),
            0 if scale is None else scale.stride(0),
            stored(G_par)[1],
            HAS_SCALE=scale is not None,
            HAS_T=Q is not None,
            PAIR=pair,
            DTYPE=TRITON_DTYPES[dtype],
            TILE_M=tile.m,
            TILE_R=tile.n,
            TILE_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
            # A square contracted into a sum across lanes would leave each lane its own rounding of one number.
            enable_fp_fusion=False,
        )
    return G_par, None if Q is None else (T, energy), onto, Z, Y
