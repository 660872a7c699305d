"""The result of :func:`prokl.param_groups`: groups that print themselves as a table of all weights, with reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from prokl.algorithm.shapes import Split

Algorithm = Literal["matrix", "adamw", "frozen"]
COPY = re.compile(r"(?<![^.])((?:[^.]*(?:layer|block|stage)_?)?)(\d+)(?![^.])")
"""A component of a name that counts copies of a block, and its number: 3, encoder_layer_3."""


@dataclass(frozen=True)
class Route:
    """The destination of one parameter.

    Attributes:
        names: every name that the parameter has, in the model's order; more than one when it is tied.
        shape: its shape.
        algorithm: ``"matrix"``, ``"adamw"``, or ``"frozen"`` when it is in no group.
        rank: rank after clamping to min(rank, m, n - 1), that of "auto" where it is left to the optimizer; None outside
            the matrix method; a tuple where the pieces of a split weight have several.
        reason: why.
        transposed: True if the matrix method reads it as stored (in, out).
        split: the number of equal pieces, or the sizes of the pieces, of its outputs; None for one.
        frozen: True if it did not require grad when the groups were made.
        head: True if it is an output head, of which AdamW has the weight.
        decays: True if its algorithm's weight decay applies to it.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    algorithm: Algorithm
    rank: int | tuple[int, ...] | None
    reason: str
    transposed: bool = False
    split: Split = None
    frozen: bool = False
    head: bool = False
    decays: bool = True


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; ``str`` and ``repr`` are the routing table.

    Attributes:
        routes: one :class:`Route` per parameter of the model, in the model's order.
        told: whether the routes' ranks were given, not left to the optimizer.
    """

    def __init__(self, groups: Iterable[dict[str, Any]] = (), routes: Iterable[Route] = (), told: bool = True) -> None:
        super().__init__(groups)
        self.routes, self.told = tuple(routes), told

    def __repr__(self) -> str:
        return f"{table(self.routes, 'rank' if self.told else 'rank if auto')}\n{_heads(self.routes)}"

    __str__ = __repr__


def table(routes: Sequence[Route], rank_title: str = "rank") -> str:
    """Format one line a name, in columns; the names of a tied parameter follow its first one. Counts at the end.

    Weights that are alike but for numbers in their names, as those of repeated blocks, share a line.
    """
    with_rank = any(route.rank is not None for route in routes)
    rows = [("parameter", "shape", "algorithm", *([rank_title] if with_rank else []), "reason")]
    for name, route in _collapsed(routes):
        shape = "x".join(map(str, route.shape)) or "scalar"
        ranks = route.rank if isinstance(route.rank, tuple) else (route.rank,)
        runs = [("-" if rank is None else str(rank), len(list(run))) for rank, run in groupby(ranks)]
        shown = (f"{count} × {rank}" if count > 2 else ",".join([rank] * count) for rank, count in runs)
        rank = [",".join(shown)] if with_rank else []
        rows.append((name, shape, route.algorithm, *rank, route.reason))
        blank = [""] * (len(rows[0]) - 1)
        rows.extend((f"  = {alias}", *blank) for alias in route.names[1:])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = []
    for algorithm, title in (("matrix", "matrix"), ("adamw", "adamw"), ("frozen", "in no group")):
        there = [route for route in routes if route.algorithm == algorithm]
        if there or algorithm != "frozen":
            still = sum(route.frozen for route in there) if algorithm != "frozen" else 0
            count = f"{title}: {len(there)} tensors, {sum(math.prod(route.shape) for route in there):,} elements"
            counts.append(count + (f", {still} of them frozen now" if still else ""))
    return "\n".join([*lines, "; ".join(counts)])


def _collapsed(routes: Sequence[Route]) -> list[tuple[str, Route]]:
    """Return each line's name, and a route that has all else of the line, in the order of the lines' first weights."""
    alike: dict[Any, list[tuple[tuple[str, ...], list[int]]]] = {}
    for i, route in enumerate(routes):
        name = route.names[0]
        key = route.names if len(route.names) > 1 else (COPY.sub(r"\1%", name), replace(route, names=(), decays=True))
        alike.setdefault(key, []).append((tuple(found[2] for found in COPY.finditer(name)), [i]))
    titled: dict[int, str] = {}
    for lines in alike.values():
        for place in reversed(range(len(lines[0][0]))):  # lines that differ in one number alone become one
            merged: dict[Any, tuple[list[str], list[int]]] = {}
            for numbers, places in lines:
                of_line = merged.setdefault((*numbers[:place], "", *numbers[place + 1 :]), ([], []))
                of_line[0].append(numbers[place])
                of_line[1].extend(places)
            lines = [
                ((*others[:place], _ranges(numbers), *others[place + 1 :]), places)
                for others, (numbers, places) in merged.items()
            ]
        for numbers, places in lines:
            left = iter(numbers)
            title = COPY.sub(lambda found, left=left: found[1] + next(left), routes[places[0]].names[0])  # type: ignore[misc]
            titled[places[0]] = title + (f" ×{len(places)}" if len(places) > 1 else "")
    return [(titled[i], routes[i]) for i in sorted(titled)]


def _ranges(numbers: Sequence[str]) -> str:
    """Return several numbers as {0..3,5}, one as it is."""
    if len(numbers) == 1:
        return numbers[0]
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(map(int, numbers))), lambda at: at[1] - at[0])]
    return "{" + ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs) + "}"


def _heads(routes: Sequence[Route]) -> str:
    """Name the output heads with the reasons, or say how to name one where none was found."""
    heads = [f"{route.names[0]} ({route.reason})" for route in routes if route.head]
    if heads:
        more = f", and {len(heads) - 3} more" if len(heads) > 3 else ""
        return f"output head{'s' * (len(heads) > 1)}: {', '.join(heads[:3])}{more}"
    beside = " beside what adamw= names" if any(route.reason.startswith("adamw=") for route in routes) else ""
    return f'output head: none found{beside}; if a layer gives the outputs, name it: adamw=["NAME.*"]'
