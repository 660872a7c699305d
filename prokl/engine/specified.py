"""A bucket that is stepped by the specification, one matrix at a time: ``backend="reference"``."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prokl.algorithm.evidence import ALWAYS_MOVE, in_range
from prokl.algorithm.reference import in_eigenbases, in_weight_coordinates, refresh_eigenbases
from prokl.engine.bucket import Bucket


class SpecifiedBucket(Bucket):
    """A :class:`Bucket` whose algorithm is the method's ``reference_step``, and the refresh that all methods share."""

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
                if member.is_copy(weight):
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
