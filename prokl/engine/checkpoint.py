"""Saving and loading of a matrix optimizer's state: dtypes that survive, settings that older checkpoints lack."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.algorithm.settings import check_adamw
from prokl.algorithm.shapes import MatrixShape, compute_dtype
from prokl.backends.rounding import MASTER


class _NoCast:
    """Carries a state value through ``Optimizer.load_state_dict``, which would cast it to the weight's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


def without_views(state: dict[Tensor, dict[str, Any]]) -> defaultdict[Tensor, dict[str, Any]]:
    """Return ``state`` with every view of a stack as a tensor of its own: pickling a view would store the stack."""
    plain: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
    for p, own in state.items():
        plain[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()}
    return plain


def prepare(
    state_dict: dict[str, Any], here: list[Group], defaults: dict[str, Any], adamw_defaults: dict[str, Any]
) -> dict[str, Any]:
    """Return a state dict with the settings that older ones lack, and the matrix state kept from torch's casts.

    Args:
        state_dict: what is loaded.
        here: the optimizer's groups.
        defaults: of its matrix groups. adamw_defaults: of its AdamW groups, but for lr.

    Raises:
        ValueError: a group is of another algorithm.
    """
    saved = state_dict["param_groups"]
    if len(saved) != len(here):
        return state_dict  # torch says what is wrong
    groups, matrix = [], set()
    for i, (theirs, ours) in enumerate(zip(saved, here, strict=True)):
        algorithm = theirs.get("algorithm", ours["algorithm"])
        if algorithm != ours["algorithm"]:
            raise ValueError(
                f"Invalid algorithm={algorithm!r} of loaded group {i}: it is {ours['algorithm']!r} here. Build the "
                "optimizer with the groups that the state dict was saved with."
            )
        if algorithm == "matrix":
            matrix.update(theirs["params"])
            # The backend is a property of this machine, not of the checkpoint.
            groups.append({**defaults, "algorithm": algorithm, **theirs, "backend": ours["backend"]})
        else:
            groups.append({**adamw_defaults, "lr": ours["lr"], "algorithm": algorithm, **theirs})
    state = {
        i: {k: _NoCast(v) for k, v in own.items()} if i in matrix else own for i, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def restore(state: dict[str, Any], method: Method[Any], optimizer: str) -> set[int]:
    """Check the matrix state in what ``__setstate__`` gets, and copy it onto the weights' devices, in place.

    Args:
        state: see above. method: whose state it is. optimizer: name for an error.

    Returns:
        The indices of the matrix groups that have state.

    Raises:
        ValueError: a group's settings are out of bounds, the state does not fit a weight, or is not finite.
    """
    made = set()
    for i, group in enumerate(state["param_groups"]):
        try:
            check_adamw(group) if group["algorithm"] == "adamw" else method.check(group)
        except ValueError as error:
            raise ValueError(f"Group {i} of the loaded state dict: {error} Correct it there.") from None
        if group["algorithm"] != "matrix":
            continue
        names = group.get("param_names")
        for j, p in enumerate(group["params"]):
            own = {k: v.value if isinstance(v, _NoCast) else v for k, v in state["state"].get(p, {}).items()}
            shapes = _state_shapes(p, method, group)
            if MASTER in own:  # a checkpoint may lack masters that are wanted here, or have others
                shapes[MASTER] = shapes["M"]
            if own.keys() & {"step", "lambda_0", *shapes}:
                own = _missing_counters(p, own) | own
                _check_state(own, shapes, p, names[j] if names else f"parameter {j} of group {i}", optimizer)
                made.add(i)
            if own:  # a copy: what was loaded goes on without this optimizer
                state["state"][p] = {k: _copied(v, p.device) for k, v in own.items()}
    return made


def _copied(value: Any, device: torch.device) -> Any:
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


def _check_state(own: dict[str, Any], shapes: dict[str, Any], p: Tensor, name: str, optimizer: str) -> None:
    """Raise ValueError unless a loaded state has all that a weight needs, and values that a step can go on from.

    What else it has is a wrapper's, and stays.
    """
    known = shapes.keys() | {"lambda_0"}
    found = {k: tuple(v.shape) if isinstance(v, Tensor) else type(v) for k, v in own.items() if k in known}
    if found != shapes or not _has_clock(p, own):
        raise ValueError(
            f"The loaded state of {name} (weight {tuple(p.shape)}) has step={own.get('step')!r} and {found}, "
            f"but {optimizer} needs {shapes}. Load a state dict of the same optimizer, model and rank."
        )
    begun = torch.tensor(own["step"]) >= 0
    for key in shapes:
        value = own[key][begun.to(own[key].device)] if p.ndim == 3 and key != "skipped" else own[key]
        if not begun.any() or not value.is_floating_point():
            continue
        positive = key.startswith("inv_sqrt") or key == "lambda_0"
        if not bool(value.isfinite().all()) or (positive and not bool((value > 0).all())):
            bad = "not positive or not finite" if positive else "not finite"
            raise ValueError(
                f"The loaded state of {name} has {key} with values that are {bad}: the file is damaged, or its run had "
                "failed. Load an earlier one."
            )


def _missing_counters(p: Tensor, own: dict[str, Any]) -> dict[str, Any]:
    """Return the counters that checkpoints before 0.5 lack; what has trained is trusted."""
    if not isinstance(own.get("M"), Tensor):
        return {}
    leading, dtype = p.shape[:1] if p.ndim == 3 else (), compute_dtype(p.dtype, own["M"].dtype)
    ones = torch.ones(leading, dtype=dtype)
    return {"trust": ones, "clipped": torch.zeros_like(ones), "stale": ones.clone()}


def _state_shapes(p: Tensor, method: Method[Any], group: Group) -> dict[str, Any]:
    """Return the shape of every state tensor that a parameter needs."""
    shape = MatrixShape.of(p)
    m, n = shape.m, shape.n
    leading = (shape.count,) if p.ndim == 3 else ()
    shapes = method.state_shapes(m, n, method.rank(group, m, n), group)
    return {"skipped": (), **{key: leading + tail for key, tail in shapes.items()}}


def _has_clock(p: Tensor, own: dict[str, Any]) -> bool:
    step = own.get("step")
    return isinstance(step, list) and len(step) == p.shape[0] if p.ndim == 3 else isinstance(step, int)
