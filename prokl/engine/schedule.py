"""The clocks of one bucket's matrices, and what the host decides from them about one step; plain Python.

``step`` of a matrix is -1 until its initialising gradient, 0 then, and one more at every later call with a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """The host's decisions about one step of a bucket; equal plans do the same work on the device."""

    has_grad: tuple[bool, ...]
    """By member."""
    initialising: tuple[int, ...]
    """Matrices whose state this gradient initialises, if it is finite and not zero."""
    stepping: tuple[int, ...]
    """Matrices that have begun and have a gradient; those whose gradient is not finite will not move."""
    refreshing: tuple[int, ...]
    """Stepping matrices whose step is divisible by tau."""

    def __hash__(self) -> int:  # a graph's key: quicker than of everything
        return hash((self.initialising, len(self.stepping), len(self.refreshing)))

    @property
    def steady(self) -> bool:
        """True if every matrix steps and none begins: what a graph can capture."""
        return all(self.has_grad) and not self.initialising


class Schedule:
    """Counts the steps of a bucket's matrices.

    Args:
        members: the rows of every member.
        steps: the clock of every matrix.
    """

    def __init__(self, members: Sequence[range], steps: Sequence[int]) -> None:
        self.members, self.steps = list(members), list(steps)
        self._every = tuple(range(len(self.steps)))

    def decide(self, has_grad: Sequence[bool], frequency: int) -> Plan | None:
        """Return what the next step does; None when there is no gradient."""
        if not any(has_grad):
            return None
        steps, first = self.steps, self.steps[0]
        if all(has_grad) and first >= 0 and steps.count(first) == len(steps):  # as usual, and quicker
            return Plan(tuple(has_grad), (), self._every, self._every if (first + 1) % frequency == 0 else ())
        rows = [b for rows_of_member, has in zip(self.members, has_grad, strict=True) if has for b in rows_of_member]
        stepping = tuple(b for b in rows if steps[b] >= 0)
        return Plan(
            tuple(has_grad),
            tuple(b for b in rows if steps[b] < 0),
            stepping,
            tuple(b for b in stepping if (steps[b] + 1) % frequency == 0),
        )

    def begin(self, rows: Iterable[int]) -> None:
        """Start the clocks of matrices whose state has been initialised."""
        for b in rows:
            self.steps[b] = 0

    def reset(self, rows: Iterable[int]) -> None:
        """Let matrices begin anew with their next gradient."""
        for b in rows:
            self.steps[b] = -1

    def advance(self, plan: Plan) -> None:
        """Move the clocks of the matrices that had a gradient, skipped ones too."""
        for b in plan.stepping:
            self.steps[b] += 1
