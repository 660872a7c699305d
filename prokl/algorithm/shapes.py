"""A weight read as matrices: orientation, rank, ceilings and aspect scale.

Every matrix is oriented so that its short side is ``m`` and its long side is ``n``; a weight with more rows
than columns is handled on its transpose (the paper's Remark "Left projection").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Literal

import torch
from torch import Tensor

PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of weights that the matrix methods take."""


def ceiling(dim: int) -> float:
    """Return the largest inverse root of an eigenvalue of a factor of size ``dim`` (paper, "Eigenvalue clipping")."""
    return float(max(10, min(dim, 4000)))


State = dict[str, Tensor]
"""Stacked state of B matrices, by the keys of ``optimizer.state``."""


def ceiling_factor(state: State) -> Tensor:
    """Return the factor of a state's ceilings (B,): 1 for an absolute start value, ``lambda_0**-0.5`` for "auto"."""
    s = state["inv_sqrt_lambda_L"]
    return state["lambda_0"].rsqrt() if "lambda_0" in state else torch.ones_like(s[..., 0])


Rank = int | Literal["auto"]
"""Type of ``rank``."""
MAX_AUTO_RANK, AUTO_RANK_DIVISOR = 128, 6
"""The rank "auto": the paper's largest, and the divisor of a width, which gives it at the paper's smallest, 768."""


def effective_rank(rank: Rank, m: int, n: int) -> int:
    """Return ``min(rank, m, n - 1)``: U is read off a thin SVD and its complement is never empty.

    "auto" is a sixth of the short side, at least 1 and at most MAX_AUTO_RANK. Nearly full ranks leave no tail to
    orthogonalise, and ended far above (docs/experiments.md).
    """
    wanted = min(MAX_AUTO_RANK, max(1, m // AUTO_RANK_DIVISOR)) if rank == "auto" else rank
    return min(wanted, m, n - 1)


def alpha_kl_bracket(m: int, n: int, rank: int) -> tuple[float, float]:
    """Return 1/sqrt(m (n - r)) and sqrt(k) times that, k = min(m, n - r): the paper's eq. lambda_star_app over c_a."""
    beyond = n - rank
    low = 1 / math.sqrt(m * beyond)
    return low, low * math.sqrt(min(m, beyond))


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the arithmetic dtype: float64 when any of ``dtypes`` is, float32 otherwise."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


WITH_FLOAT64 = ("cpu", "cuda", "meta")
"""Types of devices that are known to have float64; others are tried."""


@cache
def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no float64, as MPS and some Intel GPUs."""
    if device.type in WITH_FLOAT64:
        return torch.float64
    try:
        torch.ones(1, dtype=torch.float64, device=device).add_(1)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


Split = int | tuple[int, ...] | None
"""Pieces of a weight's output dimension: so many equal ones, their sizes, or the whole."""


@dataclass(frozen=True)
class MatrixShape:
    """A parameter, or one piece of its output dimension, read as ``count`` matrices of ``rows`` x ``cols``."""

    count: int
    rows: int
    """Size of the output dimension."""
    cols: int
    stored_in_out: bool = False
    """True if the parameter holds the matrices' transposes."""
    start: int | None = None
    """The piece's first row; None where the parameter is not split."""

    @staticmethod
    def of(p: Tensor, transposed: bool = False) -> MatrixShape:
        """Read a parameter: 2-D is one matrix, 3-D a stack, 4-D and more a convolution, flattened to (first, rest)."""
        count, first, rest = p.shape if p.ndim == 3 else (1, p.shape[0], math.prod(p.shape[1:]))
        return MatrixShape(count, rest, first, True) if transposed else MatrixShape(count, first, rest)

    def pieces(self, split: Split) -> tuple[MatrixShape, ...]:
        """Return one shape for each piece of the output dimension, in order; ``split`` fits it."""
        if split is None:
            return (self,)
        sizes = (self.rows // split,) * split if isinstance(split, int) else split
        starts = accumulate(sizes, initial=0)
        return tuple(replace(self, rows=size, start=start) for size, start in zip(sizes, starts, strict=False))

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

    def region(self, t: Tensor) -> Tensor:
        """Return this piece's part of ``t`` (the parameter's shape), a view."""
        return t if self.start is None else t.narrow(-1 if self.stored_in_out else -2, self.start, self.rows)

    def oriented(self, t: Tensor) -> Tensor:
        """Return this piece of ``t`` (the parameter's shape) as (count, m, n); a view wherever strides allow."""
        stack = self.region(t)
        if t.ndim != 3:
            stack = stack.reshape(1, stack.shape[0], -1)
        return stack.mT if (self.rows > self.cols) != self.stored_in_out else stack

    def restored(self, stack: Tensor, like: Tensor) -> Tensor:
        """Undo :meth:`oriented`: (count, m, n) back to the shape of ``like``, the parameter's :meth:`region`."""
        return (stack.mT if (self.rows > self.cols) != self.stored_in_out else stack).reshape(like.shape)
