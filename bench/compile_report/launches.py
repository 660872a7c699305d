"""Records what launchers launch, without a GPU: kernels, their arguments, and what the JIT specialises them on."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.micro.case import Case, Dtypes, Sizes
from prokl.backends.select import _triton_backend
from prokl.backends.triton_ops import TritonIO
from prokl.kernels import launch as launching


@dataclass(frozen=True)
class Pointer:
    """A tensor as the JIT specialises on it; ``offset`` is in bytes from the start of the storage, modulo 16."""

    dtype: torch.dtype
    offset: int

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """A recorded launch; ``names`` are those of the kernel's parameters, constants come after the arguments."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]

    @property
    def kernel(self) -> str:
        return self.function.removesuffix("_kernel")

    @property
    def key(self) -> tuple[Any, ...]:
        """The kernel, and all that it is specialised on: of numbers whether they are 1, multiples of 16, and wide."""
        given = zip(self.names, map(_specialised, self.arguments), strict=False)
        return self.kernel, *given, *self.constants

    def __str__(self) -> str:
        """Return dtypes in the arguments' order, and the constants that are not off."""
        flat = [its for own in self.arguments for its in (own if isinstance(own, tuple) else (own,))]
        dtypes = dict.fromkeys(str(its.dtype).removeprefix("torch.") for its in flat if isinstance(its, Pointer))
        odd = any(isinstance(its, int) and its > 1 and its % 16 for its in flat)
        constants = [f"{name}={value}" for name, value in self.constants if value]
        return " ".join([self.kernel, *dtypes, *constants, *["odd sizes"] * odd])


def _specialised(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_specialised, value))
    if isinstance(value, int):
        return value == 1, value % 16 == 0, value >= 2**31
    if isinstance(value, Pointer):
        return value.dtype, value.offset == 0
    return float if isinstance(value, float) else value


def _recorded(a: Any) -> Any:
    """Return what is kept of an argument, or of a tuple of them."""
    if isinstance(a, tuple):
        return tuple(map(_recorded, a))
    return Pointer(a.dtype, a.storage_offset() * a.element_size() % 16) if isinstance(a, Tensor) else a


@contextmanager
def recording(seen: Callable[[Launch], None]) -> Iterator[None]:
    """Give launches to ``seen`` in place of running them; tensors made inside have no memory, and so no address.

    They say that they are on a CPU, since a torch without CUDA cannot index others, but are launched as on a GPU.
    """

    def start(kernel: Any, grid: Any, device: Any, *arguments: Any, **constants: Any) -> None:
        given, names = tuple(map(_recorded, arguments)), tuple(kernel.arg_names)
        seen(Launch(kernel.__module__, kernel.__name__, given, tuple(constants.items()), names))

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(patch.object(launching, "start", start))
        stack.enter_context(patch.object(launching, "INTERPRETED", False))  # which decides on dtypes of operands
        stack.enter_context(patch.object(launching, "DEVICES", ("cpu",)))
        stack.enter_context(patch.object(TritonIO, "locate", lambda self, rates: None))
        yield


def called(case: Case, sizes: Sizes, dtypes: Dtypes) -> list[Launch]:
    """Return what a case launches over the operations of its precision."""
    ops, found = _triton_backend(True, False, case.balanced, True).ops, []
    with recording(found.append):
        case.bind(case.inputs(sizes, dtypes, lambda *shape, dtype: torch.empty(shape, dtype=dtype)), ops)()
    return found
