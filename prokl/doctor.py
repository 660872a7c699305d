"""Report the backends that would run here, and why: ``python -m prokl.doctor``. A broken part costs one line."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

import prokl
from prokl import ops
from prokl.backends import extension, toolkit

Line = tuple[str, Callable[[], str]]
"""A key, which stays the same from release to release, and a function that finds its value."""


def describe(find_out: Callable[[], str]) -> str:
    """Call ``find_out``, and return its text on one line, or why it failed: a report goes on whatever is broken."""
    try:
        text = find_out()
    except Exception as error:
        text = f"cannot tell: {type(error).__name__}: {error}"
    return " ".join(text.split())


def _triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return (
            "not installed; only GPUs and the kernels' interpreter take it: pip install triton, or a CUDA build of "
            "torch, which brings its own"
        )
    return str(importlib.import_module("triton").__version__)


def _nvcc() -> str:
    nvcc = toolkit.find_nvcc(os.environ)
    found = "not found" if nvcc is None else f"{toolkit.nvcc_version(nvcc)} ({nvcc})"
    return f"{found}; only needed to build the extension"


def _extension() -> str:
    module, reason = extension.load()
    if module is None:
        return str(reason)
    return f"built for {module.architectures.replace(';', ', ')} ({module.__file__})"


def _gpu(index: int) -> str:
    device = torch.device("cuda", index)
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def lines() -> list[Line]:
    """List the installed parts, and the backend of each device."""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    report: list[Line] = [
        ("python", lambda: f"{platform.python_version()} ({sys.executable})"),
        ("prokl", lambda: f"{prokl.__version__} ({os.path.dirname(str(prokl.__file__))})"),
        ("torch", lambda: f"{torch.__version__}, built with {cuda}"),
        ("triton", _triton),
        ("nvcc", _nvcc),
        ("extension", _extension),
    ]
    try:
        gpus, none = torch.cuda.device_count() if torch.cuda.is_available() else 0, "none: torch sees no CUDA device"
    except Exception as error:
        gpus, none = 0, f"cannot tell: {type(error).__name__}: {error}"
    report += [(f"gpu {index}", partial(_gpu, index)) for index in range(gpus)] or [("gpu", lambda: none)]
    for device in ("cpu", *(f"cuda:{index}" for index in range(gpus))):
        report += [
            (f"{device} step", partial(ops.explain, None, device)),
            (f"{device} qr", partial(ops.explain_qr, device)),
        ]
    return report


def main(argv: Sequence[str] = ()) -> None:
    """Print the report; ``argv`` has no options but ``--help``."""
    about = "What would run here, and why: a line each for what is installed and for every device."
    argparse.ArgumentParser(prog="python -m prokl.doctor", description=about).parse_args(argv)
    report = [(key, describe(find_out)) for key, find_out in lines()]
    width = max(len(key) for key, _ in report)
    try:
        for key, text in report:
            print(f"{key:<{width}}  {text}")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough, as head
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - the interpreter flushes it at its end


if __name__ == "__main__":
    main(sys.argv[1:])
