"""The optimizers compared: one table with defaults, where these come from, and how to build.

The protocol is the paper's: every optimizer but AdamW handles the hidden matrices alone; embedding, head
and norms get AdamW with one learning rate, the same for all.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import prokl
from bench.training.cosmos import Cosmos
from bench.training.settings import Hyper

ADAMW_BETAS = (0.9, 0.95)  # paper, appendix "Hyperparameter sweeps"
COSMOS_GAMMA = 0.25  # paper, appendix "Comparison with COSMOS"

Build = Callable[[nn.Module, Hyper, torch.dtype | None], list[Optimizer]]


@dataclass(frozen=True)
class Contender:
    """One row of the table. Learning rates: the best of the ranges in the comments, on the default run, seed 0.

    ``build`` takes (model, hyper, state dtype) and returns the optimizers to step one after another.
    """

    label: str
    colour: str
    lr: float
    build: Build


def split(model: nn.Module, h: Hyper) -> list[dict[str, Any]]:
    """Parameter groups by prokl's own routing, so that all contenders agree on what counts as a matrix."""
    return prokl.param_groups(
        model,
        lr=h.lr,
        adamw_lr=h.adamw_lr,
        weight_decay=h.weight_decay,
        adamw_weight_decay=h.adamw_weight_decay,
        adamw_betas=ADAMW_BETAS,
        rank=h.rank,
    )


def _adamw(model: nn.Module, h: Hyper, state: torch.dtype | None) -> list[Optimizer]:
    alike = replace(h, adamw_lr=h.lr, adamw_weight_decay=h.weight_decay)
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in split(model, alike)]
    return [torch.optim.AdamW(groups, lr=h.lr, betas=ADAMW_BETAS)]


def _beside_adamw(build: Callable[[list[Any], Hyper], Optimizer]) -> Build:
    """For an optimizer that takes matrices alone: torch's AdamW takes the rest."""

    def both(model: nn.Module, h: Hyper, state: torch.dtype | None) -> list[Optimizer]:
        matrices, rest = [], []
        for group in split(model, h):
            if group.get("algorithm") == "adamw":
                rest.append({"params": group["params"], "weight_decay": group["weight_decay"]})
            else:
                matrices.extend(group["params"])
        return [build(matrices, h), torch.optim.AdamW(rest, lr=h.adamw_lr, betas=ADAMW_BETAS)]

    return both


def _muon(matrices: list[Any], h: Hyper) -> Optimizer:
    return torch.optim.Muon(matrices, lr=h.lr, weight_decay=h.weight_decay, momentum=0.95)


def _cosmos(matrices: list[Any], h: Hyper) -> Optimizer:
    weights = [weight for _, weight in matrices]
    return Cosmos(weights, lr=h.lr, rank=h.rank, weight_decay=h.weight_decay, gamma=COSMOS_GAMMA)


def _kl_shampoo(model: nn.Module, h: Hyper, state: torch.dtype | None) -> list[Optimizer]:
    return [prokl.KLShampoo(split(model, h), init_eigenvalue=h.init_eigenvalue, state_dtype=state)]


def _pro_kl_shampoo(variant: str) -> Build:
    def build(model: nn.Module, h: Hyper, state: torch.dtype | None) -> list[Optimizer]:
        mixed = {} if h.alpha_kl is None else {"alpha_kl": h.alpha_kl}  # not every variant has both parts
        options = {"init_eigenvalue": h.init_eigenvalue, "variant": variant, "state_dtype": state}
        return [prokl.ProKLShampoo(split(model, h), **mixed, **options)]

    return build


CONTENDERS = {
    # swept 1e-3 to 1.2e-2
    "adamw": Contender("AdamW", "tab:gray", 2e-3, _adamw),
    # swept 1e-2 to 4e-2
    "muon": Contender("Muon", "tab:orange", 3e-2, _beside_adamw(_muon)),
    # swept 2e-3 to 1.5e-2
    "kl-shampoo": Contender("KL-Shampoo", "tab:blue", 1e-2, _kl_shampoo),
    # swept 1e-2 to 6e-2
    "pro-klshampoo": Contender("Pro-KLShampoo", "tab:red", 3e-2, _pro_kl_shampoo("pro-klshampoo")),
    # not swept on the default run: what the paper chose on LLaMA 134M
    "cosmos": Contender("COSMOS", "tab:olive", 1e-3, _beside_adamw(_cosmos)),
    # not swept: the paper's for LLaMA 134M, and for the ablations 1.5 times Pro-KLShampoo's as in the paper
    "smok-hop": Contender("Smok-Hop", "tab:green", 3e-3, _pro_kl_shampoo("smok-hop")),
    "subspace-only": Contender("subspace only", "tab:purple", 4.5e-2, _pro_kl_shampoo("subspace-only")),
    "complement-only": Contender("complement only", "tab:brown", 4.5e-2, _pro_kl_shampoo("complement-only")),
}
DEFAULT_OPTIMIZERS = ("adamw", "muon", "kl-shampoo", "pro-klshampoo")


def with_rank(method: str, rank: object) -> str:
    """A method's label with its rank, where it has one."""
    return CONTENDERS[method].label + (f", r = {rank}" if rank else "")


def contender_of(key: str) -> Contender:
    """The table's row for a key, where a sweep's keys carry their learning rate as in ``muon@0.02``."""
    return CONTENDERS[key.partition("@")[0]]


def label_of(key: str) -> str:
    """How a key is written in tables and legends."""
    _, at, lr = key.partition("@")
    return contender_of(key).label + (f", lr {lr}" if at else "")


def short_label_of(key: str) -> str:
    """How a key is written where four must fit beside a progress bar: the first word, or a sweep's rate."""
    return key.partition("@")[2] or re.split("[- ]", contender_of(key).label)[0]
