"""Who owns what of an optimizer's weights, and what this rank steps of them.

The stand-ins of this rank are stepped by an optimizer without ranks, exactly as one process does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.algorithm.newton_schulz import GRAM_RUN, use_gram
from prokl.distributed.blocks import blocks, check_placements, chunk, homes, whole
from prokl.distributed.ownership import Part, Weight, divide
from prokl.distributed.team import Team, Teams, as_group
from prokl.distributed.waves import Waves
from prokl.distributed.weights import Divided, Undivided, is_dtensor, may_move
from prokl.engine.base import MatrixOptimizer
from prokl.engine.pieces import DEFAULTS, Piece, Reading, check_reading, named, pieces, readings
from prokl.engine.storage import blank_state
from prokl.engine.validation import check_memory


class Local(MatrixOptimizer):
    """The optimizer of one rank's stand-ins, which knows of no others.

    Args:
        outer: whose method, defaults and messages it has.
    """

    def __init__(self, outer: MatrixOptimizer) -> None:
        self.method = outer.method  # type: ignore[misc]
        self.first: dict[Tensor, int] = {}  # number of a part's first matrix in its stack
        self.titled = type(outer).__name__
        super().__init__([{"params": []}], {key: value for key, value in outer.defaults.items() if key not in DEFAULTS})
        del self.param_groups[:]

    @property
    def _title(self) -> str:
        return self.titled

    def _pieces_of(self, p: Tensor, name: str, how: Any) -> list[Piece]:
        return pieces(p, name, how, self.first.get(p, 0))


class Division:
    """Who owns what, and the step.

    Args:
        outer: the optimizer. group: its ``process_group``.
    """

    def __init__(self, outer: MatrixOptimizer, group: Any) -> None:
        self.teams = Teams()
        self.of_plain = None if group is None else as_group(group, self.teams)
        self.local = Local(outer)
        self.weights: dict[Tensor, Divided | Undivided] = {}
        self.loads: dict[Team, list[float]] = {}
        self.readings: dict[Tensor, Reading] = {}
        self.broken: str | None = None
        self._layout: Any = None

    def update(self, outer: MatrixOptimizer) -> None:
        """Follow the optimizer's groups and settings; where weights are new, all ranks compare what they have."""
        layout = [
            [_plain(group.get(key)) for key in DEFAULTS]
            + [(id(p), may_move(p), p.dtype, p.device) for p in group["params"]]
            for group in outer.param_groups
        ]
        if layout != self._layout:
            self._divide(outer)
            self._layout = layout
        for theirs, ours in zip(outer.param_groups, self.local.param_groups, strict=True):
            kept = {"params", "param_names", *DEFAULTS}
            ours.update({key: value for key, value in theirs.items() if key not in kept})

    def relayout(self) -> None:
        """Look at the groups anew: they are other objects now."""
        self._layout = None

    def _divide(self, outer: MatrixOptimizer) -> None:
        weights = [p for group in outer.param_groups for p in group["params"]]
        self.weights = {p: self.weights[p] for p in weights if p in self.weights}
        before = dict(self.weights), {team: list(loads) for team, loads in self.loads.items()}, dict(self.readings)
        for weight in self.divided():
            weight.follow()
        for p in weights:
            self._team(p)  # all of them, whatever fails on one rank
        failure = None
        try:
            for index, group in enumerate(outer.param_groups):
                self._check_readings(index, group)
                self._assign(index, group, outer.method)
            self._make_local_groups(outer)
        except Exception as error:  # the others wait for a word
            failure = error
        try:
            self._compare(outer, failure)
        except Exception:
            self.weights, self.loads, self.readings = before
            raise
        self._make_waves(outer)

    def _check_readings(self, index: int, group: Group) -> None:
        """Raise ValueError where matrices are not read as they were when owners were found."""
        for (p, name), how in zip(named(group, index), readings(group), strict=True):
            if how != (made := self.readings.setdefault(p, how)):
                raise ValueError(
                    f"Invalid transposed={how.transposed!r}, split={how.split!r} of {name}: its work was divided with "
                    f"transposed={made.transposed!r}, split={made.split!r}. Set them back, or start a new optimizer."
                )

    def blank_state(self, index: int, p: Tensor, name: str, how: Reading) -> dict[str, Any]:
        """Return, and keep, the state of a weight that this rank owns and that has not begun."""
        stand_in, group = self.weights[p].stand_in, self.local.param_groups[index]
        assert stand_in is not None
        own = self.local.state[stand_in]
        for piece in self.local._pieces_of(stand_in, name, how):
            own.update(blank_state(piece, self.local.method, self.local._rank(group, piece), group))
        return own

    def replace_state(self, p: Tensor, own: dict[str, Any] | None) -> None:
        """Take over an entry that somebody has put in the place of this rank's own; without one it begins anew."""
        stand_in = self.weights[p].stand_in if p in self.weights else None
        if stand_in is not None and own is None:
            self.local.state.pop(stand_in, None)
        elif stand_in is not None:
            self.local.state[stand_in] = own

    def tell(self, failure: Exception | None) -> Exception | None:
        """Tell all ranks of a failure, and return it, or what another rank told."""
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        for team in self.teams:
            for rank, other in zip(team.ranks, team.gathered(said), strict=True):
                if other is not None and failure is None:
                    failure = ValueError(f"Nothing was loaded, as rank {rank} could not: {other}")
        return failure

    def agree(self, failure: Exception | None) -> None:
        """Raise a failure on all ranks of whichever has one."""
        failure = self.tell(failure)
        if failure is not None:
            raise failure

    def _team(self, p: Tensor) -> Team | None:
        return self.teams.of_mesh(p.device_mesh) if is_dtensor(p) else self.of_plain  # type: ignore[attr-defined]

    def _assign(self, index: int, group: Group, method: Method[Any]) -> None:
        """Give every new weight of a group its owners."""
        new: dict[Team, list[tuple[Tensor, Weight, Any, Any]]] = {}
        for (p, name), how in zip(named(group, index), readings(group), strict=True):
            if p in self.weights:
                continue
            team = self._team(p)
            if team is None or (group["algorithm"] == "adamw" and (is_dtensor(p) or p.ndim == 0)):
                self.weights[p] = Undivided.of(p)
                continue
            held = self._held(p, name, team)
            if group["algorithm"] == "adamw":
                self.weights[p] = Divided(p, team, _row_parts(p.shape[0], team.size), held, stacked=True)
                continue
            check_reading(p, name, how)
            stacked = p.ndim == 3
            cost = sum(matrix_cost(piece, method, group) for piece in pieces(p, name, how))  # of one matrix of a stack
            count = p.shape[0] if stacked else 1
            shapes = tuple(piece.shape for piece in pieces(p, name, how))
            new.setdefault(team, []).append((p, Weight(count, cost, homes(p.shape, stacked, held)), held, shapes))
        for team, entries in new.items():
            loads = self.loads.setdefault(team, [0.0] * team.size)
            for moves in (True, False):  # what is frozen last, so that the work that there is is divided evenly
                dealt = [entry for entry in entries if may_move(entry[0]) == moves]
                found = divide([weight for _, weight, _, _ in dealt], loads)
                for (p, _, held, shapes), parts in zip(dealt, found, strict=True):
                    self.weights[p] = Divided(p, team, parts, held, p.ndim == 3, shapes)

    @staticmethod
    def _held(p: Tensor, name: str, team: Team) -> list[Any]:
        """Return the block of every place of a team."""
        if not is_dtensor(p):
            return [whole(p.shape)] * team.size
        check_placements(name, p.placements)  # type: ignore[attr-defined]
        mesh = p.device_mesh  # type: ignore[attr-defined]
        found = blocks(tuple(p.shape), tuple(mesh.mesh.shape), tuple(p.placements))  # type: ignore[attr-defined]
        by_rank = dict(zip(mesh.mesh.flatten().tolist(), found, strict=True))
        return [by_rank[rank] for rank in team.ranks]

    def local_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Return what this rank steps of ``groups``, with their settings."""
        found = []
        for index, group in enumerate(groups):
            own = [
                (weight.stand_in, name, how)
                for (p, name), how in zip(named(group, index), readings(group), strict=True)
                if (weight := self.weights[p]).stand_in is not None
            ]
            ours = {**group, "params": [entry[0] for entry in own], "param_names": [entry[1] for entry in own]}
            for i, key in enumerate(DEFAULTS):
                if isinstance(group.get(key), list):
                    ours[key] = [how[i] for _, _, how in own]
            found.append(ours)
        return found

    def _make_local_groups(self, outer: MatrixOptimizer) -> None:
        local = self.local
        local.param_groups[:] = self.local_groups(outer.param_groups)
        for weight in self.divided():
            if weight.stacked and weight.mine is not None:
                local.first[weight.stand_in] = weight.mine.start  # type: ignore[index]
        if local.method.oversize_remedy is not None:
            check_memory(local._title, local._sizes_of_new_state(), local.method.oversize_remedy)

    def _make_waves(self, outer: MatrixOptimizer) -> None:
        self.waves = Waves()
        for index, group in enumerate(outer.param_groups):
            for (p, name), how in zip(named(group, index), readings(group), strict=True):
                weight = self.weights[p]
                if isinstance(weight, Divided) and may_move(p):
                    matrix = group["algorithm"] == "matrix"
                    keys = {outer._shape(group, piece) for piece in pieces(p, name, how)} if matrix else None
                    self.waves.add(weight, keys)
        self.waves.connect(self.teams)

    def _compare(self, outer: MatrixOptimizer, failure: Exception | None) -> None:
        """Raise on every rank where one of them failed, or has other weights: their messages would not fit."""
        for team in self.teams:
            mine = [] if failure is not None else self._shared_by(team, outer)
            digest = hashlib.sha256(repr(mine).encode()).hexdigest()
            said = None if failure is None else f"{type(failure).__name__}: {failure}"
            found = team.gathered((digest, said))
            for rank, (_, other) in zip(team.ranks, found, strict=True):
                if other is not None and failure is None:
                    failure = RuntimeError(f"Nothing was stepped, as rank {rank} could not: {other}")
            if not any(other for _, other in found) and len({told for told, _ in found}) > 1:
                failure = _difference(team, team.gathered(mine))
        # A team's other ranks may not have been told what another team found.
        for team in self.teams:
            for other in team.gathered(None if failure is None else str(failure)):
                if other is not None and failure is None:
                    failure = RuntimeError(other)
        if failure is not None:
            raise failure

    def _shared_by(self, team: Team, outer: MatrixOptimizer) -> list[tuple[str, str]]:
        """Return what the ranks of a team must have alike of each weight: what it is, and who owns what of it."""
        lines = []
        for index, group in enumerate(outer.param_groups):
            for (p, name), how in zip(named(group, index), readings(group), strict=True):
                weight = self.weights[p]
                if isinstance(weight, Divided) and weight.team is team:
                    moved = "" if p.requires_grad else ", frozen" + (", with a gradient" if may_move(p) else "")
                    read = "" if how == (False, None) else f", {how}"
                    owned = ", ".join(f"{part.start} to {part.stop} of rank {part.owner}" for part in weight.parts)
                    lines.append((f"{name} {tuple(p.shape)} {p.dtype}{moved}{read} in group {index}", owned))
        return lines

    def step(self) -> list[str]:
        """Step everything; return warnings."""
        begun = False
        try:
            for weight in self.weights.values():
                weight.lend()
            self.local._validate()
            work, begun = self.local._decided(), True
            return self.waves.step(self.local, work)
        except BaseException as error:
            if begun:
                self.broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            for weight in self.weights.values():
                weight.release()

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """Return this rank's own state of a weight."""
        stand_in = self.weights[p].stand_in
        return {} if stand_in is None else self.local.state.get(stand_in, {})

    def received(self) -> int:
        """Return the bytes that a step sends to this rank."""
        return self.waves.received

    def divided(self) -> Iterator[Divided]:
        """Yield the weights that have owners."""
        yield from (weight for weight in self.weights.values() if isinstance(weight, Divided))


def matrix_cost(piece: Piece, method: Method[Any], group: Group) -> float:
    """Return the operations of a step of one matrix, refreshes amortised."""
    m, n = piece.shape.m, piece.shape.n
    r, tau, T = method.rank(group, m, n), group["precondition_frequency"], group.get("ns_steps", 0)
    if not r:  # products of both factors; a refresh has a product and a QR of 8/3 k^3 each
        return 2 * (5 * m * n * n + 4 * m * m * n) + 14 / 3 * (m**3 + n**3) / tau
    step = 6 * m * n * r + 2 * m * m * n + 2 * m**3 + 4 * m * m * r + 4 * m * r * r + 4 * n * r * r + 4 * r**3
    runs = -(-T // GRAM_RUN)
    gram = 2 * runs * m * m * n + (4 * T - 3 * runs) * m**3
    newton_schulz = gram if use_gram(m, n) else T * (2 * m * m * n + m**3)
    return 2 * (step + newton_schulz) - 4 / 3 * r**3 + 14 / 3 * (m**3 + r**3) / tau


def _difference(team: Team, lines: Sequence[list[tuple[str, str]]]) -> RuntimeError:
    """Return the error that names the first weight of which two ranks have given something else.

    Owners are asked last: one weight that differs deals out the work of all anew.
    """
    place = next(place for place, own in enumerate(lines) if own != lines[0])
    pairs = list(zip_longest(lines[0], lines[place], fillvalue=("nothing", "")))
    unlike = ((one[0], other[0]) for one, other in pairs if one[0] != other[0])
    owned = ((", ".join(one), ", ".join(other)) for one, other in pairs if one != other)
    one, other = next(unlike, None) or next(owned)
    return RuntimeError(
        f"Ranks {team.ranks[0]} and {team.ranks[place]} gave this optimizer other weights: {one}; {other}. Names, "
        "shapes, dtypes, groups and requires_grad must be the same on all ranks that divide the work. A wrapper that "
        "gives each rank weights of its own, as ZeroRedundancyOptimizer does, goes without process_group=."
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _row_parts(count: int, world: int) -> tuple[Part, ...]:
    """Return the rows of each rank as DTensor's Shard(0) has them, some of them none."""
    return tuple(Part(*chunk(0, count, world, place), place) for place in range(world))
