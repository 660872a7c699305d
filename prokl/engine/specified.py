"""A bucket that is stepped by the specification, one matrix at a time: ``backend="reference"``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prokl.algorithm.evidence import ALWAYS_MOVE, in_range
from prokl.backends.select import Backend
from prokl.engine.bucket import Bucket


class SpecifiedBucket(Bucket):
    """A :class:`Bucket` whose algorithm is the method's ``reference_step``."""

    def _step(self, G: Tensor, moving: tuple[int, ...], steps: Tensor | None, backend: Backend) -> None:
        state = self._arithmetic("M")
        of_member = [group_rates for group_rates in self._rates for _ in group_rates.members]
        rates = [
            member_rates for member_rates, member in zip(of_member, self.members, strict=True) for _ in member.rows
        ]
        parts = [(member, member.weight(), slice(member.rows.start, member.rows.stop)) for member in self.members]
        W = torch.cat([self.rounding.exact(weight, rows).to(self.dtype) for _, weight, rows in parts])
        for b in moving:
            matrix_state = {key: value[b].to(self.dtype) for key, value in state.items()}
            scale, h = float(self.aspect_scale[b]), replace(self.h, lr=rates[b].lr, weight_decay=rates[b].weight_decay)
            W[b], matrix_state = self.method.reference_step(
                W[b], G[b], matrix_state, h, aspect_scale=scale, refresh=False, stored=self._state_dtype
            )
            roots = [value[None] for key, value in matrix_state.items() if key.startswith("inv_sqrt")]
            learns = h.clip_threshold is None or bool(in_range(roots, self.layout.n, self._state_dtype))
            for key, value in matrix_state.items():
                if learns or key in ALWAYS_MOVE:
                    self.stacks[key][b] = value.to(self.stacks[key].dtype)
        some, moved = self.rows.of(moving), set(moving)
        for member, weight, rows in parts:
            if not moved.isdisjoint(member.rows):
                self.rounding.write(weight, W[rows], rows, None if some is None else some.mask[rows])
                member.write(weight)

    def _refresh(self, rows: tuple[int, ...], finite: Tensor, backend: Backend) -> None:
        state = self._arithmetic()
        for b in (b for b in rows if finite[b]):
            for key, value in self.method.reference_refresh({k: v[b] for k, v in state.items()}).items():
                self.stacks[key][b] = value.to(self.stacks[key].dtype)
