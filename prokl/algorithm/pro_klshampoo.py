"""Pro-KLShampoo and its variants for all weights of one oriented shape; reference.py beside it has the paper's.

(1) to (5) are the parts of Algorithm 2 as docs/algorithm.md numbers them. Momentum and L are kept in the eigenbasis of
L, M_Q = Q_L^T M and L_Q = Q_L^T L Q_L, and the gradient is turned into it once: then L^-1/2 scales rows, the energies
that lambda_L and mu_perp average are sums of rows, and only the direction is turned back.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm import evidence, reference
from prokl.algorithm.algebra import Algebra, Direction, Factor
from prokl.algorithm.initial import initialise
from prokl.algorithm.newton_schulz import newton_schulz
from prokl.algorithm.settings import POLAR_VARIANTS, SUBSPACE_VARIANTS, Group, ProHyper, check_pro, pro_hyper
from prokl.algorithm.shapes import State, effective_rank


def step(
    ops: Algebra, G: Factor, state: State, h: ProHyper, aspect_scale: Tensor, active: Tensor | None
) -> tuple[Direction, State, Tensor | None]:
    """Do (1) to (4) of Algorithm 2; arguments and results as :meth:`prokl.algorithm.method.Method.step` has them."""
    U, Q_L, Q_S, M = state["U"], state["Q_L"], state["Q_S"], state["M_Q"]
    (m, n), r, one_minus_beta2 = G.shape[-2:], U.shape[-1], 1 - h.beta2
    U_, Q = ops.operands(U, Q_L)  # as ops.product takes them

    # G' = Q_L^T G, G~' = G' U, G_perp' = G' - G~' U^T; then c, and the EMAs of lambda_L, lambda_S and mu_perp of (3).
    # The direction takes the inverse roots before them, admitted.used; (3) and (4) take the new ones.
    G = ops.product(Q.mT, G)
    projected = ops.projections(G, M, U_, Q_S)
    G_perp, e_res = ops.residual(G, projected.factor, U_)
    admitted = ops.admit(projected.A, projected.G, e_res, state, h, n)
    alpha_sub = h.direction_scale * h.alpha_kl
    G_par, D_sub, A_white, Z, Y = ops.subspace_parts(projected, admitted, h, Q_S, alpha_sub)

    second = ops.second_stream(G)  # of (3) and (4), which read nothing that (1) and (2) write

    # (1) M <- mu M + g c G; G^ = a c G + b M; X = a_L G^perp, where G^perp = G^ - G^par U^T.
    M, X, scale = ops.momentum(G, M, G_par, U_, admitted, h, active)

    # (2) Delta_res = c_a NS(L^-1/2 G^perp), Delta_sub = L^-1/2 G^par S^-1/2 U^T times alpha_kl, turned back by Q_L.
    used, bounded = admitted.used, admitted.bounded
    largest_rms = evidence.MOMENTUM_CLIP_FACTOR * h.gain  # of the whitened momentum
    polar, Q_rounded = h.variant in POLAR_VARIANTS, ops.rounded(Q)
    left, right, clipped = None, None, None if bounded is None else state["clipped"]
    if X is not None and polar:
        turn = Q_rounded if X.dtype == torch.bfloat16 else Q_L
        res_scale = aspect_scale  # c_a; match_rms_adamw has 0.2 sqrt(n) in its place
        if h.adjust_lr_fn != "original":
            res_scale = torch.full_like(aspect_scale, h.direction_scale)
        X, scale = newton_schulz(X, scale, res_scale, h.polynomials, ops, turn=turn)
    elif X is not None and scale is not None:
        # Smok-Hop: Delta_res = mu_perp^-1/2 X, brought down to largest_rms sqrt(m (n - r)); scale is 1 / ||X||, or 0.
        ratio = largest_rms * (m * (n - r)) ** 0.5 * scale / used.mu
        factor = (scale > 0).to(ratio.dtype) if bounded is None else ratio.clamp(max=1.0)
        bounded = None if bounded is None else bounded | ((ratio > 0) & (ratio < 1))
        X, scale = ops.product(Q, X), h.direction_scale * used.mu * factor
    if h.variant in SUBSPACE_VARIANTS:
        Q_sub, right = (Q_rounded, ops.rounded(U_)) if polar else (Q, U)
        largest = largest_rms * alpha_sub * (m * r) ** 0.5
        left, clipped = ops.bounded_product(
            Q_sub, D_sub, largest=largest, bounded=bounded, clipped=clipped, dtype=right.dtype
        )
    elif bounded is not None and clipped is not None:
        clipped = clipped + bounded

    with second:
        # (3) The EMAs of L and S by c G, each whitened by the other's new eigenvalues; K = S_+ + beta2 (S_+ - S).
        weights = {"alpha": admitted.weight_L, "gamma": one_minus_beta2 / n, "beta": h.beta2}
        L = ops.symmetric_products(G_perp, A_white, C=state["L_Q"], **weights)
        S, K = ops.extrapolated(Z.mT, C=state["S"], beta=h.beta2, alpha=one_minus_beta2 / m, ahead=h.beta2)

        # (4) U_+ = qr(V), V = beta2 U S_+ + (1 - beta2)/m G^T L^-1 G U = U K + (1 - beta2)/m G_perp^T Y, Y = c_L^2 G~':
        # K = U^T V = beta2 S_+ + (1 - beta2)/m Z^T Z, and S_+ = beta2 S + (1 - beta2)/m Z^T Z. S and Q_S turn along.
        U_new = ops.track(G_perp, Y, K, U, one_minus_beta2 / m)
        S, Q_S = ops.turned(ops.product(U.mT, U_new), S, Q_S)

    new = {"M_Q": M, "L_Q": L, "S": S, "U": U_new, "Q_S": Q_S} | admitted.changed
    new |= {} if clipped is None else {"clipped": clipped}
    new |= dict(zip(("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_mu"), admitted.s, strict=True))
    return Direction(X, scale, left, right, cautious_decay=h.cautious_weight_decay), new, admitted.evident


def refresh(ops: Algebra, state: State) -> State:
    """Do (5): Q_L <- qr(L Q_L), Q_S <- qr(S Q_S); M and L turn with Q_L. T has left Q_S not orthogonal before."""
    second = ops.second_stream(state["S"])
    Q_L, M = ops.operands(state["Q_L"], state["M_Q"].to(state["Q_L"].dtype))
    Q, Q_L, L = ops.refreshed(state["L_Q"], Q_L)
    M = ops.product(Q.mT, M)
    with second:
        Q_S = ops.coordinates_qr(state["S"], state["Q_S"])
    return {"Q_L": Q_L, "L_Q": L, "M_Q": M, "Q_S": Q_S}


def whitened_size(ops: Algebra, G: Tensor, state: State, h: ProHyper) -> Tensor:
    """Return the size (B,) of G that :mod:`prokl.algorithm.evidence` decides by, in the widest dtype."""
    U, Q = ops.operands(state["U"], state["Q_L"])
    G = ops.product(Q.mT, G)
    G_tilde = ops.product(G, U)
    e_res = ops.residual(G, ops.operand(G_tilde), U)[1]
    a = evidence.roots_of(state, h)[1]
    return evidence.measured(ops.product(G_tilde, state["Q_S"]), e_res, a, G.shape[-1])[-1][-1]


class ProKLShampooMethod:
    """Pro-KLShampoo and its variants as a :class:`prokl.algorithm.method.Method`."""

    fixed: tuple[str, ...] = ("rank", "variant", "state_dtype", "init_eigenvalue")
    check = staticmethod(check_pro)
    hyper = staticmethod(pro_hyper)
    initialise = staticmethod(initialise)
    step = staticmethod(step)
    refresh = staticmethod(refresh)
    whitened_size = staticmethod(whitened_size)
    reference_step = staticmethod(reference.step)

    def rank(self, group: Group, m: int, n: int) -> int:
        """Return min(rank, m, n - 1)."""
        return effective_rank(group["rank"], m, n)

    def refreshes(self, step: int, group: Group) -> bool:
        """Return True in every tau-th step and, after an "auto" start, in steps 2, 4, 8, ... below tau.

        The first bases are of one gradient: with them up to step 10 losses fell later (docs/findings.md).
        """
        tau: int = group["precondition_frequency"]
        return step % tau == 0 or (group["init_eigenvalue"] == "auto" and 1 < step < tau and step.bit_count() == 1)

    def state_shapes(self, m: int, n: int, rank: int, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shape of every state tensor of one matrix, by its key."""
        shapes: dict[str, tuple[int, ...]] = {
            "M_Q": (m, n),
            "U": (n, rank),
            "L_Q": (m, m),
            "S": (rank, rank),
            "Q_L": (m, m),
            "Q_S": (rank, rank),
            "inv_sqrt_lambda_L": (m,),
            "inv_sqrt_lambda_S": (rank,),
            "inv_sqrt_mu": (),
            "clipped": (),
        }
        return shapes | ({"lambda_0": ()} if group["init_eigenvalue"] == "auto" else {})

    def workspace(self, m: int, n: int, rank: int) -> int:
        """Return the elements of temporary memory that a step needs for one matrix at most."""
        return 8 * m * n + 9 * m * m + (6 * n + 4 * m) * rank
