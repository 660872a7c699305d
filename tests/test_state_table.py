"""The state of a weight is the paper's table of memory, line by line."""

import pytest
import torch

from bench.optimizers import OPTIMIZERS

LINES = {
    **dict.fromkeys(("L", "S", "R"), "factors"),
    **dict.fromkeys(("Q_L", "Q_S", "Q_R"), "eigenbases"),
    **dict.fromkeys(("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_lambda_R"), "eigenvalues"),
    "U": "subspace basis",
    "inv_sqrt_mu": "complement scalar",
    **dict.fromkeys(("M", "momentum_buffer", "exp_avg"), "momentum"),
    "exp_avg_sq": "second moment",
}
"""Line of the paper's table that a tensor of the state belongs to."""
TABLE = {
    "pro-klshampoo": lambda m, n, r: {
        "factors": m * m + r * r,
        "eigenbases": m * m + r * r,
        "eigenvalues": m + r,
        "subspace basis": n * r,
        "complement scalar": 1,
        "momentum": m * n,
    },
    "kl-shampoo": lambda m, n, r: {
        "factors": m * m + n * n,
        "eigenbases": m * m + n * n,
        "eigenvalues": m + n,
        "momentum": m * n,
    },
    "muon": lambda m, n, r: {"momentum": m * n},
    "adamw": lambda m, n, r: {"momentum": m * n, "second moment": m * n},
}
"""Elements of one weight in the lines of the paper's table; Muon's and AdamW's likewise, which it does not have."""
SCALARS = {
    **dict.fromkeys(("pro-klshampoo", "kl-shampoo"), ["clipped", "lambda_0", "skipped", "step"]),
    "muon": [],
    "adamw": ["step"],
}
"""What the state of a weight holds that is in no line: one number each."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", TABLE)
@pytest.mark.parametrize("m, n, rank", [(12, 12, 128), (12, 20, 4)])
def test_a_trained_state_is_the_papers_table_line_by_line_and_the_listed_scalars(method, m, n, rank, dtype):
    W = torch.nn.Parameter(torch.randn(m, n).to(dtype))
    settings = {"state_dtype": dtype} if "shampoo" in method else {}
    settings |= {"rank": rank} if method == "pro-klshampoo" else {}
    optimizer = OPTIMIZERS[method].make([W], **settings)
    for _ in range(11):
        W.grad = torch.randn(m, n).to(dtype)
        optimizer.step()
    table = TABLE[method](m, n, min(rank, m, n - 1))
    found, scalars = dict.fromkeys(table, 0), []
    for key, value in optimizer.state[W].items():
        if key in LINES:
            found[LINES[key]] += value.numel()
            assert value.dtype == dtype
        else:
            scalars.append(key)
            assert not isinstance(value, torch.Tensor) or value.numel() == 1
    assert found == table and sorted(scalars) == SCALARS[method]
