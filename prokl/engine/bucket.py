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

from collections.abc import Callable, Sequence
from itertools import chain, compress, groupby
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.evidence import ALWAYS_MOVE
from prokl.algorithm.initial import can_go_on
from prokl.algorithm.method import Group, Method
from prokl.algorithm.settings import plain
from prokl.algorithm.shapes import compute_dtype, widest
from prokl.algorithm.types import State
from prokl.backends.device import on_device, without_autocast, workspace
from prokl.backends.io import BucketIO, Layout, Member, Rates, Slot
from prokl.backends.rounding import MASTER, Rounding, mode_of
from prokl.backends.select import Backend
from prokl.engine.pieces import Piece, clock, stored_clock
from prokl.engine.rows import RowSets
from prokl.engine.schedule import Plan, Schedule
from prokl.engine.signatures import Record
from prokl.engine.storage import layout_of_state, state_dtype

NEVER_MOVED_AFTER = 100
"""Calls with a gradient after which a weight that has never moved is warned about."""


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return where in memory each begins."""
    return [t.data_ptr() for t in tensors]


def _identity(piece: Piece) -> tuple[Any, ...]:
    return id(piece.p), piece.name, piece.shape, piece.suffix, piece.first


def _rate(lr: Any) -> float | Tensor:
    """Return lr as a step takes it; a tensor has no dimension, so that it multiplies as a number does."""
    return lr.reshape(()) if isinstance(lr, Tensor) else plain(lr)


class Bucket:
    """Weights, or pieces of weights, of one oriented shape, rank, dtype and device.

    Their groups may be several, with an lr and a weight decay each, and all other settings alike.

    Attributes:
        backend: who steps it; None before the first :meth:`decide`. io: its reading and writing, with it.
        group: one of the groups. h: its hyper-parameters without lr and weight decay, as of :meth:`decide`.

    Args:
        pieces: in the order of their groups.
        groups: each one's.
        states: what ``optimizer.state`` holds for each one's parameter: empty for one that has none yet.
        records: each one's parameter's.
        method: the matrix method.
        rank: effective rank.
        select: chooses the backend.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        groups: Sequence[Group],
        states: Sequence[dict[str, Any]],
        records: Sequence[Record],
        method: Method[Any],
        rank: int,
        select: Callable[[str | None, torch.device, str | None, torch.dtype], Backend],
    ) -> None:
        self.method, self.rank, self._select = method, rank, select
        self.follow(groups)
        group = groups[0]
        self.states, self.records, self._made_of = list(states), list(records), list(map(_identity, pieces))
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
        names = [f"{piece.name} {c}" for piece, matrices in zip(pieces, numbers, strict=True) for c in matrices]
        mode = mode_of(group, first.p.dtype)
        self.rounding = Rounding(mode, names, [member.weight() for member in self.members])
        if self.rounding.master is not None:
            self.stacks[MASTER] = self.rounding.master
        self.skipped = torch.zeros(len(self.members), dtype=torch.int64, device=device)
        self.schedule = Schedule(
            [member.rows for member in self.members],
            [step for piece, state in zip(pieces, states, strict=True) for step in clock(piece, state)],
        )
        views = [self._adopt(i) for i in range(len(self.members))]
        self._read = [itemgetter(*member_views) for member_views in views]
        self._handed_out = [view for member_views in views for view in member_views.values()]
        self._addresses = addresses(self._handed_out)
        self._parameters = [member.p for member in self.members]
        self._unmoved = [i for i, member in enumerate(self.members) if records[i].idle.get(member.suffix, 0) >= 0]
        self.backend: Backend | None = None
        self.io: BucketIO
        self._asked: tuple[str | None, str | None] = None, None
        self.rows = RowSets(count, device)
        self._left: list[int] | None = None  # versions of stacks that steps can go on from
        self._said: list[str] = []
        scales = [member.shape.aspect_scale for member in self.members for _ in member.rows]
        self.aspect_scale = torch.tensor(scales, dtype=self.dtype, device=device)

    def follow(self, groups: Sequence[Group]) -> None:
        """Take settings, once they have been checked, from these groups, one a member."""
        self.group = groups[0]
        runs = [[*run] for _, run in groupby(enumerate(groups), key=lambda each: id(each[1]))]
        self._groups = [(run[0][1], range(run[0][0], run[-1][0] + 1)) for run in runs]

    def _adopt(self, i: int) -> dict[str, Tensor]:
        """Copy a parameter's state into the stacks; leave views of them in its place, and return these."""
        member, state = self.members[i], self.states[i]
        views = {"skipped": self.skipped[i], **{key: member.part(stack) for key, stack in self.stacks.items()}}
        if "step" + member.suffix in state:
            for key, view in views.items():
                if key + member.suffix in state or key != MASTER:  # masters that the state lacks start as the weights
                    view.copy_(state[key + member.suffix])
        if self.records[i].own_master and MASTER not in self.stacks:
            master = state.get(MASTER + member.suffix)
            if isinstance(master, Tensor) and (master.shape, master.dtype) == (views["M_Q"].shape, torch.float32):
                del state[MASTER + member.suffix]  # a weight that has become wider goes on from its own bits
        views = {key + member.suffix: view for key, view in views.items()}
        state.update(views | {"step" + member.suffix: self._clock(member)})
        return views

    def is_of(self, pieces: Sequence[Piece], states: Sequence[dict[str, Any]], group: Group) -> bool:
        """Return True if a bucket of these, with such settings, would be this one, which has their state."""
        first, a = pieces[0].p, self.layout
        return (
            list(map(_identity, pieces)) == self._made_of
            and all(map(is_, states, self.states))
            and (first.dtype, first.device) == (a.weight_dtype, a.device)
            and self.rounding.mode == mode_of(group, first.dtype)
            and self.holds()
        )

    def holds(self) -> bool:
        """Return True if the state has the very views that were handed out, in the memory that they had then."""
        try:
            now = chain.from_iterable([read(state) for read, state in zip(self._read, self.states, strict=True)])
        except KeyError:
            return False
        same = all(map(is_, now, self._handed_out))
        return same and addresses(self._handed_out) == self._addresses and all(map(self._at, self.members, self.states))

    def _at(self, member: Member, state: dict[str, Any]) -> bool:
        """Return True if the count of steps is as it was left; it lies on the host."""
        count, steps = state.get("step" + member.suffix), self.schedule.steps
        if type(count) is int and member.p.ndim != 3:
            return count == steps[member.rows.start]
        return isinstance(count, Tensor) and count.tolist() == steps[member.rows.start : member.rows.stop]

    def _clock(self, member: Member) -> int | Tensor:
        return stored_clock(member.p, self.schedule.steps[member.rows.start : member.rows.stop])

    def decide(self) -> Plan | None:
        """Return what this step does, with the I/O ready for it; None when there is no gradient."""
        has_grad = [p.grad is not None for p in self._parameters]
        if self._versions() != self._left:
            self._begin_what_was_zeroed()
        plan = self.schedule.decide(has_grad, self.group["precondition_frequency"])
        if plan is not None:
            if self.backend is None or (self.group["backend"], self.group["precision"]) != self._asked:
                self._choose_backend(self.group["backend"], self.group["precision"])
            self.rounding.locate(self.schedule.steps)
            self.h = self.method.hyper({**self.group, "lr": 0.0, "weight_decay": 0.0})
            self._rates = [
                Rates(_rate(group["lr"]), plain(group["weight_decay"]), indices) for group, indices in self._groups
            ]
            self.io.locate(self._rates)
        return plan

    def _choose_backend(self, asked: str | None, precision: str | None) -> None:
        """Take another backend; one that is refused, or has no memory for its tables, leaves everything as it was."""
        backend = self._select(asked, self.layout.device, precision, self.dtype)
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
        steps_on_host = None
        if self.backend.host_readable or plan.initialising:
            steps_on_host, begins = torch.stack([steps, usable]).tolist()
            if rows := [b for b in plan.initialising if begins[b]]:
                self._initialise(rows, G)
        moving = tuple(b for b in plan.stepping if steps_on_host is None or steps_on_host[b])
        if moving:
            self._step(G, moving, steps if steps_on_host is None else None, self.backend)
        if plan.refreshing:  # whatever this gradient is: zero ones must not keep bases from following the factors
            self._refresh(plan.refreshing, finite, self.backend)
        return moving

    def commit(self, plan: Plan, moved: Sequence[int]) -> list[str]:
        """Move the clocks, last of all. M and ``skipped`` may be ahead of them where a step failed on the way.

        Returns:
            Warnings about weights that never move.
        """
        self.io.release()
        self._left, said, self._said = self._versions(), self._said, []
        if len(moved) == self.layout.count:
            member_moved = [True] * len(self.members)
        else:
            rows = set(moved)
            member_moved = [not rows.isdisjoint(member.rows) for member in self.members]
        # A kernel writes past autograd's own count.
        torch.autograd.graph.increment_version([*compress(self._parameters, member_moved)])
        self.schedule.advance(plan)
        for member, state in zip(self.members, self.states, strict=True):
            one = member.p.ndim != 3  # quicker than a slice of each
            state["step" + member.suffix] = self.schedule.steps[member.rows.start] if one else self._clock(member)
        never = [i for i in self._unmoved if plan.has_grad[i] and self._never_moves(i, member_moved[i])]
        self._unmoved = [i for i in self._unmoved if self.records[i].idle.get(self.members[i].suffix, 0) >= 0]
        return said + [
            f"{self.members[i].name} has not moved in {NEVER_MOVED_AFTER} steps with a gradient: every gradient was "
            "zero, too small to square, or not finite (optimizer.skipped() counts those). Check the loss scale "
            "and whether the weight is used."
            for i in never
        ]

    def _versions(self) -> list[int]:
        """Return PyTorch's counts of writes into the stacks, by steps and by whoever has a view of them."""
        return [0 if stack.is_inference() else stack._version for stack in self.stacks.values()]

    def _begin_what_was_zeroed(self) -> None:
        """Let matrices begin anew whose state was written since the last step, and no step can go on from.

        This reads the device, once after the state was changed or replaced by hand.
        """
        self._left, steps = self._versions(), self.schedule.steps
        if max(steps) < 0:
            return
        state = {key: stack for key, stack in self.stacks.items() if key not in (MASTER, "clipped")}
        held = [stack.reshape(len(stack), -1).any(dim=1) for stack in state.values()]
        goes_on, in_part = torch.stack([can_go_on(state), torch.stack(held).any(dim=0)]).tolist()
        for member, entry in zip(self.members, self.states, strict=True):
            if rows := [b for b in member.rows if steps[b] >= 0 and not goes_on[b]]:
                self.schedule.reset(rows)
                entry["step" + member.suffix] = self._clock(member)
            if some := sum(in_part[b] for b in rows):
                self._said.append(
                    f"The state of {member.name} has zero eigenvalues, or bases that are not orthonormal, in {some} of "
                    f"{len(member.rows)} matrices, which no step can go on from: they begin anew with the next "
                    "gradient. To reset a weight, remove its state, optimizer.state.pop(p), or zero all of it."
                )

    def _never_moves(self, i: int, moved: bool) -> bool:
        """Return True once, when a weight has had gradients for long and has never moved."""
        idle, suffix = self.records[i].idle, self.members[i].suffix
        count = idle.get(suffix, 0) + 1
        idle[suffix] = -1 if moved or count == NEVER_MOVED_AFTER else count
        return count == NEVER_MOVED_AFTER and not moved

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
        state, active = self._arithmetic(), self._active(moving, steps)
        direction, new, evident = self.method.step(backend.ops, G, state, self.h, self.aspect_scale, active)
        self.io.apply(direction, moving, active)
        if evident is not None and backend.host_readable and bool(evident.all()):
            evident = None
        moves, learns = (tuple(t for t in masks if t is not None) for masks in ([active], [active, evident]))
        self._store(new, learns, moves)

    def _refresh(self, rows: tuple[int, ...], finite: Tensor, backend: Backend) -> None:
        """Refresh the bases of those of ``rows`` whose gradient is finite."""
        state, some = self._arithmetic(), self.rows.of(rows)
        if some is None:
            new = self.method.refresh(backend.ops, state)
        else:
            part = self.method.refresh(backend.ops, {key: value[some.indices] for key, value in state.items()})
            new = {key: state[key].to(value.dtype).index_copy(0, some.indices, value) for key, value in part.items()}
        masks: tuple[Tensor, ...] = (finite,) if some is None else (finite, some.mask)
        if some is None and backend.host_readable and bool(finite.all()):
            masks = ()
        self._store(new, masks, masks)

    def _arithmetic(self) -> State:
        """Return the state without masters in the arithmetic dtype, M_Q as it is kept: its passes convert it."""
        state = {key: stack for key, stack in self.stacks.items() if key != MASTER}
        others = [key for key, stack in state.items() if key != "M_Q" and stack.dtype != self.dtype]
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
