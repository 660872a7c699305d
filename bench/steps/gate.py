"""Whether an optimizer of this package goes where its reference goes: what stands before the timing of every step.

One weight of every shape is followed for a few steps, in a bucket of two, of which the other has gradients of its own.
In float64 it must get where the reference gets, but for rounding. In the dtypes that are timed it may be FACTOR times
as far from there as the reference in the same dtypes is.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.shapes import ParameterSet
from bench.steps.contenders import Contender
from bench.steps.peers import CannotRun
from bench.steps.problem import Problem, Shape

AGREE = 1e-6
"""Largest distance of a contender of this package from the reference, both in float64, relative to the distance
moved. Measured: at most 4e-14; a wrong index gives 1."""
FACTOR = 4
"""Largest ratio of the distances in the dtypes that are timed. Measured on a CPU: 0.5 to 1.2. Where
Newton-Schulz is in half precision its rounding hides what is smaller."""
REFRESH_EVERY = 3
"""Steps from one refresh to the next; one more is taken, with the refreshed bases."""


class Course:
    """The way of one weight from a state that the reference initialises, the same for every backend and dtype.

    Args:
        kind: the optimizer.
        settings: of it.
        shape: of the weight.
        device: where.
    """

    def __init__(self, kind: type[Optimizer], settings: Mapping[str, Any], shape: Shape, device: torch.device) -> None:
        self._kind, self._settings = kind, {**settings, "precondition_frequency": REFRESH_EVERY}
        self._problem = Problem(ParameterSet("gate", ((2, *shape),), ()), device, torch.float64)
        self._start = self._problem.start[-1]
        W = torch.nn.Parameter(self._start.clone())
        optimizer = self._optimizer([W], "reference")
        W.grad = self._problem.gradients[0][-1].clone()
        optimizer.step()
        self._state: dict[str, Any] = optimizer.state_dict()["state"][0]
        for key in {"L", "R"} & self._state.keys():
            # A few gradients leave R singular where n is many times m: rounding would choose its null space's basis.
            factor = self._state[key]
            factor.diagonal().add_(factor.diagonal().mean())
        self._end = self._walk("reference", torch.float64)

    def distance(self, backend: str, dtype: torch.dtype) -> float:
        """How far from the reference in float64 the weight ends, relative to the distance moved."""
        moved = torch.linalg.vector_norm(self._end - self._start)
        return float(torch.linalg.vector_norm(self._walk(backend, dtype).double() - self._end) / moved)

    def _optimizer(self, weights: list[Tensor], backend: str) -> Optimizer:
        settings = self._settings | {"backend": backend}
        if "ns_dtype" in settings and weights[0].dtype == torch.float64:
            settings["ns_dtype"] = torch.float64
        return self._kind(weights, **settings)

    def _walk(self, backend: str, dtype: torch.dtype) -> Tensor:
        """Where the weight ends, which is the last one of its bucket; the reference has no buckets."""
        together = 1 if backend == "reference" else 2
        weights: list[Tensor] = [torch.nn.Parameter(W.to(dtype, copy=True)) for W in self._problem.start[-together:]]
        optimizer = self._optimizer(weights, backend)
        saved = optimizer.state_dict()
        saved["state"] = {i: {k: converted(v, dtype) for k, v in self._state.items()} for i in range(together)}
        optimizer.load_state_dict(saved)
        for t in range(1, REFRESH_EVERY + 2):
            for W, G in zip(weights, self._problem.gradients[t][-together:], strict=True):
                W.grad = G.to(dtype, copy=True)
            optimizer.step()
        return weights[-1].detach()


def converted(value: Any, dtype: torch.dtype) -> Any:
    """A copy of an entry of a state in this dtype, if it is of floating-point numbers."""
    if not isinstance(value, Tensor):
        return value
    return value.to(dtype if value.is_floating_point() else value.dtype, copy=True)


def complaint(contender: Contender, shape: Shape, device: torch.device) -> str:
    """What is wrong with a contender of this package on a shape; empty if nothing is."""
    assert contender.own
    course, where = Course(*contender.own, shape, device), f"on {shape[0]}x{shape[1]} in"
    apart = course.distance(contender.backend, torch.float64)
    if not apart <= AGREE:
        return f"{apart:.1e} from the reference {where} float64, may be {AGREE:g}"
    usual, apart = (course.distance(backend, torch.float32) for backend in ("reference", contender.backend))
    allowed = FACTOR * (usual + torch.finfo(torch.float32).eps)
    if not apart <= allowed:
        return f"{apart:.1e} from the float64 reference {where} {contender.dtypes}, may be {allowed:.1e}"
    return ""


class Gate:
    """Remembers what agrees with the reference, so that sets of the same shapes do not ask again."""

    def __init__(self) -> None:
        self._known: dict[Any, str] = {}

    def check(self, contender: Contender, problem: Problem) -> None:
        """Compare one weight of every shape.

        Raises:
            CannotRun: the contender does not go where the reference goes.
        """
        if contender.own is None or contender.backend == "reference":
            return
        kind, settings = contender.own
        for shape in dict.fromkeys(problem.parameters.each):
            key = kind, tuple(sorted(settings.items(), key=lambda item: item[0])), shape, problem.device
            if key not in self._known:
                self._known[key] = complaint(contender, shape, problem.device)
            if self._known[key]:
                raise CannotRun(f"wrong: {self._known[key]}")
