"""The primitives over which the batched steps are written, and the direction that they lead to.

A backend implements :class:`Primitives`; the steps call nothing else but elementwise PyTorch.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from prokl.pair import Operand

State = dict[str, Tensor]
"""Stacked state of B matrices; keys as in :mod:`prokl.algorithm.reference`."""


@dataclass(frozen=True)
class Direction:
    """The direction D = scale Q X + left right^T (B,m,n) as its factors, so that one kernel can form and apply it."""

    X: Tensor | None
    """(B,m,n) in any floating dtype; None when the direction is left right^T alone."""
    Q: Tensor | None = None
    """(B,m,m) in the dtype of X; None is the identity."""
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
        D = self.X if self.Q is None else self.Q @ self.X
        if self.scale is not None:
            own = D is not self.X or D.dtype != self.scale.dtype
            D = D.to(self.scale.dtype)  # the arithmetic dtype
            D = D.mul_(self.scale[:, None, None]) if own else D * self.scale[:, None, None]
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


class Primitives(Protocol):
    """One backend's operations on a batch of B matrices.

    Every operation takes any strides. ``active`` (B,) bool says which matrices step, None that all do; what comes out
    for the others may be anything. A step owns G and M: an operation that says so may overwrite them, save the rows of
    M that are not active.
    """

    name: str
    """As in ``backend=``."""

    def operand(self, t: Tensor) -> Operand:
        """Return what products take of ``t``: a pair of it where they are balanced, elsewhere ``t`` itself.

        A product of two tensors is as exact as their dtype; one with a pair splits the other factor too, unless it is
        bfloat16 and so has nothing to split.
        """
        ...

    def product(
        self,
        left: Operand,
        right: Operand,
        /,
        *,
        C: Tensor | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 1.0,
    ) -> Tensor:
        """Return alpha left right + beta C: (B,m,k), (B,k,n), (B,m,n); alpha and beta are numbers, or (B,)."""
        ...

    def product_operand(self, left: Operand, right: Operand, /, *, C: Tensor, alpha: float = 1.0) -> Operand:
        """Return the :meth:`operand` of alpha left right + C: (B,m,k), (B,k,n), (B,m,n)."""
        ...

    def symmetric_product(
        self, A: Operand, /, *, C: Tensor | None = None, alpha: float | Tensor = 1.0, beta: float | Tensor = 1.0
    ) -> Tensor:
        """Return alpha A A^T + beta C: (B,m,k), symmetric (B,m,m)."""
        ...

    def symmetric_operand(self, A: Operand, /) -> Operand:
        """Return the :meth:`operand` of A A^T: (B,m,k), symmetric (B,m,m)."""
        ...

    def symmetric_polynomial(
        self,
        left: Tensor,
        right: Tensor,
        /,
        *,
        C: Tensor | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 1.0,
    ) -> Tensor:
        """Return alpha left right + beta C for symmetric (B,m,m) that commute, as polynomials of one matrix do."""
        ...

    def congruence(self, L: Tensor, Q: Tensor) -> Tensor:
        """Return Q^T L Q (B,m,m), symmetric, for symmetric L and any Q (B,m,m)."""
        ...

    def project(self, G: Tensor, M: Tensor, U: Operand, active: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return G U and M U (B,m,r) of G, M (B,m,n) and U (B,n,r)."""
        ...

    def row_energies(self, Q: Tensor, G_perp: Operand, E: Tensor) -> Tensor:
        """Return diag(Q^T E Q) (B,m), not negative: Q (B,m,m), G_perp (B,m,n), E = G_perp G_perp^T (B,m,m).

        It is also the squared norms of the rows of Q^T G_perp, which nothing cancels in: what pairs need.
        """
        ...

    def momentum(
        self,
        G: Tensor,
        M: Tensor,
        G_par: Tensor | None,
        U: Operand,
        momentum: float,
        weights: tuple[float, float, float],
        scale: Tensor | None,
        active: Tensor | None,
    ) -> tuple[Tensor, Operand | None, Tensor | None]:
        """Update the momentum, M <- momentum M + g c G, and form the residual of G^ = a c G + b M.

        Args:
            G: (B,m,n); may be overwritten. M: (B,m,n) in the state's dtype; likewise.
            G_par: G^ U (B,m,r), or None when the complement takes no part in the direction.
            U: (B,n,r).
            momentum: weight of the old M. weights: (g, a, b).
            scale: c (B,), or None for 1.
            active: see above.

        Returns:
            The new M, which may be M itself; the operand of G^ - G_par U^T, or None without G_par; (B,) bool, True
            where the latter is rounding noise of G^, or None.
        """
        ...

    def precondition(self, P: Operand, G_par: Tensor, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
        """Return alpha P G_par Q_S diag(a_S) Q_S^T: (B,m,m), (B,m,r), (B,r,r), (B,r) -> (B,m,r)."""
        ...

    def whiten(
        self, P: Operand, G_perp: Operand, negligible: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Return X = P G_perp (B,m,n) in ``dtype``, and the factor (B,) that makes its Frobenius norm 1.

        The factor is None where X has been multiplied by it. It is 0 where X is ``negligible`` (B,), zero, or so small
        that the square of its norm is below the dtype's smallest normal number.
        """
        ...

    def eigenvalue_ema(
        self,
        inv_sqrt_lambda_L: Tensor,
        inv_sqrt_lambda_S: Tensor,
        inv_sqrt_mu: Tensor,
        ell: Tensor,
        rho: Tensor,
        e_res: Tensor,
        *,
        beta2: float,
        n: int,
        eps: Tensor,
        ceiling_L: Tensor,
        ceiling_S: Tensor,
        ceiling_mu: Tensor,
        active: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update the eigenvalues with clip (Algorithm 2 (3)): lambda_L, lambda_S, then mu_perp with the new lambda_L.

        Args:
            inv_sqrt_lambda_L: undamped, clipped lambda_L^-1/2 (B,m).
            inv_sqrt_lambda_S: likewise for lambda_S (B,r).
            inv_sqrt_mu: likewise for mu_perp (B,).
            ell: r * ldiag (B,m): row sums of (Q_L^T G~ Q_S diag(lambda_S^-1/2))^2.
            rho: rdiag (B,r): column means of (diag(lambda_L^-1/2) Q_L^T G~ Q_S)^2.
            e_res: diagonal of Q_L^T G_perp G_perp^T Q_L (B,m).
            beta2: EMA weight, in [0, 1).
            n: long side, above r.
            eps: damping (B,).
            ceiling_L, ceiling_S, ceiling_mu: largest inverse square roots (B,).
            active: see above; the others keep their values bit for bit.

        Returns:
            The new inv_sqrt_lambda_L, inv_sqrt_lambda_S and inv_sqrt_mu, undamped and clipped.
        """
        ...

    def track(self, G_perp: Operand, Y: Tensor, K: Tensor, U: Tensor, alpha: float | Tensor) -> Tensor:
        """Return Q (B,n,r) of qr(V) for V = alpha G_perp^T Y + U K (Algorithm 2 (4)).

        V is Phi U with Phi positive semi-definite and K = U^T V, which makes a QR without Householder.

        Args:
            G_perp: (B,m,n), orthogonal to U. Y: (B,m,r).
            K: symmetric (B,r,r). U: (B,n,r), orthonormal columns.
            alpha: a number, or (B,).
        """
        ...

    def refresh_basis(self, L: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(L Q) for symmetric L and an orthogonal basis Q (B,m,m) (Algorithm 2 (5))."""
        ...

    def refresh_coordinates(self, S: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(S Q) for symmetric S and any invertible Q (B,r,r) (Algorithm 2 (5))."""
        ...
