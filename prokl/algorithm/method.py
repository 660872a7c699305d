"""The interface of an algorithm to the rest of prokl: what tells one matrix method from another, and its step."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra, Direction, Factor
from prokl.algorithm.settings import Group, Hyper
from prokl.algorithm.shapes import State


class Method(Protocol):
    """One matrix method: its settings, its state and its specification.

    Dimension key: B matrices, m short side, n long side. All tensors are oriented, so m <= n. ``h`` is what the
    method's own ``hyper`` returns.
    """

    fixed: tuple[str, ...]
    """Hyper-parameters that the state of a weight is made with and that may not change under it."""

    def check(self, group: Group) -> None:
        """Raise ValueError when a hyper-parameter of a group is out of bounds."""

    def hyper(self, group: Group, m: int, n: int, dtype: torch.dtype, device: torch.device) -> Hyper:
        """Read the hyper-parameters of a step of (m,n) weights from a group; ``dtype`` is the arithmetic's."""

    def rank(self, group: Group, m: int, n: int) -> int:
        """Return the effective rank of an (m,n) weight; 0 for a method without one."""

    def state_shapes(self, m: int, n: int, rank: int, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shape of every state tensor of one matrix, by its key."""

    def workspace(self, m: int, n: int, rank: int) -> int:
        """Return the elements of temporary memory that a step needs for one matrix at most, in any state dtype.

        A start needs no more of them, but in float64.
        """

    def initialise(self, G: Tensor, rank: int, group: Group) -> State:
        """Make the state (B,...) from the initialising gradients G (B,m,n), finite and not zero."""

    def step(
        self, ops: Algebra, G: Factor, state: State, h: Any, aspect_scale: Tensor, active: Tensor | None
    ) -> tuple[Direction, State, Tensor | None]:
        """Do one step after the initialising one, all but the refresh, for B matrices.

        Args:
            ops: the operations of a backend.
            G: gradients (B,m,n), as products take them.
            state: stacked state in the arithmetic dtype, M_Q in its own. M_Q is the step's: it may be overwritten, save
                the rows that are not active.
            aspect_scale: c_a (B,), of the weights' original shapes.
            active: (B,) bool, the matrices that step; None: all. Results for the others may be anything.

        Returns:
            The direction (B,m,n) as factors; what the step changes of the state; (B,) bool, False where of that only
            :data:`prokl.algorithm.evidence.ALWAYS_MOVE` counts, or None for True.
        """

    def refreshes(self, step: int, group: Group) -> bool:
        """Return True if a refresh of the eigenbases follows a step, counted from 1 after the initialising one."""

    def refresh(self, ops: Algebra, state: State) -> State:
        """Return what a refresh of the eigenbases changes, of B matrices."""

    def whitened_size(self, ops: Algebra, G: Tensor, state: State, h: Any) -> Tensor:
        """Return the size (B,) of G that :mod:`prokl.algorithm.evidence` decides by, in the widest dtype."""

    def reference_step(
        self, W: Tensor, G: Tensor, state: State, h: Any, *, aspect_scale: float, stored: torch.dtype
    ) -> tuple[Tensor, State]:
        """Do one step of the specification for one matrix; see :func:`prokl.algorithm.reference.step`."""
