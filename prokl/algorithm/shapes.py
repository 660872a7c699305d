"""A weight read as matrices: orientation, rank, ceilings and aspect scale.

Every matrix is oriented so that its short side is ``m`` and its long side is ``n``; a weight with more rows
than columns is handled on its transpose (the paper's Remark "Left projection").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of weights that the matrix methods take."""


def ceiling(dim: int) -> float:
    """Return the largest inverse root of an eigenvalue of a factor of size ``dim`` (paper, "Eigenvalue clipping")."""
    return float(max(10, min(dim, 4000)))


def effective_rank(rank: int, m: int, n: int) -> int:
    """Return ``min(rank, m, n - 1)``: U is read off a thin SVD and its complement is never empty."""
    return min(rank, m, n - 1)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the arithmetic dtype: float64 when any of ``dtypes`` is, float32 otherwise."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


@dataclass(frozen=True)
class MatrixShape:
    """A parameter read as ``count`` matrices of ``rows`` x ``cols``."""

    count: int
    rows: int
    cols: int

    @staticmethod
    def of(p: Tensor) -> MatrixShape:
        """Read a parameter: 2-D is one matrix, 3-D a stack, 4-D and more a convolution, flattened to (out, rest)."""
        if p.ndim == 3:
            return MatrixShape(p.shape[0], p.shape[1], p.shape[2])
        return MatrixShape(1, p.shape[0], math.prod(p.shape[1:]))

    @property
    def transposed(self) -> bool:
        """True if the matrices are handled on their transposes."""
        return self.rows > self.cols

    @property
    def m(self) -> int:
        """Short side."""
        return min(self.rows, self.cols)

    @property
    def n(self) -> int:
        """Long side."""
        return max(self.rows, self.cols)

    @property
    def aspect_scale(self) -> float:
        """The paper's ``c_a = sqrt(max(1, rows / cols))``, on the original rows and columns."""
        return math.sqrt(max(1.0, self.rows / self.cols))

    def oriented(self, t: Tensor) -> Tensor:
        """Return ``t`` (the parameter's shape) as (count, m, n); a view wherever strides allow."""
        stack = t.reshape(self.count, self.rows, self.cols)
        return stack.mT if self.transposed else stack

    def restored(self, stack: Tensor, like: Tensor) -> Tensor:
        """Undo :meth:`oriented`: (count, m, n) back to the shape of ``like``."""
        return (stack.mT if self.transposed else stack).reshape(like.shape)
