"""Assign matrices to ranks: the same on every rank, without communication.

Every matrix has one owner, who steps it and holds its state. Costs are dealt out the longest first, each to the rank
with the least so far (Graham's LPT rule, at most 4/3 - 1/(3 world) of the best possible largest load), group after
group, so that a group that is added later changes no owner. Equal shapes have equal costs and follow each other: every
rank gets its share of each shape, which it steps as one batch. What lies whole on some ranks stays with these, unless
they would have much more to do than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Part(NamedTuple):
    """Consecutive matrices of one weight, with their owner."""

    start: int
    stop: int
    owner: int


class Home(NamedTuple):
    """Consecutive matrices of one weight that lie whole on some ranks."""

    start: int
    stop: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """A weight as its work is divided.

    Attributes:
        count: matrices of a stack, which may have several owners; 1 for any other weight.
        cost: of stepping one matrix, in any unit.
        homes: where its matrices lie whole, in order and without gaps; empty where none does. These ranks are asked
            first, as nothing has to be sent to them.
    """

    count: int
    cost: float
    homes: tuple[Home, ...] = ()

    def runs(self, world: int) -> list[Home]:
        """Return the matrices in runs, each of which gets one owner, with the candidates."""
        homes = []
        for first, stop, ranks in self.homes or (Home(0, self.count, tuple(range(world))),):
            count, cuts = stop - first, min(stop - first, len(ranks))
            bounds = [first + i * count // cuts for i in range(cuts + 1)]
            homes += [Home(start, end, ranks) for start, end in zip(bounds, bounds[1:], strict=False)]
        return homes


MAX_LOAD_RATIO = 4 / 3
"""Largest load of a rank over an even one, up to which it takes more of what lies on it: LPT's bound."""


def divide(weights: Sequence[Work], loads: list[float]) -> list[tuple[Part, ...]]:
    """Return the parts of each weight.

    No rank owns two parts of one weight.

    Args:
        weights: of one group, in its order.
        loads: costs that each rank has so far; these are added to them.
    """
    world = len(loads)
    runs = [
        (weight.cost * (run.stop - run.start), i, run) for i, weight in enumerate(weights) for run in weight.runs(world)
    ]
    costs = [cost for cost, _, _ in runs]
    limit = MAX_LOAD_RATIO * max([(sum(loads) + sum(costs)) / world, *costs])
    parts: list[list[Part]] = [[] for _ in weights]
    for cost, i, run in sorted(runs, key=lambda entry: (-entry[0], entry[1], entry[2].start)):
        taken = {part.owner for part in parts[i]}
        free = [rank for rank in run.ranks if rank not in taken and loads[rank] + cost <= limit]
        free = free or [rank for rank in range(world) if rank not in taken]
        owner = min(free, key=lambda rank: (loads[rank], rank))
        loads[owner] += cost
        parts[i].append(Part(run.start, run.stop, owner))
    return [tuple(sorted(weight_parts)) for weight_parts in parts]
