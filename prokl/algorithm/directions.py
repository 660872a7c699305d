"""The singular directions of first gradients, many matrices at a time; those that a gradient leaves open are fixed.

A gradient of few tokens, or with idle rows, has a null space. A decomposition fills it with what rounding left, so that
another order of summing the same gradient gives other directions. Here they come from fixed columns instead, and so do
the signs of all others: the result is a function of the gradient, not of its rounding. Three things stay open:

* Equal singular values leave a rotation of their directions to rounding, and close ones nearly do.
* A singular value at the bound, or an inner product at zero, may fall on either side.
* A gradient that was rounded to half precision, or to float32 where the arithmetic is float64, has that rounding far
  above the bound: its null space is full of it, and all directions are determined.

Dimension key: B matrices (any leading shape), m short side, n long side, c columns of length d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.qr import cholesky_qr, householder_qr


def preferred(d: int, c: int, device: torch.device) -> Tensor:
    """Return the unit columns (d,c), float64, that undetermined directions and all signs go by.

    They are drawn, as a neat choice meets the structure that gradients have: unit vectors lie in the span of the rows
    that are not idle or are orthogonal to it, (1, 1, ...) is orthogonal to the gradient of a softmax, and by its
    largest entry a direction has no sign where two rows are each other's negative, as those of a head of two classes
    are. The draw is from a generator of its own, on the CPU: every device and process has the same columns, the first
    of which do not depend on c.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    E = 2 * torch.rand(c, d, generator=generator, dtype=torch.float64, device="cpu").mT - 1
    return (E / torch.linalg.vector_norm(E, dim=0)).to(device)


def completed(A: Tensor, determined: Tensor, idle: Tensor) -> Tensor:
    """Return A (B,d,c), float64, with :func:`preferred` for undetermined columns, orthonormalised from the left.

    Idle coordinates stay apart, so that a step moves nothing there: the last columns of the d are their unit vectors,
    and the others are zero there, exactly.

    Both forms of the QR give the same; LAPACK's Householder took 0.4 of the Cholesky form's time for 768 x 768 on one
    thread of a CPU.

    Args:
        A: orthonormal, or nearly so, where ``determined``; anything elsewhere, NaN too.
        determined: (B,c) bool. idle: (B,d) bool.
    """
    d, c = A.shape[-2:]
    live, unit = ~idle.unsqueeze(-1), torch.arange(c, device=A.device) >= d - idle.sum(dim=-1, keepdim=True)
    order = idle.to(torch.int8).argsort(dim=-1, stable=True)  # idle ones last, else as they are
    units = torch.zeros_like(A).scatter_(-2, order[..., None, :c], 1.0)
    A = torch.where(determined.unsqueeze(-2), A, preferred(d, c, A.device)) * live
    A = torch.where(unit.unsqueeze(-2), units, A / torch.linalg.vector_norm(A, dim=-2, keepdim=True))
    Q = householder_qr(A) if A.device.type == "cpu" else cholesky_qr(A)
    return torch.where(unit.unsqueeze(-2), units, Q * live)


def _decomposes(A: Tensor, eigenvalues: Tensor, X: Tensor) -> bool:
    """Return True if A (B,m,m), of norm at most 1, is X diag(eigenvalues) X^T to what LAPACK's own tests allow."""
    error = torch.linalg.vector_norm((X * eigenvalues.unsqueeze(-2)) @ X.mT - A, dim=(-2, -1))
    return bool((error <= 50 * A.shape[-1] * torch.finfo(A.dtype).eps).all())


def _eigenvectors(A: Tensor, trusted: bool) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues (B,m), ascending, and eigenvectors (B,m,m) of symmetric A (B,m,m), of norm at most 1.

    Unless ``trusted`` they are checked, which reads the device, and LAPACK's take the place of wrong ones: batched
    solvers of GPUs have returned vectors of another matrix, or not orthogonal ones, without a word.
    """
    decomposition = torch.linalg.eigh(A)
    if trusted or _decomposes(A, *decomposition):
        return decomposition
    eigenvalues, X = torch.linalg.eigh(A.cpu())
    return eigenvalues.to(A.device), X.to(A.device)


def singular_directions(G: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return all left and the first right singular directions of gradients, singular values descending.

    A pair of directions is determined where its singular value is beyond max(m, n) eps times the largest one, with the
    eps of G's dtype; :func:`completed` chooses the others. Its left one has a positive inner product with the column of
    :func:`preferred` at its place.

    float32 is decomposed by the eigenvectors of G G^T in float64, which a GPU finds for many matrices at once (torch
    2.12 and later; its SVD, and eigh before, go from one to the next). Squared, a direction at the bound is known to
    about 1/(64 max(m, n)^2), and G's own rounding leaves it at 1/max(m, n). float64 has no such room and takes an SVD
    of one matrix after another: on a CPU that is no loss, and nobody trains in float64 on a GPU.

    Args:
        G: finite and not zero, (B,m,n) with m <= n, float32 or float64.
        columns: c, of right directions; 1 to n.

    Returns:
        Bases (B,m,m) and (B,n,c) in the dtype of G, orthonormal to rounding.
    """
    m, n = G.shape[-2:]
    if G.dtype == torch.float64:
        X, sigma, Yt = torch.linalg.svd(G, full_matrices=False)
        Y = Yt.mT
    else:
        A = G.double()
        A = A / torch.linalg.vector_norm(A, dim=(-2, -1), keepdim=True)
        squares, X = _eigenvectors(A @ A.mT, trusted=G.device.type != "cuda")
        X, sigma = X.flip(-1), squares.flip(-1).clamp(min=0).sqrt()
        Y = A.mT @ X
        Y = Y / torch.linalg.vector_norm(Y, dim=-2, keepdim=True)  # not quite orthonormal
    inner = (X * preferred(m, m, G.device)).sum(dim=-2, keepdim=True)
    sign = torch.where(inner < 0, -1.0, 1.0).to(X.dtype)
    determined = sigma > n * torch.finfo(G.dtype).eps * sigma[..., :1]
    beyond = (0, max(0, columns - m))
    right = torch.nn.functional.pad((Y * sign)[..., :columns], beyond)
    right_determined = torch.nn.functional.pad(determined[..., :columns], beyond)
    rows, cols = ((G == 0).all(dim=dim) for dim in (-1, -2))
    return completed(X * sign, determined, rows).to(G.dtype), completed(right, right_determined, cols).to(G.dtype)
