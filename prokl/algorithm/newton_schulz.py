"""Newton-Schulz orthogonalisation of a batch of wide matrices, in the standard and in the Gram form.

Products in units of m^3 with t = n/m, for five steps, where a symmetric product costs half of a full one:

standard   5 (2t + t + 1): a symmetric X X^T costs t, the polynomial 1, the update of X 2t
Gram       11 + 9t: 11 symmetric polynomials of Gram matrices, X X^T three times, two restarts X <- QX and the last QX

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra

Coefficients = tuple[float, float, float]

GRAM_RUN = 2
"""Gram iterations between restarts. In half precision the Gram matrix of a nearly rank-deficient X has spurious
negative eigenvalues, up to the unit roundoff (2e-3 of its largest in bfloat16), that the quintic multiplies by at
least a^2 an iteration and turns into divergence beyond about 1. With a = 3.4445 two iterations keep 2e-3 below 0.4;
three reach 4, and did diverge, by factors up to 1e6, on matrices of rank one plus noise with few rows, or few rows
that matter. From a restart every two on, the error is the standard form's."""

GRAM_ASPECT = 1.5
"""n/m from which the Gram form needs fewer multiplications: with five steps and no halved products the standard form
costs 10 n/m + 5 products of m x m matrices, the Gram form with its restarts 6 n/m + 11."""


def use_gram(m: int, n: int) -> bool:
    """Return True if the Gram form is the cheaper one for an m x n matrix."""
    return n >= GRAM_ASPECT * m


def standard(X: Tensor, scale: Tensor | None, steps: int, coefficients: Coefficients, ops: Algebra) -> Tensor:
    """Iterate X <- aX + (bA + cA^2)X with A = scale^2 XX^T, ``steps`` times, from scale X (B,m,n) of norm at most 1.

    A scale stays beside X: what comes out is multiplied by it as well.
    """
    a, b, c = coefficients
    for _ in range(steps):
        A = ops.gram(X, scale)
        Z = ops.symmetric_polynomial(A, A, C=A, alpha=c, beta=b)
        X = ops.product(Z, X, C=X, beta=a)
    return X


def gram_factor(R: Tensor, steps: int, coefficients: Coefficients, ops: Algebra) -> Tensor:
    """Compute Q with (``steps`` iterations from X) = Q X, given R = X X^T. R (B,m,m), symmetric -> Q (B,m,m).

    Every matrix here is a polynomial of R, so all of them are symmetric and commute. aI is never added to Z
    before a product: in half precision its rounding would swamp Z. The other order of the factors, of which PyTorch's
    form takes the second one transposed, adds up what rounding left unsymmetric: to 2.7 times the error in bfloat16.
    """
    a, b, c = coefficients
    Q = None
    for k in range(steps):
        if Q is None:
            Z, Q = ops.shifted_polynomial(R, R, C=R, alpha=c, beta=b, shift=a)
        else:
            Z = ops.symmetric_polynomial(R, R, C=R, alpha=c, beta=b)
            Q = ops.symmetric_polynomial(Z, Q, C=Q, beta=a)
        if k + 1 < steps:
            Y = ops.symmetric_polynomial(Z, R, C=R, beta=a)
            R = ops.symmetric_polynomial(Y, Z, C=Y, beta=a)
    assert Q is not None
    return Q


def newton_schulz(
    X: Tensor,
    scale: Tensor | None,
    steps: int,
    coefficients: Coefficients,
    ops: Algebra,
    *,
    turn: Tensor | None = None,
    gram: bool | None = None,
) -> Tensor:
    """Return Y with scale Y the Newton-Schulz result of scale X: leaving the scale beside them spares a pass over X.

    Args:
        X: (B,m,n), m <= n, in the dtype of the products.
        scale: (B,), makes the Frobenius norm of scale X at most 1; 0 for a matrix whose result is to be zero. None:
            X is normalised. Products of an X that is not must be in the range of its dtype: float16's is too small.
        steps: number of iterations, at least 1.
        coefficients: (a, b, c) of the quintic.
        ops: the algebra.
        turn: (B,m,m), multiplies the result from the left, as NS(Q X) = Q NS(X) for orthonormal Q; None is I.
        gram: form to use; None chooses by :func:`use_gram`.

    Returns:
        Y (B,m,n).

    Raises:
        ValueError: a float16 X that is not normalised.
    """
    if scale is not None and X.dtype == torch.float16:
        raise ValueError("A float16 X came with a scale, without which its products overflow: normalise X before.")
    if gram is None:
        gram = use_gram(X.shape[-2], X.shape[-1])
    Q = None if turn is None else turn.to(X.dtype)
    if not gram:
        X = standard(X, scale, steps, coefficients, ops)
        return X if Q is None else ops.product(Q, X)
    for done in range(0, steps, GRAM_RUN):
        R = ops.gram(X, scale)
        factor = gram_factor(R, min(steps - done, GRAM_RUN), coefficients, ops)
        last = steps - done <= GRAM_RUN
        X = ops.product(ops.product(Q, factor) if last and Q is not None else factor, X)
    return X
