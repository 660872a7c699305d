"""Elementwise parts of a step between its products: sums of two matrices, and what the EMAs are made of.

In PyTorch: ``ProKLShampooStages.momentum``, ``.factor_ema`` and ``.samples``. B: matrices; M: rows; N: columns.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES
from prokl.kernels.operands import scale_of, store_result, stored
from prokl.kernels.split import empty_pair
from prokl.pair import Operand

ROWS, COLUMNS = 16, 128  # of a program: eight elements a thread, 16 bytes of each operand of float32 a load
WARPS = 8


@triton.jit
def _place(M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr):
    """Return this program's matrix, rows and columns, and which of them exist."""
    i = tl.program_id(0)
    tiles_n = tl.cdiv(N, TILE_N)
    tiles = tl.cdiv(M, TILE_M) * tiles_n
    o_m = (i % tiles // tiles_n).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_n = (i % tiles % tiles_n).to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    return (i // tiles).to(tl.int64), o_m, o_n, (o_m[:, None] < M) & (o_n[None, :] < N)


@triton.jit
def combine_kernel(
    x_ptr,
    y_ptr,
    D_ptr,
    alpha_ptr,
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
    stride_alpha_b,
    PER_MATRIX: tl.constexpr,
    PAIR: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Compute D = alpha c x + beta y (M, N), a tile a program; with PER_MATRIX c is at alpha_ptr, else 1.

    D is contiguous, a pair where PAIR.
    """
    i_b, o_m, o_n, mask = _place(M, N, TILE_M, TILE_N)
    x = tl.load(x_ptr + i_b * stride_x_b + o_m[:, None] * stride_x_m + o_n[None, :] * stride_x_n, mask, 0.0).to(DTYPE)
    y = tl.load(y_ptr + i_b * stride_y_b + o_m[:, None] * stride_y_m + o_n[None, :] * stride_y_n, mask, 0.0).to(DTYPE)
    if PER_MATRIX:
        x *= scale_of(alpha_ptr, 1.0, stride_alpha_b, i_b, True, DTYPE)
    d = tl.full((), alpha, DTYPE) * x + tl.full((), beta, DTYPE) * y
    at = (i_b * M + o_m[:, None]) * N + o_n[None, :]
    store_result(D_ptr, stride_lo, at, d, mask, PAIR)


@triton.jit
def samples_kernel(
    GQ_ptr,
    QtG_ptr,
    a_L_ptr,
    a_S_ptr,
    scale_ptr,
    X_ptr,
    Z_ptr,
    whitened_ptr,
    M,
    N,
    weight: tl.float64,
    stride_GQ_b,
    stride_GQ_m,
    stride_GQ_n,
    stride_QtG_b,
    stride_QtG_m,
    stride_QtG_n,
    stride_a_L_b,
    stride_a_L_m,
    stride_a_S_b,
    stride_a_S_n,
    stride_scale_b,
    HAS_SCALE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Compute X = c GQ a_S, Z = c a_L QtG and whitened = weight a_L Z, all (M, N) and contiguous, a tile a program."""
    i_b, o_m, o_n, mask = _place(M, N, TILE_M, TILE_N)
    a_L = tl.load(a_L_ptr + i_b * stride_a_L_b + o_m * stride_a_L_m, o_m < M, 0.0).to(DTYPE)
    a_S = tl.load(a_S_ptr + i_b * stride_a_S_b + o_n * stride_a_S_n, o_n < N, 0.0).to(DTYPE)
    c = scale_of(scale_ptr, 1.0, stride_scale_b, i_b, HAS_SCALE, DTYPE)
    at = (i_b * M + o_m[:, None]) * N + o_n[None, :]
    x = tl.load(GQ_ptr + i_b * stride_GQ_b + o_m[:, None] * stride_GQ_m + o_n[None, :] * stride_GQ_n, mask, 0.0)
    tl.store(X_ptr + at, x.to(DTYPE) * (a_S * c)[None, :], mask)
    z = tl.load(QtG_ptr + i_b * stride_QtG_b + o_m[:, None] * stride_QtG_m + o_n[None, :] * stride_QtG_n, mask, 0.0)
    z = z.to(DTYPE) * (a_L * c)[:, None]
    tl.store(Z_ptr + at, z, mask)
    tl.store(whitened_ptr + at, z * (tl.full((), weight, DTYPE) * a_L)[:, None], mask)


def _check(
    operands: dict[str, tuple[Tensor, tuple[int, ...]]], scale: Tensor | None
) -> tuple[int, int, int, torch.dtype]:
    """Check matrices (B,m,n) and what belongs to them; return sizes and the dtype of the arithmetic."""
    first = next(iter(operands))
    t = operands[first][0]
    if t.ndim != 3 or 0 in t.shape[1:]:
        raise ValueError(f"{first} has shape {tuple(t.shape)}; must be (B, m, n) with m, n >= 1.")
    if scale is not None:
        operands = operands | {"scale": (scale, (t.shape[0],))}
    for name, (operand, shape) in operands.items():
        launch.check(name, operand, shape, t.device, like=first)
    batch, m, n = t.shape
    return batch, m, n, launch.arithmetic_dtype(*(operand for operand, _ in operands.values()))


def _start(
    kernel: Any, sizes: tuple[int, int, int], dtype: torch.dtype, first: Tensor, *arguments: Any, **constants: Any
) -> None:
    batch, m, n = sizes
    tiles = {"TILE_M": ROWS, "TILE_N": min(COLUMNS, max(16, triton.next_power_of_2(n)))}
    grid = (batch * triton.cdiv(m, tiles["TILE_M"]) * triton.cdiv(n, tiles["TILE_N"]),)
    constants |= {"DTYPE": TRITON_DTYPES[dtype], "num_warps": WARPS, **tiles}
    launch.start(kernel, grid, first.device, first, *arguments, **constants)


def combine(
    x: Tensor, alpha: float, y: Tensor, beta: float, scale: Tensor | None = None, pair: bool = False
) -> Operand:
    """Compute alpha c x + beta y in one launch.

    Any strides, and any of float16, bfloat16, float32 and float64 for each tensor; arithmetic is in float64 where one
    of them is, else in float32.

    Args:
        x: (B,m,n). alpha: its scale.
        y: (B,m,n). beta: its scale.
        scale: c (B,), or None for 1.
        pair: whether the result is wanted as a pair.

    Returns:
        The result (B,m,n), contiguous.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    batch, m, n, dtype = _check({"x": (x, tuple(x.shape)), "y": (y, tuple(x.shape))}, scale)
    if pair and dtype != torch.float32:
        raise ValueError("A sum in float64 was to be split; pairs hold float32.")
    shape = batch, m, n
    D = empty_pair(shape, x.device) if pair else torch.empty(shape, dtype=dtype, device=x.device)
    to, lo, _ = stored(D)
    if batch:
        _start(
            combine_kernel,
            shape,
            dtype,
            x,
            y,
            to,
            x if scale is None else scale,  # x: not read as such
            m,
            n,
            float(alpha),
            float(beta),
            *x.stride(),
            *y.stride(),
            lo,
            0 if scale is None else scale.stride(0),
            PER_MATRIX=scale is not None,
            PAIR=pair,
        )
    return D


def samples(
    GQ: Tensor, QtG: Tensor, a_L: Tensor, a_S: Tensor, scale: Tensor | None, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute c GQ a_S, Z = c a_L QtG and weight a_L Z in one launch; dtypes and strides as :func:`combine` has them.

    Args:
        GQ: (B,m,r). QtG: (B,m,r).
        a_L: (B,m). a_S: (B,r).
        scale: c (B,), or None for 1.
        weight: of the last.

    Returns:
        The three (B,m,r), contiguous.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    shape = tuple(GQ.shape)
    vectors = {"a_L": (a_L, shape[:2]), "a_S": (a_S, (shape[0], *shape[2:]))}
    batch, m, r, dtype = _check({"GQ": (GQ, shape), "QtG": (QtG, shape), **vectors}, scale)
    X, Z, whitened = (torch.empty((batch, m, r), dtype=dtype, device=GQ.device) for _ in range(3))
    if batch:
        _start(
            samples_kernel,
            (batch, m, r),
            dtype,
            GQ,
            QtG,
            a_L,
            a_S,
            GQ if scale is None else scale,  # GQ: not read as such
            X,
            Z,
            whitened,
            m,
            r,
            float(weight),
            *GQ.stride(),
            *QtG.stride(),
            *a_L.stride(),
            *a_S.stride(),
            0 if scale is None else scale.stride(0),
            HAS_SCALE=scale is not None,
        )
    return X, Z, whitened
