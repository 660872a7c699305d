"""The optimizers that are compared, one table: what they are called, how they are built, the rates they train with.

The protocol is the paper's: every optimizer but AdamW handles the hidden matrices alone; embedding, head
and norms get AdamW with one learning rate, the same for all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import prokl
from bench import rivals
from bench.training.cosmos import Cosmos
from bench.training.online_kl_shampoo import OnlineKLShampoo
from prokl.algorithm.settings import PRO_ADVANCED
from prokl.algorithm.shapes import alpha_kl_bracket, effective_rank

ADAMW_BETAS = (0.9, 0.95)  # paper, appendix "Hyperparameter sweeps"
CLIP = PRO_ADVANCED["clip_threshold"]
PAPER: dict[str, Any] = {"rank": 128} | {name: prokl.PAPER[name] for name in ("momentum", "beta2", "alpha_kl")}
"""Settings of the paper's ablations, for which nobody has found others."""
PRO = "pro-klshampoo"
RANKED = (PRO, "smok-hop", "cosmos", "subspace-only", "complement-only")  # the methods with a rank
OWN = (PRO, "kl-shampoo", "smok-hop", "subspace-only", "complement-only")  # this package's


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters that one optimizer is built with; those that its method does not take are None."""

    method: str  # a key of :data:`OPTIMIZERS`
    lr: float  # of the matrices; under AdamW, of everything
    adamw_lr: float | None = None  # of embedding, head and norms under every other method
    weight_decay: float = 0.0  # of the matrices; under AdamW, also of embedding and head
    adamw_weight_decay: float = 0.0  # of embedding and head under every other method
    rank: int | None = None  # of the tracked subspace
    alpha_kl: float | None = None  # Pro-KLShampoo's mixing weight
    preset: str | None = None  # "paper": prokl's own have the other settings of prokl.PAPER
    bounded: bool = True  # whether prokl's own have their clip_threshold, whatever the preset
    momentum: float | None = None  # of the matrices where it is not the method's own
    beta2: float | None = None  # of preconditioners, likewise
    ns_steps: int | None = None  # iterations of Newton-Schulz, likewise
    precondition_frequency: int | None = None  # steps from one refresh to the next, likewise
    float32: bool = False  # whether Newton-Schulz multiplies in it everywhere, not only where a CPU emulates bfloat16
    qk_pieces: int = 1  # equal pieces of the rows of each query and key weight, stepped as weights of their own
    qk_rate: float = 1.0  # times lr: the rate of query and key weights
    qk_alpha: float = 1.0  # times an "auto" alpha_kl: that of query and key weights of one shape


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    label: str  # in tables and figures
    colour: str  # of its lines
    lr: float  # the best of the range in the row's comment, on bench.pretrain's default run, whole weights, seed 0
    make: Callable[..., torch.optim.Optimizer]  # builds the optimizer of matrix weights, with its own settings by name
    # of ``make`` that have a field of :class:`Hyper`, apart from rates, and from a rank in a group
    settings: tuple[str, ...] = ()
    momentum: float | None = None  # in place of the class's own


PRO_SETTINGS = ("beta2", "alpha_kl", "ns_steps", "precondition_frequency")
_EXPRESS = partial(rivals.muon, "Muon", ns_coeffs="polar_express")
OPTIMIZERS = {
    "adamw": Entry("AdamW", "tab:gray", 2e-3, torch.optim.AdamW),  # swept 1e-3 to 1.2e-2
    "muon": Entry("Muon", "tab:orange", 3e-2, torch.optim.Muon),  # swept 1e-2 to 4e-2
    # swept 2e-2 to 4.5e-2
    "muon-0.9": Entry("Muon, momentum 0.9", "tab:orange", 3e-2, torch.optim.Muon, momentum=0.9),
    "kl-shampoo": Entry("KL-Shampoo", "tab:blue", 1e-2, prokl.KLShampoo, ("beta2",)),  # swept 2e-3 to 1.5e-2
    # swept 1e-2 to 6e-2
    "pro-klshampoo": Entry("Pro-KLShampoo", "tab:red", 3e-2, prokl.ProKLShampoo, PRO_SETTINGS),
    # not swept: what the paper chose on LLaMA 134M, its authors' own, their packages' own, Muon's those of torch's
    "cosmos": Entry("COSMOS", "tab:olive", 1e-3, Cosmos, ("rank",)),
    "online-kl-shampoo": Entry("Online KL-Shampoo", "rosybrown", 9.434e-2, OnlineKLShampoo, ("beta2",)),
    "soap": Entry("SOAP", "tab:pink", 3e-3, rivals.soap),
    "normuon": Entry("NorMuon", "tab:cyan", 2e-2, partial(rivals.muon, "NorMuon")),
    "muon-polar-express": Entry("Muon, Polar Express", "gold", 2e-2, _EXPRESS),
    "adamw-cautious": Entry("AdamW, cautious decay", "black", 1e-3, rivals.cautious_adamw),
    # not swept: the paper's for LLaMA 134M, and for the ablations 1.5 times Pro-KLShampoo's as in the paper
    **{
        name: Entry(label, colour, lr, partial(prokl.ProKLShampoo, variant=name, **PAPER), hyper)
        for name, label, colour, lr, hyper in (
            ("smok-hop", "Smok-Hop", "tab:green", 3e-3, ("beta2",)),
            ("subspace-only", "subspace only", "tab:purple", 4.5e-2, ("beta2", "alpha_kl")),
            ("complement-only", "complement only", "tab:brown", 4.5e-2, ("beta2", "alpha_kl")),
        )
    },
}
"""Entries by method, as every result file names it in the column ``optimizer``."""


def label(method: str, rank: object = None) -> str:
    """Return what tables call a method, with its rank where it has one; other packages' optimizers by their name."""
    own = OPTIMIZERS[method].label if method in OPTIMIZERS else method
    return own + (f", r = {rank}" if rank else "")


def split(model: nn.Module, h: Hyper) -> list[dict[str, Any]]:
    """Return parameter groups by prokl's own routing, so that all methods agree on what counts as a matrix."""
    groups = prokl.param_groups(
        model,
        lr=h.lr,
        adamw_lr=h.adamw_lr,
        weight_decay=h.weight_decay,
        adamw_weight_decay=h.adamw_weight_decay,
        adamw_betas=ADAMW_BETAS,
        rank=h.rank,
        heads=False,  # whole weights, as the paper's and as all recorded rows
    )
    if (h.qk_pieces, h.qk_rate, h.qk_alpha) == (1, 1.0, 1.0):
        return groups
    found = []
    for group in groups:
        if group["algorithm"] == "matrix":
            query_key = [named for named in group["params"] if named[0].split(".")[-2] in ("q_proj", "k_proj")]
            own = {"split": h.qk_pieces if h.qk_pieces > 1 else None, "lr": h.lr * h.qk_rate}
            if h.qk_alpha != 1:
                rows, columns = query_key[0][1].shape
                m, n = sorted((rows // h.qk_pieces, columns))
                bracket = alpha_kl_bracket(m, n, effective_rank(h.rank or "auto", m, n))
                own["alpha_kl"] = h.qk_alpha * math.sqrt(math.prod(bracket))
            found.append(group | own | {"params": query_key})
            group = group | {"params": [named for named in group["params"] if named not in query_key]}
        found.append(group)
    return found


def build(model: nn.Module, h: Hyper, state_dtype: torch.dtype | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a whole model, to step one after another; ``state_dtype`` is of prokl's own."""
    if h.method == "adamw":
        return [_adamw(split(model, replace(h, adamw_lr=h.lr, adamw_weight_decay=h.weight_decay)))]
    entry, groups = OPTIMIZERS[h.method], split(model, h)
    h = replace(h, momentum=h.momentum or entry.momentum)
    settings = {name: getattr(h, name) for name in (*entry.settings, "momentum") if getattr(h, name) is not None}
    if h.method in OWN:  # which have AdamW inside
        if h.preset == "paper":
            others = {"clip_threshold"} if h.method != "kl-shampoo" else {"clip_threshold", "alpha_kl"}
            settings = {key: value for key, value in prokl.PAPER.items() if key not in others} | settings
        for group in groups:
            if group["algorithm"] == "matrix":
                group["clip_threshold"] = CLIP if h.bounded else None
        if h.float32 and entry.make is not prokl.KLShampoo:
            settings["ns_dtype"] = torch.float32
        return [entry.make(groups, state_dtype=state_dtype, **settings)]
    rest = [group for group in groups if group["algorithm"] == "adamw"]
    matrices = [group for group in groups if group["algorithm"] != "adamw"]
    weights = [weight for group in matrices for _, weight in group["params"]]
    make, float32 = entry.make, h.float32 or rivals.emulated(weights[0].device)
    if make is torch.optim.Muon and float32:
        make = rivals.Float32Muon
    if make is torch.optim.Muon and weights[0].is_cuda:
        make = rivals.BatchedMuon  # torch's launches so much that the host bounds it there
    if h.method in ("normuon", "muon-polar-express"):
        settings["float32"] = float32
    if h.method == "cosmos" and float32:
        settings["ns_dtype"] = torch.float32
    settings |= {"lr": h.lr, "weight_decay": h.weight_decay}
    divided = len(matrices) > 1
    return [rivals.in_pieces(make, matrices, **settings) if divided else make(weights, **settings), _adamw(rest)]


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    own = [{key: group[key] for key in ("params", "lr", "weight_decay")} for group in groups]
    fused = all(weight.is_cuda for group in groups for _, weight in group["params"])
    return torch.optim.AdamW(own, betas=ADAMW_BETAS, fused=fused or None)
