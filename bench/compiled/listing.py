"""Rows of a dataclass, as text and as a file: what the compilers' reports are made of, which nothing was timed for."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any


def table(rows: Sequence[Any]) -> str:
    """The rows under their fields' names, aligned; empty without rows."""
    if not rows:
        return ""
    lines = [[f.name for f in fields(rows[0])], *([str(v) for v in asdict(row).values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def write(path: Path, rows: Sequence[Any], kind: type) -> None:
    """Write the rows, all of them of this ``kind``, with a header."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [f.name for f in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))
