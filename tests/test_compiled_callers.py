"""``torch.compile`` of a function that steps: a graph break at the step, and the same result."""

import pytest
import torch
from torch import nn

import prokl


def trained(cls, compiled):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    matrices, vectors = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    optimizer = cls([{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 1e-3}], lr=0.01)
    x = torch.randn(16, 8)

    def update():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    call = torch.compile(update, backend="eager") if compiled else update
    losses = [call().detach() for _ in range(4)]
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("cls", [prokl.ProKLShampoo, prokl.KLShampoo])
def test_a_compiled_function_that_steps_is_exact(cls):
    """Beside an AdamW group, whose steps are tensors: Dynamo would take those of the matrices for such."""
    for a, b in zip(trained(cls, False), trained(cls, True), strict=True):
        assert torch.equal(a, b)


def test_importing_prokl_does_not_import_dynamo():
    import subprocess
    import sys

    code = "import sys, torch, prokl; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
