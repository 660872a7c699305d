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
    """A tensor as the JIT specialises on it."""

    dtype: torch.dtype
    offset: int
    """Bytes from the start of the storage, which is aligned."""

    def data_ptr(self) -> int:
        return self.offset

    def ptr_range(self) -> int:
        return 0


@dataclass(frozen=True)
class Launch:
    """A recorded launch."""

    module: str
    function: str
    arguments: tuple[Any, ...]
    constants: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]
    """Names of the kernel's parameters."""

    @property
    def kernel(self) -> str:
        return self.function.removesuffix("_kernel")

    @property
    def by_name(self) -> dict[str, Any]:
        return dict(zip(self.names, self.arguments, strict=False)) | dict(self.constants)


def shapes(*shape: int, dtype: torch.dtype) -> Tensor:
    """Draw a tensor that holds nothing; see :mod:`bench.micro.case`."""
    return torch.empty(shape, dtype=dtype)


def _recorded(a: Any) -> Any:
    """Return what is kept of an argument, or of a tuple of them."""
    if isinstance(a, tuple):
        return tuple(map(_recorded, a))
    if not isinstance(a, Tensor):
        return a
    return Pointer(a.dtype, a.storage_offset() * a.element_size() % 16)


@contextmanager
def recording(seen: Callable[[Launch], None]) -> Iterator[None]:
    """Give launches to ``seen`` in place of running them; tensors made inside have no memory, and so no address.

    They say that they are on a CPU, since a torch without CUDA cannot index others, but are launched as on a GPU.
    """

    def start(kernel: Any, grid: Any, device: Any, *arguments: Any, **constants: Any) -> None:
        given = tuple(map(_recorded, arguments))
        name, names = kernel.__name__, tuple(kernel.arg_names)
        seen(Launch(kernel.__module__, name, given, tuple(constants.items()), names))

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
        case.bind(case.inputs(sizes, dtypes, shapes), ops)()
    return found


def _flat(launch: Launch) -> list[tuple[str, Any]]:
    """Return the arguments with their names; those of a tuple one by one, numbered before ``_ptr`` or a dimension."""
    found: list[tuple[str, Any]] = []
    for name, value in zip(launch.names, launch.arguments, strict=False):
        if not isinstance(value, tuple):
            found.append((name, value))
            continue
        stem, _, rest = name.rpartition("_") if "_" in name else (name, "", "")
        found += [(f"{stem}{i}" + f"_{rest}" * bool(rest), own) for i, own in enumerate(value)]
    return found


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def describe(launch: Launch) -> str:
    """Return all that the launch is specialised on as text: tile, dtypes, flags, and strides other than the usual.

    The dtype of a tensor that is not there is that of its stand-in.
    """
    values = launch.by_name
    tile = [value for name, value in values.items() if name.startswith("TILE") and not name.startswith("TILES")]
    words = ["x".join(map(str, tile))]
    for name, short in (("num_warps", "warps"), ("num_stages", "stages")):
        if name in values:
            words.append(f"{values[name]} {short}")
    dtypes = {name.removesuffix("_ptr"): _dtype(v.dtype) for name, v in _flat(launch) if isinstance(v, Pointer)}
    usual = max(dtypes.values(), key=list(dtypes.values()).count)
    words.append(usual)
    words += [f"{name}:{dtype}" for name, dtype in dtypes.items() if dtype != usual]
    for name, value in launch.constants:
        if name.startswith(("num_", "TILE")) and not name.startswith("TILES") or not value:
            continue
        name = name.lower()
        words.append(name if value is True else str(value) if name == "precision" else f"{name}={value}")
    words += _unusual(launch)
    return " ".join(words)


def _unusual(launch: Launch) -> list[str]:
    """List sizes that are no multiple of 16, and strides other than (multiples of 16, 1)."""
    words: list[str] = []
    strides: dict[str, list[str]] = {}
    for name, value in _flat(launch):
        if isinstance(value, Pointer) and value.offset:
            words.append(f"{name} unaligned")
        if not isinstance(value, int):
            continue
        kind = "1" if value == 1 else "?" if value % 16 else "16" if value else "0"
        kind += "" if value < 2**31 else "L"
        if name.endswith("_lo"):
            if kind not in ("0", "16"):  # where there is a lo it is said
                words.append(f"{name}:{kind}")
        elif name.startswith("stride_"):
            strides.setdefault(name.removeprefix("stride_").rpartition("_")[0], []).append(kind)
        elif kind != "16":
            words.append(f"{name}:{kind}")
    for name, kinds in strides.items():
        if kinds in (["16", "1", "16"], ["1", "16"]):
            words.append(f"{name}^T")
        elif {*kinds} != {"0"} and not (kinds[-1] == "1" and {*kinds[:-1]} <= {"16"}):
            words.append(f"{name}[{' '.join(kinds)}]")
    return words
