"""Save and load the state of a matrix optimizer: dtypes that survive, settings that older checkpoints lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Method
from prokl.algorithm.names import unwrapped_name
from prokl.algorithm.settings import Group, check_adamw, clone_if_tensor, plain
from prokl.engine import adamw, matrix_state
from prokl.engine.validation import check_names
from prokl.engine.weights import DEFAULTS, check_reading, clock, plain_group, state_dtype, stored_clock, weights_of

MACHINE_SETTINGS = ("backend", "precision", "cuda_graphs")
"""Settings that are this machine's and not a checkpoint's."""


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
    exported = dict(state)
    for i, entry in state.items():
        if not isinstance(i, int):
            continue
        steps = {k: v for k, v in entry.items() if isinstance(k, str) and k.startswith("step")}
        beside = [v.device for k, v in entry.items() if k not in steps and isinstance(v, Tensor) and v.ndim]
        for key, value in steps.items():
            if type(value) is int:
                steps[key] = torch.tensor(value, device="cpu")
            elif isinstance(value, Tensor) and value.ndim and beside:
                steps[key] = value.to(beside[0])
        exported[i] = {**entry, **steps}
    return exported


def prepare(
    state_dict: dict[str, Any],
    here: list[Group],
    defaults: dict[str, Any],
    adamw_defaults: dict[str, Any],
) -> dict[str, Any]:
    """Return a state dict with the settings that older ones lack, and the matrix state kept from torch's casts.

    Args:
        here: the optimizer's groups.
        defaults: of its matrix groups. adamw_defaults: of its AdamW groups, but for lr.

    Raises:
        ValueError: a group is of another algorithm or optimizer, a weight's name is another weight's there, or a state
            is of a version before 0.6. Other numbers of groups or weights are left to torch.
    """
    saved = [*state_dict["param_groups"]]
    saved[: len(here)] = map(_by_name, saved, here)
    _check_order(saved, here)
    groups: list[Group] = []
    matrix: dict[Any, str] = {}
    for i, (loaded, present) in enumerate(zip(saved, here, strict=False)):
        algorithm = loaded.get("algorithm", present["algorithm"])
        if algorithm != present["algorithm"]:
            raise ValueError(
                f"Invalid algorithm={algorithm!r} of loaded group {i}: it is {present['algorithm']!r} here. Build the "
                "optimizer with the groups that the state dict was saved with."
            )
        own = "beta2" if algorithm == "matrix" else "betas"
        if "lr" in loaded and loaded.keys().isdisjoint(("algorithm", own)):
            # Without state nothing else would tell, and its lr and momentum would be taken.
            raise ValueError(
                f"Group {i} of the loaded state dict is another optimizer's: it has neither algorithm nor {own}. To go "
                "on from a run of it, load the model alone."
            )
        if algorithm == "matrix" and "beta2" in loaded and ("variant" in loaded) != ("variant" in defaults):
            whose = "ProKLShampoo's" if "variant" in loaded else "KLShampoo's"
            raise ValueError(
                f"Group {i} of the loaded state dict is {whose}: to go on from a run of it, load the model alone."
            )
        if algorithm == "matrix":
            names = _names(loaded) or [f"weight {number}" for number in loaded["params"]]
            matrix.update(zip(loaded["params"], names, strict=False))
            group = {**defaults, "algorithm": algorithm, **loaded}
            for key, value in loaded.items():  # PyTorch's full state dicts make lists of tuples
                if isinstance(value, list) and isinstance(present.get(key), tuple):
                    group[key] = tuple(value)
            group |= {key: present[key] for key in MACHINE_SETTINGS}
        else:
            group = {**adamw_defaults, "lr": present["lr"], "algorithm": algorithm, **loaded}
        group = plain_group(group, defaults.keys() | adamw_defaults.keys())
        groups.append({**group, "lr": clone_if_tensor(group["lr"])})
    state = dict(state_dict["state"])
    for i, entry in state.items():
        if i in matrix:
            matrix_state.check_version(entry, matrix[i])
            state[i] = {key: _NoCast(value) for key, value in entry.items()}
    return {**state_dict, "state": state, "param_groups": groups + saved[len(groups) :]}


def has_no_settings(group: Group) -> bool:
    """Return True for a loaded group of weights alone.

    PyTorch's ``set_optimizer_state_dict`` gives the settings of a saved group to the last group that has a weight of
    it, where it was divided otherwise, and nothing to a group of weights that were not saved.
    """
    return group.keys() <= {"params", "param_names"}


def check_form(state_dict: Any) -> None:
    """Raise TypeError or ValueError unless this is an optimizer's state dict; the message says how to get one."""
    keys = [*state_dict] if isinstance(state_dict, Mapping) else []
    if {"state", "param_groups"} <= {*keys}:
        groups = state_dict["param_groups"]
        for i, group in enumerate(groups if isinstance(groups, (list, tuple)) else [groups]):
            if not (isinstance(group, Mapping) and "params" in group):
                raise ValueError(f"Group {i} of the loaded state dict has no 'params': {group!r} is no group.")
    else:
        has = f"a dict of {', '.join(map(repr, keys[:3])) or 'nothing'}" if keys or state_dict == {} else None
        inside = [key for key in keys if isinstance(state_dict[key], Mapping) and "param_groups" in state_dict[key]]
        raise (ValueError if has else TypeError)(
            "load_state_dict takes the state dict of an optimizer, with 'state' and 'param_groups', got "
            f"{has or type(state_dict).__name__}: pass what state_dict() gave, as by "
            f"torch.load(path)[{inside[0] if inside else 'optimizer'!r}]."
        )


def _by_name(group: Group, present: Group) -> Group:
    """Return a loaded group with its names, and the lists that go with them, in the order of its weights.

    torch.distributed.checkpoint gives the weights by name in this optimizer's order, and all else in the saved one: of
    flattened groups that of the first weight, which may have been another one. What it lacks is as it is here.
    """
    if has_no_settings(group) and len(group["params"]) == len(present["params"]):
        return {**present, **group}
    weights = group["params"]
    # Torch's names are without its own wrappers, but may have components that wrappers share with others.
    theirs = {unwrapped_name(w): w for w in weights if isinstance(w, str)}
    if len(theirs) < len(weights):  # numbers, or peft's module and its saved copy
        theirs = {w: w for w in weights}
    names, own = (
        [theirs.get(name, theirs.get(unwrapped_name(name), unwrapped_name(name))) for name in each]
        for each in (group.get("param_names", []), present.get("param_names", []))
    )
    if weights == names or {*weights}.isdisjoint(names) or not {*weights} <= {*names, *own}:
        return group
    lists = {}
    for key in ("param_names", *DEFAULTS):
        if any(isinstance(one.get(key), list) for one in (group, present)):
            values = _by_weight(present, own, key) | _by_weight(group, names, key)
            lists[key] = [values[weight] for weight in weights]
    return {**group, **lists}


def _by_weight(group: Group, names: list[str], key: str) -> dict[str, Any]:
    value = group.get(key)
    return dict(zip(names, value if isinstance(value, list) else [value] * len(names), strict=False))


def _names(group: Group) -> list[str]:
    """Return the names of a group's weights, without wrappers; none where it has none."""
    return list(map(unwrapped_name, group.get("param_names", [])))


def _check_order(saved: list[Group], present: list[Group]) -> None:
    """Raise ValueError where state, which goes by place, would go to a weight of another name that is here, too.

    So it is of different numbers of weights, which torch refuses without a name.
    """
    there, here = ([name for group in groups for name in _names(group)] for groups in (saved, present))
    if any(len(set(names)) < len(names) for names in (there, here)):  # as peft's of a module and its saved copy
        there, here = ([n for group in groups for n in group.get("param_names", [])] for groups in (saved, present))
    if len(set(there)) < len(there):  # the loader refuses two weights of one name
        return
    if len(there) != len(here):
        named = all("param_names" in group for group in (*saved, *present))
        for name in [*there, *here] if named else ():
            if (name in there) != (name in here):
                raise ValueError(
                    f"The loaded state dict has {len(there)} weights and this optimizer {len(here)}: {name!r} is "
                    f"{'there' if name in there else 'here'} alone, and state goes by place. Make the model and its "
                    "groups as they were when it was saved, or load the model alone and begin with an empty state."
                )
        return
    for i, name in enumerate(there):
        if name != here[i] and name in here:
            raise ValueError(
                f"The loaded state dict has weights in another order: weight {i} is {name!r} there and {here[i]!r} "
                "here, and state goes by place. Build the model and its groups in the order that it was saved in."
            )


def differing(
    given: list[Group], before: list[Group], now: list[Group], state: Mapping[Tensor, Any], method: Method
) -> list[str]:
    """Return what to say of what a loaded state dict lacks, and of names and settings that it has brought.

    ``given`` are its groups, ``before`` the optimizer's until then, ``now`` since. Settings of a group without state
    made nothing.
    """
    said = []
    if bare := [i for i, group in enumerate(given) if has_no_settings(group)]:
        said.append(
            f"The loaded state dict has no settings for groups {bare}, as their weights were in other groups or in "
            "none: those here stay."
        )
    there, here = ([name for group in groups for name in _names(group)] for groups in (now, before))
    if len(there) == len(here) and (other := [i for i, name in enumerate(there) if name != here[i]]):
        said.append(
            f"The loaded state dict has other names for {len(other)} of {len(here)} weights: weight {other[0]} is "
            f"{there[other[0]]!r} there and {here[other[0]]!r} here. State goes by place: make sure that these are the "
            "same weights."
        )
    matrices = [weight for weight in weights_of(now) if weight.matrix and weight.p.requires_grad]
    if (lacking := [weight.name for weight in matrices if not state.get(weight.p)]) and len(lacking) < len(matrices):
        said.append(
            f"The loaded state dict has no state of {len(lacking)} of {len(matrices)} matrices, {lacking[0]} among "
            "them: they begin anew with the next gradient. That is right for what was frozen."
        )
    found = []
    for i, (loaded, own) in enumerate(zip(now, before, strict=False)):
        if loaded["algorithm"] == "matrix" and any(state.get(p) for p in loaded["params"]):
            for key in (*method.fixed, *DEFAULTS):
                one, two = plain(loaded.get(key)), plain(own.get(key))
                if one != two and _effect(key, loaded, method) != _effect(key, own, method):
                    found.append(f"{key}={loaded.get(key)!r} for group {i}, here {own.get(key)!r}")
    if found:
        more = f", and {len(found) - 3} more" if len(found) > 3 else ""
        said.append(
            f"The loaded state dict has {'; '.join(found[:3])}{more}. Its state was made so, and the optimizer goes on "
            "with its settings. To begin anew with those here, load the model alone."
        )
    return said


def _effect(key: str, group: Group, method: Method) -> Any:
    """Return what a setting comes to for a group's weights; itself where that is out of bounds."""
    try:
        weights = [*weights_of([group])]
        if key == "state_dtype":
            return [state_dtype(group, weight.p) for weight in weights]
        shapes = [(member.suffix, member.shape) for weight in weights for member in weight.members()]
        if key == "rank":
            return [method.rank(group, shape.m, shape.n) for _, shape in shapes]
        if key in DEFAULTS:
            return shapes
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        pass
    return plain(group.get(key))


def restore(state: dict[str, Any], method: Method, optimizer: str, check_values: bool = True) -> None:
    """Check the state in what ``__setstate__`` gets, its values unless it is copied; put it on the weights' devices.

    Raises:
        ValueError: two weights have one name, a group's settings are out of bounds, the state does not fit a weight, or
            is not finite.
    """
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
            for weight in weights:
                if weight.matrix:
                    check_reading(weight)
        except ValueError as error:
            raise ValueError(
                f"Group {i} of the loaded state dict: {error} Correct it there, or load one of this model."
            ) from None
        if group["algorithm"] == "adamw" and check_values:
            try:
                adamw.check_options(group, i)
            except ValueError as error:
                raise ValueError(f"The loaded state dict: {error}") from None
        for weight in weights:
            p, entry = weight.p, {k: unwrapped(v) for k, v in state["state"].get(weight.p, {}).items()}
            if weight.matrix:
                reason = matrix_state.misfit(weight, entry, method, optimizer, live=False)
                if reason is None and check_values:
                    reason = matrix_state.bad_values(weight, entry, method)
            else:
                if "step" in entry:
                    entry["step"] = adamw.count_in_tensor(entry["step"], weight)
                reason = adamw.misfit(weight, entry, live=False)
                if reason is None and check_values:
                    reason = adamw.bad_values(weight, entry)
            if reason is not None:
                whole = ": heads=False of prokl.param_groups keeps queries and keys whole"
                whole *= weight.split is not None and "M_Q" in entry
                raise ValueError(
                    f"The loaded state of {reason}. Load a state dict of the same optimizer, model, rank, "
                    f"init_eigenvalue and split{whole}."
                )
            if entry:  # a copy: what was loaded goes on without this optimizer
                entry = {key: _copied(value, p, weight.matrix) for key, value in entry.items()}
                state["state"][p] = entry
            for member in weight.members() if weight.matrix else ():
                if "step" + member.suffix in entry:
                    entry["step" + member.suffix] = stored_clock(p, clock(member, entry))


def _copied(value: Any, p: Tensor, matrix: bool) -> Any:
    """Return a copy: of a matrix's state on its device; of AdamW's with the weight's strides, which kernels go by."""
    if not isinstance(value, Tensor):
        return value
    if matrix:
        return value.to(p.device, copy=True)
    if value.shape == p.shape and value.stride() != p.stride():
        return torch.empty_like(p, dtype=value.dtype, device=value.device, requires_grad=False).copy_(value)
    return value.clone()
