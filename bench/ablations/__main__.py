"""One study: ``python -m bench.ablations NAME``; its rows go to NAME.csv.

A run has one thread of a CPU; nothing here is timed. What the file has is not trained again, so that the same command
goes on where it was stopped.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from bench import command, rows
from bench.ablations.studies import STUDIES, Unit
from bench.workers import work_off


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train every variant of a study on every seed."""

    study: Annotated[
        tyro.conf.Positional[Literal[tuple(STUDIES)]],  # type: ignore[valid-type]
        tyro.conf.arg(help="; ".join(f"{name}: {study.what}" for name, study in STUDIES.items())),
    ]
    out: Path = rows.RESULTS  # Folder of the results file
    seeds: tuple[int, ...] = ()  # Others than the study's
    jobs: int = 1  # Runs at a time

    def __post_init__(self) -> None:
        command.at_least(1, jobs=self.jobs)


def run(o: Options) -> None:
    """Train what is missing, print and write."""
    study, path = STUDIES[o.study], o.out / f"{o.study}.csv"
    recorded, units = rows.read(path), list(study.units(o.seeds or study.seeds))
    missing = [unit for unit in units if not rows.having(recorded, unit.key)]
    print(f"{len(missing)} of {len(units)} runs are not in {path}", flush=True)

    def done(unit: Unit, its: list[rows.Row]) -> None:
        missing.remove(unit)
        rows.upsert(path, its, key=tuple(unit.key))
        for row in its:
            print(f"seed {row['seed']}, {rows.describe(row)}", flush=True)

    work_off(lambda: missing, lambda unit: unit, done, o.jobs)


@command.command
def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit status: 0, 2 for wrong input, 130 after Ctrl-C."""
    o = command.options(Options, argv, "bench.ablations")
    command.make_file(o.out / f"{o.study}.csv")
    run(o)
    return 0


if __name__ == "__main__":
    sys.exit(main())
