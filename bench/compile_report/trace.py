"""Trace what a real step launches on a GPU, without one: every kernel of Triton's, csrc's and PyTorch's.

The optimizer is built over weights without memory, and its buckets execute with the backend of a CUDA device that has
the extension. Triton's launches are recorded, the extension's follow from the sizes, and every other operator of
PyTorch that computes something is one launch.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.compile_report.launches import Launch, recording
from bench.shapes import ParameterSet
from prokl.backends.device import GPU_WORKSPACE_DIVISOR
from prokl.backends.rounding import Rounding
from prokl.backends.select import _triton_backend
from prokl.engine.bucket import Bucket

MEMORY = 139 * 2**30  # bytes of an H200
TORCH = "elementwise"  # the kernel of what PyTorch launches
EXTENSION = "qr."  # before the names of the extension's operators
BLOCK = 128  # columns that a block of the extension's threads factors, in float32
KINDS = ("ordinary", "refresh")  # kinds of step; a refresh step does all that an ordinary one does
WITHOUT_LAUNCH = set("empty empty_like empty_strided new_empty new_empty_strided _unsafe_view lift_fresh".split())
"""Operators beside views that launch nothing."""
TWICE = {"masked_fill", "index_copy", "index_fill", "index_add", "index_put"}
"""Operators that copy their input and then write into the copy; those that write in place end in an underscore."""


@dataclass(frozen=True)
class Event:
    """One launch of a step; Triton's with all that was recorded of it."""

    kernel: str
    launch: Launch | None = None


def extension_launches(operator: str, k: int, looks: bool = False) -> int:
    """Count the launches of an operator of :mod:`prokl.backends.cuda_qr` on matrices of k columns, which decide it.

    ``looks`` says of "finish" whether it is given Gram matrices to look at.
    """
    blocks = -(-k // BLOCK)
    if operator == "finish":
        return 1 + (looks and blocks > 1)
    if blocks == 1:
        return 1
    factored, inverted = 3 * blocks - 1, blocks - 1  # a load, every block, and what two kernels make of the rest
    twice = 2 * factored  # as it is, and with a shift
    return {"factor": factored + inverted, "semidefinite_root": twice}.get(operator, twice + 2 * inverted)


class Operators(TorchDispatchMode):
    """Notes what PyTorch, and the extension through it, launches."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        library, _, name = func._schema.name.partition("::")
        if library == "prokl":
            looks = name == "finish" and args[2] is not None
            self.events += [Event(EXTENSION + name)] * extension_launches(name, args[0].shape[-1], looks)
        elif library == "aten" and isinstance(out, Tensor | tuple) and not (func.is_view or name in WITHOUT_LAUNCH):
            self.events += [Event(TORCH)] * (1 + (name in TWICE))
        return out


@contextmanager
def tracing() -> Iterator[list[Event]]:
    """Collect the launches of what executes inside, as on a CUDA device with the extension; nothing has memory."""
    events: list[Event] = []

    def triton(launch: Launch) -> None:
        events.append(Event(launch.kernel, launch))

    def gpu(backend: str | None, device: Any, precision: str | None = None, dtype: torch.dtype = torch.float32) -> Any:
        balanced = precision != "faithful" and dtype == torch.float32  # on a GPU None is balanced
        return _triton_backend(True, False, balanced, True)

    with ExitStack() as stack:
        stack.enter_context(patch("prokl.algorithm.settings.cpu_has_bfloat16", lambda: True))
        stack.enter_context(patch("prokl.engine.validation.why_not_plain_memory", lambda t: None))  # none has memory
        stack.enter_context(patch("prokl.backends.select.select", gpu))
        stack.enter_context(patch("prokl.engine.engine.workspace", lambda device: MEMORY // GPU_WORKSPACE_DIVISOR))
        stack.enter_context(patch.object(FakeTensor, "data_ptr", lambda t: 0))
        stack.enter_context(patch.object(Bucket, "_begin_what_was_zeroed", lambda self: None))  # it reads values
        stack.enter_context(patch.object(Rounding, "locate", lambda self, steps: None))
        stack.enter_context(recording(triton))
        yield events


def execute(bucket: Bucket, kind: str, events: list[Event]) -> list[Event]:
    """Return what one step of a bucket launches; ``events`` are those of :func:`tracing`."""
    count = bucket.layout.count
    tau = bucket.group["precondition_frequency"]
    bucket.steps = [tau - 1 if kind == "refresh" else tau] * count
    with torch.no_grad():
        plan = bucket.decide()
        assert plan is not None and len(plan.stepping) == count
        assert len(plan.refreshing) == (count if kind == "refresh" else 0)
        before = len(events)
        with Operators(events):
            bucket.execute(plan)
    bucket.io.release()
    return events[before:]


def steps_of(
    parameters: ParameterSet, dtype: torch.dtype, build: Callable[[list[Tensor]], Any]
) -> dict[str, list[list[Event]]]:
    """Return by kind of step what every bucket launches of the optimizer that ``build`` makes of a set's weights."""
    found: dict[str, list[list[Event]]] = {}
    with tracing() as events:
        weights: list[Tensor] = [torch.nn.Parameter(torch.empty(size, dtype=dtype)) for size in parameters.each]
        for W in weights:
            W.grad = torch.empty_like(W)
        engine = build(weights).engine
        engine.build()
        for kind in KINDS:
            seen: dict[tuple[int, int, int], list[Event]] = {}  # buckets of equal sizes do alike
            for bucket in engine.buckets:
                size = bucket.layout.count, bucket.layout.m, bucket.layout.n
                if size not in seen:
                    seen[size] = execute(bucket, kind, events)
                found.setdefault(kind, []).append(seen[size])
    return found
