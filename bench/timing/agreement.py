"""Whether an optimizer of this package goes where its reference goes: what stands before the timing of every step.

One weight of every shape is followed for a few steps, in a bucket of two, of which the other has gradients of its own.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench import gate
from bench.shapes import ParameterSet, Problem, Shape
from bench.timing.entries import Entry
from prokl.backends.select import select

AGREE = 1e-6
"""Largest distance from the reference, both in float64, relative to the distance moved. Measured: at most 4e-14; a
wrong index gives 1."""
REFRESH_EVERY = 3  # steps from one refresh to the next; one more is taken, with the refreshed bases


@cache  # sets of the same shapes do not ask again
def complaint(entry: Entry, shape: Shape, device: torch.device) -> str:
    """Say what is wrong with an optimizer of this package on a shape; "" if nothing is.

    In float32 it may err as the reference does, and where its products are those of pairs as PyTorch's form of these.
    """
    problem = Problem(ParameterSet("", ((2, *shape),), ()), device, torch.float64)

    def build(weights: list[Tensor], backend: str, precision: str | None = None) -> torch.optim.Optimizer:
        own = {"ns_dtype": torch.float64} if weights[0].dtype == torch.float64 else {}
        own |= {"backend": backend, "precision": precision, "precondition_frequency": REFRESH_EVERY}
        return entry.build(weights, **own)

    W = torch.nn.Parameter(problem.start[-1].clone())
    W.grad = problem.gradients[0][-1].clone()
    reference = build([W], "reference")
    reference.step()
    state: dict[str, Any] = reference.state_dict()["state"][0]  # where all of them start
    for key in {"L_Q", "R_Q"} & state.keys():
        # A few gradients leave R singular where n is many times m: rounding would choose its null space's basis.
        diagonal = state[key].diagonal(dim1=-2, dim2=-1)
        diagonal.add_(diagonal.mean())

    def moved(backend: str, dtype: torch.dtype, precision: str | None = None) -> list[Tensor]:
        """Return how far the last weight of the bucket gets; the reference has no buckets."""
        together = 1 if backend == "reference" else 2
        weights: list[Tensor] = [torch.nn.Parameter(W.to(dtype, copy=True)) for W in problem.start[-together:]]
        optimizer = build(weights, backend, precision)
        own = {
            key: value.to(dtype if value.is_floating_point() else value.dtype) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        copies = {i: deepcopy(own) for i in range(together)}
        optimizer.load_state_dict(optimizer.state_dict() | {"state": copies})
        for t in range(1, REFRESH_EVERY + 2):
            for W, G in zip(weights, problem.gradients[t][-together:], strict=True):
                W.grad = G.to(dtype, copy=True)
            optimizer.step()
        return [(weights[-1].detach().double() - problem.start[-1]).to(dtype)]

    truth = moved("reference", torch.float64)
    wrong = gate.disagreement(moved(entry.backend, torch.float64), truth, AGREE)
    if not wrong:
        named = select(entry.backend, device, dict(entry.settings)["precision"])
        balanced = named.name != "reference" and named is select(entry.backend, device, "balanced")
        form, precision = ("torch", "balanced") if balanced else ("reference", "faithful")
        found = moved(entry.backend, torch.float32, precision)
        wrong = gate.complaint(found, moved(form, torch.float32, precision), truth)
    return wrong and f"on {shape[0]}x{shape[1]}: {wrong}"
