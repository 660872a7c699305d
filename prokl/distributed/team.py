"""The ranks among which some weights are divided, and the words between them before anything moves."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Team:
    """Ranks that divide work, and know each other by their places in the group.

    Attributes:
        group: process group; None of a rank by itself. size: of it. index: place of this rank.
        ranks: global rank of every place.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.ranks = (0,) if group is None else tuple(dist.get_process_group_ranks(group))
        self.size, self.index = len(self.ranks), 0 if group is None else dist.get_rank(group)
        self._meshes: dict[str, DeviceMesh] = {}
        self._copies: dict[tuple[int, ...], Team] = {}

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

    def copies(self, places: Sequence[int], mesh: DeviceMesh) -> Team:
        """Return those of the team with copies of one block of a DTensor on ``mesh``; other ranks are by themselves.

        All of the team call it, with the same places in the same order.
        """
        ranks = tuple(self.ranks[place] for place in places)
        if ranks not in self._copies:
            group, dims, here = None, range(mesh.ndim), self.index in places
            lines = [line for dim in dims for line in mesh.mesh.movedim(dim, -1).flatten(0, -2).tolist()]
            if list(ranks) not in lines:
                _level_counts_of_groups([self.group])
                group = dist.new_group(list(ranks), use_local_synchronization=True) if here else None
            elif here:
                groups = [mesh.get_group(dim) for dim in dims]
                group = next(each for each in groups if tuple(dist.get_process_group_ranks(each)) == ranks)
            self._copies[ranks] = Team(group)
        return self._copies[ranks]


ALONE = Team()
"""A rank by itself, which sends nothing."""


def team_of(group: ProcessGroup | DeviceMesh, teams: dict[tuple[int, ...], Team]) -> Team:
    """Return the team of a process group, or of all ranks of a mesh, whatever its dimensions.

    A new one joins ``teams``, by sorted ranks, in the same order on all of its ranks.
    """
    mesh: Any = None
    if isinstance(group, dist.ProcessGroup):
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    else:
        mesh, ranks = group, tuple(sorted(group.mesh.flatten().tolist()))
    if ranks not in teams:
        if mesh is not None and mesh.ndim == 1:
            group = mesh.get_group()
        elif mesh is not None and ranks == tuple(range(dist.get_world_size())):
            group = dist.distributed_c10d._get_default_group()
        elif mesh is not None:
            _level_counts_of_groups([mesh.get_group(dim) for dim in range(mesh.ndim)])
            group = dist.new_group(list(ranks), use_local_synchronization=True)
        teams[ranks] = Team(group)
    return teams[ranks]


def _level_counts_of_groups(groups: Sequence[ProcessGroup]) -> None:
    """Let ranks that know each other by these groups be in as many, by groups of one: torch names a new one by that.

    Without it those in more than others, as one of the first and the last stage of a pipeline, wait under other names.
    """
    names: dict[Any, Any] = dist.distributed_c10d._world.pg_names
    most = len(names)
    for group in groups:  # after the last dimension of a mesh it is that of all
        counts = [0] * dist.get_world_size(group)
        dist.all_gather_object(counts, most, group=group)
        most = max(counts)
    while len(names) < most:  # NCCL's would need others of the world
        dist.new_group([dist.get_rank()], use_local_synchronization=True, backend="gloo")


def check_group(group: Any) -> None:
    """Raise TypeError for what is neither a process group nor a mesh."""
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)) and not hasattr(group, "get_group"):
        raise TypeError(
            f"process_group must be a torch.distributed.ProcessGroup or a DeviceMesh that this rank is in, got "
            f"{type(group).__name__} {group!r}: pass torch.distributed.group.WORLD to divide the work among all ranks, "
            "or None to leave it undivided."
        )


def agree(teams: Collection[Team], failure: Exception | None, undone: str) -> None:
    """Raise on all ranks where one failed: its own error, and on others a ValueError that says what is undone."""
    cause = None
    if failure is not None:
        cause = f"rank {dist.get_rank()} could not: {type(failure).__name__}: {failure}"
    for team in (*teams, *teams):  # twice, as a team's other ranks do not hear what a later team of this rank says
        cause = next(filter(None, [cause, *team.gathered(cause)]), None)
    if cause is not None:
        raise failure or ValueError(f"{undone}, as {cause}")


def check_dst(teams: Collection[Team], dst: int) -> None:
    """Raise ValueError on all ranks that share work where none of them does with rank ``dst``; waits for all of them.

    Without ``teams`` nothing is divided, and it may be any rank.
    """
    ranks = sorted({rank for team in teams for rank in team.ranks}) or [*range(dist.get_world_size())]
    found = dst in ranks
    for team in (*teams, *teams):  # as a rank that shares with this one may do so with dst
        found = any(team.gathered(found))
    if not found:
        raise ValueError(
            f"Invalid dst={dst!r}: must be one of the ranks {ranks} that have this optimizer's state, by its number "
            f"among all ranks, not in a group: pass gather_state_dict(dst={ranks[0]})."
        )


Lines = tuple[list[str], list[str]]
"""Lines that all ranks must have alike: what each weight of a team is, and who owns it."""


def compare(lines: Mapping[Team, Lines]) -> None:
    """Raise on all ranks where the weights of a team differ between its ranks: their messages would not fit."""
    failure: Exception | None = None
    for team, mine in lines.items():
        digest = hashlib.sha256(repr(mine).encode()).hexdigest()
        if len({*team.gathered(digest)}) > 1:
            failure = difference(team, team.gathered(mine))
    agree(lines, failure, "Nothing was stepped")


def difference(team: Team, lines: Sequence[Lines]) -> RuntimeError:
    """Return the error that names the first weight of which two ranks have given something else.

    Owners come last: one weight that differs deals out the work of all anew.
    """
    place = next(place for place, theirs in enumerate(lines) if theirs != lines[0])
    pairs = [pair for both in zip(lines[0], lines[place], strict=True) for pair in zip_longest(*both)]
    one, other = next(pair for pair in pairs if pair[0] != pair[1])
    return RuntimeError(
        f"Ranks {team.ranks[0]} and {team.ranks[place]} gave this optimizer other weights: {one or 'nothing'}; "
        f"{other or 'nothing'}. Names, shapes, dtypes, groups and requires_grad must be the same on all ranks that "
        "divide the work. A wrapper that gives each rank weights of its own, as ZeroRedundancyOptimizer does, goes "
        "without process_group=."
    )
