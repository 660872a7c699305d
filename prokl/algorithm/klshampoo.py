"""KL-Shampoo, both factors whole, for all weights of one oriented shape: its stages over the algebra, and its method.

The stages are those of :mod:`prokl.algorithm.reference_kl`. Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prokl.algorithm import evidence, reference_kl
from prokl.algorithm.algebra import Algebra, Direction, Factor, State, clipped_ema, refreshed
from prokl.algorithm.evidence import Sizes, Verdict
from prokl.algorithm.initial import ceiling_factor, initialise_kl
from prokl.algorithm.method import Group
from prokl.algorithm.settings import Hyper, check_common
from prokl.algorithm.shapes import ceiling


class Operands(NamedTuple):
    """What several products take."""

    G: Factor
    """The gradient (B,m,n)."""
    Q_L: Factor
    """(B,m,m)."""
    Q_R: Factor
    """(B,n,n)."""


class Whitening(NamedTuple):
    """The raw gradient in the eigenbases, for the decision about it and for the statistics."""

    QtG: Tensor
    """Q_L^T G (B,m,n)."""
    A: Tensor
    """Q_L^T G Q_R (B,m,n)."""


def whitened_sizes(A: Tensor, state: State) -> Sizes:
    """Measure the gradient (B,m,n) in the eigenbases."""
    m, n = A.shape[-2:]
    whitened = A * state["inv_sqrt_lambda_L"][:, :, None] * state["inv_sqrt_lambda_R"][:, None, :]
    rows, columns = (evidence.norm(whitened, dim) for dim in (-1, -2))
    return Sizes(rows / n**0.5, columns / m**0.5, evidence.norm(rows, -1) / (m * n) ** 0.5)


def decide(A: Tensor, state: State, h: Hyper) -> tuple[Verdict | None, State]:
    """Decide about the gradient by its whitened sizes; None in the authors' form.

    Returns:
        The decision, and the state whose eigenvalues the direction takes.
    """
    if h.clip_threshold is None:
        return None, state
    rms = evidence.norm(A) / (A.shape[-2] * A.shape[-1]) ** 0.5
    verdict = evidence.judge(whitened_sizes(A, state), rms, state, h)
    factors = {"inv_sqrt_lambda_L": verdict.rows, "inv_sqrt_lambda_R": verdict.columns}
    return verdict, state | {key: state[key] * factor for key, factor in factors.items()}


class KLShampooStages(Algebra):
    """KL-Shampoo's step; a :class:`prokl.algorithm.method.Batched`."""

    def operands(self, G: Tensor, state: State) -> Operands:
        """Return the gradient and both bases, as products take them."""
        return Operands(G, state["Q_L"], state["Q_R"])

    def whitening(self, operands: Operands) -> Whitening:
        """Turn the gradient into the eigenbases."""
        QtG = self.product(operands.Q_L.mT, operands.G)
        return Whitening(QtG, self.product(QtG, operands.Q_R))

    def momentum(self, G: Tensor, verdict: Verdict | None, state: State, h: Hyper) -> Tensor:
        """Update the momentum, M <- momentum M + (1 - momentum) c G (B,m,n)."""
        scaled = G if verdict is None else G * verdict.scale[:, None, None]
        return torch.lerp(state["M"].to(G.dtype), scaled, 1 - h.momentum)

    def direction(self, M: Tensor, operands: Operands, state: State, h: Hyper) -> tuple[Tensor, Tensor | None]:
        """Compute Q_L [(Q_L^T M Q_R) * s/(1 + eps s)] Q_R^T (B,m,n) with s = lambda_L^-1/2 (x) lambda_R^-1/2.

        The factor of ``adjust_lr_fn`` is part of a product.

        Returns:
            The direction, and the factor (B,) that it was cut by, None where there is no bound.
        """
        mm = self.product
        _, Q_L, Q_R = operands
        eps = (h.eps / ceiling_factor(state) ** 2)[:, None, None]
        s = state["inv_sqrt_lambda_L"][:, :, None] * state["inv_sqrt_lambda_R"][:, None, :]
        whitened, factor = mm(mm(Q_L.mT, M), Q_R) * (s / (1 + eps * s)), None
        if h.clip_threshold is not None:
            m, n = M.shape[-2:]
            factor = evidence.clip_factor(evidence.norm(whitened), evidence.COHERENT * h.gain * (m * n) ** 0.5)
            whitened = whitened * factor.to(M.dtype)[:, None, None]
        return mm(mm(Q_L, whitened, alpha=h.direction_scale(M.shape[-1])), Q_R.mT), factor

    def statistics(
        self, operands: Operands, whitening: Whitening, verdict: Verdict | None, state: State, h: Hyper
    ) -> State:
        """Update the EMAs of both factors and both spectra by c G, each side whitened by the other's eigenvalues."""
        A = whitening.A
        m, n = A.shape[-2:]
        s_L, s_R = state["inv_sqrt_lambda_L"], state["inv_sqrt_lambda_R"]
        factor, c_L, c_R = ceiling_factor(state), s_L, s_R
        if verdict is not None:
            c_L, c_R = s_L * verdict.scale[:, None], s_R * verdict.scale[:, None]
        ell = (A * c_R[:, None, :]).square().mean(dim=-1)
        rho = (A * c_L[:, :, None]).square().mean(dim=-2)
        X, Y = self.samples(operands, whitening, c_L, c_R)
        gain = 1 - h.beta2
        return {
            "L": self.symmetric_product(X, C=state["L"], beta=h.beta2, alpha=gain / n),
            "R": self.symmetric_product(Y.mT, C=state["R"], beta=h.beta2, alpha=gain / m),
            "inv_sqrt_lambda_L": clipped_ema(s_L, ell, h.beta2, (ceiling(m) * factor)[:, None]),
            "inv_sqrt_lambda_R": clipped_ema(s_R, rho, h.beta2, (ceiling(n) * factor)[:, None]),
        }

    def samples(self, operands: Operands, whitening: Whitening, c_L: Tensor, c_R: Tensor) -> tuple[Factor, Factor]:
        """Return G Q_R c_R and c_L Q_L^T G (B,m,n), whose products with themselves the factors average."""
        return self.product(operands.G, operands.Q_R) * c_R[:, None, :], whitening.QtG * c_L[:, :, None]

    def refresh_eigenbases(self, state: State, rows: Tensor | None) -> State:
        """Refresh Q_L <- qr(L Q_L), Q_R <- qr(R Q_R), of ``rows`` or all."""
        return {
            "Q_L": refreshed(self.refresh_basis, state["L"], state["Q_L"], rows),
            "Q_R": refreshed(self.refresh_basis, state["R"], state["Q_R"], rows),
        }

    def whitened_size(self, G: Tensor, state: State, h: Hyper) -> Tensor:
        """Return the whitened size (B,) of G by the state before it."""
        return whitened_sizes(self.whitening(self.operands(G, state)).A, state).overall

    def next_direction(
        self, G: Tensor, state: State, h: Hyper, aspect_scale: Tensor, active: Tensor | None
    ) -> Direction:
        """Return the direction that the next step takes with G."""
        G = G.to(state["inv_sqrt_lambda_L"].dtype)
        operands = self.operands(G, state)
        verdict, used = decide(self.whitening(operands).A, state, h)
        delta, _ = self.direction(self.momentum(G, verdict, state, h), operands, used, h)
        return Direction(delta, decay_after=True, cautious_decay=h.cautious_weight_decay)

    def step(
        self, G: Tensor, state: State, h: Hyper, aspect_scale: Tensor, active: Tensor | None
    ) -> tuple[Direction, State, Tensor | None]:
        """Do one step but for the refresh; weight decay comes after it, on the updated weight."""
        G = G.to(state["inv_sqrt_lambda_L"].dtype)
        operands = self.operands(G, state)
        whitening = self.whitening(operands)
        verdict, used = decide(whitening.A, state, h)
        M = self.momentum(G, verdict, state, h)
        delta, factor = self.direction(M, operands, used, h)
        new = {"M": M} | self.statistics(operands, whitening, verdict, state, h)
        evident = None
        if verdict is not None and factor is not None:
            bounded = verdict.bounded | (factor < 1)
            new |= verdict.changed | {"clipped": state["clipped"] + bounded}
            roots = new["inv_sqrt_lambda_L"], new["inv_sqrt_lambda_R"]
            evident = verdict.evident & evidence.in_range(roots, M.shape[-1], state["M"].dtype)
        return Direction(delta, decay_after=True, cautious_decay=h.cautious_weight_decay), new, evident


class KLShampooMethod:
    """KL-Shampoo as a :class:`prokl.algorithm.method.Method`."""

    name: str = "kl-shampoo"
    fixed: tuple[str, ...] = ("state_dtype", "init_eigenvalue")
    check = staticmethod(check_common)
    hyper = staticmethod(Hyper.of)
    reference_refresh = staticmethod(reference_kl.refresh_eigenbases)

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
            "clipped": (),
        }
        return shapes | ({"lambda_0": ()} if group["init_eigenvalue"] == "auto" else {})

    def workspace(self, m: int, n: int, rank: int) -> int:
        """Return the elements of temporary memory that a step needs for one matrix at most."""
        return 8 * m * n + 9 * n * n + 8 * m * m

    def initialise(self, G: Tensor, rank: int, group: Group) -> State:
        """Make the state (B,...) from the initialising gradients G (B,m,n)."""
        return initialise_kl(G, group["beta2"], group["init_eigenvalue"])

    def reference_step(
        self, W: Tensor, G: Tensor, state: State, h: Hyper, *, aspect_scale: float, refresh: bool, stored: torch.dtype
    ) -> tuple[Tensor, State]:
        """Do one step of the specification for one matrix; KL-Shampoo has no aspect scale, and no basis to project."""
        return reference_kl.step(W, G, state, h, refresh=refresh)
