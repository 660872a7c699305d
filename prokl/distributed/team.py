"""The ranks among which some weights are divided, and their process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Team:
    """Ranks that divide work, and know each other by their places in the group.

    Attributes:
        group: process group. size: of it. index: place of this rank. ranks: global rank of every place.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.size, self.index = len(self.ranks), dist.get_rank(group)
        self._meshes: dict[str, DeviceMesh] = {}

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the team as a mesh of one dimension, for tensors on ``device``."""
        if device.type not in self._meshes:
            from torch.distributed.device_mesh import DeviceMesh

            self._meshes[device.type] = DeviceMesh.from_group(self.group, device.type)
        return self._meshes[device.type]

    def gathered(self, value: Any) -> list[Any]:
        """Return what every rank gave, in the order of places; waits for all of them."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks of a mesh, flattened."""
    return tuple(mesh.mesh.flatten().tolist())


class Teams:
    """The teams of one optimizer, each made when it is first asked for, in the same order on all of its ranks."""

    def __init__(self) -> None:
        self._teams: dict[tuple[int, ...], Team] = {}
        self._copies: dict[tuple[int, ...], Team] = {}

    def of_group(self, group: ProcessGroup) -> Team:
        """Return the team of a process group."""
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
        if ranks not in self._teams:
            self._teams[ranks] = Team(group)
        return self._teams[ranks]

    def of_mesh(self, mesh: DeviceMesh) -> Team:
        """Return the team of all ranks of a mesh, whatever its dimensions."""
        ranks = tuple(sorted(ranks_of(mesh)))
        if ranks not in self._teams:
            if mesh.ndim == 1:
                group = mesh.get_group()
            elif ranks == tuple(range(dist.get_world_size())):
                group = dist.distributed_c10d._get_default_group()
            else:
                group = dist.new_group(list(ranks), use_local_synchronization=True)
            self._teams[ranks] = Team(group)
        return self._teams[ranks]

    def of_copies(self, team: Team, places: Sequence[int], p: Tensor) -> Team:
        """Return those ranks of a team that have copies of one block of a DTensor, of whom this is one."""
        ranks, mesh = tuple(team.ranks[place] for place in places), p.device_mesh  # type: ignore[attr-defined]
        if ranks not in self._copies:
            groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
            alike = [group for group in groups if tuple(dist.get_process_group_ranks(group)) == ranks]
            group = alike[0] if alike else dist.new_group(list(ranks), use_local_synchronization=True)
            self._copies[ranks] = Team(group)
        return self._copies[ranks]

    def __iter__(self) -> Any:
        return iter(self._teams.values())


def check_group(group: Any) -> None:
    """Raise TypeError for what is neither a process group nor a mesh."""
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)) and not hasattr(group, "get_group"):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup or a DeviceMesh that this rank is in, got "
            f"{type(group).__name__} {group!r}: pass torch.distributed.group.WORLD to divide the work among all ranks, "
            "or None to leave it undivided."
        )


def as_group(group: ProcessGroup | DeviceMesh, teams: Teams) -> Team:
    """Return the team of what ``process_group=`` was given."""
    return teams.of_group(group) if isinstance(group, dist.ProcessGroup) else teams.of_mesh(group)


ALIGNMENT = 16
"""Bytes that every tensor in a message begins at a multiple of: no dtype needs more."""


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes that a tensor takes in a message, up to where the next one begins."""
    return -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT


class Message:
    """Tensors of one kind of message, in a flat buffer of bytes, which every backend and dtype can send.

    Args:
        shapes: (shape, dtype) of every tensor, in order.
    """

    def __init__(self, shapes: Sequence[tuple[Sequence[int], torch.dtype]]) -> None:
        self.entries: list[tuple[int, int, torch.Size, torch.dtype]] = []
        self.size = 0
        for shape, dtype in shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            self.entries.append((self.size, self.size + size, torch.Size(shape), dtype))
            self.size += nbytes(shape, dtype)

    def parts(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors of a buffer of ``size`` bytes, as views."""
        return [buffer[start:stop].view(dtype).view(shape) for start, stop, shape, dtype in self.entries]
