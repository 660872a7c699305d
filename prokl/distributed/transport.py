"""Send gradients and weights to their owners before a step, and the stepped weights back after it.

A weight of which every rank has a copy is stepped where it lies, and sent from there to the others. The owner of a
sharded one collects gradient and weight, and sends the stepped weight back: so decay, rounding and masters are one
process's, and a weight that has been changed by hand counts. Where shards have copies (HSDP) both go between the owner
and one copy of each, which is then sent from there to the others.

A message is a flat buffer of bytes, which every backend and dtype can send.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.distributed.team import Team
from prokl.distributed.weights import Transfer

ALIGNMENT = 16
"""Bytes that every tensor in a message begins at a multiple of: no dtype needs more."""
PADDING = 1.25
"""An all-gather, whose parts are as large as the largest, is taken up to this many times the bytes there are."""


def nbytes(transfer: Transfer) -> int:
    """Return the bytes that a transfer takes in a message, up to where the next one begins."""
    return -(-math.prod(transfer.block.shape) * transfer.weight.p.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def unpacked(message: Tensor, transfers: Sequence[Transfer], copies: int = 1) -> list[Tensor]:
    """Return the tensors of a message as views: ``copies`` of each transfer, one after another."""
    tensors, start = [], 0
    for transfer in transfers:
        shape, dtype = transfer.block.shape, transfer.weight.p.dtype
        for _ in range(copies):
            tensors.append(message[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
            start += nbytes(transfer)
    return tensors


class Replicas:
    """Sends stepped weights, or blocks of them, of which all ranks of a team have copies, from one to the others.

    Args:
        team: whose. transfers: those that each place has the new one of, in the same order on every rank.
        device: of the weights. returned: whether the new one is in the weight by then, no longer in the stand-in.
    """

    def __init__(
        self, team: Team, transfers: Sequence[Sequence[Transfer]], device: torch.device, returned: bool
    ) -> None:
        self.team, self.transfers, self.device, self.returned = team, transfers, device, returned
        self.sizes = [sum(map(nbytes, sent)) for sent in transfers]
        self.most = max(self.sizes)
        self.gathers = self.most * team.size <= PADDING * sum(self.sizes)
        self._begun: list[tuple[int, Tensor, Any]] = []

    def start(self) -> None:
        """Begin to send; the weights may be stepped again only after :meth:`finish`."""
        me = self.team.index
        outgoing = torch.empty(self.most if self.gathers else self.sizes[me], dtype=torch.uint8, device=self.device)
        for transfer, part in zip(self.transfers[me], unpacked(outgoing, self.transfers[me]), strict=True):
            part.copy_(transfer.here() if self.returned else transfer.standing())
        if self.gathers:
            gathered = outgoing.new_empty(self.most * self.team.size)
            # The older name warns from torch 2.13 on.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = all_gather(gathered, outgoing, group=self.team.group, async_op=True)
            self._begun = [(place, buffer, work) for place, buffer in enumerate(torch.split(gathered, self.most))]
            return
        for place, size in enumerate(self.sizes):
            if size:
                buffer = outgoing if place == me else outgoing.new_empty(size)
                work = dist.broadcast(buffer, group_src=place, group=self.team.group, async_op=True)
                self._begun.append((place, buffer, work))

    def finish(self) -> None:
        """Write what has come into the weights."""
        begun, self._begun = self._begun, []
        for _, _, work in begun:
            work.wait()
        for place, buffer, _ in begun:
            if place != self.team.index:
                for transfer, part in zip(self.transfers[place], unpacked(buffer, self.transfers[place]), strict=True):
                    transfer.here().copy_(part)
        for transfer in () if self.returned else self.transfers[self.team.index]:
            if transfer.standing().data_ptr() != transfer.here().data_ptr():
                transfer.here().copy_(transfer.standing())


class Shards:
    """Collects gradients and weights at their owners, and sends stepped weights back to where they came from.

    Args:
        team: whose. transfers: those of this rank, in an order that is the same on all. device: of the weights.
    """

    def __init__(self, team: Team, transfers: Sequence[Transfer], device: torch.device) -> None:
        self.team, self.device, me = team, device, team.index
        self.staying = [t for t in transfers if t.sender == t.part.owner == me]
        self.lent = sorted((t for t in transfers if t.sender == me != t.part.owner), key=lambda t: t.part.owner)
        self.owned = sorted((t for t in transfers if t.part.owner == me != t.sender), key=lambda t: t.sender)
        self._lent_bytes, self._owned_bytes = [0] * team.size, [0] * team.size
        for transfer in self.lent:
            self._lent_bytes[transfer.part.owner] += nbytes(transfer)
        for transfer in self.owned:
            self._owned_bytes[transfer.sender] += nbytes(transfer)
        self._coming: tuple[Tensor, Any] | None = None

    def _buffer(self, sizes: Sequence[int]) -> Tensor:
        return torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)

    def _exchange(self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int]) -> None:
        received = self._buffer(received_sizes)
        work = dist.all_to_all_single(received, sent, received_sizes, sizes, group=self.team.group, async_op=True)
        self._coming = received, work

    def _received(self) -> Tensor:
        assert self._coming is not None
        (received, work), self._coming = self._coming, None
        work.wait()
        return received

    def start_gather(self) -> None:
        """Begin to send weights and gradients to their owners; a gradient that is missing here is sent as zero."""
        sizes, coming = ([2 * size for size in one] for one in (self._lent_bytes, self._owned_bytes))
        sent = self._buffer(sizes)
        parts = unpacked(sent, self.lent, copies=2)
        for transfer, weight, gradient in zip(self.lent, parts[::2], parts[1::2], strict=True):
            weight.copy_(transfer.here())
            local_gradient = transfer.gradient()
            gradient.zero_() if local_gradient is None else gradient.copy_(local_gradient)
        self._exchange(sent, sizes, coming)

    def wait_gather(self) -> None:
        """Put what has come, and what was here, where it is stepped."""
        for transfer in self.staying:
            self._stand(transfer, transfer.here(), transfer.gradient())
        parts = unpacked(self._received(), self.owned, copies=2)
        for transfer, weight, gradient in zip(self.owned, parts[::2], parts[1::2], strict=True):
            self._stand(transfer, weight, gradient)

    @staticmethod
    def _stand(transfer: Transfer, weight: Tensor, gradient: Tensor | None) -> None:
        transfer.standing().copy_(weight)
        into = transfer.standing_gradient()
        if into is not None:
            into.zero_() if gradient is None else into.copy_(gradient)

    def start_return(self) -> None:
        """Begin to send stepped weights back."""
        sent = self._buffer(self._owned_bytes)
        for transfer, part in zip(self.owned, unpacked(sent, self.owned), strict=True):
            part.copy_(transfer.standing())
        self._exchange(sent, self._owned_bytes, self._lent_bytes)

    def wait_return(self) -> None:
        """Write what has come back into the weights."""
        for transfer, part in zip(self.lent, unpacked(self._received(), self.lent), strict=True):
            transfer.here().copy_(part)
        for transfer in self.staying:
            transfer.here().copy_(transfer.standing())
