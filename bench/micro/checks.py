"""Whether the results of a case's form are right: what stands before every timing and in the tests of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.micro.case import Case, Inputs
from prokl.addresses import Addresses

TOLERANCE = 4
"""Largest ratio of a form's error to that of the plain form, both against float64. Sums in another order and TF32 in
three parts make up to about twice the error; a wrong index or a lost part makes thousands of times it."""
AGREE = 1e-12
"""Largest distance of the PyTorch form from the plain one, both in float64, so that one confirms the other. Measured:
at most 1e-14, in Newton-Schulz, whose steps magnify rounding; a wrong index gives 1."""


class Numbers:
    """Draws normal numbers; the same ones for the same seed."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor:
        # Drawn as float32, so that every dtype has the same numbers; float64 factors are as good with them.
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype)

    def table(self, matrices: Sequence[Tensor]) -> Tensor:
        addresses = Addresses(len(matrices), self.device)
        addresses.update([t.unsqueeze(0) for t in matrices], [1] * len(matrices))
        return addresses.table


def doubled(x: Any) -> Any:
    """Inputs in float64."""
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    if isinstance(x, torch.dtype):
        return torch.float64
    if isinstance(x, (list, tuple)):
        return [doubled(y) for y in x]
    return {k: doubled(v) for k, v in x.items()} if isinstance(x, dict) else x


def standard(case: Case) -> Callable[[Inputs], Any]:
    """The form that the others are compared with."""
    return case.plain or (lambda i: case.dense(case.torch(i)))


def errors(case: Case, run: Callable[[Inputs], Any], fresh: Callable[[], Inputs]) -> tuple[float, float, float]:
    """Largest relative errors of ``run`` and the plain form over the results, in norm, and how large the first may be.

    The first is nan where a result is not finite.
    """
    plain = standard(case)
    found, usual, truth = (_tensors(f(i)) for f, i in ((run, fresh()), (plain, fresh()), (plain, doubled(fresh()))))
    results = zip(found, usual, truth, strict=True)
    parts = [(_distance(x, t), _distance(y, t), torch.finfo(x.dtype).eps) for x, y, t in results]
    # The result that is worst in units of what it may be; nan is worse than any number.
    return max(
        ((x, y, TOLERANCE * (y + eps)) for x, y, eps in parts),
        key=lambda e: float("inf") if e[0] != e[0] else e[0] / e[2],
    )


def disagreement(case: Case, fresh: Callable[[], Inputs]) -> float:
    """Distance of the PyTorch form from the plain one in float64, largest over the results; nan if one is."""
    ours, plain = (_tensors(f(doubled(fresh()))) for f in (lambda i: case.dense(case.torch(i)), standard(case)))
    return max((_distance(x, t) for x, t in zip(ours, plain, strict=True)), key=lambda e: (e != e, e))


def complaint(case: Case, run: Callable[[Inputs], Any], fresh: Callable[[], Inputs]) -> str:
    """What is wrong with the results of ``run``, one of the case's forms; empty if nothing is.

    Args:
        case: whose form.
        run: from inputs to results, dense where they have that.
        fresh: makes the inputs, always the same.
    """
    if case.verify is not None:
        i = fresh()
        return case.verify(i, run(i))
    error, usual, allowed = errors(case, run, fresh)
    if not error <= allowed:
        return f"error {error:.1e}, may be {allowed:.1e}; the plain form's is {usual:.1e}"
    if case.plain is not None and not (apart := disagreement(case, fresh)) <= AGREE:
        return f"the PyTorch and the plain form are {apart:.1e} apart in float64, may be {AGREE:g}"
    return ""


def _tensors(results: Any) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else [x for x in results if x is not None]


def _distance(x: Tensor, truth: Tensor) -> float:
    if x.shape != truth.shape:
        return float("nan")
    return (torch.linalg.vector_norm(x.double() - truth) / torch.linalg.vector_norm(truth)).item()
