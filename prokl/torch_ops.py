"""The primitives of the batched step in plain PyTorch: for a CPU, for a GPU without Triton, and to test kernels by.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prokl.hyper import Hyper, ProHyper
from prokl.links import Links
from prokl.polar import newton_schulz_factors


@dataclass(frozen=True)
class Direction:
    """The direction D = scale Q X + B U^T (B,m,n) as its factors, so that one kernel can form and apply it."""

    X: Tensor | None
    """(B,m,n) in any floating dtype; None when the direction is B U^T alone."""
    Q: Tensor | None = None
    """(B,m,m) in the dtype of X; None is the identity."""
    scale: Tensor | None = None
    """(B,); None is 1."""
    B: Tensor | None = None
    """(B,m,r) in the arithmetic dtype; None is zero."""
    U: Tensor | None = None
    """(B,n,r) in the arithmetic dtype."""

    def dense(self) -> Tensor:
        """D (B,m,n), in the arithmetic dtype."""
        if self.X is None:
            assert self.B is not None and self.U is not None
            return self.B @ self.U.mT
        D = self.X if self.Q is None else self.Q @ self.X
        if self.scale is not None:
            own = D is not self.X or D.dtype != self.scale.dtype
            D = D.to(self.scale.dtype)  # the arithmetic dtype
            D = D.mul_(self.scale[:, None, None]) if own else D * self.scale[:, None, None]
        if self.B is None:
            return D
        assert self.U is not None
        add = torch.baddbmm if D is self.X else Tensor.baddbmm_  # X may be read again
        return add(D, self.B, self.U.mT)


def damp(s: Tensor, eps: Tensor) -> Tensor:
    """1/(sqrt(lambda) + eps) from s = lambda^-1/2 (Algorithm 2, (P2)); s (B,k) or (B,), eps (B,)."""
    return s / (1 + (eps if s.ndim == 1 else eps[:, None]) * s)


def clipped_ema(s: Tensor, statistic: Tensor, beta2: float, limit: Tensor) -> Tensor:
    """min((beta2 lambda + (1-beta2) statistic)^-1/2, limit) with lambda = s^-2; all shapes broadcast to that of s."""
    return torch.minimum((beta2 * s**-2 + (1 - beta2) * statistic).rsqrt(), limit)


def stack(gradients: Sequence[Tensor | None], links: Links, negate: bool) -> tuple[Tensor, Tensor]:
    """The gradients of a bucket as one tensor in the arithmetic dtype, and their squared norms.

    Args:
        gradients: oriented (c,m,n) for every parameter; None is a missing one and counts as zero.
        links: the bucket's.
        negate: whether to ascend.

    Returns:
        G (B,m,n) and ||G||_F^2 (B,), not finite where G is not.
    """
    parts = [
        torch.zeros(count, links.m, links.n, dtype=links.dtype, device=links.device) if g is None else g.to(links.dtype)
        for g, count in zip(gradients, links.counts, strict=True)
    ]
    G = torch.cat(parts)
    if negate:
        G = G.neg_()
    return G, torch.linalg.vector_norm(G, dim=(-2, -1)).square()


def silence(G: Tensor, live: Tensor | None) -> Tensor:
    """G (B,m,n) with zeros for the matrices that are not live (B,); None: all are."""
    return G if live is None else torch.where(live[:, None, None], G, 0.0)


def product(A: Tensor, B: Tensor, *, C: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha A B + beta C: (B,m,k), (B,k,n), (B,m,n)."""
    if C is not None:
        return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
    return A @ B if alpha == 1 else alpha * (A @ B)


def symmetric_product(A: Tensor, *, C: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha A A^T + beta C: (B,m,k), symmetric (B,m,m)."""
    return product(A, A.mT, C=C, alpha=alpha, beta=beta)


def project(G: Tensor, M: Tensor, U: Tensor, live: Tensor | None) -> tuple[Tensor, Tensor]:
    """G U and M U: (B,m,n), (B,m,n), (B,n,r) -> twice (B,m,r)."""
    return G @ U, M.to(U.dtype) @ U


def residuals(
    G: Tensor,
    M: Tensor,
    G_tilde: Tensor,
    G_par: Tensor | None,
    U: Tensor,
    momentum: float,
    weights: tuple[float, float, float],
    live: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Momentum and both residuals: M <- momentum M + g G, G^ = a G + b M for weights (g, a, b).

    A CPU pays more for fresh memory than for arithmetic on it, so that G and, where it can, M are overwritten.

    Args:
        G: (B,m,n); afterwards it is the first residual. M: (B,m,n) in the state's dtype.
        G_tilde: G U (B,m,r). G_par: G^ U (B,m,r), or None when the complement takes no part in the direction.
        U: (B,n,r).
        momentum, weights: see above.
        live: (B,) or None; this table has zeroed the other gradients already.

    Returns:
        The new M, which is M itself where all live and the dtype is G's; G - G_tilde U^T; G^ - G_par U^T, or None;
        (B,) bool, whether the latter is rounding noise of G^.
    """
    g, a, b = weights
    if live is not None or M.dtype != G.dtype:
        M = M.to(G.dtype, copy=True)
    M = torch.add(G, M, alpha=momentum, out=M) if g == 1 else M.mul_(momentum).add_(G, alpha=g)
    G_hat_perp = negligible = None
    if G_par is not None:
        G_hat = torch.add(G if a == 1 else a * G, M, alpha=b) if a else b * M
        G_hat_perp = G_hat.baddbmm_(G_par, U.mT, alpha=-1)
        size, captured = (torch.linalg.vector_norm(t, dim=(-2, -1)) for t in (G_hat_perp, G_par))
        negligible = size <= 100 * torch.finfo(G.dtype).eps * torch.hypot(size, captured)
    return M, G.baddbmm_(G_tilde, U.mT, alpha=-1), G_hat_perp, negligible


def precondition(P: Tensor, G_par: Tensor, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
    """alpha P G_par S^-1/2 with S^-1/2 = Q_S diag(a_S) Q_S^T: (B,m,m), (B,m,r), (B,r,r), (B,r) -> (B,m,r)."""
    return alpha * (P @ (((G_par @ Q_S) * a_S[:, None, :]) @ Q_S.mT))


def polar(P: Tensor, G_perp: Tensor, negligible: Tensor, h: ProHyper) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Newton-Schulz of X = P G_perp as (Q, Y, scale): the result is scale Q Y.

    X is normalised by its Frobenius norm; the result is zero where ``negligible`` (B,) says that it is rounding
    noise.

    Args:
        P: (B,m,m). G_perp: (B,m,n). negligible: (B,).
        h: says steps, coefficients and the dtype of the products.

    Returns:
        Q (B,m,m) or None for the identity, Y (B,m,n), scale (B,) or None for 1.
    """
    X = P @ G_perp
    norm = torch.linalg.vector_norm(X, dim=(-2, -1))
    inverse = torch.where(negligible | (norm == 0), 0.0, 1 / norm)
    X = X.mul_(inverse[:, None, None]).to(h.polar_dtype(X.dtype))
    return *newton_schulz_factors(X, h.ns_steps, h.ns_coefficients), None


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


def apply(weights: Sequence[Tensor | None], links: Links, direction: Direction, h: Hyper, live: Tensor | None) -> None:
    """W <- (1 - lr weight_decay) W - lr D where live, in place; rounded once where the weights are narrower than D.

    Args:
        weights: oriented, writable (c,m,n) of every parameter; None is one that does not move.
        links: the bucket's.
        direction: factors of D.
        h: says lr and weight_decay.
        live: (B,) bool, or None when all move.
    """
    D = direction.dense()
    decay = 1 - h.lr * h.weight_decay
    parts = torch.split(D, links.counts)
    lives = [None] * len(parts) if live is None else torch.split(live, links.counts)
    for W, own, moves in zip(weights, parts, lives, strict=True):
        if W is None:
            continue
        if moves is None and W.dtype == D.dtype:
            if h.weight_decay != 0:
                W.mul_(decay)
            W.sub_(h.lr * own) if isinstance(h.lr, Tensor) else W.sub_(own, alpha=h.lr)
            continue
        new = W.to(D.dtype) * decay - h.lr * own
        W.copy_(new if moves is None else torch.where(moves[:, None, None], new, W))
