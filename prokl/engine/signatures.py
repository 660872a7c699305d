"""What the state of every weight was made with, which must not change under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.backends.rounding import MASTER, mode_of
from prokl.engine.pieces import Reading, Unit, named

Entries = Mapping[Any, dict[str, Any]]


@dataclass(eq=False)
class Record:
    """What is remembered of a weight for as long as it has state, whichever bucket it is in.

    Attributes:
        settings: of its group, those that ``method.fixed`` names, when its state was made; None before. how, shape:
            likewise how it was read, and its shape.
        own_master: whether a "master" in its state is the optimizer's, and no wrapper's.
        idle: by suffix, calls with a gradient in which a piece did not move; -1 once it has, or was warned about.
    """

    settings: tuple[Any, ...] | None = None
    how: Reading = Reading(False, None)
    shape: torch.Size = torch.Size()
    own_master: bool = False
    idle: dict[str, int] = field(default_factory=dict)


class Signatures:
    """The records of all weights that have state; ``method`` says which settings are fixed."""

    def __init__(self, method: Method[Any]) -> None:
        self.method = method
        self._records: dict[Tensor, Record] = {}

    def of(self, p: Tensor) -> Record:
        """Return the record of a weight."""
        return self._records.setdefault(p, Record())

    def keep(self, state: Entries) -> None:
        """Forget the weights that have no state any more."""
        self._records = {p: record for p, record in self._records.items() if state.get(p)}

    def remember(self, units: Iterable[Unit], state: Entries) -> None:
        """Remember what the state of matrix weights is made with."""
        for unit in units:
            if unit.matrix and state.get(unit.p):
                record = self.of(unit.p)
                record.settings, record.how, record.shape = self._fixed(unit.group), unit.how, unit.p.shape
                record.own_master |= mode_of(unit.group, unit.p.dtype) == MASTER

    def check_settings(self, index: int, group: Group, state: Entries) -> None:
        """Raise ValueError where a setting of a matrix group is another one than state was made with."""
        fixed = self._fixed(group)
        for i, p in enumerate(group["params"]):
            record = self._records.get(p)
            if record is not None and record.settings not in (None, fixed) and state.get(p):
                _, name = named(group, index)[i]
                key, value, old = next(
                    each for each in zip(self.method.fixed, fixed, record.settings, strict=True) if each[1] != each[2]
                )
                raise ValueError(
                    f"Invalid {key}={value!r}: the state of {name} was made with {key}={old!r} and depends on it. Set "
                    "it back, or start a new optimizer."
                )

    def check_reading(self, unit: Unit, state: dict[str, Any] | None) -> None:
        """Raise ValueError where a matrix weight is read otherwise, or has another shape, than its state."""
        record, name = self._records.get(unit.p), unit.name
        if record is None or record.settings is None or not state:
            return
        if unit.how != record.how:
            raise ValueError(
                f"Invalid transposed={unit.how.transposed!r}, split={unit.how.split!r} of {name}: its state was made "
                f"with transposed={record.how.transposed!r}, split={record.how.split!r}. Set them back, or start a new "
                "optimizer."
            )
        if unit.p.shape != record.shape:
            raise ValueError(
                f"{name} has shape {tuple(unit.p.shape)}, and its state was made with {tuple(record.shape)}: set it "
                "back, or remove its state, optimizer.state.pop(p), to begin anew."
            )

    def _fixed(self, group: Group) -> tuple[Any, ...]:
        return tuple(group[key] for key in self.method.fixed)
