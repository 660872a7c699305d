"""Train every method at every length: ``python -m bench.lengths [--lengths 400 1600] [--out bench/results]``.

What :mod:`bench.lengths.protocol` asks for is trained one run a process, and a run's row is written when it ends, so
that the same command goes on where it was stopped; what is in the file is not trained again. ``lengths.csv`` has the
runs, ``lengths-curves.csv`` their validation losses along the way.
"""

import math
import sys
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench import command, rows
from bench.lengths.protocol import FORMS, Losses, Unit, wanted
from bench.lengths.runs import MODELS, rows_of, train
from bench.lengths.tables import units
from bench.training.run import Record
from bench.workers import one_run_each

KEY = ("model", "steps", "optimizer", "lr", "adamw_lr", "alpha_kl", "seed")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train every method at its defaults and tuned, at every length."""

    out: Path = rows.RESULTS  # Folder of the results files
    models: tuple[Literal[tuple(MODELS)], ...] = tuple(MODELS)  # type: ignore[valid-type]
    """Some of them."""
    lengths: tuple[int, ...] = (400, 1600)  # Steps of a run; a method's search begins at its best of the shorter one
    forms: tuple[Literal[tuple(FORMS)], ...] = tuple(FORMS)  # type: ignore[valid-type]
    """Some of them; AdamW's search is part of every other."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    jobs: int = command.cores()  # Runs at a time, each on one thread

    def __post_init__(self) -> None:
        command.at_least(1, lengths=self.lengths, jobs=self.jobs)
        command.some(models=self.models, lengths=self.lengths, forms=self.forms, seeds=self.seeds)


def run(o: Options) -> None:
    """Train what is wanted until nothing is."""
    path, curves = o.out / "lengths.csv", o.out / "lengths-curves.csv"
    losses = units(rows.frame(path))
    with one_run_each(o.jobs) as pool:
        under_way: dict[Future[tuple[Record, rows.Row]], Unit] = {}
        while True:
            for unit in _next(o, losses, set(under_way.values()), o.jobs - len(under_way)):
                under_way[pool.submit(train, unit)] = unit
            if not under_way:
                return
            done, _ = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                unit = under_way.pop(future)
                row, curve = rows_of(unit, *future.result())
                losses[unit] = row["validation_loss"] if math.isfinite(row["validation_loss"]) else math.inf
                rows.upsert(curves, curve, KEY)  # before the row, which says that the run is done
                rows.upsert(path, [row], KEY)
                rate = f"lr {unit.lr:g}" + (f" alpha_kl {unit.alpha_kl:g}" if unit.alpha_kl else "")
                print(
                    f"{unit.model}, {unit.steps} steps, {unit.form} {rate}, seed {unit.seed}: {losses[unit]:.4f}",
                    flush=True,
                )


def _next(o: Options, losses: Losses, busy: set[Unit], count: int) -> list[Unit]:
    found: list[Unit] = []
    for unit in wanted(o.models, o.lengths, o.forms, o.seeds, losses):
        if len(found) == count:
            break
        if unit not in busy and unit not in found:
            found.append(unit)
    return found


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.lengths")
    command.make_folder(o.out)
    run(o)
    return 0


if __name__ == "__main__":
    sys.exit(main())
