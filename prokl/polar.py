"""Newton-Schulz orthogonalisation of a batch of wide matrices, in the standard and in the Gram form.

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

import torch
from torch import Tensor

Coefficients = tuple[float, float, float]

GRAM_RUN = 2
"""Gram iterations between restarts. In half precision the Gram matrix of a nearly rank-deficient X has spurious
negative eigenvalues, up to the unit roundoff (2e-3 of its largest in bfloat16), that the quintic multiplies by at
least a^2 an iteration and turns into divergence beyond about 1. With a = 3.4445 two iterations keep 2e-3 below 0.4;
three reach 4, and did diverge, by factors up to 1e6, on matrices of rank one plus noise with few rows, or few rows
that matter. From a restart every two on, the error is the standard form's."""

GRAM_ASPECT = 1.5
"""n/m from which the Gram form needs fewer multiplications: with five steps the standard form costs 10 n/m + 5
products of m x m matrices, the Gram form with its restarts 6 n/m + 11."""


def use_gram(m: int, n: int) -> bool:
    """Whether the Gram form is the cheaper one for an m x n matrix."""
    return n >= GRAM_ASPECT * m


def standard(X: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """X <- aX + (bA + cA^2)X with A = XX^T, ``steps`` times. X (B,m,n), Frobenius norm at most 1."""
    a, b, c = coefficients
    for _ in range(steps):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def gram_factor(R: Tensor, steps: int, coefficients: Coefficients) -> Tensor:
    """Q with (``steps`` iterations from X) = Q X, given R = X X^T. R (B,m,m), symmetric -> Q (B,m,m).

    Every matrix here is a polynomial of R, so all of them are symmetric and commute. aI is never added to Z
    before a product: in half precision its rounding would swamp Z.
    """
    a, b, c = coefficients
    Q = None
    for k in range(steps):
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)
        if Q is None:
            Q = Z.clone()
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = torch.baddbmm(Q, Q, Z, beta=a)
        if k + 1 < steps:
            Y = torch.baddbmm(R, R, Z, beta=a)
            R = torch.baddbmm(Y, Z, Y, beta=a)
    assert Q is not None
    return Q


def newton_schulz_factors(
    X: Tensor, steps: int, coefficients: Coefficients, gram: bool | None = None
) -> tuple[Tensor | None, Tensor]:
    """Newton-Schulz result of X as a product Q @ Y; Q is None where Y is the result itself.

    Leaving the last product to the caller lets it be fused with the subspace term of the update.

    Args:
        X: (B,m,n), m <= n, normalised to a Frobenius norm of at most 1, in the dtype of the products.
        steps: number of iterations, at least 1.
        coefficients: (a, b, c) of the quintic.
        gram: form to use; None chooses by the number of multiplications.

    Returns:
        (Q, Y): (B,m,m) or None, and (B,m,n).
    """
    if gram is None:
        gram = use_gram(X.shape[-2], X.shape[-1])
    if not gram:
        return None, standard(X, steps, coefficients)
    while steps > GRAM_RUN:
        X = gram_factor(X @ X.mT, GRAM_RUN, coefficients) @ X
        steps -= GRAM_RUN
    return gram_factor(X @ X.mT, steps, coefficients), X
