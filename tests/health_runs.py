"""Healthy and sick trainings of a tiny model, and what :func:`prokl.diagnostics.health` says of them.

``python -m tests.health_runs`` prints the numbers of all runs, which docs/diagnostics.md sums up.
"""

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F

import prokl
from bench import models
from bench.training import corpus
from prokl import diagnostics

ASKED = (5, 50, 100, 150, 200)
BATCH, CONTEXT = 8, 64


class Case(NamedTuple):
    """A training: of which model, by which optimizer, and what is wrong with it."""

    family: str = "llama"
    optimizer: str = "ProKLShampoo"
    seed: int = 0
    sick: str = ""


CASES = {
    "llama, seed 0": Case(),
    "llama, seed 1": Case(seed=1),
    "gpt2, seed 0": Case("gpt2"),
    "gpt2, seed 1": Case("gpt2", seed=1),
    "KL-Shampoo": Case(optimizer="KLShampoo"),
    "lr × 10": Case(sick="lr"),
    "idle rows": Case(sick="idle rows"),
    "NaN batch": Case(sick="NaN batch"),
    "another copy": Case(sick="another copy"),
}


def batches_of(seed: int) -> Iterator[torch.Tensor]:
    """Yield (B, T + 1) bytes of Python's standard library."""
    text = torch.frombuffer(bytearray(corpus.read(None)[1]), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(CONTEXT + 1)]


def trained(case: Case, asked: tuple[int, ...] = ASKED) -> dict[int, diagnostics.Health]:
    """Train; return the health of the optimizer at these steps, before the step is made."""
    torch.manual_seed(case.seed)
    if case.family == "llama":
        model = models.Transformer(models.ModelConfig("llama", 1, 64, 2, 172, models.BYTES, CONTEXT, tied=False))
    else:
        model = models.Transformer(models.gpt2(1, 64, 2, context=CONTEXT))
    cls, lr = getattr(prokl, case.optimizer), 0.02 if case.optimizer == "ProKLShampoo" else 0.002
    given = copy.deepcopy(model) if case.sick == "another copy" else model
    # Every second byte stays out of the embedding, which the matrix method steps then.
    matrix = ["embedding.weight"] if case.sick == "idle rows" else []
    groups = prokl.param_groups(given, lr=lr * (10 if case.sick == "lr" else 1), adamw_lr=3e-3, matrix=matrix)
    optimizer, found_at, since = cls(groups), {}, None
    for step, bytes_ in zip(range(1, asked[-1] + 1), batches_of(case.seed), strict=False):
        if case.sick == "idle rows":
            bytes_ = bytes_ // 2 * 2
        logits = model(bytes_[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), bytes_[:, 1:].flatten())
        if case.sick == "NaN batch" and step == asked[-1] - 1:
            loss = loss * torch.nan
        model.zero_grad()
        loss.backward()
        if step in asked:
            found_at[step] = since = diagnostics.health(optimizer, since=since)
        optimizer.step()
    return found_at


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, case in CASES.items():
        for step, found in trained(case).items():
            print(f"{name}, step {step}:\n{found}", flush=True)
