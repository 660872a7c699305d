"""The fast step of Pro-KLShampoo for all weights of one oriented shape, written once over a table of primitives.

Differences from the reference, none of them in the mathematics:

* L^-1/2 = Q_L diag(.) Q_L^T is formed once as an m x m matrix P, and X = P G^perp once; Newton-Schulz then works
  on m x m Gram matrices. Starting from P H P with H = G^_perp G^_perp^T instead would need H, and after the
  restart (Q P) G^_perp, in float32: one such m x n product more. In bfloat16 the rounding of H is amplified by
  cond(P)^2, and Newton-Schulz diverged from cond(P) = 100 on (64 x 256); from X its error stayed at 0.02.
* G_perp G_perp^T serves both e_res and L; the increment of S serves the Cholesky preconditioner of the
  tracking QR as well.
* The two m x n residuals are formed explicitly: the difference of Gram matrices loses accuracy as U captures
  more of the energy (in float32, 64 x 256 and r = 32: 2.7, 13 and 50 times the error at 50, 90 and 99 %).

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prokl.hyper import ProHyper
from prokl.ops import Primitives, damp
from prokl.shapes import ceiling

State = dict[str, Tensor]


@dataclass(frozen=True)
class Call:
    """What one call of a batched step is told besides gradient, state and hyper-parameters."""

    aspect_scale: Tensor
    """c_a of every matrix (B,)."""
    refresh: Sequence[int]
    """Matrices whose step is divisible by tau."""
    live: Tensor | None
    """(B,) bool, or None when every matrix steps. The others' results are thrown away by the caller."""


def whitener(Q_L: Tensor, a_L: Tensor) -> Tensor:
    """P = Q_L diag(a_L) Q_L^T: (B,m,m), (B,m) -> (B,m,m)."""
    return (Q_L * a_L[:, None, :]) @ Q_L.mT


def polar_factors(X: Tensor, negligible: Tensor, h: ProHyper, ops: Primitives) -> tuple[Tensor | None, Tensor]:
    """Newton-Schulz of X (B,m,n) as a product; zero for the matrices whose complement is rounding noise (B,)."""
    norm = torch.linalg.vector_norm(X, dim=(-2, -1))
    inverse = torch.where(negligible | (norm == 0), 0.0, 1 / norm)
    X = (X * inverse[:, None, None]).to(h.polar_dtype(X.dtype))
    return ops.newton_schulz_factors(X, h.ns_steps, h.ns_coefficients)


def direction(G_hat: Tensor, P: Tensor, state: State, eps: Tensor, h: ProHyper, call: Call, ops: Primitives) -> Tensor:
    """(2) of Algorithm 2 for a bucket: G^ (B,m,n), P = L^-1/2 (B,m,m) -> direction (B,m,n)."""
    U, Q_S = state["U"], state["Q_S"]
    G_par = G_hat @ U
    subspace = None
    if h.has_subspace:
        a_S = damp(state["inv_sqrt_lambda_S"], eps)
        subspace = h.subspace_weight * (P @ (((G_par @ Q_S) * a_S[:, None, :]) @ Q_S.mT))
    if not h.has_complement:
        assert subspace is not None
        return subspace @ U.mT
    G_perp = ops.residual(G_hat, G_par, U)
    size, whole = (torch.linalg.vector_norm(t, dim=(-2, -1)) for t in (G_perp, G_hat))
    negligible = size <= 100 * torch.finfo(G_hat.dtype).eps * whole
    X = P @ G_perp
    if h.orthogonalizes:
        factor, X = polar_factors(X, negligible, h, ops)
        return ops.combine(factor, X, call.aspect_scale, subspace, U)
    scale = damp(state["inv_sqrt_mu"], eps).masked_fill(negligible, 0.0)
    return ops.combine(None, X, scale, subspace, U)


def step(G: Tensor, state: State, h: ProHyper, call: Call, ops: Primitives) -> tuple[Tensor, State]:
    """One step of Algorithm 2 after the initialising one, for the B weights of a bucket.

    Args:
        G: finite gradients (B,m,n) in the arithmetic dtype; zero for matrices that are not live.
        state: stacked state in the arithmetic dtype, keys as in :mod:`prokl.reference`.
        h: hyper-parameters.
        call: aspect scales, refreshing matrices, live mask.
        ops: table of primitives.

    Returns:
        The direction (B,m,n) and the new state. Nothing is modified in place.
    """
    _, m, n = G.shape
    U, Q_L, Q_S = state["U"], state["Q_L"], state["Q_S"]
    scale = state["lambda_0"].rsqrt() if "lambda_0" in state else G.new_ones(G.shape[0])
    eps = h.eps / scale

    # (1), (2): momentum, projection and direction with the previous step's state
    M, G_hat = ops.accumulate(state["M"], G, h.momentum, h.gradient_weights)
    a_L = damp(state["inv_sqrt_lambda_L"], eps)
    a_S = damp(state["inv_sqrt_lambda_S"], eps)
    delta = direction(G_hat, whitener(Q_L, a_L), state, eps, h, call, ops)

    # (3): statistics of the raw gradient
    Gt = G @ U
    G_perp = ops.residual(G, Gt, U)
    E = G_perp @ G_perp.mT
    QtGt, GtQ = Q_L.mT @ Gt, Gt @ Q_S
    A = QtGt @ Q_S
    s_L, s_S, s_mu = ops.eigenvalue_ema(
        state["inv_sqrt_lambda_L"],
        state["inv_sqrt_lambda_S"],
        state["inv_sqrt_mu"],
        (A * a_S[:, None, :]).square().sum(dim=-1),
        (A * a_L[:, :, None]).square().mean(dim=-2),
        ((E @ Q_L) * Q_L).sum(dim=-2).clamp_(min=0),  # rounding may leave a vanishing one negative
        beta2=h.beta2,
        n=n,
        eps=eps,
        ceiling_L=ceiling(m) * scale,
        ceiling_S=ceiling(n) * scale,
        ceiling_mu=ceiling(n) * scale,
        live=call.live,
    )
    a_L, a_S, a_mu = damp(s_L, eps), damp(s_S, eps), damp(s_mu, eps)
    X = GtQ * a_S[:, None, :]
    L = torch.baddbmm(state["L"], X, X.mT, beta=h.beta2, alpha=(1 - h.beta2) / n)
    L += E * ((1 - h.beta2) / n * a_mu**2)[:, None, None]
    Z = QtGt * a_L[:, :, None]
    sample = Z.mT @ Z * ((1 - h.beta2) / m)
    S = h.beta2 * state["S"] + sample

    # (4): subspace tracking; V = beta2 U S + (1-beta2)/m G^T L^-1 G U and K = U^T V
    Y = Q_L @ (Z * a_L[:, :, None])
    V = torch.baddbmm(U @ S, G.mT, Y, beta=h.beta2, alpha=(1 - h.beta2) / m)
    U_new = ops.tracking_qr(V, h.beta2 * S + sample, U)
    T = U.mT @ U_new
    new = {
        "M": M,
        "U": U_new,
        "L": L,
        "S": T.mT @ S @ T,
        "Q_L": Q_L,
        "Q_S": T.mT @ Q_S,
        "inv_sqrt_lambda_L": s_L,
        "inv_sqrt_lambda_S": s_S,
        "inv_sqrt_mu": s_mu,
    }
    if "lambda_0" in state:
        new["lambda_0"] = state["lambda_0"]

    # (5): refresh; Q_S is no orthogonal basis between refreshes, so it takes the plain QR of S Q_S
    refresh_rows(new, "Q_L", call.refresh, lambda i: ops.refresh_basis(new["L"][i], new["Q_L"][i]))
    refresh_rows(new, "Q_S", call.refresh, lambda i: ops.small_qr(new["S"][i] @ new["Q_S"][i]))
    return delta, new


def refresh_rows(state: State, key: str, rows: Sequence[int], fresh: Callable[[Any], Tensor]) -> None:
    """state[key][rows] <- fresh(rows), without touching the tensor that was there; all rows without a copy."""
    count = state[key].shape[0]
    if len(rows) == count:
        state[key] = fresh(slice(None))
    elif rows:
        index = torch.as_tensor(rows, device=state[key].device)
        state[key] = state[key].index_copy(0, index, fresh(index))
