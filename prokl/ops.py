"""The primitives of the batched step, as tables: one per backend, and the choice between them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from prokl import extension, torch_ops
from prokl.qr import refresh_basis, refresh_coordinates, tracking_qr

OLDEST_GPU = (8, 0)
"""Compute capability from which the kernels are compiled and checked (Ampere)."""


@dataclass(frozen=True)
class Primitives:
    """One backend's table. Every entry has the signature of the PyTorch function of that name in this package."""

    name: str
    linked: bool
    """Whether the table reads gradients, weights, lr and weight decay through the bucket's :class:`Links`."""
    stack: Callable[..., tuple[Tensor, Tensor]] = torch_ops.stack
    silence: Callable[..., Tensor] = torch_ops.silence
    product: Callable[..., Tensor] = torch_ops.product
    symmetric_product: Callable[..., Tensor] = torch_ops.symmetric_product
    project: Callable[..., tuple[Tensor, Tensor]] = torch_ops.project
    residuals: Callable[..., tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = torch_ops.residuals
    precondition: Callable[..., Tensor] = torch_ops.precondition
    polar: Callable[..., tuple[Tensor | None, Tensor, Tensor | None]] = torch_ops.polar
    eigenvalue_ema: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch_ops.eigenvalue_ema
    tracking_qr: Callable[..., Tensor] = tracking_qr
    refresh_basis: Callable[..., Tensor] = refresh_basis
    refresh_coordinates: Callable[..., Tensor] = refresh_coordinates
    apply: Callable[..., None] = torch_ops.apply


TORCH = Primitives("torch", linked=False)
BACKENDS = ("reference", "torch", "triton")
"""Values of ``backend``; "reference" is no table but the specification itself, one weight at a time."""


@cache
def _triton_table(extended: bool) -> tuple[Primitives, bool]:
    """The table, with the CUDA extension's QR or PyTorch's, and whether its kernels are interpreted."""
    from prokl.kernels.launch import INTERPRETED  # the only imports of Triton, and of what needs it
    from prokl.triton_ops import table

    return table(extended), INTERPRETED


def _obstacle(device: torch.device) -> str | None:
    """Why the Triton kernels cannot run on ``device``; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: install the one that belongs to this torch"
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        if torch.version.hip is not None:
            return "the kernels are written for NVIDIA GPUs"
        capability = torch.cuda.get_device_capability(device)
        if capability < OLDEST_GPU:
            return f"{device} has compute capability {capability}; must be at least {OLDEST_GPU}"
        return None
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return (
        f"the kernels run on CUDA devices, not on {device}, unless TRITON_INTERPRET=1, set before Python starts, "
        "interprets them on a CPU"
    )


def select(backend: str | None, device: torch.device) -> Primitives | None:
    """The table that ``backend`` means on ``device``; None for "reference".

    ``backend=None`` chooses: Triton's on a CUDA device that runs it, PyTorch's elsewhere; :func:`explain` says which.
    Triton's table takes QR from the CUDA extension where that runs, as :func:`explain_qr` says, and otherwise from
    the same methods in PyTorch.

    Raises:
        ValueError: an unknown backend, or "triton" where the kernels cannot run.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"Invalid backend={backend!r}: must be one of {(None, *BACKENDS)}.")
    if backend == "reference":
        return None
    if backend == "torch" or (backend is None and (device.type != "cuda" or _obstacle(device) is not None)):
        return TORCH
    obstacle = _obstacle(device)
    if obstacle is not None:
        raise ValueError(f'Invalid backend={backend!r}: {obstacle}. Use backend="torch", or None to choose.')
    table, interpreted = _triton_table(extension.obstacle(device) is None)
    if device.type == "cpu" and not interpreted:
        raise ValueError(
            f"Invalid backend={backend!r}: TRITON_INTERPRET=1 was set after the kernels were loaded. Set it before "
            "Python starts."
        )
    return table


def explain(backend: str | None, device: torch.device | str) -> str:
    """One line: which backend ``backend`` means on ``device``, and why."""
    device = torch.device(device)
    table: Any = select(backend, device)
    name = "reference" if table is None else table.name
    if backend is not None:
        return f"{name}: asked for"
    if name == "triton":
        return f"triton: {device} runs the kernels"
    return f"torch: {_obstacle(device) or 'a CPU takes the PyTorch form; backend=triton would interpret the kernels'}"


def explain_qr(device: torch.device | str, backend: str | None = None) -> str:
    """One line: where the QR of that backend's steps on ``device`` comes from, and why."""
    device = torch.device(device)
    table = select(backend, device)
    if table is None or table.name != "triton":
        name = "reference" if table is None else table.name
        return f"PyTorch: the {name} backend calls no kernels"
    obstacle = extension.obstacle(device)
    return f"PyTorch: {obstacle}" if obstacle is not None else f"CUDA extension: it runs on {device}"
