"""What the timed optimizers step: weights, their gradients, and the state that they start from.

Every weight of a shape starts from the state that one of them has after SETTLING steps: a start decomposes
every weight, and on a CPU a step that bounds its gradient takes one pass over it more.

Dimension key: m short side, n long side.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.shapes import ParameterSet
from bench.timing.entries import PERIOD, Entry

SETTLING = 1 + PERIOD
"""The start and a period: bases have been refreshed as they are in training, the clock is where a period ends, and
eigenvalues are those of the gradients. Measured on seven shapes: none after the first three steps is bounded."""
SIGNAL = 16
"""Rank of the gradients' signal."""
GRADIENTS = 8
"""Gradients of a weight, which take turns as new ones would come from a backward pass."""

Shape = tuple[int, int]


class Problem:
    """The weights of a set where they start, and their gradients: a signal of low rank plus as much noise.

    Attributes:
        parameters: the set.
        device: where.
        start: the weights.
        gradients: of every weight, ``GRADIENTS`` times.
        buffers: what an optimizer is given; it may write there.
    """

    def __init__(self, parameters: ParameterSet, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.parameters, self.device = parameters, device
        generator = torch.Generator(device)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device)

        signals: dict[Shape, tuple[Tensor, Tensor]] = {}
        for m, n in parameters.oriented:
            generator.manual_seed(m * n)
            signals[m, n] = normal(m, SIGNAL), normal(SIGNAL, n)
        generator.manual_seed(0)

        def gradient(shape: Shape) -> Tensor:
            m, n = min(shape), max(shape)
            a, b = signals[m, n]
            G = torch.addmm(normal(m, n), a * normal(SIGNAL), b)
            return (G if shape == (m, n) else G.mT.contiguous()).to(dtype)

        self.start = [(0.02 * normal(*shape)).to(dtype) for shape in parameters.each]
        self.gradients = [[gradient(shape) for shape in parameters.each] for _ in range(GRADIENTS)]
        self.buffers = [torch.empty_like(W) for W in self.start]
        self._settled: dict[Any, dict[str, Any]] = {}

    def load(self, weights: Sequence[Tensor], t: int) -> None:
        """Give the weights their t-th gradients."""
        for W, buffer, G in zip(weights, self.buffers, self.gradients[t % GRADIENTS], strict=True):
            W.grad = buffer.copy_(G)

    def settled(self, entry: Entry, index: int) -> dict[str, Any]:
        """Return the state of weight ``index`` alone after SETTLING steps; the same for all of its oriented shape."""
        shape = self.start[index].shape
        key = entry.optimizer, entry.rank, min(shape), max(shape)
        if key not in self._settled:
            W = torch.nn.Parameter(self.start[index].clone())
            # The state does not depend on Newton-Schulz's dtype, and half precision is slow on many CPUs.
            optimizer = entry.build([W], backend="torch", ns_dtype=torch.float32)
            for t in range(SETTLING):
                W.grad = self.gradients[t % GRADIENTS][index].clone()
                optimizer.step()
            self._settled[key] = optimizer.state_dict()["state"][0]
        return self._settled[key]
