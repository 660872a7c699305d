"""The kernels beside their PyTorch forms: what each takes, what it gives in float64, and how far off it may be.

A form is made of sums and products. Evaluated on the absolute values of the inputs, and with every minus a plus, it
says what rounding scales with: a result of so many roundings, one after another, errs by at most that many units times
this size to first order. Twice that is allowed, where tensor cores truncate and where a form in float64 rounds as well.
Three products of TF32 parts, which leave out that of the two low ones, add less than 2^-19 of the size each; those of
pairs of bfloat16, which leave it out too and are split on the way, 2^-16. Narrower results are rounded once more.
Measured in the interpreter: at most 0.5 of the bounds before storing.

Sides: B matrices; m, n, r of :class:`bench.micro.case.Sizes`, whose input language this is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.micro.case import Inputs, Sizes, tensors
from prokl.algorithm import evidence
from prokl.algorithm.evidence import Admitted, Roots
from prokl.backends.pointers import PointerTable
from prokl.backends.triton_ops import TritonAlgebra
from prokl.kernels import (
    apply,
    launch,
    momentum,
    product,
    project,
    symmetric_product,
    triangle,
    turn,
    two_products,
    weigh,
)
from prokl.kernels.launch import Tile
from prokl.kernels.stack import TILES as TILES_OF_STACK
from prokl.kernels.stack import stack
from prokl.kernels.symmetric_product import extrapolated, shifted_polynomial
from prokl.pair import Pair

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SMALL = Tile(16, 16, 16, 4, 1)
SIZES = (
    Sizes(2, 67, 70, 33), Sizes(3, 65, 64, 60), Sizes(1, 7, 101, 1), Sizes(2, 1, 1, 1), Sizes(2, 1, 40, 5),
    Sizes(1, 40, 1, 1),
)  # fmt: skip
REFUSED = Sizes(3, 5, 9, 4)
"""Sizes at which wrong arguments are told."""
GPU_DTYPES = () if launch.INTERPRETED else ((BF16,) * 3,)
"""Dtypes of products that the interpreter gets wrong."""


Roundings = list[tuple[float, int]]


@dataclass(frozen=True)
class KernelCase:
    """One kernel.

    Attributes:
        run: launches it; gives its results, those in parts added up.
        form: the results in PyTorch; of what is subtracted the factor is ``minus``.
        inputs: "sides" of every tensor, or a constant.
        roundings: of every result at these sizes, and how many products of factors it is made by.
        dtypes: of the tensors in the order of ``inputs`` and of C, others float32. bfloat16 only where the kernel
            converts it, and on a GPU: the interpreter multiplies it wrongly.
        variants: changes of the inputs; None leaves one out.
        sizes: ragged ones first.
        tiles: those that ship, by the dtype that they are for.
        tile_of: sizes that cross a tile along every side.
        stored: dtypes of the results; by default that of the arithmetic.
        symmetric: whether results equal their transpose.
        written: what is written where it lies, and is the first result; it keeps its bits where it is not active.
        unread: what may be NaN where a matrix is not active, and is.
    """

    name: str
    run: Callable[..., list[Tensor | Pair]]
    form: Callable[..., list[Tensor]]
    inputs: Mapping[str, Any]
    roundings: Callable[[Sizes], Roundings]
    dtypes: tuple[tuple[torch.dtype, ...], ...] = ((SINGLE,), (DOUBLE,) * 8)
    variants: tuple[Mapping[str, Any], ...] = ({},)
    sizes: tuple[Sizes, ...] = SIZES
    tiles: Mapping[torch.dtype, tuple[Tile, ...]] = field(default_factory=dict)
    tile_of: Callable[[Tile], Sizes] = lambda t: Sizes(2, t.m + 3, 2 * t.k + 5, t.n + 2)
    stored: Callable[[Inputs], torch.dtype] | None = None
    symmetric: bool = False
    written: str = ""
    unread: tuple[str, ...] = ()

    @property
    def full(self) -> int:
        """The variant with the most tensors."""
        return max(range(len(self.variants)), key=lambda v: [*map(type, self.variants[v].values())].count(str))

    def given(self) -> dict[str, Any]:
        return {**self.inputs, **self.variants[self.full]}

    def make(self, size: Sizes, dtypes: Sequence[torch.dtype] = (), variant: int | None = 0, seed: int = 0) -> Inputs:
        """Draw the inputs in float64, so that float64 has digits of its own; the same for the same seed.

        A variant of None is the :attr:`full` one.
        """
        given = {**self.inputs, **self.variants[self.full if variant is None else variant]}
        of_tensors = {k: v for k, v in given.items() if isinstance(v, str) and v != "?"}
        order = [*(k for k, v in self.inputs.items() if isinstance(v, str)), "C"]
        of_name = dict.fromkeys(of_tensors, SINGLE) | dict(zip(order, dtypes or self.dtypes[0], strict=False))
        of_name |= {k: SINGLE for k, v in of_tensors.items() if v == ".+" and of_name[k] != DOUBLE}  # rates and sizes
        specs = [f"{k} {v}" if "pair" in v else f"{k} {v} {k}" for k, v in of_tensors.items()]
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=DOUBLE).to(DEVICE, dtype)

        i = tensors(*specs)(size, SimpleNamespace(**of_name), draw)
        of_matrices = torch.arange(size.B, device=DEVICE) % 3 != 1
        if given.get("active"):
            for name in self.unread:
                i[name][~of_matrices] = torch.nan
        return {k: i.get(k, of_matrices if v == "?" else v(size) if callable(v) else v) for k, v in given.items()}

    def exact(self, i: Inputs) -> tuple[list[Tensor], list[Tensor]]:
        """Results in float64, and the sizes that their rounding scales with."""
        wide = {k: in_float64(v) for k, v in i.items()}
        return self.form(wide), self.form({k: absolute(v) for k, v in wide.items()}, minus=1.0)

    def expected(self, i: Inputs) -> list[tuple[Tensor, Tensor]]:
        """(value, bound) of every result, but for how it is stored."""
        size = self.size_of(i)
        sum_dtype = arithmetic(i)
        left_out = 2.0**-16 if any(isinstance(t, Pair) for t in i.values()) else 0.0
        left_out += 2.0**-19 if sum_dtype == SINGLE and not launch.INTERPRETED else 0.0
        units = [count * torch.finfo(sum_dtype).eps + products * left_out for count, products in self.roundings(size)]
        return [
            (value, unit * scale + torch.finfo(sum_dtype).tiny)
            for value, scale, unit in zip(*self.exact(i), units, strict=False)
        ]

    def size_of(self, i: Inputs) -> Sizes:
        """The sizes that inputs were drawn with; of a side that none of them has, 1."""
        found = {"m": 1, "n": 1, "r": 1}
        for name, spec in self.inputs.items():
            if isinstance(spec, str) and i[name] is not None:
                t = i[name].hi if isinstance(i[name], Pair) else i[name]
                found |= dict(zip((s for s in spec.split()[0] if s in "mnr"), t.shape[1:], strict=False))
        return Sizes(len(next(parts_of(i))), **found)


def parts_of(i: Inputs):
    """The tensors of inputs, of pairs hi."""
    return (v.hi if isinstance(v, Pair) else v for v in i.values() if isinstance(v, Tensor | Pair))


def arithmetic(i: Inputs) -> torch.dtype:
    """The dtype that a kernel computes in; scales of matrices, and energies, have no say in it."""
    own = {k: v for k, v in i.items() if k != "energies"}
    return launch.arithmetic_dtype(*(t for t in parts_of(own) if t.ndim > 1))


def in_float64(x: Any) -> Any:
    if isinstance(x, Pair):
        return x.whole().double()
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def absolute(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(abs, x))
    return x if x is None or isinstance(x, torch.dtype) or getattr(x, "dtype", None) == torch.bool else abs(x)


def assert_close(case: KernelCase, found: list[Tensor | Pair], i: Inputs, expected=None) -> None:
    """Hold results against the form of inputs within the bound, element by element."""
    expected = expected or case.expected(i)
    assert len(found) == len(expected)
    for place, (x, (value, bound)) in enumerate(zip(found, expected, strict=True)):
        if isinstance(x, Pair):
            x, bound = x.whole(), bound + 2.0**-16 * (value.abs() + bound)
        elif (stored := torch.finfo(x.dtype)).eps > torch.finfo(arithmetic(i)).eps:
            bound = bound + stored.eps / 2 * (value.abs() + bound) + stored.tiny * stored.eps
        assert x.shape == value.shape
        assert x.is_contiguous() or case.written and place == 0
        assert not case.symmetric or torch.equal(x, x.mT)
        if case.written and place == 0 and i.get("active") is not None:
            assert torch.equal(x[~i["active"]], value[~i["active"]].to(x.dtype))
        error = (x.double() - value).abs()
        ratio = float((error / bound).nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0
        assert (error <= bound).all(), f"result {place}: {ratio:.2g} of the bound"


def gaps(t: Tensor) -> Tensor:
    """The same numbers with NaN between them in memory."""
    wide = torch.full([2 * k + 1 for k in t.shape], torch.nan, device=DEVICE).to(t.dtype)
    return wide[(slice(1, None, 2),) * t.ndim].copy_(t)


def column(scale: float | Tensor) -> Any:
    return scale[:, None, None] if isinstance(scale, Tensor) else scale


def squares(t: Tensor) -> Tensor:
    return t.square().sum(dim=(-2, -1))


def lower(D: Tensor) -> Tensor:
    """The lower half, mirrored: what kernels of symmetric products compute and read."""
    return D.tril() + D.tril(-1).mT


def total(parts: Tensor) -> Tensor:
    return parts.sum(dim=1)


# Products


def _sum(i: Inputs, AB: Tensor) -> Tensor:
    D = column(i.get("alpha", 1.0)) * AB
    return D if i.get("C") is None else D + column(i.get("beta", 1.0)) * i["C"]


def _with_energies(i: Inputs, minus: float = -1.0) -> list[Tensor]:
    AB = i["A"] @ i["B"]
    D = _sum(i, AB)
    return [D, D.square().sum(dim=-1)]


def _product_with_energies(**i: Any) -> list[Tensor | Pair]:
    D, energies = product.product_with_energies(**i)
    return [D, total(energies)]


def wider(i: Inputs) -> torch.dtype:
    A, B = i["A"], i.get("B", i["A"])
    return SINGLE if isinstance(A, Pair) or isinstance(B, Pair) else torch.promote_types(A.dtype, B.dtype)


def of_product(s: Sizes) -> Roundings:
    """n products and sums, two roundings of each scale and the last sum."""
    return [(s.n + 5, 1)]


ADDENDS = (
    {}, {"C": "mr", "alpha": 0.3, "beta": -1.7}, {"C": "mr", "alpha": ".+", "beta": 0.1}, {"alpha": "."},
)  # fmt: skip
FACTOR_TILES = {HALF: product.TILES_HALF, SINGLE: product.TILES_FP32, DOUBLE: product.TILES_FP64}
PRODUCT = KernelCase(
    "product", lambda **i: [product.product(**i)], lambda i, minus=-1.0: [_sum(i, i["A"] @ i["B"])],
    {"A": "mn", "B": "nr"}, of_product,
    # The last: a half-precision gradient minus what the subspace has of it.
    dtypes=(
        (SINGLE,) * 3, (HALF,) * 3, (DOUBLE,) * 3, (BF16, SINGLE, BF16), (SINGLE, HALF, DOUBLE), (HALF, DOUBLE, SINGLE),
        (HALF, BF16, HALF), (SINGLE, SINGLE, BF16), *GPU_DTYPES,
    ),
    variants=ADDENDS, tiles=FACTOR_TILES, stored=wider,
)  # fmt: skip
PAIRED_PRODUCT = replace(
    PRODUCT, name="product of pairs", inputs={"A": "mn pair", "B": "nr pair"}, dtypes=((BF16, BF16),),
    variants=(ADDENDS[1], {"B": "nr"}, {"A": "mn"}, ADDENDS[2]), tiles={SINGLE: product.TILES_HALF},
)  # fmt: skip
SPLIT_PRODUCT = replace(
    PAIRED_PRODUCT, name="product as a pair", run=lambda **i: [product.split_product(**i)],
    variants=({}, {"B": "nr"}, {"A": "mn"}),
)  # fmt: skip
RESIDUAL = KernelCase(
    "product with energies", _product_with_energies, _with_energies, {"A": "mn", "B": "nr", "C": "mr", "alpha": -1.7},
    # A square doubles an error; at most r + 20 sums of them.
    lambda s: [(s.n + 6, 1), (2 * (s.n + 6) + s.r + 20, 2)],
    dtypes=((SINGLE,) * 3, (HALF,) * 3, (DOUBLE,) * 3, (SINGLE, SINGLE, BF16), (SINGLE, HALF, DOUBLE)),
    variants=({}, {"alpha": ".+"}, {"C": None, "alpha": 0.3}),
    tiles=FACTOR_TILES,
)  # fmt: skip
PAIRED_RESIDUAL = replace(
    RESIDUAL, name="product of pairs with energies", inputs=RESIDUAL.inputs | {"A": "mn pair", "B": "nr pair"},
    dtypes=((BF16,) * 3,), variants=({}, {"out_dtype": BF16}), tiles={SINGLE: product.TILES_HALF},
    stored=lambda i: i.get("out_dtype") or SINGLE,
)  # fmt: skip


def _brought_down(i: Inputs, minus: float = -1.0) -> list[Tensor]:
    norm = i["energies"].sum(dim=(1, 2)).sqrt()
    beyond = norm > i["largest"]
    factor = torch.where(beyond, i["largest"] / norm, 1.0)
    return [column(factor) * (i["A"] @ i["B"]), i["clipped"] + (beyond | i["bounded"])]


BOUNDED = KernelCase(
    "bounded product", lambda **i: [*product.bounded_product(**i)], _brought_down,
    # The norms, of m n numbers |N(0, 1)|, lie on both sides of the bound.
    {"A": "mn", "B": "nr", "energies": "mn+", "bounded": "?", "clipped": ".+",
     "largest": lambda s: (0.8 * s.m * s.n) ** 0.5},
    lambda s: [(s.n + 6, 1), (1, 0)], dtypes=((SINGLE, SINGLE, DOUBLE), (HALF, HALF, DOUBLE), (DOUBLE,) * 4),
    variants=({}, {"out_dtype": BF16}), tiles=FACTOR_TILES, stored=lambda i: i.get("out_dtype") or wider(i),
)  # fmt: skip
PAIRED_BOUNDED = replace(
    BOUNDED, name="bounded product of pairs", inputs=BOUNDED.inputs | {"A": "mn pair", "B": "nr pair"},
    dtypes=((BF16, BF16, DOUBLE),), tiles={SINGLE: product.TILES_HALF},
)  # fmt: skip


SYMMETRIC_TILES = {HALF: triangle.TILES_HALF, SINGLE: triangle.TILES_FP32, DOUBLE: triangle.TILES_FP64}
OWN_ADDENDS = tuple({k: v.replace("r", "m") if k == "C" else v for k, v in own.items()} for own in ADDENDS)
SYMMETRIC = KernelCase(
    "symmetric product", lambda **i: [symmetric_product.symmetric_product(**i)],
    lambda i, minus=-1.0: [lower(_sum(i, i["A"] @ i["A"].mT))], {"A": "mn"}, lambda s: [(s.n + 6, 1)],
    dtypes=((SINGLE, SINGLE), (HALF, HALF), (DOUBLE, DOUBLE), (SINGLE, BF16), (HALF, SINGLE), *GPU_DTYPES),
    variants=OWN_ADDENDS, tiles=SYMMETRIC_TILES, stored=wider, symmetric=True,
)  # fmt: skip
POLYNOMIAL = KernelCase(
    "symmetric polynomial", lambda **i: [symmetric_product.symmetric_polynomial(**i)],
    lambda i, minus=-1.0: _shifted({"shift": 0.0} | i)[1:], {"A": "mn", "B": "mn"}, lambda s: [(s.n + 7, 1)],
    dtypes=((SINGLE,) * 3, (HALF,) * 3, (DOUBLE,) * 3, *GPU_DTYPES),
    variants=(*OWN_ADDENDS, OWN_ADDENDS[1] | {"shift": 2.5}), tiles=SYMMETRIC_TILES, stored=wider, symmetric=True,
)  # fmt: skip
PAIRED_POLYNOMIAL = replace(
    POLYNOMIAL, name="symmetric polynomial of pairs", inputs={"A": "mn pair", "B": "mn pair"}, dtypes=((SINGLE,),),
    tiles={SINGLE: triangle.TILES_HALF}, stored=None,
)  # fmt: skip


def _shifted(i: Inputs, minus: float = -1.0) -> list[Tensor]:
    D = lower(_sum(i, i["A"] @ i["B"].mT))
    return [D, D + i["shift"] * torch.eye(D.shape[-1], dtype=D.dtype, device=D.device)]


SHIFTED = replace(
    POLYNOMIAL, name="shifted polynomial", run=lambda **i: list(shifted_polynomial(**i)), form=_shifted,
    roundings=lambda s: [(s.n + 6, 1), (s.n + 7, 1)], variants=({"C": "mm", "alpha": 0.3, "beta": -1.7, "shift": 2.5},),
)  # fmt: skip
EXTRAPOLATED = KernelCase(
    "extrapolated", lambda **i: list(extrapolated(**i)), lambda i, minus=-1.0: [
        D := lower(_sum(i, i["A"] @ i["A"].mT)), D + i["ahead"] * (D + minus * i["C"])
    ],
    {"A": "mn", "alpha": 0.3, "beta": 0.9, "ahead": 0.7}, lambda s: [(s.n + 6, 1), (s.n + 9, 1)],
    dtypes=((SINGLE, SINGLE), (HALF, HALF), (DOUBLE, DOUBLE)), variants=({"C": "mm~"}, {"C": "mm~", "beta": 0.0}),
    stored=wider, symmetric=True,
)  # fmt: skip
TWO_SYMMETRIC = KernelCase(
    "two symmetric products", lambda **i: [two_products.symmetric_products(**i)],
    lambda i, minus=-1.0: [lower(_sum(i, i["A"] @ i["A"].mT + i["gamma"] / column(i["alpha"]) * i["E"] @ i["E"].mT))],
    {"A": "mn", "E": "mr", "alpha": ".+", "gamma": 0.3, "beta": 0.9}, lambda s: [(s.n + s.r + 8, 1)],
    dtypes=(
        (SINGLE,) * 4, (BF16, BF16, SINGLE, SINGLE), (HALF, HALF, SINGLE, SINGLE), (DOUBLE,) * 4,
        (SINGLE, SINGLE, SINGLE, BF16),
    ),
    variants=({"C": "mm~"},), tiles=SYMMETRIC_TILES, stored=arithmetic, symmetric=True,
)  # fmt: skip
PAIRED_SYMMETRIC = replace(
    SYMMETRIC, name="symmetric product of a pair", inputs={"A": "mn pair"}, dtypes=((SINGLE,),),
    variants=OWN_ADDENDS[:3], tiles={SINGLE: triangle.TILES_HALF},
)  # fmt: skip


TURN = KernelCase(
    "turn", lambda **i: [t.contiguous() for t in turn.turned(**i)],
    lambda i, minus=-1.0: [i["T"].mT @ i["S"] @ i["T"], i["T"].mT @ i["Q"]],
    {"T": "rr", "S": "rr", "Q": "rr"}, lambda s: [(2 * s.r + 2, 2), (s.r + 1, 1)],
    dtypes=((SINGLE,) * 3, (DOUBLE,) * 3, (SINGLE, SINGLE, BF16), (DOUBLE, HALF, SINGLE)),
    tiles={SINGLE: turn.TILES, DOUBLE: turn.TILES_FP64}, tile_of=lambda t: Sizes(2, 1, 1, t.m + 3),
)  # fmt: skip


# Projection and momentum


def live(G: Tensor, i: Inputs) -> Tensor:
    """A gradient counts as zero where it is not active."""
    return G if i.get("active") is None else torch.where(i["active"][:, None, None], G, 0.0)


def _project(**i: Any) -> list[Tensor | Pair]:
    both, GU = project.project(**i)
    found = [both[:, 0].contiguous(), both[:, 1].contiguous()]
    assert isinstance(GU, Pair) or GU.data_ptr() == both.data_ptr()
    return found + [GU] * isinstance(GU, Pair)


PROJECT = KernelCase(
    "projection", _project, lambda i, minus=-1.0: [i["G"] @ i["U"], i["M"] @ i["U"]],
    {"G": "mn", "M": "mn", "U": "nr"}, lambda s: [(s.n + 1, 1)] * 2,
    # Those of training in full and in half precision, and mixtures.
    dtypes=(
        (SINGLE,) * 3, (HALF, SINGLE, SINGLE), (BF16, SINGLE, SINGLE), (HALF,) * 3, (SINGLE, HALF, BF16), (DOUBLE,) * 3,
        (HALF, SINGLE, DOUBLE),
    ),
    tiles={SINGLE: project.TILES, DOUBLE: project.TILES_FP64},
)  # fmt: skip
PAIRED_PROJECT = replace(
    PROJECT, name="projection onto a pair", inputs={"G": "mn", "M": "mn", "U": "nr pair"},
    form=lambda i, minus=-1.0: [i["G"] @ i["U"], i["M"] @ i["U"], i["G"] @ i["U"]],
    roundings=lambda s: [(s.n + 1, 1)] * 3,
    dtypes=((SINGLE, SINGLE), (BF16, SINGLE), (SINGLE, BF16), (BF16, BF16)), tiles={SINGLE: project.TILES_PAIR},
   
)  # fmt: skip


def _lookahead(i: Inputs, minus: float = -1.0) -> list[Tensor]:
    G, (g, a, b) = live(i["G"] if i.get("scale") is None else column(i["scale"]) * i["G"], i), i["weights"]
    new = i["momentum"] * i["M"] + g * G
    kept = new if i.get("active") is None else torch.where(i["active"][:, None, None], new, i["M"])
    if i.get("G_par") is None:
        return [kept]
    G_hat = a * G + b * new
    residual = G_hat + minus * i["G_par"] @ i["U"].mT
    X = i["rows"][:, :, None] * residual
    return [kept, X, *map(squares, (X, residual, G_hat))]


def _momentum(**i: Any) -> list[Tensor | Pair]:
    X, norms = momentum.momentum(**i)
    return [i["M"], *([] if X is None else [X, *map(total, norms.unbind(1))])]


def _of_momentum(s: Sizes) -> Roundings:
    """r products and sums, then at most 8 operations with scalars; a square doubles an error, its sum adds 22 eps."""
    return [(5, 0), (s.r + 9, 1), (2 * (s.r + 9) + 22, 2), (2 * (s.r + 8) + 22, 2), (32, 0)]


MOMENTUM = KernelCase(
    "momentum", _momentum, _lookahead,
    {
        "G": "mn", "M": "mn", "G_par": "mr", "U": "nr", "rows": "m+", "momentum": 0.95, "weights": (0.3, 0.7, 0.9),
        "scale": ".+",
    },
    _of_momentum,
    dtypes=(
        (SINGLE,) * 6, (HALF, SINGLE, SINGLE, SINGLE, HALF), (BF16, SINGLE, SINGLE, BF16, SINGLE),
        (HALF, HALF, SINGLE, HALF, DOUBLE), (DOUBLE,) * 6, (HALF, SINGLE, DOUBLE, SINGLE, SINGLE),
    ),
    variants=({"active": "?"}, {"scale": None}, {}, {"G_par": None, "active": "?"}, {"weights": (0.05, 0.0, 1.0)}),
    tiles={SINGLE: momentum.TILES, DOUBLE: momentum.TILES_FP64},
    tile_of=lambda t: Sizes(2, t.m + 3, 2 * t.n + 5, t.k + 2), written="M", unread=("G",),
)  # fmt: skip
PAIRED_MOMENTUM = replace(
    MOMENTUM, name="momentum of pairs",
    inputs={**MOMENTUM.inputs, "G_par": "mr pair", "U": "nr pair", "weights": (1.0, 1.0, 0.9)}, dtypes=((SINGLE,),),
    variants=({}, {"scale": None}, {"pair": True}), tiles={SINGLE: momentum.TILES_HALF},
)  # fmt: skip


# Weights and gradients, which are found by their addresses


def _table(W: Tensor) -> Tensor:
    table = PointerTable(len(W), DEVICE)
    table.update([W], [len(W)])
    return table.table


def _stack(W: Tensor, **i: Any) -> list[Tensor | Pair]:
    G, energy = stack(_table(W), *W.shape[1:], dtype=W.dtype, **i)
    return [G, total(energy)]


def _apply(W: Tensor, X: Tensor | None = None, **i: Any) -> list[Tensor | Pair]:
    apply.apply(_table(W), X, **({"dtype": W.dtype} | i))
    return [W]


def _stepped(i: Inputs, minus: float = -1.0) -> list[Tensor]:
    lr, X, left = column(i["lr"]), i.get("X"), i.get("left")
    D = 0.0 if X is None else X
    D = D if i.get("scale") is None else column(i["scale"]) * D
    D = D if left is None else D + left @ i["right"].mT
    new = (1 + minus * lr * column(i["weight_decay"])) * i["W"] + minus * lr * D
    return [new if i.get("active") is None else torch.where(i["active"][:, None, None], new, i["W"])]


STACK = KernelCase(
    "stack", _stack, lambda i, minus=-1.0: [(minus if i.get("negate") else 1.0) * i["W"], squares(i["W"])],
    {"W": "mn"}, lambda s: [(0, 0), (24, 0)], dtypes=((SINGLE,), (HALF,), (BF16,), (DOUBLE,)),
    variants=({}, {"negate": True}), tiles={DOUBLE: (*TILES_OF_STACK, Tile(16, 32, 1, 4, 1), Tile(128, 16, 1, 4, 1))},
    tile_of=lambda t: Sizes(2, t.m + 3, 2 * t.n + 5, 1), stored=lambda i: i["W"].dtype,
)  # fmt: skip
PAIRED_STACK = replace(
    STACK, name="stack of pairs", dtypes=((SINGLE,),), variants=({"pair": True}, {"pair": True, "negate": True}),
    tiles={}, stored=None,
)  # fmt: skip
ALL = {"X": "mn", "scale": ".", "left": "mr", "right": "nr"}
NONE = dict.fromkeys(ALL)
APPLY = KernelCase(
    "apply", _apply, _stepped, {"W": "mn", **ALL, "lr": ".+", "weight_decay": ".+"},
    # A sum of r products, and 10 roundings of scale, lr, decay and the last sum.
    lambda s: [(s.r + 10, 1)],
    dtypes=(
        (SINGLE,) * 5, (HALF, HALF, SINGLE, SINGLE, SINGLE), (DOUBLE,) * 7, (BF16,) + (SINGLE,) * 4,
        (DOUBLE, HALF, SINGLE, SINGLE, SINGLE), (HALF, DOUBLE, SINGLE, SINGLE, SINGLE),
        (SINGLE, SINGLE, DOUBLE, DOUBLE, DOUBLE), (SINGLE,) + (HALF,) * 4,
        (DOUBLE, SINGLE, BF16, BF16, BF16), (SINGLE, HALF, SINGLE, SINGLE, HALF),
    ),
    variants=({}, {"active": "?"}, {"scale": None}, NONE | {"X": "mn"}, {"left": None, "right": None},
              {"X": None, "scale": None}),
    tiles={HALF: apply.TILES_HALF, SINGLE: apply.TILES_FP32, DOUBLE: apply.TILES_FP64},
    tile_of=lambda t: Sizes(2, t.m + 6, t.n + 3, t.k + 5), stored=lambda i: i["W"].dtype, written="W",
    unread=(*ALL,),
)  # fmt: skip


# Elementwise ones, and the decision


def _weigh(**i: Any) -> list[Tensor | Pair]:
    G_par, T, *others = weigh.weigh(**i)
    return [G_par, *others] if T is None else [G_par, *others, T[0], total(T[1]).to(i["G"].dtype)]


def _weighed(i: Inputs, minus: float = -1.0) -> list[Tensor]:
    (g, b), rows, c = i["weights"], i["rows"][:, :, None], i.get("scale")
    g = g if c is None else g * column(c)
    Z = rows * i["G"]
    found = [g * i["G"] + b * i["M"], i["A"] * i["columns"][:, None, :], Z, rows * Z]
    if i["Q"] is None:
        return found
    half = (g * i["A"] + b * i["B"]) * i["used"][:, None, :]
    T = i["alpha"] * i["used_rows"][:, :, None] * (half @ i["Q"].mT)
    return [*found, T, T.square().sum(dim=-1)]


EVERY_DTYPE = tuple((dtype,) * 10 for dtype in (SINGLE, HALF, BF16, DOUBLE))
WEIGH = KernelCase(
    "weigh", _weigh, _weighed,
    {
        "G": "mr", "M": "mr", "A": "mr", "B": "mr", "rows": "m", "columns": "r", "used": "r", "used_rows": "m",
        "Q": "rr", "scale": ".", "alpha": -0.7, "weights": (0.3, -1.7),
    },
    # A square doubles an error, and is rounded to the gradient's dtype here.
    lambda s: [(4, 0), (1, 0), (1, 0), (2, 0), (s.r + 9, 1), (2 * s.r + 20, 2)], dtypes=EVERY_DTYPE,
    variants=({}, {"scale": None}, {"Q": None}), tiles={SINGLE: weigh.TILES, DOUBLE: weigh.TILES_FP64},
    tile_of=lambda t: Sizes(2, t.m + 3, 1, t.n + 2 * t.k + 5), stored=lambda i: arithmetic(i),
)  # fmt: skip
PAIRED_WEIGH = replace(WEIGH, name="weigh and split", dtypes=((SINGLE,) * 10,), variants=({"pair": True},), tiles={})


def flat(admitted: Admitted) -> dict[str, Tensor]:
    """Every tensor of a decision by its name."""
    found = {}
    for name, value in admitted._asdict().items():
        if isinstance(value, Roots):
            found |= {f"{name}.{key}": t for key, t in value._asdict().items()}
        elif isinstance(value, dict):
            found |= value
        elif value is not None:
            found[name] = value
    return found


def numbers(admitted: Admitted) -> list[Tensor]:
    return [t.float() if t.dtype == torch.bool else t for t in flat(admitted).values()]


TRITON = TritonAlgebra(use_cuda_qr=False, host_readable=launch.INTERPRETED)


def decided(function: Callable[..., Admitted], i: Inputs, kappa: float | None = 5.0) -> Admitted:
    """Return what ``function`` decides of a gradient, A to e_res; the state is all else but n, and M has its dtype."""
    h = SimpleNamespace(clip_threshold=kappa, beta2=0.95, eps=1e-3)
    state = {k: v for k, v in i.items() if k not in ("A", "G_tilde", "e_res", "n", "M")}
    state["M_Q"] = torch.zeros(0, dtype=i.get("M", SINGLE))
    return function(i["A"], i["G_tilde"], i["e_res"], state, h, i["n"])


def _decision(i: Inputs, minus: float = -1.0) -> list[Tensor]:
    return numbers(decided(evidence.admit, i))


ADMIT = KernelCase(
    "admit", lambda **i: numbers(decided(TRITON.admit, i)), _decision,
    {
        "A": "mr", "G_tilde": "mr", "e_res": "m+", "inv_sqrt_lambda_L": "m+", "inv_sqrt_lambda_S": "r+",
        "inv_sqrt_mu": ".+", "lambda_0": ".+", "n": lambda s: s.n + s.r,
    },
    lambda s: [(1, 0)] * 14, dtypes=((SINGLE,) * 7, (BF16, BF16, BF16, SINGLE, SINGLE, SINGLE, SINGLE)),
)  # fmt: skip

SUM_CASES = (
    PRODUCT, PAIRED_PRODUCT, SPLIT_PRODUCT, RESIDUAL, PAIRED_RESIDUAL, BOUNDED, PAIRED_BOUNDED, SYMMETRIC, POLYNOMIAL,
    SHIFTED, EXTRAPOLATED, PAIRED_SYMMETRIC, PROJECT, PAIRED_PROJECT, MOMENTUM, PAIRED_MOMENTUM, STACK, APPLY,
    WEIGH, PAIRED_WEIGH, PAIRED_POLYNOMIAL, PAIRED_STACK, TWO_SYMMETRIC, TURN,
)  # fmt: skip
"""Kernels whose rounding follows from their form."""
EVERY = (*SUM_CASES, ADMIT)
