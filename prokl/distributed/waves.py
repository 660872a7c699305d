"""The order of a divided step: weights in waves, each with what is sent before and after it.

Weights whose buckets have common shapes form a wave. While one is stepped, what the next one needs is on its way, and
what the last one brought is on its way back, and from there to who has copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.backends.io import in_float32
from prokl.distributed.team import Team, Teams
from prokl.distributed.transport import Replicas, Shards
from prokl.distributed.weights import Copy, Divided, Transfer
from prokl.engine.bucket import Bucket
from prokl.engine.engine import Engine


def not_finite(weight: Divided) -> Tensor:
    """Return 1 for each piece of a stack of whose gradient a step would skip what is here, else 0; float32."""
    g = None if weight.stand_in is None else weight.stand_in.grad
    if g is None:
        return torch.zeros(len(weight.shapes), dtype=torch.float32, device=weight.p.device)
    dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
    norms = [torch.linalg.vector_norm(shape.region(g), dim=(-2, -1), dtype=dtype) for shape in weight.shapes]
    return torch.stack([(~in_float32(norm.square())).any().float() for norm in norms])


class Wave:
    """Weights that are stepped together, and what is sent of them."""

    def __init__(self) -> None:
        self.weights: list[Divided] = []
        self.keys: set[Any] = set()
        self.replicas: list[Replicas] = []
        self.shards: list[Shards] = []
        self.copies: list[Replicas] = []

    def connect(self, teams: Teams) -> None:
        """Lay out the messages."""
        by_team: dict[tuple[Team, torch.device, bool], list[Transfer]] = {}
        copied: dict[tuple[Team, torch.device], list[Copy]] = {}
        for weight in self.weights:
            transfers, device = weight.transfers(), weight.p.device
            by_team.setdefault((weight.team, device, weight.replicated), []).extend(transfers)
            for transfer in transfers if not weight.replicated else ():
                if len(transfer.holders) > 1 and weight.team.index in transfer.holders:
                    team = teams.of_copies(weight.team, transfer.holders, weight.p)
                    source = team.ranks.index(weight.team.ranks[transfer.sender])
                    copied.setdefault((team, device), []).append(Copy(transfer, source))
        self.copies = [Replicas(team, copies, device) for (team, device), copies in copied.items()]
        for (team, device, replicated), transfers in by_team.items():
            if replicated and transfers:
                self.replicas.append(Replicas(team, transfers, device))
            elif not replicated and any(weight.travels for weight in self.weights if weight.team is team):
                self.shards.append(Shards(team, transfers, device))

    def start_gather(self) -> None:
        """Begin to collect."""
        for shards in self.shards:
            shards.start_gather()

    def wait_gather(self) -> None:
        """Wait for what was collected."""
        for shards in self.shards:
            shards.wait_gather()

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

    def agree(self) -> None:
        """Make a gradient that is not finite so for every owner of its weight: it is skipped by all or none."""
        shared: dict[Team, list[Divided]] = {}
        for weight in self.weights:
            if weight.stacked and len(weight.parts) > 1:
                shared.setdefault(weight.team, []).append(weight)
        for team, weights in shared.items():
            bad = torch.cat([not_finite(weight) for weight in weights])
            dist.all_reduce(bad, group=team.group)
            for flags, weight in zip(
                torch.split(bad, [len(weight.shapes) for weight in weights]), weights, strict=True
            ):
                g = None if weight.stand_in is None else weight.stand_in.grad
                for one, shape in zip(flags, () if g is None else weight.shapes, strict=False):
                    first = shape.region(g)[:, :1, :1]  # type: ignore[arg-type]
                    first.copy_(torch.where(one > 0, torch.nan, first))


class Waves:
    """All of a division: those of matrices, in order, and one of AdamW's weights."""

    def __init__(self) -> None:
        self.waves: list[Wave] = []
        self.adamw = Wave()

    def add(self, weight: Divided, keys: set[Any] | None) -> None:
        """Give a weight its place.

        Args:
            weight: a trained one, in the same order on all ranks. keys: of the buckets that its matrices may be in; no
                two waves have one in common. None of AdamW's.
        """
        if keys is None:
            self.adamw.weights.append(weight)
            return
        met = [wave for wave in self.waves if wave.keys & keys] or [Wave()]
        for other in met[1:]:  # this weight's pieces join them
            self.waves.remove(other)
            met[0].weights += other.weights
            met[0].keys |= other.keys
        met[0].weights.append(weight)
        met[0].keys |= keys
        if met[0] not in self.waves:
            self.waves.append(met[0])

    def connect(self, teams: Teams) -> None:
        """Lay out the messages; no weight comes after."""
        for wave in (*self.waves, self.adamw):
            wave.connect(teams)

    def step(self, engine: Engine, work: Sequence[tuple[Bucket, Any]]) -> list[str]:
        """Step the stand-ins and send what is to be sent; return warnings.

        Args:
            engine: the stand-ins'. work: its buckets, with their plans.
        """
        waves = self.waves
        if waves:
            waves[0].start_gather()
        engine.step_adamw()  # while the first gradients come
        messages = engine.warnings()
        self.adamw.start_return()
        of_wave = self._buckets_of_waves(work)
        for bucket, plan in of_wave.pop(None, []):  # what is stepped by every rank
            messages += engine.advance(bucket, plan)
        for i, wave in enumerate(waves):
            wave.wait_gather()
            if i + 1 < len(waves):
                waves[i + 1].start_gather()
            wave.agree()
            for bucket, plan in of_wave.get(i, []):
                messages += engine.advance(bucket, plan)
            wave.start_return()
            if i > 0:
                waves[i - 1].wait_return()
            if i > 1:
                waves[i - 2].wait_copies()
        for wave in (*waves[-1:], self.adamw):
            wave.wait_return()
        for wave in (*waves[-2:], self.adamw):
            wave.wait_copies()
        return messages

    def _buckets_of_waves(self, work: Sequence[tuple[Bucket, Any]]) -> dict[int | None, list[tuple[Bucket, Any]]]:
        """Return the buckets of each wave, and of None those without any divided weight."""
        place = {id(weight.stand_in): i for i, wave in enumerate(self.waves) for weight in wave.weights if weight.mine}
        by_wave: dict[int | None, list[tuple[Bucket, Any]]] = {}
        for bucket, plan in work:
            waves = {place.get(id(member.p)) for member in bucket.members} - {None}
            by_wave.setdefault(waves.pop() if waves else None, []).append((bucket, plan))
        return by_wave
