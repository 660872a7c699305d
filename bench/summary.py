"""Prints the rows of a folder as tables: ``python -m bench.summary [DIR]``, as ``./run bench`` does at its end."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import memory_report, micro_report, records, step_report
from bench.errors import UsageError, interruptible
from bench.shapes import SMALL

RECORDS = micro_report.RECORD, step_report.RECORD, memory_report.RECORD


def tables(folder: Path) -> list[str]:
    """What the folder has rows for.

    Raises:
        UsageError: it has none, or not of this form.
    """
    try:
        micro, step, memory = (records.read(folder / name) for name in RECORDS)
    except ValueError as error:
        raise UsageError(str(error)) from error
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


def main(argv: Sequence[str]) -> int:
    """Print; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.summary", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/bench"), metavar="DIR", help="%(default)s")
    try:
        print("\n".join(tables(parser.parse_args(argv).folder)))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(interruptible(main, sys.argv[1:]))
