"""Batched QR by the CUDA extension: checked arguments, verdicts that stay on the device, torch custom operators.

The methods are those of :mod:`prokl.backends.qr`; here each matrix's own state, kept on the device, chooses a further
pass of Cholesky QR, a shift or Householder's QR, so that nothing is read on the host and a CUDA graph can be captured.

Dimension key: B matrices, n rows, k columns, k <= n.
"""

from __future__ import annotations

from enum import IntFlag
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prokl.backends import extension
from prokl.backends.qr import Product

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
LIMIT = 65535
"""Matrices of a batch at most: the blocks of a launch in its third direction."""
ROWS = 64 * 65535
"""Rows of a matrix at most: 64 to a block in the second direction."""


class Used(IntFlag):
    """Bits of :attr:`Factorisation.used`; the number of Cholesky QR passes is ``used >> 8``."""

    SHIFTED = 2
    """tracking_qr factored V + delta U, semidefinite_qr S + delta I; either differs by at most 4 k eps of its norm."""
    RAISED = 4
    """A Cholesky pivot fell below about 1e-4 of its column's squared norm, nearly dependent, and was raised."""
    HOUSEHOLDER = 8
    """Cholesky QR did not end in orthonormal columns, Householder's QR took its place."""
    NONFINITE = 16
    """The matrix, or K, has NaN or infinity: Q is NaN, in tracking_qr U."""


class Factorisation(NamedTuple):
    """Q of a QR and how it came about."""

    Q: Tensor
    """(B,n,k), orthonormal columns, signed so that R = Q^T A has no negative element on its diagonal."""
    used: Tensor
    """(B,) int32: bits of :class:`Used`, bit 0 (always set) and passes."""
    orthogonality: Tensor
    """(B,) float32: ||Q^T Q - I||_F as measured on the device; NaN for a matrix that is not finite."""


def passes(used: Tensor) -> Tensor:
    """Return how many passes of Cholesky QR each matrix took (B,)."""
    return used >> 8


def qr(A: Tensor) -> Factorisation:
    """Return Q of the QR of any A (B,n,k): Cholesky QR of its scaled columns, Householder where that fails.

    Args:
        A: float32 or float64, on a device that the extension runs on, neighbours in a row side by side in memory.

    Raises:
        ValueError, TypeError: the argument is not of that form, or the extension cannot run there.
    """
    return Factorisation(*torch.ops.prokl.qr(A))


def tracking_qr(V: Tensor, K: Tensor, U: Tensor) -> Factorisation:
    """Return Q of the QR of V = Phi U, Phi positive semi-definite, given K = U^T V (Algorithm 2 (4)).

    V chol(K)^-T has nearly orthogonal columns, which Cholesky QR finishes. Where K is singular to working precision
    Phi + delta I takes the place of Phi; where V is not finite Q is U.

    Args:
        V: (B,n,k). K: (B,k,k), lower triangle. U: (B,n,k), orthonormal columns.

    Raises:
        ValueError, TypeError: as :func:`qr`, or shapes that do not belong together.
    """
    return Factorisation(*torch.ops.prokl.tracking_qr(V, K, U))


def semidefinite_qr(S: Tensor) -> Factorisation:
    """Return Q of the QR of a symmetric positive semi-definite S (B,k,k), which is that of its Cholesky factor.

    Args:
        S: symmetric.

    Raises:
        ValueError, TypeError: as :func:`qr`, or S is not square.
    """
    return Factorisation(*torch.ops.prokl.semidefinite_qr(S))


def track(V: Tensor, K: Tensor, U: Tensor) -> Tensor:
    """Return Q of :func:`tracking_qr`, whatever the tensors' layout."""
    return tracking_qr(V.contiguous(), K.contiguous(), U.contiguous()).Q


def refresh_basis(L: Tensor, Q: Tensor, mm: Product = torch.matmul) -> Tensor:
    """Return Q of qr(L Q) (Algorithm 2 (5)) for symmetric L and a basis Q (B,m,m): Q qr(Q^T L Q).Q.

    Q is re-orthonormalised first, which costs one Gram matrix where it is orthonormal: rounding would add up from
    refresh to refresh, and in half-precision storage it is none. Where L is not finite Q is kept.
    """
    Q = qr(Q.contiguous()).Q
    turned, used, _ = semidefinite_qr(mm(Q.mT, mm(L, Q)).contiguous())
    return _where_finite(used, mm(Q, turned), Q)


def refresh_coordinates(S: Tensor, Q: Tensor, mm: Product = torch.matmul) -> Tensor:
    """Return Q of qr(S Q) for symmetric S and any Q (B,r,r), no basis between refreshes; Q where S is not finite."""
    fresh, used, _ = qr(mm(S, Q).contiguous())
    return _where_finite(used, fresh, Q)


def _where_finite(used: Tensor, fresh: Tensor, kept: Tensor) -> Tensor:
    return torch.where(((used & int(Used.NONFINITE)) == 0)[:, None, None], fresh, kept)


def _check(name: str, t: Tensor, like: Tensor, shape: tuple[int, ...]) -> None:
    if t.dtype not in DTYPES:
        raise TypeError(f"Invalid {name}.dtype={t.dtype}: must be one of {tuple(DTYPES)}. Convert with {name}.float().")
    if t.dtype != like.dtype or t.device != like.device:
        raise ValueError(
            f"Invalid {name}: {t.dtype} on {t.device}; must be {like.dtype} on {like.device} as the first argument is."
        )
    if tuple(t.shape) != shape:
        raise ValueError(f"Invalid {name}.shape={tuple(t.shape)}: must be {shape}.")
    if t.numel() > 0 and t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"Invalid {name}.stride()={t.stride()}: must end in 1. Pass {name}.contiguous().")


def _sizes(name: str, A: Tensor, square: bool = False) -> tuple[int, int, int]:
    if A.dim() != 3:
        raise ValueError(f"Invalid {name}.shape={tuple(A.shape)}: must have 3 dimensions, (B,n,k).")
    B, n, k = A.shape
    if k < 1 or n < k or (square and n != k):
        bound = "(B,k,k) with k >= 1" if square else "(B,n,k) with n >= k >= 1"
        raise ValueError(f"Invalid {name}.shape={tuple(A.shape)}: must be {bound}.")
    if B > LIMIT:
        raise ValueError(f"Invalid {name}.shape={tuple(A.shape)}: must hold at most {LIMIT} matrices. Split the batch.")
    if n > ROWS:
        raise ValueError(f"Invalid {name}.shape={tuple(A.shape)}: must have at most {ROWS} rows.")
    _check(name, A, A, (B, n, k))
    return B, n, k


def _module(device: torch.device) -> ModuleType:
    reason = extension.unsupported_reason(device)
    if reason is not None:
        raise ValueError(f"Invalid device={device}: {reason}. prokl.backends.qr has the same methods in PyTorch.")
    module, _ = extension.load()
    assert module is not None
    return module


def _where(t: Tensor) -> tuple[int, int, int]:
    return t.data_ptr(), t.stride(0), t.stride(1)


def _outputs(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B = A.shape[0]
    return (
        torch.empty(A.shape, dtype=A.dtype, device=A.device),
        torch.empty(B, dtype=torch.int32, device=A.device),
        torch.empty(B, dtype=torch.float32, device=A.device),
    )


def _run(name: str, sizes: tuple[int, int, int], *matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Call the extension's function on the current stream of the matrices' device."""
    device = matrices[0].device
    module = getattr(_module(device), DTYPES[matrices[0].dtype])
    Q, used, orthogonality = _outputs(matrices[0])
    if sizes[0] == 0:
        return Q, used, orthogonality
    on_gpu = device.type == "cuda"
    # The allocator orders the workspace's next use after this one: both are on the current stream.
    workspace = torch.empty(module.workspace_bytes(*sizes), dtype=torch.uint8, device=device)
    arguments = [*map(_where, (*matrices, Q)), used.data_ptr(), orthogonality.data_ptr(), workspace.data_ptr()]
    with torch.cuda.device(device if on_gpu else -1):
        stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
        getattr(module, name)(*sizes, *arguments, stream)
    return Q, used, orthogonality


@torch.library.custom_op("prokl::qr", mutates_args=())
def _qr(A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _run("qr", _sizes("A", A), A)


@torch.library.custom_op("prokl::tracking_qr", mutates_args=())
def _tracking_qr(V: Tensor, K: Tensor, U: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    B, n, k = _sizes("V", V)
    _check("K", K, V, (B, k, k))
    _check("U", U, V, (B, n, k))
    return _run("tracking_qr", (B, n, k), V, K, U)


@torch.library.custom_op("prokl::semidefinite_qr", mutates_args=())
def _semidefinite_qr(S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _run("semidefinite_qr", _sizes("S", S, square=True), S)


def _fake(A: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _outputs(A)


for _operator in (_qr, _tracking_qr, _semidefinite_qr):
    _operator.register_fake(_fake)
