"""The weights of groups, and the shapes and dtypes of the state that each has.

A group's ``transposed`` and ``split`` are one value for all of its weights, or a list with one a weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from prokl.algorithm.method import Method
from prokl.algorithm.settings import Group, plain
from prokl.algorithm.shapes import MatrixShape, Split, compute_dtype
from prokl.backends.device import MOST_MATRICES
from prokl.backends.io import Member
from prokl.backends.rounding import MASTER, mode_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DEFAULTS = {"transposed": False, "split": None}
"""Default settings of a matrix group that say how its weights are stored."""
FLATTENED = (
    "If a trainer has flattened matrices into one vector, as DeepSpeed's ZeRO and FSDP1 do, use fully_shard (FSDP2), "
    "or DDP with process_group=."
)


def plain_group(group: Group, settings: Collection[str]) -> Group:
    """Return a group with its settings as :func:`plain` has them, and lists of one value a weight as lists."""
    found = {key: plain(value) if key in settings else value for key, value in group.items()}
    if "adjust_lr_fn" in settings and found.get("adjust_lr_fn", "") is None:  # as torch's Muon has it by default
        found["adjust_lr_fn"] = "original"
    for key in DEFAULTS:
        if isinstance(found.get(key), tuple) and not isinstance(group[key], tuple):
            found[key] = list(found[key])
    return found


def is_dtensor(t: Any) -> TypeGuard[DTensor]:
    """Return True for a DTensor, or its class, without importing it, which takes a second."""
    return hasattr(t, "device_mesh")


def may_move(p: Tensor) -> bool:
    """Return True for a weight that a step may move: frozen ones, too, that have a gradient."""
    return p.requires_grad or p.grad is not None


def named(group: Group, index: int) -> list[tuple[Tensor, str]]:
    """Return the weights of group ``index``, each with its name, or its place where it has none.

    Raises:
        ValueError: ``params`` and ``param_names`` have different lengths.
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


@dataclass(eq=False)
class Weight:
    """One weight of a group, as an engine steps it.

    Attributes:
        p: the parameter. name: its name, or its place. group, group_index: where it is.
        transposed: whether the parameter holds (in, out). split: the pieces of its output dimension.
        made_with: how its state was made: the settings that may not change under it, by name, and its shape. None
            without state.
        idle: by suffix, calls with a gradient in which a piece did not move; -1 once it has, or was warned about.
    """

    p: Tensor
    name: str
    group: Group
    group_index: int
    transposed: bool
    split: Split
    made_with: dict[str, Any] | None = None
    idle: dict[str, int] = field(default_factory=dict)

    @property
    def matrix(self) -> bool:
        """True if the matrix method steps it, and not AdamW."""
        return bool(self.group["algorithm"] == "matrix")

    def members(self, first: int = 0) -> list[Member]:
        """Return what has a state of its own: the weight that :func:`check_reading` passed, or each of its pieces."""
        members = []
        for i, shape in enumerate(MatrixShape.of(self.p, self.transposed).pieces(self.split)):
            suffix = "" if self.split is None else f".{i}"
            members.append(Member(self.p, self.name + suffix, shape, suffix=suffix, first=first))
        return members

    def making(self, fixed: Sequence[str]) -> dict[str, Any]:
        """Return what its state would be made with now; ``fixed`` are settings of the method."""
        settings = {key: self.group[key] for key in fixed}
        return {**settings, "shape": tuple(self.p.shape), "transposed": self.transposed, "split": self.split}

    def check_as_made(self, fixed: Sequence[str]) -> None:
        """Raise ValueError where something is not as its state was made with."""
        for key, value in self.making(fixed).items():
            if self.made_with is not None and value != self.made_with[key]:
                raise ValueError(
                    f"Invalid {key}={value!r}: the state of {self.name} was made with {key}={self.made_with[key]!r}. "
                    "Set it back, or remove the state, optimizer.state.pop(p), to begin anew."
                )


def weights_of(groups: Sequence[Group], index: int = 0) -> Iterator[Weight]:
    """Yield the weights of groups, of which the first is number ``index``; how they are read is unchecked.

    Raises:
        ValueError: see :func:`named`; or a list of readings is not as long as its group, or goes by place where the
            weights have no names.
    """
    for i, group in enumerate(groups, index):
        pairs, columns = named(group, i), []
        for key, default in DEFAULTS.items():
            value: Any = group.get(key, default)
            if isinstance(value, list) and "param_names" not in group:
                raise ValueError(
                    f"Invalid {key}={value!r}: a list goes by place, and trainers reorder weights without names. Name "
                    "the group's weights, as prokl.param_groups does, or use one group per value."
                )
            if isinstance(value, list) and len(value) != len(pairs):
                raise ValueError(
                    f"Invalid {key}={value!r}: a list has one entry for each of the group's {len(pairs)} weights. "
                    f"Write one value for all{', sizes of pieces as a tuple' if key == 'split' else ''}, or "
                    f"{len(pairs)} entries."
                )
            columns.append(value if isinstance(value, list) else [value] * len(pairs))
        for (p, name), transposed, split in zip(pairs, *columns, strict=True):
            yield Weight(p, name, group, i, transposed, split)


def check_reading(weight: Weight) -> None:
    """Raise ValueError when a weight cannot be read as its group says."""
    p, name, split = weight.p, weight.name, weight.split
    if not isinstance(weight.transposed, bool):
        raise ValueError(
            f"Invalid transposed={weight.transposed!r} of {name}: must be True, stored (in, out), or False."
        )
    if split is None:
        return
    if p.ndim > 3:
        raise ValueError(f"Invalid split={split!r} of {name}: a convolution {tuple(p.shape)} is not split; use None.")
    unsplit = MatrixShape.of(p, weight.transposed)
    rows = unsplit.rows
    if isinstance(split, tuple):
        fits = all(type(size) is int and size > 0 for size in split) and sum(split) == rows
    else:
        fits = type(split) is int and split > 0 and rows % split == 0
    if not fits:
        raise ValueError(
            f"Invalid split={split!r} of {name}: must be sizes, a tuple of int, that add up to its output dimension "
            f"{rows} (weight {tuple(p.shape)}, transposed={weight.transposed}), or a number of pieces that divides it."
        )
    if any(shape.n == 1 for shape in unsplit.pieces(split)):
        raise ValueError(f"Invalid split={split!r} of {name}: a piece would be 1x1, without a subspace; use fewer.")


def clock(member: Member, state: Mapping[str, Any]) -> list[int]:
    """Return the ``step`` of every matrix of a member; below 0 before its initialising gradient."""
    steps = state.get("step" + member.suffix, -1)
    if isinstance(steps, int):
        return [steps] * member.shape.count
    return torch.as_tensor(steps, device="cpu").reshape(-1).tolist()


def stored_clock(p: Tensor, steps: list[int]) -> int | Tensor:
    """Return what ``state`` holds of these clocks: an int, or for a stack an int64 tensor (count,) on the CPU.

    Never on the weight's device, where a step would have to wait for it; a list could not be flattened by
    torch.distributed.checkpoint.
    """
    return torch.tensor(steps, device="cpu") if p.ndim == 3 else steps[0]


StateLayout = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of state tensors, by key."""

BASES = ("Q_L", "Q_R")
"""State that is kept in float32 at least: what is stored beside it is in these bases, and turns with their rounding."""


def state_dtype(group: Group, p: Tensor) -> torch.dtype:
    """Return the storage dtype: the group's, else float32 for half-precision parameters, else the parameter's."""
    if group["state_dtype"] is not None:
        return group["state_dtype"]
    return p.dtype if p.dtype in (torch.float32, torch.float64) else torch.float32


def layout_of_matrix(member: Member, method: Method, group: Group) -> StateLayout:
    """Return shape and dtype of every state tensor of one matrix of a member."""
    stored, arithmetic = state_dtype(group, member.p), compute_dtype(member.p.dtype, state_dtype(group, member.p))
    m, n = member.shape.m, member.shape.n
    shapes = method.state_shapes(m, n, method.rank(group, m, n), group)
    bases = dict.fromkeys(BASES, torch.promote_types(stored, torch.float32))
    # An EMA of few numbers is kept in the arithmetic dtype: half precision holds no change of less than 2^-9 of it.
    vectors = dict.fromkeys((key for key, shape in shapes.items() if len(shape) < 2), arithmetic)
    return {key: (shape, (bases | vectors).get(key, stored)) for key, shape in shapes.items()}


def layout_of_state(member: Member, method: Method, group: Group) -> StateLayout:
    """Return shape and dtype of every state tensor of a member, by its key there; "step" aside."""
    layout = layout_of_matrix(member, method, group)
    if mode_of(group, member.p.dtype) == MASTER:
        layout[MASTER] = (layout["M_Q"][0], torch.float32)
    leading = (member.shape.count,) if member.p.ndim == 3 else ()
    layout = {key: (leading + shape, dtype) for key, (shape, dtype) in layout.items()}
    return {key + member.suffix: value for key, value in {**layout, "skipped": ((), torch.int64)}.items()}


def blank_state(member: Member, method: Method, group: Group) -> dict[str, Any]:
    """Return the state of a member that has had no gradient: what a bucket would hold of it, and has not to yet.

    A master of zeros starts as its weight: where it is not its weight's rounding the weight counts.
    """
    blank: dict[str, Any] = {"step" + member.suffix: stored_clock(member.p, [-1] * member.shape.count)}
    for key, (shape, dtype) in layout_of_state(member, method, group).items():
        blank[key] = torch.zeros(shape, dtype=dtype, device=member.p.device)
    return blank


def runs(members: Sequence[Member], each: int, most: int) -> list[list[Member]]:
    """Return ``members`` in as few runs as may be, about equally large; one member is never split.

    No run of several has more than MOST_MATRICES.

    Args:
        members: of one shape.
        each: bytes of temporary memory that the step of one matrix needs.
        most: bytes that a run's step may take.
    """
    left, fit = sum(member.shape.count for member in members), max(1, min(most // each, MOST_MATRICES))
    result: list[list[Member]] = []
    count, share = 0, 0
    for member in members:
        if not result or count + member.shape.count > share:
            result.append([])
            count, share = 0, -(-left // -(-left // fit))  # the first of as few equal parts as have at most ``fit``
        result[-1].append(member)
        count += member.shape.count
        left -= member.shape.count
    return result
