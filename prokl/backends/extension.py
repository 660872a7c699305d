"""The CUDA extension ``prokl._C``: whether it was built, and where it can run."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from prokl.backends import toolkit
from prokl.backends.device import gpu_unsupported_reason

NAME = "prokl._C"
HOST = "host"
"""In place of architectures: the sources compiled for a CPU, as the tests do it."""


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
    others = sorted(path.name for path in Path(__file__).parents[1].glob("_C.*.so"))
    if others:
        return f"the CUDA extension was built for another Python ({', '.join(others)}): install prokl under this one"
    return "the CUDA extension is not built: install prokl with PROKL_BUILD_CUDA=1 where nvcc is"


def unsupported_reason(device: torch.device) -> str | None:
    """Return why the extension cannot run on ``device``; None when it can."""
    module, reason = load()
    if module is None:
        return reason
    if module.architectures == HOST:
        return None if device.type == "cpu" else f"the extension was built for the tests: CPU tensors, not {device}"
    if device.type != "cuda":
        return f"the CUDA extension runs on CUDA devices, not on {device}"
    return gpu_unsupported_reason(device) or _outdated(module) or _uncovered(device, module.architectures)


def _outdated(module: ModuleType) -> str | None:
    """Return why the driver cannot run it: within a major version any driver runs what any toolkit built."""
    built, known = module.built_with(), module.driver_knows()
    if built // 1000 <= known // 1000:
        return None
    return (
        f"the CUDA extension was built with CUDA {built // 1000}.{built % 1000 // 10}, the driver knows "
        f"{known // 1000}.{known % 1000 // 10}: update the driver, or build with an older toolkit"
    )


def _uncovered(device: torch.device, architectures: str) -> str | None:
    """Return that it was built for other GPUs; None where it was built for this one."""
    major, minor = torch.cuda.get_device_capability(device)
    if toolkit.covers(architectures.split(";"), (major, minor)):
        return None
    return (
        f"{device} has compute capability {major}.{minor}; the CUDA extension was built for {architectures}: build it "
        f"with PROKL_CUDA_ARCHS={10 * major + minor}"
    )
