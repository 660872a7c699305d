"""The common part of the matrix optimizers: groups, AdamW groups, the three phases of a step. No linear algebra.

A group with ``algorithm="adamw"`` is handed to PyTorch's own AdamW, which keeps its state in the same ``state``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import AdamW, Optimizer

from prokl.algorithm.method import Group, Method
from prokl.algorithm.settings import ALGORITHMS, check_adamw, check_choice
from prokl.algorithm.shapes import MatrixShape, compute_dtype
from prokl.backends.rounding import MASTER, mode_of
from prokl.backends.select import select
from prokl.engine import checkpoint
from prokl.engine.bucket import Bucket, split, state_dtype
from prokl.engine.graphs import Graphs
from prokl.engine.validation import check_gradient, check_matrix_parameter, check_memory, check_writable

ADAMW_DEFAULTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}
"""betas as in the paper's experiments; the rest of AdamW's settings are PyTorch's defaults."""

BucketKey = tuple[int, int, int, int, torch.dtype, torch.device]
"""(group, m, n, rank, dtype, device)."""


class MatrixOptimizer(Optimizer):
    """Base of :class:`prokl.ProKLShampoo` and :class:`prokl.KLShampoo`."""

    method: ClassVar[Method[Any]]
    _graphs_enabled = False

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.method.check(defaults)
        self._forget()
        super().__init__(params, {**defaults, "algorithm": "matrix"})

    def _forget(self) -> None:
        """Drop everything that is derived from ``state`` and ``param_groups``."""
        self._buckets: dict[BucketKey, list[Bucket]] = {}
        self._keys: dict[Tensor, BucketKey] = {}
        self._idle: dict[Tensor, int] = {}
        self._made_with: dict[int, dict[str, Any]] = {}
        self._layout: list[tuple[int, ...]] = []
        self._adamw = AdamW([{"params": []}])
        self._graphs = Graphs() if self._graphs_enabled else None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :class:`torch.optim.Optimizer`. A group that is refused leaves no trace.

        Raises:
            ValueError: a hyper-parameter out of bounds, or a parameter that the group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group).__name__}.")
        group = dict(param_group)
        algorithm = group.setdefault("algorithm", "matrix")
        check_choice("algorithm", group["algorithm"], ALGORITHMS)
        if algorithm == "adamw":
            group = {**self._adamw_defaults(), **group}
            check_adamw(group)
        before = len(self.param_groups)
        try:
            super().add_param_group(group)
            if algorithm == "adamw":
                self._check_new_adamw_group(self.param_groups[-1])
            else:
                self._check_new_matrix_group(self.param_groups[-1])
        except BaseException:
            del self.param_groups[before:]
            raise

    def _check_new_adamw_group(self, group: Group) -> None:
        for key in set(self.defaults) - set(self._adamw.defaults) - {"algorithm"}:
            group.pop(key, None)
        # PyTorch's own checks: which of its options go together, and with these weights.
        options = inspect.signature(AdamW).parameters.keys() & group.keys() - {"params"}
        AdamW(group["params"], **{key: group[key] for key in options})

    def _check_new_matrix_group(self, group: Group) -> None:
        self.method.check(group)
        named = list(self._named(len(self.param_groups) - 1))
        for p, name in named:
            check_matrix_parameter(p, name)
            select(group["backend"], p.device)
        if self.method.oversize_remedy is not None:
            check_memory(type(self).__name__, self._sizes_of_new_state(), self.method.oversize_remedy)
        for p, name in named:
            check_writable(p, name)

    def _sizes_of_new_state(self) -> Iterator[tuple[Tensor, str, int]]:
        """Yield every matrix parameter that has no state yet, its name, and the bytes that its state will take."""
        for index, group in enumerate(self.param_groups):
            for p, name in self._named(index) if group["algorithm"] == "matrix" else ():
                if "M" not in self.state.get(p, {}):
                    shape = MatrixShape.of(p)
                    m, n = shape.m, shape.n
                    shapes = self.method.state_shapes(m, n, self.method.rank(group, m, n), group).values()
                    elements = shape.count * sum(torch.Size(s).numel() for s in shapes)
                    masters = 4 * p.numel() if mode_of(group, p.dtype) == MASTER else 0
                    yield p, name, elements * state_dtype(group, p).itemsize + masters

    def _adamw_defaults(self) -> dict[str, Any]:
        """Return everything an AdamW group holds but its lr."""
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
    @_disable_dynamo  # as torch.optim does itself; torch.compiler.disable imports Dynamo, which takes a second
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Do one step over all groups.

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
        self._validate()
        work = [(bucket, plan) for bucket in self._all_buckets() if (plan := bucket.decide()) is not None]
        messages: list[str] = []
        for bucket, plan in work:
            moved = bucket.execute(plan) if self._graphs is None else self._graphs.execute(bucket, plan)
            messages += bucket.commit(plan, moved, self._states(bucket))
        self._step_adamw()
        for message in messages:  # last: one that a filter turns into an error leaves no half step behind
            warnings.warn(message, stacklevel=6)  # past torch's wrappers of step: the caller's line
        return loss

    def _validate(self) -> None:
        """Check everything that may have changed since the last step, and give newcomers a place in a bucket."""
        layout = [(id(group), *map(id, group["params"])) for group in self.param_groups]
        whole = all(bucket.holds(self._states(bucket)) for bucket in self._all_buckets())
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
                self._assign_to_buckets(i, group)

    def _step_adamw(self) -> None:
        self._adamw.param_groups = [g for g in self.param_groups if g["algorithm"] == "adamw"]
        self._adamw.state = self.state
        if self._adamw.param_groups:
            inspect.unwrap(AdamW.step)(self._adamw)  # unwrapped: the step hooks have fired for this step already

    def _check(self, index: int, group: Group) -> None:
        check_choice("algorithm", group["algorithm"], ALGORITHMS)
        for p, name in self._named(index):
            if group["algorithm"] == "matrix" and p not in self._keys:  # it may have come by other ways than a group
                check_matrix_parameter(p, name)
                check_writable(p, name)
            check_gradient(p, name)
            state = self.state.get(p)
            if state and ("exp_avg" if group["algorithm"] == "matrix" else "M") in state:
                raise ValueError(
                    f"Invalid algorithm={group['algorithm']!r}: {name} has the state of another algorithm. Set it "
                    "back, or start a new optimizer."
                )
        if group["algorithm"] == "adamw":
            check_adamw(group)
            return
        self.method.check(group)
        for key, value in self._made_with.get(id(group), {}).items():
            if group[key] != value:
                raise ValueError(
                    f"Invalid {key}={group[key]!r}: the state of group {index} was made with {key}={value!r} and "
                    "depends on it. Set it back, or start a new optimizer."
                )

    def _assign_to_buckets(self, index: int, group: Group) -> None:
        """Give every parameter that has its first gradient a place in a bucket of its shape."""
        newcomers: dict[Tensor, BucketKey] = {}
        for p in group["params"]:
            if p not in self._keys and (p.grad is not None or self.state.get(p)):
                shape = MatrixShape.of(p)
                m, n = shape.m, shape.n
                newcomers[p] = (index, m, n, self.method.rank(group, m, n), p.dtype, p.device)
        for key in dict.fromkeys(newcomers.values()):
            # In the group's order whoever came first: where a weight stands in a batch may decide its rounding.
            members = [(p, name) for p, name in self._named(index) if newcomers.get(p, self._keys.get(p)) == key]
            _, m, n, rank, dtype, _ = key
            itemsize = compute_dtype(dtype, state_dtype(group, members[0][0])).itemsize
            self._buckets[key] = [
                Bucket(run, [self.state[p] for p, _ in run], self.method, rank, group, self._idle)
                for run in split(members, self.method.workspace(m, n, rank), itemsize)
            ]
            self._keys.update((p, key) for p, _ in members)
        if newcomers:
            self._graphs = Graphs() if self._graphs_enabled else None  # the old ones hold buckets that are no more
            self._remember(group)

    def _remember(self, group: Group) -> None:
        """Remember the settings that this group's state is made with."""
        self._made_with.setdefault(id(group), {key: group[key] for key in self.method.fixed})

    def enable_graphs(self) -> None:
        """Replay the matrix groups' work from CUDA graphs from now on.

        A graph is recorded when its kind of step comes up for the second time. There is one for ordinary and one for
        refresh steps of every shape, per combination of hyper-parameters other than lr and weight decay: these, and
        the gradients' addresses, may change freely. Weights of one shape run as without graphs in a step in which one
        of them begins, has no gradient, or is a convolution in another than PyTorch's default memory format. The AdamW
        groups are not captured. Loading a state dict, or editing groups by hand, starts the recording anew; a copy of
        the optimizer starts without graphs.

        Raises:
            ValueError: a matrix weight is not on a CUDA device, or its group's backend is not Triton's.
        """
        for i, group in enumerate(self.param_groups):
            for p, name in self._named(i) if group["algorithm"] == "matrix" else ():
                if not select(group["backend"], p.device).graphs:
                    raise ValueError(
                        f"{name} is on {p.device} with backend={group['backend']!r}; graphs need a CUDA device and "
                        'backend="triton" or None: move the weights, or leave graphs off.'
                    )
        self._graphs_enabled = True
        self._graphs = Graphs()

    def _all_buckets(self) -> Iterator[Bucket]:
        for buckets in self._buckets.values():
            yield from buckets

    def _states(self, bucket: Bucket) -> list[dict[str, Any]]:
        return [self.state.get(member.p, {}) for member in bucket.members]

    def skipped(self) -> dict[str, int]:
        """Count the gradients per matrix weight that were not finite and were skipped. Reads from the device."""
        return self._counts("skipped")

    def clipped(self) -> dict[str, int]:
        """Count the steps per matrix weight that ``clip_threshold`` bounded, of all its matrices. Reads the device."""
        return self._counts("clipped")

    def _counts(self, key: str) -> dict[str, int]:
        return {
            name: int(self.state[p][key].sum())
            for i, group in enumerate(self.param_groups)
            if group["algorithm"] == "matrix"
            for p, name in self._named(i)
            if key in self.state.get(p, {})
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "state": checkpoint.without_views(self.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; unlike torch's default, the state's dtype survives whatever the weight's dtype is.

        Raises:
            ValueError: the groups do not match, or the state does not fit a weight. Nothing has changed then.
        """
        last_hook = self.register_load_state_dict_pre_hook(self._prepare)
        try:
            super().load_state_dict(state_dict)
        finally:
            last_hook.remove()

    def _prepare(self, _: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        return checkpoint.prepare(loaded, self.param_groups, self.defaults, self._adamw_defaults())

    def __setstate__(self, state: dict[str, Any]) -> None:
        made = checkpoint.restore(state, self.method, type(self).__name__)
        super().__setstate__(state)
        self._forget()
        for i in made:
            self._remember(state["param_groups"][i])
