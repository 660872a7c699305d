"""One bucket: the stacked state of all weights of one oriented shape, and one step of them.

A step has three phases, which the optimizer visits once each:

* :meth:`Bucket.decide`, on the host: clocks say which matrices begin, step and refresh; the I/O finds gradients and
  weights and writes its tables. Nothing waits for the device.
* :meth:`Bucket.execute`, on the device: the linear algebra of :mod:`prokl.algorithm`. What a CUDA graph captures.
* :meth:`Bucket.commit`, on the host: clocks move last of all, so that a step that fails on the way is not counted.

All buckets decide before the first one executes; each is committed before the next one executes.

A bucket owns the stacks; ``optimizer.state[p]`` holds views into them.

Dimension key: B matrices (a 3-D parameter is several), m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.evidence import ALWAYS_MOVE, in_range
from prokl.algorithm.method import Group, Method
from prokl.algorithm.primitives import State
from prokl.algorithm.shapes import compute_dtype, widest
from prokl.backends.device import on_device, without_autocast, workspace
from prokl.backends.io import BucketIO, Layout, Member, Slot
from prokl.backends.rounding import MASTER, Rounding, exact, mode_of
from prokl.backends.select import Backend, select
from prokl.engine.pieces import Piece, clock, stored_clock
from prokl.engine.rows import RowSets
from prokl.engine.schedule import Plan, Schedule
from prokl.engine.storage import layout_of_state, state_dtype

NEVER_MOVED_AFTER = 100
"""Calls with a gradient after which a weight that has never moved is warned about."""


class Bucket:
    """Weights, or pieces of weights, of one group, oriented shape, rank, dtype and device.

    Attributes:
        backend: who steps it; None before the first :meth:`decide`. io: its reading and writing, with it.

    Args:
        pieces: in the order of their group.
        states: what ``optimizer.state`` holds for each one's parameter: empty for one that has none yet.
        method: the matrix method.
        rank: effective rank.
        group: the parameter group.
        idle: calls with a gradient in which a piece did not move, by parameter and suffix, -1 once it has; outlives the
            bucket.
        masters: parameters whose "master" in the state is the optimizer's, if they have one, and no wrapper's.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        states: Sequence[dict[str, Any]],
        method: Method[Any],
        rank: int,
        group: Group,
        idle: dict[tuple[Tensor, str], int],
        masters: Collection[Tensor],
    ) -> None:
        self.method, self.rank, self.group, self.idle = method, rank, group, idle
        self.members: list[Member] = []
        for piece in pieces:
            start = self.members[-1].rows.stop if self.members else 0
            rows = range(start, start + piece.shape.count)
            self.members.append(Member(piece.p, piece.name, piece.shape, rows, piece.suffix))
        first, count = self.members[0], self.members[-1].rows.stop
        m, n, device = first.shape.m, first.shape.n, first.p.device
        self.layout = Layout(
            count, m, n, compute_dtype(first.p.dtype, state_dtype(group, first.p)), first.p.dtype, device
        )
        self.dtype = self.layout.dtype
        self._state_dtype = state_dtype(group, first.p)
        self.stacks: dict[str, Tensor] = {}
        for key, (tail, dtype) in layout_of_state(pieces[0], method, rank, group).items():
            self.stacks[key] = torch.zeros((count, *tail), dtype=dtype, device=device)
        numbers = [range(piece.first, piece.first + piece.shape.count) for piece in pieces]
        names = [f"{piece.name} {c}" for piece, own in zip(pieces, numbers, strict=True) for c in own]
        mode = mode_of(group, first.p.dtype)
        self.rounding = Rounding(mode, names, [member.weight() for member in self.members])
        if self.rounding.master is not None:
            self.stacks[MASTER] = self.rounding.master
        self.skipped = torch.zeros(len(self.members), dtype=torch.int64, device=device)
        self.views: list[dict[str, Tensor]] = []
        self.schedule = Schedule(
            [member.rows for member in self.members],
            [step for piece, state in zip(pieces, states, strict=True) for step in clock(piece, state)],
        )
        for i, state in enumerate(states):
            self._adopt(i, state, pieces[i].p in masters)
        self.backend: Backend | None = None
        self.io: BucketIO
        self._asked: tuple[str | None, str | None] = None, None
        self.rows = RowSets(count, device)
        self._zero, self._one = (torch.full((), x, dtype=self.dtype, device=device).expand(count) for x in (0.0, 1.0))
        scales = [member.shape.aspect_scale for member in self.members for _ in member.rows]
        self.aspect_scale = torch.tensor(scales, dtype=self.dtype, device=device)

    def _adopt(self, i: int, state: dict[str, Any], own_master: bool) -> None:
        """Copy a parameter's state into the stacks and leave views of them in its place."""
        member = self.members[i]
        views = {"skipped": self.skipped[i], **{key: member.part(stack) for key, stack in self.stacks.items()}}
        if "step" + member.suffix in state:
            for key, view in views.items():
                if key + member.suffix in state or key != MASTER:  # masters that the state lacks start as the weights
                    view.copy_(state[key + member.suffix])
        if own_master and MASTER not in self.stacks:
            self._give_up_master(member, state, views["M"].shape)
        self.views.append({key + member.suffix: view for key, view in views.items()})
        state.update(self.views[i] | {"step" + member.suffix: self._clock(member)})

    def _give_up_master(self, member: Member, state: dict[str, Any], shape: torch.Size) -> None:
        """Take a master out of the state; a weight that has become wider than bfloat16 keeps its bits."""
        master = state.get(MASTER + member.suffix)
        if isinstance(master, Tensor) and (master.shape, master.dtype) == (shape, torch.float32):
            W = member.weight()
            W.copy_(exact(W, master.to(W.device).reshape(W.shape)))
            member.write(W)
            del state[MASTER + member.suffix]

    def holds(self, states: Sequence[dict[str, Any]]) -> bool:
        """Return True if the weights and the views handed out are still what they were when the bucket was made."""
        return all(
            member.p.dtype == self.layout.weight_dtype
            and self.rounding.mode == mode_of(self.group, member.p.dtype)
            and member.p.device == self.layout.device
            and all(state.get(key) is view for key, view in views.items())
            for member, state, views in zip(self.members, states, self.views, strict=True)
        )

    def _clock(self, member: Member) -> int | Tensor:
        return stored_clock(member.p, self.schedule.steps[member.rows.start : member.rows.stop])

    def decide(self) -> Plan | None:
        """Return what this step does, with the I/O ready for it; None when there is no gradient."""
        has_grad = [member.p.grad is not None for member in self.members]
        plan = self.schedule.decide(has_grad, self.group["precondition_frequency"])
        if plan is not None:
            if self.backend is None or (self.group["backend"], self.group["precision"]) != self._asked:
                self._choose_backend(self.group["backend"], self.group["precision"])
            self.rounding.locate(self.schedule.steps)
            self.io.locate(self.method.hyper(self.group))
        return plan

    def _choose_backend(self, asked: str | None, precision: str | None) -> None:
        """Take another backend; one that is refused, or has no memory for its tables, leaves everything as it was."""
        backend = select(asked, self.layout.device, precision)
        if backend is not self.backend:
            self.io = backend.io(self.members, self.layout, self.rounding)
            self.backend = backend
        self._asked = asked, precision

    @without_autocast  # trainers may step inside of theirs
    def execute(self, plan: Plan) -> tuple[int, ...]:
        """Do the device's work of one step, after :meth:`decide`.

        Returns:
            The matrices that moved, as far as the host knows.
        """
        assert self.backend is not None
        G, finite, usable = self.io.gather(self.group["maximize"], self.skipped)
        steps = finite if self.group["clip_threshold"] is None else usable  # the paper's form moves on without gradient
        # Reading the device is allowed where it costs nothing, or while some matrix has still to begin.
        known = None
        if self.backend.host_readable or plan.initialising:
            known, begins = torch.stack([steps, usable]).tolist()
            if rows := [b for b in plan.initialising if begins[b]]:
                self._initialise(rows, G)
        moving = tuple(b for b in plan.stepping if known is None or known[b])
        if moving:
            self._step(G, moving, steps if known is None else None, self.backend)
        if plan.refreshing:  # whatever this gradient is: zero ones must not keep bases from following the factors
            self._refresh(plan.refreshing, finite, self.backend)
        return moving

    def commit(self, plan: Plan, moved: Sequence[int], states: Sequence[dict[str, Any]]) -> list[str]:
        """Move the clocks, last of all. M and ``skipped`` may be ahead of them where a step failed on the way.

        Returns:
            Warnings about weights that never move.
        """
        self.io.release()
        rows = set(moved)
        moved_members = [not rows.isdisjoint(member.rows) for member in self.members]
        # A kernel writes past autograd's own count.
        torch.autograd.graph.increment_version(
            [member.p for member, own in zip(self.members, moved_members, strict=True) if own]
        )
        self.schedule.advance(plan)
        messages = []
        for member, state, has_grad, own in zip(self.members, states, plan.has_grad, moved_members, strict=True):
            state["step" + member.suffix] = self._clock(member)
            if has_grad and self._never_moves(member, own):
                messages.append(
                    f"{member.name} has not moved in {NEVER_MOVED_AFTER} steps with a gradient: every gradient was "
                    "zero, too small to square, or not finite (optimizer.skipped() counts those). Check the loss scale "
                    "and whether the weight is used."
                )
        return messages

    def _never_moves(self, member: Member, moved: bool) -> bool:
        """Return True once, when a weight has had gradients for long and has never moved."""
        count = self.idle.get((member.p, member.suffix), 0)
        if count < 0:
            return False
        last = count + 1 == NEVER_MOVED_AFTER
        self.idle[member.p, member.suffix] = -1 if moved or last else count + 1
        return last and not moved

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
        self.schedule.begin(rows)

    def _step(self, G: Tensor, moving: tuple[int, ...], steps: Tensor | None, backend: Backend) -> None:
        """Step the ``moving`` matrices, of which ``steps`` (B,) masks those that the host cannot know of."""
        h, state, ops = self.method.hyper(self.group), self._arithmetic("M"), backend.ops
        if ops is None:
            self._reference_step(G, state, h, moving)
            return
        active = self._active(moving, steps)
        direction, new, evident = self.method.step(G, state, h, self.aspect_scale, active, ops)
        self.io.apply(direction, moving, active)
        if evident is not None and backend.host_readable and bool(evident.all()):
            evident = None
        moves, learns = (tuple(t for t in masks if t is not None) for masks in ([active], [active, evident]))
        self._store(new | {"stale": self._one}, learns, moves)

    def _refresh(self, rows: tuple[int, ...], finite: Tensor, backend: Backend) -> None:
        """Refresh the bases of ``rows`` whose factors have changed since the last time and whose gradient is finite."""
        due, some = torch.logical_and(finite, self.stacks["stale"]), self.rows.of(rows)
        state = self._arithmetic()
        if backend.ops is None:
            for b in (b for b in rows if due[b]):
                for key, value in self.method.reference_refresh({k: v[b] for k, v in state.items()}).items():
                    self.stacks[key][b] = value.to(self.stacks[key].dtype)
                self.stacks["stale"][b] = 0.0
            return
        new = self.method.refresh_eigenbases(state, None if some is None else some.indices, backend.ops)
        masks: tuple[Tensor, ...] = (due,) if some is None else (due, some.mask)
        if some is None and backend.host_readable and bool(due.all()):
            masks = ()
        self._store(new | {"stale": self._zero}, masks, masks)

    def _arithmetic(self, *besides: str) -> State:
        """Return the state in the arithmetic dtype, of M and the masters only what is asked for: as they are kept."""
        state = {key: stack for key, stack in self.stacks.items() if key in besides or key not in ("M", MASTER)}
        others = [key for key, stack in state.items() if key not in besides and stack.dtype != self.dtype]
        fresh = {key: torch.empty_like(state[key], dtype=self.dtype) for key in others}
        self.io.store([Slot(value, state[key]) for key, value in fresh.items()])
        return state | fresh

    def _store(self, new: State, learns: tuple[Tensor, ...], moves: tuple[Tensor, ...]) -> None:
        """Store what is ``new``, where all these masks are True: ALWAYS_MOVE by the second ones."""
        self.io.store(
            [
                Slot(stack, new[key], moves if key in ALWAYS_MOVE else learns)
                for key, stack in self.stacks.items()
                if key in new and new[key] is not stack
            ]
        )

    def _active(self, moving: tuple[int, ...], steps: Tensor | None) -> Tensor | None:
        """Return a (B,) mask of the matrices that move; None when the host knows that all do."""
        rows = self.rows.of(moving)
        if rows is None or steps is None:
            return steps if rows is None else rows.mask
        return rows.mask & steps

    def _reference_step(
        self, G: Tensor, state: State, h: Any, moving: tuple[int, ...]
    ) -> None:  # fmt: skip
        parts = [(member, member.weight(), slice(member.rows.start, member.rows.stop)) for member in self.members]
        W = torch.cat([self.rounding.exact(weight, rows).to(self.dtype) for _, weight, rows in parts])
        for b in moving:
            own = {key: value[b].to(self.dtype) for key, value in state.items()}
            scale = float(self.aspect_scale[b])
            W[b], own = self.method.reference_step(
                W[b], G[b], own, h, aspect_scale=scale, refresh=False, stored=self._state_dtype
            )
            roots = [value[None] for key, value in own.items() if key.startswith("inv_sqrt")]
            learns = h.clip_threshold is None or bool(in_range(roots, self.layout.n, self._state_dtype))
            for key, value in own.items():
                if learns or key in ALWAYS_MOVE:
                    self.stacks[key][b] = value.to(self.stacks[key].dtype)
        some, moved = self.rows.of(moving), set(moving)
        for member, weight, rows in parts:
            if not moved.isdisjoint(member.rows):
                self.rounding.write(weight, W[rows], rows, None if some is None else some.mask[rows])
                member.write(weight)
