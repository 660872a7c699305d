"""Arguments of a constructor: where an unknown one belongs, and which of them have no effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch

from prokl.algorithm.method import Group
from prokl.algorithm.settings import PRO_ADVANCED, SYNONYMS
from prokl.engine.adamw import ARGUMENTS
from prokl.engine.validation import REMOVED
from prokl.engine.weights import named

PARAM_GROUPS_ARGUMENTS = {"adamw", "adamw_betas", "adamw_eps", "adamw_lr", "adamw_weight_decay", "matrix", "names"}
PARAM_GROUPS_ARGUMENTS |= {"heads", "split", "split_fused", "transposed"}
ADAMW_ARGUMENTS = ARGUMENTS - {"lr", "weight_decay", "eps", "maximize", "betas", "differentiable"}


def check_known(title: str, arguments: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError for an argument that is not ``known``: with where it belongs, or the nearest one."""
    for key in arguments:
        if key in known:
            continue
        if key in REMOVED:
            where = REMOVED[key]
        elif key == "betas":
            where = "AdamW's are adamw_betas of prokl.param_groups, the matrix method's momentum and beta2"
        elif key in PARAM_GROUPS_ARGUMENTS:
            where = f"it belongs to the groups, prokl.param_groups(model, {key}=...)"
        elif key in ADAMW_ARGUMENTS:
            where = f'it is AdamW\'s, and belongs to a group {{"params": [...], "algorithm": "adamw", "{key}": ...}}'
        elif key in PRO_ADVANCED.keys() | {"rank", "alpha_kl", "variant"}:
            where = (
                "it is ProKLShampoo's, which alone projects and orthogonalises; leave it out. The authors' form is "
                f"{title}(groups, init_eigenvalue=0.1, clip_threshold=None)"
            )
        elif key == "nesterov":
            where = "its momentum is as the method has it; leave it out"
        else:
            nearest = get_close_matches(SYNONYMS.get(key, key), known, n=1)
            raise TypeError(
                f"{title}() got an unexpected keyword argument {key!r}: "
                + (f"the nearest is {nearest[0]!r}." if nearest else f"it takes {', '.join(known)}.")
            )
        raise TypeError(f"{title}() takes no {key}: {where}.")


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
