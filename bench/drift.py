"""Drift of the bases in a long run: ``python -m bench.drift [--steps 5000] [--out bench/results/drift.csv]``.

Trains a small byte-level GPT in float32, with a bfloat16 state, and with bfloat16 weights, and writes along the way the
largest ||Q^T Q - I||_F over all weights of every basis, the training loss, and how often a step was bounded so far.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from bench import command, rows
from bench.models import BYTES, build, byte_gpt
from bench.optimizers import OPTIMIZERS, Hyper, split
from bench.training.sources import Source, open_source
from prokl import diagnostics

CONFIG = byte_gpt(2, 64, 2, 64)
BATCH, RANK, SEED = 8, 16, 0
FORMS = {
    "float32": (torch.float32, None),
    "bfloat16 state": (torch.float32, torch.bfloat16),
    "bfloat16 weights": (torch.bfloat16, None),
}
"""Dtypes of weights and state."""
BASES = ("U", "Q_L", "Q_R")  # Q_S is one only just after a refresh


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small GPT for long and see whether the bases drift."""

    out: Path = rows.RESULTS / "drift.csv"  # Results file
    data: Path | None = None  # Text to train on; Python's standard library by default
    steps: int = 5000  # Of every run
    every: int = 500  # Steps between rows

    def __post_init__(self) -> None:
        command.at_least(1, steps=self.steps, every=self.every)


def train(method: str, form: str, o: Options, source: Source) -> Iterator[rows.Row]:
    """Train one model and yield its rows."""
    weights, state = FORMS[form]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = build(CONFIG).to(weights)
    h = Hyper(method, OPTIMIZERS[method].lr, OPTIMIZERS["adamw"].lr, rank=RANK)
    optimizer = OPTIMIZERS[method].make(split(model, h), state_dtype=state)
    for step in range(1, o.steps + 1):
        inputs, targets = source.training_batch(SEED, step - 1, BATCH, CONFIG.context, 0, 1)
        model.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        if step % o.every == 0 or step == o.steps:
            found = diagnostics.scalars(optimizer)
            own = {"case": "drift", "optimizer": method, "rank": RANK if "pro" in method else None, "dtype": form}
            for basis in BASES:
                errors = [value for key, value in found.items() if key.endswith(f"/orthogonality_{basis}")]
                if errors:
                    yield own | {"step": step, "metric": f"orthogonality of {basis}", "unit": "", "median": max(errors)}
            yield own | {"step": step, "metric": "training loss", "unit": "nats", "median": loss.item()}
            bounded = sum(optimizer.clipped().values())
            yield own | {"step": step, "metric": "bounded steps", "unit": "", "median": bounded}


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.drift")
    command.make_file(o.out)
    source = open_source(o.data, CONFIG.context, BYTES)
    found: list[rows.Row] = []
    for method in ("pro-klshampoo", "kl-shampoo"):
        for form in FORMS:
            for row in train(method, form, o, source):
                found.append(row | rows.environment(torch.device("cpu")))
                print(f"{form}, step {row['step']}: {rows.describe(row)}", flush=True)
    rows.write(o.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
