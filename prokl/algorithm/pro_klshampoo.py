"""The fast step of Pro-KLShampoo for all weights of one oriented shape, written once over the primitives.

Its stages are those of :mod:`prokl.algorithm.reference`, in the same order. Differences, none of them in the
mathematics:

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
* c G is never formed: c, which is known after E, multiplies what is smaller, and G as the momentum reads it.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prokl.algorithm import evidence, reference
from prokl.algorithm.admission import whitened_size
from prokl.algorithm.initial import initialise
from prokl.algorithm.method import Group, refreshed_rows, select_rows
from prokl.algorithm.newton_schulz import newton_schulz_factors
from prokl.algorithm.primitives import Admitted, Direction, Primitives, Residual, Roots, State
from prokl.algorithm.settings import (
    COMPLEMENT_VARIANTS,
    POLAR_VARIANTS,
    SUBSPACE_VARIANTS,
    ProHyper,
    check_pro,
)
from prokl.algorithm.shapes import effective_rank
from prokl.pair import Operand, Pair


class Projected(NamedTuple):
    """Result of stage (1) but for the momentum: the raw gradient on the subspace and beside it."""

    G_tilde: Tensor
    """G U (B,m,r)."""
    M_tilde: Tensor
    """M U (B,m,r), of the old M."""
    G_perp: Operand
    """G - G U U^T (B,m,n)."""
    U: Operand
    """The subspace itself (B,n,r), for the products that are left."""


class Energies(NamedTuple):
    """The raw gradient in the eigenbases, for the decision about it and for stage (3)."""

    E: Tensor
    """G_perp G_perp^T (B,m,m)."""
    e_res: Tensor
    """diag Q_L^T E Q_L (B,m), or parts (B,k,m) that add up to it."""
    GQ: Tensor
    """G~ Q_S (B,m,r)."""
    QtG: Tensor
    """Q_L^T G~ (B,m,r)."""
    A: Tensor
    """Q_L^T G~ Q_S (B,m,r)."""


class Lookahead(NamedTuple):
    """Result of stage (1) for stage (2): the momentum gradient G^ on the subspace and beside it."""

    G_par: Operand
    """G^ U (B,m,r)."""
    residual: Residual | None
    """G^ - G^ U U^T; None when the complement takes no part in the direction."""
    U: Operand
    """As in :class:`Projected`."""


class Sample(NamedTuple):
    """Result of stage (3) for stage (4): this gradient's part of the tracking, with the new a_L."""

    whitened: Tensor
    """(1 - beta2)/m c diag(a_L^2) Q_L^T G~ (B,m,r): L^-1 c G~ in the eigenbasis."""
    K: Tensor
    """U^T V = beta2 S + (1 - beta2)/m c^2 G~^T L^-1 G~ with the new S (B,r,r)."""


def project(G: Tensor, state: State, active: Tensor | None, ops: Primitives) -> tuple[Projected, Operand]:
    """Do the first half of (1): G and the old M on the subspace, and G beside it.

    Returns:
        These, and Q_L for the product that follows: it is split beside U.
    """
    U, Q_L = ops.operands(state["U"], state["Q_L"])
    G_tilde, M_tilde, factor = ops.project(G, state["M"], U, active)
    return Projected(G_tilde, M_tilde, ops.product_operand(factor, U.mT, C=G, alpha=-1.0), U), Q_L


def energies(projected: Projected, Q_L: Operand, state: State, ops: Primitives) -> Energies:
    """Compute what the statistics, and the whitened size of the gradient, are made of; Q_L as an operand."""
    mm, G_tilde = ops.product, projected.G_tilde
    E = ops.symmetric_product(projected.G_perp)
    QtG = mm(state["Q_L"].mT, G_tilde)
    GQ, A = (mm(t, state["Q_S"]) for t in (G_tilde, QtG))
    return Energies(E, ops.row_energies(Q_L, projected.G_perp, E), GQ, QtG, A)


def momentum(
    G: Tensor,
    projected: Projected,
    admitted: Admitted,
    state: State,
    h: ProHyper,
    active: Tensor | None,
    ops: Primitives,
) -> tuple[Tensor, Lookahead]:
    """Do the rest of (1): M <- mu M + c G, G^ = c G + mu M, projected."""
    M, G_par, residual = ops.momentum(
        G,
        state["M"],
        projected.G_tilde,
        projected.M_tilde,
        projected.U,
        h.momentum,
        h.gradient_weights,
        admitted.scale,
        active,
        h.variant in COMPLEMENT_VARIANTS,
    )
    return M, Lookahead(G_par, residual, projected.U)


def direction(
    lookahead: Lookahead,
    state: State,
    roots: Roots,
    bounded: Tensor | None,
    h: ProHyper,
    aspect_scale: Tensor,
    ops: Primitives,
) -> tuple[Direction, Tensor | None]:
    """Do (2): Delta_res + alpha_kl Delta_sub as factors, with the previous step's state; P = Q_L diag(a_L) Q_L^T.

    The factor of ``adjust_lr_fn`` takes c_a's place in the complement, and is part of the subspace's weight.

    Args:
        bounded: (B,) bool, where the gradient was bounded; None where there is no bound.

    Returns:
        The direction, and the count "clipped" (B,) of steps where it or the gradient was bounded, None without a bound.
    """
    G_par, residual, U = lookahead
    usual = evidence.COHERENT * h.gain
    (m, r), n = G_par.shape[-2:], U.shape[-2]
    whole = h.direction_scale(n)
    weight = whole * h.subspace_weight(m, n, r)
    P = ops.spectral_operand(state["Q_L"], roots.L)
    X = Q = scale = left = right = None
    if residual is not None and h.variant in POLAR_VARIANTS:
        X, scale = ops.whiten(P, residual, h.polar_dtype(roots.L))
        Q, X, scale = newton_schulz_factors(X, scale, h.ns_steps, h.ns_coefficients, ops)
        if h.adjust_lr_fn == "original":
            scale = aspect_scale if scale is None else scale * aspect_scale
        else:
            scale = torch.full_like(aspect_scale, whole) if scale is None else scale * whole
    elif residual is not None:
        X, scale = ops.product(P, residual.G_hat_perp), (whole * roots.mu).masked_fill(residual.negligible(), 0.0)
        if bounded is not None:
            beside = evidence.cut(evidence.norm(X) * scale, usual * whole * (m * (X.shape[-1] - r)) ** 0.5)
            scale, bounded = scale * beside.to(scale.dtype), bounded | (beside < 1)
    clipped = None
    if h.variant in SUBSPACE_VARIANTS:
        left = ops.precondition(P, G_par, state["Q_S"], roots.S, weight)
        # Without Newton-Schulz there is no error for a rounding to bfloat16 to be within.
        right = U.hi if isinstance(U, Pair) and h.variant in POLAR_VARIANTS else state["U"]
        if bounded is not None:
            largest = usual * weight * (m * r) ** 0.5
            left, clipped = ops.cut(left, largest, right.dtype, bounded, state["clipped"])
        left = left.to(right.dtype)
    elif bounded is not None:
        clipped = state["clipped"] + bounded
    return Direction(X, Q, scale, left, right, cautious_decay=h.cautious_weight_decay), clipped


def statistics(
    energies: Energies, admitted: Admitted, state: State, h: ProHyper, n: int, ops: Primitives
) -> tuple[State, Sample]:
    """Do the rest of (3): factor EMAs of c G with the new eigenvalues."""
    beta2, gain, m = h.beta2, 1 - h.beta2, energies.A.shape[-2]
    X, Z, whitened = ops.samples(energies.GQ, energies.QtG, admitted.a, admitted.scale, gain / m)
    L = ops.factor_ema(state["L"], X, energies.E, admitted.tail, beta2, gain / n)
    S, K = ops.coordinates_ema(state["S"], Z.mT, beta2, gain / m)
    new = {"inv_sqrt_lambda_L": admitted.s.L, "inv_sqrt_lambda_S": admitted.s.S, "inv_sqrt_mu": admitted.s.mu}
    return new | {"L": L, "S": S}, Sample(whitened, K)


def track_subspace(projected: Projected, scale: Tensor | None, sample: Sample, state: State, ops: Primitives) -> State:
    """Do (4): U_+ = qr(beta2 U S + (1-beta2)/m G^T L^-1 G U) with the new S, a_L; S and Q_S turn with T = U^T U_+."""
    U, S, mm = state["U"], state["S"], ops.product
    Y = ops.product_operand(state["Q_L"], sample.whitened)
    U_new = ops.track(projected.G_perp, Y, sample.K, U, 1.0 if scale is None else scale)
    T = mm(U.mT, U_new)
    return {"U": U_new, "S": mm(T.mT, mm(S, T)), "Q_S": mm(T.mT, state["Q_S"])}


def refresh_eigenbases(state: State, rows: Tensor | None, ops: Primitives) -> State:
    """Do (5): Q_L <- qr(L Q_L), Q_S <- qr(S Q_S), of ``rows`` or all; Q_S is no orthogonal basis between refreshes."""
    L, Q_L, S, Q_S = (select_rows(state[key], rows) for key in ("L", "Q_L", "S", "Q_S"))
    return {
        "Q_L": refreshed_rows(state, "Q_L", rows, ops.refresh_basis(L, Q_L)),
        "Q_S": refreshed_rows(state, "Q_S", rows, ops.refresh_coordinates(S, Q_S)),
    }


class ProKLShampooMethod:
    """Pro-KLShampoo and its variants as a :class:`prokl.algorithm.method.Method`."""

    fixed: tuple[str, ...] = ("rank", "variant", "state_dtype", "init_eigenvalue")
    check = staticmethod(check_pro)
    hyper = staticmethod(ProHyper.of)
    refresh_eigenbases = staticmethod(refresh_eigenbases)
    reference_step = staticmethod(reference.step)
    reference_refresh = staticmethod(reference.refresh_eigenbases)

    def rank(self, group: Group, m: int, n: int) -> int:
        """Return min(rank, m, n - 1)."""
        return effective_rank(group["rank"], m, n)

    def state_shapes(self, m: int, n: int, rank: int, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shape of every state tensor of one matrix, by its key."""
        shapes: dict[str, tuple[int, ...]] = {
            "M": (m, n),
            "U": (n, rank),
            "L": (m, m),
            "S": (rank, rank),
            "Q_L": (m, m),
            "Q_S": (rank, rank),
            "inv_sqrt_lambda_L": (m,),
            "inv_sqrt_lambda_S": (rank,),
            "inv_sqrt_mu": (),
            "trust": (),
            "clipped": (),
            "stale": (),
        }
        return shapes | ({"lambda_0": ()} if group["init_eigenvalue"] == "auto" else {})

    def workspace(self, m: int, n: int, rank: int) -> int:
        """Return the elements of temporary memory that a step needs for one matrix at most."""
        return 8 * m * n + 9 * m * m + 6 * n * rank

    def initialise(self, G: Tensor, rank: int, group: Group) -> State:
        """Make the state (B,...) from the initialising gradients G (B,m,n)."""
        return initialise(G, rank, group["beta2"], group["init_eigenvalue"])

    def whitened_size(self, G: Tensor, state: State, h: ProHyper, ops: Primitives) -> Tensor:
        """Return the whitened size (B,) of G by the state before it."""
        found = energies(*project(G, state, None, ops), state, ops)
        return whitened_size(found.A, found.e_res, state, h, G.shape[-1])

    def direction(
        self, G: Tensor, state: State, h: ProHyper, aspect_scale: Tensor, active: Tensor | None, ops: Primitives
    ) -> Direction:
        """Return the direction that the next step takes with G: stages (1) and (2)."""
        projected, Q_L = project(G, state, active, ops)
        found = energies(projected, Q_L, state, ops)
        admitted = ops.admit(found.A, found.QtG, found.e_res, state, h, G.shape[-1])
        _, lookahead = momentum(G, projected, admitted, state, h, active, ops)
        return direction(lookahead, state, admitted.used, admitted.bounded, h, aspect_scale, ops)[0]

    def step(
        self, G: Tensor, state: State, h: ProHyper, aspect_scale: Tensor, active: Tensor | None, ops: Primitives
    ) -> tuple[Direction, State, Tensor | None]:
        """Do stages (1) to (4); arguments as :meth:`prokl.algorithm.method.Method.step` has them."""
        n = G.shape[-1]
        projected, Q_L = project(G, state, active, ops)
        found = energies(projected, Q_L, state, ops)
        del Q_L
        admitted = ops.admit(found.A, found.QtG, found.e_res, state, h, n)
        M, lookahead = momentum(G, projected, admitted, state, h, active, ops)
        delta, clipped = direction(lookahead, state, admitted.used, admitted.bounded, h, aspect_scale, ops)
        del lookahead  # memory for the rest
        moments, sample = statistics(found, admitted, state, h, n, ops)
        turned = track_subspace(projected, admitted.scale, sample, state | moments, ops)
        new = {"M": M} | moments | turned | admitted.changed
        if clipped is not None:
            new["clipped"] = clipped
        return delta, new, admitted.evident
