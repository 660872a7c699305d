"""QR of a batch: by Householder for a CPU, and without Householder for a GPU; R's diagonal is positive throughout.

Q of a QR does not change when the matrix is multiplied on the right by an upper-triangular matrix with a
positive diagonal. The step's factorisations come with such a matrix for nearly nothing, which makes their
columns nearly orthonormal; Cholesky QR then finishes, in batched operations alone. A CPU factors one matrix after
another at no disadvantage. Measured there (AMD EPYC with AVX-512, one thread): LAPACK's QR took 0.2 to 0.8 of the time
of the Cholesky form for n from 128 to 3072 and r from 8 to 128, and as long for 2048 x 32.

Dimension key: B matrices, m short side, n long side, r rank, c columns of length d.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ONE_PASS = 0.5
"""Largest ||W^T W - I||_F after which one Cholesky pass is enough: cond(W)^2 <= (1 + .5)/(1 - .5) = 3, and a
pass leaves an orthogonality error of about eps * cond(W)^2."""

Product = Callable[[Tensor, Tensor], Tensor]
"""A batched matrix product. The input of a Cholesky must be exact to float32, whatever torch's TF32 switches say, so
that a backend on a GPU brings its own."""


def signed_qr(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return Q (B,d,c) and R of A (B,d,c) by LAPACK or cuSOLVER, signed so that R's diagonal is non-negative.

    Rows of zeros are factored last: Q has zeros there, too, where pivots among them would leave rounding.
    """
    idle = torch.linalg.vector_norm(A, dim=-1, keepdim=True) == 0
    order = idle.to(torch.int8).argsort(dim=-2, stable=True)
    Q, R = torch.linalg.qr(A.gather(-2, order.expand_as(A)))
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(A.dtype)
    Q = torch.empty_like(Q).scatter_(-2, order.expand_as(Q), Q * signs.unsqueeze(-2))
    return Q, R * signs.unsqueeze(-1)


def householder_qr(A: Tensor) -> Tensor:
    """Return Q (B,d,c) of :func:`signed_qr`."""
    return signed_qr(A)[0]


def cholesky_qr(A: Tensor) -> Tensor:
    """Return Q (B,d,c) of :func:`signed_qr` for unit columns A (B,d,c), float64, by batched operations alone.

    The first of three Cholesky passes is shifted, which keeps it safe at any condition; each of the other two squares
    what deviates. Measured: orthonormal to 2e-15 for c up to 768 and conditions up to 1e9.
    """
    c = A.shape[-1]
    for shift in (10 * c * torch.finfo(A.dtype).eps, 0.0, 0.0):
        C, _ = torch.linalg.cholesky_ex(A.mT @ A + shift * torch.eye(c, dtype=A.dtype, device=A.device))
        A = torch.linalg.solve_triangular(C.mT, A, upper=True, left=False)
    return A


def _inverse_transposed_cholesky(K: Tensor) -> tuple[Tensor, Tensor]:
    """Return (C^-T, ok) with K = C C^T (B,r,r); ok (B,1,1) is False where K is not positive definite."""
    C, info = torch.linalg.cholesky_ex(K)
    T = torch.linalg.solve_triangular(C.mT, _eye(K).expand_as(K), upper=True)
    return T, (info == 0)[:, None, None] & T.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)


def _eye(K: Tensor) -> Tensor:
    return torch.eye(K.shape[-1], dtype=K.dtype, device=K.device)


def _orthonormalise(W: Tensor, ok: Tensor, mm: Product) -> tuple[Tensor, Tensor]:
    """Do Cholesky QR of nearly orthonormal columns in two passes; ok (B,1,1) becomes False where they do not do."""
    for _ in range(2):
        N = mm(W.mT, W)
        T, fine = _inverse_transposed_cholesky(N)
        W, ok = mm(W, T), ok & fine
    return W, ok & (torch.linalg.matrix_norm(N - _eye(N), keepdim=True) <= ONE_PASS)


def shift_of(K: Tensor) -> Tensor:
    """Return a shift delta (B,1,1) that makes a rounded positive semi-definite K (B,r,r) safely positive definite.

    delta = 4 sqrt(r) eps ||K||_F lies above the rounding noise, and keeps ||delta U||_F within 4 r eps ||V||_F where
    K = U^T V: the backward error of a QR with a shift is no larger than one without may be.
    """
    size = torch.linalg.matrix_norm(K, keepdim=True).clamp_min(torch.finfo(K.dtype).tiny)
    return 4 * K.shape[-1] ** 0.5 * torch.finfo(K.dtype).eps * size


def cholesky_tracking(V: Tensor, K: Tensor, U: Tensor, mm: Product = torch.matmul) -> Tensor:
    """Return Q of qr(V) for V = Phi U, Phi positive semi-definite, given K = U^T V (Algorithm 2 (4)).

    Nothing is read on the host: K is r x r, symmetric and nearly free; V chol(K)^-T is nearly orthonormal. Where a
    Cholesky fails, (Phi + delta I) U is factored, which has the same invariant subspaces and full rank; where even
    that fails U itself is kept.

    Args:
        V: (B,n,r). K: (B,r,r). U: (B,n,r), the orthonormal columns that V and K were formed with.
        mm: the product to use.

    Returns:
        (B,n,r) with orthonormal columns.
    """
    delta, Q = shift_of(K), U
    for factored, V_of in ((K + delta * _eye(K), V + delta * U), (K, V)):
        T, ok = _inverse_transposed_cholesky(factored)
        found, ok = _orthonormalise(mm(V_of, T), ok, mm)
        Q = torch.where(ok, found, Q)
    return Q


def cholesky_semidefinite(L: Tensor, mm: Product = torch.matmul) -> Tensor:
    """Return Q of qr(L) for symmetric positive semi-definite L (B,m,m), without Householder.

    L = C C^T gives qr(L).Q = qr(C).Q with cond(C) = sqrt(cond(L)). Where Cholesky fails L + delta I is taken, which has
    the same eigenvectors; where even that fails Q is I.
    """
    eye = _eye(L)
    Q = eye.expand_as(L)
    for shift in (shift_of(L), 0.0):
        C, info = torch.linalg.cholesky_ex((L + L.mT) / 2 + shift * eye)
        scaled = C / torch.linalg.vector_norm(C, dim=-2, keepdim=True)
        ok = (info == 0)[:, None, None] & scaled.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
        scaled, ok = _orthonormalise(scaled, ok, mm)
        Q = torch.where(ok, scaled, Q)
    return Q


def cholesky_coordinates(S: Tensor, Q: Tensor, mm: Product = torch.matmul) -> Tensor:
    """Return Q of qr(S Q) for symmetric S and any invertible Q (B,r,r): Q_S between refreshes is no basis.

    Q = O R with O orthogonal, hence qr(S Q).Q = qr(S O).Q = O qr(O^T S O).Q. O comes from Cholesky QR of Q's unit
    columns, the first of its three passes shifted. Where Q is singular to working precision (a tracked direction was
    replaced as a whole) O is the identity.
    """
    Q = Q / torch.linalg.vector_norm(Q, dim=-2, keepdim=True)
    N = mm(Q.mT, Q)
    T, ok = _inverse_transposed_cholesky(N + shift_of(N) * _eye(N))
    basis, ok = _orthonormalise(mm(Q, T), ok, mm)
    basis = torch.where(ok, basis, _eye(N))
    return mm(basis, cholesky_semidefinite(mm(basis.mT, mm(S, basis)), mm))
