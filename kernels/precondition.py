"""Subspace part of the direction in one launch; in PyTorch: ``prokl.algorithm.stages.ProKLShampooStages.precondition``.

B: matrices; M: short side; R: rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import Tile


@triton.jit
def precondition_kernel(
    P_ptr,
    G_par_ptr,
    Q_S_ptr,
    a_S_ptr,
    out_ptr,
    M,
    R,
    alpha: tl.float64,
    stride_P_b,
    stride_P_m,
    stride_P_k,
    stride_G_par_b,
    stride_G_par_m,
    stride_G_par_r,
    stride_Q_S_b,
    stride_Q_S_r,
    stride_Q_S_c,
    stride_a_S_b,
    stride_a_S_r,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_Q: tl.constexpr,
):
    """Compute rows of alpha P G_par Q_S diag(a_S) Q_S^T, TILE_M a program; TILE_R >= R.

    TILE_K of the depth M are added at a time, then TILE_Q eigenvectors. P (M, M), G_par (M, R), Q_S (R, R) and a_S (R,)
    have any strides; out (M, R) is contiguous, of DTYPE.
    """
    i = tl.program_id(0)
    tiles_m = tl.cdiv(M, TILE_M)
    i_b = (i // tiles_m).to(tl.int64)
    o_m = (i % tiles_m).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_r = tl.arange(0, TILE_R).to(tl.int64)
    o_k = tl.arange(0, TILE_K)  # strides are multiplied in 64 bits; the mask takes 32, half of the registers
    m_m = o_m[:, None] < M
    m_r = o_r < R
    step = tl.full((), TILE_K, tl.int64)

    P_at = P_ptr + i_b * stride_P_b + o_m[:, None] * stride_P_m + o_k[None, :].to(tl.int64) * stride_P_k
    G_at = G_par_ptr + i_b * stride_G_par_b + o_k[:, None].to(tl.int64) * stride_G_par_m + o_r[None, :] * stride_G_par_r
    product = tl.zeros((TILE_M, TILE_R), DTYPE)
    for k in range(0, M, TILE_K):
        m_k = o_k < M - k
        p = tl.load(P_at, m_m & m_k[None, :], 0.0).to(DTYPE)
        x = tl.load(G_at, m_k[:, None] & m_r[None, :], 0.0).to(DTYPE)
        product = tl.dot(p, x, product, input_precision=PRECISION, out_dtype=DTYPE)
        P_at += step * stride_P_k
        G_at += step * stride_G_par_m

    # S^-1/2 is the sum over blocks of eigenvectors q of q diag(a) q^T, so that registers hold one block at a time.
    o_q = tl.arange(0, TILE_Q)
    step = tl.full((), TILE_Q, tl.int64)
    q_at = Q_S_ptr + i_b * stride_Q_S_b + o_r[:, None] * stride_Q_S_r + o_q[None, :].to(tl.int64) * stride_Q_S_c
    a_at = a_S_ptr + i_b * stride_a_S_b + o_q.to(tl.int64) * stride_a_S_r
    out = tl.zeros((TILE_M, TILE_R), DTYPE)
    for k in range(0, R, TILE_Q):
        m_q = o_q < R - k
        q = tl.load(q_at, m_r[:, None] & m_q[None, :], 0.0).to(DTYPE)
        a = tl.load(a_at, m_q, 0.0).to(DTYPE)
        rotated = tl.dot(product, q, input_precision=PRECISION, out_dtype=DTYPE) * a[None, :]
        out = tl.dot(rotated, tl.trans(q), out, input_precision=PRECISION, out_dtype=DTYPE)
        q_at += step * stride_Q_S_c
        a_at += step * stride_a_S_r
    # Scalars come as fp64 and are rounded once; tl.full also takes the interpreter's Python floats.
    out = tl.full((), alpha, DTYPE) * out
    tl.store(out_ptr + (i_b * M + o_m[:, None]) * R + o_r[None, :], out, m_m & m_r[None, :])


# m: rows of a program; n: columns, r or more; k: how much of m is added at a time. As each product takes the one
# before, all warps lie along the longer side, of 16 rows or 8 columns each: more than fit there compute the same.
TILES: tuple[Tile, ...] = (
    Tile(32, 128, 16, 8, 3),
    Tile(32, 64, 16, 4, 3),
    Tile(32, 32, 16, 2, 3),
    Tile(32, 16, 16, 2, 3),
)
TILES_FP64: tuple[Tile, ...] = (Tile(16, 64, 16, 4, 2),)  # 32 rows spill in Triton 3.6, on sm_90 and sm_100


def choose_tile(r: int, dtype: torch.dtype) -> Tile | None:
    """Return the narrowest tile that holds rank ``r`` in this arithmetic dtype; None where none does."""
    tiles = TILES_FP64 if dtype == torch.float64 else TILES
    return next((tile for tile in reversed(tiles) if tile.n >= r), None)


def can_use_precondition(P: Tensor, G_par: Tensor, Q_S: Tensor, a_S: Tensor) -> bool:
    """Return True if :func:`precondition` takes this rank: whole rows in one program, at most 128, or 64 in float64."""
    return choose_tile(G_par.shape[-1], launch.arithmetic_dtype(P, G_par, Q_S, a_S)) is not None


def precondition(
    P: Tensor,
    G_par: Tensor,
    Q_S: Tensor,
    a_S: Tensor,
    alpha: float,
    *,
    precision: str = "tf32x3",
    tile: Tile | None = None,
) -> Tensor:
    """Compute alpha P G^par S^-1/2 with S^-1/2 = Q_S diag(a_S) Q_S^T.

    Any strides, m >= 1, and any of float16, bfloat16, float32 and float64 for each tensor. Arithmetic is in float64
    where one of them is, else in float32.

    Args:
        P: L^-1/2 (B,m,m).
        G_par: G^ U (B,m,r), 1 <= r <= 128; at most 64 in float64.
        Q_S: eigenvectors (B,r,r), in columns.
        a_S: eigenvalues of S^-1/2 (B,r).
        alpha: factor of the whole.
        precision: how float32 operands are multiplied, one of :data:`prokl.kernels.launch.PRECISIONS`.
        tile: block sizes, by default from r and the dtypes.

    Returns:
        (B,m,r), contiguous, in the dtype of the arithmetic.

    Raises:
        ValueError: a shape, a dtype, a device or a value; the message names the argument and the bound.
    """
    if G_par.ndim != 3 or 0 in G_par.shape[1:]:
        raise ValueError(f"G_par has shape {tuple(G_par.shape)}; must be (B, m, r) with m, r >= 1.")
    B, m, r = G_par.shape
    launch.check_precision(precision)
    launch.check("P", P, (B, m, m), P.device)
    launch.check("G_par", G_par, (B, m, r), P.device, like="P")
    launch.check("Q_S", Q_S, (B, r, r), P.device, like="P")
    launch.check("a_S", a_S, (B, r), P.device, like="P")
    dtype = launch.arithmetic_dtype(P, G_par, Q_S, a_S)
    tile = tile or choose_tile(r, dtype)
    if tile is None or tile.n < r:
        most = (TILES_FP64 if dtype == torch.float64 else TILES)[0].n if tile is None else tile.n
        raise ValueError(f"G_par has r={r}; must be at most {most} in {dtype}: use the PyTorch form beyond.")
    P, G_par, Q_S = (launch.multiplicable(t, dtype) for t in (P, G_par, Q_S))
    out = torch.empty((B, m, r), dtype=dtype, device=P.device)
    if B > 0:
        launch.start(
            precondition_kernel,
            (B * triton.cdiv(m, tile.m),),
            P.device,
            P,
            G_par,
            Q_S,
            a_S,
            out,
            m,
            r,
            float(alpha),
            *P.stride(),
            *G_par.stride(),
            *Q_S.stride(),
            *a_S.stride(),
            DTYPE=tl.float64 if dtype == torch.float64 else tl.float32,
            PRECISION="ieee" if dtype == torch.float64 else precision,
            TILE_M=tile.m,
            TILE_R=tile.n,
            TILE_K=tile.k,
            TILE_Q=tile.k if dtype == torch.float64 else max(tile.k, 8 * tile.warps),  # 8 columns a warp
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return out
