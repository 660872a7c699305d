"""The order of a divided step: weights in waves, each with what is sent before and after it.

Weights whose buckets have common shapes form a wave. While one is stepped, what the next one needs is on its way, and
what the last one brought is on its way back, and from there to who has copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.backends.io import in_float32
from prokl.distributed.team import Team
from prokl.distributed.transport import Replicas, Shards
from prokl.distributed.weights import LocalWeight, Transfer
from prokl.engine.bucket import Bucket, Plan
from prokl.engine.engine import Engine


def not_finite(weight: LocalWeight) -> Tensor:
    """Return 1 for each piece of a stack of whose gradient a step would skip what is here, else 0; float32."""
    g = None if weight.stand_in is None else weight.stand_in.grad
    if g is None:
        return torch.zeros(len(weight.shapes), dtype=torch.float32, device=weight.p.device)
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(shape.region(g), dim=(-2, -1), dtype=dtype) for shape in weight.shapes]
    return torch.stack([(~in_float32(norm.square())).any().float() for norm in norms])


class Wave:
    """Weights that are stepped together, and what is sent of them.

    Args:
        weights: divided ones that may move, in the same order on all ranks.
    """

    def __init__(self, weights: Sequence[LocalWeight] = ()) -> None:
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
                if len(transfer.holders) > 1 and team.index in transfer.holders:
                    copies = team.copies(transfer.holders, p.device_mesh)  # type: ignore[attr-defined]
                    rows = copied.setdefault((copies, p.device), [[] for _ in copies.ranks])
                    rows[copies.ranks.index(team.ranks[transfer.sender])].append(transfer)
        self.copies = [Replicas(team, rows, device, returned=True) for (team, device), rows in copied.items()]
        for (team, device, sharded), mine in sent.items():
            if sharded:
                self.shards.append(Shards(team, mine, device))
            else:
                rows = [[t for t in mine if t.part.owner == place] for place in range(team.size)]
                self.replicas.append(Replicas(team, rows, device, returned=False))

    def start_gather(self) -> None:
        """Begin to collect."""
        for shards in self.shards:
            shards.start_gather()

    def wait_gather(self) -> None:
        """Wait for what was collected."""
        for shards in self.shards:
            shards.wait_gather()

    def agree(self) -> None:
        """Make a gradient that is not finite so for every owner of its weight: it is skipped by all or none."""
        shared: dict[Team, list[LocalWeight]] = {}
        for weight in self.weights:
            if len(weight.parts) > 1:
                shared.setdefault(weight.team, []).append(weight)
        for team, weights in shared.items():
            bad = torch.cat([not_finite(weight) for weight in weights])
            dist.all_reduce(bad, group=team.group)
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

    def wait_copies(self) -> None:
        """Wait for copies."""
        for copies in self.copies:
            copies.finish()


def waves_of(weights: Iterable[tuple[LocalWeight, set[Any]]]) -> list[Wave]:
    """Return the waves of weights, each with the keys of the buckets that its matrices may be in.

    No two waves have a key in common. The weights are in the same order on all ranks.
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
    """Step the stand-ins and send what is to be sent; return warnings.

    Args:
        engine: the stand-ins'. work: its buckets, with their plans. waves: of matrices. adamw: of AdamW's weights.
    """
    places = {id(weight.stand_in): i for i, wave in enumerate(waves) for weight in wave.weights if weight.mine}
    by_wave: dict[int | None, list[tuple[Bucket, Plan]]] = {}
    for bucket, plan in work:
        met = {places.get(id(member.p)) for member in bucket.members} - {None}
        by_wave.setdefault(met.pop() if met else None, []).append((bucket, plan))
    if waves:
        waves[0].start_gather()
    engine.adamw.step(engine.state)  # while the first gradients come
    messages, engine.messages = engine.messages, []
    adamw.start_return()
    for bucket, plan in by_wave.get(None, []):  # what is stepped by every rank
        messages += engine.advance(bucket, plan)
    for i, wave in enumerate(waves):
        wave.wait_gather()
        if i + 1 < len(waves):
            waves[i + 1].start_gather()
        wave.agree()
        for bucket, plan in by_wave.get(i, []):
            messages += engine.advance(bucket, plan)
        wave.start_return()
        if i > 0:
            waves[i - 1].wait_return()
        if i > 1:
            waves[i - 2].wait_copies()
    for wave in (*waves[-1:], adamw):
        wave.wait_return()
    for wave in (*waves[-2:], adamw):
        wave.wait_copies()
    return messages
