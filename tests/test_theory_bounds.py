"""The lemma on preconditioner bounds: 1/C^2 <= eigenvalues <= Theta along a run, whatever the gradients do."""

import pytest
import torch

import prokl
from prokl.algorithm.shapes import ceiling
from tests.theory import identity_state, next_state, normal

SHAPES = [(6, 9), (12, 5), (8, 8), (1, 2), (40, 30)]
LIMIT = 3.0
"""G_max: no gradient has a larger operator norm."""


def eigenvalues(state):
    return {key: state[key].double() ** -2 for key in state if key.startswith("inv_sqrt")}


def gradients(rows, cols):
    """Silence until every eigenvalue has fallen to its floor, then the largest that are allowed, in all directions."""
    for t in range(80):
        yield 1e-9 * normal(rows, cols, seed=t)
    for t in range(40):
        G = normal(rows, cols, seed=1000 + t)
        left, _, right = torch.linalg.svd(G, full_matrices=False)
        yield LIMIT * (left @ right if t % 2 else left[:, :1] @ right[:1])
        if t % 10 == 0:
            yield torch.zeros(rows, cols, dtype=torch.float64)


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bounds_lemma_holds_for_the_optimizers_eigenvalues(shape, backend):
    """The start is a number, which the lemma's Theta has to include: lambda_0 is no eigenvalue of L_0 or S_0."""
    m, n = sorted(shape)
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = prokl.ProKLShampoo([p], rank=3, beta2=0.9, init_eigenvalue=0.1, backend=backend)
    floors = {"L": ceiling(m) ** -2, "S": ceiling(n) ** -2, "mu": ceiling(n) ** -2}
    theta = max(0.1, ceiling(n) ** 2 * LIMIT**2)  # C is the largest of the three ceilings
    lowest, highest = dict.fromkeys(floors, theta), 0.0
    for G in gradients(*shape):
        p.grad = G
        optimizer.step()
        for key, values in eigenvalues(optimizer.state[p]).items():
            side = key.rpartition("_")[2]
            lowest[side] = min(lowest[side], float(values.min()))
            highest = max(highest, float(values.max()))
    assert highest <= theta
    assert highest > 1  # the burst did raise them
    for side, floor in floors.items():
        assert lowest[side] == pytest.approx(floor, rel=1e-12), side  # reached, and never undercut: s is cut at C


@pytest.mark.parametrize("m, n, r", [(3, 6, 2), (4, 4, 1)])
def test_bounds_lemma_holds_for_algorithm_1_with_the_clip(m, n, r):
    C = 5.0
    state = identity_state(torch.linalg.qr(normal(n, r, seed=0))[0], m)
    theta = max(1.0, C**2 * LIMIT**2)
    eye, from_orthogonal = torch.eye(r, dtype=torch.float64), 0.0
    for t, G in enumerate(gradients(m, n)):
        G = G + 1e-12 * normal(m, n, seed=t)  # no QR of a zero
        state = next_state(G, state, beta2=0.8, refresh=t % 5 == 0)
        for key in ("lambda_L", "lambda_S", "mu"):
            state[key] = state[key].clamp(min=C**-2)
            assert state[key].max() <= theta
        # The proof takes Q_S for orthogonal; between refreshes it is a contraction, which the bounds survive.
        Q_S = state["Q_S"]
        assert torch.linalg.matrix_norm(Q_S, 2) <= 1 + 1e-12
        from_orthogonal = max(from_orthogonal, float((Q_S.mT @ Q_S - eye).norm()))
    assert from_orthogonal > 0.25  # measured: 0.56 and 0.27


def test_bounds_lemma_theta_leaves_out_the_start_value():
    """It is 1e-6 for gradients of norm 1e-4, below the lambda_0 = 0.1 at which all eigenvalues start."""
    p = torch.nn.Parameter(torch.zeros(6, 9, dtype=torch.float64))
    optimizer = prokl.ProKLShampoo([p], rank=3, init_eigenvalue=0.1)
    p.grad = normal(6, 9, seed=0)
    p.grad *= 1e-4 / torch.linalg.matrix_norm(p.grad, 2)
    optimizer.step()
    state = optimizer.state[p]
    factors = [float(torch.linalg.matrix_norm(state[key], 2)) for key in ("L_Q", "S")]
    theta = max(*factors, ceiling(9) ** 2 * 1e-4**2)
    assert theta == pytest.approx(1e-6)
    assert all(values.max() == pytest.approx(0.1) for values in eigenvalues(state).values())


def test_bounds_lemma_the_upper_bound_is_attained():
    """One row, all eigenvalues at the floor, a gradient of norm G_max in the complement, no memory: mu = C^2 G_max^2.

    The lemma's Theta cannot be lowered.
    """
    C = 5.0
    floor = torch.tensor([C**-2], dtype=torch.float64)
    state = identity_state(torch.tensor([[1.0], [0.0]], dtype=torch.float64), m=1)
    state |= {"lambda_L": floor, "lambda_S": floor, "mu": floor[0]}
    G = torch.tensor([[1e-6, LIMIT]], dtype=torch.float64)
    after = next_state(G, state, beta2=0.0)
    assert float(after["mu"]) == pytest.approx(C**2 * LIMIT**2, rel=1e-12)
