"""The state that the first usable gradient gives; one function for every path.

Dimension key: B matrices (any leading shape), m short side, n long side, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.directions import singular_directions
from prokl.algorithm.settings import InitEigenvalue
from prokl.algorithm.shapes import State, ceiling, widest

ORTHONORMAL = 0.02
"""Largest distance of Q^T Q from I, in root mean square a column: bfloat16 leaves up to 0.004 in that of U. Within it
a refresh makes the basis orthonormal again."""


def can_go_on(state: State) -> Tensor:
    """Return (B,) bool, False where no step can go on from a state (B,...): somebody has zeroed or pruned it.

    An inverse root of 0 is an infinite eigenvalue, which no gradient brings down, and a turn of a basis gives back
    nothing that it lacks. All else heals by itself.
    """
    good = []
    for key, t in state.items():
        if key.startswith(("inv_sqrt", "lambda_0")):
            good.append(((t > 0) & t.isfinite()).reshape(len(t), -1).all(dim=1))
        elif key in ("U", "Q_L", "Q_R"):
            Q = t.to(torch.promote_types(t.dtype, torch.float32))
            off = Q.mT @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
            good.append(torch.linalg.matrix_norm(off) <= ORTHONORMAL * Q.shape[-1] ** 0.5)
    return torch.stack(good).all(dim=0)


def _start(
    G: Tensor, X: Tensor, turned: Tensor, start: InitEigenvalue, **sides: tuple[int, int]
) -> tuple[State, Tensor]:
    """Return what both methods' states have, and the turned gradient, divided by sqrt(lambda_0) for "auto".

    ``sides`` are the width of every eigenvalue and the size of the factor that its ceiling follows.
    """
    m, n = G.shape[-2:]
    if start == "auto":
        rms = torch.linalg.vector_norm(G, dim=(-2, -1), dtype=torch.float64) / (m * n) ** 0.5
        lambda_0 = rms.to(G.dtype)
    else:
        lambda_0 = torch.full(G.shape[:-2], float(start), dtype=G.dtype, device=G.device)
    s = lambda_0.rsqrt()
    state = {"M_Q": torch.zeros_like(G), "Q_L": X, "clipped": torch.zeros_like(s)}
    for key, (width, dim) in sides.items():
        clipped = s if start == "auto" else s.clamp(max=ceiling(dim))
        state[f"inv_sqrt_{key}"] = clipped.unsqueeze(-1).expand(*s.shape, width).clone()
    return (state | {"lambda_0": lambda_0}, turned * s[..., None, None]) if start == "auto" else (state, turned)


def initialise(G: Tensor, rank: int, group: dict[str, Any]) -> State:
    """Make Pro-KLShampoo's state from the initialising gradient (Algorithm 2, "Initialization").

    With G = X diag(sigma) Y^T: U = Y[:, :r], Q_L = X (all m columns, which also fixes the null space of the
    rank-r initial L), Q_S = I; L_Q = (1-beta2)/r G~ G~^T, S = (1-beta2)/m G~^T G~ with G~ = X^T G U, as M and L are
    kept in the basis Q_L. :func:`prokl.algorithm.directions.singular_directions` says what X and Y are where G leaves
    them open.

    Args:
        G: finite, non-zero gradient, (..., m, n) with m <= n, float32 or float64.
        rank: r, at most min(m, n - 1).
        group: has beta2, and init_eigenvalue, the paper's lambda_0, or "auto": lambda_0 = rms(G) per matrix, L and S
            divided by it and the ceilings scaled by lambda_0**-0.5, so that scaling G scales the whole state along.

    Returns:
        M_Q, U, L_Q, S, Q_L, Q_S, inv_sqrt_lambda_L, inv_sqrt_lambda_S, inv_sqrt_mu, clipped and, for "auto", lambda_0.
    """
    (m, n), wide, ema = G.shape[-2:], widest(G.device), 1 - group["beta2"]  # TF32 switches leave wide products alone
    X, U = singular_directions(G, rank)
    Gt = X.to(wide).mT @ (G.to(wide) @ U.to(wide))
    state, Gt = _start(G, X, Gt, group["init_eigenvalue"], lambda_L=(m, m), lambda_S=(rank, n), mu=(1, n))
    eye = torch.eye(rank, dtype=G.dtype, device=G.device)
    return state | {
        "U": U,
        "L_Q": (ema / rank * (Gt @ Gt.mT)).to(G.dtype),
        "S": (ema / m * (Gt.mT @ Gt)).to(G.dtype),
        "Q_S": eye.expand(*G.shape[:-2], rank, rank).clone(),
        "inv_sqrt_mu": state["inv_sqrt_mu"].squeeze(-1),
    }


def initialise_kl(G: Tensor, rank: int, group: dict[str, Any]) -> State:
    """Make KL-Shampoo's state from the initialising gradient: both factors whole.

    L = (1-beta2)/n G G^T and R = (1-beta2)/m G^T G with their descending eigenvectors, Q_L = X and Q_R = Y completed to
    a basis, in which both are kept. Arguments and "auto" as in :func:`initialise`; ``rank`` is not read.

    Returns:
        M_Q, L_Q, R_Q, Q_L, Q_R, inv_sqrt_lambda_L, inv_sqrt_lambda_R, clipped and, for "auto", lambda_0.
    """
    (m, n), wide, ema = G.shape[-2:], widest(G.device), 1 - group["beta2"]
    X, Y = singular_directions(G, n)
    A = X.to(wide).mT @ G.to(wide) @ Y.to(wide)
    state, A = _start(G, X, A, group["init_eigenvalue"], lambda_L=(m, m), lambda_R=(n, n))
    factors = {"L_Q": (ema / n * (A @ A.mT)).to(G.dtype), "R_Q": (ema / m * (A.mT @ A)).to(G.dtype)}
    return state | factors | {"Q_R": Y}
