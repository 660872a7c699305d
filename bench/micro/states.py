"""States and gradients of a step that a training run could have, and the operations timed beside the specification.

Dimension key: B matrices, m short side, n long side, r rank, k columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.micro.case import FP32, Case, Draw, Dtypes, Inputs, Sizes
from prokl import ProKLShampoo
from prokl.algorithm import klshampoo, pro_klshampoo
from prokl.algorithm.algebra import Algebra
from prokl.algorithm.qr import householder_qr
from prokl.algorithm.reference import in_eigenbases
from prokl.algorithm.settings import ProHyper, pro_hyper
from prokl.algorithm.shapes import State

OPTIMIZER = ProKLShampoo([torch.zeros(2, 2)], 1e-3, 0.1, 0.95, beta2=0.95, alpha_kl=0.01)
NS_STEPS, NS_COEFFICIENTS = OPTIMIZER.defaults["ns_steps"], OPTIMIZER.defaults["ns_coefficients"]


def settings(**own: Any) -> ProHyper:
    """Return the settings of a step with ``own`` ones; alpha_kl is a number, so that the shape plays no part."""
    return pro_hyper(OPTIMIZER.defaults | own, 1, 2, torch.float32, torch.device("cpu"))


H = settings()
CONDITION = 1e4
"""Condition number of L, S and R."""
DRIFT = 0.1
"""Distance of the bases from the eigenvectors; condition and drift are roughly those of a training run."""


def basis(n: int, k: int, B: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return orthonormal X (B,n,k) and an orthonormal basis that has drifted from it, both in float64.

    The matrices of a batch are one, its rows in other orders.
    """
    X = torch.linalg.qr(draw(n, k, dtype=torch.float64))[0]
    drifted = householder_qr(X + DRIFT * draw(n, k, dtype=torch.float64) / n**0.5)
    order = draw(B, n, dtype=torch.float64).argsort(dim=-1)
    return X[order], drifted[order]


def factor(k: int, B: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return a symmetric factor (B,k,k), its eigenvalues evenly spread in logarithms, and its basis of before."""
    X, Q = basis(k, k, B, draw)
    L = (X * CONDITION ** -torch.linspace(0, 1, k, dtype=X.dtype, device=X.device)) @ X.mT
    return (L + L.mT) / 2, Q


def pro_inputs(s: Sizes, d: Dtypes, draw: Draw, times: float = 1.0) -> Inputs:
    """Draw gradients of a usual size to Pro-KLShampoo's state; Q_S is no orthonormal basis, as between refreshes."""
    (L, Q_L), (S, Q_S) = factor(s.m, s.B, draw), factor(s.r, s.B, draw)
    Q_S = Q_S + DRIFT * draw(s.B, s.r, s.r, dtype=Q_S.dtype) / s.r**0.5
    M, U = draw(s.B, s.m, s.n, dtype=L.dtype), basis(s.n, s.r, s.B, draw)[1]
    state = {"M": M, "U": U, "L": L, "Q_L": Q_L, "S": S, "Q_S": Q_S}
    return _inputs(s, d, draw, state, {"lambda_L": (s.B, s.m), "lambda_S": (s.B, s.r), "mu": (s.B,)}, times)


def kl_inputs(s: Sizes, d: Dtypes, draw: Draw, times: float = 1.0) -> Inputs:
    """Draw gradients of a usual size to KL-Shampoo's state."""
    (L, Q_L), (R, Q_R) = factor(s.m, s.B, draw), factor(s.n, s.B, draw)
    state = {"M": draw(s.B, s.m, s.n, dtype=L.dtype), "L": L, "Q_L": Q_L, "R": R, "Q_R": Q_R}
    return _inputs(s, d, draw, state, {"lambda_L": (s.B, s.m), "lambda_R": (s.B, s.n)}, times)


def _inputs(s: Sizes, d: Dtypes, draw: Draw, state: State, roots: dict[str, tuple[int, ...]], times: float) -> Inputs:
    state = in_eigenbases(state) | {
        f"inv_sqrt_{key}": draw(*size, dtype=d.arithmetic).abs() for key, size in roots.items()
    }
    state["clipped"] = torch.zeros_like(state["L_Q"][:, 0, 0])
    stored = {key: t.to(d.momentum if key == "M_Q" else d.arithmetic).contiguous() for key, t in state.items()}
    return {"G": times * draw(s.B, s.m, s.n, dtype=d.weights).to(d.arithmetic), "state": stored}


def _tracked(i: Inputs) -> Tensor:
    G, U, S = i["G"], i["state"]["U"], i["state"]["S"]
    a_L = i["state"]["inv_sqrt_lambda_L"][:, :, None]
    return householder_qr(H.beta2 * U @ S + (1 - H.beta2) / G.shape[1] * G.mT @ (a_L**2 * (G @ U)))


def _track(i: Inputs, ops: Algebra) -> Callable[[], Tensor]:
    """Track from what a step has at (4), where G and lambda_L are what the bound and the EMA have left of them."""
    G, U, S, gain = i["G"], i["state"]["U"], i["state"]["S"], (1 - H.beta2) / i["G"].shape[1]
    G_tilde = G @ U
    Y = i["state"]["inv_sqrt_lambda_L"][:, :, None] ** 2 * G_tilde
    K = H.beta2 * S + gain * G_tilde.mT @ Y
    G_perp, Y = ops.operands(G - G_tilde @ U.mT, Y)
    return lambda: ops.track(G_perp, Y, K, U, gain)


def _turned(F: Tensor, Q: Tensor) -> Tensor:
    """Return Q qr(F), its columns as orthonormal again as a step of Newton-Schulz's iteration makes them."""
    X = Q @ householder_qr(F)
    return 1.5 * X - 0.5 * X @ X.mT @ X


def _bases(i: Inputs) -> list[Tensor]:
    state = i["state"]
    Q_L = _turned(state["L_Q"], state["Q_L"])
    return [Q_L, _turned(state["R_Q"], state["Q_R"]) if "Q_R" in state else householder_qr(state["S"] @ state["Q_S"])]


def _refresh(refresh: Callable[..., State], *keys: str) -> Any:
    def bind(i: Inputs, ops: Algebra) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            new = refresh(ops, i["state"])
            return [new[key] for key in keys]

        return run

    return bind


SPECIFIED = (
    Case("track", pro_inputs, _track, plain=_tracked, timed=(FP32,)),
    Case(
        "refresh", pro_inputs, _refresh(pro_klshampoo.refresh, "Q_L", "Q_S"), plain=_bases, timed=(FP32,),
        counterpart=Case("KL-Shampoo's refresh", kl_inputs, _refresh(klshampoo.refresh, "Q_L", "Q_R"), plain=_bases),
    ),
)  # fmt: skip
"""KL-Shampoo tracks no subspace. Its refresh, as ours, takes place once in tau steps."""
