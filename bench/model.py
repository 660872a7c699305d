"""A byte-level GPT small enough for a laptop: pre-norm, rotary positions, no biases, separate q, k, v and o.

B: sequences; T: positions; W: width; H: heads. Every matrix is its own ``nn.Linear``, because a fused q-k-v
weight would give three different layers one preconditioner.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # bytes
LAYER_TYPES = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")


def rotary_angles(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary position embeddings (arXiv 2104.09864), each (context, head_width / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(context), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates (B, H, T, W/H) queries or keys by their positions' angles."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    """One transformer layer: causal attention, then a GELU network four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, T, W) -> (B, T, W)."""
        h = self.attention_norm(x)
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        x = x + self.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(x))))


class GPT(nn.Module):
    """The whole model; the output head is untied from the embedding, as in the LLaMA runs of the paper."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.final_norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, VOCABULARY, bias=False)
        cos, sin = rotary_angles(context, width // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                std = module.in_features**-0.5
                if name.endswith(("o_proj", "down_proj")):
                    # GPT-2's rule: 2 * layers branches add up to a residual stream of the embedding's size.
                    std /= math.sqrt(2 * layers)
                nn.init.normal_(module.weight, std=std)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) bytes as int64 -> (B, T, 256) logits."""
        T = tokens.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.final_norm(x))
