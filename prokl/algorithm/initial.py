"""The state that the first usable gradient gives; one function for every path.

Dimension key: B matrices (any leading shape), m short side, n long side, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.directions import singular_directions
from prokl.algorithm.settings import InitEigenvalue
from prokl.algorithm.shapes import ceiling, widest


def start_eigenvalue(G: Tensor, init_eigenvalue: InitEigenvalue) -> Tensor:
    """Return lambda_0 per matrix (B,): the number given, or the gradient's rms for ``"auto"``."""
    if init_eigenvalue == "auto":
        m, n = G.shape[-2:]
        rms = torch.linalg.vector_norm(G, dim=(-2, -1), dtype=torch.float64) / (m * n) ** 0.5
        return rms.to(G.dtype)
    return torch.full(G.shape[:-2], float(init_eigenvalue), dtype=G.dtype, device=G.device)


def ceiling_factor(state: dict[str, Tensor]) -> Tensor:
    """Return the factor of the ceilings (B,): 1 for an absolute start value, ``lambda_0**-0.5`` for ``"auto"``."""
    s = state["inv_sqrt_lambda_L"]
    return state["lambda_0"].rsqrt() if "lambda_0" in state else torch.ones_like(s[..., 0])


ORTHONORMAL = 0.02
"""Largest distance of Q^T Q from I, in root mean square a column: bfloat16 leaves up to 0.004 in that of U. Within it
a refresh makes the basis orthonormal again."""


def can_go_on(state: dict[str, Tensor]) -> Tensor:
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


def _start(lambda_0: Tensor, width: int, dim: int, auto: bool) -> Tensor:
    """Return lambda_0^-1/2 (B, width), clipped at the ceiling of a factor of size ``dim``."""
    s = torch.minimum(lambda_0.rsqrt(), ceiling(dim) * (lambda_0.rsqrt() if auto else torch.ones_like(lambda_0)))
    return s.unsqueeze(-1).expand(*s.shape, width).clone()


def _wide(t: Tensor) -> Tensor:
    """Return t in the widest dtype of its device, whose products torch's TF32 switches leave alone."""
    return t.to(widest(t.device))


def initialise(G: Tensor, rank: int, beta2: float, init_eigenvalue: InitEigenvalue) -> dict[str, Tensor]:
    """Make Pro-KLShampoo's state from the initialising gradient (Algorithm 2, "Initialization").

    With G = X diag(sigma) Y^T: U = Y[:, :r], Q_L = X (all m columns, which also fixes the null space of the
    rank-r initial L), Q_S = I; L_Q = (1-beta2)/r G~ G~^T, S = (1-beta2)/m G~^T G~ with G~ = X^T G U, as M and L are
    kept in the basis Q_L. :func:`prokl.algorithm.directions.singular_directions` says what X and Y are where G leaves
    them open.

    Args:
        G: finite, non-zero gradient, (..., m, n) with m <= n, float32 or float64.
        rank: r, at most min(m, n - 1).
        beta2: EMA weight.
        init_eigenvalue: the paper's lambda_0, or "auto": lambda_0 = rms(G) per matrix, L and S divided by it
            and the ceilings scaled by lambda_0**-0.5, so that scaling G scales the whole state along.

    Returns:
        M_Q, U, L_Q, S, Q_L, Q_S, inv_sqrt_lambda_L, inv_sqrt_lambda_S, inv_sqrt_mu, clipped and, for "auto", lambda_0.
    """
    m, n = G.shape[-2:]
    X, U = singular_directions(G, rank)
    lambda_0 = start_eigenvalue(G, init_eigenvalue)
    auto = init_eigenvalue == "auto"
    state = {"clipped": torch.zeros_like(lambda_0)} | ({"lambda_0": lambda_0} if auto else {})
    Gt = _wide(X).mT @ (_wide(G) @ _wide(U))
    if auto:
        Gt = Gt * lambda_0.rsqrt()[..., None, None]
    state |= {
        "M_Q": torch.zeros_like(G),
        "U": U,
        "L_Q": ((1 - beta2) / rank * (Gt @ Gt.mT)).to(G.dtype),
        "S": ((1 - beta2) / m * (Gt.mT @ Gt)).to(G.dtype),
        "Q_L": X,
        "Q_S": torch.eye(rank, dtype=G.dtype, device=G.device).expand(*G.shape[:-2], rank, rank).clone(),
        "inv_sqrt_lambda_L": _start(lambda_0, m, m, auto),
        "inv_sqrt_lambda_S": _start(lambda_0, rank, n, auto),
        "inv_sqrt_mu": _start(lambda_0, 1, n, auto).squeeze(-1),
    }
    return state


def initialise_kl(G: Tensor, beta2: float, init_eigenvalue: InitEigenvalue) -> dict[str, Tensor]:
    """Make KL-Shampoo's state from the initialising gradient: both factors whole.

    L = (1-beta2)/n G G^T and R = (1-beta2)/m G^T G with their descending eigenvectors, Q_L = X and Q_R = Y completed to
    a basis, in which both are kept. Arguments and "auto" as in :func:`initialise`.

    Returns:
        M_Q, L_Q, R_Q, Q_L, Q_R, inv_sqrt_lambda_L, inv_sqrt_lambda_R, clipped and, for "auto", lambda_0.
    """
    m, n = G.shape[-2:]
    X, Y = singular_directions(G, n)
    lambda_0 = start_eigenvalue(G, init_eigenvalue)
    auto = init_eigenvalue == "auto"
    state = {"clipped": torch.zeros_like(lambda_0)} | ({"lambda_0": lambda_0} if auto else {})
    Gs = _wide(X).mT @ _wide(G) @ _wide(Y)
    Gs = Gs * lambda_0.rsqrt()[..., None, None] if auto else Gs
    state |= {
        "M_Q": torch.zeros_like(G),
        "L_Q": ((1 - beta2) / n * (Gs @ Gs.mT)).to(G.dtype),
        "R_Q": ((1 - beta2) / m * (Gs.mT @ Gs)).to(G.dtype),
        "Q_L": X,
        "Q_R": Y,
        "inv_sqrt_lambda_L": _start(lambda_0, m, m, auto),
        "inv_sqrt_lambda_R": _start(lambda_0, n, n, auto),
    }
    return state
