"""The groups that PyTorch's own AdamW steps, with its state in the optimizer's own ``state``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from prokl.algorithm.settings import Group, plain
from prokl.backends.device import is_host_readable
from prokl.engine.validation import PLAIN, lies_otherwise, why_not_plain_memory
from prokl.engine.weights import Weight, may_move, named

DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
"""betas as in the paper's experiments; the rest of AdamW's settings are PyTorch's defaults."""
ARGUMENTS = inspect.signature(AdamW).parameters.keys() - {"params"}
MOMENTS, MAXIMUM = ("exp_avg", "exp_avg_sq"), "max_exp_avg_sq"
"""AdamW's state beside its step; the maximum with amsgrad alone."""


class AdamWGroups:
    """An AdamW whose groups and state are lent to it.

    Attributes:
        groups: those that it steps.
        skipped: gradients of each weight that were left out, where they were looked at; float32 tensors () beside a
            CPU. apart: whether fused kernels beside a CPU skip each weight by itself, a launch for each. Ranks need
            that: a weight of which others have copies must not stay for a gradient that is on one of them alone.
    """

    def __init__(self) -> None:
        self._adamw = AdamW([{"params": []}])
        self.groups: list[Group] = []
        self.skipped: dict[Tensor, int | Tensor] = {}
        self.apart = False

    def defaults(self, maximize: bool) -> dict[str, Any]:
        """Return everything an AdamW group holds but its lr."""
        defaults = {**self._adamw.defaults, "maximize": maximize, **DEFAULTS}
        del defaults["lr"]
        return defaults

    def step(self, state: dict[Tensor, dict[str, Any]], wholes: Mapping[Tensor, Tensor] | None = None) -> None:
        """Step the groups, whose weights have all begun, but where a gradient or its square is not finite.

        On a CPU reading one waits for nothing, and it is taken away meanwhile. Fused kernels are told on the device;
        PyTorch's other implementations take no such thing.

        Args:
            state: of the weights.
            wholes: gradients of whole weights, by the parts of them that are stepped here.
        """
        self._adamw.state = state  # type: ignore[assignment]
        aside: list[tuple[Tensor, Tensor]] = []
        unread: dict[torch.device, dict[Tensor, Tensor]] = {}
        before, self.skipped = self.skipped, {}  # which keeps no weight that has left
        for group in self.groups:
            for p in group["params"]:
                if p in before:
                    self.skipped.setdefault(p, before[p])
                if (g := p.grad) is None:
                    continue
                whole = (wholes or {}).get(p, g)
                if not is_host_readable(g.device):
                    if group["fused"] and whole.numel():
                        unread.setdefault(p.device, {})[p] = whole
                    continue
                if not _fits(whole):
                    aside.append((p, g))
                    self.skipped[p] = self.skipped.get(p, 0) + 1
                    p.grad = None
        found = self.look(unread) if unread else {}
        try:
            for group in self.groups:
                parts: dict[Tensor | None, list[Tensor]] = {}
                for p in group["params"]:
                    parts.setdefault(found.get(p), []).append(p)
                for flag, part in parts.items():
                    self._adamw.found_inf = flag  # type: ignore[attr-defined]
                    self._adamw.param_groups = [{**group, "params": part}]
                    inspect.unwrap(AdamW.step)(self._adamw)  # the step hooks have fired for this step already
        finally:
            self._adamw.param_groups, self._adamw.found_inf = self.groups, None  # type: ignore[attr-defined]
            for p, g in aside:
                p.grad = g

    def look(self, devices: Mapping[torch.device, Mapping[Tensor, Tensor]]) -> dict[Tensor, Tensor]:
        """Return by weight ``found_inf`` of PyTorch's fused kernels, float32 (), 1 where it is to stay; count that.

        Nothing is read, so nothing waits. Weights of a device share it, unless they are ``apart``.
        """
        found: dict[Tensor, Tensor] = {}
        for device, weights in devices.items():
            norms = torch._foreach_norm([*weights.values()], math.inf)  # which nothing finite overflows
            # The kernels square in float32, or in float64.
            largest = [norm.float() if norm.dtype == torch.float16 else norm for norm in norms]
            bad = torch.stack(torch._foreach_mul(largest, largest)).isfinite().logical_not().float()
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


def _fits(g: Tensor) -> bool:
    """Return whether all entries of a gradient on a CPU are finite, and their squares, or exp_avg_sq would not be."""
    wide = torch.promote_types(g.dtype, torch.float32)
    if bool(torch.linalg.vector_norm(g, dtype=wide).square().isfinite()):  # a sixth of the time of the largest entry
        return True
    return bool(torch.linalg.vector_norm(g, math.inf, dtype=wide).square().isfinite())


def begin(p: Tensor, group: Group, state: dict[Tensor, dict[str, Any]]) -> None:
    """Give a weight that may move AdamW's state at step 0 if it has none: checkpoints have one of every weight."""
    if not may_move(p) or "exp_avg" in state.get(p, {}):
        return
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not group["fused"] else torch.float32
    blank = {"step": torch.zeros((), dtype=dtype, device=_device_of_steps(p, group))}
    for key in _kept(group):
        blank[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    state[p].update(blank)  # what a wrapper keeps there stays


def _device_of_steps(p: Tensor, group: Group) -> torch.device:
    return p.device if group.get("capturable") or group.get("fused") else torch.device("cpu")


def _kept(group: Group) -> tuple[str, ...]:
    return (*MOMENTS, MAXIMUM) if group["amsgrad"] else MOMENTS


def check_options(group: Group, index: int) -> None:
    """Raise ValueError for options with which PyTorch's AdamW would break off in the midst of a step."""
    options = {key: plain(group[key]) for key in ARGUMENTS & group.keys()}
    options["lr"] = 0.0 * group["lr"]  # checked elsewhere: a scheduler may leave it below zero by rounding
    try:
        AdamW([{"params": [*dict.fromkeys(group["params"])]}], **options)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"Group {index}, of AdamW: {error}. Set the options back.") from None
    for p, name in named(group, index) if group["capturable"] or group["fused"] else ():
        if group["capturable"] and p.device.type in ("cpu", "mps"):
            raise ValueError(f"Invalid capturable=True: {name} is on {p.device}, without CUDA graphs. Set it back.")
        if group["fused"] and p.is_complex() and may_move(p):
            raise ValueError(
                f"Invalid fused=True: {name} is {p.dtype}, and torch's fused AdamW takes real weights. Put it in an "
                "AdamW group without fused."
            )


def bring_home(weight: Weight, state: dict[str, Any]) -> None:
    """Move AdamW's state of a weight, which may have been offloaded, to where AdamW keeps it, in place."""
    for key in ("step", *MOMENTS, MAXIMUM):
        home, value = _device_of_steps(weight.p, weight.group) if key == "step" else weight.p.device, state.get(key)
        if isinstance(value, Tensor) and value.device not in (home, torch.device("meta")):
            state[key] = value.to(home)


def count_in_tensor(step: Any, weight: Weight) -> Any:
    """Return a loaded count of steps as PyTorch keeps it where it is a number or an integer tensor, else as it is."""
    if isinstance(step, Tensor) and (step.is_floating_point() or step.numel() != 1 or step.device.type == "meta"):
        return step
    count = step.item() if isinstance(step, Tensor) else step
    if type(count) not in (int, float) or not 0 <= count < math.inf or count % 1:
        return step
    return torch.tensor(float(count), dtype=torch.float32, device=_device_of_steps(weight.p, weight.group))


def misfit(weight: Weight, state: Mapping[str, Any], live: bool = True) -> str | None:
    """Return the first thing of AdamW's state that is not as the weight and its group need it; None where all is.

    PyTorch's AdamW finds out in the midst of a step, or not at all: its fused kernels go through memory. The next step
    goes through this very memory where the state is ``live``; loading makes it anew.
    """
    p, name, group = weight.p, weight.name, weight.group
    if state.keys() & {"M_Q", "M_Q.0"}:
        return f"{name} has the state of another algorithm"
    if state.keys().isdisjoint(("step", *MOMENTS, MAXIMUM)):
        return None  # it begins at its first gradient
    for key in _kept(group):
        value = state.get(key)
        if not isinstance(value, Tensor):
            return f"{name} has no tensor {key}" + f", which amsgrad={group['amsgrad']} needs" * (key == MAXIMUM)
        if value.shape != p.shape:
            return f"{name} has {key} of shape {tuple(value.shape)}; must be the weight's, {tuple(p.shape)}"
        if live and (value.dtype, value.device) != (p.dtype, p.device):
            remedy = "Convert the state by optimizer.load_state_dict(optimizer.state_dict())"
            if p.dtype == torch.float16:  # in which the converted state's eps is 0, and weights become NaN
                remedy = "Train bfloat16 or float32 weights"
            return (
                f"{name} has {key} of {value.dtype} on {value.device}, and the weight is {p.dtype} on {p.device}. "
                + remedy
            )
        if type(p) in PLAIN and (reason := why_not_plain_memory(value)):  # of another class PyTorch makes what it needs
            return f"{name} has {key} {reason}"
        if live and group["fused"] and (reason := lies_otherwise(p, value)):
            return f"{name} has {key} {reason}"
    step: Any = state.get("step")
    where = p.device if group["fused"] or group["capturable"] else None
    fits = (
        isinstance(step, Tensor)
        and step.numel() == 1
        and step.dtype in (torch.float32, torch.float64)
        and step.device.type != "meta"
    )
    if (
        not fits
        or step.device != (where or step.device)
        or (step.device.type == "cpu" and not (0 <= step < math.inf and step % 1 == 0))
    ):
        return f"{name} has step={step!r}; must be one float32 of at least 0, on {where or 'the CPU'}"
    return None


def bad_values(weight: Weight, state: Mapping[str, Any]) -> str | None:
    """Return which loaded moments, that fit, would make the weight NaN; they are read."""
    for key in _kept(weight.group) if "exp_avg" in state else ():
        value = state[key]
        if value.is_complex() or not value.numel():
            continue
        low, high = map(float, value.detach().aminmax())
        least = -math.inf if key == MOMENTS[0] else 0.0
        if not (max(least, -torch.finfo(value.dtype).max) <= low and high < math.inf):
            bound = "finite" if key == MOMENTS[0] else "finite and at least 0"
            return f"{weight.name} has {key} between {low} and {high}, which must be {bound}: the file is damaged"
    return None
