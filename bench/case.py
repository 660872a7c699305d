"""What a case of :mod:`bench.kernel_cases` is: inputs, the call of a kernel, its PyTorch form, and their work.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

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
    """One call of the step.

    Attributes:
        name: unique among the cases.
        module: that of the launcher.
        inputs: makes the arguments of ``call`` and ``torch``.
        call: the launcher, with a tile or its own choice (None).
        torch: the PyTorch form, of the same results.
        flops: of one call, as the kernel counts them: half of a symmetric product.
        bytes: of one call when every operand is read and every result written once.
        tiles: those of ``module`` to compile for; None stands for the launcher's choice.
        dtypes: to compile for.
        timed: dtypes to time.
        fitted: the sizes nearest to given ones that a tile takes.
        dense: results in a form that both agree on.
    """

    name: str
    module: ModuleType
    inputs: Callable[[Sizes, Dtypes, Draw], Inputs]
    call: Callable[[Inputs, Tile | None], Any]
    torch: Callable[[Inputs], Any]
    flops: Callable[[Sizes], float]
    bytes: Callable[[Sizes, Dtypes], float]
    tiles: Callable[[Dtypes], Sequence[Tile | None]] = lambda d: (None,)
    dtypes: tuple[Dtypes, ...] = (FP32,)
    timed: tuple[Dtypes, ...] = ()
    fitted: Callable[[Sizes, Tile | None], Sizes] = lambda s, tile: s
    dense: Callable[[Any], Any] = lambda results: results


def shipped(module: ModuleType, dtype: torch.dtype) -> tuple[Tile, ...]:
    """The tiles of a kernel for operands of ``dtype``."""
    own = {torch.float64: "TILES_FP64", torch.float32: "TILES_FP32"}.get(dtype, "TILES_HALF")
    return getattr(module, own, None) or module.TILES


def item(*dtypes: torch.dtype) -> int:
    """Bytes of one element of each, together."""
    return sum(dtype.itemsize for dtype in dtypes)
