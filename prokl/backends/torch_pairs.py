"""The stages in PyTorch with balanced products, those of pairs: what the kernels compute, to study it; slower.

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
from prokl.algorithm.stages import Projected, ProKLShampooStages, Residual
from prokl.backends.torch_ops import TorchAlgebra, per_matrix
from prokl.pair import RESIDUAL, Operand, Pair, parts


def product(left: Operand, right: Operand) -> Tensor:
    """Return left right of pairs: the products of their parts, exact in float32, summed in it."""
    # Of a float32 tensor that holds bfloat16 numbers, as a gradient may, lo is zero.
    left, right = (t if isinstance(t, Pair) else Pair.split(t.float()) for t in (left, right))
    (a, b), *rest = parts(left, right)
    D = a.float() @ b.float()
    for a, b in rest:
        D += a.float() @ b.float()
    return D


class PairedAlgebra(TorchAlgebra):
    """PyTorch's algebra, whose products take pairs too: beside one the other factor is split."""

    def product(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            return super().product(left, right, C=C, alpha=alpha, beta=beta)
        D = product(left, right) * per_matrix(alpha)
        return D if C is None else D + C * per_matrix(beta)

    def symmetric_product(
        self, A: Operand, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha A A^T + beta C."""
        if isinstance(A, Tensor):
            return super().symmetric_product(A, C=C, alpha=alpha, beta=beta)
        return self.product(A, A.mT, C=C, alpha=alpha, beta=beta)

    def spectral(self, Q: Tensor, a: Tensor) -> Pair:
        """Return Q diag(a) Q^T, split."""
        return Pair.split(self.symmetric_product(Pair.split(Q * a.sqrt()[:, None, :])))


class PairedStages(PairedAlgebra, ProKLShampooStages):
    """Pro-KLShampoo's stages over pairs of G's projections, the residuals, U, Q_L, P and S^-1/2."""

    def project(self, G: Tensor, state: State, active: Tensor | None) -> Projected:
        """Project, and split G_perp."""
        U, Q_L = Pair.split(state["U"]), Pair.split(state["Q_L"])
        G_tilde, M_tilde = self.product(G, U), self.product(state["M"].to(G.dtype), U)
        return Projected(G_tilde, M_tilde, Pair.split(self.product(G_tilde, U.mT, C=G, alpha=-1.0)), U, Q_L)

    def residual_energies(self, projected: Projected, E: Tensor) -> Tensor:
        """Return the squared norms of the rows of Q_L^T G_perp, in which nothing cancels."""
        return self.product(projected.Q_L.mT, projected.G_perp).square().sum(dim=-1)

    def residual(self, G_hat: Tensor, G_par: Tensor, U: Pair, stored: torch.dtype) -> Residual:
        """Return G^ - G^par U^T, split."""
        G_hat_perp = G_hat.sub_(self.product(G_par, U.mT))
        sizes = self.squared_norms(G_hat_perp, G_par)
        return Residual(Pair.split(G_hat_perp), *sizes, self.noise(U.shape[-2], G_par.dtype, stored))

    def rounding(self, dtype: torch.dtype) -> float:
        """Return what the roundings of pairs may leave of a gradient beside the subspace."""
        return RESIDUAL

    def right_factor(self, U: Pair, state: State, h: ProHyper) -> Tensor:
        """Return U in bfloat16, but where no Newton-Schulz errs by more than that rounding."""
        return U.hi if h.variant in POLAR_VARIANTS else state["U"]


class PairedKLStages(PairedAlgebra, KLShampooStages):
    """KL-Shampoo's stages over pairs of G, the bases and what the factors average."""

    def operands(self, G: Tensor, state: State) -> Operands:
        """Return the gradient and both bases, split."""
        return Operands(*(Pair.split(t) for t in super().operands(G, state)))

    def samples(self, operands: Operands, whitening: Whitening, c_L: Tensor, c_R: Tensor) -> tuple[Pair, Pair]:
        """Return what the factors average, split."""
        X, Y = super().samples(operands, whitening, c_L, c_R)
        return Pair.split(X), Pair.split(Y)


STAGES: dict[str, Callable[[bool], Batched[Any]]] = {"pro-klshampoo": PairedStages, "kl-shampoo": PairedKLStages}
