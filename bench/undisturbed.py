"""How often ordinary training is bounded: ``python -m bench.undisturbed [--out bench/results/undisturbed.csv]``.

Repeats recorded runs of the scaled-down families and of ``bench.pretrain`` at their recorded settings with the current
version, and writes the losses, their differences from the recorded ones paired by seed, and how many of a run's
gradients ``clip_threshold`` bounded after its first 20 steps.
"""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import command, rows
from bench.experiments.scales import AUTO, DEMO, SCALES, Scale
from bench.optimizers import Hyper
from bench.training.run import Run, Trainee

FIRST = 20
"""Steps that are not counted: the start, in which no eigenvalue has met the gradients yet."""
RECORDS = {"main.csv": {scale.name: scale for scale in SCALES["tiny"]}, "pretrain-summary.csv": {DEMO.name: DEMO}}
METHODS = ("pro-klshampoo", "kl-shampoo")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Repeat recorded runs and count the gradients that are bounded."""

    out: Path = rows.RESULTS / "undisturbed.csv"  # Results file
    records: Path = rows.RESULTS  # Folder of the recorded runs
    models: tuple[str, ...] = ("gpt2-tiny", "llama-tiny", "byte-gpt")  # Of the recorded runs
    seeds: tuple[int, ...] = (0, 1, 2, 3)  # Of the recorded runs; a seed that a record lacks has no difference
    steps: int | None = None  # Of every run; the recorded number by default
    threads: int = 1  # CPU threads

    def __post_init__(self) -> None:
        command.at_least(1, threads=self.threads, steps=self.steps)
        command.some(models=self.models, seeds=self.seeds)


def recorded(records: Path, file: str, model: str) -> dict[str, dict[str, str]]:
    """Return the recorded row of each method, with the largest rank where there are several."""
    found: dict[str, dict[str, str]] = {}
    for row in rows.read(records / file):
        method = row["optimizer"]
        if row["model"] == model and row["start"] == AUTO and method in METHODS:
            if method not in found or int(row["rank"] or 0) > int(found[method]["rank"] or 0):
                found[method] = row
    if len(found) < len(METHODS):
        raise command.UsageError(f"{records / file} has no runs of {model}; give another --models or --records")
    return found


def hyper(row: dict[str, str]) -> Hyper:
    """Return what a recorded run was built with."""

    def number(name: str) -> float | None:
        return float(row[name]) if row.get(name) else None

    rank = int(row["rank"]) if row["rank"] else None
    return Hyper(
        row["optimizer"], float(row["lr"]), number("adamw_lr"), 0.0, 0.0, rank, number("alpha_kl"), AUTO, "paper"
    )


def count_from(first: int, counts: dict[str, int]) -> Callable[[Trainee], Callable[[int], None]]:
    """Return a watch that counts, by trainee, what is bounded after ``first`` steps."""

    def watch(trainee: Trainee) -> Callable[[int], None]:
        def look(step: int) -> None:
            if step == first:
                counts[trainee.key] = -bounded(trainee)

        return look

    return watch


def bounded(trainee: Trainee) -> int:
    """Return the bounded steps of all matrices so far."""
    return sum(sum(optimizer.clipped().values()) for optimizer in trainee.optimizers)


def repeat(scale: Scale, settings: dict[str, Hyper], seed: int) -> dict[str, tuple[float, int, int]]:
    """Train every method on one seed; return final loss, bounded steps and all steps of its matrices."""
    source = scale.open(None)
    counts: dict[str, int] = {}
    run = Run(scale.settings(settings, source.vocabulary, "cpu", False), seed, source, watch=count_from(FIRST, counts))
    while not run.finished:
        run.advance()
    return {
        t.key: (
            t.record.final_loss,
            counts.get(t.key, 0) + bounded(t),
            (scale.steps - FIRST) * sum(len(optimizer.clipped()) for optimizer in t.optimizers),
        )
        for t in run.trainees
    }


def row_of(
    model: str, record: dict[str, str], seeds: Sequence[int], losses: list[float], counts: list[int]
) -> rows.Row:
    """Return one method's row."""
    before = dict(zip(record["seeds"].split(), map(float, record["validation_loss_per_seed"].split()), strict=True))
    pairs = [loss - before[str(seed)] for seed, loss in zip(seeds, losses, strict=True) if str(seed) in before]
    keys = ("optimizer", "rank", "lr", "alpha_kl", "adamw_lr")
    return {
        **{key: record.get(key) for key in keys},
        "model": model,
        "seeds": " ".join(map(str, seeds)),
        "validation_loss_per_seed": " ".join(f"{loss:.5f}" for loss in losses),
        "validation_loss": statistics.mean(losses),
        "difference": statistics.mean(pairs) if pairs else None,
        "difference_se": statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None,
        "bounded_per_seed": " ".join(map(str, counts)),
    }


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.undisturbed")
    command.make_file(o.out)
    torch.set_num_threads(o.threads)
    scales = {name: (file, scale) for file, named in RECORDS.items() for name, scale in named.items()}
    if unknown := set(o.models) - scales.keys():
        raise command.UsageError(f"--models {unknown.pop()} is none of {', '.join(scales)}; give one of these")
    found: list[rows.Row] = []
    for model in o.models:
        file, scale = scales[model]
        scale = replace(scale, steps=o.steps or scale.steps)
        records = recorded(o.records, file, model)
        settings = {method: hyper(record) for method, record in records.items()}
        runs = []
        for seed in o.seeds:
            runs.append(repeat(scale, settings, seed))
            print(model, seed, runs[-1], flush=True)
        for method, record in records.items():
            losses, counts, gradients = zip(*(run[method] for run in runs), strict=True)
            row = row_of(model, record, o.seeds, list(losses), list(counts))
            row |= {"steps": scale.steps, "note": f"bounded of {gradients[0]} gradients after step {FIRST}"}
            found.append(row | rows.environment(torch.device("cpu")))
    rows.write(o.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
