"""Properties of a device: kernels run on it or why not, the host may read it or not; copies to it; autocast off."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from prokl.backends import toolkit

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


WORKSPACE = 2 * 2**30
"""Bytes of temporary memory that one batch's step may take on a CPU, its stacked gradient included."""
GPU_WORKSPACE_DIVISOR = 10
"""A GPU's memory over its workspace: LLaMA 450M's largest shape needs 10 GB in float32, which a tenth of an H200
holds."""

MOST_MATRICES = 65535
"""Matrices of a batch at most: blocks of a CUDA launch in its third direction."""


def workspace(device: torch.device) -> int:
    """Return the bytes of temporary memory that the steps of batches at one time may take together on ``device``.

    CUDA graphs keep so much, all of them together; a step that runs without, beside them, takes it once more meanwhile.
    It follows from the device alone and not from what is free: which weights share a batch decides their rounding, and
    that is to be the same after a resume.
    """
    if device.type != "cuda":
        return WORKSPACE
    return torch.cuda.get_device_properties(device).total_memory // GPU_WORKSPACE_DIVISOR


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


def send(to: Tensor, values: Sequence[Any]) -> Tensor:
    """Copy ``values`` into a tensor, on the current stream, without waiting for a GPU: from pinned memory."""
    # The pinned block is not given out again before the copy from it has run: torch's host allocator sees to that.
    cuda = to.device.type == "cuda"
    return to.copy_(torch.tensor(values, dtype=to.dtype, device="cpu", pin_memory=cuda), non_blocking=cuda)


def on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy ``values`` to ``device`` as a 1-D tensor; see :func:`send`."""
    return send(torch.empty(len(values), dtype=dtype, device=device), values)


class SecondStream(AbstractContextManager[None]):
    """A context of a stream beside the current one, which waits for what that one has been given when this is made.

    At its end the current stream waits for it, so that a CUDA graph holds both as branches. Memory that either stream
    allocates inside is its own to use again.

    Args:
        device: of both.
        priority: -1 where the second one has few blocks, which are to go before those that fill the device; else 0.
    """

    def __init__(self, device: torch.device, priority: int) -> None:
        self.current = torch.cuda.current_stream(device)
        self.made = self.current.record_event()
        self.stream = _second(device, self.current.cuda_stream, priority)

    def __enter__(self) -> None:
        self.stream.wait_event(self.made)
        self.inside = torch.cuda.stream(self.stream)
        self.inside.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self.inside.__exit__(*error)
        self.current.wait_stream(self.stream)


@lru_cache(maxsize=64)
def _second(device: torch.device, stream: int, priority: int) -> Any:
    """Return the stream beside another, so that what one thread captures is no other one's.

    No two of the first 32 are the same: the other would write memory that one has freed before its neighbour reads it.
    """
    for _ in range(32):  # as many as torch has of a priority, which it gives in turn
        second = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
        if (key := (device, second.cuda_stream)) not in _SECONDS:
            break
    _SECONDS.add(key)
    return second


_SECONDS: set[tuple[torch.device, int]] = set()


def without_autocast(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Return ``function`` with autocast off in it, which would do products in half precision, of factors as well."""

    @wraps(function)
    def exact(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with ExitStack() as off:
            for device_type in ("cpu", "cuda", "mps", "xpu"):
                if torch.is_autocast_enabled(device_type):
                    off.enter_context(torch.autocast(device_type, enabled=False))
            return function(*args, **kwargs)

    return exact


@without_autocast
def rounds_float32(device: torch.device) -> bool:
    """Return True if a CPU rounds the factors of products in float32, as torch's switches let oneDNN do.

    A product tells: many a CPU makes them in float32 whatever the switches say.
    """
    precision = "" if device.type != "cpu" else torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    if precision not in ("bf16", "tf32"):
        return False
    A = torch.full((256, 256), 1 + 2.0**-12, dtype=torch.float32, device="cpu")  # 1 in bfloat16 and in TF32
    return float((A @ A)[0, 0]) == 256
