"""The result of :func:`prokl.param_groups`: groups that print themselves as a table of what went where, and why."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from prokl.algorithm.shapes import Split

Algorithm = Literal["matrix", "adamw", "frozen"]
NUMBER = re.compile(r"(|.*(?:layer|block|stage)_?)(\d+)")
"""A component of a name that counts copies: 3, encoder_layer_3."""


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
        split: how many equal pieces, or pieces of what sizes, its outputs divide into; None for one.
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
        rank = [",".join("-" if r is None else str(r) for r in ranks)] if with_rank else []
        rows.append((name, shape, route.algorithm, *rank, route.reason))
        blank = [""] * (len(rows[0]) - 1)
        rows.extend((f"  = {alias}", *blank) for alias in route.names[1:])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = []
    for algorithm in get_args(Algorithm):
        matching = [route for route in routes if route.algorithm == algorithm]
        told, still = algorithm, sum(route.frozen for route in matching)
        if algorithm == "frozen":
            told, still = "in no group", 0
        if matching or algorithm != "frozen":
            count = f"{told}: {len(matching)} tensors, {sum(math.prod(route.shape) for route in matching):,} elements"
            counts.append(count + (f", {still} of them frozen now" if still else ""))
    return "\n".join([*lines, "; ".join(counts)])


def _collapsed(routes: Sequence[Route]) -> list[tuple[str, Route]]:
    """Return each line's name, and a route that has all else of the line, in the order of the lines' first weights."""
    alike: dict[Any, list[tuple[list[str], Route]]] = {}
    for route in routes:
        parts = [NUMBER.split(part)[1:3] if NUMBER.fullmatch(part) else [part] for part in route.names[0].split(".")]
        numbers = [part[1] for part in parts if len(part) > 1]
        pattern = ".".join(part[0] + "%" * (len(part) > 1) for part in parts)
        key = route.names if len(route.names) > 1 else (pattern, replace(route, names=(), decays=True))
        alike.setdefault(key, []).append((numbers, route))
    titled: list[tuple[str, Route]] = []
    for members in alike.values():
        lines = [(numbers, [route]) for numbers, route in members]
        for place in reversed(range(len(members[0][0]))):
            merged: dict[Any, list[tuple[list[str], list[Route]]]] = {}
            for line in lines:
                merged.setdefault((*line[0][:place], "", *line[0][place + 1 :]), []).append(line)
            lines = [_merged(same, place) for same in merged.values()]
        titled += [(_title(numbers, line_routes), line_routes[0]) for numbers, line_routes in lines]
    places = {id(route): i for i, route in enumerate(routes)}
    return sorted(titled, key=lambda line: places[id(line[1])])


def _merged(lines: list[tuple[list[str], list[Route]]], place: int) -> tuple[list[str], list[Route]]:
    """Return lines that differ in one number as one with all of these: 0..3,5."""
    first = lines[0][0]
    if len(lines) == 1:
        return lines[0]
    runs: list[list[int]] = []
    for number in sorted(int(line[0][place]) for line in lines):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    numbers = ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
    return [*first[:place], f"{{{numbers}}}", *first[place + 1 :]], [route for line in lines for route in line[1]]


def _title(numbers: list[str], routes: list[Route]) -> str:
    """Return the name of a line: its first weight's, with all numbers, and how many there are."""
    left = iter(numbers)
    parts = routes[0].names[0].split(".")
    if len(routes) > 1:
        parts = [m[1] + next(left) if (m := NUMBER.fullmatch(part)) else part for part in parts]
    return ".".join(parts) + (f" ×{len(routes)}" if len(routes) > 1 else "")


def _heads(routes: Sequence[Route]) -> str:
    """Say which output heads were found by what, or what to write where none was."""
    heads = [f"{route.names[0]} ({route.reason})" for route in routes if route.head]
    if heads:
        more = f", and {len(heads) - 3} more" if len(heads) > 3 else ""
        return f"output head{'s' * (len(heads) > 1)}: {', '.join(heads[:3])}{more}"
    beside = " beside what adamw= names" if any(route.reason.startswith("adamw=") for route in routes) else ""
    return f'output head: none found{beside}; if a layer gives the outputs, name it: adamw=["NAME.*"]'
