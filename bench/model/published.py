"""Parameter lists of published models, for predictions: matrices, stacks of experts, and what AdamW steps."""

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """The weights of a model.

    Attributes:
        name: key. matrices: of a layer, in its order: (rows, cols), or (experts, rows, cols). layers: how many.
        adamw: shapes of what AdamW steps, all layers' together.
    """

    name: str
    layers: int
    matrices: tuple[Shape, ...]
    adamw: tuple[Shape, ...]

    @property
    def elements(self) -> int:
        """Count the elements of all weights."""
        return sum(math.prod(shape) for shape in (*self.matrices * self.layers, *self.adamw))


def llama(name: str, layers: int, width: int, hidden: int, kv: int) -> Published:
    """Return a LLaMA with 32,000 tokens: query, key, value and output, gate, up and down, norms, embedding and head."""
    attention = ((width, width), (kv, width), (kv, width), (width, width))
    mlp = ((hidden, width), (hidden, width), (width, hidden))
    tables = ((32000, width), (32000, width))
    return Published(name, layers, attention + mlp, tables + ((width,),) * (2 * layers + 1))


def qwen3_moe(
    name: str, layers: int, width: int, heads: tuple[int, int, int], experts: int, hidden: int, vocabulary: int
) -> Published:
    """Return a Qwen3 mixture, its experts in two stacks a layer, gate and up in one, and a router.

    Args:
        name: of it. layers, width, experts, hidden, vocabulary: its sizes, hidden of one expert.
        heads: query heads, key and value heads, width of one.
    """
    q, kv, size = heads[0] * heads[2], heads[1] * heads[2], heads[2]
    attention = ((q, width), (kv, width), (kv, width), (width, q))
    stacks = ((experts, 2 * hidden, width), (experts, width, hidden))
    vectors = ((width,), (width,), (size,), (size,)) * layers + ((width,),)
    return Published(name, layers, (*attention, (experts, width), *stacks), ((vocabulary, width),) * 2 + vectors)


PUBLISHED = {
    model.name: model
    for model in (
        llama("llama-7b", 32, 4096, 11008, 4096),  # arXiv:2302.13971, width of the MLP from its code
        llama("llama-70b", 80, 8192, 28672, 1024),  # Llama 2, arXiv:2307.09288: 8 heads of keys and values
        qwen3_moe("qwen3-30b-a3b", 48, 2048, (32, 4, 128), 128, 768, 151936),  # arXiv:2505.09388
    )
}
"""By name."""
