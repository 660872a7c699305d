"""New groups: plain settings, one without an algorithm as of a trainer that unfreezes layers, and what to warn of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group
from prokl.algorithm.settings import plain
from prokl.engine.adamw import ARGUMENTS
from prokl.engine.weights import DEFAULTS, named, weights_of

KERNEL_WIDTHS = (3, 5, 7, 9)
"""Widths of most one-dimensional convolutions. With four times as many channels a stack of experts is unlikely."""


def plain_group(group: Group, settings: Collection[str]) -> Group:
    """Return a group with its settings as :func:`plain` has them, and lists of one value a weight as lists."""
    found = {key: plain(value) if key in settings else value for key, value in group.items()}
    if "adjust_lr_fn" in settings and found.get("adjust_lr_fn", "") is None:  # as torch's Muon has it by default
        found["adjust_lr_fn"] = "original"
    lists = [key for key in DEFAULTS if isinstance(found.get(key), tuple) and not isinstance(group[key], tuple)]
    return found | {key: list(found[key]) for key in lists}


def split_off_vectors(group: Group, adamw: Sequence[Group]) -> tuple[list[Group], str | None]:
    """Return a new group as the groups to add, and what there is to say about it.

    The weights below 2-D of a group that names no algorithm go to an AdamW group of their own, with the options of the
    optimizer's last AdamW group and without weight decay, as norms and biases have none in ``prokl.param_groups``. It
    comes before the rest: who sets the lr of the last group (Lightning's BackboneFinetuning) means the one it gave.

    Args:
        group: the new group; its ``params`` may be an iterator, or one tensor.
        adamw: the optimizer's AdamW groups so far. Without any the group stays as it is, and is refused as a matrix
            group.

    Raises:
        ValueError: it is not certain which lr such weights should have.
    """
    by_place = any(isinstance(group.get(key), list) for key in ("transposed", "split"))
    if "algorithm" in group or not adamw or by_place or isinstance(group.get("params"), (set, type(None))):
        return [group], None
    entries = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    vectors = [entry for entry in entries if _dimensions(entry) < 2]
    rest = [entry for entry in entries if _dimensions(entry) >= 2]
    if not vectors:
        return [{**group, "params": entries}], None

    what = f"{len(vectors)} of {len(entries)} weights of a new group without an algorithm are below 2-D"
    what += f", {_say(vectors[0])} among them"
    remedy = 'give them a group of their own, {"params": [...], "algorithm": "adamw", "lr": ...}'
    rates = sorted({float(g["lr"]) for g in adamw})
    if len(rates) > 1:
        raise ValueError(f"{what}, and the optimizer's AdamW groups have several lrs, {rates}: {remedy}.")
    keys = sorted(group.keys() - {"params"})
    if keys and not rest:
        raise ValueError(
            f"{what}, and it has its own {', '.join(keys)}: say whose by "
            f'"algorithm": "adamw" (whose lr is {rates[0]:g} so far), or leave them out to have AdamW\'s.'
        )
    options = {key: adamw[-1][key] for key in (ARGUMENTS - {"weight_decay"}) & adamw[-1].keys()}
    options["weight_decay"] = 0.0
    groups = [{"params": vectors, "algorithm": "adamw", **options}]
    warning = (
        f"{what}: they are in an AdamW group of their own now, with lr={rates[0]:g}. To choose otherwise, {remedy}."
    )
    return groups + ([{**group, "params": rest}] if rest else []), warning


def like_conv1d(groups: Sequence[Group], index: int) -> str | None:
    """Return what to say of stacks in new groups, from number ``index`` on, that look like weights of a Conv1d."""
    found = [
        weight
        for weight in weights_of(groups, index)
        if weight.matrix and weight.p.ndim == 3 and weight.split is None and not weight.transposed
        if (width := weight.p.shape[2]) == 1 or (width in KERNEL_WIDTHS and weight.p.shape[1] >= 4 * width)
    ]
    if not found:
        return None
    count, rows, cols = (first := found[0]).p.shape
    more = f", and {len(found) - 1} more like it" if len(found) > 1 else ""
    return (
        f"{first.name} of shape {(count, rows, cols)} is read as a stack of {count} matrices of {rows} x {cols}{more}. "
        'The weight of a Conv1d is no stack: put it into a group {"params": [...], "algorithm": "adamw", "lr": ...}, '
        "as prokl.param_groups does."
    )


def _dimensions(entry: Any) -> float:
    """Return the dimensions of a weight or (name, weight); infinity for anything else, which PyTorch refuses itself."""
    p = entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry
    return p.ndim if isinstance(p, Tensor) else float("inf")


def _say(entry: Any) -> str:
    return str(entry[0]) if isinstance(entry, tuple) else f"one of shape {tuple(entry.shape)}"


def without_effect(groups: Sequence[Group], given: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    """Return a warning about arguments other than their defaults that all matrix groups override, or None.

    Args:
        groups: the optimizer's. given: the constructor's arguments. defaults: what its signature has.
    """
    matrices = [group for group in groups if group["algorithm"] == "matrix"]
    found = {}
    for key, value in given.items():
        overrides = [group[key] for group in matrices if group[key] != value]
        written = key == "lr" and value is not defaults[key]  # also an equal number; trainers write out the others
        if (written or value != defaults[key]) and matrices and len(overrides) == len(matrices):
            found[key] = ", ".join(dict.fromkeys(map(repr, overrides)))
    if not found:
        return None
    reach, it = ("reaches", "it") if len(found) == 1 else ("reach", "them")
    return (
        f"{', '.join(f'{key}={given[key]!r}' for key in found)} of the constructor {reach} no group, as all have their "
        f"own: {', '.join(f'{key}={values}' for key, values in found.items())}. Set {it} there, as by "
        f"prokl.param_groups(model, lr=..., adamw_lr=...), or leave {it} out."
    )


def in_float16(groups: Sequence[Group]) -> str | None:
    """Return a warning about weights in float16, in which the smallest normal number is 6e-5, or None."""
    trained = [(p, name) for i, group in enumerate(groups) for p, name in named(group, i) if p.requires_grad]
    half = [name for p, name in trained if p.dtype == torch.float16]
    if not half:
        return None
    return (
        f"{len(half)} of {len(trained)} weights that train are float16, {half[0]} among them: small gradients vanish "
        "there, AdamW's eps of 1e-8 is 0, and weights become NaN: use bfloat16 or float32 weights, of which "
        "torch.autocast computes in float16."
    )
