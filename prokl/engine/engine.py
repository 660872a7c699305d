"""Lay weights of one shape together, keep their state, and decide every step. No linear algebra.

It knows neither ranks nor hooks: an optimizer gives it its groups and its state, a divided one those of its stand-ins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.algorithm.settings import (
    ALGORITHMS,
    check_adamw,
    check_choice,
    check_learning_rate,
    check_nonnegative,
    plain,
)
from prokl.algorithm.shapes import compute_dtype
from prokl.backends.device import SecondStream, workspace
from prokl.backends.io import Member
from prokl.backends.rounding import MASTER, mode_of
from prokl.backends.select import select
from prokl.engine import adamw, matrix_state
from prokl.engine.adamw import AdamWGroups
from prokl.engine.bucket import Bucket, Plan
from prokl.engine.graphs import Graphs
from prokl.engine.newcomers import in_float16, plain_group
from prokl.engine.specified import SpecifiedBucket
from prokl.engine.validation import (
    PLAIN,
    check_forms,
    check_gradient,
    check_in_memory,
    check_materialised,
    check_matrix_parameter,
    check_names,
    check_writable,
    misspelt,
)
from prokl.engine.weights import (
    DEFAULTS,
    Weight,
    blank_state,
    check_reading,
    clock,
    may_move,
    runs,
    state_dtype,
    weights_of,
)

Shape = tuple[int, int, int, torch.dtype, torch.device]
"""(m, n, rank, dtype, device)."""
BucketKey = tuple[Shape, tuple[Any, ...], bool]
"""A shape, all settings but lr and weight decay, and whether weights may move: with frozen ones nothing is computed."""


class Sharded(Exception):
    """A weight is a DTensor, of which only a division knows what to do. Nothing has moved."""


class Engine:
    """Weights with their state, stepped in batches. A step is decided, executed and committed, bucket by bucket.

    Attributes:
        groups, state: as an optimizer has them, or a division of its stand-ins; whoever owns the engine sets both.
        weights: those of the groups, and others that have state, by parameter.
        first: number of a part's first matrix in its stack, where a weight is part of one.
        select: chooses who computes; a trace, a count or another machine may put its own choice in the place.
        told: what was warned of, or looked at, and is not to be again.

    Args:
        method: the matrix method.
        defaults: the settings of a matrix group.
        title: of the optimizer, for errors.
    """

    select = staticmethod(select)

    def __init__(self, method: Method[Any], defaults: dict[str, Any], title: str) -> None:
        self.method, self.defaults, self.title = method, defaults, title
        self.groups: list[Group] = []
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.first: dict[Tensor, int] = {}
        self.adamw, self.graphs = AdamWGroups(), Graphs()
        self.told: set[Any] = set()
        self._messages: list[str] = []
        self.forget()

    def forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self.weights: dict[Tensor, Weight] = {}
        self.release()

    def release(self) -> None:
        """Drop the layout: the buckets, and with them all memory but that of the state's own tensors."""
        self._built_on: tuple[list[Any], list[Any]] | None = None
        self._buckets: dict[BucketKey, list[Bucket]] = {}
        self.graphs = self.graphs.anew()

    def buckets(self) -> Iterator[Bucket]:
        """Yield all buckets."""
        for buckets in self._buckets.values():
            yield from buckets

    def step(self) -> list[str]:
        """Step everything; return warnings.

        Raises:
            Sharded: see there.
            ValueError: what cannot be stepped as it is; nothing has moved then.
        """
        messages: list[str] = []
        plans, every = dict(self.decide()), [*self.buckets()]
        # Two by two: one bucket's small launches leave processors idle, which the other one's products take. A bucket
        # has the same stream in every step, as its graphs belong to one.
        for first, *second in (every[i : i + 2] for i in range(0, len(every), 2)):
            beside = self._beside(first, *(bucket for bucket in second if bucket in plans))
            if first in plans:
                messages += self.advance(first, plans[first])
            for bucket in second:
                if bucket in plans:
                    # One that begins takes all the temporary memory that there is, and reads the device.
                    with nullcontext() if plans[bucket].initialising else beside:
                        messages += self.advance(bucket, plans[bucket])
        self.step_adamw()
        return messages + self.warnings()

    def _beside(self, bucket: Bucket, *other: Bucket) -> AbstractContextManager[None]:
        """Return the context of the second of two buckets: another stream if they lie on one GPU, and any two fit."""
        device = bucket.layout.device
        if device.type != "cuda" or [each.layout.device for each in other] != [device]:
            return nullcontext()
        needed = sorted(each.workspace for each in self.buckets() if each.layout.device == device)
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
            check_learning_rate("lr", group["lr"])
            check_nonnegative("weight_decay", group["weight_decay"])
        self._check_gradients()
        work = [(bucket, plan) for bucket in self.buckets() if (plan := bucket.decide()) is not None]
        self._tell_restarts()
        self._built_on = built_on
        return work

    def _tell_restarts(self) -> None:
        """Say of which weights matrices begin anew, once a weight: its pieces may be in several buckets."""
        restarted: Counter[Weight] = Counter()
        for bucket in self.buckets():
            restarted += bucket.restarted  # which leaves out zeros
            bucket.restarted.clear()
        for weight, some in restarted.items():
            count = sum(member.shape.count for member in self.members(weight))
            self._messages.append(
                f"The state of {weight.name} has zero eigenvalues, or bases that are not orthonormal, in {some} of "
                f"{count} matrices, which no step can go on from: they begin anew with the next gradient. To reset a "
                "weight, remove its state, optimizer.state.pop(p), or zero all of it."
            )

    def advance(self, bucket: Bucket, plan: Plan) -> list[str]:
        """Execute and commit what was decided of one bucket; return warnings."""
        moved, messages = self.graphs.execute(bucket, plan) if bucket.graphs else (bucket.execute(plan), [])
        return messages + bucket.commit(plan, moved)

    def step_adamw(self) -> None:
        """Step the AdamW groups."""
        self.adamw.step([g for g in self.groups if g["algorithm"] == "adamw"], self.state)

    def warnings(self) -> list[str]:
        """Return what was found to warn of since the last call, apart from what single buckets say."""
        messages, self._messages = self._messages, []
        return messages

    def fingerprint(self) -> tuple[list[Any], list[Any]] | None:
        """Return what a layout is built on: objects, which are the same while it stands, and forms, which are equal.

        It is None where something has no address, or is no longer what it was.
        """
        try:
            weights = [p for group in self.groups for p in group["params"]]
            entries: list[Any] = [self.state.get(p) for p in self._readers]
            tensors = [*chain.from_iterable([read(e) for read, e in zip(self._readers.values(), entries, strict=True)])]
            forms = [
                [p.shape for p in weights],
                [p.stride() for p in weights],
                [p.dtype for p in weights],
                [p.device for p in weights],
                [p.requires_grad or p.grad is not None for p in weights],
                [*map(Tensor.is_neg, weights)],  # kernels that go by address would step such a weight the wrong way
                [p.grad is None for p in self._waiting],
                [*map(Tensor.data_ptr, weights)],
                [*map(Tensor.data_ptr, tensors)],
                [self._settings[group["algorithm"]](group) for group in self.groups],
                [(isinstance(group["lr"], Tensor), "weight_decay" in group, len(group)) for group in self.groups],
            ]
        except (AttributeError, KeyError, RuntimeError, TypeError):
            return None
        return [*self.groups, *weights, *entries, *tensors], forms

    def stands(self, built_on: tuple[list[Any], list[Any]] | None) -> bool:
        """Return True if groups, weights and state are what they were at that :meth:`fingerprint`."""
        now = None if built_on is None else self.fingerprint()
        if now is None or built_on is None or len(now[0]) != len(built_on[0]):
            return False
        try:
            same = all(map(is_, now[0], built_on[0])) and now[1] == built_on[1]
            return same and all(bucket.keeps_clocks() for bucket in self.buckets())
        except (RuntimeError, TypeError, ValueError):  # a setting that cannot be compared
            return False

    def _check_gradients(self) -> None:
        """Raise an error for a gradient that does not go with its weight."""
        weights = [weight.p for weight in self._stepped if weight.p.grad is not None]
        gradients: list[Any] = [p.grad for p in weights]
        if (
            {*map(type, gradients)} <= {*PLAIN}
            and [g.layout for g in gradients].count(torch.strided) == len(gradients)
            and [g.shape for g in gradients] == [p.shape for p in weights]
            and [g.dtype for g in gradients] == [p.dtype for p in weights]
            and [g.device for g in gradients] == [p.device for p in weights]
            and all(map(Tensor.data_ptr, gradients))
            and not any(map(Tensor.is_neg, gradients))
            and all(p.grad is None or p.grad.stride() == p.stride() for p in self._fused)
        ):
            return
        for weight in self._stepped:
            check_gradient(weight.p, weight.name, weight.matrix or type(weight.p) in PLAIN)
            if not weight.matrix:
                adamw.check_gradient(weight.p, weight.name, weight.group["fused"])

    def build(self) -> None:
        """Check everything, and lay the weights of a shape together: as they are now, which is the state's new place.

        A bucket that is as it would be made stays, with its graphs. Where a weight stands in a batch may decide its
        rounding: it follows from the groups, not from who came first.
        """
        self._built_on = None
        check_forms(self.groups, self.state)
        check_names(self.groups)
        for index, group in enumerate(self.groups):
            self.check_complete(index, group)
            if group["algorithm"] == "adamw":
                adamw.bring_home(group, self.state)
        weights = [*weights_of(self.groups)]
        if any(hasattr(weight.p, "device_mesh") for weight in weights):
            raise Sharded
        for index in range(len(self.groups)):
            self.check_settings(index)
        self.inherit(weights)
        for weight in weights:
            self._check_weight(weight)
        for index, group in enumerate(self.groups):
            if group["algorithm"] == "adamw":
                adamw.check_options(group, index)
        for weight in weights:
            state = self.state.get(weight.p, {})
            if not weight.matrix:
                adamw.check_state(weight.p, weight.name, weight.group, state)
            elif state:
                matrix_state.check_state(weight.p, self.members(weight), state, self.method, weight.group, self.title)

        placed: dict[BucketKey, list[tuple[Member, Weight]]] = {}
        waiting: list[Tensor] = []
        per_member = {"lr", "weight_decay", "algorithm", *DEFAULTS}
        alike = [tuple(plain(g.get(key)) for key in self.defaults if key not in per_member) for g in self.groups]
        for weight in weights:
            if not weight.matrix:
                adamw.begin(weight.p, weight.group, self.state)
            elif any(self._takes_part(member) for member in self.members(weight)):
                for member in self.members(weight):
                    key = self.shape(weight.group, member), alike[weight.group_index], may_move(weight.p)
                    placed.setdefault(key, []).append((member, weight))
            else:
                waiting.append(weight.p)
                if weight.p.requires_grad:
                    self.begin(weight)
        self._fill(placed)
        self.remember(weights)

        self._stepped, self._fused = weights, [w.p for w in weights if not w.matrix and w.group["fused"]]
        self.watch(weights, waiting)
        self._warn()

    def watch(self, weights: Collection[Weight], waiting: Collection[Tensor] = ()) -> None:
        """Let a fingerprint be of these weights' settings and state, and say which ``waiting`` ones have a gradient."""
        self._waiting = waiting
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

    def _warn(self) -> None:
        """Say, once, what is allowed and hardly meant: weights in float16, keys that are nearly a setting's."""
        if "float16" not in self.told and (message := in_float16(self.groups)):
            self.told.add("float16")
            self._messages.append(message)
        of_adamw = {*self.adamw.defaults(False), "lr", "algorithm", "params"}
        for index, group in enumerate(self.groups):
            known = (of_adamw, self.defaults) if group["algorithm"] == "adamw" else (self.defaults, of_adamw)
            new = {key: value for key, value in group.items() if (index, key) not in self.told}
            self.told.update((index, key) for key in new)
            for key, reason in misspelt(new, *known):
                self._messages.append(f"{key}={group[key]!r} of group {index} has no effect: {reason}")

    def check_complete(self, index: int, group: Group) -> None:
        """Raise ValueError for a group that was robbed of a setting."""
        check_choice("algorithm", group.get("algorithm"), ALGORITHMS)
        own = {"matrix": self.defaults, "adamw": self.adamw.defaults(self.defaults["maximize"])}
        ours, ((other, theirs),) = own.pop(group["algorithm"]), own.items()
        # What torch puts into every optimizer that is copied may be lacking here.
        foreign = {"differentiable"} if group["algorithm"] == "matrix" else set()
        for key in () if ours.keys() <= group.keys() else ours.keys() - foreign - group.keys():
            if theirs.keys() <= group.keys():
                raise ValueError(
                    f"Invalid algorithm={group['algorithm']!r} of group {index}: it was {other!r} when the group was "
                    "added, and has its settings. Set it back, or make a new optimizer whose group says so from the "
                    "start."
                )
            raise ValueError(
                f"Group {index} has no {key}, which algorithm={group['algorithm']!r} needs: set it back, to "
                f"{ours[key]!r} for what it is by default."
            )

    def check_settings(self, index: int) -> None:
        """Raise ValueError for settings of a group that are out of bounds.

        Those of a matrix group become Python's own, whatever was set by hand.
        """
        group = self.groups[index]
        if group["algorithm"] == "adamw":
            check_adamw(group)
        else:
            group.update(plain_group(group, self.defaults))
            self.method.check(group)

    def inherit(self, weights: Collection[Weight]) -> None:
        """Let weights that have state go on with what is known of it, and forget those that have none.

        Raises:
            ValueError: a matrix weight has other settings, another reading or shape than its state was made with.
        """
        self.weights = {p: weight for p, weight in self.weights.items() if self.state.get(p)}
        for weight in weights:
            known = self.weights.get(weight.p)
            if known is not None and weight.matrix:
                weight.made_with, weight.own_master, weight.idle = known.made_with, known.own_master, known.idle
                weight.check_as_made(self.method.fixed)

    def remember(self, weights: Collection[Weight]) -> None:
        """Remember what the state of weights is made with."""
        for weight in weights:
            if weight.matrix and self.state.get(weight.p):
                weight.made_with = weight.making(self.method.fixed)
                weight.own_master |= mode_of(weight.group, weight.p.dtype) == MASTER
                self.weights[weight.p] = weight

    def _check_weight(self, weight: Weight) -> None:
        """Raise an error for a weight, or its gradient, that cannot be stepped."""
        p, name = weight.p, weight.name
        check_materialised(p, name)
        check_gradient(p, name, weight.matrix or type(p) in PLAIN)
        if weight.matrix:
            _check_matrix(weight, steps=p.grad is not None)  # it may have come by other ways than a group
        if self.state.get(p, {}).keys() & ({"exp_avg"} if weight.matrix else {"M_Q", "M_Q.0"}):
            raise ValueError(
                f"Invalid algorithm={weight.group['algorithm']!r}: {name} has the state of another algorithm. Set it "
                "back, or start a new optimizer."
            )

    def check_new(self, index: int) -> None:
        """Raise ValueError for a new group that cannot be stepped."""
        group = self.groups[index]
        weights = [*weights_of(self.groups[index : index + 1], index)]
        for weight in weights:
            check_materialised(weight.p, weight.name)
        if group["algorithm"] == "adamw":
            self.adamw.check_new(group, self.defaults)
            return
        self.method.check(group)
        for weight in weights:
            _check_matrix(weight, steps=True)
            dtype = compute_dtype(weight.p.dtype, state_dtype(group, weight.p))
            self.select(group["backend"], weight.p.device, group["precision"], dtype)

    def members(self, weight: Weight) -> list[Member]:
        """Return the weight as one member, or each piece of ``split`` as one: what has a state of its own."""
        return weight.members(self.first.get(weight.p, 0))

    def _rank(self, group: Group, member: Member) -> int:
        return self.method.rank(group, member.shape.m, member.shape.n)

    def shape(self, group: Group, member: Member) -> Shape:
        """Return what a member must have in common with others to be stepped with them, settings aside."""
        return member.shape.m, member.shape.n, self._rank(group, member), member.p.dtype, member.p.device

    def _takes_part(self, member: Member) -> bool:
        """Return True if a weight has a gradient, has begun, or has its state in the stacks of a bucket that was."""
        state = self.state.get(member.p, {})
        M = state.get("M_Q" + member.suffix)
        return member.p.grad is not None or max(clock(member, state)) >= 0 or (M is not None and M._is_view())

    def begin(self, weight: Weight) -> dict[str, Any]:
        """Return the state of a weight that has not begun, with zeros and step -1 where it has none.

        A checkpoint has an entry for every weight, or it could not be loaded into one that has begun.
        """
        for member in self.members(weight):
            if "step" + member.suffix not in self.state[weight.p]:
                blank = blank_state(member, self.method, self._rank(weight.group, member), weight.group)
                self.state[weight.p].update(blank)
        return self.state[weight.p]

    def _fill(self, placed: dict[BucketKey, list[tuple[Member, Weight]]]) -> None:
        """Make the buckets of these members; one that is as it would be made stays, with its graphs."""
        old = {(bucket.members[0].p, bucket.members[0].suffix): bucket for bucket in self.buckets()}
        filled: dict[BucketKey, list[Bucket]] = {}
        for key, pairs in placed.items():
            (m, n, rank, dtype, device), first = key[0], pairs[0][1]
            each = self.method.workspace(m, n, rank) * compute_dtype(dtype, state_dtype(first.group, first.p)).itemsize
            filled[key], start = [], 0
            for run in runs([member for member, _ in pairs], each, workspace(device)):
                weights = [weight for _, weight in pairs[start : start + len(run)]]
                states, start = [self.state[member.p] for member in run], start + len(run)
                bucket = old.get((run[0].p, run[0].suffix))
                kind = SpecifiedBucket if weights[0].group["backend"] == "reference" else Bucket
                if type(bucket) is kind and bucket.is_of(run, states, weights[0].group):
                    bucket.follow(weights)
                else:
                    try:
                        bucket = kind(run, weights, states, self.method, rank, self.select)
                    except RuntimeError as error:  # torch's of memory, on whichever device
                        raise type(error)(_no_room(run, error)) from error
                filled[key].append(bucket)
        self._buckets = filled
        for bucket in self.buckets():
            for weight in bucket.weights:
                weight.own_master = MASTER in bucket.stacks
        self.graphs.keep(self.buckets())

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

    def loaded(self, restored: Collection[int]) -> None:
        """Go on from other groups and another state; of the ``restored`` groups state was loaded."""
        self.forget()
        for weight in weights_of(self.groups):
            if weight.group_index in restored:
                weight.own_master = weight.group["bf16_weights"] == MASTER  # also no longer in bfloat16
                self.remember([weight])


def _check_matrix(weight: Weight, steps: bool) -> None:
    """Raise ValueError for a weight that the matrix method cannot read, or write where it ``steps``."""
    check_matrix_parameter(weight.p, weight.name)
    check_writable(weight.p, weight.name)
    check_reading(weight)
    if steps:
        check_in_memory(weight.p, weight.name)


def _no_room(run: list[Member], error: Exception) -> str:
    others = f" and {len(run) - 1} more" if len(run) > 1 else ""
    return (
        f"No state for {run[0].name} of shape {tuple(run[0].p.shape)}{others}: {error} A weight with a long side, as "
        'an embedding, may go into a group {"params": [...], "algorithm": "adamw", "lr": ...}.'
    )
