"""The result of :func:`prokl.param_groups`: groups that print themselves as a table of what went where, and why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from prokl.algorithm.shapes import Split
from prokl.routing.rules import Algorithm


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
    """Format one line a name, in columns; the names of a tied parameter follow its first one. Counts at the end."""
    with_rank = any(route.rank is not None for route in routes)
    rows = [("parameter", "shape", "algorithm", *([rank_title] if with_rank else []), "reason")]
    for route in routes:
        shape = "x".join(map(str, route.shape)) or "scalar"
        ranks = route.rank if isinstance(route.rank, tuple) else (route.rank,)
        rank = [",".join("-" if r is None else str(r) for r in ranks)] if with_rank else []
        rows.append((route.names[0], shape, route.algorithm, *rank, route.reason))
        blank = [""] * (len(rows[0]) - 1)
        rows.extend((f"  = {alias}", *blank) for alias in route.names[1:])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = []
    for algorithm in get_args(Algorithm):
        own = [route for route in routes if route.algorithm == algorithm]
        told, still = algorithm, sum(route.frozen for route in own)
        if algorithm == "frozen":
            told, still = "in no group", 0
        if own or algorithm != "frozen":
            count = f"{told}: {len(own)} tensors, {sum(math.prod(route.shape) for route in own):,} elements"
            counts.append(count + (f", {still} of them frozen now" if still else ""))
    return "\n".join([*lines, "; ".join(counts)])


def _heads(routes: Sequence[Route]) -> str:
    """Say which output heads were found by what, or what to write where none was."""
    found = [f"{route.names[0]} ({route.reason})" for route in routes if route.head]
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        return f"output head{'s' * (len(found) > 1)}: {', '.join(found[:3])}{more}"
    beside = " beside what adamw= names" if any(route.reason.startswith("adamw=") for route in routes) else ""
    return f'output head: none found{beside}; if a layer gives the outputs, name it, as in adamw=["fc2.*"]'
