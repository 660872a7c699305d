"""The rows of every measurement in bench/results: one set of columns, where it was measured, reading and merging."""

import csv
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import prokl
from bench.errors import UsageError

COLUMNS = [
    "set", "contender", "backend", "metric", "unit", "median", "q1", "q3", "rounds", "ratio", "floor", "rank", "dtype",
    "shapes", "device", "cpu", "threads", "torch", "triton", "cuda", "prokl", "commit", "date", "note",
]  # fmt: skip
"""``ratio`` is the median over that of the row that this one is compared with, ``floor`` a predicted lower bound in
the same unit. Empty is what does not apply; ``note`` says why there is no median, or what a reader must know."""
SAME = ("device", "cpu", "threads", "torch", "triton", "cuda", "prokl", "commit")
"""What two measurements that need no repetition share."""
ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, str]


def environment(device: torch.device) -> Row:
    """Where, with what and when the figures of this process are measured."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cpu": processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "triton": version("triton") or "",
        "cuda": (torch.version.cuda or "") if cuda else "",
        "prokl": prokl.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def processor() -> str:
    """Name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version(distribution: str) -> str | None:
    """Version of an installed distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Commit of this checkout, with "-dirty" where files differ or are new; the records themselves do not count."""
    try:
        name, changes = (
            subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True).stdout
            for command in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--", ".", ":!bench/results"],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return name.strip() + ("-dirty" if changes else "")


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, q1 and q3; without quartiles where there is one value."""
    if len(values) < 2:
        return {"median": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def text(row: Mapping[str, Any]) -> Row:
    """A row as it is written: every column, numbers with five digits.

    Raises:
        ValueError: it has a column that records do not have.
    """
    if unknown := row.keys() - set(COLUMNS):
        raise ValueError(f"Invalid columns {sorted(unknown)}: a record has {', '.join(COLUMNS)}.")

    def cell(value: Any) -> str:
        return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)

    return {column: cell(row.get(column)) for column in COLUMNS}


def read(path: Path) -> list[Row]:
    """The rows of a file; none where there is no file.

    Raises:
        UsageError: its columns are others.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        if list(reader.fieldnames or ()) != COLUMNS:
            raise UsageError(f"Invalid columns in {path}: must be {','.join(COLUMNS)}. Remove or convert the file.")
        return list(reader)


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows, all or nothing: an interrupted run leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(text, rows))
    partial.replace(path)


def merge(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Put rows into a file in place of all those of the same sets, which keep their place."""
    fresh: dict[str, list[Row]] = {}
    for row in map(text, rows):
        fresh.setdefault(row["set"], []).append(row)
    result: list[Row] = []
    for old in read(path):
        if old["set"] not in fresh:
            result.append(old)
        else:
            result += fresh[old["set"]]
            fresh[old["set"]] = []  # their first row has brought all of them
    write(path, result + [row for rows_of_set in fresh.values() for row in rows_of_set])


def measured(path: Path, name: str, here: Mapping[str, str]) -> bool:
    """Whether the file has this set, measured at the same commit, versions and machine, and none of it wrong.

    Never from a changed tree.
    """
    rows = [row for row in read(path) if row["set"] == name]
    if not rows or not here["commit"] or here["commit"].endswith("-dirty"):
        return False
    if any(row["note"].startswith("wrong") for row in rows):
        return False
    return all(row[column] == here[column] for row in rows for column in SAME)
