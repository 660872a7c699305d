"""What the matrix optimizers share: groups, the AdamW groups, buckets, checkpoints. No linear algebra.

State of a parameter before and after a step is what :mod:`prokl.buckets` describes; a group with
``algorithm="adamw"`` is handed to PyTorch's own AdamW, which keeps its state in the same ``state``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from prokl import ops
from prokl.buckets import Bucket, Method
from prokl.shapes import MatrixShape
from prokl.validation import check_adamw, check_gradient, check_matrix_parameter

ADAMW_DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
"""betas as in the paper's experiments; the rest of AdamW's settings are PyTorch's defaults."""


class _Kept:
    """Carries a state value through ``Optimizer.load_state_dict``, which would cast it to the weight's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _keep_matrix_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {i: {k: _Kept(v) for k, v in s.items()} if "M" in s else s for i, s in state_dict["state"].items()}
    return {**state_dict, "state": state}


class MatrixOptimizer(Optimizer):
    """Base of :class:`prokl.ProKLShampoo` and :class:`prokl.KLShampoo`."""

    method: ClassVar[Method]
    fixed: ClassVar[tuple[str, ...]]
    """Hyper-parameters that the state of a weight was made with and that may not change under it."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._forget()
        super().__init__(params, {**defaults, "algorithm": "matrix"})

    def _forget(self) -> None:
        """Drop everything that is derived from ``state`` and ``param_groups``."""
        self._buckets: dict[tuple[Any, ...], Bucket] = {}
        self._home: dict[Tensor, tuple[Any, ...]] = {}
        self._made_with: dict[int, dict[str, Any]] = {}
        self._adamw = AdamW([{"params": []}])

    # ---------------------------------------------------------------- groups

    @classmethod
    def check_group(cls, group: dict[str, Any]) -> None:
        """Raise ValueError when a matrix group's hyper-parameters are out of bounds."""
        raise TypeError(f"{cls.__name__} does not say how its groups are checked.")

    @classmethod
    def rank_of(cls, group: dict[str, Any], shape: MatrixShape) -> int:
        """Effective rank of a weight; 0 where the method has none."""
        return 0

    def check_memory(self, group: dict[str, Any]) -> None:
        """Raise MemoryError when the state of a new group cannot fit; nothing is allocated."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :class:`torch.optim.Optimizer`. A group that is refused leaves no trace.

        Raises:
            ValueError: a hyper-parameter out of bounds, or a parameter that the group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group).__name__}.")
        group = dict(param_group)
        algorithm = group.get("algorithm", "matrix")
        if algorithm not in ("matrix", "adamw"):
            raise ValueError(f'Invalid algorithm={algorithm!r}: must be "matrix" or "adamw".')
        if algorithm == "adamw":
            group = {**self._adamw.defaults, "maximize": self.defaults["maximize"], **ADAMW_DEFAULTS, **group}
            if "lr" not in param_group:
                del group["lr"]
            check_adamw(group)
        before = len(self.param_groups)
        try:
            super().add_param_group(group)
            added = self.param_groups[-1]
            if algorithm == "adamw":
                for key in set(self.defaults) - set(self._adamw.defaults) - {"algorithm"}:
                    added.pop(key, None)
            else:
                self.check_group(added)
                for p, name in self._named(len(self.param_groups) - 1):
                    check_matrix_parameter(p, name)
                self.check_memory(added)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _named(self, index: int) -> Iterator[tuple[Tensor, str]]:
        group = self.param_groups[index]
        names = group.get("param_names") or [f"parameter {i} of group {index}" for i in range(len(group["params"]))]
        return zip(group["params"], names, strict=True)

    # ---------------------------------------------------------------- stepping

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step over all groups.

        The first finite, non-zero gradient of a weight only initialises its state: the weight does not move.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            ValueError: a hyper-parameter was set out of bounds, or one that a weight's state depends on was changed.
            RuntimeError: a sparse gradient in a matrix group. Nothing has moved then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for i, group in enumerate(self.param_groups):
            self._check(i, group)
        for i, group in enumerate(self.param_groups):
            if group["algorithm"] == "matrix":
                self._place_newcomers(i, group)
        for key, bucket in self._buckets.items():
            group = self.param_groups[key[0]]
            states = [self.state[member.p] for member in bucket.members]
            bucket.step(group, states, ops.select(group["backend"], key[-1]))
        self._adamw.param_groups = [g for g in self.param_groups if g["algorithm"] == "adamw"]
        self._adamw.state = self.state
        if self._adamw.param_groups:
            self._adamw.step()
        return loss

    def _check(self, index: int, group: dict[str, Any]) -> None:
        if group["algorithm"] == "adamw":
            check_adamw(group)
            return
        self.check_group(group)
        for p, name in self._named(index):
            check_gradient(p, name)
        for key, value in self._made_with.get(index, {}).items():
            if group[key] != value:
                raise ValueError(
                    f"Invalid {key}={group[key]!r}: the state of group {index} was made with {key}={value!r} and "
                    "depends on it. Set it back, or start a new optimizer."
                )

    def _place_newcomers(self, index: int, group: dict[str, Any]) -> None:
        """Give every parameter that has its first gradient a place in a bucket of its shape."""
        touched: dict[tuple[Any, ...], list[tuple[Tensor, str]]] = {}
        for p, name in self._named(index):
            if p.grad is not None and p not in self._home:
                shape = MatrixShape.of(p)
                rank = self.rank_of(group, shape)
                touched.setdefault((index, shape.m, shape.n, rank, p.dtype, p.device), []).append((p, name))
        for key, newcomers in touched.items():
            old = [(m.p, m.name) for m in self._buckets[key].members] if key in self._buckets else []
            members = old + newcomers
            states = [self.state[p] for p, _ in members]
            self._buckets[key] = Bucket(members, states, self.method, key[3], group)
            self._home.update((p, key) for p, _ in newcomers)
        if touched:
            self._made_with.setdefault(index, {k: group[k] for k in self.fixed})

    def skipped(self) -> dict[str, int]:
        """Number of gradients per matrix weight that were not finite and were skipped. Reads from the device."""
        return {
            name: int(self.state[p]["skipped"])
            for i, group in enumerate(self.param_groups)
            if group["algorithm"] == "matrix"
            for p, name in self._named(i)
            if self.state.get(p)
        }

    # ---------------------------------------------------------------- checkpoints

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; unlike torch's default, the state's dtype survives whatever the weight's dtype is.

        Raises:
            ValueError: the groups do not match, or the state does not fit a weight. Nothing has changed then.
        """
        last_hook = self.register_load_state_dict_pre_hook(_keep_matrix_state)
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        made_with = {}
        for i, group in enumerate(state["param_groups"]):
            if group.get("algorithm") != "matrix":
                continue
            for j, p in enumerate(group["params"]):
                own = state["state"].get(p)
                if not own:
                    continue
                own = {k: v.value if isinstance(v, _Kept) else v for k, v in own.items()}
                names = group.get("param_names")
                self._check_state(p, names[j] if names else f"parameter {j} of group {i}", group, own)
                state["state"][p] = {k: v.to(p.device) if isinstance(v, Tensor) else v for k, v in own.items()}
                made_with[i] = {k: group[k] for k in self.fixed}
        super().__setstate__(state)
        self._forget()
        self._made_with = made_with

    def _check_state(self, p: Tensor, name: str, group: dict[str, Any], own: dict[str, Any]) -> None:
        shape = MatrixShape.of(p)
        leading = (shape.count,) if p.ndim == 3 else ()
        wanted = {
            key: leading + tail
            for key, tail in self.method.state_shapes(shape.m, shape.n, self.rank_of(group, shape), group).items()
        }
        found = {k: tuple(v.shape) for k, v in own.items() if isinstance(v, Tensor) and k != "skipped"}
        if found != wanted or "step" not in own:
            raise ValueError(
                f"The loaded state of {name} (weight {tuple(p.shape)}) has {found}, but {type(self).__name__} needs "
                f"{wanted}. Load a state dict of the same optimizer, model and rank."
            )
