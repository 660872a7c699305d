"""Populations of gradients with a known second moment, the KL objective on them and its minimisers, in float64.

An expectation is the mean over a finite population (N,m,n) that has exactly the wanted second moment, so that what
the paper says of expectations holds to rounding here. Vectorisation is row-major, as in the paper: the second moment
of vec(G) of a gradient with covariance L in its rows and R in its columns is kron(L, R).

Symbols: m, n: rows and columns, m <= n; r: rank of the subspace; Phi_L = E[G^T L^-1 G].
"""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

import torch
from torch import Tensor


class Restricted(NamedTuple):
    """A point of the restricted family: L (m,m), U (n,r), S (r,r), mu ()."""

    L: Tensor
    U: Tensor
    S: Tensor
    mu: Tensor

    @property
    def R(self) -> Tensor:
        """U S U^T + mu (I - U U^T)."""
        complement = torch.eye(len(self.U), dtype=self.U.dtype) - self.U @ self.U.mT
        return self.U @ self.S @ self.U.mT + self.mu * complement


def normal(*size: int, seed: int) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(size: int, seed: int) -> Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(normal(size, size, seed=seed))[0]


def covariance(eigenvalues: list[float] | Tensor, seed: int) -> Tensor:
    """Symmetric matrix with these eigenvalues in a random basis."""
    values = torch.as_tensor(eigenvalues, dtype=torch.float64)
    Q = orthogonal(len(values), seed)
    return Q @ values.diag() @ Q.mT


def wishart(size: int, seed: int) -> Tensor:
    """Random positive definite matrix with variances over some orders of magnitude, in no way a Kronecker product."""
    X = normal(size, 1, seed=seed + 1).exp() * normal(size, 3 * size, seed=seed)
    return X @ X.mT / (3 * size)


def population(second_moment: Tensor, m: int, n: int) -> Tensor:
    """m n gradients (mn,m,n) with E[vec(G) vec(G)^T] = ``second_moment`` (mn,mn)."""
    root = torch.linalg.cholesky(second_moment)
    return (m * n) ** 0.5 * root.mT.reshape(m * n, m, n)


def phi(G: Tensor, L: Tensor) -> Tensor:
    """Phi_L (n,n) of a population."""
    return (G.mT @ torch.linalg.solve(L, G)).mean(dim=0)


def left_moment(G: Tensor, R: Tensor) -> Tensor:
    """E[G R^-1 G^T] (m,m) of a population."""
    return (G @ torch.linalg.solve(R, G.mT)).mean(dim=0)


def objective(L: Tensor, R: Tensor, G: Tensor) -> Tensor:
    """The KL objective (eq. J_expand) without its two terms that depend on the population alone."""
    m, n = G.shape[1:]
    return (n * torch.logdet(L) + m * torch.logdet(R) + (torch.linalg.inv(R) @ phi(G, L)).trace()) / 2


def full_optimum(G: Tensor, steps: int = 2000) -> tuple[Tensor, Tensor]:
    """L and R that minimise the objective, by solving its two stationarity conditions in turn."""
    m, n = G.shape[1:]
    R = torch.eye(n, dtype=G.dtype)
    for _ in range(steps):
        L = left_moment(G, R) / n
        before, R = R, phi(G, L) / m
        if (R - before).norm() <= 1e-15 * R.norm():
            break
    return L, R


def given_left(G: Tensor, L: Tensor, U: Tensor) -> Restricted:
    """The minimiser over S and mu for fixed L and U (Claim 2)."""
    m, n = G.shape[1:]
    Phi = phi(G, L)
    inside = U.mT @ Phi @ U
    return Restricted(L, U, inside / m, (Phi.trace() - inside.trace()) / (m * (n - U.shape[1])))


def restricted_optimum(G: Tensor, U: Tensor, steps: int = 2000) -> Restricted:
    """The minimiser over L, S and mu for fixed U, by solving the three equations of Claim 2 in turn."""
    n = G.shape[2]
    point = given_left(G, torch.eye(G.shape[1], dtype=G.dtype), U)
    for _ in range(steps):
        L = left_moment(G, point.R) / n
        done = (L - point.L).norm() <= 1e-15 * L.norm()
        point = given_left(G, L, U)
        if done:
            break
    return point


def largest_kept(L: Tensor, R: Tensor, r: int) -> Restricted:
    """The point with R's r largest eigenvalues, and their mean in the place of the others."""
    values, Q = torch.linalg.eigh(R)
    return Restricted(L, Q[:, -r:], values[-r:].diag(), values[:-r].mean())


def complement_ratio(values: Tensor, chosen: tuple[int, ...]) -> float:
    """AM/GM of the values that are not chosen."""
    rest = torch.tensor([float(v) for i, v in enumerate(values) if i not in chosen], dtype=torch.float64)
    return float(rest.mean() / rest.log().mean().exp())


def best_subset(values: Tensor, r: int) -> tuple[int, ...]:
    """The r indices whose complement has the smallest AM/GM (Claim 3), by trying all."""
    return min(combinations(range(len(values)), r), key=lambda chosen: complement_ratio(values, chosen))


def best_subspace(Phi: Tensor, r: int) -> Tensor:
    """The subspace (n,r) that Claim 3 calls optimal for Phi_L."""
    values, vectors = torch.linalg.eigh(Phi)
    return vectors[:, list(best_subset(values, r))]


def restricted_minimum(G: Tensor, start: Restricted, steps: int = 300) -> Restricted:
    """A minimiser over L, U, S and mu, found by alternating from ``start``: no step raises the objective."""
    n, r = start.U.shape
    point = start
    for _ in range(steps):
        L = left_moment(G, point.R) / n
        point = given_left(G, L, best_subspace(phi(G, L), r))
    return point
