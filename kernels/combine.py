"""Weighted sum of two matrices, or rows scaled, split as stored where a product takes it: ``Algebra.combined``.

B: matrices; M: rows; N: columns.
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
def combine_kernel(
    x_ptr,
    y_ptr,
    D_ptr,
    scale_ptr,
    M,
    N,
    alpha: tl.float64,
    beta: tl.float64,
    stride_x_b,
    stride_x_m,
    stride_x_n,
    stride_y_b,
    stride_y_m,
    stride_y_n,
    stride_lo,
    stride_scale_b,
    stride_scale_m,
    HAS_Y: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    PAIR: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Compute D = alpha c x + beta y (M, N), a tile a program; c (M,) is 1 without HAS_SCALE, y is 0 without HAS_Y.

    D is contiguous, a pair where PAIR.
    """
    i = tl.program_id(0)
    tiles_n = tl.cdiv(N, TILE_N)
    tiles = tl.cdiv(M, TILE_M) * tiles_n
    i_b = (i // tiles).to(tl.int64)
    o_m = (i % tiles // tiles_n).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_n = (i % tiles % tiles_n).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    mask = (o_m[:, None] < M) & (o_n[None, :] < N)
    x = tl.load(x_ptr + i_b * stride_x_b + o_m[:, None] * stride_x_m + o_n[None, :] * stride_x_n, mask, 0.0).to(DTYPE)
    if HAS_SCALE:
        x *= tl.load(scale_ptr + i_b * stride_scale_b + o_m * stride_scale_m, o_m < M, 0.0).to(DTYPE)[:, None]
    d = tl.full((), alpha, DTYPE) * x
    if HAS_Y:
        y_at = y_ptr + i_b * stride_y_b + o_m[:, None] * stride_y_m + o_n[None, :] * stride_y_n
        d += tl.full((), beta, DTYPE) * tl.load(y_at, mask, 0.0).to(DTYPE)
    at = (i_b * M + o_m[:, None]) * N + o_n[None, :]
    store_result(D_ptr, stride_lo, at, d, mask, PAIR)


def combine(
    x: Tensor,
    alpha: float = 1.0,
    y: Tensor | None = None,
    beta: float = 1.0,
    scale: Tensor | None = None,
    pair: bool = False,
) -> Operand:
    """Compute alpha c x + beta y in one launch.

    Any strides, and any of float16, bfloat16, float32 and float64 for each tensor; arithmetic is in float64 where one
    of them is, else in float32.

    Args:
        x: (B,m,n). alpha: its scale.
        y: (B,m,n), or None for 0. beta: its scale.
        scale: c (B,), or (B,m) of every row, or None for 1.
        pair: whether the result is wanted as a pair.

    Returns:
        The result (B,m,n), contiguous.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    if x.ndim != 3 or 0 in x.shape[1:]:
        raise ValueError(f"x has shape {tuple(x.shape)}; must be (B, m, n) with m, n >= 1.")
    batch, m, n = x.shape
    launch.check("x", x, (batch, m, n), x.device)
    if y is not None:
        launch.check("y", y, (batch, m, n), x.device, like="x")
    if scale is not None:
        launch.check("scale", scale, (batch, m)[: max(1, scale.ndim)], x.device, like="x")
    dtype = launch.arithmetic_dtype(x, *(t for t in (y, scale) if t is not None))
    if pair and dtype != torch.float32:
        raise ValueError("A sum in float64 was to be split; pairs hold float32.")
    D = empty_pair((batch, m, n), x.device) if pair else torch.empty((batch, m, n), dtype=dtype, device=x.device)
    to, lo, _ = stored(D)
    columns = min(COLUMNS, max(16, triton.next_power_of_2(n)))
    if batch:
        launch.start(
            combine_kernel,
            (batch * triton.cdiv(m, ROWS) * triton.cdiv(n, columns),),
            x.device,
            x,
            x if y is None else y,  # x: not read as such
            to,
            x if scale is None else scale,
            m,
            n,
            float(alpha),
            float(beta),
            *x.stride(),
            *((0, 0, 0) if y is None else y.stride()),
            lo,
            *((0, 0) if scale is None else (*scale.stride(), 0)[:2]),
            HAS_Y=y is not None,
            HAS_SCALE=scale is not None,
            PAIR=pair,
            DTYPE=TRITON_DTYPES[dtype],
            TILE_M=ROWS,
            TILE_N=columns,
            num_warps=WARPS,
        )
    return D
