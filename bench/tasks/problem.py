"""What the tasks train: a small net with a weight of every kind, a small GPT, and bare weights; all of it seeded."""

import argparse
import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from bench.models import Transformer, byte_gpt

TOKENS, WIDTH = 12, 16
MIDDLE, END = 12, 24
"""Steps before and after an interruption: every peer refreshes in both, at the latest every tenth step."""


class Failed(Exception):
    """The criterion of a task is not met; the text says what happened."""


class Net(nn.Module):
    """Map tokens to tokens: an embedding, two matrices, a stack of three, a norm and a head."""

    def __init__(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.up_proj = nn.Linear(WIDTH, 24, bias=False)
        self.middle_proj = nn.Linear(24, 24, bias=False)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, 24) / 24**0.5)
        self.adapter: nn.Module = nn.Identity()
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B,) tokens to (B, TOKENS) logits."""
        h = F.silu(self.middle_proj(F.silu(self.up_proj(self.embedding(tokens)))))
        h = torch.einsum("bi,eoi->bo", h, self.experts)
        return self.lm_head(self.norm(self.adapter(h)))


def batch(t: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    """Return tokens and those to predict, of a step and a process."""
    generator = torch.Generator().manual_seed(1000 * rank + t)
    tokens = torch.randint(TOKENS, (64,), generator=generator)
    return tokens, (5 * tokens + 3) % TOKENS


def backward(model: nn.Module, t: int, rank: int = 0) -> Tensor:
    """Give the weights the gradients of a step; return the loss."""
    model.zero_grad()
    tokens, wanted = batch(t, rank)
    loss = F.cross_entropy(model(tokens).float(), wanted)
    loss.backward()
    return loss.detach()


def train(
    model: nn.Module,
    optimizer: Optimizer,
    steps: Iterable[int],
    rank: int = 0,
    change: Callable[[int], None] | None = None,
    seed: int = 0,
) -> list[float]:
    """Train; ``change`` may change the gradients of a step. Return the losses.

    torch's generator is set to ``seed`` at the beginning, as a trainer restores it where it resumes.
    """
    losses = []
    torch.manual_seed(seed)
    for t in steps:
        losses.append(float(backward(model, t, rank)))
        if change is not None:
            change(t)
        optimizer.step()
    return losses


def gpt() -> Transformer:
    """Return a byte-level GPT of two layers."""
    torch.manual_seed(0)
    return Transformer(byte_gpt(2, 32, 2, 32))


@cache
def _text() -> Tensor:
    return torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()


def text_loss(model: nn.Module, seed: int, windows: int = 8) -> Tensor:
    """Return the loss on some windows of a module of the standard library."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(_text()) - 33, (windows,), generator=generator)
    tokens = torch.stack([_text()[start : start + 33] for start in starts.tolist()])
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train_gpt(model: nn.Module, optimizer: Optimizer, steps: int, after: Callable[[], Any] = lambda: None) -> float:
    """Train a GPT; return how far the loss of one large batch fell, in nats, -inf where it is no number any more."""
    with torch.no_grad():
        before = text_loss(model, -1, 64)
    torch.manual_seed(0)
    for t in range(steps):
        model.zero_grad()
        text_loss(model, t).backward()
        optimizer.step()
        after()
    with torch.no_grad():
        fell = float(before - text_loss(model, -1, 64))
    return fell if fell == fell else -torch.inf


class Bare(nn.Module):
    """Weights of certain shapes, whose gradients are given."""

    def __init__(self, *starts: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(start.clone()) for start in starts)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return what a seed gives, drawn in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def copies(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the weights as they are now."""
    return [p.detach().clone() for p in weights]


def held(optimizer: Optimizer) -> set[Tensor]:
    """Return the weights that an optimizer steps."""
    return {p for group in optimizer.param_groups for p in group["params"]}


def require_same(one: Sequence[Tensor], other: Sequence[Tensor], start: Sequence[Tensor], what: str) -> None:
    """Fail where weights differ in a bit; ``start`` is where both came from."""
    if not all(map(torch.equal, one, other)):
        raise Failed(f"{what}: differs by {distance(one, other, start):.2g} of the way")


def require_finite(model: nn.Module, when: str) -> None:
    """Fail where a weight is not finite."""
    wrong = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if wrong:
        raise Failed(f"{', '.join(wrong)} not finite {when}")


def distance(one: Iterable[Tensor], other: Iterable[Tensor], start: Iterable[Tensor]) -> float:
    """Return the largest distance of two results, weight by weight, relative to the way that the first one went."""
    ways = [
        (float((a.double() - b.double()).norm()), float((a.double() - c.double()).norm()))
        for a, b, c in zip(one, other, start, strict=True)
    ]
    far = [gap / way if way else torch.inf if gap else 0.0 for gap, way in ways]
    return torch.inf if any(x != x for x in far) else max(far)
