"""Stacked state of all weights of one oriented shape, and one step of them.

A bucket owns the stacks; ``optimizer.state[p]`` holds views into them. It decides which matrices begin, step,
skip and refresh; the linear algebra is in :mod:`prokl.update` and :mod:`prokl.reference`.

Dimension key: P parameters, B matrices (a 3-D parameter is several), m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prokl.initial import YOUNG, fitted
from prokl.links import Links, on_device
from prokl.ops import TORCH, Primitives
from prokl.qr import may_branch
from prokl.shapes import MatrixShape, compute_dtype
from prokl.torch_ops import Direction
from prokl.update import Call, Rows

NEVER_MOVED_AFTER = 100
"""Calls with a gradient after which a weight that has never moved is warned about."""


@dataclass(frozen=True)
class Method:
    """What tells one matrix method from another."""

    initialise: Callable[[Tensor, int, dict[str, Any]], dict[str, Tensor]]
    """(gradients (B,m,n), rank, group) -> state."""
    step: Callable[..., tuple[Direction, dict[str, Tensor]]]
    """Batched step: (G, state, hyper, call, ops) -> (direction, state)."""
    workspace: Callable[[int, int, int], int]
    """(m, n, rank) -> elements of temporary memory of the batched step for one matrix."""
    reference_step: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    """(W, G, state, hyper, aspect_scale, refresh) -> (W, state) for one matrix."""
    hyper: Callable[[dict[str, Any]], Any]
    state_shapes: Callable[[int, int, int, dict[str, Any]], dict[str, tuple[int, ...]]]
    """(m, n, rank, group) -> shape of every state tensor of one matrix."""


@dataclass(frozen=True)
class Member:
    """A parameter and the rows of the stacks that are its own."""

    p: Tensor
    name: str
    shape: MatrixShape
    start: int

    @property
    def stop(self) -> int:
        """First row that is no longer this parameter's."""
        return self.start + self.shape.count

    def rows(self, stack: Tensor) -> Tensor:
        """This parameter's part of a stack; without the leading dimension unless it is a stack of matrices."""
        return stack[self.start : self.stop] if self.p.ndim == 3 else stack[self.start]


@dataclass(frozen=True)
class Plan:
    """What the host decides about one step of a bucket; equal plans do the same work on the device."""

    given: tuple[bool, ...]
    """Parameters that have a gradient."""
    starting: tuple[int, ...]
    """Matrices whose state this gradient initialises, if it is finite and not zero."""
    stepping: tuple[int, ...]
    """Matrices that have begun and have a gradient; those whose gradient is not finite will not move."""
    young: tuple[int, ...]
    """Stepping matrices whose "auto" start may still be corrected."""
    refresh: tuple[int, ...]
    """Stepping matrices whose step is divisible by tau."""

    @property
    def steady(self) -> bool:
        """Whether every matrix steps, none begins or is young: what can be captured in a graph."""
        return all(self.given) and not self.starting and not self.young


class Bucket:
    """Weights of one group, oriented shape, rank, dtype and device.

    Args:
        members: (parameter, name) pairs in the order of their group.
        states: what ``optimizer.state`` holds for each: empty for a parameter that has none yet.
        method: the matrix method.
        rank: effective rank.
        group: the parameter group.
        idle: calls with a gradient in which a parameter did not move, -1 once it has; outlives the bucket.
    """

    def __init__(
        self,
        members: Sequence[tuple[Tensor, str]],
        states: Sequence[dict[str, Any]],
        method: Method,
        rank: int,
        group: dict[str, Any],
        idle: dict[Tensor, int],
    ) -> None:
        self.method, self.rank, self.idle = method, rank, idle
        self.members: list[Member] = []
        self.group = group
        count = 0
        for p, name in members:
            self.members.append(Member(p, name, MatrixShape.of(p), count))
            count = self.members[-1].stop
        first = self.members[0]
        device = first.p.device
        self.dtype = compute_dtype(first.p.dtype, state_dtype(group, first.p))
        self.made_for = first.p.dtype, device
        self.views: list[dict[str, Tensor]] = []
        self.steps: list[int] = []
        self.stacks: dict[str, Tensor] = {}
        for key, shape in method.state_shapes(first.shape.m, first.shape.n, rank, group).items():
            dtype = self.dtype if key == "lambda_0" else state_dtype(group, first.p)
            self.stacks[key] = torch.zeros((count, *shape), dtype=dtype, device=device)
        self.skipped = torch.zeros(len(self.members), dtype=torch.int64, device=device)
        for i, (member, state) in enumerate(zip(self.members, states, strict=True)):
            steps = state.get("step", -1)
            self.steps += list(steps) if isinstance(steps, (list, tuple)) else [steps] * member.shape.count
            if state:
                self.skipped[i] = state["skipped"]
                for key, stack in self.stacks.items():
                    member.rows(stack).copy_(state[key])
            state.clear()
            state.update({"step": self._clock(member), "skipped": self.skipped[i]})
            state.update((key, member.rows(stack)) for key, stack in self.stacks.items())
            self.views.append({key: value for key, value in state.items() if key != "step"})
        counts = [member.shape.count for member in self.members]
        self.links = Links(counts, first.shape.m, first.shape.n, self.dtype, first.p.dtype, device)
        self._rows: dict[tuple[int, ...], Tensor] = {}
        owners = [i for i, member in enumerate(self.members) for _ in range(member.shape.count)]
        self.owner = torch.tensor(owners, device=device) if count > len(self.members) else None
        self.first = torch.tensor([member.start for member in self.members], device=device)
        self.aspect_scale = torch.tensor(
            [member.shape.aspect_scale for member in self.members for _ in range(member.shape.count)],
            dtype=self.dtype,
            device=device,
        )

    def holds(self, states: Sequence[dict[str, Any]]) -> bool:
        """Whether the weights and the views handed out are still what they were when the bucket was made."""
        return all(
            member.p.dtype == self.made_for[0]
            and member.p.device == self.made_for[1]
            and all(state.get(key) is view for key, view in views.items())
            for member, state, views in zip(self.members, states, self.views, strict=True)
        )

    def _clock(self, member: Member) -> int | list[int]:
        return self.steps[member.start : member.stop] if member.p.ndim == 3 else self.steps[member.start]

    def plan(self) -> Plan | None:
        """What this call does, from clocks and gradients that are there; None when there is no gradient."""
        given = tuple(member.p.grad is not None for member in self.members)
        if not any(given):
            return None
        rows = [b for member in self._given(given) for b in range(member.start, member.stop)]
        stepping = tuple(b for b in rows if self.steps[b] >= 0)
        frequency = self.group["precondition_frequency"]
        return Plan(
            given,
            tuple(b for b in rows if self.steps[b] < 0),
            stepping,
            tuple(b for b in stepping if self.steps[b] < YOUNG) if "lambda_0" in self.stacks else (),
            tuple(b for b in stepping if (self.steps[b] + 1) % frequency == 0),
        )

    def link(self, ops: Primitives | None) -> None:
        """Find gradients and weights, and tell a linked table; nothing waits for the device."""
        self.gradients: list[Tensor | None] = []
        for member in self.members:
            g = member.p.grad
            self.gradients.append(None if g is None else member.shape.oriented(g.detach().to(member.p.dtype)))
        # Copies of those weights that no two strides describe (a permuted convolution).
        self.weights = [member.shape.oriented(member.p.detach()) for member in self.members]
        if ops is not None and ops.linked:
            self.links.update(self.gradients, self.weights, self.method.hyper(self.group))

    def copied(self) -> list[tuple[Member, Tensor]]:
        """The weights that :meth:`link` had to copy, each with its copy."""
        pairs = zip(self.members, self.weights, strict=True)
        return [(member, weight) for member, weight in pairs if weight.data_ptr() != member.p.data_ptr()]

    def run(self, plan: Plan, ops: Primitives | None) -> tuple[int, ...]:
        """The device's work of one step, after :meth:`link`; ``ops=None`` runs the reference, matrix by matrix.

        Returns:
            The matrices that moved, as far as the host knows.
        """
        G, energy = (ops or TORCH).stack(self.gradients, self.links, self.group["maximize"])
        finite = self._whole(energy.float().isfinite())
        # Reading the device is allowed where it costs nothing, or while some matrix has still to begin.
        read = torch.stack([finite, energy > 0]).tolist() if may_branch(G) or plan.starting else None
        if read:
            self._begin([b for b in plan.starting if read[0][b] and read[1][b]], G)
        moving = tuple(b for b in plan.stepping if read is None or read[0][b])
        if moving:
            self._advance(G, plan, moving, None if read else finite, ops)
        self._count_skipped(plan.given, finite)
        return moving

    def settle(self, plan: Plan, moving: Sequence[int], states: Sequence[dict[str, Any]]) -> list[str]:
        """Move the clocks, last of all, so that a step that fails on the way is not counted.

        A linked table has updated M by then, so that after running out of memory on the way M has gone ahead.

        Returns:
            Warnings about weights that never move.
        """
        self.gradients, self.weights = [], []  # keep none of them alive until the next step
        rows = set(moving)
        moved = [m.p for m in self.members if not rows.isdisjoint(range(m.start, m.stop))]
        torch.autograd.graph.increment_version(moved)  # a kernel writes past autograd's own count
        for b in plan.stepping:
            self.steps[b] += 1
        for member, state in zip(self.members, states, strict=True):
            state["step"] = self._clock(member)
        watched = (self._watch(member, moving) for member in self._given(plan.given))
        return [warning for warning in watched if warning is not None]

    def _given(self, given: Sequence[bool]) -> list[Member]:
        return [member for member, g in zip(self.members, given, strict=True) if g]

    def _whole(self, finite: Tensor) -> Tensor:
        """(B,): False for every matrix of a parameter that has one non-finite matrix."""
        if self.owner is None:
            return finite
        bad = torch.zeros_like(self.skipped).index_add_(0, self.owner, (~finite).long())
        return (bad == 0)[self.owner]

    def _count_skipped(self, given: tuple[bool, ...], finite: Tensor) -> None:
        bad = ~(finite if self.owner is None else finite[self.first])
        if not all(given):
            bad = bad & on_device(given, torch.bool, bad.device)
        self.skipped += bad

    def _begin(self, rows: list[int], G: Tensor) -> None:
        if not rows:
            return
        for key, value in self.method.initialise(G[rows].to(self.dtype), self.rank, self.group).items():
            self.stacks[key][rows] = value.to(self.stacks[key].dtype)
        for b in rows:
            self.steps[b] = 0

    def _live(self, moving: tuple[int, ...], finite: Tensor | None) -> Tensor | None:
        """(B,) mask of the matrices that move; None when the host knows that all do."""
        if len(moving) == len(self.steps):
            return finite
        mask = self._mask(moving)
        return mask if finite is None else mask & finite

    def _mask(self, rows: tuple[int, ...]) -> Tensor:
        chosen = set(rows)
        return on_device([b in chosen for b in range(len(self.steps))], torch.bool, self.skipped.device)

    def _index(self, rows: tuple[int, ...]) -> Rows:
        """``rows`` as a step takes them; an index is kept, so that a captured graph finds it again."""
        if not rows or len(rows) == len(self.steps):
            return slice(None) if rows else None
        if rows not in self._rows:
            self._rows[rows] = on_device(rows, torch.int64, self.skipped.device)
        return self._rows[rows]

    def _advance(
        self, G: Tensor, plan: Plan, moving: tuple[int, ...], finite: Tensor | None, ops: Primitives | None
    ) -> None:
        h = self.method.hyper(self.group)
        stored = {key: stack if key == "M" else stack.to(self.dtype) for key, stack in self.stacks.items()}
        young = [b for b in plan.young if b in moving]
        state = fitted(G.to(self.dtype), stored, self._mask(tuple(young))) if young else stored
        if ops is None:
            self._reference(G, state, h, moving, set(plan.refresh))
            return
        live = self._live(moving, finite)
        decay: float | Tensor
        if ops.linked:
            decay = 1 - (self.links.lr * self.links.weight_decay).to(self.dtype)
        else:
            decay = 1 - h.lr * h.weight_decay
        call = Call(self.aspect_scale, self._index(plan.refresh), live, decay)
        direction, new = self.method.step(G, state, h, call, ops)
        rows = set(moving)
        weights = [
            None if rows.isdisjoint(range(member.start, member.stop)) else weight
            for member, weight in zip(self.members, self.weights, strict=True)
        ]
        ops.apply(weights, self.links, direction, h, live)
        for member, weight in self.copied():
            member.p.copy_(member.shape.restored(weight, member.p))
        for key, value in new.items():
            self._store(self.stacks[key], value, live)

    def _store(self, stack: Tensor, value: Tensor, live: Tensor | None) -> None:
        if value is stack:
            return
        if live is None:
            stack.copy_(value)
        else:
            mask = live.reshape(-1, *[1] * (value.ndim - 1))
            stack.copy_(torch.where(mask, value.to(stack.dtype), stack))

    def _reference(
        self, G: Tensor, state: dict[str, Tensor], h: Any, moving: tuple[int, ...], refresh: set[int]
    ) -> None:
        W = torch.cat([member.shape.oriented(member.p).to(self.dtype) for member in self.members])
        for b in moving:
            own = {key: value[b].to(self.dtype) for key, value in state.items()}
            scale = float(self.aspect_scale[b])
            W[b], own = self.method.reference_step(W[b], G[b], own, h, aspect_scale=scale, refresh=b in refresh)
            for key, value in own.items():
                self.stacks[key][b] = value.to(self.stacks[key].dtype)
        rows = set(moving)
        for member in self.members:
            if not rows.isdisjoint(range(member.start, member.stop)):
                member.p.copy_(member.shape.restored(W[member.start : member.stop], member.p))

    def _watch(self, member: Member, moving: Sequence[int]) -> str | None:
        """Says once that a weight gets gradients and never moves."""
        count = self.idle.get(member.p, 0)
        if count < 0:
            return None
        moved = any(member.start <= b < member.stop for b in moving)
        last = count + 1 == NEVER_MOVED_AFTER
        self.idle[member.p] = -1 if moved or last else count + 1
        if moved or not last:
            return None
        return (
            f"{member.name} has not moved in {NEVER_MOVED_AFTER} steps with a gradient: every gradient was zero, too "
            "small to square, or not finite (optimizer.skipped() counts those). Check the loss scale and whether the "
            "weight is used."
        )


WORKSPACE = 2 * 2**30
"""Bytes of temporary memory that one bucket's step may take, its stacked gradient included. A larger bucket is made as
several; one parameter is never split."""


def split(members: Sequence[tuple[Tensor, str]], elements: int, itemsize: int) -> list[list[tuple[Tensor, str]]]:
    """``members`` in runs whose step needs at most WORKSPACE bytes, ``elements`` for every matrix."""
    most = max(1, WORKSPACE // (elements * itemsize))
    runs: list[list[tuple[Tensor, str]]] = [[]]
    count = 0
    for p, name in members:
        own = MatrixShape.of(p).count
        if runs[-1] and count + own > most:
            runs.append([])
            count = 0
        runs[-1].append((p, name))
        count += own
    return runs


def state_dtype(group: dict[str, Any], p: Tensor) -> torch.dtype:
    """Storage dtype: ``group["state_dtype"]``, else float32 for half-precision parameters, else the parameter's."""
    if group["state_dtype"] is not None:
        dtype: torch.dtype = group["state_dtype"]
        return dtype
    return p.dtype if p.dtype in (torch.float32, torch.float64) else torch.float32
