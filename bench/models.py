"""The paper's models and scaled-down versions of them: decoder-only transformers with separate q, k, v and o.

B: sequences; T: positions; W: width; H: heads; V: vocabulary. Every matrix is its own ``nn.Linear``, because a fused
q-k-v weight would give three different layers one preconditioner.

The paper gives layers, widths, the MLP's width and kind (appendix on alpha_kl, bracket table), and that GPT-2 comes
from modded-nanogpt and LLaMA follows GaLore. Everything else is assumed to be what these two had:

- gpt2: modded-nanogpt's record of 2024-10-14 ("ModernArch"), its first with the paper's 5100 iterations and with
  separate q, k and v (https://github.com/KellerJordan/modded-nanogpt, records/track_1_short): rotary positions,
  norms without weights, normalised queries and keys, ReLU squared, heads of width 128, embedding tied to the head,
  GPT-2's 50257 tokens padded to 50304, and projections into the residual stream that start at zero. The names 124M and
  350M hold with a tied embedding only. Heads of the 350M model: of width 128 too.
- llama: GaLore's configs/llama_130m.json and llama_350m.json (https://github.com/jiaweizzhao/GaLore): SwiGLU, norms
  with weights and eps 1e-6, heads of width 64, untied embedding and head of 32000 tokens each, weights normal with
  deviation 0.02 at every size. 134M and 450M hold with an untied head only.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BYTES = 256  # vocabulary of text read as bytes
GPT2_VOCABULARY = 50304  # 50257 tokens, padded to a multiple of 128
LLAMA_VOCABULARY = 32000  # tokens of T5's tokenizer, which GaLore takes, without its 100 sentinels


@dataclass(frozen=True)
class ModelConfig:
    """The dimensions of a model."""

    family: str  # "gpt2", "llama", or "byte-gpt" for the model of ``bench.pretrain``
    layers: int
    width: int
    heads: int  # of an even width each, which rotary positions need
    mlp_width: int  # columns between the MLP's matrices
    vocabulary: int  # tokens that the embedding knows
    context: int  # positions at most
    tied: bool  # whether the head is the embedding


def rotary_angles(context: int, head_width: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of rotary position embeddings (arXiv 2104.09864), each (context, head_width / 2)."""
    frequency = 10_000.0 ** (-torch.arange(0, head_width, 2) / head_width)
    angle = torch.outer(torch.arange(context), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (B, H, T, W/H) queries or keys by their positions' angles, in x's dtype."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


def _start_byte_gpt(model: nn.Module, config: ModelConfig) -> None:
    """Draw with deviation 1/sqrt(inputs); less where 2 * layers branches add up to a stream of the embedding's size."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            std = module.in_features**-0.5
            if name.endswith(("o_proj", "down_proj")):
                std /= math.sqrt(2 * config.layers)
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0)


def _start_gpt2(model: nn.Module, config: ModelConfig) -> None:
    """Keep torch's defaults, but begin every branch as zero."""
    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            nn.init.zeros_(module.weight)


def _start_llama(model: nn.Module, config: ModelConfig) -> None:
    """Draw with deviation 0.02 everywhere, whatever the width."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


@dataclass(frozen=True)
class Family:
    """The traits that models of one family share."""

    activation: Callable[[Tensor], Tensor]  # of the MLP
    gated: bool  # whether a second matrix gates it (SwiGLU)
    norm_weights: bool  # whether norms have learnt scales
    norm_eps: float | None  # None is the dtype's epsilon
    qk_norm: bool  # whether queries and keys are normalised per head
    start: Callable[[nn.Module, ModelConfig], None]  # draws the initial weights, from torch's generator


FAMILIES = {
    "gpt2": Family(lambda x: F.relu(x).square(), False, False, None, True, _start_gpt2),  # arXiv 2109.08668
    "llama": Family(F.silu, True, True, 1e-6, False, _start_llama),
    "byte-gpt": Family(F.gelu, False, True, None, False, _start_byte_gpt),
}


class Block(nn.Module):
    """One transformer layer: causal attention, then the MLP, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        family, width = FAMILIES[config.family], config.width
        self.family = family
        self.heads = config.heads
        self.attention_norm = nn.RMSNorm(width, family.norm_eps, family.norm_weights)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp_norm = nn.RMSNorm(width, family.norm_eps, family.norm_weights)
        if family.gated:
            self.gate_proj = nn.Linear(width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Map (B, T, W) to (B, T, W)."""
        x = x + self._attention(self.attention_norm(x), cos, sin)
        return x + self._mlp(self.mlp_norm(x))

    def _attention(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.family.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]).to(v.dtype), F.rms_norm(k, k.shape[-1:]).to(v.dtype)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _mlp(self, h: Tensor) -> Tensor:
        if self.family.gated:
            return self.down_proj(self.family.activation(self.gate_proj(h)) * self.up_proj(h))
        return self.down_proj(self.family.activation(self.up_proj(h)))


class Transformer(nn.Module):
    """A whole model of any family, in float32 on the CPU, its weights drawn from torch's generator."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        family = FAMILIES[config.family]
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.width, family.norm_eps, family.norm_weights)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.embedding.weight = self.lm_head.weight  # begins as the head does
        cos, sin = rotary_angles(config.context, config.width // config.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        family.start(self, config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T) int64 tokens to (B, T, V) logits; T is at most the configuration's context."""
        T = tokens.shape[1]
        cos, sin = self.cos[:T], self.sin[:T]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.lm_head(self.final_norm(x))


def gpt2(layers: int, width: int, heads: int, vocabulary: int = BYTES, context: int = 1024) -> ModelConfig:
    """Return a GPT-2 whose MLP is four times as wide as the stream."""
    return ModelConfig("gpt2", layers, width, heads, 4 * width, vocabulary, context, tied=True)


def byte_gpt(layers: int, width: int, heads: int, context: int) -> ModelConfig:
    """Return the byte-level GPT of ``bench.pretrain``; its recorded results hold for this architecture."""
    return ModelConfig("byte-gpt", layers, width, heads, 4 * width, BYTES, context, tied=False)


CONFIGS: dict[str, ModelConfig] = {
    "gpt2-124m": gpt2(12, 768, 6, GPT2_VOCABULARY),
    "gpt2-350m": gpt2(24, 1024, 8, GPT2_VOCABULARY),
    "llama-134m": ModelConfig("llama", 12, 768, 12, 2048, LLAMA_VOCABULARY, 1024, tied=False),
    "llama-450m": ModelConfig("llama", 30, 1024, 16, 2816, LLAMA_VOCABULARY, 1024, tied=False),
    # An eighth of the smaller two's widths, on bytes. Heads of width 16, so that rotation has pairs.
    "gpt2-tiny": gpt2(4, 96, 6, context=128),
    "llama-tiny": ModelConfig("llama", 4, 96, 6, 256, BYTES, 128, tied=False),
}
"""Configurations by name. ``dataclasses.replace`` fits vocabulary and context of scaled-down ones to other data."""
