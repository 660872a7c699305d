"""The groups that PyTorch's own AdamW steps, with its state in the optimizer's own ``state``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from prokl.algorithm.method import Group
from prokl.engine.pieces import named

DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
"""betas as in the paper's experiments; the rest of AdamW's settings are PyTorch's defaults."""
ARGUMENTS = inspect.signature(AdamW).parameters.keys() - {"params"}


class AdamWGroups:
    """An AdamW whose groups and state are lent to it at every step."""

    def __init__(self) -> None:
        self._adamw = AdamW([{"params": []}])

    def defaults(self, maximize: bool) -> dict[str, Any]:
        """Return everything an AdamW group holds but its lr."""
        defaults = {**self._adamw.defaults, "maximize": maximize, **DEFAULTS}
        del defaults["lr"]
        return defaults

    def check_new(self, group: Group, others: Collection[str]) -> None:
        """Raise what PyTorch says of options that do not go together, or not with these weights.

        Args:
            group: loses the settings of the matrix method. others: these.
        """
        for key in set(others) - set(self._adamw.defaults) - {"algorithm"}:
            group.pop(key, None)
        AdamW([{"params": group["params"]}], **{key: group[key] for key in ARGUMENTS & group.keys()})

    def step(self, groups: list[Group], state: dict[Tensor, dict[str, Any]]) -> None:
        """Step ``groups``, and give every trainable weight its entry in ``state``."""
        self._adamw.param_groups, self._adamw.state = groups, state  # type: ignore[assignment]
        for group in groups:
            for p in group["params"]:
                if p.requires_grad and "exp_avg" not in state.get(p, {}):  # what a wrapper keeps there stays
                    state[p].update(_blank_state(p, group))
        if groups:
            inspect.unwrap(AdamW.step)(self._adamw)  # unwrapped: the step hooks have fired for this step already


def _blank_state(p: Tensor, group: Group) -> dict[str, Tensor]:
    """Return what AdamW starts from at the first gradient: an entry that checkpoints have of every weight."""
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group["fused"] else torch.float32
    state = {"step": torch.zeros((), dtype=dtype, device=_device_of_steps(p, group))}
    for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
        state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return state


def _device_of_steps(p: Tensor, group: Group) -> torch.device | str:
    return p.device if group.get("capturable") or group.get("fused") else "cpu"


def check_state(p: Tensor, name: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError where AdamW's state is not what its weight is by now: PyTorch's AdamW takes no such pair."""
    made = state.get("exp_avg", p)
    if p.grad is not None and (made.dtype, made.device) != (p.dtype, p.device):
        raise ValueError(
            f"{name} is {p.dtype} on {p.device} and its AdamW state still {made.dtype} on {made.device}: convert the "
            "state too, by optimizer.load_state_dict(optimizer.state_dict()), or set the weight back."
        )


def count_in_tensors(state: Mapping[Tensor, dict[str, Any]], group: Group, index: int) -> None:
    """Make tensors of loaded steps that were saved as numbers, as PyTorch's AdamW does when it loads.

    Args:
        state: as loaded. group: whose. index: its place.

    Raises:
        ValueError: a step is no count, of which AdamW would make a wrong step or NaN.
    """
    for p, name in named(group, index):
        own = state.get(p, {})
        step = own.get("step", 0)
        count = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        if type(count) not in (int, float) or not 0 <= count < math.inf or count % 1:
            raise ValueError(
                f"The loaded AdamW state of {name} has step={step!r}: must be a whole number of at least 0. The file "
                "is damaged: load an earlier one."
            )
        if isinstance(own.get("step"), (int, float)):
            device = _device_of_steps(p, group)
            own["step"] = torch.tensor(float(own["step"]), dtype=torch.float32, device=device)
