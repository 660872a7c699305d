"""Whether an optimizer of this package goes where its reference goes: what stands before the timing of every step.

One weight of every shape is followed for a few steps, in a bucket of two, of which the other has gradients of its own.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench import gate
from bench.shapes import ParameterSet
from bench.timing.entries import Entry
from bench.timing.problem import Problem, Shape
from prokl.backends.select import select

AGREE = 1e-6
"""Largest distance from the reference, both in float64, relative to the distance moved. Measured: at most 4e-14; a
wrong index gives 1."""
REFRESH_EVERY = 3
"""Steps from one refresh to the next; one more is taken, with the refreshed bases."""


def _converted(value: Any, dtype: torch.dtype) -> Any:
    """Copy an entry of a state, to this dtype if it is of floating-point numbers."""
    if not isinstance(value, Tensor):
        return value
    return value.to(dtype if value.is_floating_point() else value.dtype, copy=True)


class Course:
    """The way of one weight from a state that the reference initialises, the same for every backend and dtype."""

    def __init__(self, entry: Entry, shape: Shape, device: torch.device) -> None:
        self.entry, self.problem = entry, Problem(ParameterSet("", ((2, *shape),), ()), device, torch.float64)
        W = torch.nn.Parameter(self.problem.start[-1].clone())
        optimizer = self._build([W], "reference")
        W.grad = self.problem.gradients[0][-1].clone()
        optimizer.step()
        self.state: dict[str, Any] = optimizer.state_dict()["state"][0]
        for key in {"L", "R"} & self.state.keys():
            # A few gradients leave R singular where n is many times m: rounding would choose its null space's basis.
            factor = self.state[key]
            factor.diagonal().add_(factor.diagonal().mean())

    def _build(self, weights: list[Tensor], backend: str, precision: str | None = None) -> torch.optim.Optimizer:
        own = {"ns_dtype": torch.float64} if weights[0].dtype == torch.float64 else {}
        own |= {"backend": backend, "precision": precision, "precondition_frequency": REFRESH_EVERY}
        return self.entry.build(weights, **own)

    def moved(self, backend: str, dtype: torch.dtype, precision: str | None = None) -> list[Tensor]:
        """Return how far the last weight of the bucket gets; the reference has no buckets."""
        together = 1 if backend == "reference" else 2
        weights: list[Tensor] = [torch.nn.Parameter(W.to(dtype, copy=True)) for W in self.problem.start[-together:]]
        optimizer = self._build(weights, backend, precision)
        saved = optimizer.state_dict()
        saved["state"] = {i: {k: _converted(v, dtype) for k, v in self.state.items()} for i in range(together)}
        optimizer.load_state_dict(saved)
        for t in range(1, REFRESH_EVERY + 2):
            for W, G in zip(weights, self.problem.gradients[t][-together:], strict=True):
                W.grad = G.to(dtype, copy=True)
            optimizer.step()
        return [(weights[-1].detach().double() - self.problem.start[-1]).to(dtype)]


@cache  # sets of the same shapes do not ask again
def complaint(entry: Entry, shape: Shape, device: torch.device) -> str:
    """Say what is wrong with an optimizer of this package on a shape; "" if nothing is.

    In float32 it may err as the reference does, and where its products are those of pairs as PyTorch's form of these.
    """
    course = Course(entry, shape, device)
    truth = course.moved("reference", torch.float64)
    wrong = gate.disagreement(course.moved(entry.backend, torch.float64), truth, AGREE)
    if not wrong:
        named = select(entry.backend, device, dict(entry.settings)["precision"])
        balanced = named.stages and named is select(entry.backend, device, "balanced")
        precision = "balanced" if balanced else "faithful"
        found = course.moved(entry.backend, torch.float32, precision)
        usual = course.moved("torch" if precision == "balanced" else "reference", torch.float32, precision)
        wrong = gate.complaint(found, usual, truth)
    return wrong and f"on {shape[0]}x{shape[1]}: {wrong}"
