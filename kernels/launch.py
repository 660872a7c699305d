"""The common part of all launchers: devices, tiles, argument checks, and the one place where a kernel starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.pair import Operand, Pair

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if Triton's interpreter runs the kernels (TRITON_INTERPRET=1 when they were defined)."""

DEVICES = ("cuda", "cpu") if INTERPRETED else ("cuda",)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRITON_DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}

Shapes = dict[str, tuple[Operand | None, tuple[int, ...]]]
"""Arguments by their names, each with the shape that it must have if it is there."""

LOG = logging.getLogger("prokl")
_logged = False
"""True once it was logged that kernels are compiled."""
_begun: set[str] = set()
"""Kernels of which a launch has succeeded."""


@dataclass(frozen=True)
class Tile:
    """Block sizes of one program, and how it is compiled."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def arithmetic_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype that a kernel accumulates in: float64 where one of the tensors has it, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def operand_dtype(sum_dtype: torch.dtype, *tensors: Tensor) -> torch.dtype:
    """Return the dtype that tensors are multiplied in: the half precision of them all, else that of the sum.

    Tensor cores sum products of half precision in float32. The interpreter's own of bfloat16 are wrong, so it takes
    float32 for them.
    """
    dtypes = {t.dtype for t in tensors}
    half = (torch.float16,) if INTERPRETED else (torch.float16, torch.bfloat16)
    return (
        tensors[0].dtype if len(dtypes) == 1 and tensors[0].dtype in half and sum_dtype == torch.float32 else sum_dtype
    )


def multiplicable(t: Tensor, sum_dtype: torch.dtype) -> Tensor:
    """Return a factor as a kernel multiplies it: one of half precision in float32 where the sum is in float64.

    Triton 3.6 compiles no product of float64 with what it converts from half precision.
    """
    return t.float() if sum_dtype == torch.float64 and t.dtype.itemsize == 2 else t


def matrices(name: str, t: Operand) -> tuple[int, int, int]:
    """Return the sides of a batch of matrices, or raise ValueError unless it is one."""
    if len(t.shape) != 3 or 0 in t.shape[1:]:
        raise ValueError(f"{name} has shape {tuple(t.shape)}; must be (B, m, n) with m, n >= 1.")
    B, m, n = t.shape
    return B, m, n


def check(
    device: torch.device,
    tensors: Shapes,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
) -> None:
    """Raise ValueError, naming the argument, unless all have their shapes, one of these dtypes and this device.

    Every launcher calls this for what its kernel reads and writes: memory beyond is safe. All else is asserted.
    """
    for name, (given, shape) in tensors.items():
        t = given.hi if isinstance(given, Pair) else given
        if t is None:
            continue
        if t.shape != shape:
            raise ValueError(f"{name} has shape {tuple(t.shape)}; must be {shape}.")
        if t.dtype not in dtypes:
            raise ValueError(f"{name} has dtype {t.dtype}; must be one of {dtypes}: convert it.")
        if t.device != device:
            raise ValueError(f"{name} is on {t.device}; must be on {device} as the others are.")
        if t.device.type not in DEVICES:
            raise ValueError(f"{name} is on {t.device}; must be on one of {DEVICES}: use the PyTorch form elsewhere.")


def start(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
    """Launch ``kernel`` over ``grid`` on ``device``; ``constants`` are constexprs, num_warps and num_stages.

    Every launch of the package comes through here. The first one that has to compile says so, once a process.
    """
    listens = not _logged and kernel.__name__ not in _begun
    # Triton launches on the current device; -1 leaves it alone.
    with torch.cuda.device(device.index if device.type == "cuda" else -1), _heard() if listens else nullcontext():
        kernel[grid](*arguments, **constants)
    _begun.add(kernel.__name__)


@contextmanager
def _heard() -> Iterator[None]:
    """Log one line as soon as Triton has compiled a kernel: without it a first step is silent for long."""
    knobs, before = triton.knobs.compilation, triton.knobs.compilation.listener

    def listener(**compilation: Any) -> None:
        global _logged
        if before is not None:
            before(**compilation)
        if not compilation["cache_hit"] and not _logged:
            _logged = True
            LOG.warning(
                "Triton compiles prokl's kernels, one after another, as they are not in its cache, %s. The first steps "
                "wait for that; later runs with this cache do not.",
                triton.knobs.cache.dir,
            )

    knobs.listener = listener
    try:
        yield
    finally:
        knobs.listener = before
