"""KL-Shampoo, both factors whole, for all weights of one oriented shape; reference_kl.py is its authors' form.

Momentum and both factors are kept in the eigenbases, M_Q = Q_L^T M Q_R, L_Q = Q_L^T L Q_L and R_Q = Q_R^T R Q_R, and
the gradient is turned into them once. Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm import reference_kl
from prokl.algorithm.algebra import Algebra, Direction, Factor
from prokl.algorithm.evidence import MOMENTUM_CLIP_FACTOR, Sizes, clip_decision, clipped_ema, in_range, norm
from prokl.algorithm.initial import initialise_kl
from prokl.algorithm.settings import Group, Hyper, check_common, hyper
from prokl.algorithm.shapes import State, ceiling, ceiling_factor


def whitened_sizes(A: Tensor, state: State) -> Sizes:
    """Measure the gradient (B,m,n) in the eigenbases."""
    m, n = A.shape[-2:]
    whitened = A * state["inv_sqrt_lambda_L"][:, :, None] * state["inv_sqrt_lambda_R"][:, None, :]
    rows, columns = norm(whitened, -1), norm(whitened, -2)
    return rows / n**0.5, columns / m**0.5, norm(rows, -1) / (m * n) ** 0.5


def whitened_size(ops: Algebra, G: Tensor, state: State, h: Hyper) -> Tensor:
    """Return the whitened size (B,) of G by the state before it."""
    Q_L, Q_R = ops.operands(state["Q_L"], state["Q_R"])
    return whitened_sizes(ops.product(ops.product(Q_L.mT, G), Q_R), state)[-1]


def step(
    ops: Algebra, G: Factor, state: State, h: Hyper, aspect_scale: Tensor, active: Tensor | None
) -> tuple[Direction, State, Tensor | None]:
    """Do one step but for the refresh; weight decay comes after it, on the updated weight."""
    s_L, s_R = state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_R"]
    (m, n), ema, factor = G.shape[-2:], 1 - h.beta2, ceiling_factor(state)
    Q_L, Q_R = ops.operands(state["Q_L"], state["Q_R"])

    # The gradient in the eigenbases, and what it may do: c, and the eigenvalues that the direction takes.
    A = ops.product(ops.product(Q_L.mT, G), Q_R)
    decision, used_L, used_R = None, s_L, s_R
    if h.clip_threshold is not None:
        decision = clip_decision(whitened_sizes(A, state), norm(A) / (m * n) ** 0.5, state, h)
        A = A * decision.scale[:, None, None]
        used_L, used_R = s_L * decision.rows, s_R * decision.columns

    # M <- momentum M + (1 - momentum) c G, and the direction Q_L [M_Q * s/(1 + eps s)] Q_R^T.
    M = torch.lerp(state["M_Q"].to(A.dtype), A, 1 - h.momentum)
    eps = (h.eps / factor**2)[:, None, None]
    s = used_L[:, :, None] * used_R[:, None, :]
    D = M * (s / (1 + eps * s))
    if decision is not None:
        size, largest = norm(D), MOMENTUM_CLIP_FACTOR * h.gain * (m * n) ** 0.5
        cut = torch.where(size > largest, largest / size, 1.0)
        D = (D * cut.to(D.dtype)[:, None, None]).masked_fill_((cut == 0)[:, None, None], 0.0)  # of an infinite norm
        bounded = decision.bounded | (cut < 1)
    D = ops.product(ops.product(Q_L, D, alpha=h.direction_scale), Q_R.mT)

    # The EMAs of both factors and both spectra, each side whitened by the other side's old eigenvalues.
    X, Y = A * s_R[:, None, :], A * s_L[:, :, None]
    ell, rho = X.square().mean(dim=-1), Y.square().mean(dim=-2)
    X, Y = ops.operands(X, Y)
    s_L = clipped_ema(s_L, ell, h.beta2, (ceiling(m) * factor)[:, None])
    s_R = clipped_ema(s_R, rho, h.beta2, (ceiling(n) * factor)[:, None])
    new = {
        "M_Q": M,
        "L_Q": ops.symmetric_product(X, C=state["L_Q"], beta=h.beta2, alpha=ema / n),
        "R_Q": ops.symmetric_product(Y.mT, C=state["R_Q"], beta=h.beta2, alpha=ema / m),
        "inv_sqrt_lambda_L": s_L,
        "inv_sqrt_lambda_R": s_R,
    }
    evident = None
    if decision is not None:
        new |= decision.changed | {"clipped": state["clipped"] + bounded}
        evident = decision.evident & in_range((s_L, s_R), n, state["M_Q"].dtype)
    return Direction(D, decay_after=True, cautious_decay=h.cautious_weight_decay), new, evident


def refresh(ops: Algebra, state: State) -> State:
    """Refresh Q_L <- qr(L Q_L), Q_R <- qr(R Q_R); what is kept in the bases turns along."""
    P_L, Q_L, L = ops.refreshed(state["L_Q"], state["Q_L"])
    P_R, Q_R, R = ops.refreshed(state["R_Q"], state["Q_R"])
    M = ops.product(ops.product(P_L.mT, ops.operand(state["M_Q"].to(Q_L.dtype))), P_R)
    return {"Q_L": Q_L, "L_Q": L, "Q_R": Q_R, "R_Q": R, "M_Q": M}


class KLShampooMethod:
    """KL-Shampoo as a :class:`prokl.algorithm.method.Method`."""

    fixed: tuple[str, ...] = ("state_dtype", "init_eigenvalue")
    check = staticmethod(check_common)
    hyper = staticmethod(hyper)
    initialise = staticmethod(initialise_kl)
    step = staticmethod(step)
    refresh = staticmethod(refresh)
    whitened_size = staticmethod(whitened_size)
    reference_step = staticmethod(reference_kl.step)

    def rank(self, group: Group, m: int, n: int) -> int:
        """Return 0: both factors are whole."""
        return 0

    def refreshes(self, step: int, group: Group) -> bool:
        """Return True in every tau-th step."""
        return step % group["precondition_frequency"] == 0

    def state_shapes(self, m: int, n: int, rank: int, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shape of every state tensor of one matrix, by its key."""
        shapes: dict[str, tuple[int, ...]] = {
            "M_Q": (m, n),
            "L_Q": (m, m),
            "R_Q": (n, n),
            "Q_L": (m, m),
            "Q_R": (n, n),
            "inv_sqrt_lambda_L": (m,),
            "inv_sqrt_lambda_R": (n,),
            "clipped": (),
        }
        return shapes | ({"lambda_0": ()} if group["init_eigenvalue"] == "auto" else {})

    def workspace(self, m: int, n: int, rank: int) -> int:
        """Return the elements of temporary memory that a step needs for one matrix at most."""
        return 8 * m * n + 9 * n * n + 8 * m * m
