"""``python -m bench.pretrain`` trains a small GPT on real text with several optimizers side by side.

All start from the same weights, see the same batches, and take turns step by step, so that their timings share
whatever else the machine does. It is the smallest of :mod:`bench.study`, with fixed learning rates in place of
searches. The run ends with a table and writes into ``--out``: ``runs.csv``, ``curves.csv`` and ``loss.png``, and below
``checkpoints``, until it ends, what the same command goes on from.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from bench import command, rows
from bench.command import UsageError
from bench.optimizers import OPTIMIZERS, PRO, RANKED, Hyper
from bench.study import figures, runs, tables
from bench.study.scales import DEMO, open_data
from bench.training.loop import train
from bench.training.run import Run

KEY = ("model", "optimizer", "rank", "seed")
Method = Literal[tuple(OPTIMIZERS)]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small byte-level GPT with several optimizers on the same batches and weights.

    Ctrl-C keeps what was done; the same command goes on bit for bit.
    """

    seeds: tuple[int, ...] = (0,)  # One run for each
    data: Path | None = None  # Text or token shards; if not given, Python's standard library, as bytes
    out: Path = Path("runs/pretrain")  # Results folder
    steps: int = DEMO.steps  # Steps of every run
    optimizers: tuple[Method, ...] = ("adamw", "muon", "kl-shampoo", PRO)
    """Side by side."""
    lr: dict[Method, float] = field(default_factory=dict)
    """Learning rates by optimizer in place of their own, as in muon 0.02"""
    adamw_lr: float = OPTIMIZERS["adamw"].lr  # Rate of AdamW, and of embedding, head and norms under every optimizer
    rank: int = DEMO.largest  # Rank of the tracked subspace
    threads: int = command.cores()  # CPU threads

    def __post_init__(self) -> None:
        command.at_least(0, seeds=self.seeds)
        command.at_least(1, steps=self.steps, rank=self.rank, threads=self.threads)
        command.positive(adamw_lr=self.adamw_lr, lr=[*self.lr.values()])
        command.some(seeds=self.seeds, optimizers=self.optimizers)
        for name in self.lr.keys() - set(self.optimizers):
            raise UsageError(f"--lr {name} but {name} does not run; add it to --optimizers")

    @property
    def selected(self) -> dict[str, Hyper]:
        """The settings of the methods that train, by method."""
        lrs = {name: OPTIMIZERS[name].lr for name in self.optimizers} | {"adamw": self.adamw_lr} | self.lr
        ranks = {name: self.rank for name in RANKED}
        return {name: Hyper(name, lrs[name], self.adamw_lr, rank=ranks.get(name)) for name in self.optimizers}


def run(o: Options) -> str:
    """Train every seed and write the results; return the table."""
    torch.set_num_threads(o.threads)
    scale, selected = replace(DEMO, steps=o.steps), o.selected
    source, here = open_data(scale, o.data), rows.environment(torch.device("cpu"))
    made_of = runs.of_scale(scale, source.vocabulary, "cpu")
    tokens = sum(map(len, source.train))
    print(f"Trains on {source.name}, {tokens:,} tokens; results go to {o.out}", flush=True)
    own: list[rows.Row] = []
    along: list[rows.Row] = []
    ended: list[Path] = []
    for seed in o.seeds:
        side_by_side = [Run(scale, h, seed, source) for h in selected.values()]
        folder, hypers = o.out / "checkpoints", [*selected.values()]
        ended.append(runs.checkpoint(folder, f"seed-{seed}", scale, hypers, seed, source, "cpu"))
        train(side_by_side, ended[-1], shown=True)
        for (name, h), record in zip(selected.items(), (each.record for each in side_by_side), strict=True):
            key = dict(zip(KEY, (scale.name, name, h.rank, seed), strict=True))
            settings = {setting: getattr(h, setting) for setting in runs.SETTINGS}
            own.append(key | settings | made_of | runs.figures(record) | source.row | here)
            along += [key | point for point in runs.curve(record)]
    rows.write(o.out / "runs.csv", own)
    rows.write(o.out / "curves.csv", along)
    for path in ended:
        path.unlink()
    found, curves = (rows.frame(o.out / f"{name}.csv") for name in ("runs", "curves"))
    figures.loss(o.out / "loss.png", curves)
    return tables.table_of(found, curves)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    options = command.options(Options, argv, "bench.pretrain")
    command.make_folder(options.out)
    threads = torch.get_num_threads()
    try:
        print(f"\n{run(options)}", flush=True)
    finally:
        torch.set_num_threads(threads)
    print(f"Picture: {options.out / 'loss.png'}\nResults: {options.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
