"""Newton-Schulz orthogonalisation from symmetric products; in PyTorch: ``prokl.polar.newton_schulz_factors``.

B: matrices; M: short side; N: long side. No kernel of its own: launches of :mod:`prokl.kernels.symmetric_product` and
:mod:`prokl.kernels.product`, whose products are counted here in units of m^3 with t = n/m, for five steps.

standard   5 (2t + t + 1): a symmetric X X^T costs t, the polynomial 1, the update of X 2t
Gram       11 + 9t: 11 symmetric polynomials of Gram matrices, X X^T three times, two restarts X <- QX and the last QX
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.kernels.product import can_use_product, product
from prokl.kernels.symmetric_product import symmetric_polynomial, symmetric_product
from prokl.polar import GRAM_RUN, Coefficients, use_gram


def can_use_newton_schulz(X: Tensor) -> bool:
    """Whether :func:`newton_schulz_factors` runs on X."""
    return X.ndim == 3 and can_use_product(X, X)


def _gram_factor(
    X: Tensor, inverse_norm: Tensor | None, steps: int, coefficients: Coefficients, precision: str
) -> Tensor:
    """Q with (``steps`` iterations from X / ||X||) = Q X / ||X||."""
    a, b, c = coefficients
    R = symmetric_product(X, alpha=1.0 if inverse_norm is None else inverse_norm.square(), precision=precision)
    Q = None
    for k in range(steps):
        Z = symmetric_polynomial(R, R, C=R, alpha=c, beta=b, precision=precision)
        if Q is None:
            Q = Z.clone()
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = symmetric_polynomial(Q, Z, C=Q, beta=a, precision=precision)
        if k + 1 < steps:
            Y = symmetric_polynomial(R, Z, C=R, beta=a, precision=precision)
            R = symmetric_polynomial(Z, Y, C=Y, beta=a, precision=precision)
    assert Q is not None
    return Q


def _standard(X: Tensor, inverse_norm: Tensor | None, steps: int, coefficients: Coefficients, precision: str) -> Tensor:
    a, b, c = coefficients
    for _ in range(steps):
        square = None if inverse_norm is None else inverse_norm.square()
        A = symmetric_product(X, alpha=1.0 if square is None else square, precision=precision)
        Z = symmetric_polynomial(A, A, C=A, alpha=c, beta=b, precision=precision)
        if inverse_norm is None:
            X = product(Z, X, C=X, beta=a, precision=precision)
        else:
            X = product(Z, X, C=X, alpha=inverse_norm, beta=a * inverse_norm, precision=precision)
        inverse_norm = None
    return X


def newton_schulz_factors(
    X: Tensor,
    inverse_norm: Tensor | None,
    steps: int,
    coefficients: Coefficients,
    *,
    gram: bool | None = None,
    precision: str = "tf32x3",
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Newton-Schulz result of X ``inverse_norm`` as (Q, Y, scale): the result is scale Q Y.

    The normalisation is folded into the first product, which spares a pass over X; for that, products of X must be
    in the range of its dtype without it: true of bfloat16 and float32, not of float16.

    Args:
        X: (B,m,n), m <= n, in the dtype of the products.
        inverse_norm: 1/||X||_F (B,), 0 for a matrix whose result is to be zero; None: X is normalised.
        steps: number of iterations, at least 1.
        coefficients: (a, b, c) of the quintic.
        gram: form to use; None chooses by the aspect n/m, as the PyTorch form does. By the count above the Gram form
            saves nothing at n = m and a ninth at 1.5; its products are more and smaller.
        precision: of the products of float32, see :mod:`prokl.kernels.launch`.

    Returns:
        Q (B,m,m) or None for the identity, Y (B,m,n), scale (B,) or None for 1.

    Raises:
        ValueError: a shape, a dtype, a device or a value; the message names the argument and the bound.
    """
    if steps < 1:
        raise ValueError(f"Invalid steps={steps}: must be at least 1.")
    if X.ndim != 3 or not 1 <= X.shape[1] <= X.shape[2]:
        raise ValueError(f"X has shape {tuple(X.shape)}; must be (B, m, n) with 1 <= m <= n: transpose it.")
    if inverse_norm is not None and X.dtype == torch.float16:
        raise ValueError("inverse_norm was given for a float16 X, whose products overflow: normalise X before.")
    if gram is None:
        gram = use_gram(X.shape[1], X.shape[2])
    if not gram:
        return None, _standard(X, inverse_norm, steps, coefficients, precision), None
    while steps > GRAM_RUN:
        Q = _gram_factor(X, inverse_norm, GRAM_RUN, coefficients, precision)
        X = product(Q, X, alpha=1.0 if inverse_norm is None else inverse_norm, precision=precision)
        inverse_norm = None
        steps -= GRAM_RUN
    return _gram_factor(X, inverse_norm, steps, coefficients, precision), X, inverse_norm
