"""Claim 3 (optimal subspace): among all subspaces an eigenspace, and the one whose complement has the least AM/GM."""

import math
from itertools import combinations

import pytest
import torch

from tests.theory import (
    best_subset,
    best_subspace,
    complement_ratio,
    covariance,
    given_left,
    identity_state,
    next_state,
    normal,
    objective,
    phi,
    population,
    wishart,
)

SPECTRA = {
    "the paper's": ([10.0, 9.0, 1.0], 1),
    "spike and flat": ([30.0, 12.0, 1.2, 1.0, 0.9], 2),
    "geometric": ([16.0, 8.0, 4.0, 2.0, 1.0], 2),
    "outlier below": ([5.0, 4.8, 4.6, 4.4, 0.01], 1),
}


def reduced(U, Phi):
    """f(U) = log det(U^T Phi U) + (n - r) log tr(P_perp Phi) (eq. reduced_obj)."""
    inside = U.mT @ Phi @ U
    return torch.logdet(inside) + (len(Phi) - U.shape[1]) * (Phi.trace() - inside.trace()).log()


def minimised(Phi, start):
    """A local minimiser over all subspaces."""
    X = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [X], max_iter=300, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure():
        optimizer.zero_grad()
        value = reduced(torch.linalg.qr(X)[0], Phi)
        value.backward()
        return value

    optimizer.step(closure)
    return torch.linalg.qr(X.detach())[0]


@pytest.mark.parametrize("r", [1, 2, 4])
def test_claim_3_the_objective_at_its_best_s_and_mu_is_reduced(r):
    m, n = 3, 5
    G, L = population(wishart(m * n, seed=1), m, n), wishart(m, seed=2)
    Phi = phi(G, L)
    differences = []
    for seed in range(5):
        U = torch.linalg.qr(normal(n, r, seed=seed))[0]
        differences.append(float(objective(L, given_left(G, L, U).R, G) - m / 2 * reduced(U, Phi)))
    assert max(differences) - min(differences) < 1e-12  # sums of a dozen terms of order 10


@pytest.mark.parametrize("spectrum, r", SPECTRA.values(), ids=SPECTRA)
def test_claim_3_on_eigenspaces_it_is_the_complements_am_over_gm(spectrum, r):
    values, Q = torch.linalg.eigh(covariance(spectrum, seed=3))
    Phi = Q @ values.diag() @ Q.mT
    n = len(values)
    constant = float(values.log().sum()) + (n - r) * math.log(n - r)
    for chosen in combinations(range(n), r):
        expected = constant + (n - r) * math.log(complement_ratio(values, chosen))
        assert float(reduced(Q[:, list(chosen)], Phi)) == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("spectrum, r", SPECTRA.values(), ids=SPECTRA)
def test_claim_3_global_minimisers_have_the_least_am_over_gm(spectrum, r):
    """Descent from the neighbourhood of every eigenspace, and from anywhere. "geometric" has two such eigenspaces."""
    values, Q = torch.linalg.eigh(covariance(spectrum, seed=3))
    Phi, n = Q @ values.diag() @ Q.mT, len(values)
    least = float(reduced(best_subspace(Phi, r), Phi))
    starts = [Q[:, list(i)] + 0.3 * normal(n, r, seed=s) for s, i in enumerate(combinations(range(n), r))]
    starts += [normal(n, r, seed=100 + s) for s in range(6)]
    found = [minimised(Phi, start) for start in starts]
    assert min(float(reduced(U, Phi)) for U in found) > least - 1e-12
    reached = [U for U in found if float(reduced(U, Phi)) < least + 1e-9]
    assert reached
    for U in reached:
        shares = (Q.mT @ U).square().sum(dim=1)  # of every eigenvector in the subspace
        # Where f is within 1e-9 of its minimum the subspace is within about sqrt(1e-9) of the minimiser.
        assert (shares - shares.round()).abs().max() < 1e-4
        chosen = tuple(shares.round().nonzero().flatten().tolist())
        assert complement_ratio(values, chosen) == pytest.approx(
            complement_ratio(values, best_subset(values, r)), rel=1e-12
        )


def test_claim_3_the_papers_example_keeps_the_bottom_eigenvalue():
    values = torch.tensor([10.0, 9.0, 1.0])
    assert best_subset(values, 1) == (2,)
    assert f"{complement_ratio(values, (0,)):.2f}" == "1.67"
    assert f"{complement_ratio(values, (2,)):.2f}" == "1.00"


def test_claim_3_a_spike_and_flat_spectrum_keeps_the_top():
    assert best_subset(torch.tensor([30.0, 12.0, 1.0, 1.0, 1.0]), 2) == (0, 1)
    assert best_subset(torch.tensor([30.0, 12.0, 1.2, 1.0, 0.9]), 2) == (0, 1)


@pytest.mark.parametrize("spectrum, r, kept", [([30.0, 12.0, 1.2, 1.0, 0.9], 2, [0, 1]), ([10.0, 9.0, 1.0], 1, [0])])
def test_claim_3_tracking_goes_to_the_top_eigenspace(spectrum, r, kept):
    """Power iteration knows no AM/GM: in the paper's example it keeps what Claim 3 would give up."""
    n = len(spectrum)
    Phi = torch.tensor(spectrum, dtype=torch.float64).diag()
    G = (n * Phi).sqrt()  # with L = I: G^T L^-1 G / m = Phi, whatever the sample
    U = torch.linalg.qr(normal(n, r, seed=4))[0]
    start = identity_state(U, n)
    state = start | {"S": U.mT @ Phi @ U}
    for _ in range(600):  # errors fall by (9 / 10)^(1/2) a step at least: the EMA's half of it is the old S
        state |= {key: start[key] for key in ("lambda_L", "Q_L")}  # Claim 3 fixes L
        state = next_state(G, state, beta2=0.5, refresh=True)
    top = torch.eye(n, dtype=torch.float64)[:, kept]
    assert (state["U"] @ state["U"].mT - top @ top.mT).norm() < 1e-10
