"""Eigenvalue EMA with clip for a bucket of weights in one launch.

In PyTorch: ``prokl.backends.torch_ops.TorchPrimitives.eigenvalue_ema``.

B: matrices; M: short side; R: rank; N: long side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch

TILE = 512  # four elements a thread: one 16-byte load in fp32, and no spills on sm_80 to sm_100


@triton.jit
def _divide(x, y):
    # Plain fp32 division is approximate on the GPU (2 ulp); fp64 division is correctly rounded.
    if y.dtype == tl.float64:
        return x / y
    else:
        return tl.math.div_rn(x, y)


@triton.jit
def _inverse_sqrt(x):
    # rsqrt is approximate on the GPU, so two correctly rounded operations take its place.
    if x.dtype == tl.float64:
        return 1.0 / tl.sqrt(x)
    else:
        return tl.math.div_rn(1.0, tl.math.sqrt_rn(x))


@triton.jit
def _damp(s, eps):
    return _divide(s, 1.0 + eps * s)


@triton.jit
def _average(s, statistic, keep, gain, ceiling):
    # min((keep / s^2 + gain * statistic)^-1/2, ceiling); where() lets a NaN through as torch.minimum does.
    new = _inverse_sqrt(_divide(keep, s * s) + gain * statistic)
    return tl.where(new > ceiling, ceiling, new)


@triton.jit
def eigenvalue_ema_kernel(
    s_L_ptr,
    s_S_ptr,
    s_mu_ptr,
    ell_ptr,
    rho_ptr,
    e_res_ptr,
    eps_ptr,
    ceiling_L_ptr,
    ceiling_S_ptr,
    ceiling_mu_ptr,
    active_ptr,
    new_L_ptr,
    new_S_ptr,
    new_mu_ptr,
    M,
    R,
    beta2: tl.float64,
    N: tl.float64,
    COMPLEMENT: tl.float64,
    stride_s_L_b,
    stride_s_L_m,
    stride_s_S_b,
    stride_s_S_r,
    stride_s_mu_b,
    stride_ell_b,
    stride_ell_m,
    stride_rho_b,
    stride_rho_r,
    stride_e_res_b,
    stride_e_res_m,
    stride_eps_b,
    stride_ceiling_L_b,
    stride_ceiling_S_b,
    stride_ceiling_mu_b,
    stride_active_b,
    HAS_ACTIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    TILE: tl.constexpr,
    TILES_M: tl.constexpr,
    TILES_R: tl.constexpr,
):
    """Update one weight a program: s_L, ell, e_res (M,); s_S, rho (R,); the rest scalars. COMPLEMENT is M * (N - R).

    s <- min((beta2 s^-2 + (1 - beta2) statistic)^-1/2, ceiling), for s_mu with the new s_L (Algorithm 2 (3)).
    Any M, R >= 1 and any strides; new_* are contiguous and of DTYPE.
    """
    i_b = tl.program_id(0).to(tl.int64)
    # Scalars come as fp64 and are rounded once; tl.full also takes the interpreter's Python floats.
    keep = tl.full((), beta2, DTYPE)
    gain = tl.full((), 1.0 - beta2, DTYPE)
    long_side = tl.full((), N, DTYPE)
    eps = tl.load(eps_ptr + i_b * stride_eps_b).to(DTYPE)
    ceiling_L = tl.load(ceiling_L_ptr + i_b * stride_ceiling_L_b).to(DTYPE)
    ceiling_S = tl.load(ceiling_S_ptr + i_b * stride_ceiling_S_b).to(DTYPE)
    ceiling_mu = tl.load(ceiling_mu_ptr + i_b * stride_ceiling_mu_b).to(DTYPE)
    s_mu = tl.load(s_mu_ptr + i_b * stride_s_mu_b).to(DTYPE)
    active = tl.full((), True, tl.int1)
    if HAS_ACTIVE:
        active = tl.load(active_ptr + i_b * stride_active_b)
    a_mu = _damp(s_mu, eps)

    energy = tl.zeros((TILE,), DTYPE)
    for i_m in range(TILES_M):
        o_m = i_m * TILE + tl.arange(0, TILE).to(tl.int64)
        m_m = o_m < M
        s = tl.load(s_L_ptr + i_b * stride_s_L_b + o_m * stride_s_L_m, m_m, 1.0).to(DTYPE)
        ell = tl.load(ell_ptr + i_b * stride_ell_b + o_m * stride_ell_m, m_m, 0.0).to(DTYPE)
        e_res = tl.load(e_res_ptr + i_b * stride_e_res_b + o_m * stride_e_res_m, m_m, 0.0).to(DTYPE)
        new = _average(s, _divide(ell + a_mu * a_mu * e_res, long_side), keep, gain, ceiling_L)
        a_L = _damp(new, eps)
        energy += tl.where(m_m, a_L * a_L * e_res, 0.0)
        tl.store(new_L_ptr + i_b * M + o_m, tl.where(active, new, s), m_m)

    for i_r in range(TILES_R):
        o_r = i_r * TILE + tl.arange(0, TILE).to(tl.int64)
        m_r = o_r < R
        s = tl.load(s_S_ptr + i_b * stride_s_S_b + o_r * stride_s_S_r, m_r, 1.0).to(DTYPE)
        rho = tl.load(rho_ptr + i_b * stride_rho_b + o_r * stride_rho_r, m_r, 0.0).to(DTYPE)
        new = _average(s, rho, keep, gain, ceiling_S)
        tl.store(new_S_ptr + i_b * R + o_r, tl.where(active, new, s), m_r)

    tail = _divide(tl.sum(energy), tl.full((), COMPLEMENT, DTYPE))
    new = _average(s_mu, tail, keep, gain, ceiling_mu)
    tl.store(new_mu_ptr + i_b, tl.where(active, new, s_mu))


def eigenvalue_ema(
    inv_sqrt_lambda_L: Tensor,
    inv_sqrt_lambda_S: Tensor,
    inv_sqrt_mu: Tensor,
    ell: Tensor,
    rho: Tensor,
    e_res: Tensor,
    *,
    beta2: float,
    n: int,
    eps: Tensor,
    ceiling_L: Tensor,
    ceiling_S: Tensor,
    ceiling_mu: Tensor,
    active: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Update the eigenvalues with clip (Algorithm 2 (3)) in one launch.

    Any strides, and any of float16, bfloat16, float32 and float64 for each tensor; arithmetic is in float64
    where one of them is, else in float32.

    Args:
        inv_sqrt_lambda_L: undamped, clipped lambda_L^-1/2 (B,m).
        inv_sqrt_lambda_S: likewise for lambda_S (B,r).
        inv_sqrt_mu: likewise for mu_perp (B,).
        ell: r * ldiag (B,m).
        rho: rdiag (B,r).
        e_res: diagonal of Q_L^T G_perp G_perp^T Q_L (B,m).
        beta2: EMA weight, in [0, 1).
        n: long side, above r.
        eps: damping (B,).
        ceiling_L, ceiling_S, ceiling_mu: largest inverse square roots (B,).
        active: (B,) bool; a weight with False keeps its values bit for bit. None: all step.

    Returns:
        The new inv_sqrt_lambda_L, inv_sqrt_lambda_S and inv_sqrt_mu, in the dtype of the arithmetic.

    Raises:
        ValueError: a shape, a dtype, a device or a value; the message names the argument and the bound.
    """
    if inv_sqrt_lambda_L.ndim != 2 or inv_sqrt_lambda_L.shape[1] == 0:
        raise ValueError(f"inv_sqrt_lambda_L has shape {tuple(inv_sqrt_lambda_L.shape)}; must be (B, m), m >= 1.")
    B, m = inv_sqrt_lambda_L.shape
    if inv_sqrt_lambda_S.ndim != 2 or inv_sqrt_lambda_S.shape[1] == 0:
        raise ValueError(f"inv_sqrt_lambda_S has shape {tuple(inv_sqrt_lambda_S.shape)}; must be (B, r), r >= 1.")
    r = inv_sqrt_lambda_S.shape[1]
    if not 0 <= beta2 < 1:
        raise ValueError(f"Invalid beta2={beta2}: must be in [0, 1).")
    if n <= r:
        raise ValueError(f"Invalid n={n}: must be above r={r}, so that the complement is not empty.")
    inputs: dict[str, tuple[Tensor, tuple[int, ...]]] = {
        "inv_sqrt_lambda_L": (inv_sqrt_lambda_L, (B, m)),
        "inv_sqrt_lambda_S": (inv_sqrt_lambda_S, (B, r)),
        "inv_sqrt_mu": (inv_sqrt_mu, (B,)),
        "ell": (ell, (B, m)),
        "rho": (rho, (B, r)),
        "e_res": (e_res, (B, m)),
        "eps": (eps, (B,)),
        "ceiling_L": (ceiling_L, (B,)),
        "ceiling_S": (ceiling_S, (B,)),
        "ceiling_mu": (ceiling_mu, (B,)),
    }
    device = inv_sqrt_lambda_L.device
    for name, (t, shape) in inputs.items():
        launch.check(name, t, shape, device, like="inv_sqrt_lambda_L")
    if active is not None:
        launch.check("active", active, (B,), device, (torch.bool,), like="inv_sqrt_lambda_L")

    tensors = [t for t, _ in inputs.values()]
    dtype = launch.arithmetic_dtype(*tensors)
    new_L, new_S, new_mu = (torch.empty(k, dtype=dtype, device=device) for k in ((B, m), (B, r), (B,)))
    if B == 0:
        return new_L, new_S, new_mu
    tensors.append(eps if active is None else active)  # eps is not read in its place
    launch.start(
        eigenvalue_ema_kernel,
        (B,),
        device,
        *tensors,
        new_L,
        new_S,
        new_mu,
        m,
        r,
        float(beta2),
        float(n),
        float(m * (n - r)),
        *(stride for t in tensors for stride in t.stride()),
        HAS_ACTIVE=active is not None,
        DTYPE=tl.float64 if dtype == torch.float64 else tl.float32,
        TILE=TILE,
        TILES_M=triton.cdiv(m, TILE),
        TILES_R=triton.cdiv(r, TILE),
    )
    return new_L, new_S, new_mu
