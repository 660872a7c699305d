"""The order of a divided step, and what is sent in it: gradients and weights to their owners, and stepped weights back.

A weight of which every rank has a copy is stepped where it lies, and sent from there to the others. The owner of a
sharded one collects gradient and weight, and sends the stepped weight back: so decay, rounding and masters are one
process's, and a weight that has been changed by hand counts. Where shards have copies (HSDP) both go between the owner
and one copy of each, which is then sent from there to the others.

Weights of one team whose buckets have common shapes form a wave. While one is stepped, what the next one needs is on
its way, and what the last one brought is on its way back, and from there to who has copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.backends.io import in_float32
from prokl.distributed.team import Team
from prokl.distributed.weights import LocalWeight, Transfer
from prokl.engine.bucket import Bucket, Plan
from prokl.engine.engine import Engine

ALIGNMENT = 16
"""Bytes that every tensor in a message begins at a multiple of: no dtype needs more."""
PADDING = 1.25
"""An all-gather, whose parts are as large as the largest, is taken up to this many times the bytes there are."""


def nbytes(transfer: Transfer) -> int:
    """Return the bytes that a transfer takes in a message, up to where the next one begins."""
    return -(-math.prod(transfer.block.shape) * transfer.weight.p.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def unpacked(message: Tensor, transfers: Sequence[Transfer], copies: int = 1) -> list[Tensor]:
    """Return the tensors of a message, a flat buffer of bytes, as views: ``copies`` of each transfer in a row."""
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
        me, group = self.team.index, self.team.group
        outgoing = torch.empty(self.most if self.gathers else self.sizes[me], dtype=torch.uint8, device=self.device)
        for transfer, part in zip(self.transfers[me], unpacked(outgoing, self.transfers[me]), strict=True):
            part.copy_(transfer.here() if self.returned else transfer.standing())
        if self.gathers:
            gathered = outgoing.new_empty(self.most * self.team.size)
            # The older name warns from torch 2.13 on.
            all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            work = all_gather(gathered, outgoing, group=group, async_op=True)
            self._begun = [(place, buffer, work) for place, buffer in enumerate(torch.split(gathered, self.most))]
            return
        for place, size in enumerate(self.sizes):
            if size:
                buffer = outgoing if place == me else outgoing.new_empty(size)
                work = dist.broadcast(buffer, group_src=place, group=group, async_op=True)
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

    ``transfers`` are those of this rank, in an order that is the same on all.
    """

    def __init__(self, team: Team, transfers: Sequence[Transfer], device: torch.device) -> None:
        self.team, self.device, me = team, device, team.index
        self.staying = [t for t in transfers if t.sender == t.part.owner == me]
        self.lent = sorted((t for t in transfers if t.sender == me != t.part.owner), key=lambda t: t.part.owner)
        self.owned = sorted((t for t in transfers if t.part.owner == me != t.sender), key=lambda t: t.sender)
        places = range(team.size)
        self._lent_bytes = [sum(nbytes(t) for t in self.lent if t.part.owner == place) for place in places]
        self._owned_bytes = [sum(nbytes(t) for t in self.owned if t.sender == place) for place in places]
        self._coming: tuple[Tensor, Any] | None = None

    def start_gather(self) -> None:
        """Begin to send weights and gradients to their owners; a gradient that is missing here is sent as zero."""
        sent = [tensor for transfer in self.lent for tensor in (transfer.here(), transfer.gradient())]
        self._start(self.lent, sent, [2 * size for size in self._lent_bytes], [2 * size for size in self._owned_bytes])

    def wait_gather(self) -> None:
        """Wait for what is sent; copy it, and what lies here, into the stand-ins."""
        come: list[tuple[Transfer, Tensor, Tensor | None]] = [(t, t.here(), t.gradient()) for t in self.staying]
        parts = self._come(self.owned, copies=2)
        for transfer, weight, gradient in [*come, *zip(self.owned, parts[::2], parts[1::2], strict=True)]:
            transfer.standing().copy_(weight)
            into = transfer.standing_gradient()
            if into is not None:
                into.zero_() if gradient is None else into.copy_(gradient)

    def start_return(self) -> None:
        """Begin to send stepped weights back."""
        self._start(self.owned, [t.standing() for t in self.owned], self._owned_bytes, self._lent_bytes)

    def wait_return(self) -> None:
        """Write what has come back into the weights."""
        for transfer, part in zip(self.lent, self._come(self.lent), strict=True):
            transfer.here().copy_(part)
        for transfer in self.staying:
            transfer.here().copy_(transfer.standing())

    def _start(
        self, transfers: list[Transfer], tensors: Sequence[Tensor | None], sizes: list[int], coming: list[int]
    ) -> None:
        sent, received = (torch.empty(sum(some), dtype=torch.uint8, device=self.device) for some in (sizes, coming))
        parts = unpacked(sent, transfers, copies=len(tensors) // max(1, len(transfers)))
        for part, tensor in zip(parts, tensors, strict=True):
            part.zero_() if tensor is None else part.copy_(tensor)
        work = dist.all_to_all_single(received, sent, coming, sizes, group=self.team.group, async_op=True)
        self._coming = received, work

    def _come(self, transfers: list[Transfer], copies: int = 1) -> list[Tensor]:
        assert self._coming is not None
        (received, work), self._coming = self._coming, None
        work.wait()
        return unpacked(received, transfers, copies)


def not_finite(weight: LocalWeight) -> Tensor:
    """Return 1 for each piece of a stack of whose gradient a step would skip what is here, else 0; float32."""
    g = None if weight.stand_in is None else weight.stand_in.grad
    if g is None:
        return torch.zeros(len(weight.shapes), dtype=torch.float32, device=weight.p.device)
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(shape.region(g), dim=(-2, -1), dtype=dtype) for shape in weight.shapes]
    return torch.stack([(~in_float32(norm.square())).any().float() for norm in norms])


class Wave:
    """Divided weights that may move and are stepped together, in one order on all ranks, and what is sent of them."""

    def __init__(self, weights: Sequence[LocalWeight]) -> None:
        self.weights = weights
        self.replicas: list[Replicas] = []
        self.shards: list[Shards] = []
        sent: dict[tuple[Team, torch.device, bool], list[Transfer]] = {}
        copied: dict[tuple[Team, torch.device], list[list[Transfer]]] = {}
        for weight in weights:
            team, p = weight.team, weight.p
            transfers = [*weight.transfers()]
            if transfers:  # also where none is this rank's, as all of a team take part
                mine = [t for t in transfers if team.index == t.part.owner or team.index in t.holders]
                sent.setdefault((team, p.device, weight.sharded), []).extend(mine)
            for transfer in transfers if weight.sharded else ():
                if len(transfer.holders) == 1:
                    continue
                copies = team.copies(transfer.holders, p.device_mesh)  # type: ignore[attr-defined]
                if team.index in transfer.holders:
                    rows = copied.setdefault((copies, p.device), [[] for _ in copies.ranks])
                    rows[copies.ranks.index(team.ranks[transfer.sender])].append(transfer)
        self.copies = [Replicas(team, rows, device, returned=True) for (team, device), rows in copied.items()]
        for (team, device, sharded), mine in sent.items():
            if sharded:
                self.shards.append(Shards(team, mine, device))
            else:
                rows = [[t for t in mine if t.part.owner == place] for place in range(team.size)]
                self.replicas.append(Replicas(team, rows, device, returned=False))

    def agree(self) -> None:
        """Make a gradient that is not finite so for every owner of its weight: it is skipped by all or none."""
        weights = [weight for weight in self.weights if len(weight.parts) > 1]
        if not weights:
            return
        bad = torch.cat([not_finite(weight) for weight in weights])
        dist.all_reduce(bad, group=weights[0].team.group)
        flags = iter(bad)
        for weight in weights:
            g = None if weight.stand_in is None else weight.stand_in.grad
            for shape, one in zip(weight.shapes, flags, strict=False):
                if g is not None:
                    first = shape.region(g)[:, :1, :1]
                    first.copy_(torch.where(one > 0, torch.nan, first))

    def start_return(self) -> None:
        """Begin to send what was stepped."""
        for shards in self.shards:
            shards.start_return()
        for replicas in self.replicas:
            replicas.start()

    def wait_return(self) -> None:
        """Wait for what was stepped elsewhere, and begin to send it to who has copies."""
        for shards in self.shards:
            shards.wait_return()
        for replicas in self.replicas:
            replicas.finish()
        for copies in self.copies:
            copies.start()


def waves_of(weights: Iterable[tuple[LocalWeight, set[Any]]]) -> list[Wave]:
    """Return the waves of weights, each with the keys of the buckets that its matrices may be in.

    No two waves have a key in common, and a key has one team: ranks that lack the weights of another have the same
    waves of this one. The weights of a team are in the same order on all of its ranks.
    """
    waves: list[tuple[list[LocalWeight], set[Any]]] = []
    for weight, keys in weights:
        met = [i for i, (_, others) in enumerate(waves) if others & keys]
        place = met[0] if met else len(waves)
        joined = [*(member for i in met for member in waves[i][0]), weight], keys.union(*(waves[i][1] for i in met))
        waves = [wave for i, wave in enumerate(waves) if i not in met]
        waves.insert(place, joined)
    return [Wave(members) for members, _ in waves]


def step_in_waves(engine: Engine, work: Sequence[tuple[Bucket, Plan]], waves: Sequence[Wave], adamw: Wave) -> list[str]:
    """Step the stand-ins, by their engine, and send what is to be sent; return warnings."""
    places = {weight.stand_in: i for i, wave in enumerate(waves) for weight in wave.weights}
    by_wave: dict[int | None, list[tuple[Bucket, Plan]]] = {}
    for bucket, plan in work:
        met = {places.get(member.p) for member in bucket.members} - {None}
        assert len(met) < 2, "a bucket lies in two waves, of which the second has not come"
        by_wave.setdefault(met.pop() if met else None, []).append((bucket, plan))
    if waves:
        for shards in waves[0].shards:
            shards.start_gather()
    # Every rank has the whole gradient of a weight that it has a copy of, and decides by it as the others do.
    wholes = {
        weight.stand_in: weight.gradient
        for weight in adamw.weights
        if weight.stand_in is not None and weight.gradient is not None
    }
    engine.adamw.step(engine.state, wholes)  # while the first gradients come
    messages, engine.messages = engine.messages, []
    adamw.start_return()
    for bucket, plan in by_wave.get(None, []):  # what is stepped by every rank
        messages += engine.advance(bucket, plan)
    for i, wave in enumerate(waves):
        for shards in wave.shards:
            shards.wait_gather()
        for shards in waves[i + 1].shards if i + 1 < len(waves) else ():
            shards.start_gather()
        wave.agree()
        for bucket, plan in by_wave.get(i, []):
            messages += engine.advance(bucket, plan)
        wave.start_return()
        if i > 0:
            waves[i - 1].wait_return()
        for copies in waves[i - 2].copies if i > 1 else ():
            copies.finish()
    for wave in (*waves[-1:], adamw):
        wave.wait_return()
    for wave in (*waves[-2:], adamw):
        for copies in wave.copies:
            copies.finish()
    return messages
