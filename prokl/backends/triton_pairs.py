"""The operations as Triton launches with balanced products: large float32 factors are pairs, split as they are stored.

All of it is for arithmetic in float32. Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.types import Scale
from prokl.backends import torch_pairs
from prokl.backends.triton_ops import TritonAlgebra
from prokl.kernels.product import split_product
from prokl.kernels.split import split, split_two
from prokl.pair import Operand, Pair


def _paired(t: Operand) -> Operand:
    """Return an operand split into a pair, unless it is one, or is bfloat16."""
    return t if isinstance(t, Pair) or t.dtype == torch.bfloat16 else split(t.float())


class PairedAlgebra(TritonAlgebra, torch_pairs.PairedAlgebra):
    """Launches whose products take pairs too: beside one the other factor is split, unless it is bfloat16."""

    pairs = True
    operands = staticmethod(split_two)

    def operand(self, t: Tensor) -> Pair:
        """Split a large factor."""
        return split(t)

    def product(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: float = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        if isinstance(left, Pair) or isinstance(right, Pair):
            left, right = map(_paired, (left, right))
        return super().product(left, right, C=C, alpha=alpha, beta=beta)

    def product_as_factor(self, left: Operand, right: Operand) -> Pair:
        """Return left right, split as it is stored."""
        return split_product(_paired(left), _paired(right))
