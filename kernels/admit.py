"""Decision about a gradient and eigenvalue EMA with clip, for a bucket of weights in one launch.

In PyTorch: ``prokl.algorithm.evidence.admit``, in float64 like it.

B: matrices; M: short side; R: rank; N: long side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES
from prokl.kernels.operands import aligned

ELEMENTS = 4096
"""Elements of A that a program holds at a time: all columns of as many rows."""
MAX_TILE_ROWS = 1024
"""Rows that a program holds at a time, at most."""
MOST = 65536
"""Columns of A, at most, as a program holds a whole row."""


class AdmitOutputs(NamedTuple):
    """Results of a launch, each of their parts contiguous, in the dtype of the arithmetic."""

    rows: Tensor
    """(3,B,m): inverse roots of L as the direction takes them, new ones, and c times those damped."""
    columns: Tensor
    """(3,B,r): likewise of S."""
    scalars: Tensor
    """(5,B): c, that of mu as the direction takes it and the new one, the weight of G_perp G_perp^T in L, lambda_0.

    Without a decision c holds nothing, and without one or a lambda_0 given neither does lambda_0."""
    flags: Tensor
    """(2,B), bool: whether the gradient is evidence, whether something was bounded; without a decision nothing."""


@triton.jit
def _damp(s, eps):
    return s / (1.0 + eps * s)


@triton.jit
def _average(s, statistic, beta2, ceiling):
    # min((beta2 / s^2 + (1 - beta2) * statistic)^-1/2, ceiling); where() lets a NaN through as torch.minimum does.
    new = 1.0 / tl.sqrt(beta2 / (s * s) + (1.0 - beta2) * statistic)
    return tl.where(new > ceiling, ceiling, new)


@triton.jit
def _beyond(size):
    # Largest of 1 and size; 1 for NaN.
    return tl.where(size > 1.0, size, 1.0)


@triton.jit
def admit_kernel(
    A_ptr,
    Gt_ptr,
    e_res_ptr,
    s_L_ptr,
    s_S_ptr,
    s_mu_ptr,
    lambda_0_ptr,
    sums_ptr,
    rows_ptr,
    columns_ptr,
    scalars_ptr,
    flags_ptr,
    B,
    M,
    R,
    PARTS,
    beta2: tl.float64,
    kappa: tl.float64,
    units: tl.float64,
    damping: tl.float64,
    N: tl.float64,
    ceiling_m: tl.float64,
    ceiling_n: tl.float64,
    smallest: tl.float64,
    largest: tl.float64,
    stride_A_b,
    stride_A_m,
    stride_A_r,
    stride_Gt_b,
    stride_Gt_m,
    stride_Gt_r,
    stride_e_res_b,
    stride_e_res_part,
    stride_e_res_m,
    stride_s_L_b,
    stride_s_L_m,
    stride_s_S_b,
    stride_s_S_r,
    stride_s_mu_b,
    stride_lambda_0_b,
    BOUNDED: tl.constexpr,
    AUTO: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Admit one gradient a program: A, Gt (M, R), e_res (PARTS, M), s_L (M,), s_S (R,), rest scalars; any strides.

    Results are contiguous and of DTYPE: rows (3, B, M) take what the direction uses, the new roots and c times those
    damped, columns (3, B, R) likewise; scalars (5, B) c, mu's first two, weight_L, lambda_0; flags (2, B) evident,
    bounded. sums (2, B, M) is float64 memory to work with. B is the number of matrices or more. smallest and largest
    bound the roots that can be stored. TILE_R holds all columns. TILE_M rows of A are worked on at a time, loaded
    STAGES - 1 ahead, and TILE_V of what has a number a row.
    """
    i_b = tl.program_id(0).to(tl.int64)
    # Scalars come as fp64; tl.full also takes the interpreter's Python floats.
    beta2 = tl.full((), beta2, tl.float64)
    n = tl.full((), N, tl.float64)
    m = tl.full((), M, tl.float64)  # a size of one is a constant, which has no method
    r = tl.full((), R, tl.float64)
    factor = tl.full((), 1.0, tl.float64)
    start = factor
    if AUTO:
        start = tl.load(lambda_0_ptr + i_b * stride_lambda_0_b).to(tl.float64)
        factor = 1.0 / tl.sqrt(start)
    eps = damping / factor
    s_mu = tl.load(s_mu_ptr + i_b * stride_s_mu_b).to(tl.float64)
    a_mu = _damp(s_mu, eps)
    o_r = tl.arange(0, TILE_R).to(tl.int64)
    m_r = o_r < R
    s_S = tl.load(s_S_ptr + i_b * stride_s_S_b + o_r * stride_s_S_r, m_r, 1.0).to(tl.float64)
    a_S = _damp(s_S, eps)

    # Sums beside the subspace, then in it: many rows of numbers at a time, few of A.
    e_ptr = sums_ptr + i_b * M
    ell_ptr = e_ptr + B * M
    energy = tl.zeros((TILE_V,), tl.float64)
    complement = tl.zeros((TILE_V,), tl.float64)
    for first in range(0, M, TILE_V):
        o_v = first + tl.arange(0, TILE_V).to(tl.int64)
        e_res = tl.zeros((TILE_V,), tl.float64)
        for part in range(PARTS):
            at_e = e_res_ptr + i_b * stride_e_res_b + part * stride_e_res_part + o_v * stride_e_res_m
            e_res += tl.load(at_e, o_v < M, 0.0).to(tl.float64)
        a = _damp(tl.load(s_L_ptr + i_b * stride_s_L_b + o_v * stride_s_L_m, o_v < M, 1.0).to(tl.float64), eps)
        tl.store(e_ptr + o_v, e_res, o_v < M)
        energy += e_res
        complement += a * a_mu * (a * a_mu) * e_res
    # Sums over rows go across threads once, after the loop: barriers in it would outweigh its arithmetic.
    rho = tl.zeros((TILE_M, TILE_R), tl.float64)
    squares = tl.zeros((TILE_M, TILE_R), tl.float64)
    subspace = tl.zeros((TILE_M,), tl.float64)
    for first in tl.range(0, M, TILE_M, num_stages=STAGES):
        o_m = first + tl.arange(0, TILE_M).to(tl.int64)
        mask = (o_m[:, None] < M) & m_r[None, :]
        a_L = _damp(tl.load(s_L_ptr + i_b * stride_s_L_b + o_m * stride_s_L_m, o_m < M, 1.0).to(tl.float64), eps)
        at = A_ptr + i_b * stride_A_b + o_m[:, None] * stride_A_m + o_r[None, :] * stride_A_r
        x = tl.load(at, mask, 0.0).to(tl.float64)
        x = x * x
        ell = tl.sum(x * (a_S * a_S)[None, :], 1)
        rho += x * (a_L * a_L)[:, None]
        tl.store(ell_ptr + o_m, ell, o_m < M)
        subspace += a_L * a_L * ell
        if BOUNDED:
            at = Gt_ptr + i_b * stride_Gt_b + o_m[:, None] * stride_Gt_m + o_r[None, :] * stride_Gt_r
            x = tl.load(at, mask, 0.0).to(tl.float64)
            squares += x * x
    rho = tl.sum(rho, 0) / m

    one = tl.full((), 1.0, tl.float64)  # of a bare number in where() the interpreter and the compiler make float32
    c = one
    weight = one
    evident = tl.full((), True, tl.int1)
    bounded = evident
    used = a_S
    if BOUNDED:
        in_subspace = tl.sum(subspace) / (m * r)
        in_complement = tl.sum(complement) / (m * (n - r))
        size = tl.sqrt(tl.where(in_subspace > in_complement, in_subspace, in_complement))
        is_finite = (in_subspace < float("inf")) & (in_complement < float("inf"))
        c = tl.where(is_finite & (size > kappa), kappa / size, tl.where(is_finite, one, 0.0))
        weight = c / kappa
        excess = _beyond(weight * a_S * tl.sqrt(rho))
        used = a_S / excess
        bounded = (c < 1.0) | (tl.max(excess) > 1.0)
        evident = is_finite
        if AUTO:
            rms = tl.sqrt((tl.sum(tl.sum(squares, 0)) + tl.sum(energy)) / (m * n))
            lower = tl.where(units * rms > beta2 * start, units * rms, beta2 * start)
            tl.store(
                scalars_ptr + 4 * B + i_b, tl.where(is_finite & (rms > 0.0) & (lower < start), lower, start).to(DTYPE)
            )
        c = c.to(DTYPE).to(tl.float64)  # as momentum and statistics take it
        tl.store(scalars_ptr + i_b, c.to(DTYPE))
    column = columns_ptr + i_b * R + o_r
    tl.store(column, used.to(DTYPE), m_r)
    s_S = _average(s_S, rho * c * c, beta2, ceiling_n * factor)
    tl.store(column + B * R, s_S.to(DTYPE), m_r)
    tl.store(column + 2 * B * R, (c * _damp(s_S, eps)).to(DTYPE), m_r)
    # NaN is in no range.
    outside = tl.sum(tl.where(m_r & ~((s_S > smallest) & (s_S <= largest)), 1, 0))

    tl.debug_barrier()  # what other threads of the program stored into sums
    energy = tl.zeros((TILE_V,), tl.float64)
    most = tl.zeros((TILE_V,), tl.float64)
    for first in range(0, M, TILE_V):
        o_v = first + tl.arange(0, TILE_V).to(tl.int64)
        s_L = tl.load(s_L_ptr + i_b * stride_s_L_b + o_v * stride_s_L_m, o_v < M, 1.0).to(tl.float64)
        e_res = tl.load(e_ptr + o_v, o_v < M, 0.0)
        ell_v = tl.load(ell_ptr + o_v, o_v < M, 0.0)
        a = _damp(s_L, eps)
        row = rows_ptr + i_b * M + o_v
        if BOUNDED:
            excess_L = _beyond(weight * tl.sqrt((a * a * ell_v + a * a_mu * (a * a_mu) * e_res) / n))
            most = tl.maximum(most, excess_L)
            a = a / excess_L
        tl.store(row, a.to(DTYPE), o_v < M)
        e_res = e_res * c * c
        s_L = _average(s_L, (ell_v * c * c + a_mu * a_mu * e_res) / n, beta2, ceiling_m * factor)
        a = _damp(s_L, eps)
        tl.store(row + B * M, s_L.to(DTYPE), o_v < M)
        tl.store(row + 2 * B * M, (c * a).to(DTYPE), o_v < M)
        energy += tl.where(o_v < M, a * a * e_res, 0.0)
        outside += tl.sum(tl.where((o_v < M) & ~((s_L > smallest) & (s_L <= largest)), 1, 0))
    bounded = bounded | (tl.max(most) > 1.0)
    tl.store(scalars_ptr + B + i_b, a_mu.to(DTYPE))
    s_mu = _average(s_mu, tl.sum(energy) / (m * (n - r)), beta2, ceiling_n * factor)
    a_mu = _damp(s_mu, eps)
    tl.store(scalars_ptr + 2 * B + i_b, s_mu.to(DTYPE))
    tl.store(scalars_ptr + 3 * B + i_b, ((1.0 - beta2) / n * (a_mu * c) * (a_mu * c)).to(DTYPE))
    evident = evident & (outside == 0) & (s_mu > smallest) & (s_mu <= largest)
    if BOUNDED:
        tl.store(flags_ptr + i_b, evident)
        tl.store(flags_ptr + B + i_b, bounded)


def admit(
    A: Tensor,
    G_tilde: Tensor,
    e_res: Tensor,
    roots: tuple[Tensor, Tensor, Tensor],
    lambda_0: Tensor | None,
    *,
    kappa: float | None,
    units: float,
    beta2: float,
    damping: float,
    n: int,
    ceilings: tuple[float, float],
    largest: float,
) -> AdmitOutputs:
    """Decide about gradients and do the eigenvalue EMA (Algorithm 2 (3)) in one launch.

    Any strides, and any of float16, bfloat16, float32 and float64 for each tensor; what comes out is float64 where one
    of them is, else float32. No more than 65536 columns, as a program holds a row.

    Args:
        A: G~ Q_S (B,m,r), of the gradient in the eigenbasis of L.
        G_tilde: (B,m,r).
        e_res: squared norms of the rows of G_perp (B,m), or parts (B,k,m) that add up to them.
        roots: undamped inverse roots (B,m), (B,r), (B,) before the step.
        lambda_0: (B,), which ceilings and damping follow, or None for 1.
        kappa: largest whitened size, or None for no decision.
        units: how many times a gradient's root mean square lambda_0 may be.
        beta2: EMA weight.
        damping: eps.
        n: long side, above r.
        ceilings: of the inverse roots of L, and of S and mu.
        largest: number that the state can hold.
    """
    B, m, r = launch.matrices("A", A)
    assert r <= MOST and n > r, (r, n)
    e_res = e_res.unsqueeze(1) if e_res.ndim == 2 else e_res
    names = ("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_mu")
    given: launch.Shapes = {"A": (A, (B, m, r)), "G_tilde": (G_tilde, (B, m, r))}
    given["e_res"] = e_res, (B, e_res.shape[1], m)
    given |= {name: (t, shape) for name, t, shape in zip(names, roots, ((B, m), (B, r), (B,)), strict=True)}
    launch.check(A.device, given | {"lambda_0": (lambda_0, (B,))})

    tensors = [A, G_tilde, e_res, *roots, *(() if lambda_0 is None else (lambda_0,))]
    dtype = launch.arithmetic_dtype(*tensors)
    # All parts start at multiples of 16 bytes: neither this kernel nor what reads them is compiled anew for another B.
    room = triton.cdiv(B, 16) * 16
    shapes = ((3, room, m), (3, room, r), (5, room))
    rows, columns, scalars = (torch.empty(shape, dtype=dtype, device=A.device) for shape in shapes)
    flags = torch.empty((2, room), dtype=torch.bool, device=A.device)
    if B > 0:
        width, height = triton.next_power_of_2(r), triton.next_power_of_2(m)
        spare = 1 if aligned(A, G_tilde) else 2  # every element has an address in registers then
        read = [*roots, A if lambda_0 is None else lambda_0]  # A: not read
        launch.start(
            admit_kernel,
            (B,),
            A.device,
            A,
            G_tilde,
            e_res,
            *read,
            torch.empty((2, room, m), dtype=torch.float64, device=A.device),
            rows,
            columns,
            scalars,
            flags,
            room,
            m,
            r,
            e_res.shape[1],
            float(beta2),
            float(kappa or 0.0),
            float(units),
            float(damping),
            float(n),
            *(float(x) for x in ceilings),
            (n / largest) ** 0.5,  # as evidence.in_range
            float(largest),
            *(stride for t in (A, G_tilde, e_res, *read[:3]) for stride in t.stride()),
            *(t.stride(0) for t in read[3:]),
            BOUNDED=kappa is not None,
            AUTO=lambda_0 is not None,
            DTYPE=TRITON_DTYPES[dtype],
            TILE_M=max(1, min(height, ELEMENTS // spare // width)),
            TILE_R=width,
            TILE_V=min(MAX_TILE_ROWS // spare, height),
            # They take 68 KB of shared memory; longer rows and float64 would not fit.
            STAGES=3 if width <= ELEMENTS and dtype == torch.float32 else 1,
            num_warps=8,
            # A product contracted into a sum across lanes would leave each lane its own rounding of one number.
            enable_fp_fusion=False,
        )
    return AdmitOutputs(*(t[:, :B] for t in (rows, columns, scalars, flags)))
