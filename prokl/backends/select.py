"""The choice of a backend, and one line that explains it."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from prokl.algorithm.algebra import Algebra
from prokl.algorithm.settings import BACKENDS
from prokl.algorithm.shapes import widest
from prokl.backends import extension, torch_pairs
from prokl.backends.device import gpu_unsupported_reason, is_host_readable, rounds_float32
from prokl.backends.io import Layout, Member, TorchIO
from prokl.backends.rounding import Rounding


@dataclass(frozen=True)
class Backend:
    """Everything that a bucket needs of a backend on one kind of device."""

    name: str
    ops: Algebra
    """The operations of its steps; a step reads results on the host where these may."""
    io: Callable[[Sequence[Member], Layout, Rounding], TorchIO]
    graphs: bool
    """True if CUDA graphs can capture its steps."""
    graphs_of_refreshes: bool = True
    """False if they cannot where a step refreshes."""


MAGMA = torch.__version__ < "2.12"  # by version, not by letter
"""True if torch has MAGMA solve triangular systems of more than 8 matrices with more than 512 columns, through pinned
memory: nothing that a CUDA graph can capture, and the QR of a refresh in PyTorch."""


@cache
def _torch_backend(host_readable: bool, balanced: bool) -> Backend:
    ops = (torch_pairs.PairedAlgebra if balanced else Algebra)(host_readable)
    return Backend("torch", ops, TorchIO, graphs=False)


REFERENCE = Backend("reference", Algebra(host_readable=True), TorchIO, graphs=False)
"""The specification itself, one matrix at a time, which reads results on the host anyway."""


@cache
def _triton_backend(use_cuda_qr: bool, host_readable: bool, balanced: bool, graphs: bool) -> Backend:
    from prokl.backends import triton_ops  # with kernels.launch the only imports of Triton

    ops = (triton_ops.PairedTritonAlgebra if balanced else triton_ops.TritonAlgebra)(use_cuda_qr, host_readable)
    io = partial(triton_ops.TritonIO, pairs=balanced)
    return Backend("triton", ops, io, graphs, use_cuda_qr or not MAGMA)


@dataclass(frozen=True)
class Choice:
    """The backend that runs, and why; errors, warnings and reports about it take their words from here."""

    name: str
    why: str
    no_extension: str | None
    """The reason for QR from PyTorch; None where QR comes from the CUDA extension."""


def _no_kernels(device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run on ``device``; None when they can."""
    if device.type != "cuda" and (device.type != "cpu" or os.environ.get("TRITON_INTERPRET") != "1"):
        return (
            f"the kernels run on CUDA devices, not on {device}, unless TRITON_INTERPRET=1, set before Python starts, "
            "interprets them on a CPU"
        )
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install triton, or a CUDA build of torch, which brings its own"
    return gpu_unsupported_reason(device) if device.type == "cuda" else None


def choose(backend: str | None, device: torch.device) -> Choice:
    """Choose a backend, as :func:`select` says.

    Raises:
        ValueError: an unknown backend, or one that cannot run on ``device``.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"Invalid backend={backend!r}: must be one of {(None, *BACKENDS)}.")
    if backend == "reference" and widest(device) != torch.float64:
        raise ValueError(f'Invalid backend={backend!r}: it needs float64, which {device} has not. Use "torch".')
    name, why = backend, "asked for"
    if backend in (None, "triton"):
        obstacle = _no_kernels(device)
        if backend == "triton" and obstacle is not None:
            raise ValueError(f'Invalid backend={backend!r}: {obstacle}. Use backend="torch", or None to choose.')
        if backend == "triton" and device.type == "cpu":
            from prokl.kernels.launch import INTERPRETED

            if not INTERPRETED:
                raise ValueError(
                    f"Invalid backend={backend!r}: TRITON_INTERPRET=1 was set after the kernels were loaded. Set it "
                    "before Python starts."
                )
        if backend is None and device.type == "cpu":
            kernels = "are for CUDA devices" if obstacle is not None else "would be interpreted by backend='triton'"
            name, why = "torch", f"a CPU takes the PyTorch form; the kernels {kernels}"
        elif backend is None:
            name, why = ("torch", obstacle) if obstacle is not None else ("triton", f"{device} runs the kernels")
    if name != "triton":
        return Choice(str(name), why, f"the {name} backend calls no kernels")
    return Choice("triton", why, extension.unsupported_reason(device))


def select(
    backend: str | None, device: torch.device, precision: str | None = None, dtype: torch.dtype = torch.float32
) -> Backend:
    """Return the backend that ``backend`` means on ``device``, with products of this ``precision`` in ``dtype``.

    ``backend=None`` chooses: Triton's on a CUDA device that runs it, PyTorch's elsewhere; :func:`explain` says which.
    Triton's takes QR from the CUDA extension where that runs, as :func:`explain_qr` says, and otherwise from the same
    methods in PyTorch. ``precision=None`` is "balanced" in the kernels on a CUDA device, elsewhere "faithful". Only
    products of float32 can be balanced.

    Raises:
        ValueError: as :func:`choose`.
    """
    choice, on_gpu = choose(backend, device), device.type == "cuda"
    readable, halves = is_host_readable(device), dtype == torch.float32
    if halves and choice.name != "triton" and rounds_float32(device):
        warnings.warn(
            "torch's switches let this CPU round the factors of products in float32, also of those that have to come "
            'out orthogonal: call torch.set_float32_matmul_precision("highest").',
            stacklevel=2,
        )
    if choice.name == "reference":
        return REFERENCE
    if choice.name == "torch":
        return _torch_backend(readable, halves and precision == "balanced")
    if on_gpu and extension.load()[0] is None and extension.hidden() is not None:
        warnings.warn(f"QR runs in PyTorch: {choice.no_extension}.", stacklevel=2)
    balanced = on_gpu if precision is None else precision == "balanced"
    return _triton_backend(choice.no_extension is None, readable, halves and balanced, on_gpu)


def explain(backend: str | None, device: torch.device | str) -> str:
    """Return one line: which backend ``backend`` means on ``device``, and why.

    Raises:
        ValueError: as :func:`choose`.
    """
    choice = choose(backend, torch.device(device))
    return f"{choice.name}: {choice.why}"


def explain_qr(device: torch.device | str, backend: str | None = None) -> str:
    """Return one line: where the QR of that backend's steps on ``device`` comes from, and why.

    Raises:
        ValueError: as :func:`choose`.
    """
    absent = choose(backend, torch.device(device)).no_extension
    return f"CUDA extension: it runs on {device}" if absent is None else f"PyTorch: {absent}"
