"""Differences that seeds pair: their mean, its standard error, and what Student's t says of both."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """The mean of differences.

    Attributes:
        mean: of them.
        error: standard error of the mean; nan of a single one.
        decided: whether Student's two-sided interval at CONFIDENCE leaves out 0.
    """

    mean: float
    error: float
    decided: bool


def paired(values: Sequence[float], minus: Sequence[float]) -> Difference:
    """Compare values in the order of their seeds."""
    apart = np.subtract(values, minus)
    mean = float(apart.mean())
    if len(apart) < 2:
        return Difference(mean, np.nan, False)
    error = float(stats.sem(apart))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(apart) - 1)) * error
    return Difference(mean, error, abs(mean) > reach)
