"""The groups that PyTorch's own AdamW steps, with its state in the optimizer's own ``state``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from prokl.algorithm.method import Group
from prokl.algorithm.settings import plain
from prokl.backends.device import is_host_readable
from prokl.engine.validation import PLAIN, check_writable, why_not_plain_memory
from prokl.engine.weights import may_move, named

DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
"""betas as in the paper's experiments; the rest of AdamW's settings are PyTorch's defaults."""
ARGUMENTS = inspect.signature(AdamW).parameters.keys() - {"params"}
MOMENTS, MAXIMUM = ("exp_avg", "exp_avg_sq"), "max_exp_avg_sq"
"""AdamW's state beside its step; the maximum with amsgrad alone."""


class AdamWGroups:
    """An AdamW whose groups and state are lent to it at every step.

    Attributes:
        skipped: gradients of each weight that were not finite, where they were looked for; float32 tensors () beside a
            CPU. apart: whether fused kernels beside a CPU skip each weight by itself, a launch for each. Ranks need
            that: a weight of which others have copies must not stay for a gradient that is on one of them alone.
    """

    def __init__(self) -> None:
        self._adamw = AdamW([{"params": []}])
        self.skipped: dict[Tensor, int | Tensor] = {}
        self.apart = False

    def defaults(self, maximize: bool) -> dict[str, Any]:
        """Return everything an AdamW group holds but its lr."""
        defaults = {**self._adamw.defaults, "maximize": maximize, **DEFAULTS}
        del defaults["lr"]
        return defaults

    def check_new(self, group: Group, others: Collection[str]) -> None:
        """Remove the settings of the matrix method from a new group, and raise torch's error for its options.

        Args:
            group: changed in place. others: the settings of the matrix method.

        Raises:
            ValueError, RuntimeError: options that do not go together, or not with these weights.
        """
        for key in set(others) - set(self._adamw.defaults) - {"algorithm"}:
            group.pop(key, None)
        _check_options(group)

    def step(self, groups: list[Group], state: dict[Tensor, dict[str, Any]]) -> None:
        """Step ``groups``, whose weights have all begun."""
        self._adamw.state = state  # type: ignore[assignment]
        weights = [p for group in groups for p in group["params"]]
        self.skipped = {p: self.skipped[p] for p in weights if p in self.skipped}  # keeps no weight that has left
        aside, found = self._skip(groups), self._look(groups)
        try:
            for self._adamw.found_inf, group in _parts(groups, found):  # type: ignore[attr-defined]
                self._adamw.param_groups = [group]
                inspect.unwrap(AdamW.step)(self._adamw)  # unwrapped: the step hooks have fired for this step already
        finally:
            self._adamw.param_groups, self._adamw.found_inf = groups, None  # type: ignore[attr-defined]
            for p, gradient in aside:
                p.grad = gradient

    def _skip(self, groups: list[Group]) -> list[tuple[Tensor, Tensor]]:
        """Take away gradients that are not finite, count them, and return them with their weights.

        On a CPU, where reading one waits for nothing.
        """
        aside: list[tuple[Tensor, Tensor]] = []
        for p in (p for group in groups for p in group["params"]):
            if (g := p.grad) is None or not is_host_readable(g.device):
                continue
            # Any entry shows in it. A finite one that overflows it would make exp_avg_sq infinite for good.
            total = g.sum(dtype=torch.promote_types(g.dtype, torch.float32))
            if not bool(total.isfinite()):
                aside.append((p, g))
                self.skipped[p] = self.skipped.get(p, 0) + 1
                p.grad = None
        return aside

    def _look(self, groups: list[Group]) -> dict[Tensor, Tensor]:
        """Return by weight what tells PyTorch's fused kernels to leave it: float32 (), 1 for a gradient not finite.

        Beside a CPU, and without a wait: nothing is read. Weights of a device share it, unless they are ``apart``.
        PyTorch's other implementations take no such thing.
        """
        found: dict[Tensor, Tensor] = {}
        devices: dict[torch.device, list[Tensor]] = {}
        for p in (p for group in groups if group["fused"] for p in group["params"]):
            if p.grad is not None and p.numel() and not is_host_readable(p.device):
                devices.setdefault(p.device, []).append(p)
        for device, weights in devices.items():
            gradients = [p.grad for p in weights if p.grad is not None]
            largest = torch._foreach_norm(gradients, math.inf)  # which nothing finite overflows
            bad = torch.stack(largest).isfinite().logical_not().to(torch.float32)
            each, counts = [*bad.unbind()], []
            for p in weights:
                count = self.skipped.get(p, 0)
                if not isinstance(count, Tensor) or count.device != device:  # its first step here
                    count = torch.full((), float(count), dtype=torch.float32, device=device)
                self.skipped[p] = count
                counts.append(count)
            torch._foreach_add_(counts, each)
            found.update(zip(weights, each if self.apart else [bad.amax()] * len(weights), strict=True))
        return found


def _parts(groups: list[Group], found: dict[Tensor, Tensor]) -> Iterator[tuple[Tensor | None, Group]]:
    """Yield groups divided by what their weights share of ``found``, and that; it is None where there is nothing."""
    for group in groups:
        parts: dict[Tensor | None, list[Tensor]] = {}
        for p in group["params"]:
            parts.setdefault(found.get(p), []).append(p)
        for flag, weights in parts.items():
            yield flag, {**group, "params": weights}


def begin(p: Tensor, group: Group, state: dict[Tensor, dict[str, Any]]) -> None:
    """Give a weight that may move AdamW's state at step 0 if it has none: checkpoints have one of every weight."""
    if not may_move(p) or "exp_avg" in state.get(p, {}):
        return
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group["fused"] else torch.float32
    blank = {"step": torch.zeros((), dtype=dtype, device=_device_of_steps(p, group))}
    for key in _kept(group):
        blank[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    state[p].update(blank)  # what a wrapper keeps there stays


def _device_of_steps(p: Tensor, group: Group) -> torch.device | str:
    return p.device if group.get("capturable") or group.get("fused") else "cpu"


def _check_options(group: Group) -> None:
    """Raise what PyTorch says of options that do not go together, or not with these weights."""
    options = {key: plain(group[key]) for key in ARGUMENTS & group.keys()}
    options["lr"] = 0.0 * group["lr"]  # checked elsewhere: a scheduler may leave it below zero by rounding
    AdamW([{"params": [*dict.fromkeys(group["params"])]}], **options)


def check_options(group: Group, index: int) -> None:
    """Raise ValueError for options, by now, with which PyTorch's AdamW would break off in the midst of a step."""
    try:
        _check_options(group)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"Group {index}, of AdamW: {error}. Set the options back.") from None
    for p, name in named(group, index) if group["capturable"] else ():
        if p.device.type in ("cpu", "mps"):
            raise ValueError(
                f"Invalid capturable=True: {name} is on {p.device}, of which no CUDA graph is captured. Set it back."
            )


def bring_home(group: Group, state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Move AdamW's moments to their weight's device, and its step to where AdamW keeps it, in place."""
    for p in group["params"]:
        entry = state.get(p) or {}
        for key in ("step", *MOMENTS, MAXIMUM) if may_move(p) and p.device.type != "meta" else ():
            value, home = entry.get(key), p.device if key != "step" else torch.device(_device_of_steps(p, group))
            if isinstance(value, Tensor) and value.device not in (home, torch.device("meta")):
                entry[key] = value.to(home)


def check_state(p: Tensor, name: str, group: Group, state: Mapping[str, Any]) -> None:
    """Raise ValueError where AdamW's state, or its weight, is not what a step needs by now.

    PyTorch's AdamW finds out in the midst of a step, or not at all: its fused kernels go through memory.
    """
    if not may_move(p):
        return
    check_writable(p, name)
    if p.is_neg():
        raise ValueError(
            f"{name} has a negation that is still to do, which AdamW's kernels refuse: use p.resolve_neg()."
        )
    held = [(key, state[key]) for key in _kept(group) if isinstance(state.get(key), Tensor)]
    for key, value in held:
        if (value.dtype, value.device) != (p.dtype, p.device):
            remedy = (
                "convert the state too, by optimizer.load_state_dict(optimizer.state_dict()), or set the weight back"
            )
            if p.dtype == torch.float16:
                remedy = (
                    "set the weight back, or use bfloat16: in float16 AdamW's eps of 1e-8 is 0, and weights become NaN"
                )
            raise ValueError(
                f"{name} is {p.dtype} on {p.device} and its AdamW state still {value.dtype} on {value.device} ({key}): "
                f"{remedy}."
            )
    if reason := misfit(p, group, state):
        raise ValueError(
            f"The AdamW state of {name} has {reason}. Set it back, or remove it, optimizer.state.pop(p), to begin anew."
        )
    for key, value in held if group["fused"] else ():
        _check_lies_alike(p, name, key, value)


def check_gradient(p: Tensor, name: str, fused: bool) -> None:
    """Raise ValueError for a gradient of another dtype or, where ``fused``, negated or of other strides."""
    if p.grad is not None and p.grad.dtype != p.dtype:
        raise ValueError(f"{name} is {p.dtype} and its gradient {p.grad.dtype}: AdamW needs p.grad.to(p.dtype).")
    if fused:
        _check_lies_alike(p, name, "a gradient", p.grad)


def _check_lies_alike(p: Tensor, name: str, what: str, t: Tensor | None) -> None:
    """Raise ValueError for what fused kernels would go through otherwise than through the weight."""
    if t is not None and (t.is_neg() or (t.stride() != p.stride() and _strides(t) != _strides(p))):
        raise ValueError(
            f"{name} has {what} {'negated in name alone' if t.is_neg() else f'of strides {t.stride()}'}: with "
            f"fused=True it must lie in memory as the weight does, in strides {p.stride()}. Use "
            "torch.empty_like(p).copy_(...) of it, or fused=False."
        )


def _strides(t: Tensor) -> list[int]:
    return [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def _kept(group: Group) -> tuple[str, ...]:
    return (*MOMENTS, MAXIMUM) if group["amsgrad"] else MOMENTS


def misfit(p: Tensor, group: Group, state: Mapping[str, Any]) -> str | None:
    """Return the first of AdamW's state that is not as the weight and its group need it; None where all is.

    Dtype and device aside: loading makes them the weight's.
    """
    if state.keys().isdisjoint(("step", *MOMENTS, MAXIMUM)):
        return None  # it begins at its first gradient
    for key in _kept(group):
        value = state.get(key)
        if not isinstance(value, Tensor):
            return f"no tensor {key}" + f", which amsgrad={group['amsgrad']} needs" * (key == MAXIMUM)
        if value.shape != p.shape:
            return f"{key} of shape {tuple(value.shape)}; must be the weight's, {tuple(p.shape)}"
        if type(p) in PLAIN and (reason := why_not_plain_memory(value)):  # of another class PyTorch makes what it needs
            return f"{key} {reason}; must be plain memory"
    step = state.get("step")
    if not isinstance(step, Tensor):
        return "no tensor step"
    where = p.device if group["fused"] or group["capturable"] else None
    fits = step.numel() == 1 and step.dtype in (torch.float32, torch.float64) and step.device.type != "meta"
    if not fits or step.device != (where or step.device) or (step.device.type == "cpu" and not 0 <= step < math.inf):
        return f"step={step!r}; must be one float32 of at least 0, on {where or 'the CPU'}"
    return None


def check_values(name: str, state: Mapping[str, Any]) -> None:
    """Raise ValueError for loaded moments that would make the weight NaN: they are read."""
    for key in (*MOMENTS, MAXIMUM):
        value = state.get(key)
        if not isinstance(value, Tensor) or value.is_complex() or not value.numel():
            continue
        low, high = map(float, value.detach().aminmax())
        least = -math.inf if key == MOMENTS[0] else 0.0
        if not (max(least, -torch.finfo(value.dtype).max) <= low and high < math.inf):
            raise ValueError(
                f"The loaded AdamW state of {name} has {key} between {low} and {high}: must be finite"
                f"{'' if key == MOMENTS[0] else ' and at least 0'}. The file is damaged: load an earlier one."
            )


def count_in_tensors(state: Mapping[Tensor, dict[str, Any]], group: Group, index: int) -> None:
    """Make float tensors of loaded steps that were saved otherwise, as PyTorch's AdamW does of numbers when it loads.

    Args:
        state: as loaded. group: whose. index: its place.

    Raises:
        ValueError: a step is no count, of which AdamW would make a wrong step or NaN.
    """
    for p, name in named(group, index):
        entry = state.get(p, {})
        step = entry.get("step", 0)
        count = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        if type(count) not in (int, float) or not 0 <= count < math.inf or count % 1:
            raise ValueError(
                f"The loaded AdamW state of {name} has step={step!r}: must be a whole number of at least 0. The file "
                "is damaged: load an earlier one."
            )
        if "step" in entry and (not isinstance(step, Tensor) or step.dtype not in (torch.float32, torch.float64)):
            device = _device_of_steps(p, group)
            entry["step"] = torch.tensor(float(count), dtype=torch.float32, device=device)
