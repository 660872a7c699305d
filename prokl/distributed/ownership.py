"""Assign matrices to ranks: the same on every rank, without communication.

Every matrix has one owner, who steps it and holds its state. Costs are dealt out the longest first, each to the rank
with the least so far (Graham's LPT rule, at most 4/3 - 1/(3 world) of the best possible largest load), group after
group, so that a group that is added later changes no owner. Equal shapes have equal costs and follow each other: every
rank gets its share of each shape, which it steps as one batch. What lies whole on some ranks stays with these, unless
they would have much more to do than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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


MAX_LOAD_RATIO = 4 / 3
"""Largest load of a rank over an even one, up to which it takes more of what lies on it: LPT's bound."""


def divide(weights: Sequence[tuple[float, Sequence[Home]]], loads: list[float]) -> list[tuple[Part, ...]]:
    """Return the parts of each weight.

    No rank owns two parts of one weight.

    Args:
        weights: of one group, in its order: the cost of stepping one matrix, in any unit, and the homes of all of its
            matrices, in order and without gaps. Their ranks are asked first, as nothing has to be sent to them.
        loads: costs that each rank has so far; these are added to them.
    """
    world, runs = len(loads), []
    for i, (cost, homes) in enumerate(weights):
        for first, stop, ranks in homes:
            count, cuts = stop - first, min(stop - first, len(ranks))
            bounds = [first + j * count // cuts for j in range(cuts + 1)]
            runs += [(cost * (end - start), i, Home(start, end, ranks)) for start, end in pairwise(bounds)]
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
