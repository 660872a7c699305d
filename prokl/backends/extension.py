"""The CUDA extension ``prokl._C``: whether it was built, and where it can run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from prokl.backends.device import gpu_unsupported_reason

NAME = "prokl._C"
PACKAGE = Path(__file__).resolve().parents[1]
HOST = "host"
"""The name that tests give in place of architectures: the sources compiled for a CPU."""


def hidden() -> Path | None:
    """Return another prokl on ``sys.path`` that has the extension: an installed one, behind a source tree."""
    for entry in sys.path:
        folder = Path(entry, "prokl").resolve()
        if folder != PACKAGE and any((folder / f"_C{suffix}").exists() for suffix in EXTENSION_SUFFIXES):
            return folder
    return None


@cache
def load() -> tuple[ModuleType | None, str | None]:
    """Return the extension, or None and why there is none."""
    if importlib.util.find_spec(NAME) is None:
        return None, _absence()
    try:
        return importlib.import_module(NAME), None
    except Exception as error:  # whatever is wrong with it, there is a path without it
        return None, f"the CUDA extension cannot be imported: {type(error).__name__}: {error}"


def _absence() -> str:
    if (installed := hidden()) is not None:
        return (
            f"the CUDA extension belongs to the prokl installed in {installed.parent}, which this source tree, "
            f"{PACKAGE.parent}, shadows: start Python in another folder, or pip install -e {PACKAGE.parent}"
        )
    if others := sorted(path.name for path in PACKAGE.glob("_C.*.so")):
        return f"the CUDA extension was built for another Python ({', '.join(others)}): install prokl under this one"
    return "the CUDA extension is not built: install prokl with PROKL_BUILD_CUDA=1 where nvcc is"


def unsupported_reason(device: torch.device) -> str | None:
    """Return why the extension cannot run on ``device``; None when it can."""
    module, reason = load()
    if module is None:
        return reason
    if module.architectures == HOST:
        other = f"the extension was built for the tests: CPU tensors, not {device}"
        return _failure(device) if device.type == "cpu" else other
    if device.type != "cuda":
        return f"the CUDA extension runs on CUDA devices, not on {device}"
    obstacle = gpu_unsupported_reason(device)
    if obstacle is None and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):  # type: ignore[no-untyped-call]
        return _failure(device)
    return obstacle


def enqueue(function: Callable[..., None], device: torch.device, *arguments: Any) -> None:
    """Call one of the extension's functions on the device's current stream."""
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device if on_gpu else -1):
        function(*arguments, torch.cuda.current_stream().cuda_stream if on_gpu else 0)


@cache
def _failure(device: torch.device) -> str | None:
    """Try a launch, once a device, and return why it fails, with a warning: steps go on without the extension.

    Versions would not tell all: it was built for some GPUs, its machine code needs a driver as new as the toolkit's
    major version, and PTX, which alone covers newer GPUs, one as new to the minor version.
    """
    module = load()[0]
    assert module is not None
    try:
        t = torch.ones(3, dtype=torch.float32, device=device)
        used, (N, F, diagonal) = torch.empty(1, dtype=torch.int32, device=device), (x.data_ptr() for x in t)
        matrix, none = ((N, 1, 1), 1, 1), (0, 0, 0)
        outputs = (none, (F, 1, 1), True, none, 0, diagonal, 0, used.data_ptr())
        enqueue(module.float32.factor, device, 1, 1, matrix, 0, *outputs)
    except Exception as error:
        reason = f"a launch of the CUDA extension fails on {device} ({str(error).rstrip('.')})"
        if device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            reason += f"; built for {module.architectures}: build it with PROKL_CUDA_ARCHS={10 * major + minor} and an "
            reason += "nvcc no newer than the driver, or update the driver"
        warnings.warn(f"QR runs in PyTorch: {reason}.", stacklevel=2)
        return reason
    return None
