"""Prints the rows of a folder as tables: ``python -m bench.summary [DIR]``, as ``./run bench`` does at its end."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bench import timing_tables
from bench.command import UsageError, command, options
from bench.rows import frame
from bench.shapes import ASPECTS, SMALL


@dataclass(frozen=True)
class Options:
    """Print the rows of a folder as tables."""

    folder: Annotated[Path, tyro.conf.Positional] = Path("runs/bench")
    """With micro-cpu.csv, step-cpu.csv or memory.csv."""


def tables(folder: Path) -> list[str]:
    """Return tables of what the folder has rows for.

    Raises:
        UsageError: it has none, or not of this form.
    """
    micro, step, memory = (frame(folder / f"{name}.csv") for name in ("micro-cpu", "step-cpu", "memory"))
    found = [timing_tables.primitives(micro)] if len(micro) else []
    models = set() if step.empty else set(step.loc[step["metric"] == "step", "model"])
    found += [timing_tables.steps(step)] if models & set(SMALL) else []
    found += [timing_tables.aspects(step)] if models & set(ASPECTS) else []
    if len(memory):
        found += [timing_tables.memory(memory, metric, memory["model"].unique()) for metric in ("state", "workspace")]
    if not found:
        raise UsageError(f"{folder}: has no rows of micro, step or memory; measure with ./run bench --out {folder}")
    return found


@command
def main(argv: Sequence[str]) -> int:
    """Print; return the exit status."""
    print("\n".join(tables(options(Options, argv, "bench.summary").folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
