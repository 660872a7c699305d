"""The operations over which the steps are written, on a batch of B matrices of any strides, in plain PyTorch.

A backend overrides an operation by what computes the same faster. The steps call nothing else but elementwise PyTorch.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prokl.algorithm import evidence, qr
from prokl.algorithm.evidence import Admitted
from prokl.algorithm.settings import COMPLEMENT_VARIANTS, POLAR_VARIANTS, SUBSPACE_VARIANTS, Hyper, ProHyper
from prokl.algorithm.shapes import State, widest

Scale = float | Tensor
"""A number, or one for each matrix (B,)."""
Factor = Any
"""A matrix as the products of a backend take it: a tensor, or what the backend has made of one. It has an ``mT``."""

PANEL, PANELS = 64, 8
"""Least rows, and most number, of the panels of a symmetric product that are computed, up to the diagonal: on a CPU,
with products in float32 and float64. Measured (AMD EPYC, one thread, float32, 192 to 1024 rows): panels of 64 and of an
eighth took 0.6 to 0.9 of the full product's time, others of 32 to 192 rows hardly less or more; in bfloat16 panels took
longer than the full product."""


def per_matrix(scale: Scale) -> Scale:
    """Return a scale so that it broadcasts over matrices."""
    return scale[:, None, None] if isinstance(scale, Tensor) else scale


def add_to_diagonal(D: Tensor, shift: float) -> Tensor:
    """Add shift I to matrices in place, rounded once; PyTorch rounds a number to the dtype of the tensor before."""
    diagonal = D.diagonal(dim1=-2, dim2=-1)
    diagonal.copy_(diagonal.to(torch.promote_types(D.dtype, torch.float32)) + shift)
    return D


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


class Algebra:
    """The operations in PyTorch: for a CPU, for a GPU without Triton, and to test kernels by.

    Args:
        host_readable: True if reading a value on the host costs nothing (a CPU); QR is then LAPACK's Householder,
            which elsewhere would factor one matrix after another.
    """

    name = "torch"
    """The backend's name, as ``backend=`` takes it."""

    def __init__(self, host_readable: bool) -> None:
        self.host_readable = host_readable

    def second_stream(self, t: Tensor) -> AbstractContextManager[None]:
        """Return a context: work launched inside it does not wait for work launched after this call.

        Launches after the context wait for both. Keep what it reads until its end.

        Args:
            t: on the device of all that it reads.
        """
        return nullcontext()

    # Products.

    def operand(self, t: Tensor) -> Factor:
        """Return a large factor as products take it, for several of them."""
        return t

    def operands(self, x: Tensor, y: Tensor) -> tuple[Factor, Factor]:
        """Return two factors as :meth:`operand` does."""
        return self.operand(x), self.operand(y)

    def rounded(self, factor: Factor) -> Tensor:
        """Return a factor in bfloat16 where products are balanced, for what errs by less than Newton-Schulz in it.

        L is averaged in its eigenbasis: rounding moves what rows i and j make of L by a part of sqrt(L_ii L_jj), so
        that small eigenvalues keep their digits.
        """
        return factor

    def product(
        self, left: Factor, right: Factor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: float = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C: (B,m,k), (B,k,n), (B,m,n)."""
        if isinstance(alpha, Tensor):
            D = (left @ right).mul_(per_matrix(alpha))
            return D if C is None else D.add_(C if beta == 1 else C * beta)
        if C is not None:
            return torch.baddbmm(C, left, right, beta=beta, alpha=alpha)
        D = left @ right
        return D if alpha == 1 else D.mul_(alpha)

    def product_as_factor(self, left: Factor, right: Factor) -> Factor:
        """Return left right as products take it."""
        return self.operand(self.product(left, right))

    def symmetric_product(
        self, A: Factor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: float = 1.0
    ) -> Tensor:
        """Return alpha A A^T + beta C: (B,m,k), symmetric (B,m,m)."""
        return self.symmetric_polynomial(A, A, C=C, alpha=alpha, beta=beta)

    def symmetric_products(
        self, A: Tensor, E: Tensor, /, *, C: Tensor, alpha: Tensor, gamma: float, beta: float
    ) -> Tensor:
        """Return alpha A A^T + gamma E E^T + beta C: (B,m,k), (B,m,l), symmetric (B,m,m); alpha (B,), gamma above 0."""
        return self.symmetric_product(A, C=self.symmetric_product(E, C=C, beta=beta, alpha=gamma), alpha=alpha)

    def symmetric_polynomial(
        self,
        left: Factor,
        right: Factor,
        /,
        *,
        C: Tensor | None = None,
        alpha: Scale = 1.0,
        beta: float = 1.0,
        shift: float | None = None,
    ) -> Tensor:
        """Return alpha left right^T + beta C + shift I (B,m,m) where that is symmetric, as of polynomials of a matrix.

        A CPU computes the panels up to the diagonal, unless a thin factor's product takes little but the writing.
        """
        if shift is not None:
            D = self.symmetric_polynomial(left, right, C=C, alpha=alpha, beta=beta)
            return add_to_diagonal(D, shift)
        single = isinstance(left, Tensor) and left.dtype in (torch.float32, torch.float64)
        if not (self.host_readable and single and min(left.shape[-2:]) > PANEL):
            return self.product(left, right.mT, C=C, alpha=alpha, beta=beta)
        m = left.shape[-2]
        D, size = left.new_empty((left.shape[0], m, m)), max(PANEL, -(-m // PANELS))
        for start in range(0, m, size):
            rows = slice(start, min(start + size, m))
            C_panel = None if C is None else C[:, rows, : rows.stop]
            # A result of its own: batched BLAS takes no strided one.
            panel = self.product(left[:, rows], right[:, : rows.stop].mT, C=C_panel, alpha=alpha, beta=beta)
            D[:, rows, : rows.stop] = panel
            D[:, : rows.start, rows] = panel[:, :, : rows.start].mT
        return D

    def extrapolated(
        self, A: Factor, /, *, C: Tensor, alpha: float, beta: float, ahead: float
    ) -> tuple[Tensor, Tensor]:
        """Return D as :meth:`symmetric_product` does, and D + ahead (D - C)."""
        D = self.symmetric_product(A, C=C, alpha=alpha, beta=beta)
        return D, torch.lerp(C, D, 1 + ahead)

    def turned(self, T: Tensor, S: Tensor, Q_S: Tensor) -> tuple[Tensor, Tensor]:
        """Return T^T S T and T^T Q_S (B,r,r)."""
        return self.product(T.mT, self.product(S, T)), self.product(T.mT, Q_S)

    # Newton-Schulz.

    def normalised_gram(self, X: Tensor, scale: Any, size: Tensor, /) -> tuple[Tensor, Scale, Tensor]:
        """Return scale^2 X X^T for the factor that :meth:`momentum` leaves beside X, None for 1.

        Returns:
            The product (B,m,m) of X (B,m,n); the factor's square (B,), or 1; and size (B,) times the factor.
        """
        square = 1.0 if scale is None else scale.square()
        return self.symmetric_product(X, alpha=square), square, size if scale is None else scale * size

    def shifted_polynomial(
        self, left: Tensor, right: Tensor, /, *, C: Tensor, alpha: float, beta: float, shift: float
    ) -> tuple[Tensor, Tensor]:
        """Return D as :meth:`symmetric_polynomial` does, and D + shift I."""
        D = self.symmetric_polynomial(left, right, C=C, alpha=alpha, beta=beta)
        return D, add_to_diagonal(D.clone(), shift)

    # Pro-KLShampoo's passes over m x n, all in the eigenbasis of L.

    def projections(self, G: Tensor, M: Tensor, U: Factor, Q_S: Tensor) -> Projected:
        """Return G, M (B,m,n) on the subspace, by U (B,n,r), and in the basis Q_S (B,r,r) of S."""
        G, M = self.product(G, U), self.product(M.to(G.dtype), U)
        return Projected(G, M, self.product(G, Q_S), self.product(M, Q_S), self.operand(G))

    def residual(self, G: Tensor, G_tilde: Factor, U: Factor) -> tuple[Tensor, Tensor]:
        """Return G_perp = G - G~ U^T (B,m,n) :meth:`rounded`, and its rows' energies: (B,m), or parts (B,k,m) of them.

        The difference is formed explicitly: that of Gram matrices loses accuracy as U captures more of the energy (in
        float32, 64 x 256 and r = 32: 2.7, 13 and 50 times the error at 50, 90 and 99 %).
        """
        G_perp = self.product(G_tilde, U.mT, C=G, alpha=-1.0)
        return self.rounded(G_perp), self.row_norms(G_perp).square()

    def admit(self, A: Tensor, G_tilde: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
        """Decide about a gradient by its whitened sizes, and do the eigenvalue EMA of what is left of it.

        Algorithm 2 (3) with :mod:`prokl.algorithm.evidence`.

        Args:
            A: G~ Q_S (B,m,r). G_tilde: (B,m,r). e_res: of :meth:`residual`.
            state: before the step.
            h: hyper-parameters; without ``clip_threshold`` nothing is decided.
            n: long side, above r.
        """
        return evidence.admit(A, G_tilde, e_res, state, h, n)

    def subspace_parts(
        self, of: Projected, admitted: Admitted, h: ProHyper, Q_S: Tensor, alpha: float
    ) -> tuple[Factor, Any, Tensor, Tensor, Factor]:
        """Return all that (1) to (4) take of a gradient on the subspace, once it is admitted.

        Returns:
            Five matrices (B,m,r):
            G^par = G^ U = (a + b g) c G~ + b mu M~, as products take it.
            D_sub = alpha diag(a_L) G^par S^-1/2, for :meth:`bounded_product`; None where the variant has no such part.
            A diag(c_S), :meth:`rounded`. Z = diag(c_L) G~. Y = diag(c_L) Z, as products take it.
        """
        (g, a, b), c, c_L, D_sub = h.gradient_weights, admitted.scale, admitted.c_L[:, :, None], None
        of_G = per_matrix(a + b * g if c is None else (a + b * g) * c)
        G_par = torch.add(of.G * of_G, of.M, alpha=b * h.momentum)
        if h.variant in SUBSPACE_VARIANTS:
            G_par_white = torch.add(of.A * of_G, of.B, alpha=b * h.momentum).mul_(admitted.used.S[:, None, :])
            D_sub = self.product(G_par_white, Q_S.mT, alpha=alpha).mul_(admitted.used.L[:, :, None])
        Z = of.G * c_L
        A_white = self.rounded(of.A * admitted.c_S[:, None, :])
        return self.operand(G_par), D_sub, A_white, Z, self.operand(Z * c_L)

    def momentum(
        self, G: Tensor, M: Tensor, G_par: Factor, U: Factor, admitted: Admitted, h: ProHyper, active: Tensor | None
    ) -> tuple[Tensor, Factor | None, Any]:
        """Do M <- mu M + g c G and, with G^ = a c G + b M, X = diag(a_L) (G^ - G^par U^T).

        Args:
            G: (B,m,n), overwritten. M: (B,m,n), overwritten save the rows of it that are not ``active``.
            G_par: G^ U (B,m,r). U: (B,n,r).
            admitted: c and a_L of it. h: hyper-parameters.
            active: (B,) bool, the matrices that step; None: all.

        Returns:
            M; X, in the dtype that Newton-Schulz takes, None where the complement takes no part in the direction; and
            1 / ||X|| (B,), which is still to be applied, or None where X has it. A backend may return what its own
            :meth:`normalised_gram` computes it from. It is 0, or X is, where the residual may be rounding alone or X
            vanishes: Newton-Schulz would inflate it to a full step.
        """
        (g, a, b), stored, dtype, c = h.gradient_weights, M.dtype, G.dtype, admitted.scale
        if c is not None:
            G = G.mul_(per_matrix(c))
        if active is not None or stored != dtype:
            M = M.to(dtype, copy=True)
        M = torch.add(G, M, alpha=h.momentum, out=M) if g == 1 else M.mul_(h.momentum).add_(G, alpha=g)
        if h.variant not in COMPLEMENT_VARIANTS:
            return M, None, None
        G_hat = torch.add(G if a == 1 else G.mul_(a), M, alpha=b, out=G) if a else torch.mul(M, b, out=G)
        X = G_hat.baddbmm_(G_par, U.mT, alpha=-1)
        rows, a_L = self.row_norms(X), admitted.used.L
        norm, size = evidence.norm(rows * a_L, -1), evidence.norm(rows, -1)
        captured = evidence.norm(self.row_norms(G_par), -1)
        negligible = size <= self.noise(U.shape[-2], dtype, stored) * torch.hypot(size, captured)
        # Squares below the smallest normal number are rounding, which does not normalise X.
        inverse = torch.where(negligible | (norm < torch.finfo(dtype).tiny ** 0.5), 0.0, 1 / norm)
        if h.variant not in POLAR_VARIANTS:
            return M, self.operand(X.mul_(a_L[:, :, None])), inverse.to(dtype)
        return M, X.mul_((inverse[:, None] * a_L).to(dtype)[:, :, None]).to(h.ns_dtype), None

    def bounded_product(
        self,
        left: Factor,
        T: Any,
        /,
        *,
        largest: float,
        bounded: Tensor | None,
        clipped: Tensor | None,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor | None]:
        """Return left T (B,m,k) for T of :meth:`subspace_parts`, brought down to the norm ``largest`` if it is beyond.

        Also ``clipped`` (B,), plus 1 where T was beyond, and where ``bounded`` (B,), bool; where that is None nothing
        is brought down. One that is not finite, as of a momentum from gradients 1e37 times larger, makes zeros, as one
        whose product may not be: rows of ``left`` have norm 1, so that its norm bounds all entries. Norms are in
        float64 where there is one: squares of whitened float32 may overflow.
        """
        if bounded is not None and clipped is not None:
            norm = evidence.norm(T)
            down = torch.where(norm < torch.finfo(T.dtype).max / 2, largest / norm, 0.0)  # NaN is not below
            factor = torch.where(norm <= largest, 1.0, down).to(T.dtype)
            T = T.mul_(per_matrix(factor)).masked_fill_(per_matrix(factor == 0), 0.0)
            clipped = clipped + (bounded | (factor < 1))
        return self.product(left, self.operand(T)).to(dtype), clipped

    def noise(self, n: int, dtype: torch.dtype, stored: torch.dtype) -> float:
        """Return the size of X - (X U) U^T, over that of X, up to which it may be rounding alone.

        Kernels add X U up in tiles of 16 of the n rows of U or more, each time within half a unit in the last place,
        eps / 2 or less, of a whole that grows from zero: within n / 64 eps in all, where the tiles are alike. Where U
        is stored in less, what it loses there, twice, up to half a unit in the last place each. The products' own
        roundings may leave 100 eps.
        """
        return max(max(100, n / 64) * torch.finfo(dtype).eps, torch.finfo(stored).eps)

    def row_norms(self, t: Tensor) -> Tensor:
        """Return the norms (B,m) of rows in the widest dtype: on a CPU in that of t, unless squares leave its range.

        PyTorch would write t once more in the wider dtype there.
        """
        if self.host_readable and t.dtype == torch.float32:
            norms, info = torch.linalg.vector_norm(t, dim=-1), torch.finfo(t.dtype)
            least = (t.shape[-1] * info.tiny / info.eps) ** 0.5  # what vanished is nothing beside it
            sure = (norms > least) & norms.isfinite()
            if bool(sure.all()) or not bool(t[~sure].any()):  # idle rows are zero
                return norms.to(widest(t.device))
        return evidence.norm(t, -1)

    # Factorisations.

    def track(self, G_perp: Tensor, Y: Factor, K: Tensor, U: Tensor, alpha: float) -> Tensor:
        """Return Q (B,n,r) of qr(V) for V = alpha G_perp^T Y + U K.

        V is Phi U with Phi positive semi-definite and K = U^T V, which makes a QR without Householder.

        Args:
            G_perp: (B,m,n), orthogonal to U. Y: (B,m,r).
            K: symmetric (B,r,r). U: (B,n,r), orthonormal columns.
        """
        V = self.product(G_perp.mT, Y, C=self.product(U, K), alpha=alpha)
        return qr.signed_qr(V)[0] if self.host_readable else qr.cholesky_tracking(V, K, U, self.product)

    def semidefinite_qr(self, L: Tensor) -> tuple[Factor, Factor]:
        """Return Q and R of qr(L), as products take them, for a positive semi-definite L (B,m,m).

        On a CPU LAPACK's QR of 256 x 256 took as long as 5.4 products of that size (AMD EPYC, two cores), no more than
        what the Cholesky form consists of.
        """
        if self.host_readable:
            Q, R = qr.signed_qr(L)
            return self.operand(Q), self.operand(R)
        Q, L = self.operands(qr.cholesky_semidefinite(L, self.product), L)
        return Q, self.product_as_factor(Q.mT, L)

    def coordinates_qr(self, S: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(S Q) for symmetric S and any invertible Q (B,r,r)."""
        if self.host_readable:
            return qr.signed_qr(self.product(S, Q))[0]
        return qr.cholesky_coordinates(S, Q, self.product)

    def refreshed(self, F: Tensor, Q_F: Factor) -> tuple[Factor, Tensor, Tensor]:
        """Do (5) of a factor that is kept in its own basis: qr(F_w Q_F) = Q_F qr(F), as F_w Q_F = Q_F F.

        Where F has rows of zeros, the QR leaves them as they are. A step of Newton-Schulz's iteration gives back the
        orthonormality that Q_F loses in many products.

        Args:
            F: the factor in the basis, Q_F^T F_w Q_F (B,k,k), with F_w in the weight's coordinates.
            Q_F: orthonormal columns (B,k,k), as products take them.

        Returns:
            Q = qr(F), as products take it, by which all that is kept in the basis turns; Q_F Q; and Q^T F Q = R Q.
        """
        Q, R = self.semidefinite_qr(F)
        return Q, self.orthonormal(self.product(Q_F, Q)), self.symmetric_polynomial(R, Q.mT)

    def orthonormal(self, Q: Tensor) -> Tensor:
        """Return Q (3 I - Q^T Q) / 2 of nearly orthonormal Q (B,k,k): a step of Newton-Schulz's iteration."""
        return self.product(Q, self.symmetric_product(Q.mT), C=Q, alpha=-0.5, beta=1.5)
