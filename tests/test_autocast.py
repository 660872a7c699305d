"""A step under autocast, where trainers leave it on around the whole update: the factors keep their precision."""

import pytest
import torch
from torch import nn

import prokl
from prokl import diagnostics


def trained(cls, autocast, closure=False):
    """Return weights and figures after steps, refreshes among them, all of which autocast surrounds, or none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6))
    optimizer = cls(prokl.param_groups(model, lr=0.01, adamw_lr=1e-3, rank=4 if cls is prokl.ProKLShampoo else None))
    x = torch.randn(16, 8)
    dtypes = set()

    def loss():
        optimizer.zero_grad()
        outputs = model(x)
        dtypes.add(outputs.dtype)
        outputs.float().square().mean().backward()

    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and closure):
            optimizer.step(loss) if closure else loss()
        if not closure:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                figures = diagnostics.scalars(optimizer) | diagnostics.phi(optimizer)
                optimizer.step()
    return list(model.parameters()), figures if not closure else {}, dtypes


@pytest.mark.parametrize("cls", [prokl.ProKLShampoo, prokl.KLShampoo])
def test_a_step_and_its_figures_are_the_same_under_autocast(cls):
    (weights, figures, _), (expected, told, _) = trained(cls, autocast=True), trained(cls, autocast=False)
    assert all(torch.equal(p, q) for p, q in zip(weights, expected, strict=True))
    assert figures.keys() == told.keys() and len(figures) > 5
    for key, value in figures.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(told[key])), key


def test_a_closure_keeps_the_autocast_around_the_step():
    assert trained(prokl.ProKLShampoo, autocast=True, closure=True)[2] == {torch.bfloat16}
    assert trained(prokl.ProKLShampoo, autocast=False, closure=True)[2] == {torch.float32}
