"""What the matrix optimizers share: groups, the AdamW groups, buckets, checkpoints. No linear algebra.

State of a parameter before and after a step is what :mod:`prokl.buckets` describes; a group with
``algorithm="adamw"`` is handed to PyTorch's own AdamW, which keeps its state in the same ``state``.
"""

from __future__ import annotations

import inspect
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from prokl.buckets import Bucket, Method, split, state_dtype
from prokl.graphs import Graphs
from prokl.ops import select
from prokl.qr import may_branch
from prokl.shapes import MatrixShape, compute_dtype
from prokl.validation import check_adamw, check_algorithm, check_gradient, check_matrix_parameter, check_writable

ADAMW_DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
"""betas as in the paper's experiments; the rest of AdamW's settings are PyTorch's defaults."""


class _Kept:
    """Carries a state value through ``Optimizer.load_state_dict``, which would cast it to the weight's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


class MatrixOptimizer(Optimizer):
    """Base of :class:`prokl.ProKLShampoo` and :class:`prokl.KLShampoo`."""

    method: ClassVar[Method]
    _graphed = False
    fixed: ClassVar[tuple[str, ...]]
    """Hyper-parameters that the state of a weight was made with and that may not change under it."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._forget()
        super().__init__(params, {**defaults, "algorithm": "matrix"})

    def _forget(self) -> None:
        """Drop everything that is derived from ``state`` and ``param_groups``."""
        self._buckets: dict[tuple[Any, ...], list[Bucket]] = {}
        self._home: dict[Tensor, tuple[Any, ...]] = {}
        self._idle: dict[Tensor, int] = {}
        self._made_with: dict[int, dict[str, Any]] = {}
        self._layout: list[tuple[int, ...]] = []
        self._adamw = AdamW([{"params": []}])
        self._graphs = Graphs() if self._graphed else None

    @classmethod
    def check_group(cls, group: dict[str, Any]) -> None:
        """Raise ValueError when a matrix group's hyper-parameters are out of bounds."""
        raise TypeError(f"{cls.__name__} does not say how its groups are checked.")

    @classmethod
    def rank_of(cls, group: dict[str, Any], shape: MatrixShape) -> int:
        """Effective rank of a weight; 0 where the method has none."""
        return 0

    def check_memory(self) -> None:
        """Raise MemoryError when the state of a new group cannot fit; nothing is allocated."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :class:`torch.optim.Optimizer`. A group that is refused leaves no trace.

        Raises:
            ValueError: a hyper-parameter out of bounds, or a parameter that the group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group).__name__}.")
        group = dict(param_group)
        algorithm = group.setdefault("algorithm", "matrix")
        check_algorithm(group)
        if algorithm == "adamw":
            group = {**self._adamw_defaults(), **group}
            check_adamw(group)
        before = len(self.param_groups)
        try:
            super().add_param_group(group)
            added = self.param_groups[-1]
            if algorithm == "adamw":
                for key in set(self.defaults) - set(self._adamw.defaults) - {"algorithm"}:
                    added.pop(key, None)
                # PyTorch's own checks: which of its options go together, and with these weights.
                options = inspect.signature(AdamW).parameters.keys() & added.keys() - {"params"}
                AdamW(added["params"], **{key: added[key] for key in options})
            else:
                self.check_group(added)
                for p, name in self._named(len(self.param_groups) - 1):
                    check_matrix_parameter(p, name)
                    select(added["backend"], p.device)
                self.check_memory()
                for p, name in self._named(len(self.param_groups) - 1):
                    check_writable(p, name)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _adamw_defaults(self) -> dict[str, Any]:
        """Everything an AdamW group holds but its lr."""
        defaults = {**self._adamw.defaults, "maximize": self.defaults["maximize"], **ADAMW_DEFAULTS}
        del defaults["lr"]
        return defaults

    def _named(self, index: int) -> Iterator[tuple[Tensor, str]]:
        group = self.param_groups[index]
        names = group.get("param_names", [])
        for i, p in enumerate(group["params"]):
            yield p, names[i] if i < len(names) else f"parameter {i} of group {index}"

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
            RuntimeError: a sparse gradient in a matrix group, or a CUDA graph is being captured. Nothing has moved
                then.
        """
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
            raise RuntimeError(
                "optimizer.step() was called while a CUDA graph is captured: its replays would not count steps, and so "
                "never refresh. Capture forward and backward alone and call optimizer.enable_graphs() for the step."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        layout = [(id(group), *map(id, group["params"])) for group in self.param_groups]
        whole = all(bucket.holds(self._states(bucket)) for bucket in self._every_bucket())
        if not whole or layout[: len(self._layout)] != self._layout:
            # Groups, weights or state were edited by hand (adding a group only appends): start from what they are now.
            made_with, idle = self._made_with, self._idle
            self._forget()
            self._made_with, self._idle = made_with, idle
        self._layout = layout
        for i, group in enumerate(self.param_groups):
            self._check(i, group)
        for i, group in enumerate(self.param_groups):
            if group["algorithm"] == "matrix":
                self._place_newcomers(i, group)
        work = []
        for bucket in self._every_bucket():
            plan = bucket.plan()
            if plan is not None:
                ops = select(bucket.group["backend"], bucket.made_for[1])
                bucket.link(ops)
                work.append((bucket, plan, ops))
        moved = None if self._graphs is None or not work else self._graphs.run(work)
        messages: list[str] = []
        for i, (bucket, plan, ops) in enumerate(work):
            moving = bucket.run(plan, ops) if moved is None else moved[i]
            messages += bucket.settle(plan, moving, self._states(bucket))
        self._adamw.param_groups = [g for g in self.param_groups if g["algorithm"] == "adamw"]
        self._adamw.state = self.state
        if self._adamw.param_groups:
            inspect.unwrap(AdamW.step)(self._adamw)  # unwrapped: the step hooks have fired for this step already
        for message in messages:  # last: one that a filter turns into an error leaves no half step behind
            warnings.warn(message, stacklevel=4)  # past torch's two wrappers of step: the caller's line
        return loss

    def _check(self, index: int, group: dict[str, Any]) -> None:
        check_algorithm(group)
        for p, name in self._named(index):
            check_gradient(p, name)
            state = self.state.get(p)
            if state and ("M" in state) != (group["algorithm"] == "matrix"):
                raise ValueError(
                    f"Invalid algorithm={group['algorithm']!r}: {name} has the state of another algorithm. Set it "
                    "back, or start a new optimizer."
                )
        if group["algorithm"] == "adamw":
            check_adamw(group)
            return
        self.check_group(group)
        for key, value in self._made_with.get(id(group), {}).items():
            if group[key] != value:
                raise ValueError(
                    f"Invalid {key}={group[key]!r}: the state of group {index} was made with {key}={value!r} and "
                    "depends on it. Set it back, or start a new optimizer."
                )

    def _place_newcomers(self, index: int, group: dict[str, Any]) -> None:
        """Give every parameter that has its first gradient a place in a bucket of its shape."""
        touched: dict[tuple[Any, ...], None] = {}  # a set, but in order
        for p in group["params"]:
            if p not in self._home and (p.grad is not None or self.state.get(p)):
                shape = MatrixShape.of(p)
                key = (index, shape.m, shape.n, self.rank_of(group, shape), p.dtype, p.device)
                self._home[p] = key
                touched[key] = None
        for key in touched:
            # In the group's order whoever came first: where a weight stands in a batch may decide its rounding.
            members = [(p, name) for p, name in self._named(index) if self._home.get(p) == key]
            _, m, n, rank, dtype, _ = key
            itemsize = compute_dtype(dtype, state_dtype(group, members[0][0])).itemsize
            self._buckets[key] = [
                Bucket(run, [self.state[p] for p, _ in run], self.method, rank, group, self._idle)
                for run in split(members, self.method.workspace(m, n, rank), itemsize)
            ]
        if touched:
            self._graphs = Graphs() if self._graphed else None  # the old ones hold buckets that are no more
            self._made_with.setdefault(id(group), {k: group[k] for k in self.fixed})

    def enable_graphs(self) -> None:
        """From now on replay the matrix groups' work from CUDA graphs.

        A graph is recorded when its kind of step comes up for the second time. There is one for ordinary and one for
        refresh steps, per combination of hyper-parameters other than lr and weight decay: these, and the gradients'
        addresses, may change freely. Weights of one shape run as without graphs in a step in which one of them begins,
        is in its first 20 steps with an "auto" start, has no gradient, or is a convolution in another than PyTorch's
        default memory format. The AdamW groups are not captured. Loading a state dict, or editing groups by hand,
        starts the recording anew; a copy of the optimizer starts without graphs.

        Raises:
            ValueError: a matrix weight is not on a CUDA device, or its group's backend is not Triton's.
        """
        for i, group in enumerate(self.param_groups):
            for p, name in self._named(i) if group["algorithm"] == "matrix" else ():
                ops = select(group["backend"], p.device)
                if ops is None or not ops.linked or may_branch(p):
                    raise ValueError(
                        f"{name} is on {p.device} with backend={group['backend']!r}; graphs need a CUDA device and "
                        'backend="triton" or None: move the weights, or leave graphs off.'
                    )
        self._graphed = True
        self._graphs = Graphs()

    def _every_bucket(self) -> Iterator[Bucket]:
        for buckets in self._buckets.values():
            yield from buckets

    def _states(self, bucket: Bucket) -> list[dict[str, Any]]:
        return [self.state[member.p] for member in bucket.members]

    def skipped(self) -> dict[str, int]:
        """Number of gradients per matrix weight that were not finite and were skipped. Reads from the device."""
        return {
            name: int(self.state[p]["skipped"])
            for i, group in enumerate(self.param_groups)
            if group["algorithm"] == "matrix"
            for p, name in self._named(i)
            if self.state.get(p)
        }

    def __getstate__(self) -> dict[str, Any]:
        """As torch's, with every view of a stack as a tensor of its own: pickling a view would store the stack."""
        plain = super().__getstate__()
        state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        for p, own in self.state.items():
            state[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in own.items()}
        return {**plain, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; unlike torch's default, the state's dtype survives whatever the weight's dtype is.

        Raises:
            ValueError: the groups do not match, or the state does not fit a weight. Nothing has changed then.
        """
        last_hook = self.register_load_state_dict_pre_hook(self._prepared)
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()

    def _prepared(self, _: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state dict with the settings that older ones lack, and the matrix state kept from torch's casts."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            return state_dict  # torch says what is wrong
        groups, matrix = [], set()
        for i, (theirs, ours) in enumerate(zip(saved, self.param_groups, strict=True)):
            algorithm = theirs.get("algorithm", ours["algorithm"])
            if algorithm != ours["algorithm"]:
                raise ValueError(
                    f"Invalid algorithm={algorithm!r} of loaded group {i}: it is {ours['algorithm']!r} here. Build the "
                    "optimizer with the groups that the state dict was saved with."
                )
            if algorithm == "matrix":
                matrix.update(theirs["params"])
            defaults = self.defaults if algorithm == "matrix" else {**self._adamw_defaults(), "lr": ours["lr"]}
            groups.append({**defaults, "algorithm": algorithm, **theirs})
            if algorithm == "matrix":
                groups[-1]["backend"] = ours["backend"]  # what runs here is no property of the run that was saved
        state = {
            i: {k: _Kept(v) for k, v in own.items()} if i in matrix else own for i, own in state_dict["state"].items()
        }
        return {**state_dict, "state": state, "param_groups": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made_with = {}
        for i, group in enumerate(state["param_groups"]):
            if group["algorithm"] != "matrix":
                continue
            names = group.get("param_names")
            for j, p in enumerate(group["params"]):
                own = state["state"].get(p)
                if not own:
                    continue
                own = {k: v.value if isinstance(v, _Kept) else v for k, v in own.items()}
                self._check_state(p, names[j] if names else f"parameter {j} of group {i}", group, own)
                # A copy: what was loaded goes on without this optimizer.
                state["state"][p] = {
                    k: v.to(p.device, copy=True) if isinstance(v, Tensor) else v for k, v in own.items()
                }
                made_with[id(group)] = {k: group[k] for k in self.fixed}
        super().__setstate__(state)
        self._forget()
        self._made_with = made_with

    def _check_state(self, p: Tensor, name: str, group: dict[str, Any], own: dict[str, Any]) -> None:
        shape = MatrixShape.of(p)
        leading = (shape.count,) if p.ndim == 3 else ()
        wanted: dict[str, Any] = {"skipped": ()}
        for key, tail in self.method.state_shapes(shape.m, shape.n, self.rank_of(group, shape), group).items():
            wanted[key] = leading + tail
        found = {k: tuple(v.shape) if isinstance(v, Tensor) else type(v) for k, v in own.items() if k != "step"}
        step = own.get("step")
        clock = isinstance(step, list) and len(step) == shape.count if p.ndim == 3 else isinstance(step, int)
        if found != wanted or not clock:
            raise ValueError(
                f"The loaded state of {name} (weight {tuple(p.shape)}) has step={step!r} and {found}, but "
                f"{type(self).__name__} needs {wanted}. Load a state dict of the same optimizer, model and rank."
            )
