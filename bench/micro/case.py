"""What a case is that is compiled, checked or timed: inputs, and an operation over a backend's primitives.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from bench import gate
from prokl.algorithm.algebra import Direction
from prokl.algorithm.stages import ProKLShampooStages
from prokl.backends import torch_ops, torch_pairs, triton_ops, triton_pairs
from prokl.kernels.launch import Tile
from prokl.pair import Operand, Pair

AGREE = 1e-12
"""Largest distance of the PyTorch form from the plain one, both in float64, so that one confirms the other. Measured:
at most 1e-14, in Newton-Schulz, whose steps magnify rounding; a wrong index gives 1."""

Inputs = dict[str, Any]
Draw = Callable[..., Tensor]
"""Makes a tensor of a shape and ``dtype``: random numbers, or no numbers where only shapes and dtypes matter."""
Bind = Callable[[Inputs, ProKLShampooStages], Callable[[], Any]]
"""From inputs and primitives, the call that is timed."""


@dataclass(frozen=True)
class Sizes:
    """One bucket of weights."""

    B: int
    m: int
    n: int
    r: int


@dataclass(frozen=True)
class Dtypes:
    """What a bucket is stored and computed in."""

    name: str
    weights: torch.dtype
    momentum: torch.dtype
    arithmetic: torch.dtype
    polar: torch.dtype


FP32 = Dtypes("fp32", torch.float32, torch.float32, torch.float32, torch.bfloat16)
BF16 = Dtypes("bf16 weights", torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)
BF16_STATE = Dtypes("bf16 weights and state", torch.bfloat16, torch.bfloat16, torch.float32, torch.bfloat16)
FP16 = Dtypes("fp16 weights", torch.float16, torch.float32, torch.float32, torch.float16)
FP32_POLAR = Dtypes("fp32 throughout", torch.float32, torch.float32, torch.float32, torch.float32)
FP64 = Dtypes("fp64", *[torch.float64] * 4)


@dataclass(frozen=True)
class Case:
    """One operation of a step.

    Attributes:
        name: unique among the cases.
        inputs: draws what all forms take; a form may write into it.
        bind: from inputs and primitives, the call that is timed.
        polar: whether products of Newton-Schulz are among it, which may run in bfloat16.
        plain: the results in plain PyTorch or by the specification; None where the torch backend is that already.
        counterpart: what KL-Shampoo does in the place of this.
        dtypes: to compile a kernel for.
        timed: dtypes to time.
        module: of the kernel, if the case is one.
        operand: dtype whose tiles are all compiled, "pair" for those of pairs; empty for the launcher's own choice
            alone.
        narrow: whether a program of the kernel holds all of r.
    """

    name: str
    inputs: Callable[[Sizes, Dtypes, Draw], Inputs]
    bind: Bind
    polar: bool = False
    plain: Callable[[Inputs], Any] | None = None
    counterpart: Case | None = None
    dtypes: tuple[Dtypes, ...] = (FP32,)
    timed: tuple[Dtypes, ...] = ()
    module: ModuleType | None = None
    operand: str = ""
    narrow: bool = False

    def tiles(self, d: Dtypes) -> tuple[Tile | None, ...]:
        """Return the tiles to compile for; None is the launcher's choice."""
        if not self.operand:
            return (None,)
        if self.operand == "pair":
            names = ["TILES_PAIR", "TILES_HALF"]
        else:
            dtype: torch.dtype = getattr(d, self.operand)
            names = [{torch.float64: "TILES_FP64", torch.float32: "TILES_FP32"}.get(dtype, "TILES_HALF"), "TILES"]
        found: tuple[Tile, ...] = next(getattr(self.module, name) for name in names if hasattr(self.module, name))
        return found

    def reference(self, i: Inputs, split: bool = False) -> list[Tensor]:
        """Return the results that the others are compared with; ``split`` says that those have pairs among theirs."""
        return flat(self.plain(i) if self.plain else self.bind(i, torch_form(i, split))())


def _is_pair(x: Any) -> bool:
    return isinstance(x, Pair)


_leaves = partial(tree_leaves, is_leaf=_is_pair)


def has_pair(x: Any) -> bool:
    """Return True if inputs or results are, or have among them, a pair."""
    return any(map(_is_pair, _leaves(x)))


def torch_form(i: Inputs, split: bool = False) -> ProKLShampooStages:
    """Return PyTorch's stages for where the inputs are, balanced if one of them is a pair or a result is to be."""
    first = next(t for t in _tensors(i))
    form = torch_pairs.PairedStages if split or has_pair(i) else torch_ops.TorchStages
    return form(first.device.type == "cpu")


def beside(ops: Any, method: str = "pro-klshampoo", pairs: bool = False) -> Any:
    """Return the stages of a method on the backend of ``ops``, with ``pairs`` or as they are without."""
    if ops.name == "triton":
        return (triton_pairs if pairs else triton_ops).STAGES[method](ops.use_cuda_qr, ops.host_readable)
    return (torch_pairs if pairs else torch_ops).STAGES[method](ops.host_readable)


def _tensors(x: Any) -> list[Tensor]:
    leaves = [leaf.whole() if isinstance(leaf, Pair) else leaf for leaf in _leaves(x)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Parts(NamedTuple):
    """A result (B,...) that a kernel leaves in parts (B,k,...) that add up to it, for the next one."""

    parts: Tensor

    def dense(self) -> Tensor:
        """Return it."""
        return self.parts.sum(dim=1)


def flat(results: Any) -> list[Tensor]:
    """Return the floating-point tensors of results in their order; a direction as the matrix that it means."""
    meant = Direction | Parts
    if isinstance(results, list | tuple) and not isinstance(results, Pair | Parts):
        results = [x.dense() if isinstance(x, meant) else x for x in results]
    found = [results.dense()] if isinstance(results, meant) else _tensors(results)
    return [t for t in found if t.is_floating_point()]


def numbers(device: torch.device, seed: int = 0) -> Draw:
    """Return what draws normal numbers; the same ones for the same seed, whatever the dtype."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    return draw


def arithmetic(t: Operand) -> torch.dtype:
    """Return the dtype of a tensor, or that of which a pair holds the halves."""
    return torch.float32 if isinstance(t, Pair) else t.dtype


def precision_of(inputs: Inputs) -> str:
    """Return the precision whose stages take such inputs: pairs are of balanced ones alone."""
    return "balanced" if has_pair(inputs) else "faithful"


def call(name: str, *arguments: str) -> Bind:
    """Return what binds the primitive ``name`` to these inputs in order, None if not there, and to all others by name.

    A bucket's I/O gives gradients G in the weights' dtype to Triton alone, to others in the arithmetic one.
    """

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        if "G" in i and ops.name != "triton":
            i = i | {"G": i["G"].to(arithmetic(i["U"]))}
        given = [i.get(key) for key in arguments]
        rest = {key: value for key, value in i.items() if key not in arguments}
        return lambda: getattr(ops, name)(*given, **rest)

    return bind


def over(form: Callable[..., Any], kernel: Callable[..., Any] | None = None) -> Bind:
    """Return what binds a form, called with the primitives and all inputs by name; for Triton a kernel without them."""

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        return partial(kernel, **i) if kernel and ops.name == "triton" else partial(form, ops, **i)

    return bind


def tensors(*specs: str, **constants: Any) -> Callable[[Sizes, Dtypes, Draw], Inputs]:
    """Return what draws inputs: constants, or functions of sizes and dtypes, and tensors as "name sides [dtype]" says.

    Sides are letters of :class:`Sizes` or a digit, "." for none. Behind them ``T`` stores the transpose, ``+`` makes
    positive, ``~`` symmetric, and ``?`` True throughout. The dtype is a field of :class:`Dtypes`, or "pair": float32,
    split.
    """

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        found = {name: value(s, d) if callable(value) else value for name, value in constants.items()}
        for spec in specs:
            name, sides, *dtype = spec.split()
            shape = [int(side) if side.isdigit() else getattr(s, side) for side in sides.strip(".T+~?")]
            pair = dtype == ["pair"]
            stored = torch.float32 if pair else getattr(d, *(dtype or ["arithmetic"]))
            t = draw(s.B, *(shape[::-1] if "T" in sides else shape), dtype=stored)
            t = Pair.split(t) if pair else t
            t = t.mT if "T" in sides else t
            t = t + t.mT if "~" in sides else t
            t = t.abs() if "+" in sides else t > -100 if "?" in sides else t
            found[name] = t
        return found

    return inputs


def doubled(inputs: Any) -> Any:
    """Return inputs in float64."""

    def wider(x: Any) -> Any:
        x = x.whole() if isinstance(x, Pair) else x
        if isinstance(x, Tensor):
            return x.double() if x.is_floating_point() else x
        return torch.float64 if isinstance(x, torch.dtype) else x

    return tree_map(wider, inputs, is_leaf=_is_pair)


@dataclass(frozen=True)
class Expected:
    """What the results of a case are compared with.

    Attributes:
        truth: results of the plain form in float64.
        usual: results of the plain form.
        wrong: how far the PyTorch form is from the plain one in float64, if that is too far; else "".
    """

    truth: list[Tensor]
    usual: list[Tensor]
    wrong: str


def expect(case: Case, fresh: Callable[[], Inputs], split: bool = False) -> Expected:
    """Compute what to compare with; ``fresh`` makes the inputs, always the same, ``split`` as of Case.reference."""
    truth, wrong = case.reference(doubled(fresh())), ""
    if case.plain:
        i = doubled(fresh())
        wrong = gate.disagreement(flat(case.bind(i, torch_form(i))()), truth, AGREE)
    return Expected(truth, case.reference(fresh(), split), wrong)


def complaint(
    case: Case, ops: ProKLShampooStages | None, fresh: Callable[[], Inputs], expected: Expected | None = None
) -> str:
    """Say what is wrong with the case over a backend's primitives, None for its plain form; "" if nothing is."""
    results = case.bind(fresh(), ops)() if ops else None
    expected = expected or expect(case, fresh, has_pair(results))
    found = flat(results) if ops else expected.usual
    return gate.complaint(found, expected.usual, expected.truth) or expected.wrong
