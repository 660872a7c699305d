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
from prokl.ops import Primitives
from prokl.qr import may_branch
from prokl.shapes import MatrixShape, compute_dtype
from prokl.update import Call

NEVER_MOVED_AFTER = 100
"""Calls with a gradient after which a weight that has never moved is warned about."""


@dataclass(frozen=True)
class Method:
    """What tells one matrix method from another."""

    initialise: Callable[[Tensor, int, dict[str, Any]], dict[str, Tensor]]
    """(gradients (B,m,n), rank, group) -> state."""
    step: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    """Batched step: (G, state, hyper, call, ops) -> (direction, state)."""
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


class Bucket:
    """All weights of one group, oriented shape, rank, dtype and device.

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

    def step(self, group: dict[str, Any], states: Sequence[dict[str, Any]], ops: Primitives | None) -> list[str]:
        """One call of the optimizer for this bucket; ``ops=None`` runs the reference, matrix by matrix.

        Clocks and counts change last, so that a step that fails on the way is not counted.

        Returns:
            Warnings about weights that never move.
        """
        given = [member.p.grad is not None for member in self.members]
        if not any(given):
            return []
        G = self._gradients(group["maximize"])
        norm = torch.linalg.vector_norm(G, dim=(-2, -1))
        finite = self._whole(norm.float().square().isfinite())

        rows = [b for member in self._given(given) for b in range(member.start, member.stop)]
        stepping = [b for b in rows if self.steps[b] >= 0]
        starting = [b for b in rows if self.steps[b] < 0]
        # Reading the device is allowed where it costs nothing, or while some matrix has still to begin.
        read = torch.stack([finite, norm > 0]).tolist() if may_branch(G) or starting else None
        if read and starting:
            self._begin([b for b in starting if read[0][b] and read[1][b]], G, group)
        moving = [b for b in stepping if read is None or read[0][b]]
        if moving:
            refresh = [b for b in stepping if (self.steps[b] + 1) % group["precondition_frequency"] == 0]
            live = self._live(moving, finite if read is None else None)
            self._advance(G, group, live, moving, refresh, ops)
        for b in stepping:
            self.steps[b] += 1
        self._count_skipped(given, finite)
        for member, state in zip(self.members, states, strict=True):
            state["step"] = self._clock(member)
        watched = (self._watch(member, moving) for member in self._given(given))
        return [warning for warning in watched if warning is not None]

    def _given(self, given: list[bool]) -> list[Member]:
        return [member for member, g in zip(self.members, given, strict=True) if g]

    def _gradients(self, maximize: bool) -> Tensor:
        parts = []
        for member in self.members:
            g = member.p.grad
            if g is None:
                parts.append(
                    self.stacks["M"].new_zeros((member.shape.count, *self.stacks["M"].shape[1:]), dtype=self.dtype)
                )
            else:
                parts.append(member.shape.oriented(g.detach()).to(self.dtype))
        G = torch.cat(parts)
        return G.neg_() if maximize else G

    def _whole(self, finite: Tensor) -> Tensor:
        """(B,): False for every matrix of a parameter that has one non-finite matrix."""
        if self.owner is None:
            return finite
        bad = torch.zeros_like(self.skipped).index_add_(0, self.owner, (~finite).long())
        return (bad == 0)[self.owner]

    def _count_skipped(self, given: list[bool], finite: Tensor) -> None:
        own = finite if self.owner is None else finite[self.first]
        bad = ~own
        if not all(given):
            bad = bad & torch.tensor(given, device=bad.device)
        self.skipped += bad

    def _begin(self, rows: list[int], G: Tensor, group: dict[str, Any]) -> None:
        if not rows:
            return
        for key, value in self.method.initialise(G[rows], self.rank, group).items():
            self.stacks[key][rows] = value.to(self.stacks[key].dtype)
        for b in rows:
            self.steps[b] = 0

    def _live(self, moving: list[int], finite: Tensor | None) -> Tensor | None:
        """(B,) mask of the matrices that move; None when the host knows that all do."""
        if len(moving) == len(self.steps):
            return finite
        mask = self._mask(moving)
        return mask if finite is None else mask & finite

    def _mask(self, rows: list[int]) -> Tensor:
        mask = torch.zeros(len(self.steps), dtype=torch.bool)
        mask[rows] = True
        return mask.to(self.skipped.device)

    def _advance(
        self,
        G: Tensor,
        group: dict[str, Any],
        live: Tensor | None,
        moving: list[int],
        refresh: list[int],
        ops: Primitives | None,
    ) -> None:
        stored = {key: stack.to(self.dtype) for key, stack in self.stacks.items()}
        young = [b for b in moving if self.steps[b] < YOUNG]
        state = fitted(G, stored, self._mask(young)) if young and "lambda_0" in stored else stored
        h = self.method.hyper(group)
        if ops is None:
            self._reference(G, state, h, moving, set(refresh))
            return
        if live is not None:
            G = torch.where(live[:, None, None], G, 0.0)
        direction, new = self.method.step(G, state, h, Call(self.aspect_scale, refresh, live), ops)
        self._apply(direction, h, live, moving, ops)
        for key, value in new.items():
            if value is stored[key]:
                continue
            if live is not None:
                value = torch.where(live.reshape(-1, *[1] * (value.ndim - 1)), value, stored[key])
            self.stacks[key].copy_(value)

    def _apply(self, direction: Tensor, h: Any, live: Tensor | None, moving: list[int], ops: Primitives) -> None:
        if live is None and all(member.p.dtype == self.dtype for member in self.members):
            for member in self.members:
                if h.weight_decay != 0:
                    member.p.mul_(1 - h.lr * h.weight_decay)
                own = member.shape.restored(direction[member.start : member.stop], member.p)
                if isinstance(h.lr, Tensor):
                    member.p.sub_(h.lr * own)
                else:
                    member.p.sub_(own, alpha=h.lr)
            return
        W = torch.cat([member.shape.oriented(member.p) for member in self.members])
        W = ops.apply_direction(W, direction, h.lr, h.weight_decay, live)
        self._write(W, moving)

    def _write(self, W: Tensor, moving: list[int]) -> None:
        rows = set(moving)
        for member in self.members:
            if not rows.isdisjoint(range(member.start, member.stop)):
                member.p.copy_(member.shape.restored(W[member.start : member.stop], member.p))

    def _reference(self, G: Tensor, state: dict[str, Tensor], h: Any, moving: list[int], refresh: set[int]) -> None:
        W = torch.cat([member.shape.oriented(member.p).to(self.dtype) for member in self.members])
        for b in moving:
            own = {key: value[b] for key, value in state.items()}
            scale = float(self.aspect_scale[b])
            W[b], own = self.method.reference_step(W[b], G[b], own, h, aspect_scale=scale, refresh=b in refresh)
            for key, value in own.items():
                self.stacks[key][b] = value.to(self.stacks[key].dtype)
        self._write(W, moving)

    def _watch(self, member: Member, moving: list[int]) -> str | None:
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


def state_dtype(group: dict[str, Any], p: Tensor) -> torch.dtype:
    """Storage dtype: ``group["state_dtype"]``, else float32 for half-precision parameters, else the parameter's."""
    if group["state_dtype"] is not None:
        dtype: torch.dtype = group["state_dtype"]
        return dtype
    return p.dtype if p.dtype in (torch.float32, torch.float64) else torch.float32
