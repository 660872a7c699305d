"""What ranks have, take and send of a divided optimizer: ``python -m bench.divided [--ranks 1 2 4] [--out CSV]``.

Every rank is a process of gloo on this machine, with one thread; ``bench/steps/rank.py`` says what it measures. Ratios
are to one process's, and of what is sent and received to a ring all-reduce of the gradients.
"""

import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import start_processes

from bench import command, rows
from bench.models import ModelConfig, llama
from bench.steps.rank import LAUNCHERS, RANK, model_of, run_rank

VOCABULARY = 4096
PRELOADED = ["bench.steps.rank"]
"""Imported once for all ranks."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure a divided optimizer with processes on this machine."""

    out: Path = rows.RESULTS / "divided.csv"  # Results file
    ranks: tuple[int, ...] = (1, 2, 4)  # Processes; one always, with which the others are compared
    layers: int = 6  # Of the model
    width: int = 192  # Of the model
    periods: int = 9  # Of ten steps, timed after a first one

    def __post_init__(self) -> None:
        command.at_least(1, ranks=self.ranks, layers=self.layers, width=self.width, periods=self.periods)
        command.some(ranks=self.ranks)
        if self.width % 2:
            raise command.UsageError(f"--width {self.width}: must be even, as rotary positions need")

    @property
    def config(self) -> ModelConfig:
        """The model: seven matrices of three shapes a layer, embedding, head and norms."""
        return llama(self.layers, self.width, 1, 8 * self.width // 3, VOCABULARY)


def run(ranks: int, o: Options) -> list[rows.Row]:
    """Return the rows of all ranks."""
    with tempfile.TemporaryDirectory(prefix="divided-") as folder:
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        start_processes(run_rank, (ranks, o.config, o.periods, folder), nprocs=ranks, start_method="forkserver")
        files = [Path(folder, f"{place}.json") for place in range(ranks)]
        return [row for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def weights_of(config: ModelConfig) -> tuple[str, int]:
    """Return the shapes of a model as one cell, and the bytes of its weights, which are those of its gradients."""
    with torch.device("meta"):
        weights = [*model_of(config, "").parameters()]
    counts = Counter(tuple(p.shape) for p in weights)
    text = " ".join("x".join(map(str, (count, *shape))) for shape, count in counts.items())
    return text, sum(p.nbytes for p in weights)


def compared(found: Sequence[rows.Row], alone: Sequence[rows.Row], gradients: int) -> Iterator[rows.Row]:
    """Yield the rows of one launcher and number of ranks with their ratios, and what is of all ranks together.

    Args:
        found: the rows. alone: of one process. gradients: bytes of all.
    """
    ranks, usual = found[0]["ranks"], {row["metric"]: row["median"] for row in alone}
    ring = 2 * (ranks - 1) * gradients // ranks
    usual |= {"sent": ring, "received": ring}
    for row in found:
        base = usual[row["metric"]]
        yield row | ({"ratio": row["median"] / base} if base else {})
    head = {"case": found[0]["case"], "ranks": ranks}
    yield head | {"metric": "all-reduce of the gradients", "unit": "bytes", "median": ring}
    for metric in ("work", "state"):
        own = [row["median"] for row in found if row["metric"] == metric]
        yield head | {"metric": f"largest {metric} over mean", "unit": "1", "median": max(own) / statistics.mean(own)}


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.divided")
    command.make_file(o.out)
    (text, gradients), config = weights_of(o.config), o.config
    same = {"model": "llama", "optimizer": "pro-klshampoo", "backend": "torch", "rank": RANK, "dtype": "float32"}
    same |= {name: getattr(config, name) for name in ("layers", "width", "mlp_width", "vocabulary")}
    same |= rows.environment(torch.device("cpu")) | {"shapes": text, "threads": "1", "cores": command.cores()}
    alone: dict[str, list[rows.Row]] = {}
    for ranks in dict.fromkeys((1, *o.ranks)):
        print(f"measuring ranks={ranks} ...", file=sys.stderr, flush=True)
        every = run(ranks, o)
        note = f"more ranks than cores: {ranks} on {command.cores()}" if ranks > command.cores() else ""
        for name in LAUNCHERS:
            found = [row for row in every if row["case"] == name]
            done = compared(found, alone.setdefault(name, found), gradients)
            found = [same | row | {"note": note} for row in done]
            print("\n".join(map(rows.describe, found)), flush=True)
            rows.upsert(o.out, found, ("case", "ranks"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
