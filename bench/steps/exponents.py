"""How a step's time grows with one size: the measured exponent beside that of the paper's operation counts."""

import math
from collections.abc import Callable, Sequence

from bench.costs import NS_STEPS
from bench.shapes import ParameterSet


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """Slope of log y over log x by least squares."""
    xs, ys = ([math.log(p[i]) for p in points] for i in (0, 1))
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def _pro(m: int, n: int, r: int, tau: int) -> float:
    return NS_STEPS * m * m * n + m * n * r + (m**3 + r**3) / tau


def _kl(m: int, n: int, r: int, tau: int) -> float:
    return m * n * n + (m**3 + n**3) / tau


def _muon(m: int, n: int, r: int, tau: int) -> float:
    return NS_STEPS * m * m * n


PAPER: dict[str, Callable[[int, int, int, int], float]] = {"pro-klshampoo": _pro, "klshampoo": _kl, "muon": _muon}
"""Operations of a step of one m x n weight as the paper's table "Memory and per-step computational cost" has them,
without constants; of Muon the Newton-Schulz part of the first."""


def predicted(method: str, points: Sequence[tuple[float, ParameterSet]], tau: int) -> float:
    """The exponent of the paper's count over the same points, so between those of its terms."""
    counts = []
    for x, s in points:
        total = sum(k * PAPER[method](m, n, s.ranks[0], tau) for (m, n), k in s.oriented.items())
        counts.append((x, total))
    return exponent(counts)
