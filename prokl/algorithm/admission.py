"""Bound a gradient by the projected state, and update its eigenvalues: Algorithm 2 (3) with the bound.

In the eigenbasis of L the gradient is G' = Q_L^T G, G~ = G' U. All of it follows from two sums of squares of
A = G~ Q_S and from the energies of rows beside the subspace: by its rows, ell_i = sum_j A_ij^2 a_S,j^2, and by its
columns, rho_j = sum_i a_L,i^2 A_ij^2 / m. The whitened sizes, which the decision goes by, are a_L^2 ell and a_S^2 rho;
the eigenvalue EMAs take c^2 ell and c^2 rho. Squares of float32 may leave its range, so that they are in float64;
beside the matrix products that costs little. On a device without float64 they are in float32, of a gradient in units in
which they stay within its range.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.evidence import Sizes, clip_decision, in_range, norm
from prokl.algorithm.initial import ceiling_factor
from prokl.algorithm.settings import Hyper
from prokl.algorithm.shapes import ceiling, widest
from prokl.algorithm.types import Admitted, Roots, State


def damp(s: Tensor, eps: Tensor) -> Tensor:
    """Return 1/(sqrt(lambda) + eps) from s = lambda^-1/2 (Algorithm 2, (P2)); s (B,k) or (B,), eps (B,)."""
    return s / (1 + (eps if s.ndim == 1 else eps[:, None]) * s)


def clipped_ema(s: Tensor, statistic: Tensor, beta2: float, limit: Tensor) -> Tensor:
    """Return min((beta2 lambda + (1-beta2) statistic)^-1/2, limit) with lambda = s^-2, broadcast to the shape of s."""
    return torch.minimum((beta2 * s**-2 + (1 - beta2) * statistic).rsqrt(), limit)


def inverse_roots(state: State) -> Roots:
    """Return the inverse roots of a state's eigenvalues, undamped, in the widest dtype of their device."""
    roots = [state[f"inv_sqrt_{key}"] for key in ("lambda_L", "lambda_S", "mu")]
    return Roots(*(t.to(widest(t.device)) for t in roots))


def damped(s: Roots, eps: Tensor) -> Roots:
    """Damp inverse roots (Algorithm 2, (P2)); eps (B,)."""
    return Roots(*(damp(t, eps) for t in s))


def damping(state: State, h: Hyper) -> Tensor:
    """Return eps (B,) in the widest dtype, which follows the start value of an "auto" state as the ceilings do."""
    factor = ceiling_factor(state)
    return h.eps / factor.to(widest(factor.device))


def in_units(A: Tensor, e_res: Tensor, a: Roots) -> tuple[Tensor, Tensor, Tensor]:
    """Return A and e_res of a gradient in the dtype of ``a``, and the units (B,) that they are in.

    These are 1 in float64, else the largest whitened entry where that is beyond 1, so that no square overflows.
    """
    dtype = a.mu.dtype
    A, e_res = A.to(dtype), e_res.to(dtype)
    if dtype == torch.float64:
        return A, e_res, torch.ones_like(a.mu)
    inside = (A * a.L[:, :, None] * a.S[:, None, :]).abs().amax(dim=(-2, -1))
    beside = (a.L * a.mu[:, None] * e_res.sqrt()).amax(dim=-1)
    unit = torch.maximum(inside, beside).clamp(1, torch.finfo(dtype).max)
    return A / unit[:, None, None], e_res / unit[:, None] / unit[:, None], unit


def row_and_column_energies(A: Tensor, a: Roots) -> tuple[Tensor, Tensor]:
    """Return ell (B,m) and rho (B,r) of A (B,m,r), whitened on the other side alone, in the dtype of ``a``."""
    if a.mu.dtype == torch.float32:  # has no room for A^2 by itself
        return (A * a.S[:, None, :]).square().sum(dim=-1), (A * a.L[:, :, None]).square().mean(dim=-2)
    squares = A.double().square()
    ell = (squares * a.S.square()[:, None, :]).sum(dim=-1)
    return ell, squares.mul_(a.L.square()[:, :, None]).mean(dim=-2)


def whitened_sizes(ell: Tensor, rho: Tensor, e_res: Tensor, unit: Tensor, a: Roots, n: int) -> Sizes:
    """Measure the gradient in these units; ``overall`` is in the subspace or beside it, whichever is larger."""
    m, r = ell.shape[-1], rho.shape[-1]
    inside, both = a.L.square() * ell, a.L * a.mu[:, None]
    beside = both.square() * e_res if both.dtype == torch.float64 else (both * e_res.sqrt()).square()
    mean_square = torch.maximum(inside.sum(dim=-1) / (m * r), beside.sum(dim=-1) / (m * (n - r)))
    sizes = ((inside + beside) / n).sqrt(), (a.S.square() * rho).sqrt(), mean_square.sqrt()
    return Sizes(*(t * (unit if t.ndim == 1 else unit[:, None]) for t in sizes))


def whitened_size(A: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Tensor:
    """Return the whitened size (B,) that the decision goes by."""
    a = damped(inverse_roots(state), damping(state, h))
    e_res = (e_res.sum(dim=1) if e_res.ndim == 3 else e_res).to(a.mu.dtype)
    A, e_res, unit = in_units(A, e_res, a)
    return whitened_sizes(*row_and_column_energies(A, a), e_res, unit, a, n).overall


def averaged(s: Roots, ell: Tensor, rho: Tensor, e_res: Tensor, eps: Tensor, factor: Tensor, h: Hyper, n: int) -> Roots:
    """Do the eigenvalue EMA with clip (Algorithm 2 (3)): lambda_L, lambda_S, then mu_perp with the new lambda_L.

    Args:
        s: undamped, clipped inverse roots before the step.
        ell: r ldiag (B,m). rho: rdiag (B,r). e_res: energies of the rows of G_perp (B,m).
        eps: damping (B,). factor: of the ceilings (B,).
        h: hyper-parameters. n: long side, above r.

    Returns:
        The new inverse roots, undamped and clipped.
    """
    m, r = ell.shape[-1], rho.shape[-1]
    a_mu = damp(s.mu, eps)[:, None]
    s_L = clipped_ema(s.L, (ell + a_mu**2 * e_res) / n, h.beta2, (ceiling(m) * factor)[:, None])
    s_S = clipped_ema(s.S, rho, h.beta2, (ceiling(n) * factor)[:, None])
    energy = (e_res * damp(s_L, eps) ** 2).sum(dim=-1) / (m * (n - r))
    return Roots(s_L, s_S, clipped_ema(s.mu, energy, h.beta2, ceiling(n) * factor))


def admit(A: Tensor, G_tilde: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
    """Decide about a gradient and average the eigenvalues; see :meth:`prokl.algorithm.algebra.Algebra.admit`."""
    dtype, m = A.dtype, A.shape[-2]
    e_res = e_res.sum(dim=1) if e_res.ndim == 3 else e_res
    s, eps = inverse_roots(state), damping(state, h)
    a, factor = damped(s, eps), ceiling_factor(state).to(eps.dtype)
    energy = e_res.to(eps.dtype).sum(dim=-1)
    A, e_res, unit = in_units(A, e_res, a)
    ell, rho = row_and_column_energies(A, a)
    scale = bounded = evident = None
    changed: State = {}
    used, c = a, torch.ones_like(eps)
    if h.clip_threshold is not None:
        rms = (norm(G_tilde).square() + energy).div(m * n).sqrt()
        decision = clip_decision(whitened_sizes(ell, rho, e_res, unit, a, n), rms, state, h)
        scale, bounded, changed = decision.scale, decision.bounded, decision.changed
        used, c = Roots(a.L * decision.rows, a.S * decision.columns, a.mu), decision.scale.to(eps.dtype)
    weight = (c * unit)[:, None]
    ell, rho, e_res = (t * weight * weight for t in (ell, rho, e_res))
    s = averaged(s, ell, rho, e_res, eps, factor, h, n)
    a = damped(s, eps)
    if h.clip_threshold is not None:
        evident = decision.evident & in_range(s, n, state["M_Q"].dtype)
    weight_L = (1 - h.beta2) / n * (a.mu * c).square()
    c_L, c_S = (c[:, None] * a.L).to(dtype), (c[:, None] * a.S).to(dtype)
    used, s = (Roots(*(t.to(dtype) for t in roots)) for roots in (used, s))
    return Admitted(scale, used, s, c_L, c_S, weight_L.to(dtype), changed, bounded, evident)
