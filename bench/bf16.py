"""What bfloat16 weights cost in loss: ``python -m bench.bf16 [--out bench/results/bf16.csv]``.

Trains a small byte-level GPT whose weights are stored in float32 or bfloat16, the latter as ``bf16_weights`` says, from
the same weights and on the same batches. The model computes in float32 on the stored weights, so that nothing else
differs; gradients are rounded to the weights' dtype.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from bench import command, rows
from bench.disturbances.gpt import SCALE
from bench.models import BYTES, build
from bench.optimizers import OPTIMIZERS, Hyper, split
from bench.training.schedules import SCHEDULE
from bench.training.sources import Batch, Source, open_source

MODES = ("plain", "stochastic", "master")
FORMS = {
    "float32": (torch.float32, torch.float32, "plain"),
    **{mode: (torch.bfloat16, torch.bfloat16, mode) for mode in MODES},
    **{f"{mode}, AdamW's in float32": (torch.bfloat16, torch.float32, mode) for mode in MODES},
}
"""Dtype of the matrix method's weights, of AdamW's, and ``bf16_weights``; differences are to the first."""
LR = {"pro-klshampoo": 0.02, "kl-shampoo": OPTIMIZERS["kl-shampoo"].lr}
CONFIG, RANK = SCALE.config, SCALE.largest


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small GPT with weights in float32 and in bfloat16."""

    out: Path = rows.RESULTS / "bf16.csv"  # Results file
    data: Path | None = None  # Text to train on; Python's standard library by default
    optimizers: tuple[Literal[tuple(LR)], ...] = tuple(LR)  # type: ignore[valid-type]
    """To train with."""
    forms: tuple[Literal[tuple(FORMS)], ...] = tuple(FORMS)  # type: ignore[valid-type]
    """Of weights; the first always."""
    seeds: tuple[int, ...] = (0, 1, 2)  # Of weights and batches
    steps: int = SCALE.steps  # Of every run

    def __post_init__(self) -> None:
        command.at_least(1, steps=self.steps)
        command.some(seeds=self.seeds, optimizers=self.optimizers, forms=self.forms)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross-entropy in nats, computed in float32 whatever the weights are stored in."""
    weights = {name: p.float() for name, p in model.named_parameters()}
    logits: torch.Tensor = functional_call(model, weights, batch[0])
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def final_loss(h: Hyper, form: str, seed: int, steps: int, source: Source) -> float:
    """Train one model; return its validation loss."""
    matrices, others, mode = FORMS[form]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(CONFIG)
    groups = split(model, h)
    for group in groups:
        for _, p in group["params"]:
            p.data = p.data.to(others if group["algorithm"] == "adamw" else matrices)
    optimizer = OPTIMIZERS[h.method].make(groups, bf16_weights=mode)
    peaks = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        batch = source.training_batch(seed, step, SCALE.batch, CONFIG.context)
        model.zero_grad()
        loss_of(model, batch).backward()
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * SCHEDULE[CONFIG.family](step, steps)
        optimizer.step()
    with torch.no_grad():
        held_out = source.validation_batches(SCALE.eval_windows, SCALE.eval_windows, CONFIG.context)
        return statistics.mean(loss_of(model, batch).item() for batch in held_out)


def spread(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean; None of a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def row_of(h: Hyper, form: str, o: Options, losses: Sequence[float], usual: Sequence[float]) -> rows.Row:
    """Return the row of a form, given its losses and those of the first form, by seed."""
    pairs = [loss - other for loss, other in zip(losses, usual, strict=True)]
    return {
        "case": "bfloat16 weights",
        "optimizer": h.method,
        "rank": h.rank,
        "value": form,
        "seeds": " ".join(map(str, o.seeds)),
        "validation_loss_per_seed": " ".join(f"{loss:.5f}" for loss in losses),
        "validation_loss": statistics.mean(losses),
        "validation_loss_se": spread(losses),
        "difference": statistics.mean(pairs),
        "difference_se": spread(pairs),
        "lr": h.lr,
        "adamw_lr": h.adamw_lr,
        "steps": o.steps,
        "batch": SCALE.batch,
        "context": CONFIG.context,
        "layers": CONFIG.layers,
        "width": CONFIG.width,
    } | rows.environment(torch.device("cpu"))


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.bf16")
    command.make_file(o.out)
    source = open_source(o.data, CONFIG.context, BYTES)
    for method in o.optimizers:
        found: list[rows.Row] = []
        h = Hyper(method, LR[method], OPTIMIZERS["adamw"].lr, rank=RANK if "pro" in method else None)
        usual: list[float] = []
        for form in dict.fromkeys((next(iter(FORMS)), *o.forms)):
            losses = [final_loss(h, form, seed, o.steps, source) for seed in o.seeds]
            usual = usual or losses
            found.append(row_of(h, form, o, losses, usual))
            print(method, form, found[-1]["validation_loss_per_seed"], f"{found[-1]['difference']:+.4f}", flush=True)
        rows.upsert(o.out, found, ("optimizer", "value"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
