"""Describe every weight on a rank, and make the stand-in that the rank steps in its place.

A weight's *stand-in* is an ordinary tensor with an ordinary gradient: the weight itself, rows of it, or a buffer that
collects what lies on other ranks. An optimizer without ranks steps the stand-ins of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prokl.algorithm.shapes import MatrixShape
from prokl.distributed.ownership import Block, Part, holders, whole_block
from prokl.distributed.team import ALONE, Team
from prokl.engine.weights import is_dtensor, may_move


def local(t: Tensor) -> Tensor:
    """Return what of a tensor is on this rank, in its own memory."""
    there: Tensor = t.detach()
    mine: Tensor = there._local_tensor if is_dtensor(there) else there
    return mine.trigger_wait() if hasattr(mine, "trigger_wait") else mine  # still on its way, in nobody's memory


@dataclass(eq=False)
class LocalWeight:
    """A weight as this rank steps it, sends it and gets it.

    Attributes:
        p: the weight. team: who divides it. held: the block of every place.
        parts: in order, with their owners; none where each rank steps all that it has by itself, as of replicated
            weights and of AdamW's shards.
        stacked: whether ``parts`` divide its first dimension; else its one part is everything. shapes: of the pieces of
            a stack, each of which is skipped by itself.
        kind: what must stay as it is for the weight to go on with its state, by name.
        places: the ranks that hold each block. sharded: whether some have less than everything.
        mine: the part that this rank owns, or None. stand_in: what it steps, or None.
        here: whether what it steps lies whole on it. own_memory: whether the stand-in is no view of the weight.
        gradient: this rank's part of it during a step; in the weight's dtype where parts of it are sent.
    """

    p: Tensor
    team: Team = ALONE
    parts: tuple[Part, ...] = ()
    held: Sequence[Block] = ()
    stacked: bool = False
    shapes: tuple[MatrixShape, ...] = ()
    kind: dict[str, Any] = field(default_factory=dict)
    here: bool = field(init=False, default=True)
    own_memory: bool = field(init=False, default=False)
    stand_in: Tensor | None = field(init=False, default=None)
    gradient: Tensor | None = field(init=False, default=None)
    _index: tuple[slice, ...] = field(init=False, default=())  # of what this rank steps in what it has

    def __post_init__(self) -> None:
        p, place, whole = self.p, self.team.index, whole_block(self.p.shape)
        self.places = holders(self.held)
        self.sharded = any(block != whole for block in self.places)
        self.mine = next((part for part in self.parts if part.owner == place), None)
        block = whole
        if self.mine is not None:
            block = self.block(self.mine)
            self.here, self.own_memory = self._lies_on(place, block), self._apart(self.mine)
            self._index = block.within(self.held[place])
        elif self.parts:
            return
        if self.own_memory:
            if is_dtensor(p):
                own = torch.zeros(block.shape, dtype=p.dtype, device=p.device)
            else:  # in the weight's strides, which fused kernels ask of a gradient
                own = torch.zeros_like(local(p)[self._index])
            self.stand_in = nn.Parameter(own, p.requires_grad)
            if not may_move(p):
                self.free()
        elif is_dtensor(p) or block != whole:
            self.stand_in = nn.Parameter(local(p)[self._index], p.requires_grad)
        else:
            self.stand_in = p

    def block(self, part: Part) -> Block:
        """Return the block that a part is."""
        bounds = whole_block(self.p.shape).bounds
        return Block(((part.start, part.stop), *bounds[1:]) if self.stacked else bounds)

    def _lies_on(self, place: int, block: Block) -> bool:
        return self.held[place].meet(block) == block

    def _pieces(self, part: Part) -> list[tuple[Block, tuple[int, ...]]]:
        """Return the blocks in which a part lies on the ranks, each with its holders."""
        pieces = [(held.meet(self.block(part)), places) for held, places in self.places.items()]
        return [(piece, places) for piece, places in pieces if 0 not in piece.shape]

    def _apart(self, part: Part) -> bool:
        """Return True if the stand-in of a part has memory of its own.

        It collects what lies on several ranks, or is one part of a weight of which others have copies: that weight
        changes at once, when all of it has come.
        """
        copied = any(places != (part.owner,) for _, places in self._pieces(part))
        return not self._lies_on(part.owner, self.block(part)) or (len(self.parts) > 1 and copied)

    def transfers(self) -> Iterator[Transfer]:
        """Yield all that is sent of this weight, between whichever ranks, in an order that is the same on all."""
        for part in self.parts:
            copies, apart = self.places[self.held[part.owner]], self._apart(part)
            for block, places in self._pieces(part):
                # From a copy of the weight of which the owner has a block too, as near as may be.
                near = places[copies.index(part.owner) * len(places) // len(copies)]
                if places != (part.owner,) or apart:
                    yield Transfer(self, block, part, part.owner if part.owner in places else near, places)

    def follow(self) -> None:
        """Follow the weight into another dtype, or onto another device."""
        one, p = self.stand_in, self.p
        if one is not None and (one.dtype, one.device) != (p.dtype, p.device):
            one.grad = None
            own = torch.zeros_like(one, dtype=p.dtype, device=p.device) if self.own_memory else local(p)[self._index]
            one.data = own

    def fill_stand_in(self) -> None:
        """Give the stand-in what the weight is now, and what of its gradient is here; the rest comes by a message."""
        stand_in, p, g = self.stand_in, self.p, self.p.grad
        if is_dtensor(g) and is_dtensor(p) and g.placements != p.placements:
            g = g.redistribute(p.device_mesh, p.placements)  # by all ranks of its mesh
        if g is not None:
            self.gradient = local(g).to(p.dtype) if self.sharded else local(g)
        if stand_in is None or stand_in is p:
            return
        stand_in.requires_grad_(p.requires_grad)
        if not self.own_memory:
            stand_in.data = local(p)[self._index]
        elif may_move(p):
            if not stand_in.untyped_storage().nbytes():
                stand_in.untyped_storage().resize_(stand_in.nbytes)
                stand_in.detach().zero_()
            if self.here:
                stand_in.detach().copy_(local(p)[self._index])
        gradient = None
        if self.gradient is not None and not self.here:
            gradient = torch.empty_like(stand_in)
        elif self.gradient is not None:
            gradient = self.gradient[self._index]
            if self.stacked and len(self.parts) > 1:  # where agreeing may write into it: the gradient is the caller's
                gradient = gradient.clone()
        if gradient is not None and gradient.dtype != stand_in.dtype:
            stand_in.grad_dtype = gradient.dtype  # a torch without it has no such gradients
        stand_in.grad = gradient

    def lends(self) -> bool:
        """Return True if this rank steps a matrix that lies on it, and its gradient is there without a message."""
        p, g = self.p, self.p.grad
        placed = is_dtensor(g) and is_dtensor(p) and g.placements != p.placements
        return bool(self.shapes) and self.stand_in is not None and self.here and not placed

    def release(self) -> None:
        """Keep no gradient alive."""
        self.gradient = None
        if self.stand_in is not None and self.stand_in is not self.p:
            self.stand_in.grad = None

    def free(self) -> None:
        """Give up the stand-in's own memory until it is lent what may move."""
        if self.own_memory and self.stand_in is not None:
            self.stand_in.untyped_storage().resize_(0)


@dataclass(eq=False)
class Transfer:
    """A block of a weight on its way to the owner of a part, and back.

    Attributes:
        weight: whose. block: what is sent. part: what it is of.
        sender: place of who lends it to the owner, and gets it back.
        holders: places of all who have it, to whom the sender passes it on.
    """

    weight: LocalWeight
    block: Block
    part: Part
    sender: int
    holders: tuple[int, ...]

    def __post_init__(self) -> None:
        self._index = self.block.within(self.weight.held[self.weight.team.index])
        self._stand_in_index = self.block.within(self.weight.block(self.part))

    def here(self) -> Tensor:
        """Return it where this rank keeps the weight, a view."""
        return local(self.weight.p)[self._index]

    def gradient(self) -> Tensor | None:
        """Return the gradient of :meth:`here`, a view, or None."""
        g = self.weight.gradient
        return None if g is None else g[self._index]

    def standing(self) -> Tensor:
        """Return it where this rank, the owner, steps it, a view."""
        assert self.weight.stand_in is not None
        return self.weight.stand_in.detach()[self._stand_in_index]

    def standing_gradient(self) -> Tensor | None:
        """Return the gradient of :meth:`standing`, a view, or None."""
        g = None if self.weight.stand_in is None else self.weight.stand_in.grad
        return None if g is None else g[self._stand_in_index]
