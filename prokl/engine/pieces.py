"""How a group says that its weights are read: stored (in, out) or (out, in), whole or in pieces.

A group's ``transposed`` and ``split`` are one value for all of its weights, or a list with one a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prokl.algorithm.method import Group
from prokl.algorithm.shapes import MatrixShape, Split

DEFAULTS = {"transposed": False, "split": None}
"""Of a matrix group."""
FLATTENED = (
    "If a trainer has flattened matrices into one vector, as DeepSpeed's ZeRO and FSDP1 do, use fully_shard (FSDP2), "
    "or DDP with process_group=."
)


class Reading(NamedTuple):
    """How one weight is read."""

    transposed: bool
    split: Split


@dataclass(frozen=True)
class Piece:
    """A parameter, or one piece of it: what has a state of its own."""

    p: Tensor
    name: str
    shape: MatrixShape
    suffix: str = ""
    """Of its state's keys; empty unless the parameter is split."""
    first: int = 0
    """Number of its first matrix, where the parameter is part of a stack."""


def may_move(p: Tensor) -> bool:
    """Return True for a weight that a step may move: frozen ones, too, that have a gradient."""
    return p.requires_grad or p.grad is not None


def named(group: Group, index: int) -> list[tuple[Tensor, str]]:
    """Return the weights of group ``index``, each with its name, or its place where it has none.

    Raises:
        ValueError: one of the two lists was edited, and not the other.
    """
    weights, names = group["params"], group.get("param_names")
    if names is None:
        return [(p, f"parameter {i} of group {index}") for i, p in enumerate(weights)]
    if len(names) != len(weights):
        some = ", ".join(map(repr, names[:3])) + ", ..." * (len(names) > 3)
        raise ValueError(
            f"Group {index} has {len(weights)} weights and {len(names)} param_names ({some}): names go by place. Add "
            "or remove a weight and its name in both lists at the same place, or delete 'param_names' from all groups. "
            + FLATTENED
        )
    return list(zip(weights, names, strict=True))


def readings(group: Group) -> list[Reading]:
    """Return how each weight of a group is read, unchecked but for the lengths of lists.

    Raises:
        ValueError: a list is not as long as the group, or the group's weights have no names.
    """
    count, columns = len(group["params"]), []
    for key, default in DEFAULTS.items():
        value: Any = group.get(key, default)
        if isinstance(value, list) and "param_names" not in group:
            raise ValueError(
                f"Invalid {key}={value!r}: a list goes by place, and trainers reorder weights without names. Name the "
                "group's weights, as prokl.param_groups does, or use one group per value."
            )
        if isinstance(value, list) and len(value) != count:
            raise ValueError(
                f"Invalid {key}={value!r}: a list has one entry for each of the group's {count} weights. Write one "
                f"value for all{', sizes of pieces as a tuple' if key == 'split' else ''}, or {count} entries."
            )
        columns.append(value if isinstance(value, list) else [value] * count)
    return list(map(Reading, *columns))


def check_reading(p: Tensor, name: str, how: Reading) -> None:
    """Raise ValueError when a weight cannot be read so."""
    if not isinstance(how.transposed, bool):
        raise ValueError(f"Invalid transposed={how.transposed!r} of {name}: must be True, stored (in, out), or False.")
    split = how.split
    if split is None:
        return
    if p.ndim > 3:
        raise ValueError(f"Invalid split={split!r} of {name}: a convolution {tuple(p.shape)} is not split; use None.")
    unsplit = MatrixShape.of(p, how.transposed)
    rows = unsplit.rows
    if isinstance(split, tuple):
        fits = all(type(size) is int and size > 0 for size in split) and sum(split) == rows
    else:
        fits = type(split) is int and split > 0 and rows % split == 0
    if not fits:
        raise ValueError(
            f"Invalid split={split!r} of {name}: must be sizes, a tuple of int, that add up to its output dimension "
            f"{rows} (weight {tuple(p.shape)}, transposed={how.transposed}), or a number of pieces that divides it."
        )
    if any(shape.n == 1 for shape in unsplit.pieces(split)):
        raise ValueError(f"Invalid split={split!r} of {name}: a piece would be 1x1, without a subspace; use fewer.")


def pieces(p: Tensor, name: str, how: Reading, first: int = 0) -> list[Piece]:
    """Return the pieces of a parameter that :func:`check_reading` has passed, in order."""
    shapes = MatrixShape.of(p, how.transposed).pieces(how.split)
    if how.split is None:
        return [Piece(p, name, shapes[0], first=first)]
    return [Piece(p, f"{name}.{i}", shape, f".{i}", first) for i, shape in enumerate(shapes)]


class Unit(NamedTuple):
    """One weight, as an engine steps it."""

    p: Tensor
    name: str
    how: Reading
    group: Group
    group_index: int

    @property
    def matrix(self) -> bool:
        """True if the matrix method steps it, and not AdamW."""
        return bool(self.group["algorithm"] == "matrix")

    def pieces(self, first: int = 0) -> list[Piece]:
        """Return its :func:`pieces`, from the matrix ``first`` of its stack on."""
        return pieces(self.p, self.name, self.how, first)


def units(groups: Sequence[Group], index: int = 0) -> Iterator[Unit]:
    """Yield the weights of groups, of which the first is number ``index``.

    Raises:
        ValueError: see :func:`named`, :func:`readings`.
    """
    for i, group in enumerate(groups, index):
        for (p, name), how in zip(named(group, i), readings(group), strict=True):
            yield Unit(p, name, how, group, i)


def clock(piece: Piece, state: dict[str, Any]) -> list[int]:
    """Return the ``step`` of every matrix of a piece; -1 before its initialising gradient."""
    steps = state.get("step" + piece.suffix, -1)
    if isinstance(steps, int):
        return [steps] * piece.shape.count
    return torch.as_tensor(steps, device="cpu").reshape(-1).tolist()


def stored_clock(p: Tensor, steps: list[int]) -> int | Tensor:
    """Return what ``state`` holds of these clocks: an int, or for a stack an int64 tensor (count,) on the CPU.

    Never on the weight's device, where a step would have to wait for it; a list could not be flattened by
    torch.distributed.checkpoint.
    """
    return torch.tensor(steps, device="cpu") if p.ndim == 3 else steps[0]


def _share(left: int, fit: int) -> int:
    """Return the size of the first of as few equal parts of ``left`` matrices as have at most ``fit``."""
    return -(-left // -(-left // fit))


def runs(pieces: Sequence[Piece], each: int, most: int) -> list[list[Piece]]:
    """Return ``pieces`` in as few runs as may be, about equally large; one piece is never split.

    Args:
        pieces: of one shape.
        each: bytes of temporary memory that the step of one matrix needs.
        most: bytes that a run's step may take.
    """
    left, fit = sum(piece.shape.count for piece in pieces), max(1, most // each)
    result: list[list[Piece]] = [[]]
    count, share = 0, _share(left, fit)
    for piece in pieces:
        if result[-1] and count + piece.shape.count > share:
            result.append([])
            count, share = 0, _share(left, fit)
        result[-1].append(piece)
        count += piece.shape.count
        left -= piece.shape.count
    return result
