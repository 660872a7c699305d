"""The primitives of the batched step in plain PyTorch: for a CPU, for a GPU without Triton, and to test kernels by.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from prokl.algorithm import evidence
from prokl.algorithm.admission import admit
from prokl.algorithm.primitives import Primitives, Residual, Roots
from prokl.algorithm.shapes import widest
from prokl.backends import qr
from prokl.pair import Operand, Pair, parts, residual_noise

PANEL, PANELS = 64, 8
"""Least rows, and most number, of the panels of a symmetric product that are computed, up to the diagonal: on a CPU,
with products in float32 and float64. Measured (AMD EPYC, one thread, float32, 192 to 1024 rows): panels of 64 and of an
eighth took 0.6 to 0.9 of the full product's time, others of 32 to 192 rows hardly less or more; in bfloat16 panels took
longer than the full product."""


def _pays(left: Tensor) -> bool:
    """Return True if a product with this left factor of which half is known takes less time in panels.

    A thin factor's takes little but the writing.
    """
    return min(left.shape[-2:]) > PANEL and left.dtype in (torch.float32, torch.float64)


def _panels(m: int) -> Iterator[slice]:
    """Yield the rows of every panel."""
    rows = max(PANEL, -(-m // PANELS))
    for start in range(0, m, rows):
        yield slice(start, min(start + rows, m))


def _per_matrix(scale: float | Tensor) -> float | Tensor:
    """Return a scale so that it broadcasts over matrices."""
    return scale[:, None, None] if isinstance(scale, Tensor) else scale


def _product(left: Operand, right: Operand) -> Tensor:
    """Return left right; of pairs the products of their parts, exact in float32, summed in it."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left @ right
    # Of a float32 tensor that holds bfloat16 numbers, as a gradient may, lo is zero.
    left, right = (t if isinstance(t, Pair) else Pair.split(t.float()) for t in (left, right))
    (a, b), *rest = parts(left, right)
    found = a.float() @ b.float()
    for a, b in rest:
        found += a.float() @ b.float()
    return found


class TorchPrimitives(Primitives):
    """PyTorch's form of every primitive.

    Args:
        host_readable: True if reading a value on the host costs nothing (a CPU); QR is then LAPACK's Householder,
            which elsewhere would factor one matrix after another.
        balanced: True if products of float32 are those of pairs: what the kernels compute, to study it; slower.
    """

    name = "torch"
    admit = staticmethod(admit)

    def __init__(self, host_readable: bool, balanced: bool = False) -> None:
        self.host_readable, self.balanced = host_readable, balanced

    def operand(self, t: Tensor) -> Operand:
        """Return a pair of float32 numbers where products are balanced, else the tensor."""
        return Pair.split(t) if self.balanced and t.dtype == torch.float32 else t

    def operands(self, t: Tensor, u: Tensor) -> tuple[Operand, Operand]:
        """Return the operand of both."""
        return self.operand(t), self.operand(u)

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
        """Return alpha left right + beta C."""
        if isinstance(left, Pair) or isinstance(right, Pair) or isinstance(alpha, Tensor) or isinstance(beta, Tensor):
            D = _product(left, right) * _per_matrix(alpha)
            return D if C is None else D + C * _per_matrix(beta)
        if C is not None:
            return torch.baddbmm(C, left, right, beta=beta, alpha=alpha)
        return left @ right if alpha == 1 else alpha * (left @ right)

    def product_operand(
        self, left: Operand, right: Operand, /, *, C: Tensor | None = None, alpha: float = 1.0
    ) -> Operand:
        """Return the operand of alpha left right + C."""
        return self.operand(self.product(left, right, C=C, alpha=alpha))

    def symmetric_product(
        self, A: Operand, /, *, C: Tensor | None = None, alpha: float | Tensor = 1.0, beta: float | Tensor = 1.0
    ) -> Tensor:
        """Return alpha A A^T + beta C."""
        return self.symmetric_polynomial(A, A.mT, C=C, alpha=alpha, beta=beta)

    def gram(self, X: Tensor, scale: Tensor | None, /) -> Tensor:
        """Return scale^2 X X^T."""
        return self.symmetric_product(X, alpha=1.0 if scale is None else scale.square())

    def spectral_operand(self, Q: Tensor, a: Tensor) -> Operand:
        """Return the operand of Q diag(a) Q^T."""
        return self.operand(self.symmetric_product(self.operand(Q * a.sqrt()[:, None, :])))

    def symmetric_polynomial(
        self,
        left: Operand,
        right: Operand,
        /,
        *,
        C: Tensor | None = None,
        alpha: float | Tensor = 1.0,
        beta: float | Tensor = 1.0,
    ) -> Tensor:
        """Return alpha left right + beta C, which is symmetric."""
        if isinstance(left, Tensor) and isinstance(right, Tensor) and self.host_readable and _pays(left):
            return self._mirrored(left, right, C, alpha, beta)
        return self.product(left, right, C=C, alpha=alpha, beta=beta)

    def _mirrored(
        self, left: Tensor, right: Tensor, C: Tensor | None, alpha: float | Tensor, beta: float | Tensor
    ) -> Tensor:
        """Return a symmetric product of which the panels up to the diagonal are computed."""
        m = left.shape[-2]
        found = left.new_empty((left.shape[0], m, m))
        for rows in _panels(m):
            own = None if C is None else C[:, rows, : rows.stop]
            # A result of its own: batched BLAS takes no strided one.
            panel = self.product(left[:, rows], right[:, :, : rows.stop], C=own, alpha=alpha, beta=beta)
            found[:, rows, : rows.stop] = panel
            found[:, : rows.start, rows] = panel[:, :, : rows.start].mT
        return found

    def shifted_polynomial(
        self, left: Tensor, right: Tensor, /, *, C: Tensor, alpha: float, beta: float, shift: float
    ) -> tuple[Tensor, Tensor]:
        """Return D = alpha left right + beta C and D + shift I."""
        D = self.symmetric_polynomial(left, right, C=C, alpha=alpha, beta=beta)
        shifted = D.clone()
        shifted.diagonal(dim1=-2, dim2=-1).add_(shift)
        return D, shifted

    def congruence(self, L: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q^T L Q, symmetric to rounding, and L Q."""
        A = L @ Q
        return Q.mT @ A, A

    def project(self, G: Tensor, M: Tensor, U: Operand, active: Tensor | None) -> tuple[Tensor, Tensor, Operand]:
        """Return G U, M U and the operand of G U."""
        G_tilde = _product(G, U)
        return G_tilde, _product(M.to(G.dtype), U), self.operand(G_tilde)

    def row_energies(self, Q: Operand, G_perp: Operand, E: Tensor) -> Tensor:
        """Return diag(Q^T E Q), by the product that is smaller unless pairs need the other."""
        if isinstance(Q, Pair) or isinstance(G_perp, Pair):
            return _product(Q.mT, G_perp).square().sum(dim=-1)
        if self.host_readable and _pays(E):
            found = torch.zeros(Q.shape[0], Q.shape[-1], dtype=E.dtype, device=E.device)
            for rows in _panels(E.shape[-1]):
                own = E[:, rows, rows] @ Q[:, rows]
                # What lies left of the diagonal lies above it, too.
                own.baddbmm_(E[:, rows, : rows.start], Q[:, : rows.start], alpha=2)
                found += own.mul_(Q[:, rows]).sum(dim=-2)
        else:
            found = (E @ Q).mul_(Q).sum(dim=-2)
        return found.clamp_(min=0)  # rounding may leave a vanishing energy negative

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
        """Update the momentum and split the momentum gradient.

        A CPU pays more for fresh memory than for arithmetic on it, so that G and, where all step and the dtype is
        G's, M are overwritten.
        """
        g, a, b = weights
        stored = M.dtype
        if scale is not None and not (self.host_readable and bool((scale == 1).all())):
            G, G_tilde = G.mul_(scale[:, None, None]), G_tilde * scale[:, None, None]
        par = torch.add((a + b * g) * G_tilde, M_tilde, alpha=b * momentum)
        G_par = self.operand(par)
        if active is not None or M.dtype != G.dtype:
            M = M.to(G.dtype, copy=True)
        M = torch.add(G, M, alpha=momentum, out=M) if g == 1 else M.mul_(momentum).add_(G, alpha=g)
        if not complement:
            return M, G_par, None
        G_hat = torch.add(G if a == 1 else G.mul_(a), M, alpha=b, out=G) if a else torch.mul(M, b, out=G)
        if isinstance(U, Tensor):
            G_hat_perp = G_hat.baddbmm_(par, U.mT, alpha=-1)
        else:
            G_hat_perp = G_hat.sub_(_product(G_par, U.mT))
        if widest(par.device) == torch.float64:
            norms = [torch.linalg.vector_norm(t, dim=(-2, -1)).double() for t in (G_hat_perp, par)]
        else:  # in units of the larger one: squares may overflow
            norms = [evidence.norm(t) for t in (G_hat_perp, par)]
            unit = torch.maximum(*norms).clamp_min(torch.finfo(par.dtype).tiny)
            norms = [t / unit for t in norms]
        size, captured = (t.square()[:, None] for t in norms)
        noise = residual_noise(U, G.dtype, stored) ** 2
        return M, G_par, Residual(self.operand(G_hat_perp), size, size + captured, noise)

    def precondition(self, P: Operand, G_par: Operand, Q_S: Tensor, a_S: Tensor, alpha: float) -> Tensor:
        """Return alpha P G_par Q_S diag(a_S) Q_S^T."""
        return alpha * _product(P, _product(G_par, self.spectral_operand(Q_S, a_S)))

    def cut(
        self, t: Tensor, largest: float, dtype: torch.dtype, bounded: Tensor, clipped: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return t brought down to the norm ``largest``, and the new count."""
        factor = evidence.cut(evidence.norm(t), largest)
        return (t * factor.to(t.dtype)[:, None, None]).to(dtype), clipped + (bounded | (factor < 1))

    def whiten(self, P: Operand, residual: Residual, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return P G^_perp over its Frobenius norm, normalised before it is rounded to ``dtype``."""
        X = _product(P, residual.G_hat_perp)
        norm = torch.linalg.vector_norm(X, dim=(-2, -1))
        # What rounding leaves of squares below the smallest normal number does not normalise X.
        vanishing = norm < torch.finfo(norm.dtype).tiny ** 0.5
        inverse = torch.where(residual.negligible() | vanishing, 0.0, 1 / norm)
        return X.mul_(inverse[:, None, None]).to(dtype), None

    def samples(
        self, GQ: Tensor, QtG: Tensor, a: Roots, scale: Tensor | None, weight: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Whiten what the factors' EMAs are made of."""
        # c twice, not its square, which may leave float32's range.
        S, L = (a.S, a.L) if scale is None else (a.S * scale[:, None], a.L * scale[:, None])
        Z = QtG * L[:, :, None]
        return GQ * S[:, None, :], Z, Z * (weight * a.L)[:, :, None]

    def factor_ema(self, L: Tensor, X: Tensor, E: Tensor, tail: Tensor, beta: float, alpha: float) -> Tensor:
        """Return beta L + alpha X X^T + tail E, in E."""
        return E.mul_(tail[:, None, None]).add_(L, alpha=beta).baddbmm_(X, X.mT, alpha=alpha)

    def coordinates_ema(self, S: Tensor, Z: Tensor, beta: float, alpha: float) -> tuple[Tensor, Tensor]:
        """Return S_+ = beta S + alpha Z Z^T and beta S_+ + alpha Z Z^T."""
        new = torch.baddbmm(S, Z, Z.mT, beta=beta, alpha=alpha)
        return new, torch.lerp(S, new, 1 + beta)

    def track(self, G_perp: Operand, Y: Operand, K: Tensor, U: Tensor, alpha: float | Tensor) -> Tensor:
        """Return Q of qr(alpha G_perp^T Y + U K)."""
        return self.tracking_qr(self.product(G_perp.mT, Y, C=U @ K, alpha=alpha), K, U)

    def tracking_qr(self, V: Tensor, K: Tensor, U: Tensor) -> Tensor:
        """Return Q of qr(V): Householder's on a CPU, elsewhere Cholesky QR preconditioned by K."""
        return qr.householder_qr(V) if self.host_readable else qr.cholesky_tracking(V, K, U)

    def refresh_basis(self, L: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(L Q).

        On a CPU LAPACK's QR of 256 x 256 took as long as 5.4 products of that size (AMD EPYC, two cores), no more than
        what the Cholesky form consists of.
        """
        return qr.householder_qr(L @ Q) if self.host_readable else qr.cholesky_refresh(L, Q)

    def refresh_coordinates(self, S: Tensor, Q: Tensor) -> Tensor:
        """Return Q of qr(S Q)."""
        return qr.householder_qr(S @ Q) if self.host_readable else qr.cholesky_coordinates(S, Q)
