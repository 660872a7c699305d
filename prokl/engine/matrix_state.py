"""Check the state of a matrix weight, loaded or replaced: keys, shapes, dtypes, values, version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Method
from prokl.backends.rounding import MASTER
from prokl.engine.weights import Weight, clock, layout_of_state

FOREIGN = {"exp_avg", "momentum_buffer", "square_avg"}
"""State keys of PyTorch's optimizers, Muon among them."""


def begins(weight: Weight, state: Mapping[str, Any], method: Method) -> bool:
    """Return True if a weight's state has nothing of the method's, however the weight is split; other keys stay."""
    layout = layout_of_state(weight.members()[0], method, weight.group)
    ours = {"step", "lambda_0"}.union(key.partition(".")[0] for key in layout) - {MASTER}
    return not any(isinstance(key, str) and key.partition(".")[0] in ours for key in state)


def misfit(weight: Weight, state: Mapping[str, Any], method: Method, optimizer: str, live: bool = True) -> str | None:
    """Return the first thing in a weight's state that a step cannot go on from; None where all is well.

    It reads no values, which would wait for the device. In a ``live`` state other optimizers' keys are a wrapper's,
    but AdamW's own, which a group had whose algorithm has changed.
    """
    if begins(weight, state, method):
        foreign = (FOREIGN if not live else {"exp_avg"}) & state.keys()
        return f"{weight.name} has the state of another algorithm ({min(foreign)})" if foreign else None
    for member in weight.members():
        whose = f"{member.name} (weight {tuple(weight.p.shape)})"
        layout = layout_of_state(member, method, weight.group)
        for key, (shape, dtype) in layout.items():
            value = state.get(key)
            if value is None and key == MASTER + member.suffix:
                continue  # it starts as the weight
            if not isinstance(value, Tensor):
                others = [str(k) for k in state if k not in layout]
                has = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)} and no tensor {key}"
                return f"{whose} has {has} where {optimizer} needs {shape}"
            if value.shape != shape:
                return f"{whose} has {key} of shape {tuple(value.shape)} where {optimizer} needs {shape}"
            plain = value.layout == torch.strided and value.device.type != "meta" and not value.is_complex()
            if not plain or value.is_floating_point() != dtype.is_floating_point:
                actual = f"{key} of {value.dtype} and layout {value.layout} on {value.device}"
                return f"{whose} has {actual} where {optimizer} needs {dtype} in plain memory"
        step, stack = state.get("step" + member.suffix), member.p.ndim == 3
        counts: Any = step.tolist() if isinstance(step, Tensor) and step.ndim == stack else step
        counts = counts if stack else [counts]
        right = isinstance(counts, (list, tuple)) and len(counts) == member.shape.count
        if not right or not all(type(count) is int for count in counts):
            bound = f"{member.shape.count} integers" if stack else "an integer"
            return f"{whose} has step={step!r}; must be {bound}"
        if (unit := "lambda_0" + member.suffix) in state and unit not in layout:
            return f"{whose} has {unit}, in whose units init_eigenvalue='auto' keeps all eigenvalues"
    return None


def bad_values(weight: Weight, state: Mapping[str, Any], method: Method) -> str | None:
    """Return which values of a loaded state, that fits, a step cannot go on from; None where it can."""
    for member in weight.members():
        begun = torch.tensor(clock(member, state), device="cpu") >= 0
        for key in layout_of_state(member, method, weight.group).keys() & state.keys() if begun.any() else ():
            value = state[key]
            if member.p.ndim == 3 and value.ndim:
                value = value[begun.to(value.device)]
            positive = key.startswith(("inv_sqrt", "lambda_0"))
            if value.is_floating_point() and not (value.isfinite().all() and not (positive and (value < 0).any())):
                bad = "negative or not finite" if positive else "not finite"
                return f"{member.name} has {key} with values that are {bad}: the file is damaged, or its run had failed"
    return None


def check_version(state: Mapping[str, Any], name: str) -> None:
    """Raise ValueError for a weight's loaded state of a version before 0.6, whose M lies in other coordinates."""
    for key in state:
        if isinstance(key, str) and re.fullmatch(r"M(\.\d+)?", key) and "Q_L" + key[1:] in state:
            raise ValueError(
                f"The loaded state of {name} is of prokl 0.5 or older, which prokl 0.7 does not read. Load it with "
                "prokl 0.6 and save it there, then load that file."
            )
