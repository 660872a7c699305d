"""The stages of a step of Pro-KLShampoo for all weights of one oriented shape, written once over the algebra.

They are those of :mod:`prokl.algorithm.reference`, in the same order; (1) to (5) are the parts of Algorithm 2 as
docs/algorithm.md numbers them. A backend may override a stage, or a part of one, by what does the same in fewer
launches. Differences from the specification, none of them in the mathematics:

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
* c G is never formed beside G: c, which is known after E, multiplies what is smaller, and G as the momentum reads it.

A step owns G and M: the momentum may overwrite them, save the rows of M that are not active. ``active`` (B,) bool says
which matrices step, None that all do; what comes out for the others may be anything.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prokl.algorithm import admission, evidence
from prokl.algorithm.algebra import Admitted, Direction, Factor, Roots, Scale, State, refreshed
from prokl.algorithm.newton_schulz import Polynomials, newton_schulz
from prokl.algorithm.settings import COMPLEMENT_VARIANTS, POLAR_VARIANTS, SUBSPACE_VARIANTS, Hyper, ProHyper
from prokl.algorithm.shapes import widest


class Projected(NamedTuple):
    """The raw gradient on the subspace and beside it, and the old momentum on it."""

    G_tilde: Tensor
    """G U (B,m,r)."""
    M_tilde: Tensor
    """M U (B,m,r), of the old M."""
    G_perp: Factor
    """G - G U U^T (B,m,n)."""
    U: Factor
    """The subspace itself (B,n,r), for the products that are left."""
    Q_L: Factor
    """The state's (B,m,m), likewise."""


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


class Residual(NamedTuple):
    """The momentum gradient beside the subspace."""

    G_hat_perp: Factor
    """G^ - G^ U U^T (B,m,n)."""
    size: Tensor
    """Its squared norm, as parts (B,k) that add up."""
    full_size: Tensor
    """That of G^, likewise."""
    noise: float
    """``size`` over ``full_size`` up to which it may be rounding alone."""

    def negligible(self) -> Tensor:
        """Return (B,) bool, True where it is rounding noise: Newton-Schulz would inflate that to a full step."""
        return self.size.sum(dim=1) <= self.noise * self.full_size.sum(dim=1)


class Lookahead(NamedTuple):
    """The momentum gradient G^ on the subspace and beside it."""

    G_par: Factor
    """G^ U (B,m,r)."""
    residual: Residual | None
    """G^ - G^ U U^T; None when the complement takes no part in the direction."""
    U: Factor
    """As in :class:`Projected`."""


class Sample(NamedTuple):
    """This gradient's part of the tracking, with the new a_L."""

    whitened: Tensor
    """(1 - beta2)/m c diag(a_L^2) Q_L^T G~ (B,m,r): L^-1 c G~ in the eigenbasis."""
    K: Tensor
    """U^T V = beta2 S + (1 - beta2)/m c^2 G~^T L^-1 G~ with the new S (B,r,r)."""


class ProKLShampooStages(Polynomials):
    """Pro-KLShampoo's step; a :class:`prokl.algorithm.method.Batched`."""

    def project(self, G: Tensor, state: State, active: Tensor | None) -> Projected:
        """Do the first half of (1): G~ = G U, and of the old M, G_perp = G - G~ U^T."""
        U = state["U"]
        G_tilde, M_tilde = self.projections(G, state["M"], U, active)
        return Projected(G_tilde, M_tilde, self.product(G_tilde, U.mT, C=G, alpha=-1.0), U, state["Q_L"])

    def projections(self, G: Tensor, M: Tensor, U: Tensor, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return G U and M U (B,m,r) of G, M (B,m,n) and U (B,n,r)."""
        return self.product(G, U), self.product(M.to(G.dtype), U)

    def energies(self, projected: Projected, state: State) -> Energies:
        """Compute what the statistics, and the whitened size of the gradient, are made of."""
        G_tilde, Q_S = projected.G_tilde, state["Q_S"]
        E = self.symmetric_product(projected.G_perp)
        QtG = self.product(state["Q_L"].mT, G_tilde)
        GQ, A = self.product(G_tilde, Q_S), self.product(QtG, Q_S)
        return Energies(E, self.residual_energies(projected, E), GQ, QtG, A)

    def residual_energies(self, projected: Projected, E: Tensor) -> Tensor:
        """Return diag Q_L^T G_perp G_perp^T Q_L (B,m), not negative, of E = G_perp G_perp^T."""
        return self.diagonal(projected.Q_L, E)

    def admit(self, A: Tensor, QtG: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
        """Decide about a gradient by its whitened sizes, and do the eigenvalue EMA of what is left of it.

        Algorithm 2 (3) with :mod:`prokl.algorithm.evidence`.

        Args:
            A: Q_L^T G~ Q_S (B,m,r).
            QtG: Q_L^T G~ (B,m,r).
            e_res: as in :class:`Energies`.
            state: before the step.
            h: hyper-parameters; without ``clip_threshold`` nothing is decided.
            n: long side, above r.
        """
        return admission.admit(A, QtG, e_res, state, h, n)

    def momentum(
        self, G: Tensor, projected: Projected, scale: Tensor | None, state: State, h: ProHyper, active: Tensor | None
    ) -> tuple[Tensor, Lookahead]:
        """Do the rest of (1): M <- mu M + g c G; G^ = a c G + b M, projected; c (B,) is ``scale``, None for 1."""
        g, a, b = h.gradient_weights
        M, stored, G_tilde = state["M"], state["M"].dtype, projected.G_tilde
        if scale is not None:
            G, G_tilde = G.mul_(scale[:, None, None]), G_tilde * scale[:, None, None]
        G_par = torch.add((a + b * g) * G_tilde, projected.M_tilde, alpha=b * h.momentum)
        if active is not None or stored != G.dtype:
            M = M.to(G.dtype, copy=True)
        M = torch.add(G, M, alpha=h.momentum, out=M) if g == 1 else M.mul_(h.momentum).add_(G, alpha=g)
        if h.variant not in COMPLEMENT_VARIANTS:
            return M, Lookahead(G_par, None, projected.U)
        G_hat = torch.add(G if a == 1 else G.mul_(a), M, alpha=b, out=G) if a else torch.mul(M, b, out=G)
        return M, Lookahead(G_par, self.residual(G_hat, G_par, projected.U, stored), projected.U)

    def residual(self, G_hat: Tensor, G_par: Tensor, U: Factor, stored: torch.dtype) -> Residual:
        """Return G^ - G^par U^T, in the memory of G^, and how much of G^ it is; ``stored`` is the state's dtype."""
        G_hat_perp = G_hat.baddbmm_(G_par, U.mT, alpha=-1)
        sizes = self.squared_norms(G_hat_perp, G_par)
        return Residual(G_hat_perp, *sizes, self.noise(U.shape[-2], G_par.dtype, stored))

    def norm(self, t: Tensor) -> Tensor:
        """Return Frobenius norms (B,) in the widest dtype."""
        return evidence.norm(t)

    def squared_norms(self, G_hat_perp: Tensor, G_par: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared norms (B,1) of G^_perp, and of it with G^par, in units of the larger without float64."""
        norms = [self.norm(t) for t in (G_hat_perp, G_par)]
        if widest(G_par.device) != torch.float64:  # squares may overflow
            unit = torch.maximum(*norms).clamp_min(torch.finfo(G_par.dtype).tiny)
            norms = [t / unit for t in norms]
        size, captured = (t.square()[:, None] for t in norms)
        return size, size + captured

    def noise(self, n: int, dtype: torch.dtype, stored: torch.dtype) -> float:
        """Return the squared size of X - (X U) U^T, over that of X, up to which it may be rounding alone.

        Kernels add X U up in tiles of 16 of the n rows of U or more, each time within half a unit in the last place,
        eps / 2 or less, of a whole that grows from zero: within n / 64 eps in all, where the tiles are alike. Where U
        is stored in less, what it loses there, twice, up to half a unit in the last place each.
        """
        return max(self.rounding(dtype), n / 64 * torch.finfo(dtype).eps, torch.finfo(stored).eps) ** 2

    def rounding(self, dtype: torch.dtype) -> float:
        """Return what the products' own roundings may leave: a hundred of them."""
        return 100 * torch.finfo(dtype).eps

    def direction(
        self, ahead: Lookahead, state: State, roots: Roots, bounded: Tensor | None, h: ProHyper, aspect_scale: Tensor
    ) -> tuple[Direction, Tensor | None]:
        """Do (2): Delta_res + alpha_kl Delta_sub as factors, with the previous step's state; P = Q_L diag(a_L) Q_L^T.

        The factor of ``adjust_lr_fn`` takes c_a's place in the complement, and is part of the subspace's weight.

        Args:
            bounded: (B,) bool, where the gradient was bounded; None where there is no bound.

        Returns:
            The direction, and the count "clipped" (B,) of steps where it or the gradient was bounded, None without a
            bound.
        """
        residual = ahead.residual
        usual = evidence.COHERENT * h.gain
        (n, r), m = state["U"].shape[-2:], state["Q_L"].shape[-1]
        direction_scale = h.direction_scale(n)
        weight = direction_scale * h.subspace_weight(m, n, r)
        P = self.spectral(state["Q_L"], roots.L)
        X = scale = left = right = None
        if residual is not None and h.variant in POLAR_VARIANTS:
            X, scale = self.whiten(P, residual, h.polar_dtype(roots.L))
            X = newton_schulz(X, scale, h.ns_steps, h.ns_coefficients, self)
            if h.adjust_lr_fn == "original":
                scale = aspect_scale if scale is None else scale * aspect_scale
            else:
                scale = torch.full_like(aspect_scale, direction_scale) if scale is None else scale * direction_scale
        elif residual is not None:
            X, scale = (
                self.product(P, residual.G_hat_perp),
                (direction_scale * roots.mu).masked_fill(residual.negligible(), 0.0),
            )
            if bounded is not None:
                beside = evidence.clip_factor(self.norm(X) * scale, usual * direction_scale * (m * (n - r)) ** 0.5)
                scale, bounded = scale * beside.to(scale.dtype), bounded | (beside < 1)
        clipped = None
        if h.variant in SUBSPACE_VARIANTS:
            left = self.precondition(P, ahead.G_par, state["Q_S"], roots.S, weight)
            right = self.right_factor(ahead.U, state, h)
            if bounded is not None:
                largest = usual * weight * (m * r) ** 0.5
                left, clipped = self.cut(left, largest, right.dtype, bounded, state["clipped"])
            left = left.to(right.dtype)
        elif bounded is not None:
            clipped = state["clipped"] + bounded
        return Direction(X, scale, left, right, cautious_decay=h.cautious_weight_decay), clipped

    def whiten(self, P: Factor, residual: Residual, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return X = P G^_perp (B,m,n) in ``dtype``, and the factor (B,) that makes its Frobenius norm 1.

        The factor is None where X has been multiplied by it. It is 0 where G^_perp is negligible, X zero, or so small
        that the square of its norm is below the dtype's smallest normal number, and where a backend leaves it to the
        products, so large that theirs may overflow. Here X is normalised before rounding.
        """
        X = self.product(P, residual.G_hat_perp)
        norm = torch.linalg.vector_norm(X, dim=(-2, -1))
        # What rounding leaves of squares below the smallest normal number does not normalise X.
        vanishing = norm < torch.finfo(norm.dtype).tiny ** 0.5
        inverse = torch.where(residual.negligible() | vanishing, 0.0, 1 / norm)
        return X.mul_(inverse[:, None, None]).to(dtype), None

    def precondition(self, P: Factor, G_par: Factor, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
        """Return alpha P G_par Q_S diag(a_S) Q_S^T: (B,m,m), (B,m,r), (B,r,r), (B,r) -> (B,m,r)."""
        return self.product(P, self.product(G_par, self.spectral(Q_S, a_S)), alpha=alpha)

    def right_factor(self, U: Factor, state: State, h: ProHyper) -> Tensor:
        """Return U (B,n,r) as the direction takes it; ``U`` is that of :class:`Projected`."""
        return state["U"]

    def cut(
        self, t: Tensor, largest: float, dtype: torch.dtype, bounded: Tensor, clipped: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return t (B,m,k) in ``dtype``, brought down to the norm ``largest`` where it is beyond, and how often it was.

        The latter is the count ``clipped`` (B,), one more where t was beyond or ``bounded`` (B,), bool, is set. Norms
        are in float64 where there is one: squares of whitened float32 may overflow.
        """
        factor = evidence.clip_factor(evidence.norm(t), largest)
        return (t * factor.to(t.dtype)[:, None, None]).to(dtype), clipped + (bounded | (factor < 1))

    def statistics(
        self, energies: Energies, admitted: Admitted, state: State, h: ProHyper, n: int
    ) -> tuple[State, Sample]:
        """Do the rest of (3): factor EMAs of c G with the new eigenvalues."""
        beta2, gain, m = h.beta2, 1 - h.beta2, energies.A.shape[-2]
        X, Z, whitened = self.samples(energies.GQ, energies.QtG, admitted.a, admitted.scale, gain / m)
        L = self.factor_ema(state["L"], X, energies.E, admitted.tail, beta2, gain / n)
        S, K = self.coordinates_ema(state["S"], Z.mT, beta2, gain / m)
        new = {"inv_sqrt_lambda_L": admitted.s.L, "inv_sqrt_lambda_S": admitted.s.S, "inv_sqrt_mu": admitted.s.mu}
        return new | {"L": L, "S": S}, Sample(whitened, K)

    def samples(
        self, GQ: Tensor, QtG: Tensor, a: Roots, scale: Tensor | None, weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whiten what the factors' EMAs are made of: c G~ Q_S a_S, Z = a_L c Q_L^T G~, and weight a_L Z."""
        # c twice, not its square, which may leave float32's range.
        S, L = (a.S, a.L) if scale is None else (a.S * scale[:, None], a.L * scale[:, None])
        Z = QtG * L[:, :, None]
        return GQ * S[:, None, :], Z, Z * (weight * a.L)[:, :, None]

    def factor_ema(self, L: Tensor, X: Tensor, E: Tensor, tail: Tensor, beta: float, alpha: float) -> Tensor:
        """Return beta L + alpha X X^T + tail E (B,m,m): the EMA of a factor; X (B,m,r), E is overwritten."""
        return E.mul_(tail[:, None, None]).add_(L, alpha=beta).baddbmm_(X, X.mT, alpha=alpha)

    def coordinates_ema(self, S: Tensor, Z: Tensor, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
        """Return S_+ = beta S + alpha Z Z^T (B,r,r), the EMA of a factor, and beta S_+ + alpha Z Z^T; Z (B,r,m)."""
        new = self.product(Z, Z.mT, C=S, beta=beta, alpha=alpha)
        return new, torch.lerp(S, new, 1 + beta)

    def track_subspace(self, G_perp: Factor, scale: Tensor | None, sample: Sample, state: State) -> State:
        """Do (4): U_+ = qr(beta2 U S + (1-beta2)/m G^T L^-1 G U) with the new S, a_L; S and Q_S turn with T = U^T U_+.

        Args:
            G_perp: as in :class:`Projected`. scale: c, as the momentum has it.
            sample: of the same G.
            state: with the new S.
        """
        U, S, mm = state["U"], state["S"], self.product
        U_new = self.track(G_perp, self.whitened(sample, state), sample.K, U, 1.0 if scale is None else scale)
        T = mm(U.mT, U_new)
        return {"U": U_new, "S": mm(T.mT, mm(S, T)), "Q_S": mm(T.mT, state["Q_S"])}

    def whitened(self, sample: Sample, state: State) -> Factor:
        """Return (1 - beta2)/m c L^-1 G~ (B,m,r)."""
        return self.product(state["Q_L"], sample.whitened)

    def track(self, G_perp: Factor, Y: Factor, K: Tensor, U: Tensor, alpha: Scale) -> Tensor:
        """Return Q (B,n,r) of qr(V) for V = alpha G_perp^T Y + U K.

        V is Phi U with Phi positive semi-definite and K = U^T V, which makes a QR without Householder.

        Args:
            G_perp: (B,m,n), orthogonal to U. Y: (B,m,r).
            K: symmetric (B,r,r). U: (B,n,r), orthonormal columns.
        """
        return self.tracking_qr(self.product(G_perp.mT, Y, C=self.product(U, K), alpha=alpha), K, U)

    def refresh_eigenbases(self, state: State, rows: Tensor | None) -> State:
        """Do (5): Q_L <- qr(L Q_L), Q_S <- qr(S Q_S), of ``rows`` or all; Q_S is no orthogonal basis between them."""
        return {
            "Q_L": refreshed(self.refresh_basis, state["L"], state["Q_L"], rows),
            "Q_S": refreshed(self.refresh_coordinates, state["S"], state["Q_S"], rows),
        }

    def whitened_size(self, G: Tensor, state: State, h: ProHyper) -> Tensor:
        """Return the whitened size (B,) of G by the state before it."""
        energies = self.energies(self.project(G, state, None), state)
        return admission.whitened_size(energies.A, energies.e_res, state, h, G.shape[-1])

    def next_direction(
        self, G: Tensor, state: State, h: ProHyper, aspect_scale: Tensor, active: Tensor | None
    ) -> Direction:
        """Return the direction that the next step takes with G: (1) and (2)."""
        projected = self.project(G, state, active)
        energies = self.energies(projected, state)
        admitted = self.admit(energies.A, energies.QtG, energies.e_res, state, h, G.shape[-1])
        _, lookahead = self.momentum(G, projected, admitted.scale, state, h, active)
        return self.direction(lookahead, state, admitted.used, admitted.bounded, h, aspect_scale)[0]

    def step(
        self, G: Tensor, state: State, h: ProHyper, aspect_scale: Tensor, active: Tensor | None
    ) -> tuple[Direction, State, Tensor | None]:
        """Do (1) to (4); arguments and results as :meth:`prokl.algorithm.method.Batched.step` has them."""
        n = G.shape[-1]
        projected = self.project(G, state, active)
        energies = self.energies(projected, state)
        admitted = self.admit(energies.A, energies.QtG, energies.e_res, state, h, n)
        M, lookahead = self.momentum(G, projected, admitted.scale, state, h, active)
        G_perp = projected.G_perp
        del projected  # memory for the rest
        delta, clipped = self.direction(lookahead, state, admitted.used, admitted.bounded, h, aspect_scale)
        del lookahead
        moments, sample = self.statistics(energies, admitted, state, h, n)
        turned = self.track_subspace(G_perp, admitted.scale, sample, state | moments)
        new = {"M": M} | moments | turned | admitted.changed
        if clipped is not None:
            new["clipped"] = clipped
        return delta, new, admitted.evident
