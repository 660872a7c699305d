"""The paper's formulas for a spectrum and for a weight's shape: no optimizer needed."""

from __future__ import annotations

from numbers import Integral
from typing import get_args

from torch import Tensor

from prokl.algorithm import shapes
from prokl.algorithm.settings import COUNT, RANK, AdjustLrFn, check, one_of
from prokl.algorithm.shapes import MatrixShape, Rank, effective_rank


def alpha_kl_bracket(
    rows: int, cols: int, rank: Rank, *, adjust_lr_fn: AdjustLrFn | None = "original"
) -> tuple[float, float]:
    """Return the range of alpha_kl in which the two parts of a weight's update are in Smok-Hop's proportion.

    c_a / sqrt(m (n - r)) and sqrt(k) times that, with m and n the short and the long side, k = min(m, n - r) the
    rank of the complement's update and c_a = sqrt(max(1, rows / cols)) (paper, eq. lambda_star_app). The lower end
    holds where all of the complement's whitened update lies in one direction, the upper one where it is spread evenly.

    Args:
        rows: of the weight, as PyTorch holds it.
        cols: its columns.
        rank: r; as in the optimizer at most min(m, n - 1) of it counts.
        adjust_lr_fn: as in the optimizer; "match_rms_adamw" scales both parts, and c_a is 1.

    Returns:
        The lower and the upper end.

    Raises:
        ValueError: a size below 1, a weight of one element, a rank below 1, or another ``adjust_lr_fn``.
    """
    check("rows", rows, COUNT)
    check("cols", cols, COUNT)
    check("rank", rank, RANK)
    check("adjust_lr_fn", adjust_lr_fn, one_of(None, *get_args(AdjustLrFn)))
    if rows * cols < 2:
        raise ValueError(f"Invalid rows * cols={rows * cols}: must be at least 2; pass a weight's shape and its rank.")
    shape = MatrixShape(1, rows, cols)
    c_a = shape.aspect_scale if adjust_lr_fn in (None, "original") else 1.0
    low, high = shapes.alpha_kl_bracket(shape.m, shape.n, effective_rank(rank, shape.m, shape.n))
    return c_a * low, c_a * high


def tail_am_gm(eigenvalues: Tensor, rank: int) -> Tensor:
    """Return the arithmetic over the geometric mean of the eigenvalues beyond ``rank``: 1 for a flat tail.

    Args:
        eigenvalues: (..., n), positive, descending.
        rank: where the tail begins; below n.

    Returns:
        (...), float64, at least 1.

    Raises:
        ValueError: the eigenvalues are not above 0 in descending order, or ``rank`` is no integer from 0 to n - 1. NaN
            is let through.
    """
    return _log_am_gm(eigenvalues, rank).exp()


def gap_bound(eigenvalues: Tensor, rank: int, other_side: int) -> Tensor:
    """Bound the rise of the KL objective, in nats, if one eigenvalue replaces all beyond ``rank`` (Claim 1).

    other_side (n - r) / 2 * log(AM / GM) of the tail; a common factor of the eigenvalues does not change it.

    Args:
        eigenvalues: (..., n) of the factor that is restricted, positive, descending.
        rank: r; below n.
        other_side: size of the other factor; m where the eigenvalues are those of the right one.

    Returns:
        (...), float64, at least 0.

    Raises:
        ValueError: as for :func:`tail_am_gm`; or ``other_side`` is no integer of at least 1.
    """
    check("other_side", other_side, COUNT)
    tail = _log_am_gm(eigenvalues, rank)
    return other_side * (eigenvalues.shape[-1] - rank) / 2 * tail


def _log_am_gm(eigenvalues: Tensor, rank: int) -> Tensor:
    n = eigenvalues.shape[-1]
    if isinstance(rank, bool) or not isinstance(rank, Integral) or not 0 <= rank < n:
        raise ValueError(
            f"Invalid rank={rank!r}: must be an integer from 0 to {n - 1}, so that of {n} some are beyond."
        )
    if (eigenvalues <= 0).any() or (eigenvalues.diff() > 0).any():
        raise ValueError(
            "Invalid eigenvalues: must be above 0 and descend; clamp those that rounding left below, and use "
            ".sort(descending=True).values."
        )
    tail = eigenvalues[..., rank:].double()  # a bound of m (n - r) / 2 times a logarithm near 0
    return (tail.mean(dim=-1).log() - tail.log().mean(dim=-1)).clamp(min=0)  # rounding of a flat tail
