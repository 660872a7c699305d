"""What the checks before a step depend on: a step in which none of it has changed makes none of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor

from prokl.algorithm.method import Group
from prokl.algorithm.settings import check_learning_rate, check_nonnegative
from prokl.engine.adamw import look
from prokl.engine.pieces import may_move
from prokl.engine.validation import in_order


class Seen:
    """Groups, weights and state as they were when they were last checked.

    Objects are compared by identity, and kept so that no other gets the address of one that is gone. lr and weight
    decay, which schedulers change, are checked by themselves; gradients are looked at every time.

    Args:
        groups: as checked. state: likewise.
        keys: of a group's settings.
        waiting: the weights of matrix groups that are in no bucket.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        state: dict[Tensor, dict[str, Any]],
        keys: Iterable[str],
        waiting: Collection[Tensor],
    ) -> None:
        self.keys = ["params", *({*keys} - {"lr", "weight_decay"})]
        self.weights = [p for group in groups for p in group["params"]]
        self.matrices = [p for group in groups if group["algorithm"] == "matrix" for p in group["params"]]
        self.rates = self._rates(groups)
        self.objects, self.forms = self._objects(groups, state), self._forms(state)
        self.waiting = waiting
        self.adamw = [group for group in groups if group["algorithm"] == "adamw"]
        self.looks = [look(group, state) for group in self.adamw]

    def still(self, groups: Sequence[Group], state: dict[Tensor, dict[str, Any]]) -> bool:
        """Return True if everything is as it was but for lr and weight decay, and nothing is to be said of gradients.

        Raises:
            ValueError: lr or weight decay are out of bounds.
        """
        objects = self._objects(groups, state)
        if len(objects) != len(self.objects) or not all(map(is_, objects, self.objects)):
            return False
        if self._forms(state) != self.forms:
            return False
        rates = self._rates(groups)
        for (lr, decay), (old_lr, old_decay) in zip(rates, self.rates, strict=True):
            if lr is None or decay is None or isinstance(lr, Tensor) is not isinstance(old_lr, Tensor):
                return False
            if lr is not old_lr or isinstance(lr, Tensor):  # whose value may change
                check_learning_rate("lr", lr)
            if decay is not old_decay:
                check_nonnegative("weight_decay", decay)
        self.rates = rates
        return in_order(self.weights) and not self._begins() and self._adamw_fits(state)

    def _begins(self) -> bool:
        """Return True if a weight that was in no bucket may have to be in one, or to have a state."""
        return any(p.grad is not None for p in self.waiting)

    def _adamw_fits(self, state: dict[Tensor, dict[str, Any]]) -> bool:
        """Return True if the state of every AdamW weight with a gradient is what it was, where it was."""
        for group, (objects, forms) in zip(self.adamw, self.looks, strict=True):
            now, now_forms = look(group, state)
            if forms is None or now_forms != forms or len(now) != len(objects) or not all(map(is_, now, objects)):
                return False
        return True

    @staticmethod
    def _rates(groups: Sequence[Group]) -> list[tuple[Any, Any]]:
        return [(group.get("lr"), group.get("weight_decay")) for group in groups]

    def _objects(self, groups: Sequence[Group], state: dict[Tensor, dict[str, Any]]) -> list[Any]:
        """Return the groups, their settings, their weights, and whose state is where."""
        objects: list[Any] = [*groups]
        for group in groups:
            for value in [group.get(key, ...) for key in self.keys]:  # None is a value
                objects.append(value)
                if isinstance(value, list):
                    objects += value
        for p, entry in state.items():
            if isinstance(p, Tensor):  # hooks keep what they like under names
                objects += (p, entry)
        return objects

    def _forms(self, state: dict[Tensor, dict[str, Any]]) -> tuple[list[Any], ...]:
        """Return what the weights are, which matrices may move, and how many entries each state has."""
        weights, sizes = self.weights, [len(entry) for entry in state.values() if isinstance(entry, dict)]
        moving = list(map(may_move, self.matrices))
        return [p.dtype for p in weights], [p.device for p in weights], [p.shape for p in weights], moving, sizes
