"""Prints the rows of a folder as tables: ``python -m bench.summary [DIR]``, as ``./run bench`` does at its end."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import records
from bench.errors import UsageError, command
from bench.micro import report as micro_report
from bench.shapes import SMALL
from bench.steps import memory_report
from bench.steps import report as step_report

RECORDS = micro_report.RECORD, step_report.RECORD, memory_report.RECORD


def tables(folder: Path) -> list[str]:
    """What the folder has rows for.

    Raises:
        UsageError: it has none, or not of this form.
    """
    micro, step, memory = (records.read(folder / name) for name in RECORDS)
    found = [micro_report.table(micro)] if micro else []
    if step_report.steps_of(step, SMALL):
        found.append(step_report.steps(step))
    if any(row["set"].startswith("n/m=") for row in step):
        found.append(step_report.aspects(step))
    if any(row["metric"].startswith("exponent of") for row in step):
        found.append(step_report.growth(step))
    if memory:
        sets = list(dict.fromkeys(row["set"] for row in memory))
        found += [memory_report.state(memory, sets), memory_report.workspace(memory, sets)]
    if not found:
        raise UsageError(f"{folder}: has no rows in {' or '.join(RECORDS)}; measure with ./run bench --out {folder}")
    return found


@command
def main(argv: Sequence[str]) -> int:
    """Print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.summary", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/bench"), metavar="DIR", help="%(default)s")
    print("\n".join(tables(parser.parse_args(argv).folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
