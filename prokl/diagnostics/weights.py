"""The weights of a live optimizer whose state has begun, stacked by shape as the batched step takes them.

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prokl.algorithm.method import Method
from prokl.algorithm.shapes import MatrixShape, compute_dtype
from prokl.engine.base import MatrixOptimizer
from prokl.engine.bucket import split, state_dtype


@dataclass(frozen=True)
class Batch:
    """Matrices of one group, oriented shape, rank, dtype and device: copies, in the arithmetic dtype."""

    names: list[str]
    shapes: list[MatrixShape]
    """As PyTorch holds them: a weight and the transpose of another share a batch."""
    rank: int
    """Effective rank; 0 where the method has none."""
    steps: list[int]
    given: list[bool]
    """Matrices that have a gradient."""
    gradient: Tensor | None
    """(B,m,n), zero for the others; None when there is none at all, or they were not asked for."""
    state: dict[str, Tensor]
    """The keys that were asked for, as in :mod:`prokl.algorithm.reference`, each with a leading B."""
    group: dict[str, Any]
    method: Method[Any]

    @property
    def m(self) -> int:
        """Short side."""
        return self.shapes[0].m

    @property
    def n(self) -> int:
        """Long side."""
        return self.shapes[0].n


class Wrapper(Protocol):
    """What a trainer puts around an optimizer, as Accelerate and Lightning do."""

    @property
    def optimizer(self) -> Any:
        """What it was given: an optimizer, or another wrapper."""


def unwrapped(optimizer: MatrixOptimizer | Wrapper) -> MatrixOptimizer:
    """Return the optimizer itself.

    Raises:
        TypeError: it has no preconditioners.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, MatrixOptimizer):
        raise TypeError(
            f"optimizer must be a prokl.ProKLShampoo or prokl.KLShampoo, got {type(optimizer).__name__}; "
            "pass the optimizer itself."
        )
    return optimizer


def batches(
    optimizer: MatrixOptimizer, model: nn.Module | None, keys: Collection[str] | None = None, *, gradients: bool = True
) -> Iterator[Batch]:
    """Yield the matrices that have begun, stacked; no batch is larger than what is stepped together.

    Args:
        optimizer: whose.
        model: names the weights of an optimizer that was made without names.
        keys: state to stack; None stacks all of it.
        gradients: whether to stack the gradients.

    Raises:
        ValueError: a weight without a name is not in ``model``.
    """
    known = {} if model is None else {p: name for name, p in model.named_parameters()}
    found: dict[tuple[Any, ...], list[tuple[Tensor, str]]] = {}
    for index, group in enumerate(optimizer.param_groups):
        if group["algorithm"] != "matrix":
            continue
        names = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if _begun(optimizer, p):
                shape = MatrixShape.of(p)
                key = index, shape.m, shape.n, optimizer.method.rank(group, shape.m, shape.n), p.dtype, p.device
                name = names[i] if names else known.get(p) or _placed(index, i, model)
                found.setdefault(key, []).append((p, name))
    for (index, m, n, rank, dtype, _), members in found.items():
        group = optimizer.param_groups[index]
        arithmetic = compute_dtype(dtype, state_dtype(group, members[0][0]))
        for run in split(members, optimizer.method.workspace(m, n, rank), arithmetic.itemsize):
            yield _batch(optimizer, group, rank, arithmetic, run, keys, gradients)


def _placed(index: int, i: int, model: nn.Module | None) -> str:
    """Return a name for a weight that has none."""
    if model is not None:
        raise ValueError(f"Invalid model: parameter {i} of group {index} is not in it; pass the one that is trained.")
    return f"group{index}.{i}"


def _begun(optimizer: MatrixOptimizer, p: Tensor) -> list[int]:
    """List the matrices of a parameter that have had their first usable gradient."""
    steps = optimizer.state.get(p, {}).get("step", -1)
    return [b for b, step in enumerate(steps if isinstance(steps, list) else [steps]) if step >= 0]


def _batch(
    optimizer: MatrixOptimizer,
    group: dict[str, Any],
    rank: int,
    arithmetic: torch.dtype,
    members: list[tuple[Tensor, str]],
    keys: Collection[str] | None,
    with_gradients: bool,
) -> Batch:
    names, shapes, steps, given = [], [], [], []
    gradients: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {}
    for p, name in members:
        own, begun, shape = optimizer.state[p], _begun(optimizer, p), MatrixShape.of(p)
        stacked = p.ndim == 3
        rows = slice(None) if len(begun) == shape.count else begun  # an index would be copied to the device
        for b in begun:
            names.append(f"{name}[{b}]" if stacked else name)
            shapes.append(shape)
            steps.append(own["step"][b] if stacked else own["step"])
            given.append(p.grad is not None)
        for key, value in own.items():
            if key not in ("step", "skipped") and (keys is None or key in keys):
                part = value[rows] if stacked else value[None]
                parts.setdefault(key, []).append(part.detach().to(arithmetic))
        if not with_gradients:
            continue
        if p.grad is None:
            gradients.append(torch.zeros(len(begun), shape.m, shape.n, dtype=arithmetic, device=p.device))
        else:
            # As the step reads it: in the weight's dtype first.
            gradients.append(shape.oriented(p.grad.detach().to(p.dtype))[rows].to(arithmetic))
    gradient = torch.cat(gradients) if with_gradients and any(given) else None
    if gradient is not None and group["maximize"]:
        gradient = -gradient
    state = {key: torch.cat(values) for key, values in parts.items()}
    return Batch(names, shapes, rank, steps, given, gradient, state, group, optimizer.method)
