"""Define the cases that are compiled, checked or timed: inputs, and an operation over a backend's primitives.

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
from prokl.algorithm.algebra import Algebra, Direction
from prokl.backends.torch_pairs import PairedAlgebra
from prokl.kernels.launch import Tile
from prokl.pair import Pair

AGREE = 1e-12
"""Largest distance of the PyTorch form from the plain one, both in float64, so that one confirms the other. Measured:
at most 1e-14, in Newton-Schulz, whose steps magnify rounding; a wrong index gives 1."""

Inputs = dict[str, Any]
Draw = Callable[..., Tensor]
"""Makes a tensor of a shape and ``dtype``: random numbers, or no numbers where only shapes and dtypes matter."""
Bind = Callable[[Inputs, Algebra], Callable[[], Any]]
"""A function of inputs and primitives; it returns the call that is timed."""


@dataclass(frozen=True)
class Sizes:
    """One bucket of weights."""

    B: int
    m: int
    n: int
    r: int


@dataclass(frozen=True)
class Dtypes:
    """The dtypes that a bucket is stored and computed in."""

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
        library: from inputs, the call of the library's own product in the place of this, on CUDA alone.
        dtypes: to compile a kernel for.
        timed: dtypes to time.
        module: of the kernel's tiles and of what chooses one, if the case is a kernel.
        operand: dtype whose tiles are all compiled, "pair" for those of pairs; empty for the launcher's own choice
            alone.
        narrow: whether a program of the kernel holds all of r.
        balanced: whether it is an operation of balanced products.
    """

    name: str
    inputs: Callable[[Sizes, Dtypes, Draw], Inputs]
    bind: Bind
    polar: bool = False
    plain: Callable[[Inputs], Any] | None = None
    counterpart: Case | None = None
    library: Callable[[Inputs], Callable[[], Any]] | None = None
    dtypes: tuple[Dtypes, ...] = (FP32,)
    timed: tuple[Dtypes, ...] = ()
    module: ModuleType | None = None
    operand: str = ""
    narrow: bool = False
    balanced: bool = False

    @property
    def precision(self) -> str:
        """Return the precision of the operations that it is one of."""
        return "balanced" if self.balanced else "faithful"

    def tiles(self, d: Dtypes) -> tuple[Tile | None, ...]:
        """Return the tiles to compile for; None is the launcher's choice."""
        if not self.operand:
            return (None,)
        if self.operand == "pair":
            names = ["TILES_PAIR", "TILES_HALF"]
        else:
            dtype: torch.dtype = getattr(d, self.operand)
            names = [{torch.float64: "TILES_FP64", torch.float32: "TILES_FP32"}.get(dtype, "TILES_HALF"), "TILES"]
        return next(getattr(self.module, name) for name in names if hasattr(self.module, name))

    def formula(self, i: Inputs) -> Callable[[], Any]:
        """Return the call of the plain form that is timed, of balanced products in float32."""
        if self.plain:
            return partial(self.plain, i)
        if self.balanced:  # what Newton-Schulz stands beside is in its dtype still
            i = tree_map(lambda x: x if isinstance(x, torch.dtype) else widened(x, torch.float32), i, is_leaf=_is_pair)
        return self.bind(i, torch_form(i))


def _is_pair(x: Any) -> bool:
    return isinstance(x, Pair)


def torch_form(i: Inputs, balanced: bool = False) -> Algebra:
    """Return PyTorch's operations for where the inputs are."""
    return (PairedAlgebra if balanced else Algebra)(_tensors(i)[0].device.type == "cpu")


def _tensors(x: Any) -> list[Tensor]:
    leaves = [leaf.whole() if _is_pair(leaf) else leaf for leaf in tree_leaves(x, is_leaf=_is_pair)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


class Parts(NamedTuple):
    """A result (B,m) that a kernel may leave in parts (B,k,m) that add up to it, for the next one."""

    parts: Tensor

    def dense(self) -> Tensor:
        """Return it."""
        return self.parts.sum(dim=1) if self.parts.ndim == 3 else self.parts


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


def call(name: str, *arguments: str) -> Bind:
    """Return what binds the operation ``name`` to these inputs in order, None if not there, and the others by name."""

    def bind(i: Inputs, ops: Algebra) -> Callable[[], Any]:
        given = [i.get(key) for key in arguments]
        rest = {key: value for key, value in i.items() if key not in arguments}
        return lambda: getattr(ops, name)(*given, **rest)

    return bind


def over(form: Callable[..., Any]) -> Bind:
    """Return what binds a form, called with the primitives and all inputs by name."""
    return lambda i, ops: partial(form, ops, **i)


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


def widened(inputs: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Return inputs in a wider dtype."""

    def wider(x: Any) -> Any:
        x = x.whole() if isinstance(x, Pair) else x
        if isinstance(x, Tensor):
            return x.to(dtype) if x.is_floating_point() else x
        return dtype if isinstance(x, torch.dtype) else x

    return tree_map(wider, inputs, is_leaf=_is_pair)


@dataclass(frozen=True)
class Expected:
    """Expected results of a case.

    Attributes:
        truth: results of the plain form in float64.
        usual: results of the plain form.
        wrong: how far the PyTorch form is from the plain one in float64, if that is too far; else "".
    """

    truth: list[Tensor]
    usual: list[Tensor]
    wrong: str


def expect(case: Case, fresh: Callable[[], Inputs]) -> Expected:
    """Compute what to compare with; ``fresh`` makes the inputs, always the same."""

    def plain(i: Inputs, balanced: bool = False) -> list[Tensor]:
        return flat(case.plain(i) if case.plain else case.bind(i, torch_form(i, balanced))())

    truth, wrong = plain(widened(fresh())), ""
    if case.plain:
        i = widened(fresh())
        wrong = gate.disagreement(flat(case.bind(i, torch_form(i))()), truth, AGREE)
    return Expected(truth, plain(fresh(), case.balanced), wrong)


def complaint(case: Case, ops: Algebra | None, fresh: Callable[[], Inputs], expected: Expected | None = None) -> str:
    """Say what is wrong with the case over a backend's primitives, None for its plain form; "" if nothing is."""
    expected = expected or expect(case, fresh)
    found = flat(case.bind(fresh(), ops)()) if ops else expected.usual
    return gate.complaint(found, expected.usual, expected.truth) or expected.wrong
