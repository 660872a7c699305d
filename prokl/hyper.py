"""Hyper-parameters of one step, read anew from a parameter group at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Variant = Literal["pro-klshampoo", "smok-hop", "subspace-only", "complement-only"]
VARIANTS: tuple[str, ...] = get_args(Variant)


@dataclass(frozen=True)
class Hyper:
    """What both methods share: ``W <- (1 - lr * weight_decay) W - lr * direction`` and the EMAs."""

    lr: float | Tensor
    weight_decay: float
    momentum: float
    beta2: float
    eps: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        """Read from a parameter group."""
        return cls(group["lr"], group["weight_decay"], group["momentum"], group["beta2"], group["eps"])


@dataclass(frozen=True)
class ProHyper(Hyper):
    """Pro-KLShampoo's own: mixing weight, Newton-Schulz and the variant."""

    alpha_kl: float
    ns_steps: int
    ns_coefficients: tuple[float, float, float]
    ns_dtype: torch.dtype | None
    variant: Variant

    @classmethod
    def of(cls, group: dict[str, Any]) -> ProHyper:
        """Read from a parameter group."""
        return cls(
            group["lr"],
            group["weight_decay"],
            group["momentum"],
            group["beta2"],
            group["eps"],
            group["alpha_kl"],
            group["ns_steps"],
            tuple(group["ns_coefficients"]),
            group["ns_dtype"],
            group["variant"],
        )

    @property
    def has_subspace(self) -> bool:
        """Whether the update has the subspace part Delta_sub."""
        return self.variant != "complement-only"

    @property
    def has_complement(self) -> bool:
        """Whether the update has the complement part Delta_res."""
        return self.variant != "subspace-only"

    @property
    def orthogonalizes(self) -> bool:
        """Whether the complement part goes through Newton-Schulz."""
        return self.variant in ("pro-klshampoo", "complement-only")

    @property
    def subspace_weight(self) -> float:
        """alpha_kl; Smok-Hop sets it to 1 whatever is passed (paper, after Algorithm 2)."""
        return 1.0 if self.variant == "smok-hop" else self.alpha_kl

    @property
    def gradient_weights(self) -> tuple[float, float, float]:
        """``(g, a, b)``: M <- momentum * M + g * G, then the direction uses a * G + b * M.

        Nesterov lookahead (P1) for all variants but Smok-Hop, whose momentum is an EMA.
        """
        if self.variant == "smok-hop":
            return 1.0 - self.momentum, 0.0, 1.0
        return 1.0, 1.0, self.momentum

    def polar_dtype(self, arithmetic: torch.dtype) -> torch.dtype:
        """Dtype of the Newton-Schulz products: bfloat16 as in Muon, float64 for float64 weights."""
        if self.ns_dtype is not None:
            return self.ns_dtype
        return torch.float64 if arithmetic == torch.float64 else torch.bfloat16
