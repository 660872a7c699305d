"""The state of a weight is the paper's table of memory, line by line, and the listed scalars."""

import math

import pytest
import torch

from tests.inputs import BACKENDS, KL, PRO, weight
from tests.training import train, weights_of

TABLE = {
    PRO: lambda m, n, r: {
        "factors": {"L_Q": (m, m), "S": (r, r)},
        "eigenbases": {"Q_L": (m, m), "Q_S": (r, r)},
        "eigenvalues": {"inv_sqrt_lambda_L": (m,), "inv_sqrt_lambda_S": (r,)},
        "subspace basis": {"U": (n, r)},
        "complement scalar": {"inv_sqrt_mu": ()},
        "momentum": {"M_Q": (m, n)},
    },
    KL: lambda m, n, r: {
        "factors": {"L_Q": (m, m), "R_Q": (n, n)},
        "eigenbases": {"Q_L": (m, m), "Q_R": (n, n)},
        "eigenvalues": {"inv_sqrt_lambda_L": (m,), "inv_sqrt_lambda_R": (n,)},
        "momentum": {"M_Q": (m, n)},
    },
}
"""The paper's table: the tensors in each of its lines, of a matrix with short side m, long side n and rank r."""
# Either side the longer, square, a row or column, both stacks and convolutions; with the rank that is left of 128.
SHAPES = [((6, 4), 4), ((5, 5), 4), ((1, 7), 1), ((7, 1), 1), ((2, 2), 1), ((3, 8, 5), 5), ((6, 2, 3, 3), 6)]
SHAPES += [((2, 1, 1, 1), 1)]


@pytest.mark.parametrize("start", ["auto", 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape, r", SHAPES)
@pytest.mark.parametrize("cls", TABLE)
def test_a_trained_state_is_the_papers_table_with_ranks_clamped(cls, shape, r, backend, dtype, start):
    settings = {"state_dtype": dtype, "init_eigenvalue": start, "backend": backend}
    settings |= {"rank": 128} if cls is PRO else {}
    optimizer = train(cls([weight(*shape, dtype=dtype)], **settings), range(3))
    (w,) = weights_of(optimizer)
    stack = shape[:1] if len(shape) == 3 else ()
    rows, cols = shape[1:] if stack else (shape[0], math.prod(shape[1:]))
    m, n = sorted((rows, cols))
    expected = {key: own for line in TABLE[cls](m, n, r).values() for key, own in line.items()}
    scalars = {"step", "skipped", "clipped"} | ({"lambda_0"} if start == "auto" else set())
    state = optimizer.state[w]
    assert state.keys() == expected.keys() | scalars
    assert {key: (state[key].dtype, state[key].shape) for key in expected} == {
        key: (torch.float32 if key in ("Q_L", "Q_R") or len(own) < 2 else dtype, stack + own)
        for key, own in expected.items()
    }
    for key in scalars:
        assert torch.as_tensor(state[key]).shape == (stack if key != "skipped" else ())
    assert all(v.isfinite().all() for k, v in state.items() if k != "step") and w.isfinite().all()
