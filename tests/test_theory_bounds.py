"""The lemma on preconditioner bounds: 1/C^2 <= eigenvalues <= Theta along a run, whatever the gradients do."""

import pytest
import torch

import prokl
from prokl.algorithm.shapes import ceiling
from tests.theory import normal

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
