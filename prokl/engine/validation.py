"""Checks of groups, parameters, gradients and memory; every message names parameter, value, bound and remedy."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from prokl.algorithm.method import Group
from prokl.algorithm.settings import SYNONYMS
from prokl.algorithm.shapes import PARAMETER_DTYPES, MatrixShape
from prokl.algorithm.signatures import REMOVED
from prokl.engine.weights import FLATTENED, named


def check_no_module(params: Any) -> None:
    """Raise TypeError for a module in the place of its parameters; an ``nn.ParameterList`` is nothing but these."""
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        raise TypeError(
            f"params must be parameters or groups, got a module ({type(params).__name__}): pass "
            "prokl.param_groups(model, lr=..., adamw_lr=...), or model.parameters() where all are matrices."
        )


def check_algorithm_named(group: Group) -> None:
    """Raise ValueError for a group made for another Muon (Jordan's, pytorch_optimizer's), which says ``use_muon``."""
    if "use_muon" in group and "algorithm" not in group:
        meant = "matrix" if group["use_muon"] else "adamw"
        raise ValueError(
            f"Invalid use_muon={group['use_muon']!r} of a new group: there is no such setting, and all groups would be "
            f'matrices. Write "algorithm": "{meant}", or use prokl.param_groups(model, lr=..., adamw_lr=...).'
        )


def check_keys(group: Group, settings: Collection[str], others: Collection[str]) -> None:
    """Raise ValueError for a key of a new group that would do nothing: a constructor's own, or a misspelt one.

    Its arguments are those of :func:`misspelt`.
    """
    for key in group.keys() - {*settings, *others}:
        if key == "process_group":
            raise ValueError(
                f"Invalid {key}={group[key]!r} of a new group: groups have none. Pass it to the constructor."
            )
        if key in REMOVED:
            raise ValueError(f"Invalid {key}={group[key]!r} of a new group: groups have none; {REMOVED[key]}.")
    for key, reason in misspelt(group, settings, others):
        raise ValueError(f"Invalid {key}={group[key]!r} of a new group: {reason}")


def misspelt(group: Group, settings: Collection[str], others: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each key of a group that is nearly a setting's, and what to write.

    Unknown keys pass unless they look like a misspelling: schedulers, trainers and other optimizers have keys of their
    own. A longer name with a setting's in it, as "max_momentum", is none, nor is one with another number, as "beta1".

    Args:
        group: a group.
        settings: of its algorithm.
        others: no misspellings either: what the other algorithm has, which a wrapper may put into every group.
    """
    for key in group:
        if key in settings or key in others or not isinstance(key, str):
            continue
        if _without_digits(key) in {_without_digits(setting) for setting in settings} - {key}:
            continue
        spelt = SYNONYMS.get(key, key.lower())
        for nearest in get_close_matches(spelt, settings, n=1, cutoff=0.8):
            if f"_{nearest}_" not in f"_{key}_":
                yield (
                    key,
                    f"there is no such setting, and the nearest is {nearest}. Write {nearest!r}, or give a key of your "
                    "own a name less like it.",
                )


def _without_digits(name: str) -> str:
    return re.sub(r"\d", "", name)


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


def check_in_one_group(group: Group, others: Sequence[Group]) -> None:
    """Raise ValueError for a parameter of a new group that another group has."""
    places = {p: (i, name) for i, other in enumerate(others) for p, name in named(other, i)}
    given = group["params"]
    for entry in [given] if isinstance(given, Tensor) else given if isinstance(given, (list, tuple)) else ():
        name, p = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if isinstance(p, Tensor) and p in places:
            i, there = places[p]
            again = f", where it is {name!r} now" if name not in (None, there) else ""
            raise ValueError(
                f"some parameters appear in more than one parameter group: {there}, of shape {tuple(p.shape)}, is in "
                f"group {i} and in a new one{again}. Leave it out of one of the two."
            )


def check_forms(groups: Sequence[Group], state: Mapping[Any, Any]) -> None:
    """Raise TypeError where a group's weights, or a weight's state, were replaced by what can be neither."""
    for i, group in enumerate(groups):
        weights = group.get("params")
        if not isinstance(weights, (list, tuple)) or not all(isinstance(p, Tensor) for p in weights):
            raise TypeError(
                f"Invalid params={weights!r} of group {i}: must be a list of tensors. Set the weights back, each at "
                "the place of its name."
            )
        for p, name in named(group, i):
            if not isinstance(entry := state.get(p, {}), dict):
                raise TypeError(
                    f"Invalid state of {name}: must be a dict, and is {entry!r}. Remove it, optimizer.state.pop(p), to "
                    "begin anew."
                )


@contextmanager
def names_alike() -> Iterator[None]:
    """Say what to do where PyTorch raises because some weights have names and others have not."""
    try:
        yield
    except ValueError as error:
        if "with/without names" not in str(error):
            raise
        raise ValueError(
            f"{error}: give all weights as (name, parameter) pairs, or all without names, as "
            "prokl.param_groups(..., names=False) does."
        ) from None


def check_matrix_parameter(p: Tensor, name: str) -> None:
    """Raise ValueError when the matrix method cannot take ``p``."""
    remedy = 'put it in a group {"params": [...], "algorithm": "adamw", "lr": ...} with an lr of AdamW\'s'
    if p.is_complex() or not p.is_floating_point():
        kind = "complex" if p.is_complex() else "not a floating-point tensor"
        cure = "optimize its real view" if p.is_complex() else "leave it out of the optimizer"
        raise ValueError(f"{name} is {kind} (dtype {p.dtype}); the matrix method needs real weights: {cure}.")
    if p.dtype not in PARAMETER_DTYPES:
        raise ValueError(f"{name} has dtype {p.dtype}; must be one of {PARAMETER_DTYPES}: convert the weight.")
    if p.layout != torch.strided:
        raise ValueError(f"{name} has layout {p.layout}; the matrix method needs a dense weight: use p.to_dense().")
    if p.ndim < 2:
        raise ValueError(
            f"{name} has shape {tuple(p.shape)}; the matrix method needs at least 2 dimensions. For a whole model pass "
            f"prokl.param_groups(model, lr=..., adamw_lr=...); for this weight {remedy}. {FLATTENED}"
        )
    if p.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(p.shape)} and no elements; leave it out of the optimizer.")
    shape = MatrixShape.of(p)
    if shape.n == 1:
        raise ValueError(f"{name} has shape {tuple(p.shape)}, a 1x1 matrix without a subspace: {remedy}.")


def check_materialised(p: Tensor, name: str) -> None:
    """Raise ValueError for a weight that has no values yet.

    What replaces one on the meta device is another tensor, never trained; a lazy one has no shape.
    """
    if is_lazy(p):
        raise ValueError(
            f"{name} has no shape yet; run one forward pass through its lazy module before making the optimizer."
        )
    if p.device.type == "meta":
        raise ValueError(
            f"{name} is on the meta device, which holds no values; must be on a real one: materialise the model, by "
            "model.to_empty(device=...) or by loading its weights, before making the optimizer."
        )


def check_writable(p: Tensor, name: str) -> None:
    """Raise ValueError for an expanded weight, which could not be written without a clash."""
    if p.layout != torch.strided:
        return
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        raise ValueError(f"{name} has strides {p.stride()}, so several elements share memory; use p.contiguous().")


PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that are certain to be no wrappers."""


def _address(t: Tensor) -> int:
    try:
        return t.data_ptr()
    except RuntimeError:  # of a transform of torch.func
        return 0


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
    if t.numel() > 0 and _address(t) == 0:
        return "without memory of its own"
    if any(stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)):
        return f"with several elements in one place of memory (strides {t.stride()})"
    return None


def check_in_memory(p: Tensor, name: str) -> None:
    """Raise ValueError for a matrix weight that is no plain memory, by now: a step would miss it, or go the other way.

    A DTensor is looked at where its parts are stepped.
    """
    reason = None if hasattr(p, "device_mesh") else why_not_plain_memory(p)
    if reason is not None:
        remedy = "use p.resolve_neg()" if p.is_neg() else "put it into an AdamW group, or make a plain tensor of it"
        raise ValueError(f"{name} is a tensor {reason}; the matrix method needs plain memory: {remedy}.")


def check_gradient(p: Tensor, name: str, in_memory: bool = False) -> None:
    """Raise an error for a gradient that does not go with its weight, before anything has moved.

    Args:
        p: the weight. name: its own.
        in_memory: whether the step goes by the gradient's address. What is lazily negated is negated then.

    Raises:
        RuntimeError: it is sparse.
        ValueError: its shape or device are not the weight's, it is complex, or no memory.
    """
    g = p.grad
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
    if in_memory and (reason := why_not_plain_memory(g.resolve_neg())):
        if "(strides" not in reason:  # an expanded one is only read
            raise ValueError(
                f"{name} has a gradient {reason}; the step needs plain memory: make a plain tensor of it, as "
                "by trigger_wait() or to_local(), before the step."
            )
