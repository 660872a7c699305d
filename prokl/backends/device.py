"""Properties of a device: kernels run on it or why not, the host may read it or not; and copies to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prokl.backends import toolkit


def gpu_unsupported_reason(device: torch.device) -> str | None:
    """Return why CUDA kernels of this package cannot run on the CUDA device ``device``; None when they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < toolkit.OLDEST:
        oldest = f"{toolkit.OLDEST // 10}.{toolkit.OLDEST % 10}"
        return f"{device} has compute capability {major}.{minor}; must be at least {oldest}"
    return None


def is_host_readable(device: torch.device) -> bool:
    """Return True if reading a tensor on ``device`` does not wait for it: a CPU."""
    return device.type == "cpu"


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` as a 1-D tensor without waiting for it: from pinned memory."""
    # The pinned block is not given out again before the copy from it has run: torch's host allocator sees to that.
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
