"""Batched QR without Householder: the CUDA extension's small factorisations, all else in a backend's products.

Q of a QR does not change when the matrix is multiplied on the right by an upper triangular one with a positive
diagonal. A pass of Cholesky QR multiplies columns W by C^-T, W^T W = C C^T; where the pass before has made them nearly
orthonormal the first terms of C^-T do as well, and need no factorisation. Two passes are enough for every matrix that
comes with a Cholesky factor of its own (``tests/test_cuda_qr_parts.py``); a look at the last Gram matrix sends what is
left to Householder's QR. The device decides for each matrix: nothing is read on the host, and a CUDA graph can be
captured.

Dimension key: B matrices, m short side, n rows (long side), k columns, k <= n, r rank.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra, Factor
from prokl.backends import extension
from prokl.backends.device import MOST_MATRICES

DTYPES = {torch.float32: "float32", torch.float64: "float64"}
BLOCK = {torch.float32: 128, torch.float64: 64}
"""Columns that one launch of the extension factors; those of more take several."""
ROWS = 64
"""Rows of a Gram matrix that a block of threads looks at, of those that are more than BLOCK."""
SMALL = 128 * 128
"""Elements of a matrix that Householder's QR takes in one launch: it stays in a processor's shared memory."""
LONG = 1024
"""Rows of a Gram matrix's product; of more rows it is a sum, so that few matrices are many programs."""


class QRStatus(IntFlag):
    """Bits of :attr:`Factorisation.status`."""

    SHIFTED = 2
    """A semi-definite factor was singular: factored with delta I added, at most 4 k eps of its norm."""
    RAISED = 4
    """A Cholesky pivot fell below about 1e-4 of its column's squared norm, nearly dependent, and was raised."""
    HOUSEHOLDER = 8
    """Householder's QR: of a small matrix, or where Cholesky QR did not end in orthonormal columns."""
    NONFINITE = 16
    """The matrix has NaN or infinity: Q is NaN."""
    LOST = 32
    """The factor is indefinite beyond delta, as storing it in half precision may leave it."""


class Kind(IntEnum):
    """The purpose of a Cholesky factorisation, numbered as in ``csrc/interface.h``."""

    PASS = 0
    SETTLE = 1
    SEMIDEFINITE = 2


class Factorisation(NamedTuple):
    """Q of a QR and how it came about."""

    Q: Tensor
    """(B,n,k), orthonormal columns, signed so that R = Q^T A has no negative element on its diagonal."""
    status: Tensor
    """(B,) int32: bits of :class:`QRStatus`."""


def qr(A: Tensor) -> Factorisation:
    """Return Q of the QR of any A (B,n,k): Cholesky QR of its scaled columns, Householder where that fails.

    Args:
        A: float32 or float64, on a device that the extension runs on, neighbours in a row side by side in memory.

    Raises:
        ValueError, TypeError: the argument is not of that form, or the extension cannot run there.
    """
    return Factorisation(*torch.ops.prokl.qr(A))


def track(ops: Algebra, G_perp: Tensor, Y: Factor, K: Tensor, U: Tensor, alpha: float | Tensor) -> Factorisation:
    """Return Q of the QR of V = alpha G_perp^T Y + U K = Phi U, Phi positive semi-definite (Algorithm 2 (4)).

    V chol(K)^-T has nearly orthogonal columns, as K = U^T V. Where K is singular to working precision Phi + delta I
    takes the place of Phi; where V is not finite Q is U.

    Args:
        ops: the products.
        G_perp: (B,m,n), orthogonal to U. Y: (B,m,r).
        K: symmetric (B,r,r). U: (B,n,r), orthonormal columns.
        alpha: a number, or (B,).
    """
    F, shifted, scale, status = torch.ops.prokl.semidefinite_inverse(K.contiguous())
    V = ops.product(G_perp.mT, Y, C=ops.product(U, shifted), alpha=alpha)
    return _orthonormalised(ops, ops.product(V, F, alpha=scale), V, U, status, 2)


def semidefinite_qr(ops: Algebra, L: Tensor) -> Factorisation:
    """Return Q of the QR of a positive semi-definite L (B,m,m), that of C, C C^T = L (Algebra.refreshed).

    Where L is singular to working precision L + delta I takes its place; where it is indefinite beyond that,
    Householder's QR of L; where it is not finite Q is I.
    """
    C, status = torch.ops.prokl.semidefinite_root(L)
    eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device).expand_as(L)
    return _orthonormalised(ops, C, L, eye, status, 2, of_root=True)


def coordinates_qr(ops: Algebra, S: Tensor, Q: Tensor) -> Factorisation:
    """Return Q of qr(S Q) for symmetric S and any Q (B,r,r), no basis between refreshes; Q where S is not finite."""
    return _factorised(ops, ops.product(S, Q), Q)


def _factorised(ops: Algebra, A: Tensor, kept: Tensor | None) -> Factorisation:
    """Return Q of the QR of any A; of one that is not finite ``kept``, or NaN."""
    if A.shape[1] * A.shape[2] <= SMALL:
        Q = torch.empty_like(A, memory_format=torch.contiguous_format)
        return Factorisation(Q, torch.ops.prokl.finish(A, Q, None, kept, None))
    # By powers of two, so that no square over- or underflows and no digit is lost.
    size = torch.linalg.vector_norm(A, ord=torch.inf, dim=-2, keepdim=True).clamp_min_(torch.finfo(A.dtype).tiny)
    W = A / (size / (2 * torch.frexp(size).mantissa))
    return _orthonormalised(ops, W, A, kept, None, 3)


def _orthonormalised(
    ops: Algebra,
    W: Tensor,
    A: Tensor,
    kept: Tensor | None,
    status: Tensor | None,
    passes: int,
    of_root: bool = False,
) -> Factorisation:
    """Return Q of the QR of A (B,n,k), which is that of W, by passes of Cholesky QR of W and a look at the last.

    W may be a product with a root, ``of_root``; ``status`` then has LOST where there is no root. With many columns its
    products are those of large factors: what these round lies far below what the last look lets pass, and the
    basis that Q turns is made orthonormal after it (Algebra.refreshed), as no other one is.
    """
    large = of_root and W.shape[-1] > BLOCK[W.dtype]
    factor: Factor = ops.operand(W) if large else W
    for i in range(passes):
        F, status = torch.ops.prokl.factor(_gram(ops, factor), Kind.PASS if i == 0 else Kind.SETTLE, status)
        factor = (ops.product_as_factor if large and i + 1 < passes else ops.product)(factor, F)
    N = _gram(ops, ops.operand(factor) if large else factor)
    return Factorisation(factor, torch.ops.prokl.finish(A, factor, N, kept, status, of_root))


def _gram(ops: Algebra, W: Factor) -> Tensor:
    """Return W^T W (B,k,k) of contiguous W (B,n,k), or parts (B,p,k,k) that add up to it."""
    B, n, k = W.shape
    least = -(-n // LONG)
    few = isinstance(W, Tensor) and k <= BLOCK[W.dtype]
    parts = next((p for p in range(least, 2 * least + 1) if n % p == 0), 1) if few else 1
    if parts == 1:
        return ops.symmetric_product(W.mT)
    return ops.symmetric_product(W.reshape(B * parts, n // parts, k).mT).view(B, parts, k, k)


def _products(device: torch.device) -> Algebra:
    """Return products that are exact to float32, whatever torch's TF32 switches say."""
    ops = Algebra(host_readable=False)
    if device.type == "cuda":
        from prokl.kernels.product import product  # which need Triton
        from prokl.kernels.symmetric_product import symmetric_product

        vars(ops).update(product=product, symmetric_product=symmetric_product)
    return ops


@lru_cache(maxsize=64)
def _functions(module: ModuleType | None, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """Return the extension's functions; check once that it runs there: driver and device stay what they are."""
    reason = extension.unsupported_reason(device)
    if reason is not None:
        raise ValueError(f"Invalid device={device}: {reason}. prokl.algorithm.qr has the same methods in PyTorch.")
    return getattr(module, DTYPES[dtype])


# Addresses are safe here: torch.library's operators materialise lazy arguments and know no wrappers.
def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _where(t: Tensor | None) -> tuple[int, int, int]:
    """Return where matrices (B,n,k) lie, as the extension takes it; raise if neighbours in a row lie apart."""
    if t is None:
        return 0, 0, 0
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        raise ValueError(f"Invalid matrices' stride()={t.stride()}: must end in 1. Pass them contiguous().")
    return t.data_ptr(), t.stride(0), t.stride(-2)


def _sum(N: Tensor | None) -> tuple[tuple[int, int, int], int, int]:
    """Return where a sum (B,p,k,k), or a single matrix (B,k,k), lies."""
    return _where(N), *((1, 0) if N is None or N.dim() == 3 else (N.shape[1], N.stride(1)))


def _launch(function: str, like: Tensor, *arguments: Any) -> None:
    """Call the extension on the current stream of a tensor's device, if there are matrices at all.

    The allocator orders the next use of what is freed here after this one: both are on the current stream.
    """
    call = getattr(_functions(extension.load()[0], like.device, like.dtype), function)
    if like.shape[0] == 0:
        return
    if like.shape[0] > MOST_MATRICES:
        raise ValueError(
            f"Invalid shape={tuple(like.shape)}: must hold at most {MOST_MATRICES} matrices. Step a larger stack by "
            'backend="torch".'
        )
    extension.enqueue(call, like.device, *arguments)


def _new(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)


def _factor_into(
    N: Tensor,
    kind: Kind,
    C: Tensor | None,
    F: Tensor | None,
    invert: bool,
    shifted: Tensor | None = None,
    scale: Tensor | None = None,
    before: Tensor | None = None,
) -> Tensor:
    """Factor N by the extension; the arguments are those of ``Factors`` in ``csrc/interface.h``."""
    B, k = N.shape[0], N.shape[-1]
    status, diagonal = _new(N, B, dtype=torch.int32), _new(N, B, k)
    matrices = (_sum(N), int(kind), _where(C), _where(F), invert, _where(shifted))
    _launch("factor", N, B, k, *matrices, _at(scale), diagonal.data_ptr(), _at(before), status.data_ptr())
    return status


@torch.library.custom_op("prokl::factor", mutates_args=("N",))
def _factor(N: Tensor, kind: int, status: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what multiplies columns with the Gram matrix N from the right, and what was done; N may be overwritten."""
    F = _new(N, N.shape[0], *N.shape[-2:])
    return F, _factor_into(N, Kind(kind), None, F, True, before=status)


@_factor.register_fake
def _(N: Tensor, kind: int, status: Tensor | None) -> tuple[Tensor, Tensor]:
    return _new(N, N.shape[0], *N.shape[-2:]), _new(N, N.shape[0], dtype=torch.int32)


@torch.library.custom_op("prokl::semidefinite_inverse", mutates_args=())
def _semidefinite_inverse(K: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return C^-T, K + shift I, scale (B,) and what was done: scale (K + shift I) = C C^T, semi-definite K (B,k,k)."""
    F, shifted, scale = torch.empty_like(K), torch.empty_like(K), _new(K, K.shape[0])
    C = torch.empty_like(K) if K.shape[-1] > BLOCK[K.dtype] else None
    return F, shifted, scale, _factor_into(K, Kind.SEMIDEFINITE, C, F, True, shifted, scale)


@_semidefinite_inverse.register_fake
def _(K: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(K), torch.empty_like(K), _new(K, K.shape[0]), _new(K, K.shape[0], dtype=torch.int32)


@torch.library.custom_op("prokl::semidefinite_root", mutates_args=())
def _semidefinite_root(H: Tensor) -> tuple[Tensor, Tensor]:
    """Return lower C with C C^T = H + shift I, up to a factor, for semi-definite H (B,k,k), and what was done."""
    C, (B, k, _) = torch.empty_like(H), H.shape
    strip = _new(H, B, k, BLOCK[H.dtype]) if k > BLOCK[H.dtype] else None
    return C, _factor_into(H, Kind.SEMIDEFINITE, C, strip, False)


@_semidefinite_root.register_fake
def _(H: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(H), _new(H, H.shape[0], dtype=torch.int32)


@torch.library.custom_op("prokl::finish", mutates_args=("Q",))
def _finish(
    A: Tensor, Q: Tensor, N: Tensor | None, kept: Tensor | None, status: Tensor | None, of_root: bool = False
) -> Tensor:
    """Replace Q by Householder's of A where its Gram matrix N is not the identity, or without N; return what was done.

    With ``of_root`` also where ``status`` says that the root which Q is of was lost. Where A is not finite Q becomes
    ``kept``, or NaN.
    """
    B, _, k = A.shape
    done = _new(A, B, dtype=torch.int32)
    kept = kept if kept is None or kept.stride(-1) == 1 else kept.contiguous()
    work = _new(A, B, 2 * k - (-k // ROWS)) if k > BLOCK[A.dtype] else None
    matrices = (_where(A), _sum(N), _where(kept), _where(Q), of_root)
    _launch("finish", A, *A.shape, *matrices, _at(work), _at(status), done.data_ptr())
    return done


@_finish.register_fake
def _(
    A: Tensor, Q: Tensor, N: Tensor | None, kept: Tensor | None, status: Tensor | None, of_root: bool = False
) -> Tensor:
    return _new(A, A.shape[0], dtype=torch.int32)


@torch.library.custom_op("prokl::qr", mutates_args=())
def _qr(A: Tensor) -> tuple[Tensor, Tensor]:
    if A.dim() != 3 or not A.shape[1] >= A.shape[2] >= 1 or len(A) > MOST_MATRICES:
        raise ValueError(
            f"Invalid A.shape={tuple(A.shape)}: must be (B,n,k) with n >= k >= 1, at most {MOST_MATRICES} matrices."
        )
    if A.dtype not in DTYPES:
        raise TypeError(f"Invalid A.dtype={A.dtype}: must be one of {tuple(DTYPES)}. Convert with A.float().")
    if A.numel() > 0 and A.shape[2] > 1 and A.stride(-1) != 1:
        raise ValueError(f"Invalid A.stride()={A.stride()}: must end in 1. Pass A.contiguous().")
    _functions(extension.load()[0], A.device, A.dtype)
    return _factorised(_products(A.device), A, None)


@_qr.register_fake
def _(A: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(A, memory_format=torch.contiguous_format), _new(A, A.shape[0], dtype=torch.int32)
