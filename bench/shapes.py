"""The parameter sets that are measured: matrix weights of the paper's models, and small ones for a CPU.

Embeddings, output heads, norms and biases are no matrix weights here: AdamW steps them under every optimizer.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ParameterSet:
    """The matrix weights of a model.

    Attributes:
        name: key of the set.
        shapes: (count, rows, cols), rows and columns as torch holds the weight.
        ranks: of the tracked subspace, to measure with.
    """

    name: str
    shapes: tuple[tuple[int, int, int], ...]
    ranks: tuple[int, ...]

    @property
    def matrices(self) -> int:
        """Count the weights."""
        return sum(count for count, _, _ in self.shapes)

    @property
    def elements(self) -> int:
        """Count the elements of all weights."""
        return sum(count * rows * cols for count, rows, cols in self.shapes)

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


def gpt2(name: str, layers: int, width: int, ranks: tuple[int, ...]) -> ParameterSet:
    """Return query, key, value and output, square, and an MLP of four times the width."""
    hidden = 4 * width
    square, up, down = (4 * layers, width, width), (layers, hidden, width), (layers, width, hidden)
    return ParameterSet(name, (square, up, down), ranks)


def llama(name: str, layers: int, width: int, hidden: int, ranks: tuple[int, ...]) -> ParameterSet:
    """Return query, key, value and output, square, and SwiGLU, with two matrices up and one down."""
    square, up, down = (4 * layers, width, width), (2 * layers, hidden, width), (layers, width, hidden)
    return ParameterSet(name, (square, up, down), ranks)


PAPER = ("gpt2-124m", "gpt2-350m", "llama-134m", "llama-450m")
"""The models of the paper's experiments."""
SMALL = tuple(f"{name}/4" for name in PAPER)
"""The same at a quarter of the widths, layers and ranks (7 of 30 layers), for a CPU."""
SETS: dict[str, ParameterSet] = {
    s.name: s
    for s in (
        gpt2("gpt2-124m", 12, 768, (32, 64, 128)),
        gpt2("gpt2-350m", 24, 1024, (32, 64, 128)),
        llama("llama-134m", 12, 768, 2048, (32, 64, 128)),
        llama("llama-450m", 30, 1024, 2816, (32, 64, 128)),
        gpt2("gpt2-124m/4", 3, 192, (8, 16, 32)),
        gpt2("gpt2-350m/4", 6, 256, (8, 16, 32)),
        llama("llama-134m/4", 3, 192, 512, (8, 16, 32)),
        llama("llama-450m/4", 7, 256, 704, (8, 16, 32)),
    )
}
