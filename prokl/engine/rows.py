"""Which matrices of a bucket something is about, on its device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prokl.backends.device import on_device

KEPT = 32
"""Sets of matrices that a bucket keeps: clocks that drifted apart make ever new ones."""


class Rows(NamedTuple):
    """Some, but not all, of the matrices of a bucket."""

    indices: Tensor
    """(k,) int64."""
    mask: Tensor
    """(B,) bool."""


class RowSets:
    """The sets used last; making one costs a copy to the device, which a CUDA graph cannot capture.

    Args:
        count: B.
        device: where they are.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.kept: dict[tuple[int, ...], Rows] = {}

    def of(self, rows: tuple[int, ...]) -> Rows | None:
        """Return ``rows``, in ascending order, on the device; None for all."""
        if len(rows) == self.count:
            return None
        row_set = self.kept.pop(rows, None)
        if row_set is None:
            index = on_device(rows, torch.int64, self.device)
            mask = torch.zeros(self.count, dtype=torch.bool, device=self.device)
            row_set = Rows(index, mask.index_fill_(0, index, True))
        self.kept[rows] = row_set  # the last used is the last to go
        if len(self.kept) > KEPT:
            del self.kept[next(iter(self.kept))]
        return row_set
