"""Whole optimizer steps: Pro-KLShampoo batched and as the reference, KL-Shampoo, and torch's Muon.

Run with ``pytest bench/test_step.py --benchmark-only``; pytest-benchmark prints each time beside its ratio to the
fastest of its group. The Newton-Schulz products of Pro-KLShampoo and Muon are both bfloat16, their defaults. The
mean includes the refresh at every tenth step; "first" is the step that only initialises (its SVDs).
"""

import pytest
import torch

import prokl
from prokl import KLShampoo, ProKLShampoo

SETS = {
    "64 of 48x96": [(48, 96)] * 64,
    "48 of 256x256, 24 of 256x1024": [(256, 256)] * 48 + [(256, 1024)] * 24,
}
CONTENDERS = {
    "pro-klshampoo torch": lambda ps: ProKLShampoo(ps),
    "pro-klshampoo reference": lambda ps: ProKLShampoo(ps, backend="reference"),
    "klshampoo torch": lambda ps: KLShampoo(ps),
    "muon": lambda ps: torch.optim.Muon(ps, lr=0.02),
}


def parameters_with_gradients(shapes):
    """Low-rank signal plus noise, as training gradients are."""
    g = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(0.02 * torch.randn(s, generator=g)) for s in shapes]
    signals = [(torch.randn(s[0], 16, generator=g), torch.randn(16, s[1], generator=g)) for s in shapes]

    def draw():
        for p, (a, b) in zip(parameters, signals, strict=True):
            p.grad = (a * torch.randn(16, generator=g)) @ b + torch.randn(p.shape, generator=g)

    return parameters, draw


def describe(benchmark, group):
    """What the rows need to know of the process that measured."""
    benchmark.group = group
    benchmark.extra_info.update(threads=torch.get_num_threads(), torch=torch.__version__, prokl=prokl.__version__)


@pytest.mark.parametrize("contender", CONTENDERS)
@pytest.mark.parametrize("name", SETS)
def test_step(benchmark, name, contender):
    describe(benchmark, f"step, {name}")
    parameters, draw = parameters_with_gradients(SETS[name])
    optimizer = CONTENDERS[contender](parameters)
    for _ in range(2):
        draw()
        optimizer.step()
    benchmark.pedantic(optimizer.step, setup=draw, rounds=20)
    assert all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("name", SETS)
def test_first_step(benchmark, name):
    describe(benchmark, f"first, {name}")

    def fresh():
        parameters, draw = parameters_with_gradients(SETS[name])
        draw()
        return (ProKLShampoo(parameters),), {}

    benchmark.pedantic(lambda optimizer: optimizer.step(), setup=fresh, rounds=3)
