"""The paper's tables that compare optimizers: which of them, on which of its models, with what the paper selected."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from bench import rows
from bench.command import UsageError, at_least, make_folder
from bench.optimizers import PRO, Hyper
from bench.presets import SELECTED, preset
from bench.study import figures, runs, tables
from bench.study.scales import PAPER, open_data
from bench.training.run import Record, Scale

KEY = ("model", "steps", "micro_batch", "optimizer", "rank", "lr", "seed", "data_sha256", "device", "torch", "prokl")
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


def run(name: str, o: Options) -> None:
    """Train what is missing, seed by seed, draw, and print the table."""
    path, curves, environment = o.out / "runs.csv", o.out / "curves.csv", rows.environment(torch.device(o.device))
    compared = {scale: its for scale in o.scales if (its := selected(name, scale.name))}
    if not compared:
        others = ", ".join(scale.name for scale in PAPER if selected(name, scale.name))
        raise UsageError(f"the paper has no {name} on --model {o.model}; give one of {others}")
    tasks = []
    for scale, hypers in compared.items():
        open_data(scale, o.data)  # now, not in the first run's process
        for seed, h in product(o.seeds, hypers):
            label = f"{h.method}-r{h.rank}" if h.rank else h.method
            tasks.append(runs.Task(scale, o.data, label, h, seed, o.folder))
    make_folder(o.out)
    free = [f"cuda:{i}" for i in range(o.jobs)] if o.device == "cuda" else ["cpu"] * o.jobs
    busy: dict[runs.Task, str] = {}

    def key(task: runs.Task) -> rows.Row:
        """Return the values of a run's rows in the columns KEY."""
        scale, h = task.scale, task.hyper
        own = (scale.name, scale.steps, scale.micro_batch, h.method, h.rank, h.lr, task.seed)
        here = (environment[name] for name in ("device", "torch", "prokl"))
        return dict(zip(KEY, (*own, open_data(scale, o.data).sha256, *here), strict=True))

    def wanted() -> Iterator[runs.Task]:
        known = rows.read(path)
        return (task for task in tasks if not rows.having(known, key(task)))

    def begun(task: runs.Task) -> runs.Task:
        busy[task] = free.pop()
        return replace(task, device=busy[task])

    def done(task: runs.Task, record: Record, where: rows.Row) -> None:
        free.append(busy.pop(task))
        settings = {name: getattr(task.hyper, name) for name in runs.SETTINGS}
        own = runs.of_scale(task.scale, task.scale.config.vocabulary, o.device)
        runs.keep(path, curves, key(task) | settings | own | runs.figures(record) | where, runs.curve(record), KEY)

    runs.work(wanted, begun, done, o.jobs)
    every = list(map(key, tasks))
    own, along = ([row for key in every for row in rows.having(rows.read(file), key)] for file in (path, curves))
    figures.loss(o.out / f"{name}-loss.png", rows.typed(along))
    print(f"\n{tables.table_of(rows.typed(own), rows.typed(along))}\nResults are in {o.out}", flush=True)
