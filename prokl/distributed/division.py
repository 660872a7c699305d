"""Divide an optimizer's weights among ranks, and step this rank's part of them.

The stand-ins of this rank are stepped by an engine without ranks, exactly as one process does. ``outer`` is the
optimizer's own engine throughout: its groups and its state, which nothing here steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Method
from prokl.algorithm.newton_schulz import gram_runs, use_gram
from prokl.algorithm.polynomials import each
from prokl.algorithm.settings import Group, plain
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.io import Member
from prokl.distributed import state as states
from prokl.distributed.ownership import Block, Part, blocks, check_placed, chunk, divide, homes, whole_block
from prokl.distributed.team import Lines, Team, agree, compare, team_of
from prokl.distributed.waves import Wave, step_in_waves, waves_of
from prokl.distributed.weights import LocalWeight
from prokl.engine import checkpoint
from prokl.engine.engine import Engine
from prokl.engine.validation import check_gradient
from prokl.engine.weights import DEFAULTS, Weight, check_reading, is_dtensor, may_move, weights_of

KIND = ("algorithm",)
"""Settings that must stay, beside reading and shape, for a divided weight to go on with the state that it has."""


class Division:
    """The owners of all matrices, this rank's part of a step, and the state that it shows.

    Attributes:
        engine: of the stand-ins.
        weights: those of the optimizer, as this rank has them.
        broken: what a step broke off with, after which weights and state are of two steps.
    """

    def __init__(self, outer: Engine, process_group: Any) -> None:
        self.teams: dict[tuple[int, ...], Team] = {}
        self.of_plain = None if process_group is None else team_of(process_group, self.teams)
        self.engine = Engine(outer.method, outer.defaults, outer.title)
        self.engine.adamw.apart = True
        self.weights: dict[Tensor, LocalWeight] = {}
        self.loads: dict[Team, list[float]] = {}
        self.broken: str | None = None
        self._layout: Any = None
        self._built_on: Any = None  # what the optimizer's groups, weights and state were when all was checked
        self._stepped: list[Weight] = []
        self._peers_notified = False  # True while a state is loaded once all ranks know whether each of them can

    def update(self, outer: Engine) -> None:
        """Follow the optimizer's groups and settings; where weights are new, all ranks compare what they have."""
        layout = [
            [[*v] if isinstance(v := group.get(key), list) else v for key in ("algorithm", "rank", *DEFAULTS)]
            + [(id(p), may_move(p), p.dtype, p.device, p.shape) for p in group["params"]]
            for group in outer.groups
        ]
        if layout != self._layout:
            self._divide(outer)
            self._layout = layout
        self.engine.groups = self._local_groups(outer.groups)

    def _divide(self, outer: Engine) -> None:
        """Find the owners of new weights; raise on all ranks where one cannot, or has others."""
        all_weights = [*weights_of(outer.groups)]
        kinds = {one.p: one.making(KIND) for one in all_weights}
        for p, weight in [*self.weights.items()]:
            if kinds.get(p) != weight.kind and not outer.state.get(p):  # it has left, or is another one by now
                del self.weights[p]
                self.engine.state.pop(weight.stand_in, None)
                self.engine.first.pop(weight.stand_in, None)  # type: ignore[arg-type]
        outer.inherit(())
        for weight in self.weights.values():
            weight.follow()
        for one in all_weights:
            self._team(one.p)  # all of them, whatever fails on one rank
        failure: Exception | None = None
        lines: dict[Team, Lines] = {team: ([], []) for team in self.teams.values()}
        matrices, of_adamw = [], []
        try:
            weights, loads = self._with_owners(all_weights, outer.method)
            for one in all_weights:
                p, weight = one.p, weights[one.p]
                if kinds[p] != weight.kind:
                    raise ValueError(
                        f"{one.name} has {kinds[p]}, and its work was divided with {weight.kind}: set it back, or "
                        "remove its state, optimizer.state.pop(p) on all ranks, to begin anew."
                    )
                if weight.team in lines:
                    forms, owners = lines[weight.team]
                    moves = f"requires_grad={p.requires_grad}" + ", frozen" * (not may_move(p))
                    reading = f"transposed={one.transposed}, split={one.split}, group {one.group_index}"
                    forms.append(f"{one.name} {tuple(p.shape)} {p.dtype}, {moves}, {reading}")
                    owners.append(f"{one.name}, owned as {[*map(tuple, weight.parts)]}")
                if weight.parts and may_move(p) and one.matrix:
                    keys = {(weight.team, self.engine.shape(one.group, member)) for member in one.members()}
                    matrices.append((weight, keys))
                elif weight.parts and may_move(p):
                    of_adamw.append(weight)
        except Exception as error:  # the others wait for a word
            failure = error
        agree(lines, failure, "Nothing was stepped")
        compare(lines)
        self.weights, self.loads = weights, loads
        stepped = [weight for weight in weights.values() if weight.parts]
        self.engine.sharing = {weight.stand_in: weight.team for weight in stepped if weight.stand_in is not None}
        for weight in weights.values():
            if weight.stacked and weight.mine is not None and weight.stand_in is not None:
                self.engine.first[weight.stand_in] = weight.mine.start
        self.waves, self.adamw = waves_of(matrices), Wave(of_adamw)

    def _team(self, p: Tensor) -> Team | None:
        return team_of(p.device_mesh, self.teams) if is_dtensor(p) else self.of_plain

    def _with_owners(
        self, all_weights: Sequence[Weight], method: Method
    ) -> tuple[dict[Tensor, LocalWeight], dict[Team, list[float]]]:
        """Return the weights as this rank has them, new ones too, and what every rank has to do by then."""
        weights, loads = dict(self.weights), {team: [*costs] for team, costs in self.loads.items()}
        for _, group_weights in groupby(all_weights, lambda one: one.group_index):
            new: dict[Team, list[tuple[Weight, float, list[Block]]]] = {}
            for one in group_weights:
                p, team = one.p, self._team(one.p)
                if p in weights:
                    continue
                if team is None or (not one.matrix and (is_dtensor(p) or p.ndim == 0)):
                    weights[p] = LocalWeight(p, kind=one.making(KIND))
                    continue
                held = [whole_block(p.shape)] * team.size
                if is_dtensor(p):
                    mesh, placements = p.device_mesh, tuple(p.placements)
                    check_placed(one.name, p)
                    found = blocks(tuple(p.shape), tuple(mesh.mesh.shape), placements)
                    by_rank = dict(zip(mesh.mesh.flatten().tolist(), found, strict=True))
                    held = [by_rank[rank] for rank in team.ranks]
                if one.matrix:
                    check_reading(one)
                    cost = sum(matrix_cost(member, method, one.group) for member in one.members())  # of one of a stack
                    new.setdefault(team, []).append((one, cost, held))
                else:  # the rows of each rank as DTensor's Shard(0) has them, some of them none
                    parts = tuple(Part(*chunk(0, p.shape[0], team.size, place), place) for place in range(team.size))
                    weights[p] = LocalWeight(p, team, parts, held, stacked=True, kind=one.making(KIND))
            for team, entries in new.items():
                costs = loads.setdefault(team, [0.0] * team.size)
                for moves in (True, False):  # what is frozen last, so that the work that there is is divided evenly
                    dealt = [entry for entry in entries if may_move(entry[0].p) == moves]
                    lying = [(cost, homes(one.p.shape, one.p.ndim == 3, held)) for one, cost, held in dealt]
                    for (one, _, held), parts in zip(dealt, divide(lying, costs), strict=True):
                        shapes, kind = _shapes(one), one.making(KIND)
                        weights[one.p] = LocalWeight(one.p, team, parts, held, one.p.ndim == 3, shapes, kind)
        return weights, loads

    def _local_groups(self, groups: Sequence[Group]) -> list[Group]:
        """Return what this rank steps of ``groups``, with their settings."""
        local = []
        for index, group in enumerate(groups):
            group_weights = weights_of(groups[index : index + 1], index)
            stepped = [one for one in group_weights if self.weights[one.p].stand_in is not None]
            local_group = {**group, "params": [self.weights[one.p].stand_in for one in stepped]}
            local_group["param_names"] = [one.name for one in stepped]
            for key in DEFAULTS:
                if isinstance(group.get(key), list):
                    local_group[key] = [getattr(one, key) for one in stepped]
            local.append(local_group)
        return local

    def step(self, outer: Engine) -> list[str]:
        """Step everything; return warnings."""
        self.check_unbroken("step")
        built_on, self._built_on = self._built_on, None
        stands = outer.stands(built_on)
        if not stands:
            for index in range(len(outer.groups)):
                outer.check_group(index)
            self._stepped = [*weights_of(outer.groups)]
            for one in self._stepped:
                outer.check_backend(one)
        for one in self._stepped:  # what all ranks refuse alike, and before any waits
            check_gradient(one, is_stepped=False)  # stand-ins are looked at where they step
        if not stands:
            self._follow(outer)
        for group, local_group in zip(outer.groups, self.engine.groups, strict=True):
            local_group["lr"], local_group["weight_decay"] = group["lr"], group["weight_decay"]
        begun = False
        try:
            for weight in self.weights.values():
                weight.fill_stand_in()
            work, begun = self.engine.decide(), True
            messages = step_in_waves(self.engine, work, self.waves, self.adamw)
        except BaseException as error:
            if begun:
                self.broken = f"{type(error).__name__}: {error}"
            raise
        finally:
            for weight in self.weights.values():
                weight.release()
        if not stands:
            self.show(outer)
            outer.watch(self._stepped)
            built_on = outer.fingerprint()
        self._built_on = built_on
        return messages

    def _follow(self, outer: Engine) -> None:
        """Follow what has changed in groups, weights or state since the last step, and update the stand-ins."""
        self.update(outer)
        outer.inherit(self._stepped)
        for p, weight in self.weights.items():  # a weight and its stand-in share an entry of state
            self.engine.state.pop(weight.stand_in, None)
            if weight.stand_in is not None and p in outer.state:
                self.engine.state[weight.stand_in] = outer.state[p]

    @contextmanager
    def lent(self, outer: Engine) -> Iterator[Engine]:
        """Give the engine of the stand-ins, with the rates, weights and gradients of the next step; send nothing.

        What does not lie on this rank has no gradient then.
        """
        for group, local_group in zip(outer.groups, self.engine.groups, strict=False):  # one may have been added since
            local_group["lr"] = group["lr"]
        lending = [weight for weight in self.weights.values() if weight.lends()]
        try:
            for weight in lending:
                weight.fill_stand_in()
            yield self.engine
        finally:
            for weight in lending:
                weight.release()

    def check_unbroken(self, what: str) -> None:
        """Raise RuntimeError where weights and state are of two steps."""
        if self.broken is not None:
            raise RuntimeError(
                f"{what}: the last step of this optimizer broke off ({self.broken}), so some weights and state are of "
                "this step and some of the one before. Load the last checkpoint of model and optimizer."
            )

    def show(self, outer: Engine, loaded: Collection[Tensor] = ()) -> None:
        """Give every weight its entry in the optimizer's state: this rank's own, or what says where it is.

        All ranks have entries for weights of which a state was ``loaded``.
        """
        all_weights = [*weights_of(outer.groups)]
        for one in all_weights:
            p, weight = one.p, self.weights[one.p]
            entered = weight.parts and one.matrix and (may_move(p) or p in loaded)
            own = self.engine.state.get(weight.stand_in, {})
            if entered and weight.stand_in is not None:
                own = self.engine.begin(replace(one, p=weight.stand_in))
            elif entered and all(key.partition(".")[0] != "step" for key in outer.state.get(p, {})):
                own = states.parts_of_state(one, weight, {}, outer.method) | outer.state.get(p, {})
            if own:
                outer.state[p] = own
        outer.remember(all_weights)

    def offload(self, device: torch.device) -> None:
        """Move this rank's state to ``device``, and keep nothing where it was: no buffer of a stand-in either."""
        self._built_on = None
        self.engine.offload(device)
        for weight in self.weights.values():
            weight.free()

    def exported(self, outer: Engine, packed: dict[Any, Any]) -> dict[Any, Any]:
        """Return a state dict's state with what each rank has a part of in DTensors that say so."""
        exported = dict(packed)
        for i, one in enumerate(weights_of(outer.groups)):
            if i in exported and one.p in self.weights:
                exported[i] = states.exported_state(one, self.weights[one.p], exported[i], outer.method)
        return exported

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Tell the other ranks of an error on this one, if they still wait for a word."""
        self._peers_notified = False
        try:
            yield
        except Exception as error:
            if not self._peers_notified:
                self._agree_to_load(error)
            raise

    def _agree_to_load(self, failure: Exception | None) -> None:
        agree(self.teams.values(), failure, "Nothing was loaded")

    def loaded(self, outer: Engine, state: dict[str, Any]) -> dict[Any, Any]:
        """Take over a loaded state on all ranks, or raise on all; return what is no weight's, as hooks keep it."""
        for one in weights_of(state["param_groups"]):
            for key, value in state["state"].get(one.p, {}).items():
                states.check_part(self.weights[one.p], key, checkpoint.unwrapped(value), one.name)
        self._peers_notified = True
        self._agree_to_load(None)  # all go on to what takes them all
        failure = None
        try:
            local_state: dict[Tensor, dict[str, Any]] = defaultdict(dict)  # as torch's: some may have no entry
            for one in weights_of(state["param_groups"]):
                weight, entry = self.weights[one.p], state["state"].get(one.p, {})
                own = states.own_state(one, weight, entry, outer.method)
                if own and weight.stand_in is not None:
                    local_state[weight.stand_in] = own
            groups = self._local_groups(state["param_groups"])
            local: dict[str, Any] = {"defaults": outer.defaults, "state": local_state, "param_groups": groups}
            checkpoint.restore(local, outer.method, outer.title)
        except Exception as error:
            failure = error
        self._agree_to_load(failure)
        for one in weights_of(state["param_groups"]):  # which say how the state was made
            weight = self.weights[one.p]
            weight.kind = one.making(KIND)
            if weight.shapes:
                weight.shapes = _shapes(one)
        self.engine.groups, self.engine.state = local["param_groups"], local["state"]
        self.engine.loaded()
        self.broken = self._layout = self._built_on = None  # the groups are other objects now
        outer.forget()
        return {p: entry for p, entry in state["state"].items() if not isinstance(p, Tensor)}


def _shapes(one: Weight) -> tuple[MatrixShape, ...]:
    return tuple(member.shape for member in one.members())


def matrix_cost(member: Member, method: Method, group: Group) -> float:
    """Return the operations of a step of one matrix, refreshes amortised."""
    m, n = member.shape.m, member.shape.n
    r, tau = method.rank(group, m, n), group["precondition_frequency"]
    # A refresh has a QR of 8/3 k^3 and four products of each factor, and turns what is kept in the basis.
    if not r:
        return 6 * (m * n * n + m * m * n) + (32 / 3 * (m**3 + n**3) + 2 * (m * m * n + m * n * n)) / tau
    step = 6 * m * n * r + 2 * m * m * n + 2 * m * m * r + 4 * m * r * r + 4 * n * r * r + 3 * r**3
    polynomials = each(plain(group["ns_coefficients"]), group["ns_steps"])
    T = runs = len(polynomials)
    if use_gram(m, n):
        runs = len(gram_runs(polynomials))
    newton_schulz = 2 * runs * m * m * n + (4 * T - 3 * runs + 1) * m**3
    refresh = 32 / 3 * m**3 + 2 * m * m * n + 14 / 3 * r**3
    return 2 * (step + newton_schulz) - 4 / 3 * r**3 + refresh / tau
