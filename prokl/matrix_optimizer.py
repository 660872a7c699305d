"""Do what torch.optim asks of an optimizer: groups, hooks, closures, state dicts. An :class:`Engine` does the steps.

A group with ``algorithm="adamw"`` is handed to PyTorch's own AdamW, which keeps its state in the same ``state``.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from numbers import Real
from typing import Any, ClassVar, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from prokl.algorithm.method import Method
from prokl.algorithm.settings import ALGORITHM, Advanced, check, check_adamw, check_known, clone_if_tensor, plain
from prokl.distributed.division import Division
from prokl.distributed.ownership import check_placed
from prokl.distributed.state import check_undivided
from prokl.distributed.team import check_dst, check_group
from prokl.engine import adamw, checkpoint
from prokl.engine.engine import Engine, Sharded
from prokl.engine.validation import check_keys, check_names, check_no_module, like_conv1d
from prokl.engine.weights import DEFAULTS, is_dtensor, named, plain_group

PATIENCE = 10
"""Steps without a gradient of any weight, after which a warning says that nothing trains."""


class MatrixOptimizer(Optimizer):
    """Base of :class:`prokl.ProKLShampoo` and :class:`prokl.KLShampoo`."""

    method: ClassVar[Method]
    _advanced: ClassVar[Advanced]
    _process_group: Any = None
    _division: Division | None = None
    _steps_in_vain: int | None = 0  # without a gradient of any weight; None once there was one, or it was told
    _consolidated: dict[Any, Any] | None = None  # the state of the next state_dict()
    _adding = False  # True while the constructor adds one group after the other

    def __init__(
        self, params: Any, settings: dict[str, Any], advanced: Mapping[str, Any], process_group: Any = None
    ) -> None:
        settings = {**settings, **self._advanced}
        check_known(type(self).__name__, advanced, [*settings, "process_group"])
        check_no_module(params)
        if process_group is not None:
            check_group(process_group)
        defaults = plain_group({**settings, **advanced}, settings)
        self.method.check(defaults)
        self._process_group, self._adding = process_group, True
        super().__init__(params, {**defaults, "lr": clone_if_tensor(defaults["lr"]), "algorithm": "matrix", **DEFAULTS})
        self._adding = False
        check_names(self.param_groups)
        own = [group["lr"] for group in self.param_groups if group["algorithm"] == "matrix"]
        default = getattr(inspect.signature(type(self)).parameters.get("lr"), "default", settings["lr"])
        # Also a number that equals the default, as somebody writes it: configuration systems pass the very default.
        if settings["lr"] is not default and own and all(lr != defaults["lr"] for lr in own):
            warnings.warn(
                f"lr={defaults['lr']!r} of the constructor reaches no group, as all have their own: lr={own[0]!r}. Set "
                "it there, as by prokl.param_groups(model, lr=..., adamw_lr=...), or leave it out.",
                stacklevel=3,
            )

    @property
    def engine(self) -> Engine:
        """The engine that steps what this process steps; a divided optimizer's is over stand-ins."""
        return self._outer if self._division is None else self._division.engine

    @property
    def _outer(self) -> Engine:
        """The engine, bound to the current groups and state, which a user may have replaced."""
        engine: Engine | None = self.__dict__.get("_engine")
        if engine is None:  # also where this is being unpickled
            engine = self._engine = Engine(self.method, self.defaults, type(self).__name__)
        engine.groups, engine.state, engine.defaults = self.param_groups, self.state, self.defaults
        return engine

    def _divided(self) -> Division | None:
        """Return what divides the work, made as soon as there is cause: all ranks must ask."""
        shards = any(is_dtensor(p) for group in self.param_groups for p in group["params"])
        if self._division is None and (self._process_group is not None or shards):
            self._division = Division(self._outer, self._process_group)
        return self._division

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :class:`torch.optim.Optimizer`. A group that is refused leaves no trace.

        Raises:
            TypeError: no group, or a module in it in the place of parameters.
            ValueError: a hyper-parameter out of bounds, a key that is nearly a hyper-parameter's, a name that another
                weight has, or a parameter that the group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group).__name__}.")
        check_no_module(param_group.get("params"))
        group = plain_group(param_group, self.defaults.keys() | adamw.ARGUMENTS)
        of_adamw = self._outer.adamw.defaults(self.defaults["maximize"])
        known = [self.defaults, of_adamw.keys() | {"lr", "algorithm", "params"}]
        check_keys(group, *(known[::-1] if group.get("algorithm") == "adamw" else known))
        check("algorithm", group.setdefault("algorithm", "matrix"), ALGORITHM)
        if "lr" in group or group["algorithm"] == "matrix":
            group["lr"] = clone_if_tensor(group.get("lr", self.defaults["lr"]))
        if group["algorithm"] == "adamw":
            group = {**of_adamw, **group}
            check_adamw(group)
        index = len(self.param_groups)
        try:
            super().add_param_group(group)
            self._outer.check_new(index)
            for p, name in named(self.param_groups[index], index):
                if is_dtensor(p):
                    check_placed(name, p)
            if not self._adding:
                check_names(self.param_groups)
            if message := like_conv1d(self.param_groups[index:], index):
                warnings.warn(message, stacklevel=2)
        except BaseException:
            del self.param_groups[index:]
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @_disable_dynamo  # as torch.optim does itself; torch.compiler.disable imports Dynamo, which takes a second
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one step over all groups.

        The first finite, non-zero gradient of a weight only initialises its state: the weight does not move.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            ValueError: a hyper-parameter was set out of bounds, or one that a weight's state depends on was changed.
            RuntimeError: a sparse gradient, a CUDA graph is being captured, ranks gave other weights, or the last step
                of several ranks broke off. Nothing has moved then.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "optimizer.step() was called while a CUDA graph is captured: its replays would not count steps, and so "
                "never refresh. Capture forward and backward alone; the step replays graphs of its own."
            )
        self._consolidated = None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # State or weights that are made in inference mode cannot be written outside of it.
        stays = torch.is_inference_mode_enabled() and any(
            p.is_inference() for group in self.param_groups for p in group["params"]
        )
        with torch.inference_mode(stays), torch.no_grad():
            division, messages = self._division, None
            if division is None and self._process_group is None:
                try:
                    messages = self._outer.step()
                except Sharded:  # it has come into a group since, as Accelerate puts it there
                    pass
            if messages is None:
                division = self._divided()
                assert division is not None
                messages = division.step(self._outer)
        if self._steps_in_vain is not None:
            trains = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
            found = any(p.grad is not None for p in trains)
            self._steps_in_vain = None if found else self._steps_in_vain + bool(trains)
            if self._steps_in_vain == PATIENCE:
                self._steps_in_vain = None
                message = (
                    f"None of the {len(trains)} weights of this optimizer had a gradient in its first {PATIENCE} "
                    "steps, so nothing trains. It may have been made before fully_shard, from a copy of the model, or "
                    "before a call that replaces parameters: make it of the parameters that backward() runs through."
                )
                messages = [*messages, message]
        for message in messages:  # last: one that a filter turns into an error leaves no half step behind
            warnings.warn(message, stacklevel=6)  # past torch's wrappers of step: the caller's line
        return loss

    @torch.inference_mode(False)
    @torch.no_grad()
    def offload(self, device: torch.device | str = "cpu") -> None:
        """Move the state to another device between steps: nothing here holds its former memory after that.

        The next step moves it back and goes on with the same bits; graphs are captured anew. Everything a step needs
        besides, the memory of graphs included, is freed, too; ``torch.cuda.empty_cache()`` gives it to other processes.

        Args:
            device: where the state waits; "cpu" is ordinary memory, not pinned.

        Raises:
            ValueError: it is "meta", which holds no values. Nothing has moved then.
            AssertionError, RuntimeError, TypeError: torch's, for no device, or one that this machine lacks. Likewise.
        """
        home = torch.empty(0, device=device).device  # torch raises where this machine does not have it
        if home.type == "meta":
            raise ValueError("Invalid device='meta': it holds no values, and the state would be lost; use 'cpu'.")
        (self._division or self._outer).offload(home)

    def skipped(self) -> dict[str, int]:
        """Count the gradients per matrix weight that were skipped: not finite, or their squares not. Reads the device.

        A stack counts one gradient once, a split weight in each of its pieces. Empty without state. AdamW's
        weights are here where there is a count: on a CPU, or with ``fused=True``, and of this optimizer's own steps.
        """
        return self.engine.counts("skipped")

    def clipped(self) -> dict[str, int]:
        """Count the steps per matrix weight that ``clip_threshold`` bounded, of all its matrices. Reads the device.

        Empty without state.
        """
        return self.engine.counts("clipped")

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict: of a divided optimizer this rank's part of it. Never waits for another rank.

        Counts of steps are tensors in it, which every kind of checkpoint can reshape. Its tensors are views of stacks,
        in which weights of a shape lie together: ``torch.save`` of the whole writes each stack once, and of one
        weight's entry alone the whole stack too, unless its tensors are cloned first.

        State of which each rank has a part is in DTensors that say so: torch.distributed.checkpoint saves, gathers
        (``full_state_dict=True``) and loads them on any number of ranks. What ``torch.save`` makes of it is one rank's
        part, which that rank alone can load; :meth:`gather_state_dict` makes a whole one.

        Raises:
            KeyError: there is state of a weight that is in no group.
            RuntimeError: the last step of a divided optimizer broke off.
        """
        held = {p for i, group in enumerate(self.param_groups) for p, _ in named(group, i)}  # raises where no name fits
        for p in self.state:
            if isinstance(p, Tensor) and p not in held:
                raise KeyError(  # as torch's, which says a number alone
                    f"The state has an entry of a weight of shape {tuple(p.shape)}, which is in no group: put the "
                    "weight back where it was removed or replaced, or remove the entry, optimizer.state.pop(p)."
                )
        if self._division is not None:
            self._division.check_unbroken("state_dict()")
        first = self.register_state_dict_post_hook(self._exported, prepend=True)
        try:
            return super().state_dict()
        finally:
            first.remove()

    def _exported(self, _: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        """Return what ``state_dict`` gives: not the live dicts, but their tensors."""
        settings = self.defaults.keys() | adamw.ARGUMENTS
        groups = [plain_group(group, settings) for group in packed["param_groups"]]
        for group in groups:
            for key, value in group.items():
                if isinstance(value, torch.dtype) and key in settings:
                    group[key] = str(value).removeprefix("torch.")  # which every kind of checkpoint takes
                elif isinstance(value, Real):  # also NumPy's that a scheduler left beside the settings
                    group[key] = plain(value)
        # By weights' numbers on every rank, as all gather in this order; last what hooks keep under names.
        order = sorted(packed["state"], key=lambda i: i if isinstance(i, int) else math.inf)
        state = checkpoint.with_step_tensors({i: packed["state"][i] for i in order})
        if self._division is not None:
            whole, self._consolidated = self._consolidated, None
            state = self._division.exported(self._outer, state) if whole is None else whole
        return {**packed, "state": state, "param_groups": groups}

    def gather_state_dict(self, dst: int = 0) -> dict[str, Any]:
        """Collect the whole state dict on the CPU of rank ``dst``; needs all ranks, and returns {} on the others.

        It has plain tensors alone, and loads on any number of ranks, or on one.

        Args:
            dst: its number among all ranks. An undivided optimizer waits for nobody, and gives what ``dst`` itself has:
                where each rank trains weights of its own, as a pipeline's stage, pass this rank.

        Raises:
            RuntimeError: the last step of a divided optimizer broke off.
            ValueError: ``dst`` has no part in this optimizer's work, and so would get nothing.
        """
        self._consolidated = None
        packed, alone = self.state_dict(), not (dist.is_available() and dist.is_initialized())
        if not alone:
            check_dst(self._division.teams.values() if self._division is not None else (), dst)
        here = alone or dist.get_rank() == dst
        gathered: dict[Any, Any] = {}
        for i, entry in packed["state"].items():
            if not isinstance(i, int):  # what hooks keep beside the weights
                gathered[i] = entry
                continue
            full = {}
            for key, value in entry.items():
                whole = value.full_tensor() if is_dtensor(value) else value
                if here:
                    full[key] = whole.to("cpu", copy=whole is value) if isinstance(whole, Tensor) else whole
            gathered[i] = full
        groups = [{key: clone_if_tensor(value) for key, value in group.items()} for group in packed["param_groups"]]
        return {**packed, "state": gathered, "param_groups": groups} if here else {}

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Let the next :meth:`state_dict` on rank ``to``, before a step or load, be the whole one; needs all ranks.

        Trainers that know ``torch.distributed.optim.ZeroRedundancyOptimizer``, as Lightning, call it before they save.

        Raises:
            RuntimeError, ValueError: as :meth:`gather_state_dict`.
        """
        if self._division is not None:
            self._consolidated = self.gather_state_dict(to).get("state")

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, whole or this rank's part; of a divided optimizer all ranks must call it.

        Unlike torch's default, the state's dtype survives whatever the weight's dtype is.

        Raises:
            TypeError: it is no dict, but a path or an optimizer.
            ValueError: it is no state dict of an optimizer, the groups do not match, or the state does not fit a
                weight, on this rank or another. Nothing has changed then, on any of them.
        """
        self._consolidated = None
        division, before = self._divided(), self.param_groups
        if division is not None:
            division.update(self._outer)
        given: list[dict[str, Any]] = []

        def prepare(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            checkpoint.check_form(loaded)
            given.extend(loaded["param_groups"])
            of_adamw = self._outer.adamw.defaults(self.defaults["maximize"])
            return checkpoint.prepare(loaded, self.param_groups, self.defaults, of_adamw)

        with nullcontext() if division is None else division.loading():
            if not isinstance(state_dict, Mapping):
                checkpoint.check_form(state_dict)
            last_hook = self.register_load_state_dict_pre_hook(prepare)  # others may give another dict before
            try:
                super().load_state_dict(state_dict)
            finally:
                last_hook.remove()
        for message in checkpoint.differing(given, before, self.param_groups, self.state, self.method):
            warnings.warn(message, stacklevel=4)  # past both decorators: the caller's line

    def __getstate__(self) -> dict[str, Any]:
        if self._division is not None or self._process_group is not None:
            raise RuntimeError(
                "A divided optimizer cannot be copied or pickled: it is one rank's part, with a process group. Take "
                "its state_dict()."
            )
        return {**super().__getstate__(), "state": checkpoint.without_views(self.state)}

    @torch.inference_mode(False)
    @torch.no_grad()
    def __setstate__(self, state: dict[str, Any]) -> None:
        for key in {"state", "param_groups"} & self.__dict__.keys() - state.keys():  # as torch's: what it lacks stays
            state = {**state, key: self.__dict__[key].copy()}
        loads = "param_groups" in self.__dict__  # else it is being unpickled or copied
        division = self._divided() if loads else None
        if division is not None:
            shown: Any = defaultdict(dict, division.loaded(self._outer, state))
            super().__setstate__({**state, "state": shown})
            division.update(self._outer)
            division.show(self._outer, state["state"])
            return
        check_undivided(state)
        checkpoint.restore(state, self.method, type(self).__name__, check_values=loads)
        super().__setstate__(state)
        self._outer.loaded()
