"""Types that the parts of a step hand each other: state, inverse roots, the bound on a gradient.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

State = dict[str, Tensor]
"""Stacked state of B matrices, by the keys of ``optimizer.state``."""
Scale = float | Tensor
"""A number, or one for each matrix (B,)."""
Factor = Any
"""A matrix as the products of a backend take it: a tensor, or what the backend has made of one. It has an ``mT``."""


class Roots(NamedTuple):
    """Inverse square roots of the eigenvalues that Pro-KLShampoo keeps."""

    L: Tensor
    """Those of lambda_L (B,m)."""
    S: Tensor
    """Those of lambda_S (B,r)."""
    mu: Tensor
    """Inverse root of mu_perp (B,)."""


class Projected(NamedTuple):
    """A gradient and its momentum on the subspace."""

    G: Tensor
    """G~ = G U (B,m,r)."""
    M: Tensor
    """M~ = M U (B,m,r)."""
    A: Tensor
    """G~ Q_S (B,m,r)."""
    B: Tensor
    """M~ Q_S (B,m,r)."""
    factor: Factor
    """G~ as products take it."""


class Admitted(NamedTuple):
    """The bound on one gradient a matrix, and the eigenvalues after it."""

    scale: Tensor | None
    """c (B,), in [0, 1]: what momentum and statistics multiply the gradient by; None for 1 without a bound."""
    used: Roots
    """Damped inverse roots before the step, as the direction takes them."""
    s: Roots
    """Undamped, clipped inverse roots after it: the new state."""
    c_L: Tensor
    """c times the new damped inverse roots of L (B,m), for the factors' EMAs and the tracking."""
    c_S: Tensor
    """c times those of S (B,r)."""
    weight_L: Tensor
    """(1 - beta2) / n (c a_mu)^2 (B,), the weight of G_perp G_perp^T in L."""
    changed: State
    """The new lambda_0 (B,), where ``init_eigenvalue`` is "auto"; empty without a bound."""
    bounded: Tensor | None
    """(B,) bool: whether the gradient, or a direction of a factor, was bounded; None without a bound."""
    evident: Tensor | None
    """(B,) bool: where False, all but ALWAYS_MOVE of the state stays, as the gradient's size is not finite or a new
    inverse root leaves what the state holds. None for True."""
