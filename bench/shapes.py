"""The parameter sets that are measured: weights of the paper's models, small ones for a CPU, and gradients for them.

Embeddings, output heads and norms are no matrix weights here: AdamW steps them under every optimizer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.models import CONFIGS, FAMILIES


@dataclass(frozen=True)
class ParameterSet:
    """The matrix weights of a model."""

    name: str
    shapes: tuple[tuple[int, int, int], ...]  # (count, rows, cols), as torch holds the weight
    ranks: tuple[int, ...]  # of the tracked subspace, to measure with
    heads: int = 1  # of attention, to whose rows query and key can be split

    @property
    def text(self) -> str:
        """Return the shapes as one cell of a table."""
        return " ".join(f"{count}x{rows}x{cols}" for count, rows, cols in self.shapes)

    @property
    def each(self) -> list[tuple[int, int]]:
        """Return (rows, cols) of every weight."""
        return [(rows, cols) for count, rows, cols in self.shapes for _ in range(count)]

    @property
    def oriented(self) -> dict[tuple[int, int], int]:
        """Count the weights by short and long side (m, n): those that are stepped together."""
        found: dict[tuple[int, int], int] = {}
        for count, rows, cols in self.shapes:
            key = min(rows, cols), max(rows, cols)
            found[key] = found.get(key, 0) + count
        return found


def _of_model(model: str, divided: int) -> ParameterSet:
    """Return query, key, value and output, and the MLP up and down: layers, widths and ranks divided."""
    config = CONFIGS[model]
    sizes = config.layers, config.width, config.mlp_width, config.heads  # so that heads keep their width
    layers, width, hidden, heads = (size // divided for size in sizes)
    up = 2 * layers if FAMILIES[config.family].gated else layers
    shapes = (4 * layers, width, width), (up, hidden, width), (layers, width, hidden)
    name = model if divided == 1 else f"{model}/{divided}"
    return ParameterSet(name, shapes, tuple(rank // divided for rank in (32, 64, 128)), heads)


PAPER = ("gpt2-124m", "gpt2-350m", "llama-134m", "llama-450m")  # the models of the paper's experiments
SMALL = tuple(f"{name}/4" for name in PAPER)
"""The same at a quarter of the widths, layers and ranks (7 of 30 layers), for a CPU."""
SETS: dict[str, ParameterSet] = {s.name: s for divided in (1, 4) for s in (_of_model(name, divided) for name in PAPER)}

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
