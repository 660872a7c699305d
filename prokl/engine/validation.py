"""Checks of groups, parameters, gradients and memory; every message names parameter, value, bound and remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from prokl.algorithm.settings import SYNONYMS, Group
from prokl.algorithm.shapes import PARAMETER_DTYPES, MatrixShape
from prokl.engine.weights import FLATTENED, Weight, check_reading, is_dtensor, may_move, named, weights_of

ADAMW_GROUP = '{"params": [...], "algorithm": "adamw", "lr": ...}'
KERNEL_WIDTHS = (3, 5, 7, 9)
"""Widths of most one-dimensional convolutions. With four times as many channels a stack of experts is unlikely."""


def check_no_module(params: Any) -> None:
    """Raise TypeError for a module in the place of its parameters; an ``nn.ParameterList`` is nothing but these."""
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        raise TypeError(
            f"params must be parameters or groups, got a module ({type(params).__name__}): pass "
            "prokl.param_groups(model, lr=..., adamw_lr=...), or model.parameters() where all are matrices."
        )


def check_keys(group: Group, settings: Collection[str], others: Collection[str]) -> None:
    """Raise ValueError for a key of a new group that would do nothing: a constructor's own, or a misspelt one.

    Unknown keys pass unless they look like a misspelling: schedulers, trainers and other optimizers have keys of their
    own. A longer name with a setting's in it, as "max_momentum", is none, nor is one with another number, as "beta1".

    Args:
        settings: of the group's algorithm.
        others: no misspellings either: what the other algorithm has, which a wrapper may put into every group.
    """
    removed = {"process_group": "pass it to the constructor"}
    if "algorithm" not in group:  # as groups for other Muons, Jordan's and pytorch_optimizer's, are divided
        removed["use_muon"] = f'write "algorithm": "{"matrix" if group.get("use_muon") else "adamw"}" in their place'
    stems = {re.sub(r"\d", "", setting) for setting in settings}
    for key in group:
        if key in settings or key in others or not isinstance(key, str):
            continue
        if key in removed:
            raise ValueError(f"Invalid {key}={group[key]!r} of a new group: groups have none; {removed[key]}.")
        nearest = get_close_matches(SYNONYMS.get(key, key.lower()), settings, n=1, cutoff=0.8)
        if nearest and re.sub(r"\d", "", key) not in stems - {key} and f"_{nearest[0]}_" not in f"_{key}_":
            raise ValueError(
                f"Invalid {key}={group[key]!r} of a new group: there is no such setting, and the nearest is "
                f"{nearest[0]}. Write {nearest[0]!r}, or give a key of your own a name less like it."
            )


def check_names(groups: Sequence[Group]) -> None:
    """Raise ValueError where two weights have one name: counts, figures and random numbers are told apart by it."""
    seen: dict[str, tuple[Tensor, int]] = {}
    for i, group in enumerate(groups):
        for name, p in zip(group.get("param_names") or (), group["params"], strict=False):
            first, j = seen.setdefault(name, (p, i))
            if first is not p:
                both = f"two weights of group {i}" if i == j else f"a weight of group {j} and one of group {i}"
                raise ValueError(
                    f"Invalid name {name!r}: {both} have it, and counts, figures and random numbers go by names. Make "
                    'them unique, as by ("decoder." + name, parameter), or name no parameter.'
                )


PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that are certain to be no wrappers."""


def why_not_plain_memory(t: Tensor) -> str | None:
    """Return what keeps a tensor from being plain memory, with one element at every address; None where nothing does.

    Whatever goes by addresses would read something else there, or nothing.
    """
    if t.layout != torch.strided:
        return f"of layout {t.layout}"
    if t.device.type == "meta":
        return "on meta, which holds no values"
    if t.is_neg() or t.is_conj():
        return f"with a {'negation' if t.is_neg() else 'conjugation'} that is still to do"
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return f"of class {type(t).__name__}, which stands for other tensors"
    try:
        address = t.data_ptr()
    except RuntimeError:  # of a transform of torch.func
        address = 0
    if t.numel() > 0 and address == 0:
        return "without memory of its own"
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        return f"with several elements in one place of memory (strides {t.stride()})"
    return None


def lies_otherwise(p: Tensor, t: Tensor) -> str | None:
    """Return why fused kernels, which go through memory, would go through ``t`` otherwise than through the weight."""
    one, other = ([s for s, size in zip(x.stride(), x.shape, strict=True) if size > 1] for x in (p, t))
    if one == other and not t.is_neg():
        return None
    return (
        f"{'negated in name alone' if t.is_neg() else f'of strides {t.stride()}'}: with fused=True it must lie in "
        f"memory as the weight does, in strides {p.stride()}. Use torch.empty_like(p).copy_(...) of it, or fused=False"
    )


def check_weight(weight: Weight) -> None:
    """Raise ValueError for a weight that its algorithm cannot read, or a step could not write."""
    p, name = weight.p, weight.name
    if is_lazy(p):
        raise ValueError(f"{name} has no values yet: run one forward pass before making the optimizer.")
    if p.device.type == "meta":  # what replaces it is another tensor, never trained
        raise ValueError(
            f"{name} is on the meta device, which holds no values; must be on a real one: materialise the model, by "
            "model.to_empty(device=...) or by loading its weights, before making the optimizer."
        )
    remedy = f"put it in a group {ADAMW_GROUP} with an lr of AdamW's"
    wrapper = type(p).__torch_dispatch__ is not Tensor.__torch_dispatch__
    trains = weight.matrix or (may_move(p) and not (p.is_complex() or wrapper))  # AdamW also steps complex ones
    if trains and p.dtype not in PARAMETER_DTYPES:
        cure = "optimize its real view" if p.is_complex() else "convert it, or leave it out of the optimizer"
        raise ValueError(f"{name} has dtype {p.dtype}; must be one of {PARAMETER_DTYPES}: {cure}.")
    if weight.matrix:
        if p.ndim < 2:
            raise ValueError(
                f"{name} has shape {tuple(p.shape)}; the matrix method needs at least 2 dimensions. For a whole model "
                f"pass prokl.param_groups(model, lr=..., adamw_lr=...); for this weight {remedy}. {FLATTENED}"
            )
        if p.numel() == 0:
            raise ValueError(f"{name} has shape {tuple(p.shape)} and no elements; leave it out of the optimizer.")
        if MatrixShape.of(p).n == 1:
            raise ValueError(f"{name} has shape {tuple(p.shape)}, a 1x1 matrix without a subspace: {remedy}.")
        check_reading(weight)
    # AdamW knows what to do with wrappers, and a division with DTensors, whose parts are looked at.
    wrapped = is_dtensor(p) or (wrapper and not weight.matrix)
    if may_move(p) and not wrapped and (reason := why_not_plain_memory(p)):
        cure = "send it to AdamW, as by adamw=[...] of prokl.param_groups, or train a plain tensor"
        if not wrapper:
            cure = "use p.resolve_neg(), p.contiguous() or p.to_dense()"
        raise ValueError(f"{name} is a tensor {reason}; the step needs plain memory: {cure}.")


def check_gradient(weight: Weight, is_stepped: bool = True) -> None:
    """Raise an error for a gradient that does not go with its weight, before anything has moved.

    Args:
        is_stepped: whether a step goes through it, and it is no part of that. A lazily negated one is negated then.

    Raises:
        RuntimeError: it is sparse.
        ValueError: its shape or device are not the weight's, it is complex, of another dtype than AdamW's weight, or no
            memory.
    """
    p, name, g = weight.p, weight.name, weight.p.grad
    if g is None:
        return
    if g.layout != torch.strided:
        raise RuntimeError(
            f"{name} has a gradient of layout {g.layout}; neither the matrix method nor AdamW takes it: "
            "build its module with sparse=False."
        )
    if g.shape != p.shape or g.device != p.device or g.is_complex() != p.is_complex():
        raise ValueError(
            f"{name} is {p.dtype} of shape {tuple(p.shape)} on {p.device} and its gradient {g.dtype} of shape "
            f"{tuple(g.shape)} on {g.device}: they must go together. Call zero_grad() after changing a weight, and "
            "backward() again."
        )
    if not weight.matrix and g.dtype != p.dtype:
        raise ValueError(f"{name} is {p.dtype} and its gradient {g.dtype}: AdamW needs p.grad.to(p.dtype).")
    in_memory = is_stepped and (weight.matrix or type(p) in PLAIN)
    reason = why_not_plain_memory(g.resolve_neg()) if in_memory else None
    if reason is not None and "(strides" not in reason:  # an expanded one is only read
        raise ValueError(
            f"{name} has a gradient {reason}; the step needs plain memory: make a plain tensor of it, as "
            "by trigger_wait() or to_local(), before the step."
        )
    if is_stepped and not weight.matrix and weight.group["fused"] and (reason := lies_otherwise(p, g)):
        raise ValueError(f"{name} has a gradient {reason}.")


def like_conv1d(groups: Sequence[Group], index: int) -> str | None:
    """Return what to say of stacks in new groups, from number ``index`` on, that look like weights of a Conv1d."""
    for weight in weights_of(groups, index):
        if not weight.matrix or weight.p.ndim != 3 or weight.split is not None or weight.transposed:
            continue
        count, rows, width = weight.p.shape
        if width == 1 or (width in KERNEL_WIDTHS and rows >= 4 * width):
            return (
                f"{weight.name} of shape {(count, rows, width)} is read as a stack of {count} matrices of {rows} x "
                f"{width}. The weight of a Conv1d is no stack: put it, and others like it, into a group {ADAMW_GROUP}, "
                "as prokl.param_groups does."
            )
    return None


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
