"""The polynomials of Newton-Schulz's iterations, X <- aX + bXX^T X + c(XX^T)^2 X: one for all, one each, or named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, get_args

Polynomial = tuple[float, float, float]
"""(a, b, c)."""
Named = Literal["polar-express", "deepseek-v4"]
NsCoefficients = Polynomial | Sequence[Polynomial] | Named
"""Type of ``ns_coefficients``."""

MUON: Polynomial = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's, which leaves singular values around 1."""
SAFETY = 1.01
"""Safety factor of Polar Express in half precision: rounding carries singular values beyond 1 (its Algorithm 1)."""
MINIMAX: tuple[Polynomial, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
"""Polynomials of degree 5, each the best after those before it: Amsel, Persson, Musco and Gower, arXiv:2505.16932,
Algorithm 1."""
LIMIT: Polynomial = (1.875, -1.25, 0.375)
"""All that follow."""
DEEPSEEK_V4 = (MUON,) * 8 + ((2.0, -1.5, 0.5),) * 2
"""Ten, the last two of which bring singular values to 1: DeepSeek-V4's report, "Hybrid Newton-Schulz Iterations"."""


def each(coefficients: Any, steps: int) -> tuple[Polynomial, ...]:
    """Return the polynomial of every iteration.

    Args:
        coefficients: (a, b, c) for all, one of these for each, or a name; "polar-express" has as many as there are
            iterations.
        steps: number of iterations, at least 1.

    Raises:
        ValueError: it is none of these, or has not one polynomial an iteration.
    """
    if isinstance(coefficients, str) and coefficients == "polar-express":
        safe = tuple((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in MINIMAX)
        return (safe + (LIMIT,) * steps)[:steps]
    if _is_polynomial(coefficients):
        return (coefficients,) * steps
    found = DEEPSEEK_V4 if isinstance(coefficients, str) and coefficients == "deepseek-v4" else coefficients
    if not isinstance(found, tuple) or not found or not all(map(_is_polynomial, found)):
        names = " or ".join(map(repr, get_args(Named)))
        raise ValueError(
            f"Invalid ns_coefficients={coefficients!r}: must be three finite numbers (a, b, c), a list of such triples "
            f"with one an iteration, or {names}."
        )
    if len(found) != steps:
        raise ValueError(
            f"Invalid ns_coefficients={coefficients!r} with ns_steps={steps}: must have one triple an iteration, and "
            f"has {len(found)}. Set ns_steps={len(found)}."
        )
    return found


def _is_polynomial(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 3
        and all(isinstance(c, Real) and not isinstance(c, bool) and math.isfinite(c) for c in value)
    )
