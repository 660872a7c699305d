"""Claim 1 (approximation gap): what one eigenvalue in the place of the tail costs, against AM/GM of the tail.

Tolerances: the objectives are sums of some 20 terms of order one to ten, each solved to rounding; the alternations
stop at 1e-15. Measured differences where the paper says "equal": at most 8e-15.
"""

import pytest
import torch

from prokl.diagnostics import gap_bound, tail_am_gm
from tests.theory import (
    covariance,
    full_optimum,
    largest_kept,
    objective,
    population,
    restricted_minimum,
    wishart,
)

M, N = 3, 5
EXACT = 1e-12


def bound_of(R, r):
    """The bound of Claim 1 on what restricting R costs."""
    return float(gap_bound(torch.linalg.eigvalsh(R).flip(0), r, M))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("r", [1, 2, 4])
def test_claim_1_the_gap_lies_between_zero_and_the_bound(seed, r):
    G = population(wishart(M * N, seed), M, N)
    L, R = full_optimum(G)
    full = objective(L, R, G)
    bound = bound_of(R, r)
    candidate = largest_kept(L, R, r)
    # The proof's candidate costs exactly the bound (eq. gap_final), so that no better bound follows from it.
    assert abs(objective(L, candidate.R, G) - full - bound) < EXACT
    best = restricted_minimum(G, candidate)
    gap = float(objective(best.L, best.R, G) - full)
    if r == N - 1:  # a tail of one eigenvalue is flat
        assert bound < EXACT and abs(gap) < EXACT
    else:
        assert 0 < gap < bound


@pytest.mark.parametrize("r, flat", [(1, False), (2, True), (3, True), (4, True)])
def test_claim_1_the_gap_is_zero_for_a_flat_tail(r, flat):
    second_moment = torch.kron(wishart(M, seed=3), covariance([7.0, 4.0, 0.5, 0.5, 0.5], seed=4))
    G = population(second_moment, M, N)
    L, R = full_optimum(G)
    bound = bound_of(R, r)
    best = restricted_minimum(G, largest_kept(L, R, r))
    gap = float(objective(best.L, best.R, G) - objective(L, R, G))
    if flat:
        assert bound < EXACT and abs(gap) < EXACT
    else:
        # For a Kronecker covariance the bound is the gap itself: L stays where it is, whatever becomes of R.
        assert bound > 0.1 and abs(gap - bound) < EXACT


def test_claim_1_the_bound_is_the_printed_formula():
    values = torch.tensor([50.0, 9.0, 4.0, 1.0], dtype=torch.float64)
    ratio = (14 / 3) / 36 ** (1 / 3)
    assert float(tail_am_gm(values, 1)) == pytest.approx(ratio, rel=1e-14)
    expected = 7 * 3 / 2 * torch.log(torch.tensor(ratio, dtype=torch.float64))
    assert float(gap_bound(values, 1, 7)) == pytest.approx(float(expected), rel=1e-13)
    assert float(gap_bound(1e-6 * values, 1, 7)) == pytest.approx(float(expected), rel=1e-13)
    assert float(tail_am_gm(values[1:], 0)) == pytest.approx(ratio, rel=1e-14)  # all of it is the tail
