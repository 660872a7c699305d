"""An optimizer whose step and state are divided among ranks: where it was asked to, or its weights are sharded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from prokl.algorithm.method import Group
from prokl.distributed import state as states
from prokl.distributed.blocks import check_placements
from prokl.distributed.division import Division
from prokl.distributed.team import check_group
from prokl.distributed.weights import Divided, is_dtensor
from prokl.engine import checkpoint
from prokl.engine.base import MatrixOptimizer
from prokl.engine.pieces import named, readings
from prokl.engine.validation import check_gradient, check_names


class DividedOptimizer(MatrixOptimizer):
    """Base of the public optimizers: a :class:`MatrixOptimizer` that may share its work with other ranks.

    Without ``process_group`` and DTensors nothing here takes part.
    """

    _process_group: Any = None
    _division: Division | None = None
    _shown: dict[Tensor, dict[str, Any]] = {}  # by weight, the entry of this rank's own state; never changed in place
    _told = False
    """True while a state is loaded once all ranks know whether each of them can."""

    def __init__(self, params: Any, defaults: dict[str, Any], process_group: Any) -> None:
        if process_group is not None:
            check_group(process_group)
        self._process_group = process_group
        super().__init__(params, defaults)

    def _divides(self) -> bool:
        if self._process_group is not None or self._division is not None:
            return True
        groups = self.__dict__.get("param_groups", ())  # none yet where it is being unpickled
        return any(map(is_dtensor, {type(p) for group in groups for p in group["params"] or ()}))

    def _divide(self) -> Division:
        """Return the division, which follows the groups; needs all ranks where weights are new."""
        if self._division is None:
            self._division = Division(self, self._process_group)
        self._division.update(self)
        return self._division

    @property
    def stepped(self) -> MatrixOptimizer:
        """The optimizer that has the state of what this rank steps: this one, or one of its stand-ins."""
        return self if self._division is None else self._division.local

    def _add_group(self, param_group: Group) -> None:
        super()._add_group(param_group)
        for p, name in named(self.param_groups[-1], len(self.param_groups) - 1):
            if is_dtensor(p):
                check_placements(name, p.placements)  # type: ignore[attr-defined]

    def _sizes_of_new_state(self) -> Iterator[tuple[Tensor, str, int]]:
        # Of a divided one each rank checks its own, once it knows what that is.
        return iter(()) if self._divides() else super()._sizes_of_new_state()

    def _step(self) -> list[str]:
        if not self._divides():
            return super()._step()
        for index, group in enumerate(self.param_groups):  # what all ranks refuse alike, and before any waits
            for p, name in named(group, index):
                check_gradient(p, name)
            self._check_settings(index, group)
        self._check_unbroken("step")
        division = self._divide()
        for p, own in self._shown.items():
            if self.state.get(p) is not own:
                division.replace_state(p, self.state.get(p))
        messages = division.step()
        self._show(division)
        return messages

    def _check_unbroken(self, what: str) -> None:
        if self._division is not None and self._division.broken is not None:
            raise RuntimeError(
                f"{what}: the last step of this optimizer broke off ({self._division.broken}), so some weights and "
                "state are of this step and some of the one before. Load the last checkpoint of model and optimizer."
            )

    def _show(self, division: Division, loaded: Collection[Tensor] = ()) -> None:
        """Give every weight its entry in ``state``: this rank's own, or what says where it is.

        Args:
            division: who owns what. loaded: weights of which a state was loaded, which all ranks have entries for.
        """
        self._shown = {}
        for index, group in enumerate(self.param_groups):
            for (p, name), how in zip(named(group, index), readings(group), strict=True):
                weight, own = division.weights[p], division.state_of(p)
                entered = group["algorithm"] == "matrix" and (p.requires_grad or p in loaded)
                if entered and isinstance(weight, Divided) and not own:
                    if weight.mine is not None:
                        own = division.blank_state(index, p, name, how)
                    elif p not in self.state:
                        layout = states.layout_of_weight(p, name, how, group, self.method)
                        self.state[p] = states.parts_of_state(weight, {}, layout)
                if own:
                    if self.state.get(p) is not own:  # what a wrapper keeps there stays
                        own.update({key: value for key, value in self.state.get(p, {}).items() if key not in own})
                    self.state[p] = self._shown[p] = own
            if group["algorithm"] == "matrix":
                self._remember(group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict: of a divided optimizer this rank's part of it. Never waits for another rank.

        Its tensors are views of stacks, in which weights of a shape lie together: ``torch.save`` of the whole writes
        each stack once, and of one weight's entry alone the whole stack too, unless its tensors are cloned first.

        State of which each rank has a part is in DTensors that say so: torch.distributed.checkpoint saves, gathers
        (``full_state_dict=True``) and loads them on any number of ranks. What ``torch.save`` makes of it is one rank's
        part, which that rank alone can load; :meth:`gather_state_dict` makes a whole one.

        Raises:
            RuntimeError: the last step of a divided optimizer broke off.
        """
        self._check_unbroken("state_dict()")
        return super().state_dict()

    def gather_state_dict(self, dst: int = 0) -> dict[str, Any]:
        """Collect the whole state dict on the CPU of rank ``dst``; needs all ranks, and returns {} on the others.

        It has plain tensors alone, and loads on any number of ranks, or on one.

        Raises:
            RuntimeError: the last step of a divided optimizer broke off.
        """
        packed, here = self.state_dict(), not dist.is_initialized() or dist.get_rank() == dst
        found: dict[Any, Any] = {}
        for i, own in packed["state"].items():
            if not isinstance(i, int):  # what hooks keep beside the weights
                found[i] = own
                continue
            whole = {}
            for key, value in own.items():
                value = value.full_tensor() if is_dtensor(value) else value
                if here:
                    whole[key] = value.cpu() if isinstance(value, Tensor) else value
            found[i] = whole
        return {**packed, "state": found} if here else {}

    def _exported(self, optimizer: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        packed, division = super()._exported(optimizer, packed), self._division
        if division is None:
            return packed
        found, i = dict(packed["state"]), 0
        for index, group in enumerate(self.param_groups):
            for (p, name), how in zip(named(group, index), readings(group), strict=True):
                weight = division.weights.get(p)
                if i in found and weight is not None:
                    if group["algorithm"] == "adamw":
                        found[i] = states.shards_of_state(weight, found[i])
                    elif isinstance(weight, Divided):
                        # Anew also of what others own: another dtype of a weight is another one of its state.
                        layout = states.layout_of_weight(p, name, how, group, self.method)
                        own = {key: v for key, v in found[i].items() if weight.mine is not None or not is_dtensor(v)}
                        found[i] = states.parts_of_state(weight, own, layout)
                i += 1
        return {**packed, "state": found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, whole or this rank's part; of a divided optimizer all ranks must call it.

        Raises:
            ValueError: the groups do not match, or the state does not fit a weight, on this rank or another. Nothing
                has changed then, on any of them.
        """
        if not self._divides():
            super().load_state_dict(state_dict)
            return
        division, self._told = self._divide(), False
        try:
            super().load_state_dict(state_dict)
        except Exception as error:
            if not self._told:  # the others wait for a word
                division.tell(error)
            raise

    def __getstate__(self) -> dict[str, Any]:
        if self._division is not None or self._process_group is not None:
            raise RuntimeError(
                "A divided optimizer cannot be copied or pickled: it is one rank's part, with a process group. Take "
                "its state_dict()."
            )
        return super().__getstate__()

    def _checked(self, state: dict[str, Any]) -> Any:
        if not self._divides():
            self._check_whole(state)
            return super()._checked(state)
        division = self._divide()
        check_names(state["param_groups"])
        for index, group in enumerate(state["param_groups"]):
            for p, name in named(group, index):
                for key, value in state["state"].get(p, {}).items():
                    states.check_part(division.weights[p], key, checkpoint.unwrapped(value), name)
        self._told = True
        division.agree(None)  # all go on to what takes them all
        found, failure = None, None
        try:
            theirs = self._for_stand_ins(division, state)
            found = theirs, division.local._checked(theirs)
        except Exception as error:
            failure = error
        division.agree(failure)
        return found

    @staticmethod
    def _check_whole(state: dict[str, Any]) -> None:
        """Raise ValueError for state of which ranks have parts, in an optimizer that is all there is."""
        for index, group in enumerate(state["param_groups"]):
            for p, name in named(group, index):
                for value in map(checkpoint.unwrapped, state["state"].get(p, {}).values()):
                    if is_dtensor(value):
                        raise ValueError(states.partial_message(name, value))

    def _for_stand_ins(self, division: Division, state: dict[str, Any]) -> dict[str, Any]:
        """Return what ``__setstate__`` of the stand-ins' optimizer gets of a loaded state."""
        own: dict[Tensor, dict[str, Any]] = defaultdict(dict)  # as torch's: what has not begun may have no entry
        for index, group in enumerate(state["param_groups"]):
            for (p, name), how in zip(named(group, index), readings(group), strict=True):
                weight, loaded = division.weights[p], state["state"].get(p)
                stand_in = weight.stand_in
                if not loaded:
                    continue
                if group["algorithm"] == "adamw":
                    values = {key: states.own_shard(weight, checkpoint.unwrapped(v)) for key, v in loaded.items()}
                elif isinstance(weight, Divided):
                    layout = states.layout_of_weight(p, name, how, group, self.method)
                    # All ranks look at all of it: making a DTensor whole takes them all.
                    values = self._parts(weight, loaded, layout)
                else:
                    values = {key: checkpoint.unwrapped(v) for key, v in loaded.items()}
                if stand_in is not None:
                    own[stand_in] = values
        groups = division.local_groups(state["param_groups"])
        return {"defaults": self.defaults, "state": own, "param_groups": groups}

    @staticmethod
    def _parts(weight: Divided, loaded: dict[str, Any], layout: states.Layout) -> dict[str, Any]:
        found = {}
        for key, value in loaded.items():
            value = checkpoint.unwrapped(value)
            if is_dtensor(value) and not hasattr(value, "parts"):
                value = value.full_tensor()
            if weight.mine is not None:
                found[key] = states.own_part(weight, key, value, layout.get(key, (None,))[0])
        return found

    def _adopt(self, state: dict[str, Any], made: Any) -> None:
        if not self._divides():
            super()._adopt(state, made)
            return
        theirs, own_made = made
        division = self._divide()
        division.local._adopt(theirs, own_made)
        self._shown = {}
        shown = type(self.state)(dict)
        shown.update({p: own for p, own in state["state"].items() if not isinstance(p, Tensor)})  # what hooks keep
        Optimizer.__setstate__(self, {**state, "state": shown})
        self._forget()
        division.broken = None
        division.relayout()
        division.update(self)
        self._show(division, state["state"])

    def _counts(self, key: str) -> dict[str, int]:
        return super()._counts(key) if self._division is None else self._division.local._counts(key)
