"""Tasks of training: whole models, weights of every kind, schedulers, closures, layers that come later."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from bench.tasks.peers import ADAMW_LR, Peer
from bench.tasks.problem import (
    END,
    MIDDLE,
    Bare,
    Failed,
    Net,
    backward,
    copies,
    distance,
    gpt,
    held,
    normal,
    require_finite,
    require_same,
    train,
    train_gpt,
)

STEPS = 60
"""Of the GPT."""
ENOUGH = 0.5
"""Share of what a comparable run gains that has to be gained: about whether it trains, not about how well."""
LEAST = 0.1
"""What has to be gained at least, in nats."""
ROUNDING = 0.05
"""Room for rounding, relative to the way that a weight went: Newton-Schulz is in bfloat16, whose unit is 0.008, and may
round otherwise where matrices are multiplied together."""


@cache
def _adamw_fell() -> float:
    model = gpt()
    return train_gpt(model, torch.optim.AdamW(model.parameters(), ADAMW_LR), STEPS)


def whole_model(peer: Peer) -> str:
    """One optimizer moves every weight of a GPT; its loss falls by half of what AdamW gains, or more."""
    model = gpt()
    optimizer = peer.optimizer(model)
    if len(held(optimizer)) < len(list(model.parameters())):
        raise Failed("for matrices alone; embeddings, norms and head need another optimizer")
    start = copies(model.parameters())
    fell = train_gpt(model, optimizer, STEPS)
    still = [name for (name, p), before in zip(model.named_parameters(), start, strict=True) if p.equal(before)]
    if still:
        raise Failed(f"{', '.join(still)} did not move")
    if not fell >= ENOUGH * _adamw_fell():
        raise Failed(f"loss fell by {fell:.2f}, with AdamW by {_adamw_fell():.2f}")
    return f"loss fell by {fell:.2f}, with AdamW by {_adamw_fell():.2f}"


def _step_given(optimizer: torch.optim.Optimizer, gradients: list[list[Tensor]], weights: list[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    for now in gradients:
        for p, g in zip(weights, now, strict=True):
            p.grad = g.clone()
        optimizer.step()
    return copies(weights)


def experts(peer: Peer) -> str:
    """A stack of three matrices goes where the three go by themselves, however their gradients differ in size."""
    starts = normal(0, 3, 24, 16)
    gradients = normal(1, END, 3, 24, 16) * torch.tensor([1.0, 0.1, 10.0]).view(3, 1, 1)
    stack, single = Bare(starts), Bare(*starts)
    optimizer = peer.optimizer(stack, stack.weights[0], "3-D weights")
    (one,) = _step_given(optimizer, [[g] for g in gradients], list(stack.weights))
    each = _step_given(peer.optimizer(single), [list(g) for g in gradients], list(single.weights))
    far = distance(each, one, starts)
    if not far <= ROUNDING:
        raise Failed(f"{far:.0%} of the way from where the matrices go by themselves")
    return "exactly" if far == 0 else f"up to {far:.1g} of the way"


class Convolutions(nn.Module):
    """Two convolutions and a linear layer, on small images."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 8, 3)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, 3, 8, 8) to (B, 4)."""
        h = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.out(h.mean((-1, -2)))


def convolutions(peer: Peer) -> str:
    """4-D weights alone are trained to where the loss is half of what it began with."""
    model, teacher = Convolutions(), Convolutions(seed=1)
    kernels = [model.first.weight, model.second.weight]
    optimizer = peer.optimizer(model, model.first.weight, "4-D weights")
    start = copies(kernels)
    with torch.no_grad():
        for p, told in zip(model.parameters(), teacher.parameters(), strict=True):
            if not any(p is kernel for kernel in kernels):
                p.copy_(told)
    losses = []
    x = normal(2, 64, 3, 8, 8)
    for _ in range(100):
        model.zero_grad()
        loss = F.mse_loss(model(x), teacher(x).detach())
        loss.backward()
        for p in model.parameters():
            if not any(p is kernel for kernel in kernels):
                p.grad = None
        optimizer.step()
        losses.append(float(loss.detach()))
    if any(p.equal(before) for p, before in zip(kernels, start, strict=True)):
        raise Failed("a 4-D weight did not move")
    share = min(losses) / losses[0]
    if not share <= 0.5:
        raise Failed(f"{len(losses)} steps leave {share:.0%} of the loss")
    return f"{share:.0%} of the loss left"


def closure(peer: Peer) -> str:
    """step(closure) calls it once, with gradients on, returns its loss and steps as without one."""
    model, other = Net(), Net()
    start = copies(model.parameters())
    optimizer, calls = peer.optimizer(model), []

    def again() -> Tensor:
        calls.append(backward(model, len(calls)))
        return calls[-1]

    torch.manual_seed(0)
    for t in range(MIDDLE):
        found = optimizer.step(again)
        if len(calls) != t + 1:
            raise Failed(f"called {len(calls)} times in {t + 1} steps")
        if found is None or float(found) != float(calls[-1]):
            raise Failed("its loss is not returned")
    train(other, peer.optimizer(other), range(MIDDLE))
    require_same(list(model.parameters()), list(other.parameters()), start, "steps with a closure")
    return "as without"


def one_cycle(peer: Peer) -> str:
    """OneCycleLR(optimizer, 0.02), all else at its defaults, gains half of what constant rates gain, or more."""
    fell = []
    for scheduled in (False, True):
        model = gpt()
        optimizer = peer.optimizer(model)
        betas = [group["betas"][1:] for group in optimizer.param_groups if "betas" in group]
        if scheduled:
            scheduler = OneCycleLR(optimizer, 0.02, total_steps=STEPS + 1)
            fell.append(train_gpt(model, optimizer, STEPS, scheduler.step))
            if betas != [group["betas"][1:] for group in optimizer.param_groups if "betas" in group]:
                raise Failed("the second beta is another one now")
        else:
            fell.append(train_gpt(model, optimizer, STEPS))
    said = f"loss fell by {fell[1]:.2f}, at constant rates by {fell[0]:.2f}"
    if not fell[1] >= max(ENOUGH * fell[0], LEAST):
        raise Failed(said)
    return said


def unnamed_groups(peer: Peer) -> str:
    """add_param_group({"params": [...]}), nothing else in it, takes a weight and a bias on the way and trains both."""
    model = Net()
    optimizer = peer.build((peer.unnamed or peer.groups)(model))
    train(model, optimizer, range(MIDDLE))
    model.adapter = nn.Linear(16, 16)
    start = copies(model.adapter.parameters())
    for p in model.adapter.parameters():
        optimizer.add_param_group({"params": [p]})
    train(model, optimizer, range(MIDDLE, END))
    require_finite(model, "afterwards")
    if any(p.equal(before) for p, before in zip(model.adapter.parameters(), start, strict=True)):
        raise Failed("taken, but not moved")
    return "both train"
