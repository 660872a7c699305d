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
from prokl.algorithm.evidence import Sizes, Verdict
from prokl.algorithm.initial import ceiling_factor, initialise
from prokl.algorithm.method import Group, refreshed_rows, select_rows
from prokl.algorithm.newton_schulz import newton_schulz_factors
from prokl.algorithm.primitives import Direction, Primitives, State, damp
from prokl.algorithm.settings import (
    COMPLEMENT_VARIANTS,
    POLAR_VARIANTS,
    SUBSPACE_VARIANTS,
    ProHyper,
    check_pro,
)
from prokl.algorithm.shapes import ceiling, effective_rank
from prokl.pair import Operand, low_rank


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
    """diag Q_L^T E Q_L (B,m)."""
    QtG: Tensor
    """Q_L^T G~ (B,m,r)."""
    A: Tensor
    """Q_L^T G~ Q_S (B,m,r)."""


class Lookahead(NamedTuple):
    """Result of stage (1) for stage (2): the momentum gradient G^ on the subspace and beside it."""

    G_par: Tensor
    """G^ U (B,m,r)."""
    G_hat_perp: Operand | None
    """G^ - G^ U U^T (B,m,n); None when the complement takes no part in the direction."""
    negligible: Tensor | None
    """(B,) bool, True where G_hat_perp is rounding noise; with it."""
    U: Operand
    """As in :class:`Projected`."""


class Sample(NamedTuple):
    """Result of stage (3) for stage (4): this gradient's part of the statistics, with the new a_L."""

    whitened: Tensor
    """diag(a_L^2) Q_L^T G~ (B,m,r): L^-1 G~ in the eigenbasis."""
    S: Tensor
    """(1 - beta2)/m G~^T L^-1 G~ (B,r,r), the increment of S."""


class Roots(NamedTuple):
    """Inverse roots of the state before the step, as they are used."""

    a_L: Tensor
    """1/(sqrt(lambda_L) + eps) (B,m)."""
    a_S: Tensor
    """Likewise for lambda_S (B,r)."""
    a_mu: Tensor
    """Likewise for mu_perp (B,)."""
    eps: Tensor
    """Damping (B,); follows the start value of an "auto" state, as the ceilings do."""
    ceiling_factor: Tensor
    """(B,)."""


def damped_roots(state: State, h: ProHyper) -> Roots:
    """Damp the inverse roots of a state (Algorithm 2, (P2))."""
    factor = ceiling_factor(state)
    eps = h.eps / factor
    a_L, a_S, a_mu = (damp(state[f"inv_sqrt_{key}"], eps) for key in ("lambda_L", "lambda_S", "mu"))
    return Roots(a_L, a_S, a_mu, eps, factor)


def project(G: Tensor, state: State, active: Tensor | None, ops: Primitives) -> Projected:
    """Do the first half of (1): G and the old M on the subspace, and G beside it."""
    U = ops.operand(state["U"])
    G_tilde, M_tilde = ops.project(G, state["M"], U, active)
    return Projected(G_tilde, M_tilde, ops.product_operand(G_tilde, U.mT, C=G, alpha=-1.0), U)


def energies(projected: Projected, state: State, ops: Primitives) -> Energies:
    """Compute what the statistics, and the whitened size of the gradient, are made of."""
    mm, Q_L = ops.product, state["Q_L"]
    E = ops.symmetric_product(projected.G_perp)
    QtG = mm(Q_L.mT, projected.G_tilde)
    return Energies(E, ops.row_energies(Q_L, projected.G_perp, E), QtG, mm(QtG, state["Q_S"]))


def whitened_sizes(energies: Energies, roots: Roots, n: int) -> Sizes:
    """Measure the gradient; the whole is in the subspace or beside it, whichever is larger."""
    m, r = energies.A.shape[-2:]
    inside = energies.A * roots.a_L[:, :, None] * roots.a_S[:, None, :]
    beside = (energies.e_res.sqrt() * roots.a_L * roots.a_mu[:, None]).double()
    rows, columns = (torch.linalg.vector_norm(inside, dim=dim, dtype=torch.float64) for dim in (-1, -2))
    subspace, complement = (torch.linalg.vector_norm(t, dim=-1) for t in (rows, beside))
    whole = torch.maximum(subspace / (m * r) ** 0.5, complement / (m * (n - r)) ** 0.5)
    return Sizes(torch.hypot(rows, beside) / n**0.5, columns / m**0.5, whole)


def decide(energies: Energies, state: State, roots: Roots, h: ProHyper, n: int) -> tuple[Verdict | None, Roots]:
    """Decide about the gradient by its whitened sizes; None in the paper's form.

    Returns:
        The decision, and the roots that the direction takes.
    """
    if h.clip_threshold is None:
        return None, roots
    rest = energies.e_res.sqrt()[:, :, None]
    rms = torch.hypot(evidence.norm(energies.QtG), evidence.norm(rest)) / (rest.shape[1] * n) ** 0.5
    sizes = whitened_sizes(energies, roots, n)
    verdict = evidence.judge(sizes, rms, state, h)
    return verdict, roots._replace(a_L=roots.a_L * verdict.rows, a_S=roots.a_S * verdict.columns)


def momentum(
    G: Tensor,
    projected: Projected,
    verdict: Verdict | None,
    state: State,
    h: ProHyper,
    active: Tensor | None,
    ops: Primitives,
) -> tuple[Tensor, Lookahead]:
    """Do the rest of (1): M <- mu M + c G, G^ = c G + mu M, projected; G^ is linear in G and the old M."""
    g, a, b = h.gradient_weights
    G_tilde = projected.G_tilde if verdict is None else projected.G_tilde * verdict.scale[:, None, None]
    G_par = (a + b * g) * G_tilde + b * h.momentum * projected.M_tilde
    M, G_hat_perp, negligible = ops.momentum(
        G,
        state["M"],
        G_par if h.variant in COMPLEMENT_VARIANTS else None,
        projected.U,
        h.momentum,
        h.gradient_weights,
        None if verdict is None else verdict.scale,
        active,
    )
    return M, Lookahead(G_par, G_hat_perp, negligible, projected.U)


def direction(
    lookahead: Lookahead, state: State, roots: Roots, h: ProHyper, aspect_scale: Tensor, ops: Primitives
) -> tuple[Direction, Tensor | None]:
    """Do (2): Delta_res + alpha_kl Delta_sub as factors, with the previous step's state; P = Q_L diag(a_L) Q_L^T.

    The factor of ``adjust_lr_fn`` takes c_a's place in the complement, and is part of the subspace's weight.

    Returns:
        The direction, and the factor (B,) that its whitened parts were cut by, None where there is no bound.
    """
    G_par, G_hat_perp, negligible, U = lookahead
    bounded, cautious = h.clip_threshold is not None, h.cautious_weight_decay
    m, r = G_par.shape[-2:]
    whole = h.direction_scale(U.shape[-2])
    weight = whole * h.subspace_weight
    P = ops.symmetric_operand(ops.operand(state["Q_L"] * roots.a_L.sqrt()[:, None, :]))
    left = right = factor = None
    if h.variant in SUBSPACE_VARIANTS:
        subspace = ops.precondition(P, G_par, state["Q_S"], roots.a_S, weight)
        if bounded:
            factor = evidence.cut(evidence.norm(subspace), weight * h.gain * (m * r) ** 0.5)
            subspace = subspace * factor.to(subspace.dtype)[:, None, None]
        # Without Newton-Schulz there is no error for a rounding to bfloat16 to be within.
        left, right = low_rank(subspace, U if h.variant in POLAR_VARIANTS else state["U"])
    if h.variant not in COMPLEMENT_VARIANTS:
        return Direction(None, left=left, right=right, cautious_decay=cautious), factor
    assert G_hat_perp is not None and negligible is not None
    if h.variant in POLAR_VARIANTS:
        X, scale = ops.whiten(P, G_hat_perp, negligible, h.polar_dtype(G_par))
        Q, Y, scale = newton_schulz_factors(X, scale, h.ns_steps, h.ns_coefficients, ops)
        own = aspect_scale if h.adjust_lr_fn == "original" else torch.full_like(aspect_scale, whole)
        scale = own if scale is None else scale * own
        return Direction(Y, Q, scale, left, right, cautious_decay=cautious), factor
    X, scale = ops.product(P, G_hat_perp), (whole * roots.a_mu).masked_fill(negligible, 0.0)
    if factor is not None:
        n = X.shape[-1]
        beside = evidence.cut(evidence.norm(X) * scale, whole * h.gain * (m * (n - r)) ** 0.5)
        scale, factor = scale * beside.to(scale.dtype), torch.minimum(factor, beside)
    return Direction(X, None, scale, left, right, cautious_decay=cautious), factor


def statistics(
    projected: Projected,
    energies: Energies,
    verdict: Verdict | None,
    state: State,
    roots: Roots,
    h: ProHyper,
    active: Tensor | None,
    ops: Primitives,
) -> tuple[State, Sample]:
    """Do (3): eigenvalue and factor EMAs of c G; lambda_L, lambda_S, then mu_perp, L, S with the new."""
    E, e_res, QtG, A = energies
    m, n = projected.G_perp.shape[-2:]
    GQ = ops.product(projected.G_tilde, state["Q_S"])
    a_L, a_S, _, eps, factor = roots
    if verdict is not None:  # c twice, not its square, which may leave float32's range
        c = verdict.scale[:, None, None]
        QtG, A, GQ, e_res = QtG * c, A * c, GQ * c, e_res * c[:, 0] * c[:, 0]

    s_L, s_S, s_mu = ops.eigenvalue_ema(
        state["inv_sqrt_lambda_L"],
        state["inv_sqrt_lambda_S"],
        state["inv_sqrt_mu"],
        (A * a_S[:, None, :]).square().sum(dim=-1),
        (A * a_L[:, :, None]).square().mean(dim=-2),
        e_res,
        beta2=h.beta2,
        n=n,
        eps=eps,
        ceiling_L=ceiling(m) * factor,
        ceiling_S=ceiling(n) * factor,
        ceiling_mu=ceiling(n) * factor,
        active=active,
    )
    a_L, a_S, a_mu = damp(s_L, eps), damp(s_S, eps), damp(s_mu, eps)
    gain = 1 - h.beta2
    L = ops.symmetric_product(GQ * a_S[:, None, :], C=state["L"], beta=h.beta2, alpha=gain / n)
    a_E = a_mu if verdict is None else a_mu * verdict.scale
    L.addcmul_(E, (gain / n * a_E**2)[:, None, None])
    Z = QtG * a_L[:, :, None]
    sample = ops.symmetric_product(Z.mT, alpha=gain / m)
    S = h.beta2 * state["S"] + sample
    new = {"inv_sqrt_lambda_L": s_L, "inv_sqrt_lambda_S": s_S, "inv_sqrt_mu": s_mu, "L": L, "S": S}
    return new, Sample(Z * a_L[:, :, None], sample)


def track_subspace(
    projected: Projected, verdict: Verdict | None, sample: Sample, state: State, h: ProHyper, ops: Primitives
) -> State:
    """Do (4): U_+ = qr(beta2 U S + (1-beta2)/m G^T L^-1 G U) with the new S, a_L; S and Q_S turn with T = U^T U_+."""
    U, S, mm = state["U"], state["S"], ops.product
    weight = (1 - h.beta2) / projected.G_perp.shape[-2]
    Y = mm(state["Q_L"], sample.whitened)
    K = h.beta2 * S + sample.S  # U^T V
    alpha = weight if verdict is None else weight * verdict.scale
    U_new = ops.track(projected.G_perp, Y, K, U, alpha)
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
    oversize_remedy: str | None = None
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
        found = energies(project(G, state, None, ops), state, ops)
        return whitened_sizes(found, damped_roots(state, h), G.shape[-1]).whole

    def direction(
        self, G: Tensor, state: State, h: ProHyper, aspect_scale: Tensor, active: Tensor | None, ops: Primitives
    ) -> Direction:
        """Return the direction that the next step takes with G: stages (1) and (2)."""
        projected, roots = project(G, state, active, ops), damped_roots(state, h)
        verdict, used = decide(energies(projected, state, ops), state, roots, h, G.shape[-1])
        _, lookahead = momentum(G, projected, verdict, state, h, active, ops)
        return direction(lookahead, state, used, h, aspect_scale, ops)[0]

    def step(
        self, G: Tensor, state: State, h: ProHyper, aspect_scale: Tensor, active: Tensor | None, ops: Primitives
    ) -> tuple[Direction, State, Tensor | None]:
        """Do stages (1) to (4); arguments as :meth:`prokl.algorithm.method.Method.step` has them."""
        projected, roots = project(G, state, active, ops), damped_roots(state, h)
        found = energies(projected, state, ops)
        verdict, used = decide(found, state, roots, h, G.shape[-1])
        M, lookahead = momentum(G, projected, verdict, state, h, active, ops)
        delta, factor = direction(lookahead, state, used, h, aspect_scale, ops)
        del lookahead  # memory for the rest
        moments, sample = statistics(projected, found, verdict, state, roots, h, active, ops)
        turned = track_subspace(projected, verdict, sample, state | moments, h, ops)
        new = {"M": M} | moments | turned
        if verdict is None:
            return delta, new, None
        return delta, new | verdict.changed | {"clipped": evidence.count(verdict, factor, state)}, verdict.evident
