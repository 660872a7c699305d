"""What steps weights: looks at them, lays those of a shape together, and keeps their state. No linear algebra.

It knows neither ranks nor hooks: an optimizer gives it its groups and its state, a divided one those of its stand-ins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.algorithm.settings import ALGORITHMS, check_adamw, check_choice, plain
from prokl.algorithm.shapes import compute_dtype
from prokl.backends.device import workspace
from prokl.backends.rounding import MASTER
from prokl.backends.select import select
from prokl.engine import adamw, checkpoint
from prokl.engine.adamw import AdamWGroups
from prokl.engine.bucket import Bucket
from prokl.engine.graphs import Graphs
from prokl.engine.newcomers import plain_group
from prokl.engine.pieces import DEFAULTS, Piece, Unit, check_reading, clock, may_move, runs, units
from prokl.engine.schedule import Plan
from prokl.engine.seen import Seen
from prokl.engine.signatures import Signatures
from prokl.engine.specified import SpecifiedBucket
from prokl.engine.storage import blank_state, state_dtype
from prokl.engine.validation import (
    PLAIN,
    check_forms,
    check_gradient,
    check_in_memory,
    check_materialised,
    check_matrix_parameter,
    check_names,
    check_writable,
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
        first: number of a part's first matrix in its stack, where a weight is part of one.
        select: chooses who computes; a trace, a count or another machine may put its own choice in the place.

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
        self.forget()

    def forget(self) -> None:
        """Drop everything that is derived from groups and state."""
        self.signatures = Signatures(self.method)  # each for as long as its weight has state
        self.release()

    def release(self) -> None:
        """Drop the buckets, and with them all memory but that of the state's own tensors."""
        self._seen: Seen | None = None  # anew at the next step, wherever that finds anything in it changed
        self._buckets: dict[BucketKey, list[Bucket]] = {}  # each anew with its weights, their state, or how it is kept
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
        said: list[str] = []
        for bucket, plan in self.decide():
            said += self.advance(bucket, plan)
        self.step_adamw()
        return said

    def decide(self) -> list[tuple[Bucket, Plan]]:
        """Check everything, and return the buckets that have something to do, and what. Nothing has moved then."""
        self.look()
        return [(bucket, plan) for bucket in self.buckets() if (plan := bucket.decide()) is not None]

    def advance(self, bucket: Bucket, plan: Plan) -> list[str]:
        """Execute and commit what was decided of one bucket; return warnings."""
        moved, said = self.graphs.execute(bucket, plan)
        return said + bucket.commit(plan, moved)

    def step_adamw(self) -> None:
        """Step the AdamW groups."""
        self.adamw.step([g for g in self.groups if g["algorithm"] == "adamw"], self.state)

    def look(self) -> None:
        """Check what may have changed since the last step, and give newcomers a place in a bucket."""
        seen, self._seen = self._seen, None
        try:
            still = seen is not None and seen.still(self.groups, self.state)
        except (AttributeError, TypeError):  # a weight or its state is something else by now: checked by name
            still = False
        if not still or not all(bucket.holds() for bucket in self.buckets()):
            seen = self._look_anew()
        self._seen = seen

    def _look_anew(self) -> Seen:
        """Check everything, and let the buckets follow it."""
        check_forms(self.groups, self.state)
        check_names(self.groups)
        for index, group in enumerate(self.groups):
            self.check_complete(index, group)
            if group["algorithm"] == "adamw":
                adamw.bring_home(group, self.state)
        all_units = [*units(self.groups)]
        if any(hasattr(unit.p, "device_mesh") for unit in all_units):
            raise Sharded
        self.signatures.keep(self.state)
        for unit in all_units:
            self._check_unit(unit)
        for index, group in enumerate(self.groups):
            self.check_settings(index, group)
        intact = self._intact()
        for index, group in enumerate(self.groups):
            if group["algorithm"] == "adamw":
                adamw.check_options(group, index)
        for unit in all_units:
            self._check_state(unit, intact)
        waiting = self._place(all_units)
        keys = {"param_names", "algorithm", *self.defaults, *DEFAULTS, *adamw.ARGUMENTS}
        return Seen(self.groups, self.state, keys, waiting)

    def check_complete(self, index: int, group: Group) -> None:
        """Raise ValueError for a group that was robbed of a setting."""
        check_choice("algorithm", group.get("algorithm"), ALGORITHMS)
        ours, foreign = self.defaults, {"differentiable"}  # torch's own: into every optimizer that is copied
        if group["algorithm"] == "adamw":
            ours, foreign = self.adamw.defaults(self.defaults["maximize"]), set()
        for key in () if ours.keys() <= group.keys() else ours.keys() - foreign - group.keys():
            raise ValueError(
                f"Group {index} has no {key}, which algorithm={group['algorithm']!r} needs: set it back, to "
                f"{ours[key]!r} for what it is by default."
            )

    def _check_unit(self, unit: Unit) -> None:
        """Raise an error for a weight, or its gradient, that cannot be stepped."""
        p, name, state = unit.p, unit.name, self.state.get(unit.p)
        check_materialised(p, name)
        check_gradient(p, name, unit.matrix or type(p) in PLAIN)
        if unit.matrix:
            self.signatures.check_reading(unit, state)
            _check_matrix(unit, steps=p.grad is not None)  # it may have come by other ways than a group
        if state and state.keys() & ({"exp_avg"} if unit.matrix else {"M_Q", "M_Q.0"}):
            raise ValueError(
                f"Invalid algorithm={unit.group['algorithm']!r}: {name} has the state of another algorithm. Set it "
                "back, or start a new optimizer."
            )

    def check_settings(self, index: int, group: Group) -> None:
        """Raise ValueError for settings out of bounds, or other ones than state was made with.

        Those of a matrix group become Python's own, whatever was set by hand.
        """
        if group["algorithm"] == "adamw":
            check_adamw(group)
        else:
            group.update(plain_group(group, self.defaults))
            self.method.check(group)
            self.signatures.check_settings(index, group, self.state)

    def _intact(self) -> set[Tensor]:
        """Return the weights whose state is what their buckets left."""
        return {
            member.p
            for bucket in self.buckets()
            if bucket.holds()
            for member, entry in zip(bucket.members, bucket.states, strict=True)
            if self.state.get(member.p) is entry
        }

    def _check_state(self, unit: Unit, intact: Collection[Tensor]) -> None:
        """Raise ValueError where a step could not go on from a weight's state; ``intact`` ones need no look."""
        state = self.state.get(unit.p, {})
        if not unit.matrix:
            adamw.check_state(unit.p, unit.name, unit.group, state)
        elif state and unit.p not in intact:
            parts = self.pieces(unit)
            checkpoint.check_state(unit.p, parts, state, self.method, unit.group, self.title)

    def check_new(self, index: int) -> None:
        """Raise ValueError for a new group that cannot be stepped."""
        group = self.groups[index]
        for unit in units(self.groups[index : index + 1], index):
            check_materialised(unit.p, unit.name)
        if group["algorithm"] == "adamw":
            self.adamw.check_new(group, self.defaults)
            return
        self.method.check(group)
        for unit in units(self.groups[index : index + 1], index):
            _check_matrix(unit, steps=True)
            dtype = compute_dtype(unit.p.dtype, state_dtype(group, unit.p))
            self.select(group["backend"], unit.p.device, group["precision"], dtype)

    def pieces(self, unit: Unit) -> list[Piece]:
        """Return what of a weight has a state of its own."""
        return unit.pieces(self.first.get(unit.p, 0))

    def _rank(self, group: Group, piece: Piece) -> int:
        return self.method.rank(group, piece.shape.m, piece.shape.n)

    def _place(self, all_units: Collection[Unit]) -> list[Tensor]:
        """Give every weight that takes part its place in buckets of its shapes, and the others a state; return these.

        Where a weight stands in a batch may decide its rounding: it follows from the groups, not from who came first.
        """
        placed: dict[BucketKey, list[tuple[Piece, Group]]] = {}
        waiting: list[Tensor] = []
        settings = [self._settings(group) for group in self.groups]
        for unit in all_units:
            if not unit.matrix:
                continue
            parts = self.pieces(unit)
            if any(map(self._takes_part, parts)):
                for piece in parts:
                    key = self.shape(unit.group, piece), settings[unit.group_index], may_move(unit.p)
                    placed.setdefault(key, []).append((piece, unit.group))
                continue
            waiting.append(unit.p)
            if unit.p.requires_grad:
                self.begin(unit)
        self._fill(placed)
        self.signatures.remember(all_units, self.state)
        return waiting

    def begin(self, unit: Unit) -> dict[str, Any]:
        """Return the state of a weight that has not begun, made where there is none.

        A checkpoint has an entry for every weight, or it could not be loaded into one that has begun.
        """
        for piece in self.pieces(unit):
            if "step" + piece.suffix not in self.state[unit.p]:
                blank = blank_state(piece, self.method, self._rank(unit.group, piece), unit.group)
                self.state[unit.p].update(blank)
        return self.state[unit.p]

    def _fill(self, placed: dict[BucketKey, list[tuple[Piece, Group]]]) -> None:
        """Make the buckets of these pieces; one that is as it would be made stays, with its graphs."""
        old = {(bucket.members[0].p, bucket.members[0].suffix): bucket for bucket in self.buckets()}
        filled: dict[BucketKey, list[Bucket]] = {}
        for key, pairs in placed.items():
            (m, n, rank, dtype, device), first = key[0], pairs[0][1]
            each = self.method.workspace(m, n, rank) * compute_dtype(dtype, state_dtype(first, pairs[0][0].p)).itemsize
            rest, filled[key] = iter([group for _, group in pairs]), []
            for run in runs([piece for piece, _ in pairs], each, workspace(device)):
                states, groups = [self.state[piece.p] for piece in run], [*islice(rest, len(run))]
                bucket = old.get((run[0].p, run[0].suffix))
                kind = SpecifiedBucket if groups[0]["backend"] == "reference" else Bucket
                if type(bucket) is kind and bucket.is_of(run, states, groups[0]):
                    bucket.follow(groups)
                else:
                    records = [self.signatures.of(piece.p) for piece in run]
                    try:
                        bucket = kind(run, groups, states, records, self.method, rank, self.select)
                    except RuntimeError as error:  # torch's of memory, on whichever device
                        raise type(error)(_no_room(run, error)) from error
                filled[key].append(bucket)
        self._buckets = filled
        for bucket in self.buckets():
            for record in bucket.records:
                record.own_master = MASTER in bucket.stacks
        self.graphs.keep(self.buckets())

    def _takes_part(self, piece: Piece) -> bool:
        """Return True if a weight has a gradient, has begun, or has its state in the stacks of a bucket that was."""
        state = self.state.get(piece.p, {})
        M = state.get("M_Q" + piece.suffix)
        return piece.p.grad is not None or max(clock(piece, state)) >= 0 or (M is not None and M._is_view())

    def shape(self, group: Group, piece: Piece) -> Shape:
        """Return what a piece must have in common with others to be stepped with them, settings aside."""
        return piece.shape.m, piece.shape.n, self._rank(group, piece), piece.p.dtype, piece.p.device

    def _settings(self, group: Group) -> tuple[Any, ...]:
        """Return the settings that weights must have alike to share a bucket."""
        per_member = {"lr", "weight_decay", "algorithm", *DEFAULTS}
        return tuple(plain(group.get(key)) for key in self.defaults if key not in per_member)

    def counts(self, key: str) -> dict[str, int]:
        """Add up a counter of the state by weight; reads the device."""
        totals: dict[str, int] = {}
        for unit in units(self.groups):
            if key == "skipped" and unit.p in self.adamw.skipped:
                totals[unit.name] = self.adamw.skipped[unit.p]
            for piece in self.pieces(unit) if unit.matrix else ():
                if key + piece.suffix in self.state.get(unit.p, {}):
                    totals[unit.name] = totals.get(unit.name, 0) + int(self.state[unit.p][key + piece.suffix].sum())
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
        for unit in units(self.groups):
            if unit.group_index in restored:
                self.signatures.remember([unit], self.state)
                if unit.group["bf16_weights"] == MASTER:  # also no longer in bfloat16
                    self.signatures.of(unit.p).own_master = True


def _check_matrix(unit: Unit, steps: bool) -> None:
    """Raise ValueError for a weight that the matrix method cannot read, or write where it ``steps``."""
    check_matrix_parameter(unit.p, unit.name)
    check_writable(unit.p, unit.name)
    check_reading(unit.p, unit.name, unit.how)
    if steps:
        check_in_memory(unit.p, unit.name)


def _no_room(run: list[Piece], error: Exception) -> str:
    others = f" and {len(run) - 1} more" if len(run) > 1 else ""
    return (
        f"No state for {run[0].name} of shape {tuple(run[0].p.shape)}{others}: {error} A weight with a long side, as "
        'an embedding, may go into a group {"params": [...], "algorithm": "adamw", "lr": ...}.'
    )
