"""The stages as Triton launches with balanced products: large float32 factors are pairs, split where they are stored.

All of it is for arithmetic in float32. Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.algebra import Scale, State
from prokl.algorithm.klshampoo import KLShampooStages, Operands, Whitening
from prokl.algorithm.method import Batched
from prokl.algorithm.settings import POLAR_VARIANTS, ProHyper
from prokl.algorithm.stages import Projected, Sample
from prokl.backends.triton_ops import TritonAlgebra, TritonStages
from prokl.kernels.combine import combine
from prokl.kernels.product import product_pair, row_energies
from prokl.kernels.project import project
from prokl.kernels.split import split, split_two
from prokl.kernels.symmetric_product import symmetric_product_pair
from prokl.pair import RESIDUAL, Operand, Pair


class PairedAlgebra(TritonAlgebra):
    """Launches whose products take pairs too: beside one the other factor is split, unless it is bfloat16."""

    def product(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        if isinstance(left, Pair) or isinstance(right, Pair):
            left, right = (split(t) if isinstance(t, Tensor) and t.dtype == torch.float32 else t for t in (left, right))
        return super().product(left, right, C=C, alpha=alpha, beta=beta)

    def spectral(self, Q: Tensor, a: Tensor) -> Pair:
        """Return Q diag(a) Q^T, split as it is stored."""
        return symmetric_product_pair(split(Q, a))


class PairedStages(PairedAlgebra, TritonStages):
    """Pro-KLShampoo's stages over pairs of G's projections, the residuals, U, Q_L, P, S^-1/2 and L^-1 G~."""

    def project(self, G: Tensor, state: State, active: Tensor | None) -> Projected:
        """Split U and Q_L in one launch, and all else as it is stored."""
        U, Q_L = split_two(state["U"], state["Q_L"])
        G_tilde, M_tilde, factor = project(G, state["M"], U, active)
        return Projected(G_tilde, M_tilde, product_pair(factor, U.mT, C=G, alpha=-1.0), U, Q_L)

    def residual_energies(self, projected: Projected, E: Tensor) -> Tensor:
        """Return parts of the squared norms of the rows of Q_L^T G_perp, in which nothing cancels."""
        return row_energies(projected.Q_L.mT, projected.G_perp)

    def combined(self, x: Tensor, alpha: float, y: Tensor, beta: float, scale: Tensor | None) -> Pair:
        """Return scale alpha x + beta y, split as it is stored."""
        pair = combine(x, alpha, y, beta, scale, pair=True)
        assert isinstance(pair, Pair)
        return pair

    def rounding(self, dtype: torch.dtype) -> float:
        """Return what the roundings of pairs may leave of a gradient beside the subspace."""
        return RESIDUAL

    def precondition(self, P: Pair, G_par: Pair, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
        """Return alpha P G_par S^-1/2 in two products."""
        return self.product(P, product_pair(G_par, self.spectral(Q_S, a_S)), alpha=alpha)

    def right_factor(self, U: Pair, state: State, h: ProHyper) -> Tensor:
        """Return U in bfloat16, but where no Newton-Schulz errs by more than that rounding."""
        return U.hi if h.variant in POLAR_VARIANTS else state["U"]

    def whitened(self, sample: Sample, state: State) -> Pair:
        """Return (1 - beta2)/m c L^-1 G~, split as it is stored."""
        return product_pair(state["Q_L"], sample.whitened)


class PairedKLStages(PairedAlgebra, KLShampooStages):
    """KL-Shampoo's stages over pairs of G, the bases and what the factors average."""

    def operands(self, G: Tensor, state: State) -> Operands:
        """Return the gradient and both bases, split."""
        return Operands(*(split(t) for t in super().operands(G, state)))

    def samples(self, operands: Operands, whitening: Whitening, c_L: Tensor, c_R: Tensor) -> tuple[Pair, Pair]:
        """Return what the factors average, split."""
        X, Y = super().samples(operands, whitening, c_L, c_R)
        return split(X), split(Y)


STAGES: dict[str, Callable[[bool, bool], Batched[Any]]] = {"pro-klshampoo": PairedStages, "kl-shampoo": PairedKLStages}
