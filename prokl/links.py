"""What the kernels of a bucket read through the device: where gradients and weights lie, lr and weight decay.

All of it lies in tensors that stay where they are, so that a captured CUDA graph follows what is written into them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prokl.addresses import Addresses
from prokl.hyper import Hyper


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """``values`` as a 1-D tensor on ``device``, without waiting for it: a copy from pinned memory."""
    # The pinned block is not given out again before the copy from it has run: torch's host allocator sees to that.
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


class Links:
    """Tables of one bucket of B matrices (m,n).

    Args:
        counts: matrices of every parameter.
        m, n: oriented sides.
        dtype: arithmetic dtype.
        weight_dtype: dtype of the parameters.
        device: their device.
    """

    def __init__(
        self, counts: Sequence[int], m: int, n: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
    ) -> None:
        self.counts, self.m, self.n = list(counts), m, n
        self.dtype, self.weight_dtype, self.device = dtype, weight_dtype, device
        self.gradients = Addresses(sum(counts), device)
        self.weights = Addresses(sum(counts), device)
        self.lr = torch.zeros(1, dtype=torch.float64, device=device)
        self.weight_decay = torch.zeros(1, dtype=torch.float64, device=device)
        self._written: dict[int, float] = {}

    def update(self, gradients: Sequence[Tensor | None], weights: Sequence[Tensor | None], h: Hyper) -> None:
        """Write what has changed since the last call, without waiting for the device.

        Args:
            gradients, weights: oriented (c,m,n) of every parameter; None where it has none, or does not move.
            h: says lr and weight_decay.
        """
        self.gradients.update(gradients, self.counts)
        self.weights.update(weights, self.counts)
        self._write(self.lr, h.lr)
        self._write(self.weight_decay, h.weight_decay)

    def _write(self, scalar: Tensor, value: float | Tensor) -> None:
        if isinstance(value, Tensor) and value.device.type != "cpu":
            scalar.copy_(value.reshape(1))
            self._written.pop(id(scalar), None)
        elif self._written.get(id(scalar)) != (number := float(value)):
            scalar.fill_(number)  # the value travels in the launch: no copy from the host
            self._written[id(scalar)] = number
