"""Checks of hyper-parameters and parameters; every message names the argument, the value, the bound and the remedy."""

from __future__ import annotations

import math
import os
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from prokl.hyper import VARIANTS
from prokl.ops import BACKENDS
from prokl.shapes import MatrixShape

PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
STATE_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)
NS_DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _invalid(name: str, value: Any, bound: str) -> ValueError:
    return ValueError(f"Invalid {name}={value!r}: must be {bound}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _number(group: dict[str, Any], name: str, bound: str, low: float, below: float = math.inf) -> None:
    value = group[name]
    if not _is_number(value) or not low <= value < below:
        raise _invalid(name, value, bound)


def _integer(group: dict[str, Any], name: str) -> None:
    value = group[name]
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise _invalid(name, value, "an integer of at least 1")


def _choice(group: dict[str, Any], name: str, choices: tuple[Any, ...]) -> None:
    if not any(group[name] is choice or group[name] == choice for choice in choices):
        raise _invalid(name, group[name], f"one of {choices}")


def _learning_rate(group: dict[str, Any]) -> None:
    lr = group["lr"]
    bound = "a finite number of at least 0, or a tensor with one such element"
    if not isinstance(lr, Tensor):
        _number(group, "lr", bound, 0.0)
    elif lr.numel() != 1 or not lr.is_floating_point():
        raise _invalid("lr", lr, bound)
    elif lr.device.type == "cpu" and not 0 <= lr.item() < math.inf:  # elsewhere reading it could wait for the device
        raise _invalid("lr", lr, bound)


def check_algorithm(group: dict[str, Any]) -> None:
    """Who steps the group."""
    _choice(group, "algorithm", ("matrix", "adamw"))


def check_common(group: dict[str, Any]) -> None:
    """Hyper-parameters of both matrix methods."""
    _learning_rate(group)
    _number(group, "weight_decay", "a finite number of at least 0", 0.0)
    _number(group, "momentum", "in [0, 1)", 0.0, 1.0)
    _number(group, "beta2", "in [0, 1)", 0.0, 1.0)
    _number(group, "eps", "a finite number of at least 0", 0.0)
    _integer(group, "precondition_frequency")
    start = group["init_eigenvalue"]
    if start != "auto" and not (_is_number(start) and 0 < start < math.inf):
        raise _invalid("init_eigenvalue", start, '"auto" or a finite number above 0')
    _choice(group, "state_dtype", STATE_DTYPES)
    _choice(group, "backend", (None, *BACKENDS))
    _choice(group, "maximize", (True, False))


def check_pro(group: dict[str, Any]) -> None:
    """Hyper-parameters of Pro-KLShampoo."""
    check_common(group)
    _integer(group, "rank")
    _number(group, "alpha_kl", "a finite number of at least 0", 0.0)
    _integer(group, "ns_steps")
    _choice(group, "variant", VARIANTS)
    _choice(group, "ns_dtype", NS_DTYPES)
    coefficients = group["ns_coefficients"]
    if (
        not isinstance(coefficients, (tuple, list))
        or len(coefficients) != 3
        or not all(_is_number(c) and math.isfinite(c) for c in coefficients)
    ):
        raise _invalid("ns_coefficients", coefficients, "three finite numbers (a, b, c)")


def check_adamw(group: dict[str, Any]) -> None:
    """Hyper-parameters of a group that AdamW handles."""
    if "lr" not in group:
        raise ValueError(
            'A group with algorithm="adamw" needs its own lr: the matrix method\'s lr is in other units '
            "(AdamW's is usually around 1e-3)."
        )
    _learning_rate(group)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in betas):
        raise _invalid("betas", betas, "two numbers in [0, 1)")
    _number(group, "eps", "a finite number of at least 0", 0.0)
    _number(group, "weight_decay", "a finite number of at least 0", 0.0)


def check_matrix_parameter(p: Tensor, name: str) -> None:
    """Raise ValueError when the matrix method cannot take ``p``."""
    remedy = 'put it in a group with algorithm="adamw", as prokl.param_groups(model, lr=..., adamw_lr=...) does'
    if p.is_complex() or not p.is_floating_point():
        kind = "complex" if p.is_complex() else "not a floating-point tensor"
        cure = "optimize its real view" if p.is_complex() else "leave it out of the optimizer"
        raise ValueError(f"{name} is {kind} (dtype {p.dtype}); the matrix method needs real weights: {cure}.")
    if p.dtype not in PARAMETER_DTYPES:
        raise ValueError(f"{name} has dtype {p.dtype}; must be one of {PARAMETER_DTYPES}: convert the weight.")
    if p.layout != torch.strided:
        raise ValueError(f"{name} has layout {p.layout}; the matrix method needs a dense weight: use p.to_dense().")
    if hasattr(p, "device_mesh"):
        raise ValueError(f"{name} is sharded (DTensor); its matrices are not whole on any device: {remedy}.")
    if p.ndim < 2:
        raise ValueError(f"{name} has shape {tuple(p.shape)}; the matrix method needs at least 2 dimensions: {remedy}.")
    if p.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(p.shape)} and no elements; leave it out of the optimizer.")
    shape = MatrixShape.of(p)
    if shape.n == 1:
        raise ValueError(f"{name} has shape {tuple(p.shape)}, a 1x1 matrix without a subspace: {remedy}.")


def check_writable(p: Tensor, name: str) -> None:
    """Raise ValueError for an expanded weight, which could not be written without a clash."""
    if any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True)):
        raise ValueError(f"{name} has strides {p.stride()}, so several elements share memory; use p.contiguous().")


def check_gradient(p: Tensor, name: str) -> None:
    """Raise RuntimeError for a sparse gradient, before anything has moved."""
    if p.grad is not None and p.grad.layout != torch.strided:
        raise RuntimeError(
            f"{name} has a gradient of layout {p.grad.layout}; neither the matrix method nor AdamW takes it "
            "(nn.Embedding(sparse=False))."
        )


def _container_limit() -> int | None:
    """What the control group of this process may still take, or None without a limit."""
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as limit:
            with open("/sys/fs/cgroup/memory.current", encoding="ascii") as used:
                return int(limit.read()) - int(used.read())
    except (OSError, ValueError):
        return None


def available_bytes(device: torch.device) -> int | None:
    """Free memory of ``device``, or None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        limit = _container_limit()
        try:
            with open("/proc/meminfo", encoding="ascii") as table:
                fields = dict(line.split(":", 1) for line in table)
            free = int(fields["MemAvailable"].split()[0]) * 1024
            return free if limit is None else min(free, limit)
        except (OSError, KeyError):
            pass
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (ValueError, OSError, AttributeError):
            pass
    return None
