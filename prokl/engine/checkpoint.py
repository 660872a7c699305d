"""Saving and loading of a matrix optimizer's state: dtypes that survive, settings that older checkpoints lack."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from prokl.algorithm.method import Group
from prokl.algorithm.shapes import MatrixShape

if TYPE_CHECKING:
    from prokl.engine.base import MatrixOptimizer


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


def prepare(optimizer: MatrixOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with the settings that older ones lack, and the matrix state kept from torch's casts.

    Raises:
        ValueError: a group is of another algorithm.
    """
    saved = state_dict["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        return state_dict  # torch says what is wrong
    groups, matrix = [], set()
    for i, (theirs, ours) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        algorithm = theirs.get("algorithm", ours["algorithm"])
        if algorithm != ours["algorithm"]:
            raise ValueError(
                f"Invalid algorithm={algorithm!r} of loaded group {i}: it is {ours['algorithm']!r} here. Build the "
                "optimizer with the groups that the state dict was saved with."
            )
        if algorithm == "matrix":
            matrix.update(theirs["params"])
            # The backend is a property of this machine, not of the checkpoint.
            groups.append({**optimizer.defaults, "algorithm": algorithm, **theirs, "backend": ours["backend"]})
        else:
            defaults = {**optimizer.adamw_defaults(), "lr": ours["lr"]}
            groups.append({**defaults, "algorithm": algorithm, **theirs})
    state = {
        i: {k: _NoCast(v) for k, v in own.items()} if i in matrix else own for i, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state, "param_groups": groups}


def restore(optimizer: MatrixOptimizer, state: dict[str, Any]) -> set[int]:
    """Check the matrix state in what ``__setstate__`` gets, and copy it onto the weights' devices, in place.

    Returns:
        The indices of the matrix groups that have state.

    Raises:
        ValueError: the state does not fit a weight.
    """
    made = set()
    for i, group in enumerate(state["param_groups"]):
        if group["algorithm"] != "matrix":
            continue
        names = group.get("param_names")
        for j, p in enumerate(group["params"]):
            own = state["state"].get(p)
            if not own:
                continue
            own = {k: v.value if isinstance(v, _NoCast) else v for k, v in own.items()}
            _check_state(optimizer, p, names[j] if names else f"parameter {j} of group {i}", group, own)
            # A copy: what was loaded goes on without this optimizer.
            state["state"][p] = {k: v.to(p.device, copy=True) if isinstance(v, Tensor) else v for k, v in own.items()}
            made.add(i)
    return made


def _check_state(optimizer: MatrixOptimizer, p: Tensor, name: str, group: Group, own: dict[str, Any]) -> None:
    shape, method = MatrixShape.of(p), optimizer.method
    leading = (shape.count,) if p.ndim == 3 else ()
    wanted: dict[str, Any] = {"skipped": ()}
    for key, tail in method.state_shapes(shape.m, shape.n, method.rank(group, shape.m, shape.n), group).items():
        wanted[key] = leading + tail
    found = {k: tuple(v.shape) if isinstance(v, Tensor) else type(v) for k, v in own.items() if k != "step"}
    step = own.get("step")
    clock = isinstance(step, list) and len(step) == shape.count if p.ndim == 3 else isinstance(step, int)
    if found != wanted or not clock:
        raise ValueError(
            f"The loaded state of {name} (weight {tuple(p.shape)}) has step={step!r} and {found}, but "
            f"{type(optimizer).__name__} needs {wanted}. Load a state dict of the same optimizer, model and rank."
        )
