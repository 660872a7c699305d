"""The primitives over which the batched steps are written, and the direction that they lead to.

A backend implements :class:`Primitives`; the steps call nothing else but elementwise PyTorch.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from prokl.algorithm.settings import Hyper
from prokl.pair import Operand

State = dict[str, Tensor]
"""Stacked state of B matrices; keys as in :mod:`prokl.algorithm.reference`."""


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
    """The new trust and, for "auto", lambda_0 (B,); empty without a bound."""
    bounded: Tensor | None
    """(B,) bool: whether the gradient, or a direction of a factor, was bounded; None without a bound."""
    evident: Tensor | None
    """(B,) bool: whether the gradient is evidence; where False, all but ALWAYS_MOVE stays. None for True."""


class Residual(NamedTuple):
    """The momentum gradient beside the subspace."""

    G_hat_perp: Operand
    """G^ - G^ U U^T (B,m,n)."""
    size: Tensor
    """Its squared norm, as parts (B,k) that add up."""
    whole: Tensor
    """That of G^, likewise."""
    noise: float
    """Size over whole up to which it may be rounding alone."""

    def negligible(self) -> Tensor:
        """Return (B,) bool, True where it is rounding noise: Newton-Schulz would inflate that to a full step."""
        return self.size.sum(dim=1) <= self.noise * self.whole.sum(dim=1)


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

    def operands(self, t: Tensor, u: Tensor) -> tuple[Operand, Operand]:
        """Return the :meth:`operand` of both."""
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

    def product_operand(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: float = 1.0
    ) -> Operand:
        """Return the :meth:`operand` of alpha left right + C: (B,m,k), (B,k,n), (B,m,n)."""
        ...

    def symmetric_product(
        self, A: Operand, /, *, C: Tensor | None = None, alpha: float | Tensor = 1.0, beta: float | Tensor = 1.0
    ) -> Tensor:
        """Return alpha A A^T + beta C: (B,m,k), symmetric (B,m,m)."""
        ...

    def gram(self, X: Tensor, scale: Tensor | None, /) -> Tensor:
        """Return scale^2 X X^T: (B,m,k), (B,) or None for 1, symmetric (B,m,m)."""
        ...

    def spectral_operand(self, Q: Tensor, a: Tensor) -> Operand:
        """Return the :meth:`operand` of Q diag(a) Q^T: (B,m,m), (B,m) not negative, symmetric (B,m,m)."""
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

    def shifted_polynomial(
        self, left: Tensor, right: Tensor, /, *, C: Tensor, alpha: float, beta: float, shift: float
    ) -> tuple[Tensor, Tensor]:
        """Return D as :meth:`symmetric_polynomial` does, and D + shift I."""
        ...

    def congruence(self, L: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q^T L Q, symmetric, and L Q (B,m,m) for symmetric L and any Q (B,m,m)."""
        ...

    def project(self, G: Tensor, M: Tensor, U: Operand, active: Tensor | None) -> tuple[Tensor, Tensor, Operand]:
        """Return G U and M U (B,m,r) of G, M (B,m,n) and U (B,n,r), and the operand of G U."""
        ...

    def row_energies(self, Q: Operand, G_perp: Operand, E: Tensor) -> Tensor:
        """Return diag(Q^T E Q) (B,m), not negative, or parts (B,k,m) that add up to it.

        Of Q (B,m,m), G_perp (B,m,n), E = G_perp G_perp^T (B,m,m). It is also the squared norms of the rows of
        Q^T G_perp, which nothing cancels in: what pairs need.
        """
        ...

    def admit(self, A: Tensor, QtG: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
        """Decide about a gradient by its whitened sizes, and do the eigenvalue EMA of what is left of it.

        Algorithm 2 (3) with :mod:`prokl.algorithm.evidence`; in PyTorch :func:`prokl.algorithm.admission.admit`.

        Args:
            A: Q_L^T G~ Q_S (B,m,r).
            QtG: Q_L^T G~ (B,m,r).
            e_res: diagonal of Q_L^T G_perp G_perp^T Q_L, as :meth:`row_energies` gives it.
            state: before the step.
            h: hyper-parameters; without ``clip_threshold`` nothing is decided.
            n: long side, above r.
        """
        ...

    def momentum(
        self,
        G: Tensor,
        M: Tensor,
        G_tilde: Tensor,
        M_tilde: Tensor,
        U: Operand,
        momentum: float,
        weights: tuple[float, float, float],
        scale: Tensor | None,
        active: Tensor | None,
        complement: bool,
    ) -> tuple[Tensor, Operand, Residual | None]:
        """Update the momentum, M <- momentum M + g c G, and split G^ = a c G + b M into its projection and the rest.

        Args:
            G: (B,m,n); may be overwritten. M: (B,m,n) in the state's dtype; likewise.
            G_tilde: G U (B,m,r). M_tilde: M U (B,m,r), of the old M.
            U: (B,n,r).
            momentum: weight of the old M. weights: (g, a, b).
            scale: c (B,), or None for 1.
            active: see above.
            complement: whether the rest is wanted.

        Returns:
            The new M, which may be M itself; the operand of G^ U (B,m,r), linear in G and the old M; the rest of G^, or
            None.
        """
        ...

    def precondition(self, P: Operand, G_par: Operand, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
        """Return alpha P G_par Q_S diag(a_S) Q_S^T: (B,m,m), (B,m,r), (B,r,r), (B,r) -> (B,m,r)."""
        ...

    def cut(
        self, t: Tensor, largest: float, dtype: torch.dtype, bounded: Tensor, clipped: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return t (B,m,k) in ``dtype``, brought down to the norm ``largest`` where it is beyond, and how often it was.

        The latter is the count ``clipped`` (B,), one more where t was beyond or ``bounded`` (B,), bool, is set. Norms
        are in float64 where there is one: squares of whitened float32 may overflow.
        """
        ...

    def whiten(self, P: Operand, residual: Residual, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return X = P G^_perp (B,m,n) in ``dtype``, and the factor (B,) that makes its Frobenius norm 1.

        The factor is None where X has been multiplied by it. It is 0 where G^_perp is negligible, X zero, or so small
        that the square of its norm is below the dtype's smallest normal number.
        """
        ...

    def samples(
        self, GQ: Tensor, QtG: Tensor, a: Roots, scale: Tensor | None, weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whiten what the factors' EMAs are made of: c G~ Q_S a_S, Z = a_L c Q_L^T G~, and weight a_L Z.

        Args:
            GQ: G~ Q_S (B,m,r). QtG: Q_L^T G~ (B,m,r).
            a: inverse roots.
            scale: c (B,), or None for 1.
            weight: of the last.
        """
        ...

    def factor_ema(self, L: Tensor, X: Tensor, E: Tensor, tail: Tensor, beta: float, alpha: float) -> Tensor:
        """Return beta L + alpha X X^T + tail E (B,m,m): the EMA of a factor; X (B,m,r), E may be overwritten."""
        ...

    def coordinates_ema(self, S: Tensor, Z: Tensor, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
        """Return S_+ = beta S + alpha Z Z^T (B,r,r), the EMA of a factor, and beta S_+ + alpha Z Z^T; Z (B,r,m)."""
        ...

    def track(self, G_perp: Operand, Y: Operand, K: Tensor, U: Tensor, alpha: float | Tensor) -> Tensor:
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
