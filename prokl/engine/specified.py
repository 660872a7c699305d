"""A bucket that is stepped by the specification, one matrix at a time: ``backend="reference"``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prokl.algorithm.evidence import ALWAYS_MOVE, in_range
from prokl.algorithm.reference import in_eigenbases, in_weight_coordinates
from prokl.algorithm.settings import Hyper
from prokl.algorithm.types import State
from prokl.backends.select import Backend
from prokl.engine.bucket import Bucket


class SpecifiedBucket(Bucket):
    """A :class:`Bucket` whose algorithm is the method's ``reference_step``."""

    def _step(self, G: Tensor, moving: tuple[int, ...], steps: Tensor | None, backend: Backend) -> None:
        state, some, moved = self._arithmetic(), self.rows(moving), set(moving)
        of_member = [group_rates for group_rates in self._rates for _ in group_rates.members]
        for member, rates in zip(self.members, of_member, strict=True):
            if moved.isdisjoint(member.rows):
                continue
            weight, rows = member.weight(), slice(member.rows.start, member.rows.stop)
            W = self.rounding.exact(weight, rows).to(self.dtype, copy=True)
            h = replace(self.h, lr=rates.lr, weight_decay=rates.weight_decay)
            for b in (b for b in member.rows if b in moved):
                W[b - rows.start] = self._step_matrix(b, W[b - rows.start], G[b], state, h)
            self.rounding.write(weight, W, rows, None if some is None else some.mask[rows])
            if member.is_copy(weight):
                member.write(weight)

    def _step_matrix(self, b: int, W: Tensor, G: Tensor, state: State, h: Hyper) -> Tensor:
        """Keep the new state of matrix ``b``, and return its new weight (m,n)."""
        before = in_weight_coordinates({key: value[b].to(self.dtype) for key, value in state.items()})
        scale = float(self.aspect_scale[b])
        W, after = self.method.reference_step(W, G, before, h, aspect_scale=scale, stored=self._state_dtype)
        matrix_state = in_eigenbases(after)
        roots = [value.reshape(1, -1) for key, value in matrix_state.items() if key.startswith("inv_sqrt")]
        learns = h.clip_threshold is None or bool(in_range(roots, self.layout.n, self._state_dtype))
        for key, value in matrix_state.items():
            if learns or key in ALWAYS_MOVE:
                self.stacks[key][b] = value.to(self.stacks[key].dtype)
        return W

    def _refresh(self, rows: tuple[int, ...], finite: Tensor, backend: Backend) -> None:
        state = self._arithmetic()
        for b in (b for b in rows if finite[b]):
            for key, value in self._refreshed({key: value[b].to(self.dtype) for key, value in state.items()}).items():
                self.stacks[key][b] = value.to(self.stacks[key].dtype)

    def _refreshed(self, state: State) -> State:
        """Return the state of one matrix after a refresh, done in the coordinates of the eigenbases, where these are I.

        The paper's text is the same in any orthonormal coordinates; in these rounding leaves idle rows alone.
        """
        bases = {key: state[key] for key in ("Q_L", "Q_R") if key in state}
        eyes = {key: torch.eye(len(Q), dtype=Q.dtype, device=Q.device) for key, Q in bases.items()}
        here = in_weight_coordinates(state | eyes)
        new = in_eigenbases(here | self.method.reference_refresh(here))
        for key, Q in bases.items():
            turned = Q @ new[key]
            new[key] = 1.5 * turned - 0.5 * turned @ (turned.mT @ turned)
        return new
