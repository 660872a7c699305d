"""Rows of the microbenchmarks, on their way into a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import records
from bench.rates import Rates, machine_rows, measure_rates, recorded

Row = dict[str, Any]
PLAIN, OURS, KL = "plain", "pro-klshampoo", "klshampoo"
"""Contenders: the formula as it is printed, this package's form, and what KL-Shampoo needs in its place."""


class Ledger:
    """Takes the rows of a run and writes those of a group when all of its contenders have one: none is written half.

    Args:
        device: where it is measured.
        seconds: of timing per contender.
        path: of the file, or None.
        again: whether to measure what the file has already.

    Attributes:
        device: where it is measured.
        seconds: of timing per contender.
    """

    def __init__(self, device: torch.device, seconds: float, path: Path | None, again: bool) -> None:
        self.device, self.seconds = device, seconds
        self._path, self._again = path, again
        self._here = records.environment(device)
        self._rates: Rates | None = None
        self._rows: dict[str, dict[int, Row]] = {}

    @property
    def rates(self) -> Rates:
        """The ceilings of this machine: those that the file's floors are made of, or measured when first asked for."""
        self._rates = self._rates or recorded(self._path, self._here)
        if self._rates is None:
            self._rates = measure_rates(self.device, torch.get_num_threads())
            self._write(machine_rows(self._rates))
        return self._rates

    def has(self, group: str) -> bool:
        """Whether the file had this group of this commit and machine before the run, and that is enough."""
        if self._path is None or self._again or group in self._rows:
            return False
        return records.measured(self._path, group, self._here)

    def add(self, group: str, place: int, of: int, row: Row) -> None:
        """Keep the row of the contender in this ``place`` of a group with ``of`` contenders."""
        rows = self._rows.setdefault(group, {})
        rows[place] = row
        if len(rows) == of:
            self._write(with_ratios([rows[i] for i in range(of)]))

    def fail(self, group: str) -> None:
        """Remove what the file has of a group, whose contenders are not all right."""
        if self._path:
            rows = records.read(self._path)
            if any(row["set"] == group for row in rows):
                records.write(self._path, [row for row in rows if row["set"] != group])

    def _write(self, rows: Sequence[Row]) -> None:
        if self._path:
            records.merge(self._path, [row | self._here for row in rows])


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows of a group with their medians over that of the first one, as far as there are such."""
    first = rows[0].get("median")
    return [row | ({"ratio": row["median"] / first} if first and "median" in row else {}) for row in rows]
