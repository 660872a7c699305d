"""Tables of the memory rows; :mod:`bench.tables` puts them into the documents."""

from collections.abc import Sequence

from bench.markdown import NAMES, Row, markdown, rows_of
from bench.shapes import PAPER

RECORD = "memory.csv"
DTYPE = "float32"


def megabytes(rows: Sequence[Row] | None, metric: str, sets: Sequence[str]) -> str:
    """Of every method and rank on these sets, in 10^6 bytes."""
    cells: dict[str, dict[str, str]] = {}
    for row in rows_of(RECORD) if rows is None else rows:
        if row["metric"] == metric and row["unit"] == "bytes" and row["dtype"] == DTYPE and row["set"] in sets:
            name = NAMES[row["contender"]] + (f", r = {row['rank']}" if row["rank"] else "")
            cells.setdefault(name, {})[row["set"]] = f"{float(row['median']) / 1e6:.0f}"
    body = [[name, *(found.get(s, "-") for s in sets)] for name, found in cells.items()]
    return markdown([f"{metric}, MB", *sets], "l" + "r" * len(sets), body)


def state(rows: Sequence[Row] | None = None, sets: Sequence[str] = PAPER) -> str:
    """Optimizer state in float32."""
    return megabytes(rows, "state", sets)


def workspace(rows: Sequence[Row] | None = None, sets: Sequence[str] = PAPER) -> str:
    """Temporary memory of a step, weights and state in float32."""
    return megabytes(rows, "workspace", sets)
