"""The polar identity: orthogonalising the complement is per-direction whitening by the instantaneous moment."""

import pytest
import torch

from prokl.algorithm.reference import newton_schulz
from tests.theory import covariance, full_optimum, inverse_root, normal, orthogonal, population, wishart
from tests.transcription import polar

SHAPES = [(4, 9, 3), (4, 7, 3), (6, 8, 5), (5, 5, 2), (1, 4, 2)]  # m, n, r: n - r above, at and below m
EXACT = 1e-11
"""Condition numbers of the whitened complements are at most 133; measured: at most 8e-13."""


def problem(m, n, r):
    basis = orthogonal(n, seed=1)
    return normal(m, n, seed=2), wishart(m, seed=3), basis[:, :r], basis[:, r:]


@pytest.mark.parametrize("m, n, r", SHAPES)
def test_polar_identity_all_three_forms_agree(m, n, r):
    G, L, U, U_perp = problem(m, n, r)
    root, mu = inverse_root(L), 0.3
    direct = polar(mu**-0.5 * root @ G @ (torch.eye(n, dtype=torch.float64) - U @ U.mT))
    projected = polar(root @ G @ U_perp) @ U_perp.mT
    moment = U_perp.mT @ G.mT @ torch.linalg.solve(L, G) @ U_perp
    whitened = root @ G @ U_perp @ inverse_root(moment) @ U_perp.mT
    assert (direct - projected).norm() < EXACT
    assert (direct - whitened).norm() < EXACT
    # A partial isometry of rank k: its norms are what the calibration of alpha_kl takes them to be (eq. polar_norms).
    k = min(m, n - r)
    sigma = torch.linalg.svdvals(direct)
    assert (sigma[:k] - 1).abs().max() < EXACT and (sigma[k:] < EXACT).all()
    # <X, polar(X)> is the nuclear norm, the measure of the descent.
    X = root @ G @ U_perp @ U_perp.mT
    assert float((X * direct).sum()) == pytest.approx(float(torch.linalg.matrix_norm(X, "nuc")), rel=1e-12)


@pytest.mark.parametrize("m, n, r", SHAPES)
def test_polar_identity_newton_schulz_goes_to_the_same_matrix(m, n, r):
    """The coefficients converge; the library's default ones stop where singular values lie around 1."""
    G, L, U, _ = problem(m, n, r)
    X = inverse_root(L) @ G @ (torch.eye(n, dtype=torch.float64) - U @ U.mT)
    found = newton_schulz(X, [(1.5, -0.5, 0.0)] * 20)  # each step multiplies rounding outside the range by 1.5
    assert (found - polar(X)).norm() < EXACT
    # 0.68 to 1.13 once a singular value has come up from zero, as Muon's quintic leaves them.
    sigma = torch.linalg.svdvals(newton_schulz(X, [(3.4445, -4.7750, 2.0315)] * 8))[: min(m, n - r)]
    assert 0.65 < sigma.min() and sigma.max() < 1.25


def test_polar_identity_holds_with_the_expectation_inside():
    """The factor is sqrt(m), which follows from R = Phi / m, where the paper prints 1 / m."""
    m, n, r = 3, 5, 2
    G = population(wishart(m * n, seed=4), m, n)
    L, R = full_optimum(G)
    _, Q = torch.linalg.eigh(R)
    U_perp = Q[:, : n - r]
    moment = (G.mT @ torch.linalg.solve(L, G)).mean(dim=0)
    sample = covariance([1.0, 2.0, 3.0], seed=5) @ G[0]
    left = inverse_root(L) @ sample @ U_perp
    by_R = left @ inverse_root(U_perp.mT @ R @ U_perp) @ U_perp.mT
    by_moment = left @ inverse_root(U_perp.mT @ moment @ U_perp) @ U_perp.mT
    assert (by_R - m**0.5 * by_moment).norm() < EXACT * by_R.norm()
    assert (by_R - by_moment / m).norm() > 0.5 * by_R.norm()
