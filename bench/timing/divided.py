"""What ranks have, take and send of a divided optimizer.

Every rank is a process of gloo on this machine, with one thread; ``bench/timing/rank.py`` says what it measures. Ratios
are to one process's, and of what is sent and received to a ring all-reduce of the gradients.
"""

import json
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import start_processes

from bench import rows
from bench.command import cores
from bench.models import ModelConfig, llama
from bench.timing.rank import LAUNCHERS, RANK, model_of, run_rank

VOCABULARY = 4096
PRELOADED = ["bench.timing.rank"]
"""Imported once for all ranks."""


def config_of(layers: int, width: int) -> ModelConfig:
    """Return the model: seven matrices of three shapes a layer, embedding, head and norms."""
    return llama(layers, width, 1, 8 * width // 3, VOCABULARY)


def run(ranks: int, config: ModelConfig, periods: int) -> list[rows.Row]:
    """Return the rows of all ranks."""
    with tempfile.TemporaryDirectory(prefix="divided-") as folder:
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        start_processes(run_rank, (ranks, config, periods, folder), nprocs=ranks, start_method="forkserver")
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


def measure(every: Sequence[int], config: ModelConfig, periods: int) -> Iterator[list[rows.Row]]:
    """Yield the rows of each launcher and number of ranks; one alone always, with which the others are compared."""
    text, gradients = weights_of(config)
    same = {"model": "llama", "optimizer": "pro-klshampoo", "backend": "torch", "rank": RANK, "dtype": "float32"}
    same |= {name: getattr(config, name) for name in ("layers", "width", "mlp_width", "vocabulary")}
    same |= {"shapes": text, "threads": "1", "cores": cores()}
    alone: dict[str, list[rows.Row]] = {}
    for ranks in dict.fromkeys((1, *every)):
        print(f"measuring ranks={ranks} ...", file=sys.stderr, flush=True)
        found = run(ranks, config, periods)
        note = f"more ranks than cores: {ranks} on {cores()}" if ranks > cores() else ""
        for name in LAUNCHERS:
            its = [row for row in found if row["case"] == name]
            yield [same | row | {"note": note} for row in compared(its, alone.setdefault(name, its), gradients)]
