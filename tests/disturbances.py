"""Optimizers whose gradients are disturbed: a weight's steps in usual ones, and experts that get no tokens for long.

Dimension key: m short side, T steps.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.optimizers import CLIP, OPTIMIZERS, OWN

BEFORE = 60
"""Ordinary gradients first. The mean step of their second half is the usual one."""
AFTER = 30
"""Steps that are watched after the first one that counts."""
NEAR = 0.1
"""Relative distance from the usual step within which a step is as usual."""


@dataclass(frozen=True)
class Form:
    """One optimizer; ``bounded`` is of this package's alone, and False is the paper's form."""

    optimizer: str
    bounded: bool = True

    def build(self, weights, lr, **settings):
        """Build the optimizer of matrices: its defaults, and no weight decay."""
        if self.optimizer in OWN:
            settings["clip_threshold"] = CLIP if self.bounded else None
        return OPTIMIZERS[self.optimizer].make(weights, lr=lr, weight_decay=0.0, **settings)


@dataclass(frozen=True)
class Case:
    """A disturbance of a weight's gradients after the ordinary ones."""

    shape: tuple[int, int]
    factors: tuple[float, ...]  # what these gradients are multiplied by
    returning: bool = False  # whether the steps after them count, not theirs
    lasting: bool = False  # whether no ordinary gradients follow
    rows: int | None = None  # how many rows of the gradient, the first ones, are multiplied; None: all
    scale: float = 1.0  # of the ordinary gradients


@torch.no_grad()
def run(case, form, **settings):
    """Step a weight through a case; return the norm of every row of every step, (T,m), and if the state is finite."""
    W = torch.nn.Parameter(torch.zeros(case.shape))
    optimizer = form.build([W], 1.0, **settings)
    generator = torch.Generator().manual_seed(0)
    found = []
    for factor in [1.0] * BEFORE + [*case.factors] + [1.0] * (0 if case.lasting else AFTER + case.returning):
        W.zero_()  # so that it holds one step afterwards, unrounded
        W.grad = case.scale * torch.randn(case.shape, generator=generator)
        W.grad[: case.rows] *= factor
        optimizer.step()
        found.append(torch.linalg.vector_norm(W.detach(), dim=1, dtype=torch.float64))
    tensors = [value for value in optimizer.state[W].values() if isinstance(value, Tensor)]
    return torch.stack(found), all(bool(tensor.isfinite().all()) for tensor in tensors)


def figures(case, form, **settings):
    """Return the longest step that counts, in usual ones, and after how many steps they are as usual, NaN if never."""
    each, finite = run(case, form, **settings)
    start = BEFORE + len(case.factors) * case.returning
    longest = 0.0 if finite else math.inf
    for own in (each, each[:, : case.rows]):
        norms = torch.linalg.vector_norm(own, dim=1)
        steps = (norms[start:] / norms[BEFORE - AFTER : BEFORE].mean()).nan_to_num(nan=math.inf, posinf=math.inf)
        longest = max(longest, steps.max().item())
    far = ((steps - 1).abs() > NEAR).nonzero()
    until = int(far[-1]) + 1 if len(far) else 0
    return longest, until if until < len(steps) else math.nan


EXPERTS, INPUTS, HIDDEN, OUTPUTS, TOKENS, TEACHER, RANK = 8, 32, 64, 32, 64, 16, 8


def experts_losses(form, before, idle, after):
    """Train experts, of which half have no tokens and gradients of zero in between; return the loss of every step.

    The experts of a layer are one weight (e,.,.); Muon, which takes matrices alone, has one each.
    """
    g = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(EXPERTS, *shape, generator=g) / shape[-1] ** 0.5

    first, second = drawn(TEACHER, INPUTS), drawn(OUTPUTS, TEACHER)  # what they learn
    parts = [
        list(layer) if form.optimizer == "muon" else [layer]
        for layer in (drawn(HIDDEN, INPUTS), drawn(OUTPUTS, HIDDEN))
    ]
    layers = [[torch.nn.Parameter(part.clone()) for part in layer] for layer in parts]
    own = {"rank": RANK} if form.optimizer == "pro-klshampoo" else {}
    optimizer = form.build([part for layer in layers for part in layer], OPTIMIZERS[form.optimizer].lr, **own)
    spread, found = torch.linspace(1.5, 0.3, INPUTS), []
    for step in range(before + idle + after):
        x = torch.randn(EXPERTS, TOKENS, INPUTS, generator=g) * spread
        y = torch.tanh(x @ first.mT) @ second.mT
        y += 0.2 * torch.randn(y.shape, generator=g)
        busy = torch.ones(EXPERTS)
        if before <= step < before + idle:
            busy[EXPERTS // 2 :] = 0
        W, V = (layer[0] if layer[0].ndim == 3 else torch.stack(layer) for layer in layers)
        each = (F.gelu(x @ W.mT) @ V.mT - y).square().mean(dim=(1, 2))
        loss = each @ busy / busy.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
