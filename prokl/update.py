"""The fast step of Pro-KLShampoo for all weights of one oriented shape, written once over a table of primitives.

Differences from the reference, none of them in the mathematics:

* L^-1/2 = Q_L diag(.) Q_L^T is formed once as an m x m matrix P, and X = P G^perp once; Newton-Schulz then works
  on m x m Gram matrices. Starting from P H P with H = G^_perp G^_perp^T instead would need H, and after the
  restart (Q P) G^_perp, in float32: one such m x n product more. In bfloat16 the rounding of H is amplified by
  cond(P)^2, and Newton-Schulz diverged from cond(P) = 100 on (64 x 256); from X its error stayed at 0.02.
* G_perp G_perp^T serves both e_res and L; the increment of S serves the Cholesky preconditioner of the
  tracking QR as well.
* G^par = G^ U follows from G U and M U, so that one read of G and M serves the projection.
* G^T L^-1 G U = G_perp^T L^-1 G U + U (G U)^T L^-1 G U, whose second term K has already: G itself is read no more.
* The two m x n residuals are formed explicitly: the difference of Gram matrices loses accuracy as U captures
  more of the energy (in float32, 64 x 256 and r = 32: 2.7, 13 and 50 times the error at 50, 90 and 99 %).

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prokl.hyper import ProHyper
from prokl.ops import Primitives
from prokl.shapes import ceiling
from prokl.torch_ops import Direction, damp

State = dict[str, Tensor]
Rows = slice | Tensor | None
"""Matrices of a bucket: all of them, an index on the device, or none."""


@dataclass(frozen=True)
class Call:
    """What one call of a batched step is told besides gradient, state and hyper-parameters."""

    aspect_scale: Tensor
    """c_a of every matrix (B,)."""
    refresh: Rows
    """Matrices whose step is divisible by tau."""
    live: Tensor | None
    """(B,) bool, or None when every matrix steps. The others' results are thrown away by the caller."""
    decay: float | Tensor
    """1 - lr * weight_decay."""


def workspace(m: int, n: int, r: int) -> int:
    """Elements of temporary memory that a step needs for one matrix at most, whatever the state's dtype."""
    return 8 * m * n + 9 * m * m + 6 * n * r


def direction(
    G_hat_perp: Tensor | None, negligible: Tensor | None, G_par: Tensor, P: Tensor, state: State, eps: Tensor,
    h: ProHyper, call: Call, ops: Primitives,
) -> Direction:  # fmt: skip
    """(2) of Algorithm 2 for a bucket, as factors: G^perp (B,m,n), G^par (B,m,r) and P = L^-1/2 (B,m,m) -> D."""
    U = state["U"]
    subspace = None
    if h.has_subspace:
        a_S = damp(state["inv_sqrt_lambda_S"], eps)
        subspace = ops.precondition(P, G_par, state["Q_S"], a_S, h.subspace_weight)
    if not h.has_complement:
        return Direction(None, B=subspace, U=U)
    assert G_hat_perp is not None and negligible is not None
    if h.orthogonalizes:
        Q, Y, scale = ops.polar(P, G_hat_perp, negligible, h)
        scale = call.aspect_scale if scale is None else scale * call.aspect_scale
        return Direction(Y, Q, scale, subspace, None if subspace is None else U)
    scale = damp(state["inv_sqrt_mu"], eps).masked_fill(negligible, 0.0)
    return Direction(ops.product(P, G_hat_perp), None, scale, subspace, U)


def step(G: Tensor, state: State, h: ProHyper, call: Call, ops: Primitives) -> tuple[Direction, State]:
    """One step of Algorithm 2 after the initialising one, for the B weights of a bucket.

    Args:
        G: gradients (B,m,n) as ``ops.stack`` gave them.
        state: stacked state in the arithmetic dtype, keys as in :mod:`prokl.reference`; M in its own.
        h: hyper-parameters.
        call: aspect scales, refreshing matrices, live mask.
        ops: table of primitives.

    Returns:
        The direction (B,m,n) as factors, and the new state. Nothing is modified in place but, where a table does so,
        G and M.
    """
    _, m, n = G.shape
    U, Q_L, Q_S = state["U"], state["Q_L"], state["Q_S"]
    mm = ops.product
    scale = state["lambda_0"].rsqrt() if "lambda_0" in state else torch.ones_like(state["inv_sqrt_mu"])
    eps = h.eps / scale
    G = ops.silence(G, call.live)

    # (1): momentum and projection; G^ = a G + b M is linear in G and the old M
    g, a, b = h.gradient_weights
    Gt, Mt = ops.project(G, state["M"], U, call.live)
    G_par = (a + b * g) * Gt + b * h.momentum * Mt
    M, G_perp, G_hat_perp, negligible = ops.residuals(  # may overwrite G
        G, state["M"], Gt, G_par if h.has_complement else None, U, h.momentum, h.gradient_weights, call.live
    )

    # (2): direction with the previous step's state; P = Q_L diag(a_L) Q_L^T
    a_L = damp(state["inv_sqrt_lambda_L"], eps)
    a_S = damp(state["inv_sqrt_lambda_S"], eps)
    P = ops.symmetric_product(Q_L * a_L.sqrt()[:, None, :])
    delta = direction(G_hat_perp, negligible, G_par, P, state, eps, h, call, ops)
    del G_hat_perp, G_par, P, Mt  # memory for the rest

    # (3): statistics of the raw gradient
    E = ops.symmetric_product(G_perp)
    QtGt, GtQ = mm(Q_L.mT, Gt), mm(Gt, Q_S)
    A = mm(QtGt, Q_S)
    s_L, s_S, s_mu = ops.eigenvalue_ema(
        state["inv_sqrt_lambda_L"],
        state["inv_sqrt_lambda_S"],
        state["inv_sqrt_mu"],
        (A * a_S[:, None, :]).square().sum(dim=-1),
        (A * a_L[:, :, None]).square().mean(dim=-2),
        mm(E, Q_L).mul_(Q_L).sum(dim=-2).clamp_(min=0),  # rounding may leave a vanishing one negative
        beta2=h.beta2,
        n=n,
        eps=eps,
        ceiling_L=ceiling(m) * scale,
        ceiling_S=ceiling(n) * scale,
        ceiling_mu=ceiling(n) * scale,
        live=call.live,
    )
    a_L, a_S, a_mu = damp(s_L, eps), damp(s_S, eps), damp(s_mu, eps)
    L = ops.symmetric_product(GtQ * a_S[:, None, :], C=state["L"], beta=h.beta2, alpha=(1 - h.beta2) / n)
    L.addcmul_(E, ((1 - h.beta2) / n * a_mu**2)[:, None, None])
    del E
    Z = QtGt * a_L[:, :, None]
    sample = ops.symmetric_product(Z.mT, alpha=(1 - h.beta2) / m)
    S = h.beta2 * state["S"] + sample

    # (4): subspace tracking; V = beta2 U S + (1-beta2)/m G^T L^-1 G U, and K = U^T V
    Y = mm(Q_L, Z * a_L[:, :, None])
    K = h.beta2 * S + sample
    V = mm(G_perp.mT, Y, C=mm(U, K), alpha=(1 - h.beta2) / m)
    del G_perp, Y
    U_new = ops.tracking_qr(V, K, U)
    T = mm(U.mT, U_new)
    new = {
        "M": M,
        "U": U_new,
        "L": L,
        "S": mm(T.mT, mm(S, T)),
        "Q_L": Q_L,
        "Q_S": mm(T.mT, Q_S),
        "inv_sqrt_lambda_L": s_L,
        "inv_sqrt_lambda_S": s_S,
        "inv_sqrt_mu": s_mu,
    }
    if "lambda_0" in state:
        new["lambda_0"] = state["lambda_0"]

    # (5): refresh; Q_S is no orthogonal basis between refreshes
    refresh_rows(new, "Q_L", call.refresh, lambda i: ops.refresh_basis(new["L"][i], new["Q_L"][i]))
    refresh_rows(new, "Q_S", call.refresh, lambda i: ops.refresh_coordinates(new["S"][i], new["Q_S"][i]))
    return delta, new


def refresh_rows(state: State, key: str, rows: Rows, fresh: Callable[[Any], Tensor]) -> None:
    """state[key][rows] <- fresh(rows), without touching the tensor that was there; all rows without a copy."""
    if isinstance(rows, slice):
        state[key] = fresh(rows)
    elif rows is not None:
        state[key] = state[key].index_copy(0, rows, fresh(rows))
