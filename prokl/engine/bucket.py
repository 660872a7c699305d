"""One bucket: the stacked state of all weights of one oriented shape, and one step of them.

A step has three phases. All buckets decide before the first one executes; each is committed before the next one
executes.

* :meth:`Bucket.decide`, on the host: clocks say which matrices begin, step and refresh; the I/O finds gradients and
  weights and writes its tables. Nothing waits for the device.
* :meth:`Bucket.execute`, on the device: the linear algebra of :mod:`prokl.algorithm`, which a CUDA graph captures.
* :meth:`Bucket.commit`, on the host: clocks move last of all, so that a step that fails on the way is not counted.

Dimension key: B matrices (a 3-D parameter is several), m short side, n long side, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prokl.algorithm.algebra import Factor
from prokl.algorithm.evidence import ALWAYS_MOVE, in_range
from prokl.algorithm.initial import can_go_on
from prokl.algorithm.method import Method
from prokl.algorithm.reference import in_eigenbases, in_weight_coordinates, refresh_eigenbases
from prokl.algorithm.settings import Group, plain
from prokl.algorithm.shapes import State, compute_dtype, widest
from prokl.backends import select
from prokl.backends.device import on_device, without_autocast, workspace
from prokl.backends.io import Layout, Member, Rates, Slot, TorchIO
from prokl.backends.rounding import MASTER, Rounding, mode_of
from prokl.backends.select import Backend
from prokl.engine.weights import Weight, clock, layout_of_matrix, state_dtype, stored_clock

NEVER_MOVED_AFTER = 100
"""Calls with a gradient after which a weight that has never moved is warned about."""

LOOKS = 10
"""Calls with a gradient after which a matrix that has not begun is looked at in every tenth alone: a look waits for the
device, and keeps CUDA graphs from the whole bucket. Between looks M_Q keeps the latest usable gradient."""

KEPT = 32
"""Sets of rows that a bucket keeps on the device: clocks that drifted apart make ever new ones."""


class Plan(NamedTuple):
    """The host's decisions about one step of a bucket; equal plans do the same work on the device.

    Attributes:
        has_grad: of each member.
        initialising: matrices that have not begun and are looked at: a gradient that is finite and not zero, this one
            or the latest since the last look, initialises their state.
        waiting: matrices that have not begun, have a gradient and are not looked at.
        stepping: matrices that have begun and have a gradient; those whose gradient is not finite will not move.
        refreshing: stepping matrices whose eigenbases are refreshed after this step.
    """

    has_grad: tuple[bool, ...]
    initialising: tuple[int, ...]
    waiting: tuple[int, ...]
    stepping: tuple[int, ...]
    refreshing: tuple[int, ...]


class Rows(NamedTuple):
    """Some, but not all, of the matrices of a bucket, on its device: their indices (k,) int64, a mask (B,) bool."""

    indices: Tensor
    mask: Tensor


def _identity(member: Member) -> tuple[Any, ...]:
    p = member.p
    return id(p), member.name, member.shape, member.suffix, member.first, p.dtype, p.device


class Bucket:
    """Weights, or pieces of weights, of one oriented shape, rank, dtype and device.

    It owns their stacked state, into which ``optimizer.state[p]`` holds views. Their groups may be several, with an lr
    and a weight decay each, and all other settings alike.

    Attributes:
        clocks: by member its state, the key of its steps there and what the last step left under it.
        backend: who steps it. io: its reading and writing, with it.
        workspace: bytes of temporary memory that a step takes at most.
        group: one of the groups. h: its hyper-parameters without lr and weight decay.
        steps: the clock of every matrix: 0 at its initialising gradient, and one more at every later call with a
            gradient; before, -1 and one less at every call with a gradient.

    Args:
        members: in the order of their groups, without rows so far.
        weights: each one's.
        states: what ``optimizer.state`` holds for each one's parameter: empty for one that has none yet.
    """

    def __init__(
        self,
        members: Sequence[Member],
        weights: Sequence[Weight],
        states: Sequence[dict[str, Any]],
        method: Method,
    ) -> None:
        self.method, group = method, weights[0].group
        self.states, self._made_of = list(states), list(map(_identity, members))
        self.members: list[Member] = []
        for member in members:
            start = self.members[-1].rows.stop if self.members else 0
            self.members.append(replace(member, rows=range(start, start + member.shape.count)))
        first, count = self.members[0], self.members[-1].rows.stop
        m, n, device = first.shape.m, first.shape.n, first.p.device
        self._state_dtype = state_dtype(group, first.p)
        self.dtype = compute_dtype(first.p.dtype, self._state_dtype)
        self.layout = Layout(count, m, n, self.dtype, first.p.dtype, device)
        self.rank = method.rank(group, m, n)
        self.workspace = count * method.workspace(m, n, self.rank) * self.dtype.itemsize
        self.stacks: dict[str, Tensor] = {}
        for key, (tail, dtype) in layout_of_matrix(first, method, group).items():
            self.stacks[key] = torch.zeros((count, *tail), dtype=dtype, device=device)
        names = [f"{member.name} {member.first + c}" for member in members for c in range(member.shape.count)]
        self.rounding = Rounding(mode_of(group, first.p.dtype), names, [member.weight() for member in self.members])
        if self.rounding.master is not None:
            self.stacks[MASTER] = self.rounding.master
        self.skipped = torch.zeros(len(self.members), dtype=torch.int64, device=device)
        self.backend: Backend
        self.io: TorchIO
        self._asked: tuple[Any, Any] | None = None
        self._left: int | None = None  # writes into the stacks, as of which steps can go on
        self._messages: list[str] = []
        self.follow(weights)
        self.steps = [step for member, state in zip(members, states, strict=True) for step in clock(member, state)]
        self._every = tuple(range(count))
        self._views = [view for i in range(len(self.members)) for view in self._adopt(i)]
        self._addresses = [view.data_ptr() for _, _, view in self._views]
        self._write_clocks()
        self._parameters = [member.p for member in self.members]
        self._converted = [
            key for key, t in self.stacks.items() if key not in ("M_Q", MASTER) and t.dtype != self.dtype
        ]
        self._kept_rows: dict[tuple[int, ...], Rows] = {}
        scales = [member.shape.aspect_scale for member in self.members for _ in member.rows]
        self.aspect_scale = torch.tensor(scales, dtype=self.dtype, device=device)

    def follow(self, weights: Sequence[Weight]) -> None:
        """Take settings, once they have been checked, from the groups of these weights, one a member.

        A backend that is refused, or has no memory for its tables, leaves everything as it was.
        """
        group = weights[0].group
        asked = group["backend"], group["precision"]
        if asked != self._asked:
            backend = select.select(asked[0], self.layout.device, asked[1], self.dtype)
            self.io, self.backend = backend.io(self.members, self.layout, self.rounding), backend
            self._asked = asked
        self.weights, self.group = list(weights), group
        a, without_rates = self.layout, {**group, "lr": 0.0, "weight_decay": 0.0}
        self.h = self.method.hyper(without_rates, a.m, a.n, a.dtype, a.device)
        runs = [[*run] for _, run in groupby(enumerate(weights), key=lambda each: id(each[1].group))]
        self._groups = [(run[0][1].group, range(run[0][0], run[-1][0] + 1)) for run in runs]

    def _adopt(self, i: int) -> list[tuple[dict[str, Any], str, Tensor]]:
        """Copy a member's state into the stacks; leave views of them in its place, and return these with their keys."""
        member, state = self.members[i], self.states[i]
        views = [(state, key + member.suffix, member.part(stack)) for key, stack in self.stacks.items()]
        views.append((state, "skipped" + member.suffix, self.skipped[i]))
        begun = "step" + member.suffix in state
        for _, key, view in views:
            if begun and (key in state or key != MASTER + member.suffix):  # a master it lacks starts as the weight
                view.copy_(state[key])
            state[key] = view
        if MASTER not in self.stacks:
            master, shape = state.get(MASTER + member.suffix), state["M_Q" + member.suffix].shape
            if isinstance(master, Tensor) and (master.shape, master.dtype) == (shape, torch.float32):
                del state[MASTER + member.suffix]  # the weight has become wider, or is rounded otherwise
        return views

    def is_of(self, members: Sequence[Member], states: Sequence[dict[str, Any]], group: Group) -> bool:
        """Return True if a bucket of these, with such settings, would be this one.

        It has their state then: the very views that were handed out, in the memory that they had.
        """
        return (
            list(map(_identity, members)) == self._made_of
            and all(map(is_, states, self.states))
            and self.rounding.mode == mode_of(group, members[0].p.dtype)
            and all(state.get(key) is view for state, key, view in self._views)
            and [view.data_ptr() for _, _, view in self._views] == self._addresses
            and all(state.get(key) is left for state, key, left in self.clocks)
        )

    def _write_clocks(self) -> None:
        self.clocks: list[tuple[dict[str, Any], str, Any]] = []
        for member, state in zip(self.members, self.states, strict=True):
            start, key = member.rows.start, "step" + member.suffix
            stack = member.p.ndim == 3
            state[key] = stored_clock(member.p, self.steps[start : member.rows.stop]) if stack else self.steps[start]
            self.clocks.append((state, key, state[key]))

    def decide(self) -> Plan | None:
        """Return what this step does, with the I/O ready for it; None when there is no gradient."""
        present = []
        for p in self._parameters:
            present.append(p.grad is not None)
        has_grad = tuple(present)
        if self._writes() != self._left:
            self._begin_what_was_zeroed()
        if not any(has_grad):
            return None
        steps, first = self.steps, self.steps[0]
        if all(has_grad) and first >= 0 and steps.count(first) == len(steps):  # as usual, and quicker
            refreshes = self.method.refreshes(first + 1, self.group)
            plan = Plan(has_grad, (), (), self._every, self._every if refreshes else ())
        else:
            rows = [b for member, has in zip(self.members, has_grad, strict=True) if has for b in member.rows]
            stepping = tuple(b for b in rows if steps[b] >= 0)
            refreshing = tuple(b for b in stepping if self.method.refreshes(steps[b] + 1, self.group))
            new = [b for b in rows if steps[b] < 0]
            due = bool(new) and min(steps[b] for b in new) % LOOKS == 0  # all that wait are looked at together
            looked_at = tuple(b for b in new if due or steps[b] >= -LOOKS)
            waiting = tuple(b for b in new if not due and steps[b] < -LOOKS)
            plan = Plan(has_grad, looked_at, waiting, stepping, refreshing)
        if self.rounding.keys is not None:
            self.rounding.locate(steps)
        rates: list[Rates] = []
        for group, members in self._groups:
            lr, decay = group["lr"], plain(group["weight_decay"])
            # A tensor has no dimension, so that it multiplies as a number does.
            rates.append(Rates(lr.reshape(()) if isinstance(lr, Tensor) else plain(lr), decay, members))
        self.io.locate(rates)
        return plan

    @without_autocast  # trainers may step inside of theirs
    def execute(self, plan: Plan) -> tuple[int, ...]:
        """Do the device's work of one step, after :meth:`decide`.

        Returns:
            The matrices that moved, as far as the host knows.
        """
        gathered = self.io.gather(self.group["maximize"], self.skipped)
        G, finite, usable = gathered
        # The paper's form moves on without gradient.
        may_step = finite if self.group["clip_threshold"] is None else usable
        # Reading the device is allowed where it costs nothing, or where some matrix may begin.
        moving, unknown = plan.stepping, True
        if self.backend.ops.host_readable or plan.initialising:
            moves, begins = torch.stack([may_step, usable]).tolist()
            moving, unknown = moving if all(moves) else tuple([b for b in moving if moves[b]]), False
            if plan.initialising:
                self._initialise([b for b in plan.initialising if begins[b]], gathered.whole())
                if late := [b for b in plan.initialising if not begins[b] and self.steps[b] < -LOOKS]:
                    kept = self.stacks["M_Q"].flatten(1).float().norm(dim=1).tolist()
                    self._initialise([b for b in late if 0 < kept[b] < math.inf], self.stacks["M_Q"])
        if plan.waiting:
            some = self.rows(plan.waiting)
            masks = (usable,) if some is None else (usable, some.mask)
            self.io.store([Slot(self.stacks["M_Q"], gathered.whole(), masks)])
        if moving:
            self._step(G, moving, may_step if unknown else None)
        if plan.refreshing:  # whatever this gradient is: zero ones must not keep bases from following the factors
            self._refresh(plan.refreshing, finite)
        return moving

    def commit(self, plan: Plan, moved: Sequence[int]) -> list[str]:
        """Move the clocks, last of all. M and ``skipped`` may be ahead of them where a step failed on the way.

        Returns:
            Warnings about state that begins anew, and weights that never move.
        """
        self.io.release()
        self._left, rows, written = self._writes(), set(moved), []
        messages, self._messages = self._messages, []
        for i, member in enumerate(self.members):
            if moves := not rows.isdisjoint(member.rows):
                written.append(member.p)
            idle = self.weights[i].idle
            if plan.has_grad[i] and (count := idle.get(member.suffix, 0)) >= 0:
                idle[member.suffix] = -1 if moves else count + 1
                if idle[member.suffix] == NEVER_MOVED_AFTER:
                    idle.update(dict.fromkeys(idle, -1))  # one warning for all of its pieces
                    messages.append(
                        f"{member.name}{' at least' if member.suffix else ''} has not moved in {NEVER_MOVED_AFTER} "
                        "steps with a gradient: every gradient was zero, too small to square, or not finite "
                        "(optimizer.skipped() counts those). Check the loss scale and whether the weight is used."
                    )
        torch.autograd.graph.increment_version(written)  # a kernel writes past autograd's own count
        for b in plan.stepping:  # skipped ones too
            self.steps[b] += 1
        for b in (*plan.initialising, *plan.waiting):
            self.steps[b] -= self.steps[b] < 0
        self._write_clocks()
        return messages

    def _writes(self) -> int:
        """Return PyTorch's count of writes into the stacks, by steps and by whoever has a view of them."""
        count = 0
        for stack in self.stacks.values():
            count += 0 if stack.is_inference() else stack._version
        return count

    def _begin_what_was_zeroed(self) -> None:
        """Let matrices begin anew whose state was written since the last step, and no step can go on from.

        This reads the device, once after the state was changed or replaced by hand.
        """
        self._left, steps = self._writes(), self.steps
        if max(steps) < 0:
            return
        state = {key: stack for key, stack in self.stacks.items() if key not in (MASTER, "clipped")}
        held = [stack.reshape(len(stack), -1).any(dim=1) for stack in state.values()]
        goes_on, in_part = torch.stack([can_go_on(state), torch.stack(held).any(dim=0)]).tolist()
        begin = [b for b in self._every if steps[b] >= 0 and not goes_on[b]]
        for b in begin:
            steps[b] = -1
            self.stacks["M_Q"][b].zero_()  # or it would pass for a gradient to begin with
        self._write_clocks()
        if some := [b for b in begin if in_part[b]]:
            names = [member.name for member in self.members if not set(some).isdisjoint(member.rows)]
            self._messages.append(
                f"The state of {', '.join(names[:3])}{', ...' * (len(names) > 3)} has zero inverse roots, or bases "
                f"that are not orthonormal, in {len(some)} of {self.layout.count} matrices, which no step can go on "
                "from: they begin anew with the next gradient. To reset a weight, remove its state, "
                "optimizer.state.pop(p), or zero all of it."
            )

    def _initialise(self, rows: list[int], G: Tensor) -> None:
        """Start the matrices ``rows``, so many at a time as the workspace holds in float64; on a CPU for want of it."""
        device = self.layout.device if widest(self.layout.device) == torch.float64 else torch.device("cpu")
        elements = self.method.workspace(self.layout.m, self.layout.n, self.rank)
        most = max(1, workspace(self.layout.device) // (elements * torch.float64.itemsize))
        for first in range(0, len(rows), most):
            some = on_device(rows[first : first + most], torch.int64, self.layout.device)
            first_gradients = G[some].to(device, self.dtype)
            for key, value in self.method.initialise(first_gradients, self.rank, self.group).items():
                self.stacks[key].index_copy_(0, some, value.to(self.stacks[key]))
        for b in rows:
            self.steps[b] = 0

    def _step(self, G: Factor, moving: tuple[int, ...], may_step: Tensor | None) -> None:
        """Step the ``moving`` matrices, of which ``may_step`` (B,) masks those that the host cannot know of."""
        state, some = self._arithmetic(), self.rows(moving)
        active = may_step if some is None else some.mask if may_step is None else some.mask & may_step
        direction, new, evident = self.method.step(self.backend.ops, G, state, self.h, self.aspect_scale, active)
        self.io.apply(direction, moving, active)
        if evident is not None and self.backend.ops.host_readable and bool(evident.all()):
            evident = None
        moves = () if active is None else (active,)
        self._store(new, moves if evident is None else (*moves, evident), moves)

    def _refresh(self, rows: tuple[int, ...], finite: Tensor) -> None:
        """Refresh the bases of those of ``rows`` whose gradient is finite."""
        state, some = self._arithmetic(), self.rows(rows)
        if some is None:
            new = self.method.refresh(self.backend.ops, state)
        else:
            part = self.method.refresh(self.backend.ops, {key: value[some.indices] for key, value in state.items()})
            new = {key: state[key].to(value.dtype).index_copy(0, some.indices, value) for key, value in part.items()}
        masks: tuple[Tensor, ...] = (finite,) if some is None else (finite, some.mask)
        if some is None and self.backend.ops.host_readable and bool(finite.all()):
            masks = ()
        self._store(new, masks, masks)

    def _arithmetic(self) -> State:
        """Return the state without masters in the arithmetic dtype, M_Q as it is kept: its passes convert it."""
        state = dict(self.stacks)
        state.pop(MASTER, None)
        if self._converted:
            fresh = {key: torch.empty_like(state[key], dtype=self.dtype) for key in self._converted}
            self.io.store([Slot(value, state[key]) for key, value in fresh.items()])
            state |= fresh
        return state

    def _store(self, new: State, learns: tuple[Tensor, ...], moves: tuple[Tensor, ...]) -> None:
        """Store what is ``new``, where all these masks are True: ALWAYS_MOVE by the second ones."""
        slots = []
        for key, stack in self.stacks.items():
            if key in new and new[key] is not stack:
                slots.append(Slot(stack, new[key], moves if key in ALWAYS_MOVE else learns))
        self.io.store(slots)

    def rows(self, rows: tuple[int, ...]) -> Rows | None:
        """Return ``rows``, in ascending order, on the device; None for all.

        The sets used last are kept: making one costs a copy to the device, which a CUDA graph cannot capture.
        """
        if len(rows) == self.layout.count:
            return None
        some = self._kept_rows.pop(rows, None)
        if some is None:
            index = on_device(rows, torch.int64, self.layout.device)
            mask = torch.zeros(self.layout.count, dtype=torch.bool, device=self.layout.device)
            some = Rows(index, mask.index_fill_(0, index, True))
        self._kept_rows[rows] = some  # the last used is the last to go
        if len(self._kept_rows) > KEPT:
            del self._kept_rows[next(iter(self._kept_rows))]
        return some


class SpecifiedBucket(Bucket):
    """A :class:`Bucket` that the specification steps, one matrix at a time: ``backend="reference"``."""

    def _step(self, G: Tensor, moving: tuple[int, ...], may_step: Tensor | None) -> None:
        state, some, moved = self._arithmetic(), self.rows(moving), set(moving)
        for lr, weight_decay, numbers in self.io.rates:
            h = replace(self.h, lr=lr, weight_decay=weight_decay)
            for member in self.members[numbers.start : numbers.stop]:
                if moved.isdisjoint(member.rows):
                    continue
                weight, rows = member.weight(), slice(member.rows.start, member.rows.stop)
                W = self.rounding.exact(weight, rows).to(self.dtype, copy=True)
                for b in moved.intersection(member.rows):
                    before = in_weight_coordinates({key: value[b].to(self.dtype) for key, value in state.items()})
                    W[b - rows.start], after = self.method.reference_step(
                        W[b - rows.start],
                        G[b],
                        before,
                        h,
                        aspect_scale=float(self.aspect_scale[b]),
                        stored=self._state_dtype,
                    )
                    new = in_eigenbases(after)
                    roots = [value.reshape(1, -1) for key, value in new.items() if key.startswith("inv_sqrt")]
                    learns = h.clip_threshold is None or bool(in_range(roots, self.layout.n, self._state_dtype))
                    for key, value in new.items():
                        if learns or key in ALWAYS_MOVE:
                            self.stacks[key][b] = value.to(self.stacks[key].dtype)
                self.rounding.write(weight, W, rows, None if some is None else some.mask[rows])
                member.write(weight)

    def _refresh(self, rows: tuple[int, ...], finite: Tensor) -> None:
        """Refresh in the coordinates of the eigenbases, where these are I: there rounding leaves idle rows alone.

        The paper's text is the same in any orthonormal coordinates.
        """
        state = self._arithmetic()
        for b in (b for b in rows if finite[b]):
            own = {key: value[b].to(self.dtype) for key, value in state.items()}
            bases = {key: Q for key, Q in own.items() if key in ("Q_L", "Q_R")}
            eyes = {key: torch.eye(len(Q), dtype=Q.dtype, device=Q.device) for key, Q in bases.items()}
            here = in_weight_coordinates(own | eyes)
            new = in_eigenbases(here | refresh_eigenbases(here))
            for key, Q in bases.items():
                turned = Q @ new[key]
                new[key] = 1.5 * turned - 0.5 * turned @ (turned.mT @ turned)
            for key, value in new.items():
                self.stacks[key][b] = value.to(self.stacks[key].dtype)
