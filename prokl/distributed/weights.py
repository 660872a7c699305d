"""Describe every divided weight on a rank, and make the stand-in that the rank steps in its place.

A weight's *stand-in* is an ordinary tensor with an ordinary gradient: the weight itself, rows of it, or a buffer that
collects what lies on other ranks. An optimizer without ranks steps the stand-ins of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from prokl.algorithm.shapes import MatrixShape
from prokl.distributed.blocks import Block, holders, rows, whole_block
from prokl.distributed.ownership import Part
from prokl.distributed.team import Team
from prokl.engine.weights import may_move


def is_dtensor(t: Any) -> bool:
    """Return True for a DTensor, or its class, without importing it."""
    return hasattr(t, "device_mesh")


def lend(stand_in: Tensor, gradient: Tensor | None) -> None:
    """Give a stand-in a gradient, which may be of another dtype."""
    if gradient is not None and gradient.dtype != stand_in.dtype:
        stand_in.grad_dtype = gradient.dtype  # a torch without it has no such gradients
    stand_in.grad = gradient


def local(t: Tensor) -> Tensor:
    """Return what of a tensor is on this rank, in its own memory."""
    there: Tensor = t.detach()
    mine: Tensor = there._local_tensor if is_dtensor(there) else there  # type: ignore[attr-defined]
    return mine.trigger_wait() if hasattr(mine, "trigger_wait") else mine  # still on its way, in nobody's memory


class BlockRoute(NamedTuple):
    """A block of a part on its way to its owner and back: from whom and to whom, and who has a copy of it."""

    block: Block
    part: Part
    sender: int
    holders: tuple[int, ...]


@dataclass(eq=False)
class Undivided:
    """A weight of which this rank steps all that it has, by itself: replicated ones, and shards of AdamW's.

    Attributes:
        p: the weight. stand_in: itself, or what of a DTensor is here.
    """

    p: Tensor
    stand_in: Tensor

    @classmethod
    def of(cls, p: Tensor) -> Undivided:
        """Make the stand-in."""
        return cls(p, nn.Parameter(local(p), p.requires_grad) if is_dtensor(p) else p)

    def fill_stand_in(self) -> None:
        """Give the stand-in what the weight is now."""
        if self.stand_in is not self.p:
            self.stand_in.data = local(self.p)
            self.stand_in.requires_grad_(self.p.requires_grad)
            lend(self.stand_in, None if self.p.grad is None else local(aligned_gradient(self.p)))

    def release(self) -> None:
        """Keep no gradient alive."""
        if self.stand_in is not self.p:
            self.stand_in.grad = None


def aligned_gradient(p: Tensor) -> Tensor:
    """Return a DTensor's gradient placed as the weight is; a collective of its mesh where it is not."""
    g = p.grad
    assert g is not None
    if g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return g


@dataclass(eq=False)
class Divided:
    """A weight whose parts have owners.

    Attributes:
        p: the weight. team: who divides it. parts: in order. held: the block of every place.
        stacked: whether ``parts`` divide its first dimension; else its one part is everything. shapes: of the pieces of
            a stack, each of which is skipped by itself.
        mine: the part that this rank owns, or None. stand_in: what it steps, if it owns a part.
    """

    p: Tensor
    team: Team
    parts: tuple[Part, ...]
    held: Sequence[Block]
    stacked: bool
    shapes: tuple[MatrixShape, ...] = ()
    places: dict[Block, tuple[int, ...]] = field(init=False)
    """The ranks that hold each block."""
    mine: Part | None = field(init=False)
    here: bool = field(init=False, default=False)
    """True if what this rank owns lies whole on it."""
    own_memory: bool = field(init=False, default=False)
    """True if the stand-in is no view of the weight."""
    stand_in: Tensor | None = field(init=False, default=None)
    gradient: Tensor | None = field(init=False, default=None)
    """This rank's part of the gradient while it is lent; in the weight's dtype where parts of it are sent."""

    def __post_init__(self) -> None:
        self.places = holders(self.held)
        self.mine = next((part for part in self.parts if part.owner == self.team.index), None)
        if self.mine is not None:
            block, self.here = self.block(self.mine), self.whole_at(self.mine, self.team.index)
            self.own_memory = self.apart(self.mine)
            if self.own_memory:
                if is_dtensor(self.p):
                    own = torch.zeros(block.shape, dtype=self.p.dtype, device=self.p.device)
                else:  # in the weight's strides, which fused kernels ask of a gradient
                    own = torch.zeros_like(self.view(local(self.p), block))
                self.stand_in = nn.Parameter(own)
                if not may_move(self.p):
                    self.free()
            elif is_dtensor(self.p) or block != whole_block(self.p.shape):
                self.stand_in = nn.Parameter(self.view(local(self.p), block))
            else:
                self.stand_in = self.p
            self.stand_in.requires_grad_(self.p.requires_grad)

    def apart(self, part: Part) -> bool:
        """Return True if the stand-in of a part has memory of its own.

        It collects what lies on several ranks, or is one part of a weight of which others have copies: that weight
        changes at once, when all of it has come.
        """
        if not self.whole_at(part, part.owner):
            return True
        copies = any(places != (part.owner,) for _, places in self._pieces(part))
        return len(self.parts) > 1 and copies

    def block(self, part: Part) -> Block:
        """Return the block that a part is."""
        return rows(self.p.shape, part.start, part.stop) if self.stacked else whole_block(self.p.shape)

    def whole_at(self, part: Part, place: int) -> bool:
        """Return True if a part lies whole at a place."""
        return self.held[place].meet(self.block(part)) == self.block(part)

    def follow(self) -> None:
        """Follow the weight into another dtype, or onto another device."""
        one, p = self.stand_in, self.p
        if one is None or self.mine is None or (one.dtype, one.device) == (p.dtype, p.device):
            return
        one.grad = None
        one.data = torch.zeros_like(one, dtype=p.dtype, device=p.device)
        if not self.own_memory:
            one.data = self.view(local(p), self.block(self.mine))

    @property
    def replicated(self) -> bool:
        """True if every rank has the whole weight."""
        return [*self.places] == [whole_block(self.p.shape)]

    def view(self, mine: Tensor, block: Block) -> Tensor:
        """Return a block of what is on this rank."""
        return mine[block.within(self.held[self.team.index])]

    def fill_stand_in(self) -> None:
        """Give the stand-in what the weight is now, and what of its gradient is here; the rest comes by a message."""
        stand_in, mine = self.stand_in, self.mine
        if self.p.grad is not None:  # once a step: of a DTensor it may take all of its ranks
            gradient = local(aligned_gradient(self.p) if is_dtensor(self.p) else self.p.grad)
            self.gradient = gradient if self.replicated else gradient.to(self.p.dtype)
        if stand_in is None or mine is None or stand_in is self.p:
            return
        stand_in.requires_grad_(self.p.requires_grad)
        if self.own_memory and may_move(self.p) and not stand_in.untyped_storage().nbytes():
            stand_in.untyped_storage().resize_(stand_in.nbytes)
            stand_in.detach().zero_()
        if self.gradient is None:
            stand_in.grad = None
        elif self.here:
            gradient = self.view(self.gradient, self.block(mine))
            # A copy where agreeing may write into it: the gradient is the caller's.
            lend(stand_in, gradient.clone() if self.stacked and len(self.parts) > 1 else gradient)
        else:
            stand_in.grad = torch.empty_like(stand_in)
        if not self.own_memory:
            stand_in.data = self.view(local(self.p), self.block(mine))
        elif self.here and may_move(self.p):
            with torch.no_grad():
                stand_in.copy_(self.view(local(self.p), self.block(mine)))

    def release(self) -> None:
        """Keep no gradient alive."""
        self.gradient = None
        if self.stand_in is not None and self.stand_in is not self.p:
            self.stand_in.grad = None

    def free(self) -> None:
        """Give up the stand-in's own memory until it is lent what may move."""
        if self.own_memory and self.stand_in is not None:
            self.stand_in.untyped_storage().resize_(0)

    @property
    def travels(self) -> bool:
        """True if any of it is sent, between whichever ranks."""
        return next(self.routes(), None) is not None

    def transfers(self) -> list[Transfer]:
        """Return what this rank sends or gets of this weight, in an order that is the same on all."""
        me = self.team.index
        return [
            self._transfer(block, part, sender, holders)
            for block, part, sender, holders in self.routes()
            if me in (sender, part.owner) or me in holders
        ]

    def routes(self) -> Iterator[BlockRoute]:
        """Yield what is sent of this weight, between whichever ranks."""
        replicated = self.replicated
        for part in self.parts if self.team.size > 1 else ():
            block = self.block(part)
            if replicated and not block.empty:
                yield BlockRoute(block, part, part.owner, tuple(range(self.team.size)))
            elif not block.empty:
                for piece, places in self._pieces(part):
                    sender = self._beside(part.owner, places)
                    if places != (part.owner,) or self.apart(part):
                        yield BlockRoute(piece, part, sender, places)

    def _beside(self, owner: int, places: tuple[int, ...]) -> int:
        """Return which of the ranks that have a block is of the owner's own copy of the weight, as near as may be."""
        copies = self.places[self.held[owner]]
        return owner if owner in places else places[copies.index(owner) * len(places) // len(copies)]

    def _pieces(self, part: Part) -> list[tuple[Block, tuple[int, ...]]]:
        """Return the blocks in which a part lies on the ranks, each with its holders."""
        block, pieces = self.block(part), []
        for held, places in self.places.items():
            if held.overlaps(block):
                pieces.append((held.meet(block), places))
        return pieces

    def _transfer(self, block: Block, part: Part, sender: int, holders: tuple[int, ...]) -> Transfer:
        me = self.team.index
        here = block.within(self.held[me]) if me in holders else ()
        standing = block.within(self.block(part)) if me == part.owner else ()
        return Transfer(self, block.shape, here, standing, sender, part.owner, holders)


@dataclass(frozen=True)
class Transfer:
    """Part of a weight on its way.

    Attributes:
        weight: whose. shape: of what is sent.
        local_index: index into what this rank has of the weight.
        stand_in_index: index into the stand-in, if this rank is the owner.
        sender: place of who lends it to the owner, and gets it back. owner: of who steps it.
        holders: of all who have it, to whom the sender passes it on.
    """

    weight: Divided
    shape: tuple[int, ...]
    local_index: tuple[slice, ...]
    stand_in_index: tuple[slice, ...]
    sender: int
    owner: int
    holders: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The weight's."""
        return self.weight.p.dtype

    def here(self) -> Tensor:
        """Return it where this rank keeps the weight, a view."""
        return local(self.weight.p)[self.local_index]

    def standing(self) -> Tensor:
        """Return it where this rank, the owner, steps it, a view."""
        assert self.weight.stand_in is not None
        return self.weight.stand_in.detach()[self.stand_in_index]

    def gradient(self) -> Tensor | None:
        """Return the gradient of :meth:`here`, a view, or None."""
        g = self.weight.gradient
        return None if g is None else g[self.local_index]

    def standing_gradient(self) -> Tensor | None:
        """Return the gradient of :meth:`standing`, a view, or None."""
        g = None if self.weight.stand_in is None else self.weight.stand_in.grad
        return None if g is None else g[self.stand_in_index]


@dataclass(frozen=True)
class Copy:
    """A block that has come back to one of the ranks which have it, on its way to the others.

    Attributes:
        transfer: what it is. owner: place, among those ranks, of who has the new one.
    """

    transfer: Transfer
    owner: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that is sent."""
        return self.transfer.shape

    @property
    def dtype(self) -> torch.dtype:
        """The weight's."""
        return self.transfer.dtype

    def here(self) -> Tensor:
        """Return it where this rank keeps the weight, a view."""
        return self.transfer.here()

    standing = here
