"""Compare what all ranks must have alike, before one of them sends what the others would misread."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

from torch import Tensor

from prokl.distributed.team import Team
from prokl.distributed.weights import LocalWeight
from prokl.engine.weights import Weight, may_move


def compare(
    teams: Collection[Team], ours: Sequence[Weight], weights: Mapping[Tensor, LocalWeight], failure: Exception | None
) -> None:
    """Raise on every rank where one of them failed, or has other weights: their messages would not fit."""
    for team in teams:
        mine = [] if failure is not None else _shared_by(team, ours, weights)
        digest = hashlib.sha256(repr(mine).encode()).hexdigest()
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers = team.gathered((digest, message))
        for rank, (_, other) in zip(team.ranks, answers, strict=True):
            if other is not None and failure is None:
                failure = RuntimeError(f"Nothing was stepped, as rank {rank} could not: {other}")
        if not any(other for _, other in answers) and len({told for told, _ in answers}) > 1:
            failure = _difference(team, team.gathered(mine))
    # A team's other ranks may not have been told what another team found.
    for team in teams:
        for other in team.gathered(None if failure is None else str(failure)):
            if other is not None and failure is None:
                failure = RuntimeError(other)
    if failure is not None:
        raise failure


def _shared_by(team: Team, ours: Iterable[Weight], weights: Mapping[Tensor, LocalWeight]) -> list[tuple[str, str]]:
    """Return what the ranks of a team must have alike of each weight: what it is, and who owns what of it."""
    lines = []
    for one in ours:
        p, weight = one.p, weights[one.p]
        if weight.team is team:
            moved = "" if p.requires_grad else ", frozen" + (", with a gradient" if may_move(p) else "")
            read = (
                f", transposed={one.transposed}, split={one.split}" if one.transposed or one.split is not None else ""
            )
            owned = ", ".join(f"{part.start} to {part.stop} of rank {part.owner}" for part in weight.parts)
            lines.append((f"{one.name} {tuple(p.shape)} {p.dtype}{moved}{read} in group {one.group_index}", owned))
    return lines


def _difference(team: Team, lines: Sequence[list[tuple[str, str]]]) -> RuntimeError:
    """Return the error that names the first weight of which two ranks have given something else.

    Owners are asked last: one weight that differs deals out the work of all anew.
    """
    place = next(place for place, line in enumerate(lines) if line != lines[0])
    pairs = list(zip_longest(lines[0], lines[place], fillvalue=("nothing", "")))
    unlike = ((one[0], other[0]) for one, other in pairs if one[0] != other[0])
    owned = ((", ".join(one), ", ".join(other)) for one, other in pairs if one != other)
    one, other = next(unlike, None) or next(owned)
    return RuntimeError(
        f"Ranks {team.ranks[0]} and {team.ranks[place]} gave this optimizer other weights: {one}; {other}. Names, "
        "shapes, dtypes, groups and requires_grad must be the same on all ranks that divide the work. A wrapper that "
        "gives each rank weights of its own, as ZeroRedundancyOptimizer does, goes without process_group=."
    )
