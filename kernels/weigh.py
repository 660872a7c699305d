"""All that an admitted gradient is on the subspace, weighed and split as products take it: ``Algebra.weighed``.

B: matrices; M: short side; R: rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES
from prokl.kernels.operands import store_result, stored
from prokl.kernels.split import empty_pair
from prokl.pair import Operand

ROWS, COLUMNS = 16, 128  # of a program: eight elements a thread, 16 bytes of each operand of float32 a load
WARPS = 8


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
    G_par_ptr,
    half_ptr,
    onto_ptr,
    Z_ptr,
    Y_ptr,
    M,
    R,
    of_G: tl.float64,
    of_M: tl.float64,
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
    stride_scale_b,
    stride_lo,
    HAS_SCALE: tl.constexpr,
    PAIR: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """Compute a (TILE_M, TILE_R) tile of all five a program, of G, M, A, B (M, R) with any strides.

    G_par = of_G c G + of_M M; half = (of_G c A + of_M B) used; onto = A columns; Z = rows G; Y = rows Z. rows (M,),
    columns and used (R,); c is 1 without HAS_SCALE. The results are contiguous; G_par, onto and Y are pairs where PAIR.
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
    y = tl.load(B_ptr + i_b * stride_B_b + o_m[:, None] * stride_B_m + o_r[None, :] * stride_B_r, mask, 0.0).to(DTYPE)
    used = tl.load(used_ptr + i_b * stride_used_b + o_r * stride_used_r, o_r < R, 0.0).to(DTYPE)[None, :]
    store_result(half_ptr, 0, at, (of_new * x + of_old * y) * used, mask, False)
    columns = tl.load(columns_ptr + i_b * stride_columns_b + o_r * stride_columns_r, o_r < R, 0.0).to(DTYPE)[None, :]
    store_result(onto_ptr, stride_lo, at, x * columns, mask, PAIR)


def weigh(
    G: Tensor,
    M: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    rows: Tensor,
    columns: Tensor,
    used: Tensor,
    scale: Tensor | None,
    weights: tuple[float, float],
    pair: bool = False,
) -> tuple[Operand, Tensor, Operand, Tensor, Operand]:
    """Compute, in one launch and with weights (g, b), what a step takes of a gradient and its momentum on the subspace.

    Any strides, and any of float16, bfloat16, float32 and float64 for each tensor; arithmetic is in float64 where one
    of them is, else in float32.

    Args:
        G: the gradient (B,m,r). M: the momentum. A, B: both, in the basis of S.
        rows: (B,m). columns, used: (B,r).
        scale: c (B,), or None for 1.
        weights: of c G and of M.
        pair: whether the first, the third and the last result are wanted as pairs.

    Returns:
        g c G + b M; (g c A + b B) diag(used); A diag(columns); diag(rows) G; and diag(rows)^2 G: (B,m,r), contiguous.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    if G.ndim != 3 or 0 in G.shape[1:]:
        raise ValueError(f"G has shape {tuple(G.shape)}; must be (B, m, r) with m, r >= 1.")
    batch, m, r = G.shape
    given: dict[str, tuple[Tensor, tuple[int, ...]]]
    given = {"G": (G, (batch, m, r)), "M": (M, (batch, m, r)), "A": (A, (batch, m, r)), "B": (B, (batch, m, r))}
    given |= {"rows": (rows, (batch, m)), "columns": (columns, (batch, r)), "used": (used, (batch, r))}
    given |= {} if scale is None else {"scale": (scale, (batch,))}
    for name, (t, shape) in given.items():
        launch.check(name, t, shape, G.device, like="G")
    dtype = launch.arithmetic_dtype(*(t for t, _ in given.values()))
    if pair and dtype != torch.float32:
        raise ValueError("A sum in float64 was to be split; pairs hold float32.")
    half, Z = (torch.empty((batch, m, r), dtype=dtype, device=G.device) for _ in range(2))
    factors: list[Operand]
    factors = [empty_pair((batch, m, r), G.device) if pair else torch.empty_like(Z) for _ in range(3)]
    G_par, onto, Y = factors
    width = min(COLUMNS, max(16, triton.next_power_of_2(r)))
    if batch:
        launch.start(
            weigh_kernel,
            (batch * triton.cdiv(m, ROWS) * triton.cdiv(r, width),),
            G.device,
            G,
            M,
            A,
            B,
            rows,
            columns,
            used,
            G if scale is None else scale,  # G: not read as such
            stored(G_par)[0],
            half,
            stored(onto)[0],
            Z,
            stored(Y)[0],
            m,
            r,
            *(float(w) for w in weights),
            *(stride for t in (G, M, A, B, rows, columns, used) for stride in t.stride()),
            0 if scale is None else scale.stride(0),
            stored(Y)[1],
            HAS_SCALE=scale is not None,
            PAIR=pair,
            DTYPE=TRITON_DTYPES[dtype],
            TILE_M=ROWS,
            TILE_R=width,
            num_warps=WARPS,
        )
    return G_par, half, onto, Z, Y
