"""The weights of a live optimizer whose state has begun, stacked by shape as the batched step takes them.

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from prokl.algorithm.method import Method
from prokl.algorithm.shapes import MatrixShape, compute_dtype
from prokl.backends.device import workspace
from prokl.backends.io import Member, in_float32
from prokl.engine.engine import Engine
from prokl.engine.weights import Weight, clock, may_move, plain_group, runs, state_dtype, weights_of
from prokl.matrix_optimizer import MatrixOptimizer


@dataclass(frozen=True)
class Batch:
    """Matrices of one group, oriented shape, rank, dtype and device: copies, in the arithmetic dtype."""

    names: list[str]
    shapes: list[MatrixShape]
    """Shapes as PyTorch holds the matrices: a weight and the transpose of another share a batch."""
    has_gradient: list[bool]
    """Matrices that have a gradient."""
    gradient: Tensor | None
    """(B,m,n), zero for the others; None when there is none at all."""
    weight_rms: Tensor | None
    """(B,), root mean square of the weights as they are; None with ``gradient``."""
    state: dict[str, Tensor]
    """As in :mod:`prokl.algorithm.reference`, each key with a leading B."""
    group: dict[str, Any]
    method: Method


def unwrapped(optimizer: Any) -> MatrixOptimizer:
    """Return the optimizer itself, out of a trainer's wrappers.

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


def lent(optimizer: MatrixOptimizer) -> AbstractContextManager[Engine]:
    """Give the engine that steps what this process steps, with the gradients that lie here."""
    return nullcontext(optimizer.engine) if (own := optimizer._division) is None else own.lent(optimizer._outer)


def named(groups: list[dict[str, Any]], model: nn.Module | None) -> Iterator[tuple[Weight, str | None]]:
    """Yield every weight with its name: the optimizer's, the model's, or its place; None where the model lacks it."""
    names: dict[Tensor, str] = {} if model is None else {p: name for name, p in model.named_parameters()}
    place: dict[int, int] = {}
    for weight in weights_of(groups):
        i = place[weight.group_index] = place.get(weight.group_index, -1) + 1
        own = weight.name if "param_names" in weight.group else None
        yield weight, own or names.get(weight.p) or (f"group{weight.group_index}.{i}" if model is None else None)


def batches(engine: Engine, model: nn.Module | None) -> Iterator[Batch]:
    """Yield the matrices that have begun, stacked; no batch is larger than what is stepped together.

    Raises:
        ValueError: a weight without a name is not in ``model``.
    """
    alike: dict[tuple[Any, ...], list[Member]] = {}
    for weight, name in named(engine.groups, model):
        for member in engine.members(weight) if weight.matrix else ():
            if max(clock(member, engine.state.get(weight.p, {}))) < 0:
                continue
            if name is None:
                raise ValueError(f"Invalid model: {weight.name} is not in it; pass the one that is trained.")
            key = (weight.group_index, *engine.shape(weight.group, member))
            alike.setdefault(key, []).append(replace(member, name=name + member.suffix))
    for (index, m, n, rank, dtype, device), members in alike.items():
        group = plain_group(engine.groups[index], engine.defaults)  # it may have been edited since the last step
        arithmetic = compute_dtype(dtype, state_dtype(group, members[0].p))
        keys = engine.method.state_shapes(m, n, rank, group).keys()
        each = engine.method.workspace(m, n, rank) * arithmetic.itemsize
        for run in runs(members, each, workspace(device)):
            yield _batch(engine, group, arithmetic, run, keys)


def _batch(
    engine: Engine, group: dict[str, Any], arithmetic: torch.dtype, members: list[Member], keys: Iterable[str]
) -> Batch:
    names, shapes, has_gradient = [], [], []
    gradients: list[Tensor] = []
    sizes: list[Tensor] = []
    parts: dict[str, list[Tensor]] = {key: [] for key in keys}
    for member in members:
        p, shape, entry = member.p, member.shape, engine.state[member.p]
        begun = [b for b, step in enumerate(clock(member, entry)) if step >= 0]
        rows = slice(None) if len(begun) == shape.count else begun  # an index would be copied to the device
        names += [matrix_name(member, member.name, b) for b in begun]
        shapes += [shape] * len(begun)
        has_gradient += [p.grad is not None] * len(begun)
        for key in keys:
            value = entry[key + member.suffix]
            dtype = value.dtype if key == "M_Q" else arithmetic  # as the step has them
            parts[key].append((value[rows] if p.ndim == 3 else value[None]).detach().to(dtype))
        if p.grad is None:
            gradients.append(torch.zeros(len(begun), shape.m, shape.n, dtype=arithmetic, device=p.device))
            sizes.append(torch.zeros(len(begun), dtype=arithmetic, device=p.device))
        else:
            W = shape.oriented(p.detach())[rows].to(arithmetic)
            sizes.append(torch.linalg.vector_norm(W, dim=(-2, -1)) / (shape.m * shape.n) ** 0.5)
            G = shape.oriented(p.grad.detach()).to(arithmetic)
            squares = torch.linalg.vector_norm(G, dim=(-2, -1)).square()
            gradients.append(G[rows].masked_fill(~in_float32(squares).all(), torch.nan))  # one stops its stack
    gradient = weight_rms = None
    if any(has_gradient):
        gradient, weight_rms = torch.cat(gradients), torch.cat(sizes)
        gradient = -gradient if group["maximize"] else gradient
    state = {key: torch.cat(values) for key, values in parts.items()}
    return Batch(names, shapes, has_gradient, gradient, weight_rms, state, group, engine.method)


def matrix_name(member: Member, name: str, b: int) -> str:
    """Return the name, and for a matrix of a stack its place in the whole one: ``b`` counts from what this rank has."""
    return f"{name}[{member.first + b}]" if member.p.ndim == 3 else name


def counts(engine: Engine, model: nn.Module | None) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return two counts: steps of every matrix by its name, and gradients that were not finite by weight or piece.

    A matrix that may move has steps below 0 before its first usable gradient.
    """
    steps: dict[str, int] = {}
    skipped: dict[str, Tensor] = {}
    for weight, name in named(engine.groups, model):
        name, state = name or weight.name, engine.state.get(weight.p, {})
        if weight.p in engine.adamw.skipped:
            skipped[name] = torch.as_tensor(engine.adamw.skipped[weight.p])
        for member in engine.members(weight) if weight.matrix else ():
            if "skipped" + member.suffix in state:
                skipped[name + member.suffix] = state["skipped" + member.suffix]
            for b, step in enumerate(clock(member, state)):
                if step >= 0 or may_move(weight.p):
                    steps[matrix_name(member, name + member.suffix, b)] = step
    return steps, skipped
