"""Tables on the device, which kernels read: where the matrices of a bucket lie in memory; lr and weight decay of each.

Weights and gradients are allocations of their own. A kernel that finds them through a table serves any number of
them in one launch, and a captured CUDA graph follows gradients that move: the table is rewritten before the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prokl.backends.device import send


def _lies_in(matrix: Tensor | None, tensor: Tensor) -> bool:
    """Return True if a matrix is a view of a tensor."""
    return matrix is not None and matrix.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class PointerTable:
    """Holds addresses and strides of B matrices; the caller keeps what they point at alive.

    Args:
        count: B.
        device: where the matrices and the table lie.

    Attributes:
        table: (3,B) int64: address in bytes, 0 for an absent matrix; row stride; column stride, in elements. It
            stays the same tensor.
    """

    def __init__(self, count: int, device: torch.device | str) -> None:
        self.table = torch.zeros((3, count), dtype=torch.int64, device=device)
        self._held: list[list[int]] = [[0] * count] * 3
        self._forms: Any = None  # of the tensors that are followed; None where none are
        self._starts: list[int] = []  # their addresses
        self._within: list[tuple[int, int]] = []  # of every matrix, in which of them it lies, and how far

    def follow(self, tensors: Sequence[Tensor], forms: Any) -> bool:
        """Rewrite the addresses, on the current stream, where the tensors in which the matrices lie have moved.

        It is all that a step costs in which nothing else has changed, and nothing waits for the device.

        Args:
            tensors: as in the last :meth:`update`. forms: likewise.

        Returns:
            False where the forms are others, or a matrix was a copy: nothing is done, and it takes an update.
        """
        if self._forms is None or forms != self._forms:
            return False
        starts = [t.data_ptr() for t in tensors]
        if starts != self._starts:
            pointers = [starts[i] + offset for i, offset in self._within]
            send(self.table[0], pointers)
            self._held, self._starts = [pointers, *self._held[1:]], starts
        return True

    def update(
        self,
        matrices: Sequence[Tensor | None],
        counts: Sequence[int],
        tensors: Sequence[Tensor] = (),
        forms: Any = None,
    ) -> None:
        """Rewrite the table, on the current stream, if something has moved; nothing waits for the device.

        Args:
            matrices: for every parameter its matrices as a view (c,m,n) with any strides; None where it has none.
            counts: c of every parameter, also of an absent one.
            tensors: what each of them lies in, or was copied from, for :meth:`follow`; none where one is absent.
            forms: all that such a view depends on but the address, of all tensors.
        """
        self._forms = None
        pointers: list[int] = []
        row_strides: list[int] = []
        column_strides: list[int] = []
        for t, count in zip(matrices, counts, strict=True):
            # Plain memory in one dtype: the optimizer has checked it, and Member.gradient makes it so.
            pointer = step = row = column = 0
            if t is not None:
                assert t.ndim == 3 and len(t) == count and t.device == self.table.device, (t.shape, count, t.device)
                pointer, (step, row, column) = t.data_ptr(), t.stride()
                step *= t.element_size()
            pointers.extend(pointer + step * c for c in range(count))
            row_strides.extend([row] * count)
            column_strides.extend([column] * count)
        rows = [pointers, row_strides, column_strides]
        if rows != self._held:
            send(self.table, rows)
            self._held = rows
        if tensors and all(map(_lies_in, matrices, tensors)):
            self._forms, self._starts = forms, [t.data_ptr() for t in tensors]
            owners = [i for i, count in enumerate(counts) for _ in range(count)]
            self._within = [(i, address - self._starts[i]) for i, address in zip(owners, pointers, strict=True)]


ON_DEVICE = -1.0
"""Stands for a number that is on the device; no rate is as low."""


class RateTable:
    """Holds a number of each of B matrices that a step reads on the device, as its learning rate.

    Attributes:
        table: (B,) float64; it stays the same tensor.
    """

    def __init__(self, count: int, device: torch.device | str) -> None:
        self.table = torch.zeros(count, dtype=torch.float64, device=device)
        self._held: list[tuple[float, int]] = []

    def update(self, values: Sequence[float | Tensor], ends: Sequence[int]) -> None:
        """Rewrite the table, on the current stream, if something has changed; nothing waits for the device.

        Args:
            values: of runs of matrices: numbers, or tensors with one element, which are read where they are.
            ends: the matrix before which each run ends; the last one's is B.
        """
        there = [_on_device(value) for value in values]
        numbers = [ON_DEVICE if read else float(value) for value, read in zip(values, there, strict=True)]
        held = list(zip(numbers, ends, strict=True))
        if held != self._held:
            if len({*numbers}) == 1:
                self.table.fill_(numbers[0])  # the value travels in the launch: no copy from the host
            else:
                starts = [0, *ends]
                send(self.table, [x for (x, end), start in zip(held, starts, strict=False) for _ in range(start, end)])
            self._held = held
        for value, read, start, end in zip(values, there, [0, *ends], ends, strict=False):
            if read and isinstance(value, Tensor):
                self.table[start:end].copy_(value.reshape(1))


def _on_device(value: float | Tensor) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
