"""A mixture of experts of which half get no tokens for long: the loss before, and the worst after their return.

The experts of a layer are one weight of three dimensions; Muon, which takes matrices alone, has one each. Which expert
a token goes to is given. An expert without tokens has a gradient of exactly zero.

Dimension key: e experts, o outputs, h hidden units, i inputs, t tokens of each expert.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.ablations.disturbed import Form
from bench.optimizers import OPTIMIZERS
from bench.rows import Row

EXPERTS, INPUTS, HIDDEN, OUTPUTS, TOKENS = 8, 32, 64, 32, 64
TEACHER = 16
"""Hidden units of what the experts learn."""
NOISE = 0.2
"""Deviation of the targets' noise: no loss can stay below its square."""
SPREAD = (1.5, 0.3)
"""Deviations of the first and the last input; those between lie on a line."""
RANK = 8
BEFORE, AFTER = 300, 60
"""Steps before experts are idle, and after."""
MEAN = 20
"""Last steps before, whose mean is the loss before."""
IDLE = (200, 500)
SEED = 0


def losses(
    form: Form, before: int, idle: int, after: int = AFTER, tokens: int = TOKENS, lr: float | None = None
) -> list[float]:
    """Train, with so many ``tokens`` for each expert; return the loss of every step, of experts with tokens."""
    g = torch.Generator().manual_seed(SEED)
    first, second = _drawn(g, EXPERTS, TEACHER, INPUTS), _drawn(g, EXPERTS, OUTPUTS, TEACHER)
    start = [_drawn(g, EXPERTS, HIDDEN, INPUTS), _drawn(g, EXPERTS, OUTPUTS, HIDDEN)]
    parts = [list(layer) if form.optimizer == "muon" else [layer] for layer in start]
    layers = [[torch.nn.Parameter(part.clone()) for part in layer] for layer in parts]
    optimizer = form.build([part for layer in layers for part in layer], lr or OPTIMIZERS[form.optimizer].lr, RANK)
    spread = torch.linspace(*SPREAD, INPUTS)
    found = []
    for step in range(before + idle + after):
        x = torch.randn(EXPERTS, tokens, INPUTS, generator=g) * spread
        y = torch.tanh(x @ first.mT) @ second.mT
        y += NOISE * torch.randn(y.shape, generator=g)
        busy = torch.ones(EXPERTS)
        if before <= step < before + idle:
            busy[EXPERTS // 2 :] = 0
        each = (F.gelu(x @ _whole(layers[0]).mT) @ _whole(layers[1]).mT - y).square().mean(dim=(1, 2))
        loss = each @ busy / busy.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def _drawn(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g) / shape[-1] ** 0.5


def _whole(layer: Sequence[Tensor]) -> Tensor:
    """Return the matrices of all experts (e,.,.)."""
    return layer[0] if layer[0].ndim == 3 else torch.stack(tuple(layer))


def figures(form: Form, before: int, idle: int) -> tuple[float, float]:
    """Return the loss before experts are idle, and the worst of the AFTER steps from their return on."""
    found = losses(form, before, idle)
    worst = torch.tensor(found[-AFTER:]).nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    return sum(found[before - MEAN : before]) / MEAN, worst


def measure(form: Form) -> Iterator[Row]:
    """Yield the rows."""
    more = {"unit": "1", "lr": OPTIMIZERS[form.optimizer].lr, "seed": SEED}
    for idle in IDLE:
        before, worst = figures(form, BEFORE, idle)
        if idle == IDLE[0]:  # the same before all
            yield more | {"value": "", "metric": "loss before", "median": before}
        yield more | {"value": f"{idle} steps", "metric": f"worst loss of the next {AFTER}", "median": worst}
