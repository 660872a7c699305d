"""What balanced products cost in training: ``python -m bench.precision [--out bench/results/precision.csv]``.

Trains the scaled-down families at their recorded settings with Pro-KLShampoo, once with products as exact as float32
and once with those that a GPU's kernels take by default, in PyTorch's form of the same halves. Differences are paired
by seed, and the upper bound of their mean is the end of Student's two-sided interval. Each model's rows are written
after every seed; seeds that the file has from the same commit and machine are not trained again.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pandas import DataFrame
from scipy import stats

from bench import command, rows
from bench.experiments.results import CONFIDENCE
from bench.experiments.scales import SCALES, Scale
from bench.markdown import figure, table, with_error
from bench.optimizers import Hyper
from bench.training.run import Run
from bench.undisturbed import hyper, recorded

METHOD = "pro-klshampoo"
FAITHFUL, BALANCED = "faithful", "balanced"
KEY = ("model", "optimizer", "varied", "value")
Losses = dict[int, dict[str, float]]
"""Final losses by seed and precision."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare balanced products with faithful ones by the loss that training ends with."""

    out: Path = rows.RESULTS / "precision.csv"  # Results file
    models: tuple[str, ...] = ("gpt2-tiny", "llama-tiny")  # Of the recorded runs
    seeds: tuple[int, ...] = tuple(range(8))  # At least two
    steps: int | None = None  # Of every run; the recorded number by default
    threads: int = 1  # CPU threads

    def __post_init__(self) -> None:
        command.at_least(1, threads=self.threads, steps=self.steps)
        command.some(models=self.models, seeds=self.seeds)
        if len(self.seeds) < 2:
            raise command.UsageError("--seeds: a spread takes at least two; give more")


def train(scale: Scale, h: Hyper, seed: int) -> dict[str, float]:
    """Train with either precision on one seed; return the final losses."""
    source = scale.open(None)
    run = Run(scale.settings({name: h for name in (FAITHFUL, BALANCED)}, source.vocabulary, "cpu", False), seed, source)
    for trainee in run.trainees:
        for group in trainee.optimizers[0].param_groups:
            if "precision" in group:  # AdamW's have none
                group["precision"] = trainee.key
    while not run.finished:
        run.advance()
    return {trainee.key: trainee.record.final_loss for trainee in run.trainees}


def upper_bound(differences: Sequence[float]) -> float:
    """Return the upper end of Student's two-sided interval of the mean at CONFIDENCE."""
    quantile = stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)
    return float(np.mean(differences) + quantile * stats.sem(differences))


def rows_of(own: rows.Row, found: Losses) -> list[rows.Row]:
    """Return the row of each precision."""
    made = []
    for name in (FAITHFUL, BALANCED):
        losses = [found[seed][name] for seed in found]
        row = own | {
            "value": name,
            "seeds": " ".join(map(str, found)),
            "validation_loss_per_seed": " ".join(f"{loss:.5f}" for loss in losses),
            "validation_loss": float(np.mean(losses)),
        }
        if name == BALANCED and len(found) > 1:
            pairs = [found[seed][BALANCED] - found[seed][FAITHFUL] for seed in found]
            row |= {
                "difference": float(np.mean(pairs)),
                "difference_se": float(stats.sem(pairs)),
                "difference_upper": upper_bound(pairs),
                "confidence": CONFIDENCE,
            }
        made.append(row)
    return made


def known(path: Path, own: rows.Row, here: Mapping[str, str]) -> Losses:
    """Return the losses that the file has for the same settings, commit and machine."""
    made = [own | {"value": name} for name in (FAITHFUL, BALANCED)]
    if not all(rows.measured(path, {key: rows.text(value) for key, value in row.items()}, here) for row in made):
        return {}
    losses: Losses = {}
    for row in rows.read(path):
        if row["model"] == own["model"]:
            for seed, loss in zip(row["seeds"].split(), row["validation_loss_per_seed"].split(), strict=True):
                losses.setdefault(int(seed), {})[row["value"]] = float(loss)
    return losses


def losses_table(found: DataFrame) -> str:
    """Return the mean losses of either precision, and their difference with its upper bound."""
    cells = []
    for model, its in found.groupby("model", sort=False):
        row = its.set_index("value")
        balanced = row.loc[BALANCED]
        cells.append(
            {
                "model": model,
                "seeds": str(len(balanced["seeds"].split())),
                **{name: figure(row.loc[name, "validation_loss"], 4) for name in (FAITHFUL, BALANCED)},
                "difference": with_error(balanced["difference"], balanced["difference_se"], sign="+"),
                f"upper bound, {balanced['confidence']:.0%}": figure(balanced["difference_upper"], 4, "+"),
            }
        )
    return table(DataFrame(cells), 1)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.precision")
    command.make_file(o.out)
    torch.set_num_threads(o.threads)
    scales = {scale.name: scale for scale in SCALES["tiny"]}
    if unknown := set(o.models) - scales.keys():
        raise command.UsageError(f"--models {unknown.pop()} is none of {', '.join(scales)}; give one of these")
    here = rows.environment(torch.device("cpu"))
    for model in o.models:
        record = recorded(rows.RESULTS, "main.csv", model)[METHOD]
        scale, h = replace(scales[model], steps=o.steps or scales[model].steps), hyper(record)
        settings = {name: record[name] for name in ("rank", "lr", "alpha_kl", "adamw_lr")}
        own = {"model": model, "optimizer": METHOD, "varied": "precision", "steps": scale.steps, **settings}
        found = known(o.out, own, here)
        for seed in o.seeds:
            if seed not in found:
                found[seed] = train(scale, h, seed)
                print(model, seed, found[seed], flush=True)
                rows.upsert(o.out, [row | here for row in rows_of(own, found)], KEY)
    return 0


if __name__ == "__main__":
    sys.exit(main())
