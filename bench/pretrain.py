"""``python -m bench.pretrain`` trains a small GPT on real text with several optimizers side by side.

All start from the same weights, see the same batches, and take turns step by step, so that their timings share
whatever else the machine does. It is the smallest of :mod:`bench.study`, with fixed learning rates in place of
searches. The run ends with three sentences and writes into ``--out``: ``runs.csv``, ``curves.csv`` and ``loss.png``,
and below ``checkpoints``, until it ends, what the same command goes on from.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np
import torch

from bench import command, rows
from bench.command import UsageError
from bench.optimizers import OPTIMIZERS, PRO, RANKED, Hyper, label
from bench.study import figures, runs
from bench.study.scales import DEMO, open_data
from bench.training.loop import train
from bench.training.run import Record, Run

KEY = ("model", "optimizer", "rank", "seed")
BY_HEADS = ("kl-shampoo", PRO)  # queries and keys of these, as in prokl's groups by default
Method = Literal[tuple(OPTIMIZERS)]  # type: ignore[valid-type]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a small byte-level GPT with several optimizers on the same batches and weights.

    Ctrl-C keeps what was done; the same command goes on, bit for bit on as many threads.
    """

    seed: int = 0  # Seeds weights and batches
    data: Path | None = None  # Text or token shards; if not given, Python's standard library, as bytes
    out: Path = Path("runs/pretrain")  # Results folder
    steps: int = DEMO.steps  # Steps of every run
    optimizers: tuple[Method, ...] = ("adamw", "muon-0.9", "kl-shampoo", PRO)
    """Side by side."""
    lr: dict[Method, float] = field(default_factory=dict)
    """Learning rates by optimizer in place of their own, as in muon 0.02; embedding, head and norms have adamw's"""
    threads: int | None = None  # CPU threads; if not given, as many of 1, 2 and 4 as are quickest now

    def __post_init__(self) -> None:
        command.at_least(0, seed=self.seed)
        command.at_least(1, steps=self.steps, threads=self.threads)
        command.positive(lr=[*self.lr.values()])
        for name in self.lr.keys() - {*self.optimizers, "adamw"}:
            raise UsageError(f"--lr {name} but {name} does not run; add it to --optimizers")

    @property
    def selected(self) -> list[Hyper]:
        """The settings of the methods that train: prokl's two optimizers have what its users get by default."""
        lrs = {name: entry.lr for name, entry in OPTIMIZERS.items()} | self.lr
        ranks = dict.fromkeys(RANKED, DEMO.largest) | {PRO: None}
        pieces = dict.fromkeys(BY_HEADS, DEMO.config.heads)
        return [
            Hyper(name, lrs[name], lrs["adamw"], rank=ranks.get(name), qk_pieces=pieces.get(name, 1))
            for name in self.optimizers
        ]


def quickest_threads(trial: Run) -> int:
    """Return how many of torch's CPU threads step quickest now: beside other work two can be far slower than one."""
    batch = trial.source.training_batch(0, 0, trial.scale.batch, trial.scale.config.context)

    def seconds(count: int) -> float:
        torch.set_num_threads(count)
        start = perf_counter()
        trial.step(1.0, *batch)
        return perf_counter() - start

    seconds(1)  # which starts the state
    return min((count for count in (1, 2, 4) if count <= command.cores()), key=seconds)


def run(o: Options) -> str:
    """Train and write the results; return what came out."""
    scale, hypers = replace(DEMO, steps=o.steps), o.selected
    source = open_data(scale, o.data)
    path = runs.checkpoint(o.out / "checkpoints", f"seed-{o.seed}", scale, hypers, o.seed, source, "cpu")
    tokens = sum(map(len, source.train))
    torch.set_num_threads(o.threads or quickest_threads(Run(scale, hypers[-1], o.seed, source)))
    print(f"Trains on {source.name}, {tokens:,} tokens; results go to {o.out}")
    print(f"Threads: {torch.get_num_threads()} of {command.cores()} cores.")
    print("KL-Shampoo and Pro-KLShampoo have queries and keys by heads, prokl's default; the others whole weights.")
    print("Rates of AdamW, Muon, KL-Shampoo and Pro-KLShampoo were chosen on the default run with whole weights.")
    print("Ctrl-C is safe: the same command goes on.", flush=True)
    side_by_side = [Run(scale, h, o.seed, source) for h in hypers]
    train(side_by_side, path, shown=True)
    made_of, here = runs.of_scale(scale, source.vocabulary, "cpu"), rows.environment(torch.device("cpu"))
    own: list[rows.Row] = []
    along: list[rows.Row] = []
    for h, its in zip(hypers, side_by_side, strict=True):
        key = dict(zip(KEY, (scale.name, h.method, h.rank, o.seed), strict=True))
        settings = {setting: getattr(h, setting) for setting in (*runs.SETTINGS, "qk_pieces")}
        own.append(key | settings | made_of | runs.figures(its.record) | source.row | here)
        along += [key | point for point in runs.curve(its.record)]
    rows.write(o.out / "runs.csv", own)
    rows.write(o.out / "curves.csv", along)
    path.unlink()
    figures.loss(o.out / "loss.png", rows.frame(o.out / "curves.csv"))
    return verdict({label(h.method, h.rank): its.record for h, its in zip(hypers, side_by_side, strict=True)})


def verdict(records: Mapping[str, Record]) -> str:
    """Say in three sentences what is lowest after all steps and after as many seconds, and at what state."""
    ended = {name: its for name, its in records.items() if its.diverged_at is None}
    said = [f"{name} diverged at step {its.diverged_at}." for name, its in records.items() if name not in ended]
    if not ended:
        return "\n".join(said)
    steps, seconds = min((len(its.losses), its.seconds(len(its.losses))) for its in ended.values())

    def then(its: Record) -> float:
        at, losses = zip(*((its.seconds(step), loss) for step, loss in its.validation), strict=True)
        return float(np.interp(seconds, at, losses))

    def in_order(figure: Callable[[Record], float], digits: int) -> str:
        found = sorted((figure(its), name) for name, its in ended.items())
        return "; ".join(f"{name}: {value:.{digits}f}" for value, name in found)

    said += [f"After {steps} steps the validation losses are, lowest first, {in_order(lambda it: it.final_loss, 3)}."]
    said += [f"After {seconds:.0f} s, in which the quickest makes all steps, they are {in_order(then, 3)}."]
    said += [f"States take, in MB, {in_order(lambda it: it.state_bytes / 1e6, 1)}."]
    return "\n".join(said)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    options = command.options(Options, argv, "bench.pretrain")
    command.make_folder(options.out)
    threads = torch.get_num_threads()
    try:
        print(f"\n{run(options)}\nPicture: {options.out / 'loss.png'}", flush=True)
    finally:
        torch.set_num_threads(threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
