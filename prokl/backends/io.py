"""Reading the gradients of a bucket and writing its weights, in PyTorch; a backend of kernels overrides it.

A member of a bucket is a view: some matrices of a parameter, oriented. A step reads gradients and writes weights
through its members alone.

Dimension key: B matrices, m short side, n long side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from prokl.algorithm.algebra import Direction, Factor
from prokl.algorithm.shapes import MatrixShape, widest
from prokl.backends.rounding import Rounding
from prokl.pair import Pair


@dataclass(frozen=True)
class Member:
    """A parameter, or one piece of it, which has a state of its own.

    Attributes:
        rows: those of a bucket's stacks that it has.
        suffix: of its keys in the state; empty unless the parameter is split.
        first: number of its first matrix, where the parameter is part of a stack.
    """

    p: Tensor
    name: str
    shape: MatrixShape
    rows: range = range(0)
    suffix: str = ""
    first: int = 0

    def part(self, stack: Tensor) -> Tensor:
        """Return this member's part of a stack; without the leading dimension unless it is a stack of matrices."""
        return stack[self.rows.start : self.rows.stop] if self.p.ndim == 3 else stack[self.rows.start]

    def gradient(self, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return the gradient, oriented (c,m,n), in ``dtype`` or its own; None where there is none."""
        g = self.p.grad  # lazily negated, as imaginary parts are: kernels go by its address
        return None if g is None else self.shape.oriented(g.detach().to(dtype or g.dtype).resolve_neg())

    def weight(self) -> Tensor:
        """Return the weight, oriented (c,m,n): a view, or a copy where no two strides describe it.

        A stand-in for a frozen weight of other ranks has no memory until it may move: it gives zeros.
        """
        W = self.p.detach()
        return self.shape.oriented(W if W.untyped_storage().nbytes() else W.new_zeros(()).expand(W.shape))

    def write(self, weight: Tensor) -> None:
        """Copy an oriented weight (c,m,n) into the parameter, unless it lies there."""
        if self.is_copy(weight):
            region = self.shape.region(self.p)
            region.copy_(self.shape.restored(weight, region))

    def is_copy(self, weight: Tensor) -> bool:
        """Return True if an oriented weight does not lie in the parameter's memory."""
        return weight.data_ptr() != self.shape.region(self.p).data_ptr()


@dataclass(frozen=True)
class Layout:
    """Sizes of one bucket, B as ``count``, and the dtypes of its arithmetic and its weights."""

    count: int
    m: int
    n: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    device: torch.device


class Rates(NamedTuple):
    """lr and weight decay of members that follow each other, by their numbers."""

    lr: float | Tensor
    weight_decay: float
    members: range


class Gathered(NamedTuple):
    """The gradients of a bucket, and what a step may do with them.

    Attributes:
        G: (B,m,n), the step's own, as its products take it; zero where there is none.
        finite: (B,) bool, False for every matrix of a member that has one whose squared norm is not finite in float32.
        usable: (B,) bool, likewise False besides for a matrix that is zero, or too small to square.
    """

    G: Factor
    finite: Tensor
    usable: Tensor

    def whole(self) -> Tensor:
        """Return G as a tensor."""
        return self.G.whole() if isinstance(self.G, Pair) else self.G


class Slot(NamedTuple):
    """One tensor of the state: where a step's result is written, and under which condition.

    Attributes:
        to: (B,...), where it is kept: each matrix is contiguous.
        value: (B,...), what it is now.
        masks: (B,) bool each: the matrices that change are those where all are True.
    """

    to: Tensor
    value: Tensor
    masks: tuple[Tensor, ...] = ()


def in_float32(sq_norm: Tensor) -> Tensor:
    """Return where a squared norm is finite as float32 has it; NaN is not."""
    return sq_norm <= torch.finfo(torch.float32).max


def usable(sq_norm: Tensor, owner: Tensor | None, skipped: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``finite`` and ``usable`` of :class:`Gathered`.

    Args:
        sq_norm: (B,), NaN or infinite where a matrix is not finite.
        owner: (B,) int64, the member of each matrix; None where each member is one matrix.
        skipped: (members,) int64; goes up by one where a member's gradient is not finite.
    """
    finite = good = in_float32(sq_norm)
    if owner is not None:
        good = torch.zeros_like(skipped).index_add_(0, owner, (~finite).long()) == 0
        finite = good[owner]
    skipped += ~good
    return finite, finite & (sq_norm > 0)


def _fill(into: Tensor, values: Tensor) -> Tensor:
    """Copy matrices (c,m,n), of which ``into`` may lie transposed; return ``into``.

    One after another where they lie differently: of a matrix by itself PyTorch copies the transpose in blocks.
    Measured on a CPU, 768x3072 in float32: in a third of the time.
    """
    if into.stride() == values.stride():
        return into.copy_(values)
    for target, source in zip(into, values, strict=True):
        if target.is_contiguous():
            target.copy_(source)
        else:
            target.mT.copy_(source.mT)
    return into


def _decay(W: Tensor, D: Tensor, kept: float | Tensor, cautious: bool) -> None:
    """Multiply W (c,m,n) by ``kept``; where it is ``cautious`` only where D points the same way."""
    if cautious:
        W.copy_(torch.where(D * W >= 0, kept * W, W))
    else:
        W.mul_(kept)


class TorchIO:
    """Gathers the gradients of one bucket and writes its weights, one parameter after another.

    :meth:`locate` is the host's, before a step or a replay; :meth:`gather` and :meth:`apply` are the device's, and
    where ``capturable`` they do the same whatever lies where, so that a CUDA graph can repeat them.
    """

    def __init__(self, members: Sequence[Member], layout: Layout, rounding: Rounding) -> None:
        self.members, self.layout, self.rounding = members, layout, rounding
        owners = [i for i, member in enumerate(members) for _ in member.rows]
        self.owner = torch.tensor(owners, device=layout.device) if len(owners) > len(members) else None

    @property
    def capturable(self) -> bool:
        """True if a graph that captured :meth:`gather` and :meth:`apply` follows what :meth:`locate` finds next."""
        return False

    def locate(self, rates: Sequence[Rates]) -> None:
        """Take down where gradients and weights lie, and this step's rates; nothing waits for the device."""
        # 1 - lr weight_decay would lose most of a small decay in half precision.
        self.rates = [
            each._replace(lr=each.lr.to(widest(each.lr.device))) if isinstance(each.lr, Tensor) else each
            for each in rates
        ]

    def gather(self, negate: bool, skipped: Tensor) -> Gathered:
        """Read the gradients, and tell which are finite and which are zero.

        Args:
            negate: whether to change their sign, to ascend.
            skipped: (members,) int64; counts those that are not finite.
        """
        a = self.layout
        G = torch.empty((a.count, a.m, a.n), dtype=a.dtype, device=a.device)
        for member in self.members:
            target, g = G[member.rows.start : member.rows.stop], member.gradient()
            if g is None:
                target.zero_()
            else:
                _fill(target, g.to(a.dtype))
        if negate:
            G = G.neg_()
        sq_norm = torch.linalg.vector_norm(G, dim=(-2, -1)).square()
        return Gathered(G, *usable(sq_norm, self.owner, skipped))

    def apply(self, direction: Direction, moving: Sequence[int], active: Tensor | None) -> None:
        """Do W <- (1 - lr weight_decay) W - lr D where active; where W is narrower than D it is rounded once.

        lr and weight decay are each member's own. It is done in place where no rounding or mask comes after.

        Args:
            direction: factors of D; says whether the decay comes after the step, and whether it is cautious.
            moving: rows that move, as far as the host knows; members without any are not touched from the host.
            active: (B,) bool, or None when all move.
        """
        D = direction.dense()
        moved = set(moving)
        for lr, weight_decay, numbers in self.rates:
            for member in self.members[numbers.start : numbers.stop]:
                if moved.isdisjoint(member.rows):
                    continue
                W, rows = member.weight(), slice(member.rows.start, member.rows.stop)
                delta, moves = D[rows], None if active is None else active[rows]
                if not W.is_contiguous():  # as it lies in memory, so that all else is one pass over it
                    delta = _fill(torch.empty_like(W, dtype=D.dtype), delta)
                in_place = moves is None and W.dtype == D.dtype
                new = W if in_place else self.rounding.exact(W, rows).to(D.dtype, copy=True)
                kept = None if weight_decay == 0 else 1 - lr * weight_decay
                if kept is not None and not direction.decay_after:
                    _decay(new, delta, kept, direction.cautious_decay)
                if isinstance(lr, Tensor) or lr > torch.finfo(new.dtype).max:  # alpha takes neither
                    new.sub_(lr * delta)
                else:
                    new.sub_(delta, alpha=lr)
                if kept is not None and direction.decay_after:
                    _decay(new, delta, kept, direction.cautious_decay)
                if not in_place:
                    self.rounding.write(W, new, rows, moves)
                member.write(W)

    @staticmethod
    def store(slots: Sequence[Slot]) -> None:
        """Do to <- value where the masks are True, in the dtype of ``to``; no ``to`` is memory of another slot."""
        for to, value, masks in slots:
            if masks:
                mask = reduce(torch.logical_and, masks).reshape(-1, *[1] * (to.ndim - 1))
                torch.where(mask, value.to(to.dtype), to, out=to)  # one pass: element by element, in place
        if whole := [slot for slot in slots if not slot.masks]:  # at once: Ctrl-C parts no bases from factors
            torch._foreach_copy_([slot.to for slot in whole], [slot.value for slot in whole])

    def release(self) -> None:
        """Keep no gradient alive until the next step."""
