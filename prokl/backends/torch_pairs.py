"""The operations in PyTorch with balanced products, those of pairs: what the kernels compute, to study it; slower.

All of it is for arithmetic in float32. Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra, Factor, Scale, per_matrix
from prokl.algorithm.evidence import Admitted
from prokl.algorithm.settings import ProHyper
from prokl.pair import RESIDUAL, Operand, Pair, parts


def product(left: Operand, right: Operand) -> Tensor:
    """Return left right of pairs: the products of their parts, exact in float32, summed in it."""
    # A float32 tensor that holds bfloat16 numbers, as a gradient may, has a lo of zero.
    left, right = (t if isinstance(t, Pair) else Pair.split(t.float()) for t in (left, right))
    (a, b), *rest = parts(left, right)
    D = a.float() @ b.float()
    for a, b in rest:
        D += a.float() @ b.float()
    return D


class PairedAlgebra(Algebra):
    """PyTorch's operations, whose products take pairs too: beside one the other factor is split."""

    def operand(self, t: Tensor) -> Pair:
        """Split a large factor."""
        return Pair.split(t)

    def rounded(self, factor: Operand) -> Tensor:
        """Return a factor in bfloat16."""
        return factor.hi if isinstance(factor, Pair) else factor.to(torch.bfloat16)

    def product(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: float = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        if isinstance(left, Tensor) and isinstance(right, Tensor) and (C is None or C.dtype == left.dtype):
            return super().product(left, right, C=C, alpha=alpha, beta=beta)
        D = product(left, right) * per_matrix(alpha)
        return D if C is None else D + C * beta

    def noise(self, n: int, dtype: torch.dtype, stored: torch.dtype) -> float:
        """Return the size of X - (X U) U^T, over that of X, up to which it may be the rounding of pairs alone."""
        return max(RESIDUAL, super().noise(n, dtype, stored))

    def momentum(
        self, G: Tensor, M: Tensor, G_par: Pair, U: Pair, admitted: Admitted, h: ProHyper, active: Tensor | None
    ) -> tuple[Tensor, Factor | None, Any]:
        """Update M and form X from what the pairs hold."""
        return super().momentum(G, M, G_par.whole(), U.whole(), admitted, h, active)
