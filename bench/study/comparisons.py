"""The paper's tables that compare optimizers: which of them, on which of its models, with what the paper selected."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch

from bench import rows
from bench.command import UsageError, at_least
from bench.optimizers import PRO, Hyper
from bench.presets import SELECTED, preset
from bench.study import figures, runs, tables
from bench.study.scales import PAPER, open_data
from bench.training.run import Record, Scale

HERE = ("device", "torch", "prokl")
KEY = ("model", "steps", "micro_batch", "optimizer", "rank", "lr", "seed", "data_sha256", *HERE)
"""Columns that tell a run from the others."""
COMPARISONS: dict[str, tuple[tuple[str, ...], tuple[int | None, ...]]] = {
    "main": (("adamw", "muon", "kl-shampoo", PRO), (None, 32, 64, 128)),
    "ablation": (("subspace-only", "complement-only", "smok-hop", PRO, "kl-shampoo"), (None, 128)),
    "cosmos": (("cosmos", PRO), (64, 128)),
}
"""Methods and ranks that are compared, where the paper has them."""


def selected(name: str, model: str) -> list[Hyper]:
    """Return what is compared on a model, as the paper selected it; nothing where it has no such comparison."""
    if name == "ablation" and ("smok-hop", model, 128) not in SELECTED:
        return []
    methods, ranks = COMPARISONS[name]
    pairs = ((method, rank) for rank in ranks for method in methods)
    return [preset(method, model, rank) for method, rank in pairs if (method, model, rank) in SELECTED]


@dataclass(frozen=True, kw_only=True)
class Options(runs.Options):
    """Make one of the paper's tables, with its models and the hyper-parameters that it selected.

    The tables share runs.csv: what one has trained another does not. Ctrl-C keeps what was done; the same command goes
    on.
    """

    out: Path = Path("runs/experiments")  # Results folder
    jobs: int = max(1, torch.cuda.device_count())  # Runs at a time, each on a GPU of its own
    seeds: tuple[int, ...] = (0, 1, 2)
    data: Path | None = None  # Token shards
    model: str = ""  # Only models whose name begins so: gpt2, llama, gpt2-350m
    micro_batch: int | None = None  # Sequences in one forward pass, in place of the model's
    device: Literal["cpu", "cuda"] = "cuda"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, seeds=self.seeds)
        at_least(1, micro_batch=self.micro_batch)
        if len({scale.config.family for scale in self.scales}) > 1:
            raise UsageError("the paper has other data for each family; give --model gpt2 or llama, with its --data")
        if self.device == "cuda" and self.jobs > torch.cuda.device_count():
            visible = torch.cuda.device_count()
            raise UsageError(f"--jobs {self.jobs}: {visible} GPUs are visible to torch; give fewer, or --device cpu")

    @cached_property
    def scales(self) -> tuple[Scale, ...]:
        """The models, with what was given in place of their own; raise UsageError where no name begins so."""
        if chosen := [scale for scale in PAPER if scale.name.startswith(self.model)]:
            return tuple(replace(scale, micro_batch=self.micro_batch or scale.micro_batch) for scale in chosen)
        names = ", ".join(scale.name for scale in PAPER)
        raise UsageError(f"--model {self.model} is the beginning of no model; there are {names}")


@dataclass(frozen=True)
class Trial:
    """One run; ``here`` has the values of the columns HERE."""

    scale: Scale
    hyper: Hyper
    seed: int
    data_sha256: str
    here: tuple[str, ...]

    @property
    def key(self) -> rows.Row:
        """The values of its rows in the columns KEY."""
        h = self.hyper
        own = (self.scale.name, self.scale.steps, self.scale.micro_batch, h.method, h.rank, h.lr)
        return dict(zip(KEY, (*own, self.seed, self.data_sha256, *self.here), strict=True))


def run(name: str, o: Options) -> str:
    """Train what is missing, seed by seed, and draw; return the table."""
    path, curves, trials = o.out / "runs.csv", o.out / "curves.csv", []
    environment = rows.environment(torch.device(o.device))
    here = tuple(environment[name] for name in HERE)
    compared = {scale: its for scale in o.scales if (its := selected(name, scale.name))}
    if not compared:
        others = ", ".join(scale.name for scale in PAPER if selected(name, scale.name))
        raise UsageError(f"the paper has no {name} on --model {o.model}; give one of {others}")
    for scale, hypers in compared.items():
        sha256 = open_data(scale, o.data).sha256
        trials += [Trial(scale, h, seed, sha256, here) for seed in o.seeds for h in hypers]
    free = [f"cuda:{i}" for i in range(o.jobs)] if o.device == "cuda" else ["cpu"] * o.jobs
    busy: dict[Trial, str] = {}

    def wanted() -> Iterator[Trial]:
        known = rows.read(path)
        return (trial for trial in trials if not rows.having(known, trial.key))

    def task(trial: Trial) -> runs.Task:
        busy[trial] = free.pop()
        name = f"{trial.hyper.method}-r{trial.hyper.rank}" if trial.hyper.rank else trial.hyper.method
        return runs.Task(trial.scale, o.data, name, trial.hyper, trial.seed, o.folder, busy[trial])

    def done(trial: Trial, record: Record, where: rows.Row) -> None:
        free.append(busy.pop(trial))
        settings = {name: getattr(trial.hyper, name) for name in runs.SETTINGS}
        own = runs.of_scale(trial.scale, trial.scale.config.vocabulary, o.device)
        row = trial.key | settings | own | runs.figures(record) | where
        runs.keep(path, curves, row, runs.curve(record), KEY)

    runs.work(wanted, task, done, o.jobs)
    every = [trial.key for trial in trials]
    own, along = ([row for key in every for row in rows.having(rows.read(file), key)] for file in (path, curves))
    figures.loss(o.out / f"{name}-loss.png", rows.typed(along))
    return tables.table_of(rows.typed(own), rows.typed(along))
