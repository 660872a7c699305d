"""The algebra in plain PyTorch: for a CPU, for a GPU without Triton, and to test kernels by.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm import evidence
from prokl.algorithm.algebra import Algebra, Factor, Scale
from prokl.algorithm.klshampoo import KLShampooStages
from prokl.algorithm.method import Batched
from prokl.algorithm.shapes import widest
from prokl.algorithm.stages import ProKLShampooStages
from prokl.backends import qr

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


def per_matrix(scale: Scale) -> Scale:
    """Return a scale so that it broadcasts over matrices."""
    return scale[:, None, None] if isinstance(scale, Tensor) else scale


class TorchAlgebra(Algebra):
    """PyTorch's form of the algebra.

    Args:
        host_readable: True if reading a value on the host costs nothing (a CPU); QR is then LAPACK's Householder,
            which elsewhere would factor one matrix after another.
    """

    name = "torch"

    def __init__(self, host_readable: bool) -> None:
        self.host_readable = host_readable

    def product(
        self, left: Tensor, right: Tensor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C."""
        if isinstance(alpha, Tensor) or isinstance(beta, Tensor):
            D = left @ right * per_matrix(alpha)
            return D if C is None else D + C * per_matrix(beta)
        if C is not None:
            return torch.baddbmm(C, left, right, beta=beta, alpha=alpha)
        return left @ right if alpha == 1 else alpha * (left @ right)

    def symmetric_product(
        self, A: Tensor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha A A^T + beta C."""
        return self.symmetric_polynomial(A, A.mT, C=C, alpha=alpha, beta=beta)

    def symmetric_polynomial(
        self, left: Tensor, right: Tensor, /, *, C: Tensor | None = None, alpha: Scale = 1.0, beta: Scale = 1.0
    ) -> Tensor:
        """Return alpha left right + beta C, which is symmetric: on a CPU the panels up to the diagonal."""
        if not (self.host_readable and _pays(left)):
            return self.product(left, right, C=C, alpha=alpha, beta=beta)
        m = left.shape[-2]
        D = left.new_empty((left.shape[0], m, m))
        for rows in _panels(m):
            C_panel = None if C is None else C[:, rows, : rows.stop]
            # A result of its own: batched BLAS takes no strided one.
            panel = self.product(left[:, rows], right[:, :, : rows.stop], C=C_panel, alpha=alpha, beta=beta)
            D[:, rows, : rows.stop] = panel
            D[:, : rows.start, rows] = panel[:, :, : rows.start].mT
        return D

    def spectral(self, Q: Tensor, a: Tensor) -> Factor:
        """Return Q diag(a) Q^T."""
        return self.symmetric_product(Q * a.sqrt()[:, None, :])

    def congruence(self, L: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q^T L Q, symmetric to rounding, and L Q."""
        A = L @ Q
        return Q.mT @ A, A

    def norm(self, t: Tensor) -> Tensor:
        """Return Frobenius norms in the widest dtype: on a CPU in that of t, unless their squares leave its range.

        PyTorch would write t once more in the wider dtype there.
        """
        if self.host_readable and t.dtype == torch.float32:
            norms, info = torch.linalg.vector_norm(t, dim=(-2, -1)), torch.finfo(t.dtype)
            least = (t[0].numel() * info.tiny / info.eps) ** 0.5  # what vanished is nothing beside it
            if bool(((norms > least) & norms.isfinite()).all()):
                return norms.to(widest(t.device))
        return evidence.norm(t)

    def diagonal(self, Q: Tensor, E: Tensor) -> Tensor:
        """Return the diagonal of Q^T E Q."""
        if self.host_readable and _pays(E):
            diagonal = torch.zeros(Q.shape[0], Q.shape[-1], dtype=E.dtype, device=E.device)
            for rows in _panels(E.shape[-1]):
                EQ = E[:, rows, rows] @ Q[:, rows]
                # What lies left of the diagonal lies above it, too.
                EQ.baddbmm_(E[:, rows, : rows.start], Q[:, : rows.start], alpha=2)
                diagonal += EQ.mul_(Q[:, rows]).sum(dim=-2)
        else:
            diagonal = (E @ Q).mul_(Q).sum(dim=-2)
        return diagonal.clamp_(min=0)  # rounding may leave a vanishing energy negative

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


class TorchStages(TorchAlgebra, ProKLShampooStages):
    """Pro-KLShampoo's stages as they are written, in PyTorch."""


class TorchKLStages(TorchAlgebra, KLShampooStages):
    """KL-Shampoo's, likewise."""


STAGES: dict[str, Callable[[bool], Batched[Any]]] = {"pro-klshampoo": TorchStages, "kl-shampoo": TorchKLStages}
