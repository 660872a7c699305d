"""The algebra over which the batched steps are written, and the direction that they lead to.

A backend implements :class:`Algebra`; the stages call nothing else but each other and elementwise PyTorch.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

State = dict[str, Tensor]
"""Stacked state of B matrices; keys as in :mod:`prokl.algorithm.reference`."""
Scale = float | Tensor
"""A number, or one for each matrix (B,)."""
Factor = Any
"""A matrix as the products of a backend take it: a tensor, or what the backend has made of one. It has an ``mT``."""


class Roots(NamedTuple):
    """Inverse square roots of the eigenvalues of a projected state."""

    L: Tensor
    """Of lambda_L (B,m)."""
    S: Tensor
    """Of lambda_S (B,r)."""
    mu: Tensor
    """Of mu_perp (B,)."""


class Admitted(NamedTuple):
    """What one gradient a matrix may do, and the eigenvalues that it leaves."""

    scale: Tensor | None
    """c (B,), in [0, 1]: what momentum and statistics multiply the gradient by; None for 1 without a bound."""
    used: Roots
    """Damped inverse roots before the step, as the direction takes them."""
    s: Roots
    """Undamped, clipped inverse roots after it: the new state."""
    a: Roots
    """The same, damped, for the factors' EMAs and the tracking."""
    tail: Tensor
    """(1 - beta2) / n (c a_mu)^2 (B,), the weight of G_perp G_perp^T in L."""
    changed: State
    """For "auto" the new lambda_0 (B,); empty without a bound."""
    bounded: Tensor | None
    """(B,) bool: whether the gradient, or a direction of a factor, was bounded; None without a bound."""
    evident: Tensor | None
    """(B,) bool: whether the gradient is evidence; where False, all but ALWAYS_MOVE stays. None for True."""


@dataclass(frozen=True)
class Direction:
    """The direction D = scale X + left right^T (B,m,n) as its factors, so that one kernel can form and apply it."""

    X: Tensor | None
    """(B,m,n) in any floating dtype; None when the direction is left right^T alone."""
    scale: Tensor | None = None
    """(B,); None is 1."""
    left: Tensor | None = None
    """(B,m,r) in the arithmetic dtype, or with ``right`` in a lower one; None is zero."""
    right: Tensor | None = None
    """(B,n,r), with ``left``."""
    decay_after: bool = False
    """True if weight decay acts on the stepped weight, W <- decay (W - lr D), and not beside the step."""
    cautious_decay: bool = False
    """True if it acts only where D and the weight that it acts on do not differ in sign."""

    def dense(self) -> Tensor:
        """Return D (B,m,n), in the arithmetic dtype."""
        if self.X is None:
            assert self.left is not None and self.right is not None
            dtype = torch.promote_types(self.left.dtype, torch.float32)
            return self.left.to(dtype) @ self.right.to(dtype).mT
        D = self.X
        if self.scale is not None:
            wide = D.to(self.scale.dtype)  # the arithmetic dtype
            D = wide * self.scale[:, None, None] if wide is D else wide.mul_(self.scale[:, None, None])
        if self.left is None:
            return D
        assert self.right is not None
        add = torch.baddbmm if D is self.X else Tensor.baddbmm_  # X may be read again
        return add(D, self.left.to(D.dtype), self.right.to(D.dtype).mT)


def damp(s: Tensor, eps: Tensor) -> Tensor:
    """Return 1/(sqrt(lambda) + eps) from s = lambda^-1/2 (Algorithm 2, (P2)); s (B,k) or (B,), eps (B,)."""
    return s / (1 + (eps if s.ndim == 1 else eps[:, None]) * s)


def clipped_ema(s: Tensor, statistic: Tensor, beta2: float, limit: Tensor) -> Tensor:
    """Return min((beta2 lambda + (1-beta2) statistic)^-1/2, limit) with lambda = s^-2, broadcast to the shape of s."""
    return torch.minimum((beta2 * s**-2 + (1 - beta2) * statistic).rsqrt(), limit)


def refreshed(qr: Callable[[Tensor, Tensor], Tensor], F: Tensor, Q: Tensor, rows: Tensor | None) -> Tensor:
    """Return Q (B,k,k) in whose place ``rows``, or all, have ``qr`` of a factor F (B,k,k) and it; Q itself stays."""
    return qr(F, Q) if rows is None else Q.index_copy(0, rows, qr(F[rows], Q[rows]))


class Algebra(Protocol):
    """One backend's operations on a batch of B matrices, which take any strides."""

    name: str
    """As in ``backend=``."""

    def product(
        self, left: Factor, right: Factor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C: (B,m,k), (B,k,n), (B,m,n)."""
        ...

    def symmetric_product(
        self, A: Factor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha A A^T + beta C: (B,m,k), symmetric (B,m,m)."""
        ...

    def symmetric_polynomial(
        self, left: Tensor, right: Tensor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C for symmetric (B,m,m) that commute, as polynomials of one matrix do."""
        ...

    def spectral(self, Q: Tensor, a: Tensor) -> Factor:
        """Return Q diag(a) Q^T: (B,m,m), (B,m) not negative, symmetric (B,m,m)."""
        ...

    def congruence(self, L: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q^T L Q, symmetric, and L Q (B,m,m) for symmetric L and any Q (B,m,m)."""
        ...

    def diagonal(self, Q: Tensor, E: Tensor) -> Tensor:
        """Return the diagonal of Q^T E Q (B,m) for positive semi-definite E: not negative."""
        ...

    def tracking_qr(self, V: Tensor, K: Tensor, U: Tensor) -> Tensor:
        """Return Q of qr(V) for V = Phi U (B,n,r), Phi positive semi-definite, K = U^T V, U orthonormal columns."""
        ...

    def refresh_basis(self, L: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(L Q) for symmetric L and an orthogonal basis Q (B,m,m)."""
        ...

    def refresh_coordinates(self, S: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(S Q) for symmetric S and any invertible Q (B,r,r)."""
        ...
