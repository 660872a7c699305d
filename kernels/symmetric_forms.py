"""What a step takes of the symmetric product beside plain ones: more addends, and a second result of the same sum."""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.symmetric_product import check_factor, check_polynomial, compute


def gram(X: Tensor, scale: Tensor, *, tile: Tile | None = None) -> Tensor:
    """Compute scale^2 X X^T (batch,m,m), in the dtype of X.

    Args:
        X: (batch,m,k). scale: (batch,). tile: block sizes, by default from the sizes and the dtypes.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    check_factor(X)
    launch.check("scale", scale, (X.shape[0],), X.device, like="X")
    D, _ = compute(X, X, None, scale, 1.0, X.dtype, "tf32x3", tile, squared=True)
    assert isinstance(D, Tensor)
    return D


def shifted_polynomial(
    A: Tensor, B: Tensor, *, C: Tensor, alpha: float, beta: float, shift: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute D = alpha A B + beta C as :func:`symmetric_polynomial` does, and D + shift I, each rounded once."""
    check_polynomial(A, B)
    dtype = torch.promote_types(A.dtype, B.dtype)
    D, shifted = compute(A, B, C, alpha, beta, dtype, "tf32x3", tile, second=(1.0, 0.0, shift))
    assert isinstance(D, Tensor) and shifted is not None
    return D, shifted


def factor_ema(
    L: Tensor, X: Tensor, E: Tensor, tail: Tensor, beta: float, alpha: float, *, tile: Tile | None = None
) -> Tensor:
    """Compute beta L + alpha X X^T + tail E (batch,m,m), in the dtype of X.

    Args:
        L, E: symmetric (batch,m,m). X: (batch,m,k). tail: (batch,). beta, alpha: numbers.
        tile: block sizes, by default from the sizes and the dtypes.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    check_factor(X)
    D, _ = compute(X, X, L, alpha, beta, X.dtype, "tf32x3", tile, E=E, gamma=tail)
    assert isinstance(D, Tensor)
    return D


def coordinates_ema(
    S: Tensor, Z: Tensor, beta: float, alpha: float, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Compute S_+ = beta S + alpha Z Z^T and beta S_+ + alpha Z Z^T (batch,r,r), in the dtype of Z.

    Args:
        S: symmetric (batch,r,r). Z: (batch,r,k). beta, alpha: numbers.
        tile: block sizes, by default from the sizes and the dtypes.

    Raises:
        ValueError: a shape, a dtype or a device; the message names the argument and the bound.
    """
    check_factor(Z)
    D, K = compute(Z, Z, S, alpha, beta, Z.dtype, "tf32x3", tile, second=(1 + beta, -beta, 0.0))
    assert isinstance(D, Tensor) and K is not None
    return D, K
