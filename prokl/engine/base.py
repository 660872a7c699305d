"""The common part of the matrix optimizers: groups, AdamW groups, the three phases of a step. No linear algebra.

A group with ``algorithm="adamw"`` is handed to PyTorch's own AdamW, which keeps its state in the same ``state``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from prokl.algorithm.method import Group, Method
from prokl.algorithm.settings import ALGORITHMS, apart, check_adamw, check_choice, plain
from prokl.algorithm.shapes import compute_dtype
from prokl.backends.device import workspace
from prokl.backends.rounding import MASTER, mode_of
from prokl.backends.select import select
from prokl.engine import adamw, checkpoint
from prokl.engine.adamw import AdamWGroups
from prokl.engine.bucket import Bucket, Record
from prokl.engine.graphs import Graphs
from prokl.engine.newcomers import divided, resolved
from prokl.engine.pieces import DEFAULTS, Piece, Reading, check_reading, clock, named, pieces, readings, runs
from prokl.engine.schedule import Plan
from prokl.engine.seen import Seen
from prokl.engine.storage import blank_state, layout_of_state, state_dtype
from prokl.engine.validation import (
    PLAIN,
    check_forms,
    check_gradient,
    check_in_memory,
    check_keys,
    check_materialised,
    check_matrix_parameter,
    check_memory,
    check_names,
    check_no_module,
    check_writable,
    names_alike,
)

Shape = tuple[int, int, int, torch.dtype, torch.device]
"""(m, n, rank, dtype, device)."""
BucketKey = tuple[Shape, tuple[Any, ...]]
"""A shape, and all settings but lr and weight decay."""


class MatrixOptimizer(Optimizer):
    """Base of :class:`prokl.ProKLShampoo` and :class:`prokl.KLShampoo`."""

    method: ClassVar[Method[Any]]
    _graphs = Graphs()  # of what has none of its own yet
    _adding = False  # True while the constructor adds one group after the other

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        check_no_module(params)
        defaults = resolved(defaults, defaults)
        self.method.check(defaults)
        self._forget()
        self._adding = True
        super().__init__(params, {**defaults, "lr": apart(defaults["lr"]), "algorithm": "matrix", **DEFAULTS})
        self._adding = False
        self._check_together()

    def _forget(self) -> None:
        """Drop everything that is derived from ``state`` and ``param_groups``."""
        self._seen: Seen | None = None  # anew at the next step, wherever that finds anything in it changed
        self._buckets: dict[BucketKey, list[Bucket]] = {}  # each anew with its weights, their state, or how it is kept
        self._records: dict[Tensor, Record] = {}  # each for as long as its weight has state
        self._adamw = AdamWGroups()
        self._graphs = self._graphs.anew()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see :class:`torch.optim.Optimizer`. A group that is refused leaves no trace.

        Weights below 2-D of a group that names no algorithm go to an AdamW group of their own, with a warning, where
        the optimizer has AdamW groups, all with one lr.

        Raises:
            TypeError: no group, or a module in it in the place of parameters.
            ValueError: a hyper-parameter out of bounds, a key that is nearly a hyper-parameter's, a name that another
                weight has, or a parameter that the group's algorithm cannot take.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"param_group must be a dict, but got {type(param_group).__name__}.")
        check_no_module(param_group.get("params"))
        groups, said = divided(param_group, [g for g in self.param_groups if g["algorithm"] == "adamw"])
        before = len(self.param_groups)
        try:
            for group in groups:
                self._add_group(group)
            if not self._adding:
                self._check_together()
            if said:
                warnings.warn(said, stacklevel=2)
        except BaseException:
            del self.param_groups[before:]
            raise

    def _add_group(self, param_group: dict[str, Any]) -> None:
        group = resolved(param_group, self.defaults.keys() | adamw.ARGUMENTS)
        algorithm = group.setdefault("algorithm", "matrix")
        if "lr" in group or algorithm != "adamw":
            group["lr"] = apart(group.get("lr", self.defaults["lr"]))
        check_choice("algorithm", group["algorithm"], ALGORITHMS)
        defaults = self._adamw.defaults(self.defaults["maximize"])
        of_adamw = defaults.keys() | {"lr", "algorithm", "params"}
        if algorithm == "adamw":
            check_keys(group, of_adamw, self.defaults)
            group = {**defaults, **group}
            check_adamw(group)
        else:
            check_keys(group, self.defaults, of_adamw)
        with names_alike():
            super().add_param_group(group)
        for p, name in named(self.param_groups[-1], len(self.param_groups) - 1):
            check_materialised(p, name)
        if algorithm == "adamw":
            self._adamw.check_new(self.param_groups[-1], self.defaults)
        else:
            self._check_new_matrix_group(self.param_groups[-1])

    def _check_new_matrix_group(self, group: Group) -> None:
        self.method.check(group)
        weights = named(group, len(self.param_groups) - 1)
        for (p, name), how in zip(weights, readings(group), strict=True):
            check_matrix_parameter(p, name)
            check_reading(p, name, how)
            select(group["backend"], p.device)
            check_writable(p, name)
            check_in_memory(p, name)

    def _check_together(self) -> None:
        """Check what takes all groups."""
        check_names(self.param_groups)
        if self.method.oversize_remedy is not None:
            check_memory(self._title, self._sizes_of_new_state(), self.method.oversize_remedy)

    def _sizes_of_new_state(self) -> Iterator[tuple[Tensor, str, int]]:
        """Yield every matrix parameter that trains and has no state yet, its name, and the bytes of its state."""
        for index, group in enumerate(self.param_groups):
            for piece in self._pieces(index) if group["algorithm"] == "matrix" else ():
                if piece.p.requires_grad and "M" + piece.suffix not in self.state.get(piece.p, {}):
                    layout = layout_of_state(piece, self.method, self._rank(group, piece), group).values()
                    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)
                    if mode_of(group, piece.p.dtype) == MASTER:
                        size += 4 * piece.shape.rows * piece.shape.cols
                    yield piece.p, piece.name, piece.shape.count * size

    def _pieces(self, index: int) -> Iterator[Piece]:
        """Yield what has a state of its own in a matrix group, in its order."""
        group = self.param_groups[index]
        for (p, name), how in zip(named(group, index), readings(group), strict=True):
            yield from self._pieces_of(p, name, how)

    def _pieces_of(self, p: Tensor, name: str, how: Reading) -> list[Piece]:
        return pieces(p, name, how)

    @property
    def stepped(self) -> MatrixOptimizer:
        """The optimizer that has the state of what this process steps: itself, unless the work is divided."""
        return self

    @property
    def _title(self) -> str:
        return type(self).__name__

    def _rank(self, group: Group, piece: Piece) -> int:
        return self.method.rank(group, piece.shape.m, piece.shape.n)

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
                "never refresh. Capture forward and backward alone; the step replays graphs of its own."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for message in self._step():  # last: one that a filter turns into an error leaves no half step behind
            warnings.warn(message, stacklevel=6)  # past torch's wrappers of step: the caller's line
        return loss

    def _step(self) -> list[str]:
        """Do the step, after the closure; return warnings."""
        self._validate()
        messages: list[str] = []
        for bucket, plan in self._decided():
            messages += self._advance(bucket, plan)
        self._step_adamw()
        return messages

    def _decided(self) -> list[tuple[Bucket, Plan]]:
        """Return the buckets that have something to do, and what; nothing has moved then."""
        return [(bucket, plan) for bucket in self._all_buckets() if (plan := bucket.decide()) is not None]

    def _advance(self, bucket: Bucket, plan: Plan) -> list[str]:
        """Step one bucket; return warnings."""
        moved, said = self._graphs.execute(bucket, plan)
        return said + bucket.commit(plan, moved)

    def _step_adamw(self) -> None:
        self._adamw.step([g for g in self.param_groups if g["algorithm"] == "adamw"], self.state)

    def _validate(self) -> None:
        """Check what may have changed since the last step, and give newcomers a place in a bucket."""
        seen, self._seen = self._seen, None
        try:
            still = seen is not None and seen.still(self.param_groups, self.state)
        except (AttributeError, TypeError):  # a weight or its state is something else by now: checked by name
            still = False
        if not still or not all(bucket.holds() for bucket in self._all_buckets()):
            seen = self._validate_anew()
        self._seen = seen

    def _validate_anew(self) -> Seen:
        """Check everything, and let the buckets follow it."""
        check_forms(self.param_groups, self.state)
        check_names(self.param_groups)
        for i, group in enumerate(self.param_groups):
            self._check_complete(i, group)
            if group["algorithm"] == "adamw":
                adamw.bring_home(group, self.state)
        self._records = {p: record for p, record in self._records.items() if self.state.get(p)}
        intact = self._intact()
        for i, group in enumerate(self.param_groups):
            self._check(i, group, intact)
        waiting = self._place()
        keys = {"param_names", "algorithm", *self.defaults, *DEFAULTS, *adamw.ARGUMENTS}
        return Seen(self.param_groups, self.state, keys, waiting)

    def _check_complete(self, index: int, group: Group) -> None:
        """Raise ValueError for a group that was robbed of a setting."""
        check_choice("algorithm", group.get("algorithm"), ALGORITHMS)
        ours, foreign = self.defaults, {"differentiable"}  # torch's own: into every optimizer that is copied
        if group["algorithm"] == "adamw":
            ours, foreign = self._adamw.defaults(self.defaults["maximize"]), set()
        for key in () if ours.keys() <= group.keys() else ours.keys() - foreign - group.keys():
            raise ValueError(
                f"Group {index} has no {key}, which algorithm={group['algorithm']!r} needs: set it back, to "
                f"{ours[key]!r} for what it is by default."
            )

    def _intact(self) -> set[Tensor]:
        """Return the weights whose state is what their buckets left."""
        return {
            member.p
            for bucket in self._all_buckets()
            if bucket.holds()
            for member, own in zip(bucket.members, bucket.states, strict=True)
            if self.state.get(member.p) is own
        }

    def _check(self, index: int, group: Group, intact: Collection[Tensor]) -> None:
        for (p, name), how in zip(named(group, index), readings(group), strict=True):
            check_materialised(p, name)
            check_gradient(p, name, group["algorithm"] == "matrix" or type(p) in PLAIN)
            if group["algorithm"] == "matrix":
                self._check_matrix_weight(p, name, how)
            state = self.state.get(p)
            if state and state.keys() & ({"exp_avg"} if group["algorithm"] == "matrix" else {"M", "M.0"}):
                raise ValueError(
                    f"Invalid algorithm={group['algorithm']!r}: {name} has the state of another algorithm. Set it "
                    "back, or start a new optimizer."
                )
        self._check_settings(index, group)
        self._check_state(index, group, intact)

    def _check_state(self, index: int, group: Group, intact: Collection[Tensor]) -> None:
        """Raise ValueError where a step could not go on from a weight's state.

        Args:
            index: the group's. group: itself. intact: the weights whose state needs no look.
        """
        if group["algorithm"] == "adamw":
            adamw.check_options(group, index)
        for (p, name), how in zip(named(group, index), readings(group), strict=True):
            state = self.state.get(p, {})
            if group["algorithm"] == "adamw":
                adamw.check_state(p, name, group, state)
            elif state and p not in intact:
                parts = self._pieces_of(p, name, how)
                checkpoint.check_state(p, name, parts, state, self.method, group, self._title)

    def _check_settings(self, index: int, group: Group) -> None:
        if group["algorithm"] == "adamw":
            check_adamw(group)
            return
        self.method.check(group)
        fixed = self._fixed(group)
        for i, p in enumerate(group["params"]):
            made = self._records.get(p)
            if made is not None and made.settings not in (None, fixed) and self.state.get(p):
                _, name = list(named(group, index))[i]
                key, value, old = next(
                    each for each in zip(self.method.fixed, fixed, made.settings, strict=True) if each[1] != each[2]
                )
                raise ValueError(
                    f"Invalid {key}={value!r}: the state of {name} was made with {key}={old!r} and depends on it. Set "
                    "it back, or start a new optimizer."
                )

    def _check_matrix_weight(self, p: Tensor, name: str, how: Reading) -> None:
        made = self._records.get(p)
        if made is not None and made.settings is not None and self.state.get(p):
            if how != made.how:
                raise ValueError(
                    f"Invalid transposed={how.transposed!r}, split={how.split!r} of {name}: its state was made with "
                    f"transposed={made.how.transposed!r}, split={made.how.split!r}. Set them back, or start a new "
                    "optimizer."
                )
            if p.shape != made.shape:
                raise ValueError(
                    f"{name} has shape {tuple(p.shape)}, and its state was made with {tuple(made.shape)}: set it "
                    "back, or remove its state, optimizer.state.pop(p), to begin anew."
                )
        check_matrix_parameter(p, name)  # it may have come by other ways than a group
        check_writable(p, name)
        if p.grad is not None:
            check_in_memory(p, name)
        check_reading(p, name, how)

    def _place(self) -> list[Tensor]:
        """Give every weight that takes part its place in buckets of its shapes, and the others a state; return these.

        Where a weight stands in a batch may decide its rounding: it follows from the groups, not from who came first.
        """
        found: dict[BucketKey, list[tuple[Piece, Group]]] = {}
        waiting: list[Tensor] = []
        for index, group in enumerate(self.param_groups):
            if group["algorithm"] != "matrix":
                continue
            settings = self._settings(group)
            for (p, name), how in zip(named(group, index), readings(group), strict=True):
                parts = self._pieces_of(p, name, how)
                if any(map(self._takes_part, parts)):
                    for piece in parts:
                        found.setdefault((self._shape(group, piece), settings), []).append((piece, group))
                    continue
                waiting.append(p)
                for piece in parts if p.requires_grad else ():
                    # A checkpoint has an entry for every weight, or it could not be loaded into one that has begun.
                    if "step" + piece.suffix not in self.state[p]:
                        self.state[p].update(blank_state(piece, self.method, self._rank(group, piece), group))
        self._fill(found)
        for group in self.param_groups:
            if group["algorithm"] == "matrix":
                self._remember(group)
        return waiting

    def _fill(self, found: dict[BucketKey, list[tuple[Piece, Group]]]) -> None:
        """Make the buckets of these pieces; one that is as it would be made stays, with its graphs."""
        old = {(bucket.members[0].p, bucket.members[0].suffix): bucket for bucket in self._all_buckets()}
        filled: dict[BucketKey, list[Bucket]] = {}
        for key, own in found.items():
            (m, n, rank, dtype, device), first = key[0], own[0][1]
            each = self.method.workspace(m, n, rank) * compute_dtype(dtype, state_dtype(first, own[0][0].p)).itemsize
            rest, filled[key] = iter([group for _, group in own]), []
            for run in runs([piece for piece, _ in own], each, workspace(device)):
                states, groups = [self.state[piece.p] for piece in run], [*islice(rest, len(run))]
                bucket = old.get((run[0].p, run[0].suffix))
                if bucket is not None and bucket.is_of(run, states, groups[0]):
                    bucket.follow(groups)
                else:
                    records = [self._records.setdefault(piece.p, Record()) for piece in run]
                    bucket = Bucket(run, groups, states, records, self.method, rank)
                filled[key].append(bucket)
        before, self._buckets = [*self._all_buckets()], filled
        for bucket in self._all_buckets():
            for record in bucket.records:
                record.own_master = MASTER in bucket.stacks
        if {*before} != {*self._all_buckets()}:
            self._graphs = self._graphs.anew()  # the old ones hold buckets that are no more

    def _takes_part(self, piece: Piece) -> bool:
        """Return True if a weight has a gradient, has begun, or has its state in the stacks of a bucket that was."""
        state = self.state.get(piece.p, {})
        M = state.get("M" + piece.suffix)
        return piece.p.grad is not None or max(clock(piece, state)) >= 0 or (M is not None and M._is_view())

    def _shape(self, group: Group, piece: Piece) -> Shape:
        return piece.shape.m, piece.shape.n, self._rank(group, piece), piece.p.dtype, piece.p.device

    def _settings(self, group: Group) -> tuple[Any, ...]:
        """Return what weights must have alike to share a bucket."""
        own = {"lr", "weight_decay", *DEFAULTS}
        return tuple(plain(group.get(key)) for key in self.defaults if key not in own)

    def _remember(self, group: Group) -> None:
        """Remember what the state of this group's weights is made with."""
        fixed = self._fixed(group)
        for p, how in zip(group["params"], readings(group), strict=True):
            if self.state.get(p):
                record = self._records.setdefault(p, Record())
                record.settings, record.how, record.shape = fixed, how, p.shape
                record.own_master |= mode_of(group, p.dtype) == MASTER

    def _fixed(self, group: Group) -> tuple[Any, ...]:
        return tuple(group[key] for key in self.method.fixed)

    def _all_buckets(self) -> Iterator[Bucket]:
        for buckets in self._buckets.values():
            yield from buckets

    def skipped(self) -> dict[str, int]:
        """Count the gradients per matrix weight that were skipped: not finite, or their squares not. Reads the device.

        A stack counts one gradient once, a split weight in each of its pieces. Empty before the first step.
        """
        return self._counts("skipped")

    def clipped(self) -> dict[str, int]:
        """Count the steps per matrix weight that ``clip_threshold`` bounded, of all its matrices. Reads the device.

        Empty before the first step.
        """
        return self._counts("clipped")

    def _counts(self, key: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for i, group in enumerate(self.param_groups):
            for (p, name), how in zip(named(group, i), readings(group), strict=True):
                for piece in pieces(p, name, how) if group["algorithm"] == "matrix" else ():
                    if key + piece.suffix in self.state.get(p, {}):
                        counts[name] = counts.get(name, 0) + int(self.state[p][key + piece.suffix].sum())
        return counts

    @torch.no_grad()
    def offload(self, device: torch.device | str = "cpu") -> None:
        """Move the state to another device between steps: nothing here holds its former memory after that.

        The next step moves it back and goes on with the same bits; graphs are captured anew. Everything a step needs
        besides, the memory of graphs included, is freed, too; ``torch.cuda.empty_cache()`` gives it to other processes.

        Args:
            device: where the state waits; "cpu" is ordinary memory, not pinned.
        """
        for p, own in self.stepped.state.items():
            if isinstance(p, Tensor):  # hooks keep what they like under names
                moved = {key: value.to(device, copy=True) for key, value in own.items() if isinstance(value, Tensor)}
                own.update(moved)
        self.stepped._seen, self.stepped._buckets = None, {}
        self.stepped._graphs = self.stepped._graphs.anew()

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict, with the count of steps as a tensor, which every kind of checkpoint can reshape."""
        for index, group in enumerate(self.param_groups):
            named(group, index)  # raises where names no longer fit
        first = self.register_state_dict_post_hook(self._exported, prepend=True)
        try:
            return super().state_dict()
        finally:
            first.remove()

    def _exported(self, _: Optimizer, packed: dict[str, Any]) -> dict[str, Any]:
        """Return what ``state_dict`` gives: not the live dicts, but their tensors."""
        settings = self.defaults.keys() | adamw.ARGUMENTS
        groups = [resolved(group, settings) for group in packed["param_groups"]]  # schedulers set numbers of NumPy
        return {**packed, "state": checkpoint.with_step_tensors(packed["state"]), "param_groups": groups}

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
        adamw_defaults = self._adamw.defaults(self.defaults["maximize"])
        return checkpoint.prepare(loaded, self.param_groups, self.defaults, adamw_defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for key in {"state", "param_groups"} & self.__dict__.keys() - state.keys():  # as torch's: what it lacks stays
            state = {**state, key: self.__dict__[key].copy()}
        self._adopt(state, self._checked(state))

    def _checked(self, state: dict[str, Any]) -> Any:
        """Make a loaded state this optimizer's; raise ValueError where it cannot be. Nothing has changed then."""
        return checkpoint.restore(state, self.method, self._title)

    def _adopt(self, state: dict[str, Any], made: Any) -> None:
        """Go on from a state that :meth:`_checked` returned ``made`` for."""
        super().__setstate__(state)
        self._forget()
        for i in made:
            group = self.param_groups[i]
            self._remember(group)
            for p in group["params"] if group["bf16_weights"] == MASTER else ():  # also no longer in bfloat16
                self._records.setdefault(p, Record()).own_master = True
