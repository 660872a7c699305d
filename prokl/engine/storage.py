"""Shapes and dtypes of what is kept of a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.algorithm.shapes import compute_dtype
from prokl.backends.rounding import MASTER, mode_of
from prokl.engine.pieces import Piece, stored_clock

StateLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of state tensors, by key."""

SCALARS = ("lambda_0", "clipped")
"""State that is kept in the arithmetic dtype whatever ``state_dtype`` is: half precision cannot count."""

BASES = ("Q_L", "Q_R")
"""State that is kept in float32 at least: what is stored beside it is in these bases, and turns with their rounding."""


def state_dtype(group: Group, p: Tensor) -> torch.dtype:
    """Return the storage dtype: the group's, else float32 for half-precision parameters, else the parameter's."""
    if group["state_dtype"] is not None:
        dtype: torch.dtype = group["state_dtype"]
        return dtype
    return p.dtype if p.dtype in (torch.float32, torch.float64) else torch.float32


def layout_of_state(piece: Piece, method: Method[Any], rank: int, group: Group) -> StateLayout:
    """Return shape and dtype of every state tensor of one matrix of a piece."""
    stored, arithmetic = state_dtype(group, piece.p), compute_dtype(piece.p.dtype, state_dtype(group, piece.p))
    shapes = method.state_shapes(piece.shape.m, piece.shape.n, rank, group)
    dtypes = dict.fromkeys(SCALARS, arithmetic) | dict.fromkeys(BASES, torch.promote_types(stored, torch.float32))
    return {key: (shape, dtypes.get(key, stored)) for key, shape in shapes.items()}


def blank_state(piece: Piece, method: Method[Any], rank: int, group: Group) -> dict[str, Any]:
    """Return the state of a piece that has had no gradient: what a bucket would hold of it, and has not to yet."""
    leading, device = (piece.shape.count,) if piece.p.ndim == 3 else (), piece.p.device
    state: dict[str, Any] = {"step": stored_clock(piece.p, [-1] * piece.shape.count)}
    state["skipped"] = torch.zeros((), dtype=torch.int64, device=device)
    for key, (shape, dtype) in layout_of_state(piece, method, rank, group).items():
        state[key] = torch.zeros((*leading, *shape), dtype=dtype, device=device)
    if mode_of(group, piece.p.dtype) == MASTER:  # zeros: where a master is not its weight's rounding the weight counts
        shape = (*leading, piece.shape.m, piece.shape.n)
        state[MASTER] = torch.zeros(shape, dtype=torch.float32, device=device)
    return {key + piece.suffix: value for key, value in state.items()}
