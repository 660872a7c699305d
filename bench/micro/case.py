"""What a case is that is compiled, checked or timed: inputs, our forms of an operation, its plain form, their work.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from prokl import ops
from prokl.kernels.launch import Tile

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """One bucket of weights."""

    B: int
    m: int
    n: int
    r: int


@dataclass(frozen=True)
class Dtypes:
    """What a bucket is stored and computed in."""

    name: str
    weights: torch.dtype
    momentum: torch.dtype
    arithmetic: torch.dtype
    polar: torch.dtype


FP32 = Dtypes("fp32", torch.float32, torch.float32, torch.float32, torch.bfloat16)
BF16 = Dtypes("bf16 weights", torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
BF16_STATE = Dtypes("bf16 weights and state", torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16)
FP16 = Dtypes("fp16 weights", torch.float16, torch.float32, torch.float32, torch.float16)
FP32_POLAR = Dtypes("fp32 throughout", torch.float32, torch.float32, torch.float32, torch.float32)
FP64 = Dtypes("fp64", *[torch.float64] * 4)


class Draw(Protocol):
    """Where inputs come from: random numbers, or no numbers at all where only shapes and dtypes matter."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor of independent values of order one."""

    def table(self, matrices: Sequence[Tensor]) -> Tensor:
        """The table of addresses of these matrices."""


@dataclass(frozen=True)
class Case:
    """One operation of a step.

    Attributes:
        name: unique among the cases.
        module: that of the launcher; None where no Triton kernel is meant.
        inputs: makes the arguments of all forms; a form may write into them.
        call: the launcher, with a tile or its own choice (None); None where PyTorch is all there is.
        torch: the PyTorch form, of the same results.
        flops: of one call, as the kernel counts them: half of a symmetric product.
        bytes: of one call when every operand is read and every result written once.
        tiles: those of ``module`` to compile for; None stands for the launcher's choice.
        dtypes: to compile for.
        timed: dtypes to time.
        fitted: the sizes nearest to given ones that a tile takes.
        dense: results of ``call`` and ``torch`` in a form that both agree on.
        plain: the formula as it is printed, with the results of ``dense``; None where ``torch`` is that already.
        counterpart: what KL-Shampoo needs in the place of this.
        polar_flops: those of ``flops`` that belong to Newton-Schulz, which may run in bfloat16.
        verify: what is wrong with results, from the inputs; None compares them with the plain form in float64.
        obstacle: why ``call`` cannot run on a device.
        plain_on_cpu: whether ``torch`` is the plain form itself on a CPU.
    """

    name: str
    module: ModuleType | None
    inputs: Callable[[Sizes, Dtypes, Draw], Inputs]
    call: Callable[[Inputs, Tile | None], Any] | None
    torch: Callable[[Inputs], Any]
    flops: Callable[[Sizes], float]
    bytes: Callable[[Sizes, Dtypes], float]
    tiles: Callable[[Dtypes], Sequence[Tile | None]] = lambda d: (None,)
    dtypes: tuple[Dtypes, ...] = (FP32,)
    timed: tuple[Dtypes, ...] = ()
    fitted: Callable[[Sizes, Tile | None], Sizes] = lambda s, tile: s
    dense: Callable[[Any], Any] = lambda results: results
    plain: Callable[[Inputs], Any] | None = None
    counterpart: Case | None = None
    polar_flops: Callable[[Sizes], float] = lambda s: 0.0
    verify: Callable[[Inputs, Any], str] | None = None
    obstacle: Callable[[torch.device], str | None] = lambda device: None
    plain_on_cpu: bool = False


def best(device: torch.device) -> ops.Primitives:
    """The table that a step on ``device`` takes by itself."""
    return ops.select(None, device) or ops.TORCH


def shipped(module: ModuleType, dtype: torch.dtype) -> tuple[Tile, ...]:
    """The tiles of a kernel for operands of ``dtype``."""
    own = {torch.float64: "TILES_FP64", torch.float32: "TILES_FP32"}.get(dtype, "TILES_HALF")
    return getattr(module, own, None) or module.TILES


def item(*dtypes: torch.dtype) -> int:
    """Bytes of one element of each, together."""
    return sum(dtype.itemsize for dtype in dtypes)
