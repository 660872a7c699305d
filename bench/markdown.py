"""Tables in Markdown from recorded rows."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas
from pandas import DataFrame

RESULTS = Path(__file__).resolve().parent / "results"
NAMES = {
    "adamw": "AdamW",
    "muon": "Muon",
    "kl-shampoo": "KL-Shampoo",
    "klshampoo": "KL-Shampoo",
    "pro-klshampoo": "Pro-KLShampoo",
    "smok-hop": "Smok-Hop",
    "cosmos": "COSMOS",
}

Row = dict[str, str]


def rows_of(name: str) -> list[Row]:
    """The rows of a record."""
    return read_rows(RESULTS / name)


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def markdown(head: Sequence[str], right: str, body: Sequence[Sequence[str]]) -> str:
    """A table with its columns aligned; ``right`` has an r for every column of figures."""
    widths = [max(3, *(len(row[c]) for row in (head, *body))) for c in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(w) if side == "r" else cell.ljust(w) for cell, w, side in zip(cells, widths, right, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * (w - 1) + ":" if side == "r" else "-" * w for w, side in zip(widths, right, strict=True)]
    return "\n".join([line(head), line(rule), *map(line, body)]) + "\n"


def table(frame: DataFrame, left: int) -> str:
    """Return a table of cells that are text, the first ``left`` columns aligned to the left."""
    sides = ["left"] * left + ["right"] * (len(frame.columns) - left)
    return frame.to_markdown(index=False, disable_numparse=True, colalign=sides) + "\n"


def figure(value: Any, digits: int, sign: str = "") -> str:
    """Return a figure with this many decimals; "-" where there is none, ``sign`` "+" for one of either sign."""
    return "-" if pandas.isna(value) or value == "" else f"{float(value):{sign}.{digits}f}"


def with_error(mean: Any, error: Any, digits: int = 4, sign: str = "") -> str:
    """Return a mean with its standard error, which a single value does not have."""
    return figure(mean, digits, sign) + ("" if figure(error, digits) == "-" else f" ± {figure(error, digits)}")
