"""Handwritten digits instead of text: ``python -m bench.digits [--out bench/results/digits.csv]``.

Trains a small MLP-Mixer (arXiv:2105.01601) on scikit-learn's 1,797 digits of 8x8 pixels with every optimizer, at the
rate that it has by default and at rates beside it, on a grid that is fixed here. A task beyond language models for
defaults that were chosen on these. Seeds share the division into training and test images, the start and the batches.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import torch
from pandas import DataFrame
from torch import Tensor, nn
from torch.nn import functional as F

from bench import command, rows
from bench.lengths.protocol import FORMS
from bench.markdown import table, with_error
from bench.optimizers import build
from bench.training.schedules import linear

PATCH, PATCHES, WIDTH, LAYERS = 2, 16, 64, 3
TEST, BATCH = 500, 64
STEPS = 400
"""Of the runs that tables show."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""What the default rates are multiplied with."""
KEY = ("optimizer", "factor", "seed", "steps", "metric")


class Mixer(nn.Module):
    """One block: patches mixed channel by channel, then channels patch by patch."""

    def __init__(self) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(PATCHES, 4 * PATCHES), nn.GELU(), nn.Linear(4 * PATCHES, PATCHES))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, patches, width) to the same."""
        x = x + self.tokens(self.token_norm(x).mT).mT
        return x + self.channels(self.channel_norm(x))


class Model(nn.Module):
    """Patches, blocks, their mean, and ten logits."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(PATCH * PATCH, WIDTH)
        self.blocks = nn.ModuleList(Mixer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map (batch, 8, 8) images to (batch, 10) logits."""
        patches = images.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).flatten(3).flatten(1, 2)
        x = self.patches(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train on digits with every optimizer and rate."""

    out: Path = rows.RESULTS / "digits.csv"  # Results file; what is in it is not trained again
    forms: tuple[Literal[tuple(FORMS)], ...] = tuple(FORMS)  # type: ignore[valid-type]
    """Some of them."""
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = STEPS  # Of every run

    def __post_init__(self) -> None:
        command.at_least(1, steps=self.steps)
        command.some(seeds=self.seeds, forms=self.forms)


@cache
def data() -> tuple[Tensor, Tensor]:
    """Return images (1797, 8, 8) with mean 0 and deviation 1, and what they show."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)
    return (images - images.mean()) / images.std(), torch.tensor(found.target)


def shifted(images: Tensor, g: torch.Generator) -> Tensor:
    """Return images moved by up to a pixel in each direction, each by its own; what comes in is background."""
    n, background = len(images), float(images.min())
    padded = F.pad(images, (1, 1, 1, 1), value=background)
    down, right = (torch.randint(3, (n, 1, 1), generator=g) for _ in range(2))
    at = torch.arange(8)
    return padded[torch.arange(n)[:, None, None], down + at[:, None], right + at]


def trained(form: str, lr: float, seed: int, steps: int) -> tuple[float, float]:
    """Return loss, in nats, and share of errors on the test images after training."""
    images, targets = data()
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=g)
    test, training = order[:TEST], order[TEST:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Model()
    optimizers = build(model, replace(FORMS[form].default, lr=lr), None)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: linear(step, steps)) for o in optimizers]
    for _ in range(steps):
        batch = training[torch.randint(len(training), (BATCH,), generator=g)]
        loss = F.cross_entropy(model(shifted(images[batch], g)), targets[batch])
        model.zero_grad()
        loss.backward()
        for it in (*optimizers, *schedules):
            it.step()
    with torch.no_grad():
        logits = model(images[test])
    return F.cross_entropy(logits, targets[test]).item(), (logits.argmax(1) != targets[test]).float().mean().item()


def run(o: Options) -> Iterator[list[rows.Row]]:
    """Train everything that the file has not and yield the rows of each run."""
    known = {(row["optimizer"], row["factor"], row["seed"], row["steps"]) for row in rows.read(o.out)}
    for seed, form, factor in product(o.seeds, o.forms, FACTORS):
        if (form, f"{factor:g}", str(seed), str(o.steps)) in known:
            continue
        default = FORMS[form].default
        lr = default.lr * factor
        own = {"model": "mixer", "optimizer": form, "rank": default.rank, "seed": seed, "steps": o.steps, "lr": lr}
        own |= {"adamw_lr": default.adamw_lr, "factor": f"{factor:g}"}
        loss, errors = trained(form, lr, seed, o.steps)
        both = (("test loss", "nats", loss), ("test errors", "share", errors))
        yield [own | {"metric": metric, "unit": unit, "median": value} for metric, unit, value in both]


def losses_table(found: DataFrame) -> str:
    """Return test losses by factor of the rate, means over the seeds with every rate, and errors at the best one."""
    lines = []
    for form in (name for name in FORMS if name in set(found["optimizer"])):
        its = found[(found["optimizer"] == form) & (found["steps"] == STEPS)]
        losses = its[its["metric"] == "test loss"]
        by_seed = losses.pivot(index="seed", columns="factor", values="median")
        by_seed = by_seed.reindex(columns=[f"{factor:g}" for factor in FACTORS]).dropna()
        if by_seed.empty:
            continue
        best = by_seed.mean().idxmin()
        lost = by_seed["1"] - by_seed[best]
        at_best = its[(its["factor"] == best) & its["seed"].isin(by_seed.index)]
        errors = at_best[at_best["metric"] == "test errors"]["median"]
        cells = {"optimizer": FORMS[form].label}
        cells |= {f"lr × {factor}": f"{mean:.3f}" for factor, mean in by_seed.mean().items()}
        cells["default − best"] = with_error(lost.mean(), lost.sem(), 3)
        cells["errors at the best, %"] = with_error(100 * errors.mean(), 100 * errors.sem(), 1)
        cells["seeds"] = len(by_seed)
        lines.append(cells)
    return table(DataFrame(lines), 1)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.digits")
    command.make_file(o.out)
    here = rows.environment(torch.device("cpu"))
    for its in run(o):
        rows.upsert(o.out, [row | here for row in its], KEY)
        for row in its:
            print(f"seed {row['seed']}, lr {row['lr']:g} {rows.describe(row)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
