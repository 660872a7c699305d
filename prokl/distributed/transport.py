"""Send gradients and weights to their owners before a step, and the stepped weights back after it.

A weight of which every rank has a copy is stepped where it lies, and sent from there to the others. The owner of a
sharded one collects gradient and weight, and sends the stepped weight back: so decay, rounding and masters are one
process's, and a weight that has been changed by hand counts. Where shards have copies (HSDP) both go between the owner
and one copy of each, which is then sent from there to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.distributed.team import Message, Team
from prokl.distributed.weights import Copy, Transfer

PADDING = 1.25
"""An all-gather, whose parts are as large as the largest, is taken up to this many times the bytes there are."""


def gathers(sizes: Sequence[int]) -> bool:
    """Return True if messages of these bytes, one of each rank, go to all by an all-gather; else by broadcasts."""
    return max(sizes) * len(sizes) <= PADDING * sum(sizes)


class Replicas:
    """Sends stepped weights, or blocks of them, of which all ranks of a team have copies, from one to the others.

    Args:
        team: whose. transfers: all of the team's, in the same order on every rank. device: of the weights.
    """

    def __init__(self, team: Team, transfers: Sequence[Transfer | Copy], device: torch.device) -> None:
        self.team, self.device = team, device
        self.transfers: list[list[Transfer | Copy]] = [[] for _ in range(team.size)]
        for transfer in transfers:
            self.transfers[transfer.owner].append(transfer)
        self.messages = [
            Message([(transfer.shape, transfer.dtype) for transfer in of_owner]) for of_owner in self.transfers
        ]
        sizes = [message.size for message in self.messages]
        self.gathers = gathers(sizes)
        self.most = max(sizes)
        self._begun: list[tuple[int, Tensor, Any]] = []

    def start(self) -> None:
        """Begin to send; the weights may be stepped again only after :meth:`finish`."""
        mine, me = self.messages[self.team.index], self.team.index
        outgoing = torch.empty(self.most if self.gathers else mine.size, dtype=torch.uint8, device=self.device)
        for transfer, part in zip(self.transfers[me], mine.parts(outgoing[: mine.size]), strict=True):
            part.copy_(transfer.standing())
        if self.gathers:
            gathered = outgoing.new_empty(self.most * self.team.size)
            # The older name warns from torch 2.13 on.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = all_gather(gathered, outgoing, group=self.team.group, async_op=True)
            self._begun = [(place, buffer, work) for place, buffer in enumerate(torch.split(gathered, self.most))]
            return
        for place, message in enumerate(self.messages):
            if message.size:
                buffer = outgoing if place == me else outgoing.new_empty(message.size)
                work = dist.broadcast(buffer, group_src=place, group=self.team.group, async_op=True)
                self._begun.append((place, buffer, work))

    def finish(self) -> None:
        """Write what has come into the weights."""
        begun, self._begun = self._begun, []
        for _, _, work in begun:
            work.wait()
        for place, buffer, _ in begun:
            if place != self.team.index:
                message = self.messages[place]
                for transfer, part in zip(self.transfers[place], message.parts(buffer[: message.size]), strict=True):
                    transfer.here().copy_(part)
        for transfer in self.transfers[self.team.index]:
            if transfer.standing().data_ptr() != transfer.here().data_ptr():
                transfer.here().copy_(transfer.standing())


def _messages(rows: Sequence[Sequence[Transfer]], copies: int) -> list[Message]:
    return [
        Message([(transfer.shape, transfer.dtype) for transfer in transfers for _ in range(copies)])
        for transfers in rows
    ]


class Shards:
    """Collects gradients and weights at their owners, and sends stepped weights back to where they came from.

    Args:
        team: whose. transfers: those of this rank, in an order that is the same on all. device: of the weights.
    """

    def __init__(self, team: Team, transfers: Sequence[Transfer], device: torch.device) -> None:
        self.team, self.device = team, device
        me = team.index
        places = range(team.size)
        self.lent: list[list[Transfer]] = [[] for _ in places]
        self.owned: list[list[Transfer]] = [[] for _ in places]
        self.staying: list[Transfer] = []
        for transfer in transfers:
            if transfer.sender == transfer.owner == me:
                self.staying.append(transfer)
            elif transfer.sender == me:
                self.lent[transfer.owner].append(transfer)
            elif transfer.owner == me:
                self.owned[transfer.sender].append(transfer)
        self._gather_out, self._gather_in = (_messages(rows, 2) for rows in (self.lent, self.owned))
        self._return_out, self._return_in = (_messages(rows, 1) for rows in (self.owned, self.lent))
        self._gathering: tuple[Tensor, Any] | None = None
        self._returning: tuple[Tensor, Any] | None = None

    def _exchange(self, out: Sequence[Message], into: Sequence[Message], buffer: Tensor) -> tuple[Tensor, Any]:
        sizes, sent = [m.size for m in into], [m.size for m in out]
        received = buffer.new_empty(sum(sizes))
        work = dist.all_to_all_single(received, buffer, sizes, sent, group=self.team.group, async_op=True)
        return received, work

    def _buffer(self, messages: Sequence[Message]) -> Tensor:
        return torch.empty(sum(m.size for m in messages), dtype=torch.uint8, device=self.device)

    def start_gather(self) -> None:
        """Begin to send weights and gradients to their owners; a gradient that is missing here is sent as zero."""
        buffer = self._buffer(self._gather_out)
        pieces = torch.split(buffer, [m.size for m in self._gather_out])
        for transfers, message, piece in zip(self.lent, self._gather_out, pieces, strict=True):
            parts = message.parts(piece)
            for transfer, weight, gradient in zip(transfers, parts[::2], parts[1::2], strict=True):
                weight.copy_(transfer.here())
                local_gradient = transfer.gradient()
                gradient.zero_() if local_gradient is None else gradient.copy_(local_gradient)
        self._gathering = self._exchange(self._gather_out, self._gather_in, buffer)

    def wait_gather(self) -> None:
        """Put what has come, and what was here, where it is stepped."""
        assert self._gathering is not None
        (buffer, work), self._gathering = self._gathering, None
        for transfer in self.staying:
            self._stand(transfer, transfer.here(), transfer.gradient())
        work.wait()
        pieces = torch.split(buffer, [m.size for m in self._gather_in])
        for transfers, message, piece in zip(self.owned, self._gather_in, pieces, strict=True):
            parts = message.parts(piece)
            for transfer, weight, gradient in zip(transfers, parts[::2], parts[1::2], strict=True):
                self._stand(transfer, weight, gradient)

    @staticmethod
    def _stand(transfer: Transfer, weight: Tensor, gradient: Tensor | None) -> None:
        transfer.standing().copy_(weight)
        into = transfer.standing_gradient()
        if into is not None:
            into.zero_() if gradient is None else into.copy_(gradient)

    def start_return(self) -> None:
        """Begin to send stepped weights back."""
        buffer = self._buffer(self._return_out)
        pieces = torch.split(buffer, [m.size for m in self._return_out])
        for transfers, message, piece in zip(self.owned, self._return_out, pieces, strict=True):
            for transfer, part in zip(transfers, message.parts(piece), strict=True):
                part.copy_(transfer.standing())
        self._returning = self._exchange(self._return_out, self._return_in, buffer)

    def wait_return(self) -> None:
        """Write what has come back into the weights."""
        assert self._returning is not None
        (buffer, work), self._returning = self._returning, None
        work.wait()
        pieces = torch.split(buffer, [m.size for m in self._return_in])
        for transfers, message, piece in zip(self.lent, self._return_in, pieces, strict=True):
            for transfer, part in zip(transfers, message.parts(piece), strict=True):
                transfer.here().copy_(part)
        for transfer in self.staying:
            transfer.here().copy_(transfer.standing())
