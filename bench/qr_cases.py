"""What :mod:`bench.qr` times: the problems, the contenders, and how far a Q may be from one.

Dimension key: B matrices, n rows, k columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import prokl.qr
from prokl import extension
from prokl.qr import Product, householder_qr

TRACKING_CONDITION = 1e3
REFRESH_CONDITION = 1e4
DRIFT = 0.1
"""Of V, of L and S, and of the bases from the eigenvectors: what tests/data/captured_factors.npz has, roughly."""
ORTHOGONALITY, BACKWARD = 100, 20
"""Largest ||Q^T Q - I||_F and ||A - Q R||_F / ||A||_F in units of k eps, R = triu(Q^T A), as in the tests."""


@dataclass(frozen=True)
class Problem:
    """One batch: "tracking" factors V = Phi U, "refresh" and "coordinates" form and factor L Q."""

    kind: str
    B: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        """The product, and one Cholesky QR: fewer than in any other way to Q."""
        product = 0 if self.kind == "tracking" else 2 * self.n * self.n * self.k
        return self.B * (product + 2 * self.n * self.k**2 + self.k**3 / 3)

    @property
    def bytes(self) -> float:
        """V and K, or L and Q, read once; the result written."""
        return 4 * self.B * (2 * self.n * self.k + self.k**2)


SETS: dict[str, tuple[Problem, ...]] = {
    "paper": (
        Problem("tracking", 48, 768, 128),
        Problem("tracking", 24, 3072, 128),
        Problem("tracking", 48, 1024, 128),
        Problem("tracking", 48, 4096, 128),
        Problem("refresh", 72, 768, 768),
        Problem("refresh", 144, 1024, 1024),
        Problem("coordinates", 144, 128, 128),
    ),
    "tiny": (Problem("tracking", 3, 40, 8), Problem("refresh", 2, 12, 12), Problem("coordinates", 3, 8, 8)),
}
"""GPT-2 124M and 350M at rank 128: U of the square and of the MLP matrices, Q_L, Q_S."""


def draw(p: Problem, device: torch.device) -> tuple[Tensor, ...]:
    """V, K, U or L, Q (S, Q_S) in float32; the matrices of a batch are one, its rows in other orders."""
    g = torch.Generator().manual_seed(p.n * p.k)

    def orthonormal(X: Tensor) -> Tensor:
        return torch.linalg.qr(X)[0]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).to(device)

    condition = TRACKING_CONDITION if p.kind == "tracking" else REFRESH_CONDITION
    values = condition ** -torch.linspace(0, 1, p.k, dtype=torch.float64, device=device)
    X = orthonormal(normal(p.n, p.k))
    basis = householder_qr(X + DRIFT * normal(p.n, p.k) / p.n**0.5)
    if p.kind == "coordinates":  # T^T Q_S between refreshes: shorter columns, no longer at right angles
        basis = basis + DRIFT * normal(p.n, p.k) / p.n**0.5
    order = torch.stack([torch.randperm(p.n, generator=g) for _ in range(p.B)]).to(device)
    X, U = X[order], basis[order]
    if p.kind == "tracking":
        V = X @ (values[:, None] * (X.mT @ U))
        K = U.mT @ V
        return V.float().contiguous(), ((K + K.mT) / 2).float(), U.float().contiguous()
    L = (X * values) @ X.mT
    return ((L + L.mT) / 2).float(), U.float().contiguous()


Form = Callable[[str, Sequence[Tensor], Product], Tensor]
"""(kind, inputs, product) -> Q."""


@dataclass(frozen=True)
class Contender:
    """One way to Q; where ``obstacle`` gives a reason it cannot run."""

    name: str
    run: Form
    ours: bool = False
    baseline: bool = False
    obstacle: Callable[[torch.device], str | None] = lambda device: None


def factored(kind: str, inputs: Sequence[Tensor], mm: Product) -> Tensor:
    """The matrix whose Q is wanted."""
    return inputs[0] if kind == "tracking" else mm(*inputs)


def _extension(kind: str, inputs: Sequence[Tensor], mm: Product) -> Tensor:
    from prokl import cuda_qr

    if kind == "tracking":
        return cuda_qr.tracking_qr(*inputs).Q
    form = cuda_qr.refresh_basis if kind == "refresh" else cuda_qr.refresh_coordinates
    return form(*inputs, mm)


def _torch(kind: str, inputs: Sequence[Tensor], mm: Product) -> Tensor:
    form = {
        "tracking": prokl.qr.tracking_qr,
        "refresh": prokl.qr.refresh_basis,
        "coordinates": prokl.qr.refresh_coordinates,
    }
    return form[kind](*inputs, mm)


def _batched(kind: str, inputs: Sequence[Tensor], mm: Product) -> Tensor:
    return householder_qr(factored(kind, inputs, mm))


def _looped(kind: str, inputs: Sequence[Tensor], mm: Product) -> Tensor:
    return torch.stack([householder_qr(A) for A in factored(kind, inputs, mm)])


def _cholesky_qr2(kind: str, inputs: Sequence[Tensor], mm: Product) -> Tensor:
    Q = factored(kind, inputs, mm)
    for _ in range(2):
        C, _ = torch.linalg.cholesky_ex(mm(Q.mT, Q))
        Q = torch.linalg.solve_triangular(C.mT, Q, upper=True, left=False)
    return Q


CONTENDERS = (
    Contender("extension", _extension, ours=True, obstacle=extension.obstacle),
    Contender("torch form", _torch, ours=True),
    Contender("linalg batched", _batched, baseline=True),
    Contender("linalg looped", _looped),
    Contender("CholeskyQR2", _cholesky_qr2),
)


@dataclass(frozen=True)
class Deviations:
    """How far a Q is from what it should be, at worst over the batch, in units of k eps."""

    orthogonality: float
    backward_error: float
    diagonal: float
    """Of R, the lowest below zero, as a backward error."""

    @property
    def reason(self) -> str:
        """Why it is wrong, or nothing."""
        bounds = {"orthogonality": ORTHOGONALITY, "backward_error": BACKWARD, "diagonal": BACKWARD}
        found = {name: (getattr(self, name), bound) for name, bound in bounds.items()}
        return ", ".join(
            f"{name.replace('_', ' ')} {value:.2g} k eps, may be {bound}"
            for name, (value, bound) in found.items()
            if not value <= bound  # nan is wrong
        )

    def row(self) -> dict[str, float]:
        """Its columns."""
        return {"orthogonality": self.orthogonality, "backward_error": self.backward_error}


def deviations(p: Problem, inputs: Sequence[Tensor], Q: Tensor) -> Deviations:
    """Computed in float64, from the exact product of the inputs."""
    unit = p.k * torch.finfo(Q.dtype).eps
    Q = Q.double()
    A = factored(p.kind, [t.double() for t in inputs], torch.matmul)
    if Q.shape != A.shape:
        return Deviations(math.nan, math.nan, math.nan)
    size = torch.linalg.matrix_norm(A)
    eye = torch.eye(p.k, dtype=Q.dtype, device=Q.device)
    R = (Q.mT @ A).triu()
    lowest = R.diagonal(dim1=-2, dim2=-1).amin(dim=-1)
    worst = [
        torch.linalg.matrix_norm(Q.mT @ Q - eye).max(),
        (torch.linalg.matrix_norm(A - Q @ R) / size).max(),
        (-lowest / size).clamp_min(0).max(),
    ]
    return Deviations(*[float(w) / unit for w in worst])
