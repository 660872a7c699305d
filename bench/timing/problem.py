"""What the timed optimizers step: weights and their gradients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bench.shapes import ParameterSet

GRADIENTS = 8  # of a weight
Shape = tuple[int, int]


class Problem:
    """The weights of a set where they start, and normal gradients, which take turns as new ones would come."""

    def __init__(self, parameters: ParameterSet, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.parameters, self.device = parameters, device
        generator = torch.Generator(device).manual_seed(0)

        def normal(shape: Shape) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.start = [0.02 * normal(shape) for shape in parameters.each]
        self.gradients = [[normal(shape) for shape in parameters.each] for _ in range(GRADIENTS)]
        self.buffers = [torch.empty_like(W) for W in self.start]  # what an optimizer is given; it may write there

    def load(self, weights: Sequence[Tensor], t: int) -> None:
        """Give the weights their t-th gradients."""
        for W, buffer, G in zip(weights, self.buffers, self.gradients[t % GRADIENTS], strict=True):
            W.grad = buffer.copy_(G)
