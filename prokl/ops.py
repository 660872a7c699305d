"""The primitives of the batched step, as tables: one per backend, and the choice between them.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from prokl.polar import newton_schulz_factors
from prokl.qr import householder_qr, refresh_basis, tracking_qr


def damp(s: Tensor, eps: Tensor) -> Tensor:
    """1/(sqrt(lambda) + eps) from s = lambda^-1/2 (Algorithm 2, (P2)); s (B,k) or (B,), eps (B,)."""
    return s / (1 + (eps if s.ndim == 1 else eps[:, None]) * s)


def clipped_ema(s: Tensor, statistic: Tensor, beta2: float, limit: Tensor) -> Tensor:
    """min((beta2 lambda + (1-beta2) statistic)^-1/2, limit) with lambda = s^-2; all shapes broadcast to that of s."""
    return torch.minimum((beta2 * s**-2 + (1 - beta2) * statistic).rsqrt(), limit)


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
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalue EMA with clip (Algorithm 2 (3)): lambda_L and lambda_S, then mu_perp with the new lambda_L.

    Args:
        inv_sqrt_lambda_L: undamped, clipped lambda_L^-1/2 (B,m).
        inv_sqrt_lambda_S: likewise for lambda_S (B,r).
        inv_sqrt_mu: likewise for mu_perp (B,).
        ell: r * ldiag (B,m): row sums of (Q_L^T G~ Q_S diag(lambda_S^-1/2))^2.
        rho: rdiag (B,r): column means of (diag(lambda_L^-1/2) Q_L^T G~ Q_S)^2.
        e_res: diagonal of Q_L^T G_perp G_perp^T Q_L (B,m).
        beta2: EMA weight.
        n: long side.
        eps: damping (B,).
        ceiling_L, ceiling_S, ceiling_mu: largest inverse square roots (B,).
        live: (B,) bool; a weight with False keeps its values bit for bit. None: all live.

    Returns:
        The new inv_sqrt_lambda_L, inv_sqrt_lambda_S and inv_sqrt_mu, undamped and clipped.
    """
    m, r = inv_sqrt_lambda_L.shape[1], inv_sqrt_lambda_S.shape[1]
    a_mu = damp(inv_sqrt_mu, eps)[:, None]
    s_L = clipped_ema(inv_sqrt_lambda_L, (ell + a_mu**2 * e_res) / n, beta2, ceiling_L[:, None])
    s_S = clipped_ema(inv_sqrt_lambda_S, rho, beta2, ceiling_S[:, None])
    tail = (e_res * damp(s_L, eps) ** 2).sum(dim=-1) / (m * (n - r))
    s_mu = clipped_ema(inv_sqrt_mu, tail, beta2, ceiling_mu)
    if live is not None:
        s_L = torch.where(live[:, None], s_L, inv_sqrt_lambda_L)
        s_S = torch.where(live[:, None], s_S, inv_sqrt_lambda_S)
        s_mu = torch.where(live, s_mu, inv_sqrt_mu)
    return s_L, s_S, s_mu


def accumulate(M: Tensor, G: Tensor, momentum: float, weights: tuple[float, float, float]) -> tuple[Tensor, Tensor]:
    """(M_new, G_hat) = (momentum * M + g * G, a * G + b * M_new) for weights (g, a, b); all (B,m,n)."""
    g, a, b = weights
    M_new = torch.add(G, M, alpha=momentum) if g == 1 else (g * G).add_(M, alpha=momentum)
    return M_new, torch.add(G if a == 1 else a * G, M_new, alpha=b) if a else b * M_new


def residual(G: Tensor, G_par: Tensor, U: Tensor) -> Tensor:
    """G - G_par U^T: (B,m,n), (B,m,r), (B,n,r) -> (B,m,n)."""
    return torch.baddbmm(G, G_par, U.mT, alpha=-1)


def combine(Q: Tensor | None, X: Tensor, scale: Tensor, B: Tensor | None, U: Tensor) -> Tensor:
    """scale * (Q X) + B U^T: the direction from its factors.

    Args:
        Q: (B,m,m) in the dtype of X, or None for the identity.
        X: (B,m,n) in any floating dtype.
        scale: (B,).
        B: (B,m,r) in the arithmetic dtype, or None for zero.
        U: (B,n,r) in the arithmetic dtype.
    """
    product = (X if Q is None else Q @ X) * scale[:, None, None]  # promotes to the arithmetic dtype in one pass
    return product if B is None else product.baddbmm_(B, U.mT)


def apply_direction(W: Tensor, D: Tensor, lr: float | Tensor, weight_decay: float, live: Tensor | None) -> Tensor:
    """(1 - lr * weight_decay) W - lr * D where live, W elsewhere, in the dtype of D; W, D (B,m,n), live (B,)."""
    W = W.to(D.dtype)
    new = W * (1 - lr * weight_decay) - lr * D
    return new if live is None else torch.where(live[:, None, None], new, W)


@dataclass(frozen=True)
class Primitives:
    """One backend's table. Every entry has the signature of the PyTorch function of that name in this package."""

    name: str
    accumulate: Callable[..., tuple[Tensor, Tensor]] = accumulate
    residual: Callable[..., Tensor] = residual
    newton_schulz_factors: Callable[..., tuple[Tensor | None, Tensor]] = newton_schulz_factors
    eigenvalue_ema: Callable[..., tuple[Tensor, Tensor, Tensor]] = eigenvalue_ema
    combine: Callable[..., Tensor] = combine
    tracking_qr: Callable[..., Tensor] = tracking_qr
    refresh_basis: Callable[..., Tensor] = refresh_basis
    small_qr: Callable[..., Tensor] = householder_qr
    apply_direction: Callable[..., Tensor] = apply_direction


TORCH = Primitives("torch")
TABLES = {TORCH.name: TORCH}
BACKENDS = ("reference", *TABLES)
"""Values of ``backend``; "reference" is no table but the specification itself, one weight at a time."""


def select(backend: str | None, device: torch.device) -> Primitives | None:
    """The table that ``backend`` means on ``device``; None for "reference". ``backend=None`` chooses."""
    if backend == "reference":
        return None
    if backend is None:
        return TORCH
    return TABLES[backend]
