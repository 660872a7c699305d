"""Newton-Schulz orthogonalisation of a batch of wide matrices, in the standard and in the Gram form.

Both iterate X <- (aI + bR + cR^2) X with R = X X^T, once a polynomial; the Gram form updates X after two at most.
Products in units of m^3 with t = n/m, for five steps, where a symmetric product costs half of a full one:

standard   5 (2t + t + 1): a symmetric X X^T costs t, the polynomial 1, the update of X 2t
Gram       11 + 9t: 11 symmetric polynomials of Gram matrices, X X^T three times, two restarts X <- QX and the last QX

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra
from prokl.algorithm.polynomials import Polynomial

GRAM_RUN = 2
"""Gram iterations between restarts at most. In half precision the Gram matrix of a nearly rank-deficient X has spurious
negative eigenvalues, up to the unit roundoff (2e-3 of its largest in bfloat16), that the quintic multiplies by at
least a^2 an iteration and turns into divergence beyond about 1. With a = 3.4445 two iterations keep 2e-3 below 0.4;
three reach 4, and did diverge, by factors up to 1e6, on matrices of rank one plus noise with few rows, or few rows
that matter. From a restart every two on, the error is the standard form's."""

GRAM_GAIN = 200.0
"""Largest product of a^2 between restarts, 0.4 / 2e-3; of one iteration any. Muon's two have 141, the first of Polar
Express 67, its second and third 253."""

GRAM_ASPECT = 1.5
"""n/m from which the Gram form needs fewer multiplications: with five steps and no halved products the standard form
costs 10 n/m + 5 products of m x m matrices, the Gram form with its restarts 6 n/m + 11."""


def use_gram(m: int, n: int) -> bool:
    """Return True if the Gram form is the cheaper one for an m x n matrix."""
    return n >= GRAM_ASPECT * m


def gram_runs(polynomials: Sequence[Polynomial]) -> list[list[Polynomial]]:
    """Return the iterations of the Gram form from one restart to the next."""
    runs: list[list[Polynomial]] = []
    gain = 0.0
    for polynomial in polynomials:
        gain *= polynomial[0] ** 2
        if not runs or len(runs[-1]) == GRAM_RUN or gain > GRAM_GAIN:
            runs.append([])
            gain = polynomial[0] ** 2
        runs[-1].append(polynomial)
    return runs


def gram_factor(R: Tensor, polynomials: Sequence[Polynomial], ops: Algebra) -> Tensor:
    """Compute Q with (an iteration a polynomial, from X) = Q X, given R = X X^T. R (B,m,m), symmetric -> Q (B,m,m).

    Every matrix here is a polynomial of R, so all of them are symmetric and commute. aI is never added to Z before a
    product of these: in half precision its rounding would swamp Z. The other order of the factors, of which PyTorch's
    form takes the second one transposed, adds up what rounding left unsymmetric: to 2.7 times the error in bfloat16.
    """
    (a, b, c), *others = polynomials
    if not others:
        return ops.symmetric_polynomial(R, R, C=R, alpha=c, beta=b, shift=a)
    Z, Q = ops.shifted_polynomial(R, R, C=R, alpha=c, beta=b, shift=a)
    for next_a, b, c in others:
        Y = ops.symmetric_polynomial(Z, R, C=R, beta=a)
        R = ops.symmetric_polynomial(Y, Z, C=Y, beta=a)
        a, Z = next_a, ops.symmetric_polynomial(R, R, C=R, alpha=c, beta=b)
        Q = ops.symmetric_polynomial(Z, Q, C=Q, beta=a)
    return Q


def newton_schulz(
    X: Tensor,
    scale: Any,
    size: Tensor,
    polynomials: Sequence[Polynomial],
    ops: Algebra,
    *,
    turn: Tensor | None = None,
    gram: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return Y and a factor (B,), which times Y is size NS(scale X): leaving it beside them spares a pass over X.

    Args:
        X: (B,m,n), m <= n, in the dtype of the products.
        scale: (B,), or what :meth:`prokl.algorithm.algebra.Algebra.momentum` leaves beside X. It makes the Frobenius
            norm of scale X at most 1, and is 0 for a matrix whose result is to be zero. None: X is normalised. Products
            of an X that is not must be in the range of its dtype: float16's is too small.
        size: (B,).
        turn: (B,m,m), multiplies the result from the left, as NS(Q X) = Q NS(X) for orthonormal Q; None is I.
        gram: form to use; None chooses by :func:`use_gram`.
    """
    assert scale is None or X.dtype != torch.float16, "products of a float16 X that is not normalised overflow"
    if gram is None:
        gram = use_gram(X.shape[-2], X.shape[-1])
    R, square, size = ops.normalised_gram(X, scale, size)
    runs = gram_runs(polynomials) if gram else [[polynomial] for polynomial in polynomials]
    for i, run in enumerate(runs):
        if i > 0:
            R = ops.symmetric_product(X, alpha=square)
        R = gram_factor(R, run, ops)  # one name, so that what has served is let go
        if turn is not None and i == len(runs) - 1:
            R = ops.product(turn.to(X.dtype), R)
        X = ops.product(R, X)
        del R
    return X, size
