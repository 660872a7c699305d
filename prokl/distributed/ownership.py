"""Say where every weight lies and which rank owns each of its matrices: alike on every rank, without communication.

A block is a range along every dimension of a weight. DTensor's sharding follows torch.chunk: equal parts of
ceil(size / ranks), the last ones smaller or empty.

Every matrix has one owner, who steps it and holds its state. Costs are dealt out the longest first, each to the rank
with the least so far (Graham's LPT rule, at most 4/3 - 1/(3 world) of the best possible largest load), group after
group, so that a group that is added later changes no owner. Equal shapes have equal costs and follow each other: every
rank gets its share of each shape, which it steps as one batch. A weight that lies whole on some ranks stays with these,
unless they would have much more to do than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise, product
from typing import Any, NamedTuple


class Block(NamedTuple):
    """A range (start, stop) along every dimension of a weight."""

    bounds: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size along every dimension; it is empty where one of them is 0."""
        return tuple(stop - start for start, stop in self.bounds)

    def meet(self, other: Block) -> Block:
        """Return what both have, which may be empty."""
        pairs = zip(self.bounds, other.bounds, strict=True)
        return Block(tuple((low := max(a, c), max(low, min(b, d))) for (a, b), (c, d) in pairs))

    def within(self, outer: Block) -> tuple[slice, ...]:
        """Return the index of this block in a tensor that holds ``outer``."""
        pairs = zip(self.bounds, outer.bounds, strict=True)
        return tuple(slice(start - origin, stop - origin) for (start, stop), (origin, _) in pairs)


def whole_block(shape: Sequence[int]) -> Block:
    """Return the block that is everything."""
    return Block(tuple((0, size) for size in shape))


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of part ``index``, from 0, of a range as torch.chunk cuts it; empty beyond the last."""
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def check_placed(name: str, p: Any) -> None:
    """Raise ValueError for a DTensor on a mesh without this rank, or whose placement has no block of final values."""
    if p.device_mesh.get_coordinate() is None:
        raise ValueError(
            f"{name} is a DTensor on the mesh of ranks {p.device_mesh.mesh.flatten().tolist()}, which this rank is not "
            "in; leave it out of the optimizer of this rank."
        )
    for placement in p.placements:
        if placement.is_partial():
            raise ValueError(
                f"{name} is a DTensor with placement {placement!r}, a sum that is still to be made; must be Shard or "
                "Replicate: redistribute the weight before making the optimizer."
            )


@lru_cache(maxsize=256)  # weights of one shape have the same
def blocks(shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Any, ...]) -> tuple[Block, ...]:
    """Return the block of every rank of a mesh, in the order of its flattened ranks.

    Args:
        shape: of the weight. mesh_shape: of the mesh. placements: one for each of its dimensions: Replicate, Shard, or
            torch's _StridedShard (FSDP2 over tensor parallelism), whose mesh dimension cuts after those to its right.
    """
    strided = [type(placement).__name__ == "_StridedShard" for placement in placements]
    order = sorted(range(len(strided)), key=lambda i: (strided[i], -i if strided[i] else i))
    rank_blocks = []
    for coordinate in product(*map(range, mesh_shape)):
        bounds = [(0, size) for size in shape]
        for i in order:
            if not placements[i].is_replicate():
                dim = placements[i].dim
                start, stop = bounds[dim]
                bounds[dim] = chunk(start, stop, mesh_shape[i], coordinate[i])
        rank_blocks.append(Block(tuple(bounds)))
    return tuple(rank_blocks)


def holders(held: Sequence[Block]) -> dict[Block, tuple[int, ...]]:
    """Return who has each block; those of one weight are the same or have nothing in common."""
    by_block: dict[Block, list[int]] = {}
    for place, block in enumerate(held):
        by_block.setdefault(block, []).append(place)
    return {block: tuple(places) for block, places in by_block.items()}


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


def homes(shape: Sequence[int], stacked: bool, held: Sequence[Block]) -> tuple[Home, ...]:
    """Return where the matrices of a weight lie whole, in order; all ranks for all of them unless each lies somewhere.

    Args:
        shape: of the weight. stacked: whether its first dimension counts matrices. held: the block of every rank.
    """
    count = shape[0] if stacked else 1
    sides = whole_block(shape).bounds[1 if stacked else 0 :]
    found = sorted(
        Home(*(block.bounds[0] if stacked else (0, 1)), ranks)
        for block, ranks in holders(held).items()
        if 0 not in block.shape and block.bounds[1 if stacked else 0 :] == sides
    )
    complete = [0, *(home.stop for home in found)] == [*(home.start for home in found), count]
    return tuple(found) if complete else (Home(0, count, tuple(range(len(held)))),)


MAX_LOAD_RATIO = 4 / 3
"""Largest load of a rank over an even one, up to which it takes more of what lies on it: LPT's bound."""


def divide(weights: Sequence[tuple[float, Sequence[Home]]], loads: list[float]) -> list[tuple[Part, ...]]:
    """Return the parts of each weight; no rank owns two parts of one.

    Args:
        weights: of one group, in its order: the cost of stepping one matrix, in any unit, and the homes of all of its
            matrices, in order and without gaps. Their ranks are asked first, as nothing has to be sent to them.
        loads: costs that each rank has so far; these are added to them.
    """
    world, runs = len(loads), []
    for i, (cost, lying) in enumerate(weights):
        for first, stop, ranks in lying:
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
