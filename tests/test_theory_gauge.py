"""The scalar gauge (c L, R / c): free in the equations, bounded by the clip of the eigenvalues.

The gradients are A^1/2 Z B^1/2 with diagonal A and B, in whose eigenbases the expected statistics are closed forms.
These go through the step's own eigenvalue EMA, in `prokl.algorithm.evidence.admit`.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from prokl.algorithm.evidence import admit
from prokl.algorithm.shapes import ceiling

A = torch.tensor([3.0, 1.5, 1.0], dtype=torch.float64)
B = torch.tensor([8.0, 2.0, 0.5, 0.5, 0.5], dtype=torch.float64)  # spike and flat: the restricted family has it
M, N, R = len(A), len(B), 2
BETA2 = 0.5
FLOOR = ceiling(M) ** -2
"""All three ceilings are 10 for sides this small."""
LEAST, MOST = FLOOR / A.min(), B.min() / FLOOR
"""Gauges c for which neither c A nor B / c lies below the floor."""


def at_gauge(c):
    """lambda_L, lambda_S and mu of the covariance A (x) B, scaled by c and 1 / c."""
    return c * A, B[:R] / c, B[-1] / c


def expected_step(lambda_L, lambda_S, mu, ceilings):
    """One step of the eigenvalue EMA with the statistics' expectations."""
    state = {"inv_sqrt_lambda_L": lambda_L.rsqrt(), "inv_sqrt_lambda_S": lambda_S.rsqrt(), "inv_sqrt_mu": mu.rsqrt()}
    state |= {"lambda_0": torch.tensor((ceiling(N) / ceilings) ** 2, dtype=torch.float64)}
    state = {key: t[None] for key, t in state.items()}
    h = SimpleNamespace(beta2=BETA2, eps=0.0, clip_threshold=None)
    squares = torch.outer(A, B[:R])[None]
    s = admit(squares.sqrt(), squares, (A * B[R:].sum())[None], state, h, N).s
    return s.L[0] ** -2, s.S[0] ** -2, s.mu[0] ** -2


def product(lambda_L, lambda_S, mu):
    """Eigenvalues of L (x) R^."""
    return torch.outer(lambda_L, torch.cat([lambda_S, mu.expand(N - R)]))


AT_REST = [(c, math.inf) for c in (1e-6, 0.3, 1.0, 1e5)] + [(c, ceiling(M)) for c in (1.01 * LEAST, 1.0, 0.99 * MOST)]


@pytest.mark.parametrize("c, ceilings", AT_REST, ids=lambda value: f"{float(value):.3g}")
def test_gauge_any_within_the_clips_bounds_is_a_rest_point(c, ceilings):
    state = at_gauge(c)
    for old, new in zip(state, expected_step(*state, ceilings), strict=True):
        assert ((new - old).abs() <= 1e-14 * old).all()  # a dozen roundings


@pytest.mark.parametrize("c", [1e-2 * LEAST, 1e-6 * LEAST, 1e2 * MOST, 1e6 * MOST], ids="{:.0e}".format)
def test_gauge_the_clip_brings_others_between_its_bounds(c):
    """And the product, which is all that the gradients determine, comes out right."""
    state = at_gauge(c)
    assert min(float(t.min()) for t in state) < FLOOR
    for _ in range(400):  # BETA2 = 1/2: errors fall by at least a few per cent a step
        state = expected_step(*state, ceiling(M))
    assert min(float(t.min()) for t in state) >= FLOOR * (1 - 1e-14)
    assert (product(*state) / torch.outer(A, B) - 1).abs().max() < 1e-9
    gauges = state[0] / A
    assert (gauges / gauges[0] - 1).abs().max() < 1e-9
    assert LEAST * (1 - 1e-9) <= gauges[0] <= MOST * (1 + 1e-9)
