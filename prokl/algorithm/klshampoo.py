"""The fast step of KL-Shampoo, both factors whole, for all weights of one oriented shape.

Its stages are those of :mod:`prokl.algorithm.reference_kl`. Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm import reference_kl
from prokl.algorithm.initial import ceiling_factor, initialise_kl
from prokl.algorithm.method import Group, refreshed_rows, select_rows
from prokl.algorithm.primitives import Direction, Primitives, State, clipped_ema
from prokl.algorithm.settings import Hyper, check_common
from prokl.algorithm.shapes import ceiling


def momentum(G: Tensor, state: State, h: Hyper) -> Tensor:
    """Update the momentum, M <- momentum M + (1 - momentum) G (B,m,n)."""
    return torch.lerp(state["M"].to(G.dtype), G, 1 - h.momentum)


def direction(M: Tensor, state: State, h: Hyper, ops: Primitives) -> Tensor:
    """Compute Q_L [(Q_L^T M Q_R) * s/(1 + eps s)] Q_R^T (B,m,n) with s = lambda_L^-1/2 (x) lambda_R^-1/2."""
    mm = ops.product
    Q_L, Q_R = state["Q_L"], state["Q_R"]
    eps = (h.eps / ceiling_factor(state) ** 2)[:, None, None]
    s = state["inv_sqrt_lambda_L"][:, :, None] * state["inv_sqrt_lambda_R"][:, None, :]
    return mm(mm(Q_L, mm(mm(Q_L.mT, M), Q_R) * (s / (1 + eps * s))), Q_R.mT)


def statistics(G: Tensor, state: State, h: Hyper, ops: Primitives) -> State:
    """Update the EMAs of both factors and both spectra, each side whitened by the other side's old eigenvalues."""
    _, m, n = G.shape
    mm = ops.product
    Q_L, Q_R = state["Q_L"], state["Q_R"]
    s_L, s_R = state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_R"]
    factor = ceiling_factor(state)
    GQ, QtG = mm(G, Q_R), mm(Q_L.mT, G)
    A = mm(QtG, Q_R)
    ell = (A * s_R[:, None, :]).square().mean(dim=-1)
    rho = (A * s_L[:, :, None]).square().mean(dim=-2)
    X, Y = GQ * s_R[:, None, :], QtG * s_L[:, :, None]
    gain = 1 - h.beta2
    return {
        "L": ops.symmetric_product(X, C=state["L"], beta=h.beta2, alpha=gain / n),
        "R": ops.symmetric_product(Y.mT, C=state["R"], beta=h.beta2, alpha=gain / m),
        "inv_sqrt_lambda_L": clipped_ema(s_L, ell, h.beta2, (ceiling(m) * factor)[:, None]),
        "inv_sqrt_lambda_R": clipped_ema(s_R, rho, h.beta2, (ceiling(n) * factor)[:, None]),
    }


def refresh_eigenbases(state: State, rows: Tensor | None, ops: Primitives) -> State:
    """Refresh Q_L <- qr(L Q_L), Q_R <- qr(R Q_R), of ``rows`` or all."""
    L, Q_L, R, Q_R = (select_rows(state[key], rows) for key in ("L", "Q_L", "R", "Q_R"))
    return {
        "Q_L": refreshed_rows(state, "Q_L", rows, ops.refresh_basis(L, Q_L)),
        "Q_R": refreshed_rows(state, "Q_R", rows, ops.refresh_basis(R, Q_R)),
    }


class KLShampooMethod:
    """KL-Shampoo as a :class:`prokl.algorithm.method.Method`."""

    fixed: tuple[str, ...] = ("state_dtype", "init_eigenvalue")
    oversize_remedy: str | None = (
        'whose factors are square in its sides. Put it in a group with algorithm="adamw", or use ProKLShampoo.'
    )
    check = staticmethod(check_common)
    hyper = staticmethod(Hyper.of)
    refresh_eigenbases = staticmethod(refresh_eigenbases)

    def rank(self, group: Group, m: int, n: int) -> int:
        """Return 0: both factors are whole."""
        return 0

    def state_shapes(self, m: int, n: int, rank: int, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shape of every state tensor of one matrix, by its key."""
        shapes: dict[str, tuple[int, ...]] = {
            "M": (m, n),
            "L": (m, m),
            "R": (n, n),
            "Q_L": (m, m),
            "Q_R": (n, n),
            "inv_sqrt_lambda_L": (m,),
            "inv_sqrt_lambda_R": (n,),
        }
        return shapes | ({"lambda_0": ()} if group["init_eigenvalue"] == "auto" else {})

    def workspace(self, m: int, n: int, rank: int) -> int:
        """Return the elements of temporary memory that a step needs for one matrix at most."""
        return 8 * m * n + 9 * n * n + 8 * m * m

    def initialise(self, G: Tensor, rank: int, group: Group) -> State:
        """Make the state (B,...) from the initialising gradients G (B,m,n)."""
        return initialise_kl(G, group["beta2"], group["init_eigenvalue"])

    def direction(
        self, G: Tensor, state: State, h: Hyper, aspect_scale: Tensor, active: Tensor | None, ops: Primitives
    ) -> Direction:
        """Return the direction that the next step takes with G."""
        G = G.to(state["inv_sqrt_lambda_L"].dtype)
        return Direction(direction(momentum(G, state, h), state, h, ops), decay_after=True)

    def step(
        self, G: Tensor, state: State, h: Hyper, aspect_scale: Tensor, active: Tensor | None, ops: Primitives
    ) -> tuple[Direction, State]:
        """Do one step but for the refresh; weight decay comes after it, on the updated weight."""
        G = G.to(state["inv_sqrt_lambda_L"].dtype)
        M = momentum(G, state, h)
        delta = Direction(direction(M, state, h, ops), decay_after=True)
        return delta, {"M": M} | statistics(G, state, h, ops)

    def reference_step(
        self, W: Tensor, G: Tensor, state: State, h: Hyper, *, aspect_scale: float, refresh: bool
    ) -> tuple[Tensor, State]:
        """Do one step of the specification for one matrix; KL-Shampoo has no aspect scale."""
        return reference_kl.step(W, G, state, h, refresh=refresh)
