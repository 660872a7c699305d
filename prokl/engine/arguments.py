"""Warnings that follow from the groups of a constructor: arguments that reach none, and weights in float16."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from prokl.algorithm.method import Group
from prokl.engine.weights import named


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
