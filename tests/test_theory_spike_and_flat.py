"""Spike-and-flat exactness: the lemma, its corollary, and what other noise makes of the floor."""

import pytest
import torch

from tests.theory import (
    covariance,
    full_optimum,
    largest_kept,
    normal,
    objective,
    population,
    restricted_minimum,
    wishart,
)

M, N, RHO, SIGMA = 5, 7, 2, 0.6
EXACT = 1e-12
"""Error of eigenvalues of order one, stationary to 1e-15; measured: at most 2e-14."""


def signal(seed):
    return normal(M, RHO, seed=seed), normal(N, RHO, seed=seed + 20)


def signal_plus_noise(seed, noise=None):
    """Second moment of A B^T + xi, xi uncorrelated with variance sigma^2 or of covariance ``noise``."""
    A, B = signal(seed)
    mean = (A @ B.mT).reshape(-1)
    if noise is None:
        noise = SIGMA**2 * torch.eye(M * N, dtype=torch.float64)
    return population(mean.outer(mean) + noise, M, N)


@pytest.mark.parametrize("seed", range(3))
def test_spike_and_flat_lemma_all_but_rho_eigenvalues_agree(seed):
    L, R = full_optimum(signal_plus_noise(seed))
    for factor, other, signals in ((L, R, signal(seed)[0]), (R, L, signal(seed)[1])):
        floor = SIGMA**2 * torch.linalg.inv(other).trace() / len(other)
        values = torch.linalg.eigvalsh(factor)
        assert (values[: len(factor) - RHO] - floor).abs().max() < EXACT
        assert (values[len(factor) - RHO :] > 1.2 * floor).all()
        # The spike lies in the range of the signal: nothing of it is left outside.
        spike = factor - floor * torch.eye(len(factor), dtype=torch.float64)
        basis = torch.linalg.qr(signals)[0]
        assert (spike - basis @ (basis.mT @ spike)).norm() < EXACT


@pytest.mark.parametrize("r", [1, 2, 3, 6])
def test_spike_and_flat_corollary_restriction_is_free_from_rho(r):
    G = signal_plus_noise(0)
    L, R = full_optimum(G)
    start = largest_kept(L, R, r)
    best = restricted_minimum(G, start, steps=100)
    gap = float(objective(best.L, best.R, G) - objective(L, R, G))
    if r >= RHO:
        assert abs(gap) < EXACT
        assert (start.R - R).norm() < EXACT  # the restricted family contains the full optimum
    else:
        assert gap > 0.1


def test_spike_and_flat_separable_noise_shapes_the_floor():
    """L = spike + f Sigma_L with f = tr(R^-1 Sigma_R) / n ("Beyond i.i.d. noise"): no flat tail is left."""
    left, right = wishart(M, seed=7), covariance([3.0, 2.0, 1.0, 0.7, 0.5, 0.3, 0.2], seed=8)
    L, R = full_optimum(signal_plus_noise(0, torch.kron(left, right)))
    floor = torch.linalg.solve(R, right).trace() / N
    spike = torch.linalg.eigvalsh(L - floor * left)
    assert spike[: M - RHO].abs().max() < EXACT and (spike[M - RHO :] > 0.1).all()
    tail = torch.linalg.eigvalsh(L)[: M - RHO]
    assert tail.max() > 1.5 * tail.min()
