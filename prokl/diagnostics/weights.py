"""The weights of a live optimizer whose state has begun, stacked by shape as the batched step takes them.

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from prokl.algorithm.method import Method
from prokl.algorithm.shapes import MatrixShape, compute_dtype
from prokl.backends.device import workspace
from prokl.backends.io import in_float32
from prokl.engine.engine import Engine
from prokl.engine.pieces import Piece, clock, runs, units
from prokl.engine.storage import state_dtype
from prokl.matrix_optimizer import MatrixOptimizer


@dataclass(frozen=True)
class Batch:
    """Matrices of one group, oriented shape, rank, dtype and device: copies, in the arithmetic dtype."""

    names: list[str]
    shapes: list[MatrixShape]
    """As PyTorch holds them: a weight and the transpose of another share a batch."""
    rank: int
    """Effective rank; 0 where the method has none."""
    steps: list[int]
    has_gradient: list[bool]
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


def engine_of(optimizer: MatrixOptimizer | Wrapper) -> Engine:
    """Return the engine of an optimizer, of a divided one that of what this rank steps.

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
    return optimizer.engine


def batches(
    engine: Engine, model: nn.Module | None, keys: Collection[str] | None = None, *, gradients: bool = True
) -> Iterator[Batch]:
    """Yield the matrices that have begun, stacked; no batch is larger than what is stepped together.

    Args:
        engine: whose.
        model: names the weights of an optimizer that was made without names.
        keys: state to stack; None stacks all of it.
        gradients: whether to stack the gradients.

    Raises:
        ValueError: a weight without a name is not in ``model``.
    """
    names: dict[Tensor, str] = {} if model is None else {p: name for name, p in model.named_parameters()}
    alike: dict[tuple[Any, ...], list[Piece]] = {}
    place: dict[int, int] = {}
    for unit in units(engine.groups):
        i = place[unit.group_index] = place.get(unit.group_index, -1) + 1
        for piece in engine.pieces(unit) if unit.matrix else ():
            if not _begun(piece, engine.state.get(unit.p, {})):
                continue
            has_name = "param_names" in unit.group
            name = unit.name if has_name else names.get(unit.p) or _placed(unit.group_index, i, model)
            key = (unit.group_index, *engine.shape(unit.group, piece))
            alike.setdefault(key, []).append(replace(piece, name=name + piece.suffix))
    for (index, m, n, rank, dtype, device), members in alike.items():
        group = engine.groups[index]
        arithmetic = compute_dtype(dtype, state_dtype(group, members[0].p))
        each = engine.method.workspace(m, n, rank) * arithmetic.itemsize
        for run in runs(members, each, workspace(device)):
            yield _batch(engine, group, rank, arithmetic, run, keys, gradients)


def _placed(index: int, i: int, model: nn.Module | None) -> str:
    """Return a name for a weight that has none."""
    if model is not None:
        raise ValueError(f"Invalid model: parameter {i} of group {index} is not in it; pass the one that is trained.")
    return f"group{index}.{i}"


def _begun(piece: Piece, state: dict[str, Any]) -> list[int]:
    """List the matrices of a piece that have had their first usable gradient."""
    return [b for b, step in enumerate(clock(piece, state)) if step >= 0]


def _batch(
    engine: Engine,
    group: dict[str, Any],
    rank: int,
    arithmetic: torch.dtype,
    members: list[Piece],
    keys: Collection[str] | None,
    with_gradients: bool,
) -> Batch:
    names, shapes, steps, has_gradient = [], [], [], []
    gradients: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {}
    shape = members[0].shape
    kept = engine.method.state_shapes(shape.m, shape.n, rank, group)
    state_keys = [key for key in kept if keys is None or key in keys]
    for piece in members:
        p, shape, entry = piece.p, piece.shape, engine.state[piece.p]
        begun, steps_of_all, stacked = _begun(piece, entry), clock(piece, entry), p.ndim == 3
        rows = slice(None) if len(begun) == shape.count else begun  # an index would be copied to the device
        for b in begun:
            names.append(f"{piece.name}[{b}]" if stacked else piece.name)
            shapes.append(shape)
            steps.append(steps_of_all[b])
            has_gradient.append(p.grad is not None)
        for key in state_keys:
            value = entry[key + piece.suffix]
            dtype = value.dtype if key == "M_Q" else arithmetic  # as the step has them
            parts.setdefault(key, []).append((value[rows] if stacked else value[None]).detach().to(dtype))
        if not with_gradients:
            continue
        if p.grad is None:
            gradients.append(torch.zeros(len(begun), shape.m, shape.n, dtype=arithmetic, device=p.device))
        else:
            G = shape.oriented(p.grad.detach()).to(arithmetic)
            squares = torch.linalg.vector_norm(G, dim=(-2, -1)).square()
            gradients.append(G[rows].masked_fill(~in_float32(squares).all(), torch.nan))  # one stops its stack
    gradient = torch.cat(gradients) if with_gradients and any(has_gradient) else None
    if gradient is not None and group["maximize"]:
        gradient = -gradient
    state = {key: torch.cat(values) for key, values in parts.items()}
    return Batch(names, shapes, rank, steps, has_gradient, gradient, state, group, engine.method)
