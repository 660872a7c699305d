"""Operands of products: tensors, or float32 numbers as pairs of bfloat16, whose products tensor cores do at full rate.

Dimension key: any; the last two are a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Pair(NamedTuple):
    """A float32 tensor as hi + lo: hi is it in bfloat16, lo what is left of it in bfloat16.

    Relative to an entry the sum is off by at most 2^-17: each part holds eight bits, rounded to nearest, and a sign.
    """

    both: Tensor
    """(2, ...), bfloat16: hi, then lo."""

    @classmethod
    def split(cls, t: Tensor) -> Pair:
        """Split a float32 tensor (...) into bfloat16 parts hi and lo (2,...)."""
        hi = t.to(torch.bfloat16)
        return cls(torch.stack((hi, (t - hi.float()).to(torch.bfloat16))))

    @property
    def hi(self) -> Tensor:
        """The larger part."""
        return self.both.select(0, 0)

    @property
    def lo(self) -> Tensor:
        """The smaller part."""
        return self.both.select(0, 1)

    @property
    def shape(self) -> torch.Size:
        """Sizes of the tensor."""
        return self.both.shape[1:]

    @property
    def mT(self) -> Pair:
        """The transpose of every matrix, a view."""
        return Pair(self.both.mT)

    def whole(self) -> Tensor:
        """Return hi + lo in float32, exactly."""
        return self.hi.float() + self.lo.float()


Operand = Tensor | Pair
"""An operand of a product."""
RESIDUAL = 2.0**-14
"""Size of X - (X U) U^T over that of X up to which it may be rounding of pairs alone. U, twice, and X U lose 2^-17
each, and their products 2^-18; where the entries of X are alike these losses are, too: 3.4e-5, of which twice as much
is allowed."""


def parts(left: Operand, right: Operand) -> list[tuple[Tensor, Tensor]]:
    """Return the products that make up left right, the smallest first; lo lo is left out, 2^-18 of the whole.

    A tensor beside a pair is its own hi: it is bfloat16 and has no lo.
    """
    (a, a_lo), (b, b_lo) = ((t.hi, t.lo) if isinstance(t, Pair) else (t, None) for t in (left, right))
    products = [(a_lo, b), (a, b_lo), (a, b)]
    return [(x, y) for x, y in products if x is not None and y is not None]
