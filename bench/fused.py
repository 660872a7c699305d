"""What it costs to read weights otherwise: ``python -m bench.fused [--out bench/results/fused.csv]``.

Trains the scaled-down families at their recorded settings with q, k and v in one weight, which starts as the three do:
read as one matrix, as three, and as one for each head. And with the hidden matrices as they are, but taken for weights
stored (in, out): what a weight that is stored so gets where nobody says it. Differences are from separate q, k and v,
paired by seed; nothing is tuned anew.
"""

import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench import command, rows
from bench.experiments.scales import SCALES, Scale
from bench.optimizers import Hyper, build
from bench.training.run import Run, Trainee
from bench.undisturbed import METHODS, hyper, recorded

THREE = ("q_proj", "k_proj", "v_proj")
SEPARATE = "separate"


class Third(nn.Module):
    """One of the three linear layers that share a weight."""

    def __init__(self, fused: nn.Linear, i: int) -> None:
        super().__init__()
        self.fused, self.i = fused, i

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., W) to (..., W)."""
        return F.linear(x, self.fused.weight.chunk(3)[self.i])


def fuse(model: nn.Module) -> list[nn.Parameter]:
    """Put q, k and v of every block into one weight, and return these."""
    weights = []
    for block in model.blocks:
        fused = nn.Linear(model.config.width, 3 * model.config.width, bias=False)
        fused.weight = nn.Parameter(torch.cat([getattr(block, name).weight.detach() for name in THREE]))
        for i, name in enumerate(THREE):
            setattr(block, name, Third(fused, i))
        weights.append(fused.weight)
    return weights


def as_pieces(pieces: Callable[[int], int | None]) -> Callable[[Trainee, Hyper], None]:
    """Return what fuses q, k and v of a trainee and reads them as ``pieces(heads)`` pieces."""

    def change(trainee: Trainee, h: Hyper) -> None:
        fused = {id(p) for p in fuse(trainee.model)}
        trainee.optimizers = build(trainee.model, h, None)
        group = trainee.optimizers[0].param_groups[0]
        count = pieces(trainee.model.config.heads)
        group["split"] = [count if id(p) in fused else None for p in group["params"]]

    return change


def turned(trainee: Trainee, h: Hyper) -> None:
    """Take a trainee's hidden matrices for weights stored (in, out)."""
    trainee.optimizers[0].param_groups[0]["transposed"] = True


READINGS: dict[str, Callable[[Trainee, Hyper], None]] = {
    SEPARATE: lambda trainee, h: None,
    "fused, whole": as_pieces(lambda heads: None),
    "fused, three": as_pieces(lambda heads: 3),
    "fused, by head": as_pieces(lambda heads: 3 * heads),
    "separate, taken for (in, out)": turned,
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train with weights read in other ways."""

    out: Path = rows.RESULTS / "fused.csv"  # Results file
    models: tuple[str, ...] = ("gpt2-tiny", "llama-tiny")  # Of the recorded runs
    methods: tuple[str, ...] = METHODS  # Optimizers
    seeds: tuple[int, ...] = (0, 1, 2, 3)  # Of weights and batches
    steps: int | None = None  # Of every run; the recorded number by default
    threads: int = 1  # CPU threads

    def __post_init__(self) -> None:
        command.at_least(1, threads=self.threads, steps=self.steps)
        command.some(models=self.models, seeds=self.seeds, methods=self.methods)


def losses(scale: Scale, h: Hyper, seed: int) -> dict[str, float]:
    """Train every reading on one seed; return the final losses."""
    source = scale.open(None)
    run = Run(scale.settings(dict.fromkeys(READINGS, h), source.vocabulary, "cpu", False), seed, source)
    for trainee in run.trainees:
        READINGS[trainee.key](trainee, h)
        trainee.peak_lrs = [[group["lr"] for group in o.param_groups] for o in trainee.optimizers]
    while not run.finished:
        run.advance()
    return {t.key: t.record.final_loss for t in run.trainees}


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.fused")
    command.make_file(o.out)
    torch.set_num_threads(o.threads)
    scales = {scale.name: scale for scale in SCALES["tiny"]}
    if unknown := set(o.models) - scales.keys():
        raise command.UsageError(f"--models {unknown.pop()} is none of {', '.join(scales)}; give one of these")
    if unknown := set(o.methods) - set(METHODS):
        raise command.UsageError(f"--methods {unknown.pop()} is none of {', '.join(METHODS)}; give one of these")
    for model in o.models:
        records = recorded(rows.RESULTS, "main.csv", model)
        for method in o.methods:
            scale, h = replace(scales[model], steps=o.steps or scales[model].steps), hyper(records[method])
            runs, found = [], []
            for seed in o.seeds:
                runs.append(losses(scale, h, seed))
                print(model, method, seed, runs[-1], flush=True)
            for reading in READINGS:
                own = [run[reading] for run in runs]
                pairs = [run[reading] - run[SEPARATE] for run in runs]
                found.append(
                    {
                        "optimizer": method,
                        "model": model,
                        "note": reading,
                        **{key: records[method].get(key) for key in ("rank", "lr", "alpha_kl", "adamw_lr")},
                        "steps": scale.steps,
                        "seeds": " ".join(map(str, o.seeds)),
                        "validation_loss_per_seed": " ".join(f"{loss:.5f}" for loss in own),
                        "validation_loss": statistics.mean(own),
                        "difference": statistics.mean(pairs),
                        "difference_se": statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else None,
                        **rows.environment(torch.device("cpu")),
                    }
                )
            rows.upsert(o.out, found, key=("model", "optimizer"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
