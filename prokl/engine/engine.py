"""Lay weights of one shape together, keep their state, and decide every step. No linear algebra.

It knows neither ranks nor hooks: an optimizer gives it its groups and its state, a divided one those of its stand-ins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Method
from prokl.algorithm.settings import ALGORITHM, NONNEGATIVE, RATE, Group, check, check_adamw
from prokl.algorithm.shapes import compute_dtype
from prokl.backends import select
from prokl.backends.device import SecondStream, workspace
from prokl.backends.io import Member
from prokl.engine import adamw, matrix_state
from prokl.engine.adamw import AdamWGroups
from prokl.engine.bucket import Bucket, Plan, SpecifiedBucket
from prokl.engine.graphs import Graphs
from prokl.engine.validation import PLAIN, check_gradient, check_names, check_weight, in_float16
from prokl.engine.weights import (
    DEFAULTS,
    Weight,
    blank_state,
    clock,
    is_dtensor,
    may_move,
    plain_group,
    runs,
    state_dtype,
    weights_of,
)

Shape = tuple[int, int, int, torch.dtype, torch.device]
"""(m, n, rank, dtype, device)."""
BucketKey = tuple[Shape, tuple[Any, ...], bool, Any]
"""A shape, all settings but lr and weight decay, whether weights may move, as with frozen ones nothing is computed, and
what :attr:`Engine.sharing` has of them."""


class Sharded(Exception):
    """A weight is a DTensor, of which only a division knows what to do. Nothing has moved."""


class Engine:
    """Weights with their state, stepped in batches. A step is decided, executed and committed, bucket by bucket.

    Attributes:
        groups, state: as an optimizer has them, or a division of its stand-ins; whoever owns the engine sets both.
        weights: those of the groups, and others that have state, by parameter.
        buckets: the layout; none until it is built.
        messages: what was found to warn of since they were last taken.
        first: number of a part's first matrix in its stack, where a weight is part of one.
        sharing: who divides a weight: those of others are not stepped with it, as ranks may lack them.

    Args:
        defaults: the settings of a matrix group.
        title: of the optimizer, for errors.
    """

    def __init__(self, method: Method, defaults: dict[str, Any], title: str) -> None:
        self.method, self.defaults, self.title = method, defaults, title
        self.groups: list[Group] = []
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.first: dict[Tensor, int] = {}
        self.sharing: dict[Tensor, Any] = {}
        self.adamw, self.graphs = AdamWGroups(), Graphs()
        self.messages: list[str] = []
        self._told_float16 = False
        self.forget()

    def forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self.weights: dict[Tensor, Weight] = {}
        self.release()

    def release(self) -> None:
        """Drop the layout: the buckets, and with them all memory but that of the state's own tensors."""
        self._built_on: tuple[list[Any], list[Any]] | None = None
        self.buckets: list[Bucket] = []
        self._waiting: list[Tensor] = []
        self.graphs.keep(())

    def step(self) -> list[str]:
        """Step everything; return warnings.

        Raises:
            Sharded: see there.
            ValueError: what cannot be stepped as it is; nothing has moved then.
        """
        plans = dict(self.decide())
        messages, self.messages = self.messages, []
        beside: AbstractContextManager[None] = nullcontext()
        # Two by two: one bucket's small launches leave processors idle, which the other one's products take. A bucket
        # has the same stream in every step, as its graphs belong to one.
        for i, bucket in enumerate(self.buckets):
            beside = self._beside(*self.buckets[i : i + 2]) if i % 2 == 0 else beside
            if bucket in plans:
                # One that begins takes all the temporary memory that there is, and reads the device.
                with nullcontext() if i % 2 == 0 or plans[bucket].initialising else beside:
                    messages += self.advance(bucket, plans[bucket])
        self.adamw.step(self.state)
        return messages

    def _beside(self, bucket: Bucket, *other: Bucket) -> AbstractContextManager[None]:
        """Return the context of the second of two buckets: another stream if they lie on one GPU, and any two fit."""
        device = bucket.layout.device
        if device.type != "cuda" or [each.layout.device for each in other] != [device]:
            return nullcontext()
        needed = sorted(each.workspace for each in self.buckets if each.layout.device == device)
        return SecondStream(device, priority=0) if sum(needed[-2:]) <= workspace(device) else nullcontext()

    def decide(self) -> list[tuple[Bucket, Plan]]:
        """Return the buckets that have something to do, and what; nothing has moved then.

        The layout is built where there is none, or where it was built on something else. Beside that only gradients, lr
        and weight decay are looked at.
        """
        built_on, self._built_on = self._built_on, None
        if not self.stands(built_on):
            self.build()
            built_on = self.fingerprint()
        for group in self.groups:
            check("lr", group["lr"], RATE)
            check("weight_decay", group["weight_decay"], NONNEGATIVE)
        for weight, p, fused in self._stepped:
            g = p.grad
            if g is not None and not (
                type(g) in PLAIN
                and g.layout is torch.strided
                and g.shape == p.shape
                and g.dtype is p.dtype
                and g.device == p.device
                and not g.is_neg()
                and g.data_ptr()
                and (not fused or g.stride() == p.stride())
            ):
                check_gradient(weight)
        work = []
        for bucket in self.buckets:
            plan = bucket.decide()
            if plan is not None:
                work.append((bucket, plan))
        self._built_on = built_on
        return work

    def advance(self, bucket: Bucket, plan: Plan) -> list[str]:
        """Execute and commit what was decided of one bucket; return warnings."""
        moved, messages = self.graphs.execute(bucket, plan) if bucket.backend.graphs else (bucket.execute(plan), [])
        return messages + bucket.commit(plan, moved)

    def fingerprint(self) -> tuple[list[Any], list[Any]] | None:
        """Return what a layout is built on: objects, which are the same while it stands, and forms, which are equal.

        It is None where something has no address, or is no longer what it was.
        """
        objects: list[Any] = []
        forms: list[Any] = []
        try:
            for group in self.groups:
                settings = self._settings[group["algorithm"]](group)
                forms.append((settings, isinstance(group["lr"], Tensor), "weight_decay" in group, len(group)))
                objects.append(group)
                for p in group["params"]:
                    objects.append(p)
                    moves = p.requires_grad or p.grad is not None
                    # Kernels that go by address would step a negated weight the wrong way.
                    forms.append((p.shape, p.stride(), p.dtype, p.device, moves, p.is_neg(), p.data_ptr()))
            for p, read in self._readers.items():
                entry: Any = self.state.get(p)
                tensors = read(entry)
                objects.append(entry)
                objects += tensors
                forms += map(Tensor.data_ptr, tensors)
            for p in self._waiting:
                forms.append(p.grad is None)
            for bucket in self.buckets:
                for state, key, left in bucket.clocks:
                    forms.append(state.get(key) is left)
        except (AttributeError, KeyError, RuntimeError, TypeError):
            return None
        return objects, forms

    def stands(self, built_on: tuple[list[Any], list[Any]] | None) -> bool:
        """Return True if groups, weights and state are what they were at that :meth:`fingerprint`."""
        now = None if built_on is None else self.fingerprint()
        if now is None or built_on is None or len(now[0]) != len(built_on[0]):
            return False
        try:
            return all(map(is_, now[0], built_on[0])) and now[1] == built_on[1]
        except (RuntimeError, TypeError, ValueError):  # a setting that cannot be compared
            return False

    def build(self) -> None:
        """Check everything, and lay the weights of a shape together: as they are now, which is the state's new place.

        A bucket that is as it would be made stays, with its graphs. Where a weight stands in a batch may decide its
        rounding: it follows from the groups, not from who came first.
        """
        self._built_on = None
        check_names(self.groups)
        for index in range(len(self.groups)):
            self.check_group(index)
        self.adamw.groups = [group for group in self.groups if group["algorithm"] == "adamw"]
        weights = [*weights_of(self.groups)]
        if any(is_dtensor(weight.p) for weight in weights):
            raise Sharded
        for weight in weights:
            if not isinstance(self.state.get(weight.p, {}), dict):
                raise ValueError(f"Invalid state of {weight.name}: must be a dict. Remove it, to begin anew.")
        self.inherit(weights)
        for weight in weights:
            check_weight(weight)
            check_gradient(weight)
        for weight in weights:
            state, reason = self.state.get(weight.p, {}), None
            if weight.matrix:
                reason = matrix_state.misfit(weight, state, self.method, self.title)
            elif may_move(weight.p):
                adamw.bring_home(weight, state)
                reason = adamw.misfit(weight, state)
            if reason is not None:
                raise ValueError(
                    f"The state of {reason}. Set it back, or remove the state, optimizer.state.pop(p), to begin anew."
                )

        placed: dict[BucketKey, list[tuple[Member, Weight]]] = {}
        self._waiting = []
        per_member = {"lr", "weight_decay", "algorithm", *DEFAULTS}
        alike = [tuple(g.get(key) for key in self.defaults if key not in per_member) for g in self.groups]
        for weight in weights:
            if not weight.matrix:
                adamw.begin(weight.p, weight.group, self.state)
            elif any(self._takes_part(member) for member in self.members(weight)):
                moves, sharing = may_move(weight.p), self.sharing.get(weight.p)
                for member in self.members(weight):
                    key = self.shape(weight.group, member), alike[weight.group_index], moves, sharing
                    placed.setdefault(key, []).append((member, weight))
            else:
                self._waiting.append(weight.p)
                if weight.p.requires_grad:
                    self.begin(weight)
        held = {weight.p: {*self.state.get(weight.p, ())} for weight in weights if weight.matrix}
        try:
            self._fill(placed)
        except BaseException:  # Ctrl-C, too: what has not begun has no state then, not a part of one
            for p, keys in held.items():
                for new in self.state.get(p, {}).keys() - keys:
                    del self.state[p][new]
            raise
        self.remember(weights)

        self._stepped = [(weight, weight.p, not weight.matrix and weight.group["fused"]) for weight in weights]
        self.watch(weights)
        if not self._told_float16 and (message := in_float16(self.groups)):
            self._told_float16 = True
            self.messages.append(message)

    def watch(self, weights: Collection[Weight]) -> None:
        """Let a fingerprint be of the settings and the state of these weights."""
        rates, ours = {"lr", "weight_decay"}, {*self.defaults, *DEFAULTS} - {"differentiable"}
        self._settings = {
            "matrix": itemgetter("algorithm", *(ours - rates)),
            "adamw": itemgetter("algorithm", *(adamw.ARGUMENTS - rates)),
        }
        self._readers: dict[Tensor, itemgetter[Any]] = {}
        for weight in weights:
            keys = [key for key, value in self.state.get(weight.p, {}).items() if isinstance(value, Tensor)]
            keys = [key for key in keys if not (weight.matrix and key.startswith("step"))]  # which a step replaces
            if keys:
                self._readers[weight.p] = itemgetter(*keys, keys[0])  # of one key it would give no tuple

    def check_group(self, index: int) -> None:
        """Raise ValueError for a group that lacks a setting, or has one that is out of bounds.

        Those of a matrix group become Python's own, whatever was set by hand.
        """
        group, params = self.groups[index], self.groups[index].get("params")
        if not isinstance(params, (list, tuple)) or not all(isinstance(p, Tensor) for p in params):
            raise ValueError(f"Invalid params of group {index}, a {type(params).__name__}: must be a list of tensors.")
        check("algorithm", group.get("algorithm"), ALGORITHM)
        matrix = group["algorithm"] == "matrix"
        needed = self.defaults if matrix else self.adamw.defaults(self.defaults["maximize"])
        # A matrix group may lack the key that torch puts into every optimizer that is copied.
        if missing := sorted(needed.keys() - group.keys() - ({"differentiable"} if matrix else set())):
            raise ValueError(
                f"Group {index} has no {missing[0]}, which algorithm={group['algorithm']!r} needs, by default "
                f"{needed[missing[0]]!r}: set it back. If the algorithm was changed, set that back, or make a new "
                "optimizer."
            )
        if matrix:
            group.update(plain_group(group, self.defaults))
            self.method.check(group)
        else:
            check_adamw(group)
            adamw.check_options(group, index)

    def inherit(self, weights: Collection[Weight]) -> None:
        """Let weights that have state go on with what is known of it, and forget those that have none.

        Raises:
            ValueError: a matrix weight has other settings, another reading or shape than its state was made with.
        """
        self.weights = {p: weight for p, weight in self.weights.items() if self.state.get(p)}
        for weight in weights:
            known = self.weights.get(weight.p)
            if known is not None and weight.matrix:
                weight.made_with, weight.idle = known.made_with, known.idle
                weight.check_as_made(self.method.fixed)

    def remember(self, weights: Collection[Weight]) -> None:
        """Remember what the state of weights is made with."""
        for weight in weights:
            if weight.matrix and not matrix_state.begins(weight, self.state.get(weight.p, {}), self.method):
                weight.made_with = weight.making(self.method.fixed)
                self.weights[weight.p] = weight

    def check_new(self, index: int) -> None:
        """Raise ValueError for a new group that cannot be stepped."""
        group = self.groups[index]
        if group["algorithm"] == "adamw":
            for key in self.defaults.keys() - adamw.ARGUMENTS - {"algorithm"}:  # which one call may give all groups
                group.pop(key, None)
        self.check_group(index)
        for weight in weights_of([group], index):
            check_weight(weight)
            self.check_backend(weight)

    def check_backend(self, weight: Weight) -> None:
        """Raise ValueError for a backend that a matrix weight's device does not run."""
        if weight.matrix:
            dtype = compute_dtype(weight.p.dtype, state_dtype(weight.group, weight.p))
            select.select(weight.group["backend"], weight.p.device, weight.group["precision"], dtype)

    def members(self, weight: Weight) -> list[Member]:
        """Return the weight as one member, or each piece of ``split`` as one: what has a state of its own."""
        return weight.members(self.first.get(weight.p, 0))

    def shape(self, group: Group, member: Member) -> Shape:
        """Return what a member must have in common with others to be stepped with them, settings aside."""
        m, n = member.shape.m, member.shape.n
        return m, n, self.method.rank(group, m, n), member.p.dtype, member.p.device

    def _takes_part(self, member: Member) -> bool:
        """Return True if a weight has a gradient, has begun, or has its state in the stacks of a bucket that was."""
        state = self.state.get(member.p, {})
        M = state.get("M_Q" + member.suffix)
        return member.p.grad is not None or max(clock(member, state)) >= 0 or (M is not None and M._is_view())

    def begin(self, weight: Weight) -> dict[str, Any]:
        """Return the state of a weight that has not begun, with zeros and step -1 where it has none.

        A checkpoint has an entry for every weight, or it could not be loaded into one that has begun.
        """
        blank: dict[str, Any] = {}
        for member in self.members(weight):
            if "step" + member.suffix not in self.state[weight.p]:
                blank |= blank_state(member, self.method, weight.group)
        self.state[weight.p].update(blank)  # of all pieces, or of none
        return self.state[weight.p]

    def _fill(self, placed: dict[BucketKey, list[tuple[Member, Weight]]]) -> None:
        """Make the buckets of these members; one that is as it would be made stays, with its graphs."""
        old = {(bucket.members[0].p, bucket.members[0].suffix): bucket for bucket in self.buckets}
        buckets: list[Bucket] = []
        for key, pairs in placed.items():
            (m, n, rank, dtype, device), (_, first) = key[0], pairs[0]
            each = self.method.workspace(m, n, rank) * compute_dtype(dtype, state_dtype(first.group, first.p)).itemsize
            kind, start = SpecifiedBucket if first.group["backend"] == "reference" else Bucket, 0
            for run in runs([member for member, _ in pairs], each, workspace(device)):
                weights = [weight for _, weight in pairs[start : start + len(run)]]
                states, start = [self.state[member.p] for member in run], start + len(run)
                bucket = old.get((run[0].p, run[0].suffix))
                if bucket is not None and type(bucket) is kind and bucket.is_of(run, states, weights[0].group):
                    bucket.follow(weights)
                else:
                    try:
                        bucket = kind(run, weights, states, self.method)
                    except RuntimeError as error:  # torch's of memory, on whichever device
                        raise type(error)(
                            f"No state for {run[0].name} of shape {tuple(run[0].p.shape)} and {len(run) - 1} more: "
                            f'{error} A long weight, as an embedding, may go into an "adamw" group.'
                        ) from error
                buckets.append(bucket)
        self.buckets = buckets
        self.graphs.keep(buckets)

    def counts(self, key: str) -> dict[str, int]:
        """Add up a counter of the state by weight; reads the device."""
        totals: dict[str, int] = {}
        for weight in weights_of(self.groups):
            if key == "skipped" and (count := int(self.adamw.skipped.get(weight.p, 0))):
                totals[weight.name] = count
            for member in self.members(weight) if weight.matrix else ():
                if key + member.suffix in self.state.get(weight.p, {}):
                    count = int(self.state[weight.p][key + member.suffix].sum())
                    totals[weight.name] = totals.get(weight.name, 0) + count
        return totals

    def offload(self, device: torch.device | str) -> None:
        """Move the state to ``device``, and keep nothing where it was."""
        for p, entry in self.state.items():
            if isinstance(p, Tensor):  # hooks keep what they like under names
                moved = {key: value.to(device, copy=True) for key, value in entry.items() if isinstance(value, Tensor)}
                entry.update(moved)
        self.release()

    def loaded(self) -> None:
        """Go on from other groups and another state, which is made with their settings."""
        self.forget()
        self.remember([*weights_of(self.groups)])
