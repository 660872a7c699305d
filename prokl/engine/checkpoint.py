"""Save and load the state of a matrix optimizer: dtypes that survive, settings that older checkpoints lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.algorithm.names import unwrapped_name
from prokl.algorithm.settings import check_adamw, clone_if_tensor, plain
from prokl.engine import adamw, matrix_state
from prokl.engine.newcomers import plain_group
from prokl.engine.validation import check_names
from prokl.engine.weights import (
    DEFAULTS,
    Weight,
    check_reading,
    clock,
    named,
    state_dtype,
    stored_clock,
    weights_of,
)

MACHINE_SETTINGS = ("backend", "precision", "cuda_graphs")
"""Settings that are this machine's and not a checkpoint's."""
FOREIGN_STATE_KEYS = {"exp_avg", "momentum_buffer", "square_avg"}
"""State keys of PyTorch's optimizers, Muon among them."""


class _NoCast:
    """Carries a state value through ``Optimizer.load_state_dict``, which would cast it to the weight's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


def unwrapped(value: Any) -> Any:
    """Return a state value without what carried it through."""
    return value.value if isinstance(value, _NoCast) else value


def without_views(state: dict[Tensor, dict[str, Any]]) -> defaultdict[Tensor, dict[str, Any]]:
    """Return ``state`` with every view of a stack as a tensor of its own: pickling a view would store the stack.

    Entries that hooks keep there under names instead of weights are taken as they are.
    """
    plain: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for p, entry in state.items():
        is_weight = isinstance(p, Tensor)
        plain[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in entry.items()} if is_weight else entry
    return plain


def with_step_tensors(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return a state dict's state with counts of steps, integers while they are live, as int64 tensors.

    Those of a stack, which are live on the CPU, lie beside the rest of its state: torch.distributed.checkpoint loads a
    full state dict onto the one device that all tensors with a dimension share. Entries that hooks keep there
    under names instead of weights' numbers are taken as they are.
    """

    def exported(entry: dict[Any, Any]) -> dict[Any, Any]:
        steps = {k: v for k, v in entry.items() if isinstance(k, str) and k.startswith("step")}
        counts = {k: torch.tensor(v, device="cpu") for k, v in steps.items() if type(v) is int}
        beside = [v.device for k, v in entry.items() if k not in steps and isinstance(v, Tensor) and v.ndim]
        of_stacks = {k: v for k, v in steps.items() if isinstance(v, Tensor) and v.ndim}
        counts |= {k: v.to(beside[0]) for k, v in of_stacks.items() if beside}
        return {**entry, **counts}

    return {i: exported(entry) if isinstance(i, int) else entry for i, entry in state.items()}


def prepare(
    state_dict: dict[str, Any],
    here: list[Group],
    defaults: dict[str, Any],
    adamw_defaults: dict[str, Any],
) -> dict[str, Any]:
    """Return a state dict with the settings that older ones lack, and the matrix state kept from torch's casts.

    Args:
        state_dict: what is loaded.
        here: the optimizer's groups.
        defaults: of its matrix groups. adamw_defaults: of its AdamW groups, but for lr.

    Raises:
        ValueError: it is no optimizer's state dict, has other groups, a group is of another algorithm, or a weight's
            name is another weight's there.
    """
    _check_form(state_dict)
    saved = state_dict["param_groups"]
    _check_sizes(state_dict, here)
    saved = [_by_name(group) for group in saved]
    _check_names(*([name for group in groups for name in group.get("param_names", [])] for groups in (saved, here)))
    groups, matrix = [], set()
    for i, (loaded, present) in enumerate(zip(saved, here, strict=True)):
        algorithm = loaded.get("algorithm", present["algorithm"])
        if algorithm != present["algorithm"]:
            raise ValueError(
                f"Invalid algorithm={algorithm!r} of loaded group {i}: it is {present['algorithm']!r} here. Build the "
                "optimizer with the groups that the state dict was saved with."
            )
        if algorithm == "matrix":
            matrix.update(loaded["params"])
            # An lr that does not say is in old units.
            settings = {**defaults, "algorithm": algorithm, "adjust_lr_fn": "original", **loaded}
            settings |= {
                key: _tuples(value, present.get(key)) for key, value in loaded.items() if isinstance(value, list)
            }
            groups.append({**settings, **{key: present[key] for key in MACHINE_SETTINGS}})
        else:
            groups.append({**adamw_defaults, "lr": present["lr"], "algorithm": algorithm, **loaded})
        groups[i] = plain_group(groups[i], defaults.keys() | adamw_defaults.keys())
        groups[i]["lr"] = clone_if_tensor(groups[i]["lr"])
    names = {i: name for group in saved for i, name in zip(group["params"], _names(group), strict=False)}
    state = dict(state_dict["state"])
    for i, entry in state.items():
        if i in matrix:
            upgraded = matrix_state.upgraded(entry, names.get(i, f"weight {i}"))
            state[i] = {key: _NoCast(value) for key, value in upgraded.items()}
    return {**state_dict, "state": state, "param_groups": groups}


def check_mapping(state_dict: Any) -> None:
    """Raise TypeError for what is no state dict, but the file of one, or what has one."""
    if isinstance(state_dict, Mapping):
        return
    if isinstance(state_dict, (str, PathLike)):
        got, remedy = repr(str(state_dict)), 'load it before, as by torch.load(path)["optimizer"]'
    else:
        got, remedy = f"a {type(state_dict).__name__}", "pass what state_dict() of an optimizer gave"
    raise TypeError(f"load_state_dict takes the state dict of an optimizer, got {got}: {remedy}.")


def _check_form(state_dict: Mapping[Any, Any]) -> None:
    """Raise ValueError for a dict that is no optimizer's state dict, but holds one, or is a model's."""
    lacks = [key for key in ("param_groups", "state") if key not in state_dict]
    if not lacks:
        return
    inside = [key for key, value in state_dict.items() if isinstance(value, Mapping) and "param_groups" in value]
    if inside:
        remedy = f"it holds one: pass that, checkpoint[{inside[0]!r}]"
    elif state_dict and all(isinstance(value, Tensor) for value in state_dict.values()):
        remedy = "it is a model's: pass what state_dict() of an optimizer gave"
    else:
        remedy = "pass what state_dict() of an optimizer gave"
    keys = ", ".join(map(repr, [*state_dict][:3])) + ", ..." * (len(state_dict) > 3)
    raise ValueError(
        f"The loaded state dict has no {' and no '.join(map(repr, lacks))}, but {keys or 'nothing'}, so it is no "
        f"optimizer's; {remedy}."
    )


def _check_sizes(state_dict: Mapping[str, Any], here: list[Group]) -> None:
    """Raise ValueError for other numbers of groups or weights, in torch's words and with the remedy."""
    there, own = ([len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], here))
    if there == own:
        return
    foreign = {key for entry in state_dict["state"].values() if isinstance(entry, Mapping) for key in entry}
    ours = any(str(key).startswith("M_Q") for key in foreign) or any(
        "algorithm" in g for g in state_dict["param_groups"]
    )
    what = "contains a parameter group that doesn't match the size of optimizer's group"
    if len(there) != len(own):
        what = "has a different number of parameter groups"
    remedy = "Build model and groups as they were when it was saved, with the same arguments of prokl.param_groups"
    if not ours and foreign & FOREIGN_STATE_KEYS:
        kept = ", ".join(sorted(foreign & FOREIGN_STATE_KEYS))
        remedy = f"It is another optimizer's, with {kept}: start this one with an empty state"
    raise ValueError(f"loaded state dict {what}: {there} weights in the groups there, and {own} here. {remedy}.")


def _by_name(group: Group) -> Group:
    """Return a loaded group with its names, and the lists that go with them, in the order of its weights.

    torch.distributed.checkpoint gives the weights by name in this optimizer's order, and all else in the saved one.
    """
    weights, names = group["params"], _names(group)
    if weights == names or set(weights) != set(names):
        return group
    lists = {key: group[key] for key in ("param_names", *DEFAULTS) if isinstance(group.get(key), list)}
    return {**group, **{key: [values[names.index(w)] for w in weights] for key, values in lists.items()}}


def _names(group: Group) -> list[str]:
    """Return the names of a group's weights, without wrappers; none where it has none."""
    return list(map(unwrapped_name, group.get("param_names", [])))


def _check_names(saved_names: list[str], names: list[str]) -> None:
    """Raise ValueError where state, which goes by place, would go to a weight of another name that is here, too."""
    there, here = list(map(unwrapped_name, saved_names)), list(map(unwrapped_name, names))
    if len(there) != len(here) or len(set(there)) < len(there):  # the loader refuses two weights of one name
        return
    for i in (i for i, name in enumerate(there) if name != here[i] and name in here):
        raise ValueError(
            f"The loaded state dict has weights in another order: weight {i} is {saved_names[i]!r} there and "
            f"{names[i]!r} here, and state goes by place. Build the model and its groups in the order that it was "
            "saved in."
        )


def differing(before: list[Group], now: list[Group], state: Mapping[Tensor, Any], method: Method[Any]) -> list[str]:
    """Return what to say of names and settings that a loaded state dict has brought, as it was made with them.

    Args:
        before: the optimizer's groups until then. now: since then. state: as loaded; without any of a weight its
            settings made nothing. method: whose.
    """
    said = []
    there, here = (
        [unwrapped_name(n) for group in groups for n in group.get("param_names", [])] for groups in (now, before)
    )
    if len(there) == len(here) and (other := [i for i, name in enumerate(there) if name != here[i]]):
        said.append(
            f"The loaded state dict has other names for {len(other)} of {len(here)} weights: weight {other[0]} is "
            f"{there[other[0]]!r} there and {here[other[0]]!r} here. State goes by place: make sure that these are the "
            "same weights."
        )
    try:
        owns = [*weights_of(before)]
    except ValueError:  # lists that were edited by hand and did not fit: the load has mended them
        return said
    found = []
    for own, weight in zip(owns, weights_of(now), strict=False):  # a hook may have added groups
        if not weight.matrix or not state.get(weight.p):
            continue
        for key in (*method.fixed, *DEFAULTS):
            whose = weight.name if key in DEFAULTS else f"group {weight.group_index}"
            one, two = (getattr(w, key) if key in DEFAULTS else plain(w.group.get(key)) for w in (weight, own))
            if one != two and _in_effect(key, weight, method) != _in_effect(key, own, method):
                found.append(f"{key}={one!r} for {whose}, here {two!r}")
    if found := [*dict.fromkeys(found)]:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        said.append(
            f"The loaded state dict has {'; '.join(found[:3])}{more}. Its state was made so, and the optimizer goes on "
            "with its settings. To begin anew with those here, load the model alone."
        )
    return said


def _in_effect(key: str, weight: Weight, method: Method[Any]) -> Any:
    """Return what a setting comes to for a weight; itself where that is out of bounds, as one set by hand may be."""
    try:
        if key == "state_dtype":
            return state_dtype(weight.group, weight.p)
        if key in ("rank", *DEFAULTS):
            pieces = [(member.suffix, member.shape) for member in weight.members()]
            return [method.rank(weight.group, shape.m, shape.n) for _, shape in pieces] if key == "rank" else pieces
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        pass
    return getattr(weight, key) if key in DEFAULTS else plain(weight.group.get(key))


def _tuples(values: list[Any], present: Any) -> Any:
    """Return a loaded list with the tuples that it had: PyTorch's full state dicts make lists of them."""
    if isinstance(present, tuple):
        return tuple(values)
    return [tuple(value) if isinstance(value, list) else value for value in values]


def restore(
    state: dict[str, Any], defaults: Mapping[str, Any], method: Method[Any], optimizer: str, check_values: bool = True
) -> set[int]:
    """Check the matrix state in what ``__setstate__`` gets, and copy it onto the weights' devices, in place.

    Args:
        state: see above. defaults: of settings that an older pickle lacks. method: whose state it is.
        optimizer: name for an error.
        check_values: whether to read the state; what is copied goes on as it is.

    Returns:
        The indices of the matrix groups that have state.

    Raises:
        ValueError: two weights have one name, a group's settings are out of bounds, the state does not fit a weight, or
            is not finite.
    """
    for settings in (state.get("defaults"), *(g for g in state["param_groups"] if g["algorithm"] == "matrix")):
        if settings is not None:
            settings.update({**defaults, **settings})
    restored: set[int] = set()
    misfits: dict[Tensor, str] = {}
    try:
        check_names(state["param_groups"])
    except ValueError as error:
        raise ValueError(
            f"The loaded state dict: {error} To keep the optimizer's, remove 'param_names' from its groups."
        ) from None
    for i, group in enumerate(state["param_groups"]):
        try:
            check_adamw(group) if group["algorithm"] == "adamw" else method.check(group)
            weights = [*weights_of([group], i)]
        except ValueError as error:
            raise ValueError(f"Group {i} of the loaded state dict: {error} Correct it there.") from None
        if group["algorithm"] != "matrix":
            adamw.count_in_tensors(state["state"], group, i)
            for p, name in named(group, i):
                if entry := state["state"].get(p):
                    if reason := adamw.misfit(p, group, entry):
                        misfits.setdefault(p, f"{name} has {reason}")
                    elif check_values:
                        adamw.check_values(name, entry)
                    state["state"][p] = {k: _lying_as(p, v) for k, v in entry.items()}  # a copy, as of the matrices'
            continue
        for weight in weights:
            p, name = weight.p, weight.name
            entry = {k: unwrapped(v) for k, v in state["state"].get(p, {}).items()}
            check_reading(weight)
            parts = weight.members()
            matrix_state.check_split(entry, parts, name, weight.split)
            if layouts := matrix_state.layouts_of(entry, p, parts, method, group):
                for member, layout in zip(parts, layouts, strict=True):
                    if misfit := matrix_state.misfit(entry, layout, member, optimizer):
                        misfits.setdefault(p, f"{member.name} (weight {tuple(p.shape)}) has {misfit}")
                        break
                    if check_values:
                        matrix_state.check_values(entry, layout, member)
                    entry["step" + member.suffix] = stored_clock(p, clock(member, entry))
                restored.add(i)
            elif foreign := FOREIGN_STATE_KEYS & entry.keys():
                misfits.setdefault(p, f"{name} has {min(foreign)}, another optimizer's, and nothing of {optimizer}'s")
            if entry and not misfits:  # a copy: what was loaded goes on without this optimizer
                clocks = {"step" + member.suffix for member in parts}
                state["state"][p] = {k: v if k in clocks else _copied(v, p.device) for k, v in entry.items()}
    if misfits:
        first, *others = misfits.values()
        more = f"; {len(others)} more {'differs' if len(others) == 1 else 'differ'}" if others else ""
        raise ValueError(
            f"The loaded state of {first}{more}. Load a state dict of the same optimizer, model, rank, "
            "init_eigenvalue and split."
        )
    return restored


def _lying_as(p: Tensor, value: Any) -> Any:
    """Return a copy with the weight's strides, which fused kernels go by, where the shape is the weight's."""
    if isinstance(value, Tensor) and value.shape == p.shape and value.stride() != p.stride():
        return torch.empty_like(p, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)
    return value.clone() if isinstance(value, Tensor) else value


def _copied(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
