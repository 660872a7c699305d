"""Map the blocks of a weight to ranks, from its DTensor's placements; no communication.

A block is a range along every dimension. Sharding follows torch.chunk: equal parts of ceil(size / ranks), the last ones
smaller or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from prokl.distributed.ownership import Home


@dataclass(frozen=True)
class Block:
    """A range along every dimension of a weight."""

    bounds: tuple[tuple[int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size along every dimension."""
        return tuple(stop - start for start, stop in self.bounds)

    @property
    def empty(self) -> bool:
        """True if it has no element."""
        return 0 in self.shape

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


def rows(shape: Sequence[int], start: int, stop: int) -> Block:
    """Return the block of ``start`` to ``stop`` along the first dimension."""
    return Block(((start, stop), *((0, size) for size in shape[1:])))


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Return (start, stop) of part ``index``, from 0, of a range as torch.chunk cuts it; empty beyond the last."""
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def check_placements(name: str, placements: Sequence[Any]) -> None:
    """Raise ValueError for a placement that has no block of final values."""
    for placement in placements:
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
        if not block.empty and block.bounds[1 if stacked else 0 :] == sides
    )
    complete = [0, *(home.stop for home in found)] == [*(home.start for home in found), count]
    return tuple(found) if complete else (Home(0, count, tuple(range(len(held)))),)
