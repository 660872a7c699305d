"""One lr for all groups, in AdamW's units: ``python -m bench.one_rate [--out bench/results/one-rate.csv]``.

Trains a small byte-level GPT at several rates, with ``adjust_lr_fn="match_rms_adamw"`` and that rate everywhere, and
with the default units beside AdamW's own rate. Writes the validation losses, and of one rate each the root mean squares
of the matrices' updates over lr.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pandas import DataFrame

from bench import command, rows
from bench.markdown import figure, table
from bench.models import BYTES, byte_gpt
from bench.optimizers import OPTIMIZERS, Hyper, label
from bench.training.run import Run, Trainee
from bench.training.settings import Settings
from bench.training.sources import open_source

CONFIG = byte_gpt(2, 64, 2, 64)
BATCH, RANK, WINDOWS, FIRST = 8, 16, 64, 20
MATCHED, ORIGINAL = "match_rms_adamw", "original"
ADAMW_LR = OPTIMIZERS["adamw"].lr
ONE = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)
"""Rates of all groups, in AdamW's units."""
OWN = {"pro-klshampoo": (1e-2, 2e-2, 3e-2, 6e-2, 1.2e-1), "kl-shampoo": (2e-3, 5e-3, 1e-2, 2e-2, 4e-2)}
"""Rates of the matrices in the default units; all else has ADAMW_LR."""
SIZED = ("muon", "complement-only", "smok-hop", "subspace-only")
"""Methods of which only the size of updates is of interest."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with one rate for all groups, and with two."""

    out: Path = rows.RESULTS / "one-rate.csv"  # Results file
    data: Path | None = None  # Text to train on; Python's standard library by default
    seeds: tuple[int, ...] = (0,)
    steps: int = 200  # Of every run

    def __post_init__(self) -> None:
        command.at_least(1, steps=self.steps)
        command.some(seeds=self.seeds)


def hypers() -> dict[str, Hyper]:
    """Return what trains, by key."""

    def of(method: str, lr: float, adamw_lr: float | None, adjust_lr_fn: str) -> Hyper:
        rank = None if method in ("adamw", "muon", "kl-shampoo") else RANK
        return Hyper(method, lr, adamw_lr, rank=rank, adjust_lr_fn=adjust_lr_fn)

    found = [of("adamw", lr, None, "") for lr in ONE]
    for method, rates in OWN.items():
        found += [of(method, lr, lr, MATCHED) for lr in ONE]
        found += [of(method, lr, ADAMW_LR, ORIGINAL) for lr in rates]
    for method in SIZED:
        adjust = ORIGINAL if method == "subspace-only" else MATCHED
        found.append(of(method, OPTIMIZERS[method].lr if adjust == ORIGINAL else ADAMW_LR, ADAMW_LR, adjust))
    return {f"{h.method} {h.adjust_lr_fn} {h.lr:g}": h for h in found}


def watch_sizes(trainee: Trainee) -> Callable[[int], None]:
    """Collect the root mean squares of the matrices' updates over lr, by shape, after the first FIRST steps."""
    blocks = trainee.model.blocks.parameters()
    weights = [p for p in blocks if p.ndim == 2]
    groups = [group for optimizer in trainee.optimizers for group in optimizer.param_groups]
    rate_of = {p: group for group in groups for p in group["params"]}
    sizes: dict[str, list[float]] = {}
    before = [p.detach().clone() for p in weights]

    def look(step: int) -> None:
        for p, old in zip(weights, before, strict=True):
            if step > FIRST:
                moved = (p.detach() - old).double().square().mean().sqrt().item()
                sizes.setdefault("x".join(map(str, p.shape)), []).append(moved / rate_of[p]["lr"])
            old.copy_(p.detach())
        trainee.record.observed["sizes"] = sizes

    return look


def train(seed: int, o: Options) -> Iterator[rows.Row]:
    """Train all on one seed and yield their rows."""
    source, by = open_source(o.data, CONFIG.context, BYTES), hypers()
    settings = Settings(by, CONFIG, o.steps, o.steps, WINDOWS, BATCH, torch.get_num_threads())
    run = Run(settings, seed, source, watch=watch_sizes)
    while not run.finished:
        run.advance()
    for trainee in run.trainees:
        h = by[trainee.key]
        own = {"case": h.adjust_lr_fn, "optimizer": h.method, "rank": h.rank, "seed": seed, "steps": o.steps}
        own |= {"lr": h.lr, "adamw_lr": h.adamw_lr, "model": "byte-gpt"}
        loss = {"metric": "validation loss", "unit": "nats", "median": trainee.record.final_loss}
        yield own | (loss if trainee.record.diverged_at is None else {"note": "diverged"})
        for shape, sizes in trainee.record.observed["sizes"].items():
            yield own | {"metric": "update rms", "unit": "lr", "shapes": shape} | rows.quartiles(sizes)


def losses_table(found: DataFrame) -> str:
    """Return the mean validation loss over the seeds of every rate, its best in bold."""
    losses = found[found["metric"] == "validation loss"]
    forms = [("adamw", ""), *((method, case) for case in (MATCHED, ORIGINAL) for method in OWN)]
    cells = []
    for method, case in forms:
        its = losses[(losses["optimizer"] == method) & (losses["case"] == case)]
        means = its.groupby("lr")["median"].mean()
        shown = [
            f"{lr:g}: **{loss:.3f}**" if loss == means.min() else f"{lr:g}: {loss:.3f}" for lr, loss in means.items()
        ]
        of = "matrices" if case == ORIGINAL else "all groups"
        cells.append({"lr of": of, "optimizer": label(method), "validation loss by lr": ", ".join(shown)})
    return table(DataFrame(cells), 3)


def sizes_table(found: DataFrame) -> str:
    """Return the median root mean square of updates over lr by shape, of one seed, at the lr nearest ADAMW_LR."""
    sizes = found[(found["metric"] == "update rms") & (found["seed"] == found["seed"].min())]
    cells = []
    for (method, case), its in sizes.groupby(["optimizer", "case"], sort=False):
        rate = min(its["lr"].unique(), key=lambda lr: abs(lr - ADAMW_LR))
        own = its[its["lr"] == rate].set_index("shapes")["median"]
        named = {shape.replace("x", " × "): figure(own[shape], 3) for shape in own.index}
        cells.append({"optimizer": label(method), "adjust_lr_fn": case or "-", "lr": f"{rate:g}"} | named)
    return table(DataFrame(cells), 2)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.one_rate")
    command.make_file(o.out)
    found: list[rows.Row] = []
    for seed in o.seeds:
        for row in train(seed, o):
            found.append(row | rows.environment(torch.device("cpu")))
            print(f"seed {seed}, lr {row['lr']:g}, {row.get('shapes', '')} {rows.describe(row)}", flush=True)
        rows.write(o.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
