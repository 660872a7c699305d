"""The optimizers compared: one table with defaults, where these come from, and how to build.

The protocol is the paper's: every optimizer but AdamW handles the hidden matrices alone; embedding, head
and norms get AdamW with one learning rate, the same for all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

import prokl

if TYPE_CHECKING:
    from bench.settings import Settings

ADAMW_BETAS = (0.9, 0.95)  # paper, appendix "Hyperparameter sweeps"
WEIGHT_DECAY = 0.0  # paper, LLaMA runs; prokl.param_groups has the same default


@dataclass(frozen=True)
class Contender:
    """One row of the table. Learning rates: the best of the ranges in the comments, on the default run, seed 0.

    ``build`` takes (model, lr, settings) and returns the optimizers to step one after another.
    """

    label: str
    colour: str
    lr: float
    build: Callable[[nn.Module, float, Settings], list[Optimizer]]


def split(model: nn.Module, lr: float, settings: Settings, rank: int | None = None) -> list[dict[str, Any]]:
    """Parameter groups by prokl's own routing, so that all contenders agree on what counts as a matrix."""
    return prokl.param_groups(model, lr=lr, adamw_lr=settings.adamw_lr, adamw_betas=ADAMW_BETAS, rank=rank)


def _adamw(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    return [torch.optim.AdamW(model.named_parameters(), lr=lr, betas=ADAMW_BETAS, weight_decay=WEIGHT_DECAY)]


def _muon(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    matrices, rest = [], []
    for group in split(model, lr, settings):
        (rest if group.get("algorithm") == "adamw" else matrices).extend(group["params"])
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=WEIGHT_DECAY, momentum=0.95),
        torch.optim.AdamW(rest, lr=settings.adamw_lr, betas=ADAMW_BETAS, weight_decay=WEIGHT_DECAY),
    ]


def _kl_shampoo(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
    return [prokl.KLShampoo(split(model, lr, settings), init_eigenvalue=settings.init_eigenvalue)]


def _pro_kl_shampoo(variant: str) -> Callable[[nn.Module, float, Settings], list[Optimizer]]:
    def build(model: nn.Module, lr: float, settings: Settings) -> list[Optimizer]:
        return [
            prokl.ProKLShampoo(
                split(model, lr, settings, settings.rank),
                alpha_kl=settings.alpha_kl,
                init_eigenvalue=settings.init_eigenvalue,
                variant=variant,
            )
        ]

    return build


CONTENDERS = {
    # swept 1e-3 to 1.2e-2
    "adamw": Contender("AdamW", "tab:gray", 2e-3, _adamw),
    # swept 1e-2 to 4e-2
    "muon": Contender("Muon", "tab:orange", 3e-2, _muon),
    # swept 2e-3 to 1.5e-2
    "kl-shampoo": Contender("KL-Shampoo", "tab:blue", 1e-2, _kl_shampoo),
    # swept 1e-2 to 6e-2
    "pro-klshampoo": Contender(
        "Pro-KLShampoo",
        "tab:red",
        3e-2,
        _pro_kl_shampoo("pro-klshampoo"),
    ),
    # not swept: the paper's for LLaMA 134M, and for the ablations 1.5 times Pro-KLShampoo's as in the paper
    "smok-hop": Contender("Smok-Hop", "tab:green", 3e-3, _pro_kl_shampoo("smok-hop")),
    "subspace-only": Contender(
        "subspace only",
        "tab:purple",
        4.5e-2,
        _pro_kl_shampoo("subspace-only"),
    ),
    "complement-only": Contender(
        "complement only",
        "tab:brown",
        4.5e-2,
        _pro_kl_shampoo("complement-only"),
    ),
}
DEFAULT_OPTIMIZERS = ("adamw", "muon", "kl-shampoo", "pro-klshampoo")


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
