"""The kernels, each as a step calls it through the operations or a bucket's I/O: to compile, check and time them.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.micro.case import (
    BF16,
    BF16_STATE,
    FP16,
    FP32,
    FP32_POLAR,
    FP64,
    Case,
    Inputs,
    Parts,
    call,
    over,
    tensors,
)
from bench.micro.io import KL_STEPPED, LR, STEPPED, WEIGHT_DECAY, apply_case, stack_case, store_case, usable_case
from bench.micro.states import NS_COEFFICIENTS, NS_STEPS, SPECIFIED, H, basis, settings
from prokl.algorithm.algebra import Algebra, Direction, Factor, Projected
from prokl.algorithm.evidence import Admitted, Roots
from prokl.algorithm.newton_schulz import newton_schulz
from prokl.algorithm.shapes import compute_dtype
from prokl.kernels import admit, momentum, product, project, split, triangle, turn, weigh
from prokl.pair import Operand, Pair, parts

BOTH = (FP32, BF16)
STATES = (FP32, BF16_STATE, FP64)
"""Dtypes of operations that read the momentum."""
GRAM: dict[str, Any] = {"dtypes": (FP32, FP32_POLAR), "timed": (FP32,), "module": triangle}
GRAM |= {"operand": "polar", "polar": True}
"""Settings of Newton-Schulz's products of Gram matrices."""
PAIRED: dict[str, Any] = {"balanced": True, "timed": (FP32,)}
POLAR: dict[str, Any] = {"dtype": lambda s, d: d.polar}
"""Settings of Newton-Schulz's other products."""
POLAR_OF: dict[str, Any] = {"polar": lambda s, d: d.polar}
"""The dtype of the low-rank part of the update."""
WEIGHED = ("G mr", "M mr", "A mr", "B mr", "Q_S rr", "rows m+", "columns r+")


def product_case(name: str, operands: str, more: tuple[str, ...] = (), **fields: Any) -> Case:
    """Return A B, or A A^T where there is one operand; ``more`` are other tensors that it takes."""
    specs = [f"{letter} {spec.strip()}" for letter, spec in zip("AB", operands.split(","), strict=False)]
    scales: dict[str, Any] = {} if "alpha ." in more or not more else {"alpha": 0.05, "beta": 0.95}
    name_of, module = ("product", product) if len(specs) == 2 else ("symmetric_product", triangle)
    bind = call(name_of, *"AB"[: len(specs)])
    own = {"module": module, "balanced": " pair" in operands} | fields
    return Case(name, tensors(*specs, *more, **scales), bind, **own)


def symmetric_L_case(name: str, of: str = "", **fields: Any) -> Case:
    """Return the EMA of L from G_perp and from the whitened gradient on the subspace; ``of`` is the factors' dtype."""
    inputs = tensors(f"A mn{of}", f"E mr{of}", "C mm~", "alpha .+", gamma=0.05, beta=0.95)
    return Case(name, inputs, call("symmetric_products", "A", "E"), module=triangle, **fields)


def deep(left: Operand, right: Operand) -> tuple[Tensor, Tensor]:
    """Return bfloat16 factors, one beside the other, whose one product is that of pairs: [lo, hi, hi] [hi; lo; hi]."""
    lefts, rights = zip(*parts(left, right), strict=True)
    return torch.cat(lefts, dim=-1), torch.cat(rights, dim=-2)


def _at_library_s_rate(i: Inputs) -> Callable[[], Tensor]:
    """Multiply the factors that lie deep, as who makes them would store them; scales and C follow in PyTorch."""
    left, right = deep(i["A"], i["B"] if "B" in i else i["A"].mT)
    C, alpha, beta = i.get("C"), i.get("alpha", 1.0), i.get("beta", 1.0)
    if C is None:
        return lambda: torch.bmm(left, right, out_dtype=torch.float32)
    if isinstance(alpha, Tensor):
        return lambda: torch.bmm(left, right, out_dtype=torch.float32).mul_(alpha[:, None, None]).add_(C, alpha=beta)
    return lambda: torch.baddbmm(C, left, right, out_dtype=torch.float32, alpha=alpha, beta=beta)


LIBRARY: dict[str, Any] = {"library": _at_library_s_rate, "timed": (FP32,)}


def newton_schulz_case(gram: bool | None, **fields: Any) -> Case:
    """Return Newton-Schulz in either form, or (None) in the one that a step takes."""

    def bind(i: Inputs, ops: Algebra) -> Callable[[], Direction]:
        X, scale = i["X"], _inverse_norm(i["X"])
        ones = torch.ones_like(scale)
        if ops.name != "triton":  # as its momentum does
            X, scale = X * scale.to(X.dtype)[:, None, None], None

        def run() -> Direction:
            return Direction(*newton_schulz(X, scale, ones, [NS_COEFFICIENTS] * NS_STEPS, ops, gram=gram))

        return run

    name = "newton_schulz " + ("gram" if gram else "standard")
    return Case(name, tensors("X mn polar"), bind, polar=True, timed=(FP32,), **fields)


def _inverse_norm(X: Tensor) -> Tensor:
    return 1 / torch.linalg.vector_norm(X, dim=(-2, -1), dtype=compute_dtype(X.dtype))


def _polynomial(ops: Algebra, R: Tensor, shift: float | None = None) -> Tensor:
    _, b, c = NS_COEFFICIENTS
    return ops.symmetric_polynomial(R, R, C=R, alpha=c, beta=b, shift=shift)


def _shifted_polynomial(ops: Algebra, R: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = NS_COEFFICIENTS
    return ops.shifted_polynomial(R, R, C=R, alpha=c, beta=b, shift=a)


def _turned(ops: Algebra, Q: Factor, G: Tensor) -> Tensor:
    return ops.product(Q.mT, G if ops.name == "triton" else G.to(compute_dtype(G.dtype)))


def _residual(ops: Algebra, G: Tensor, G_tilde: Tensor, U: Factor) -> list[Any]:
    G_perp, energies = ops.residual(G, G_tilde, U)
    return [G_perp, Parts(energies)]


def _weighed(
    ops: Algebra, Q_S: Tensor, rows: Tensor, columns: Tensor, scale: Tensor | None = None, **i: Tensor
) -> list[Any]:
    used = Roots(rows, columns, rows[:, 0])
    admitted = Admitted(scale, used, used, rows, columns, rows[:, 0], {}, None, None)
    G_par, T, *others = ops.subspace_parts(Projected(*(i[key] for key in "GMABG")), admitted, H, Q_S, 0.7)
    return [G_par, T[0] if ops.name == "triton" else ops.operand(T), *others]


def _bounded_product(i: Inputs, ops: Algebra) -> Callable[[], list[Any]]:
    T = i["T"]
    given = {"largest": 1.0, "bounded": i.get("bounded"), "clipped": i["rows"][:, 0], "dtype": i["polar"]}
    if ops.name != "triton":
        return lambda: [*ops.bounded_product(i["left"], T.clone(), **given)]
    energies = T.double().square().sum(dim=-1)[:, None]
    T = Pair.split(T) if i["left"].dtype == torch.bfloat16 else T
    return lambda: [*ops.bounded_product(i["left"], (T, energies), **given)]


def _momentum(
    variant: str = "pro-klshampoo", scaled: bool = True, active: bool = False, pair: bool = False, **fields: Any
) -> Case:
    of_pair = " pair" * pair
    specs = ["G mn", "M mn momentum", f"G_par mr{of_pair}", f"U nr{of_pair}", "a_L m+"]
    inputs = tensors(*specs, *["scale .+"] * scaled, *["active .?"] * active, **POLAR)

    def bind(i: Inputs, ops: Algebra) -> Callable[[], list[Any]]:
        a_L, h = i["a_L"], settings(variant=variant, ns_dtype=i["dtype"])
        aspect_scale = a_L[:, 0].clone()
        roots = Roots(a_L, a_L, a_L[:, 0])
        admitted = Admitted(i.get("scale"), roots, roots, a_L, a_L, a_L[:, 0], {}, None, None)

        def run() -> list[Any]:
            M, X, scale = ops.momentum(i["G"], i["M"], i["G_par"], i["U"], admitted, h, i.get("active"))
            if variant != "pro-klshampoo":
                return [M] if X is None else [M, X]
            R, _, size = ops.normalised_gram(X, scale, aspect_scale)
            return [M, R, Direction(X, size)]

        return run

    name = (
        f"momentum, {variant}"
        + " and Gram matrix" * (variant == "pro-klshampoo")
        + " without bound" * (not scaled)
        + " active" * active
        + " of pairs" * pair
    )
    own = {"module": momentum, "balanced": pair, "polar": variant == "pro-klshampoo"} | fields
    return Case(name, inputs, bind, **own)


def _symmetric_RQ(i: Inputs, ops: Algebra) -> Callable[[], Tensor]:
    Q, R = ops.operand(i["Q"]), ops.operand(i["Q"].mT @ i["L"])
    return lambda: ops.symmetric_polynomial(R, Q.mT)


def _admit(ops: Algebra, A: Tensor, G_tilde: Tensor, e_res: Tensor, **state: Tensor) -> Admitted:
    return ops.admit(A, G_tilde, e_res, state, H, 1 << 12)


KERNELS: tuple[Case, ...] = (
    # A balanced step's own, the default of a GPU.
    product_case("product Q^T G of pairs", "mmT pair, mn pair", operand="pair", timed=(FP32,)),
    Case("product Q^T G in bfloat16 of pairs", tensors("A mmT pair", "B mn weights"), call("product", "A", "B"),
         dtypes=(BF16,), module=product, balanced=True, **LIBRARY | {"timed": (BF16,)}),
    Case("projections of pairs", tensors("G mn", "M mn momentum", "U nr pair", "Q_S rr"),
         call("projections", "G", "M", "U", "Q_S"), dtypes=(FP32, BF16_STATE), module=project, operand="pair",
         narrow=True, **PAIRED),
    Case("residual of pairs", tensors("G mn", "G_tilde mr pair", "U nr pair"), over(_residual),
         module=product, operand="pair", **PAIRED),
    Case("weigh and split", tensors(*WEIGHED, "scale ."), over(_weighed), module=weigh, operand="arithmetic", **PAIRED),
    Case("weigh and split without bound", tensors(*WEIGHED), over(_weighed), module=weigh, balanced=True),
    _momentum(pair=True, dtypes=(FP32, BF16_STATE, FP32_POLAR), timed=(FP32,), operand="pair"),
    _momentum(pair=True, active=True),
    _momentum(pair=True, scaled=False),
    _momentum("smok-hop", pair=True, operand="pair"),
    product_case("product of pairs", "mm pair, mr pair", operand="pair", **LIBRARY),
    Case("product as a pair", tensors("A mmT pair", "B mm pair"), call("product_as_factor", "A", "B"), module=product,
         **PAIRED),
    Case("product W as a pair", tensors("A mm pair", "B mm pair"), call("product_as_factor", "A", "B"), module=product,
         balanced=True),
    product_case("product Q X of pairs", "mm pair, mn pair", **LIBRARY),
    product_case("product V of a pair", "nmT polar, mr pair", ("C nr",), operand="pair", **LIBRARY | PAIRED),
    symmetric_L_case("symmetric L in bfloat16", " polar", operand="pair", **PAIRED),
    product_case("symmetric Q^T Q of pairs", "mmT pair", **LIBRARY),
    Case("symmetric R Q of pairs", tensors("Q mm", "L mm~"), _symmetric_RQ, module=triangle, **PAIRED),
    Case("bounded product of a pair", tensors("left mm polar", "T mr", "rows m+", "bounded .?", **POLAR_OF),
         _bounded_product, module=product, **PAIRED),
    Case("product of a pair, not bounded", tensors("left mm polar", "T mr", "rows m+", **POLAR_OF),
         _bounded_product, module=product, balanced=True),
    stack_case("stack of pairs", False, **PAIRED),
    Case("split", tensors("x mr"), lambda i, ops: lambda: ops.operand(i["x"]), module=split, **PAIRED),
    Case("split two", tensors("x nr", "y mm"), call("operands", "x", "y"), module=split, **PAIRED),
    apply_case("X scale left right active", half=True, timed=(FP32,), operand="polar"),
    apply_case("X scale left right active", "stochastic", half=True, dtypes=(BF16,)),
    # Every step's, and a faithful one's in the place of those.
    stack_case("stack", False, dtypes=(FP32, BF16, FP16, FP64), timed=BOTH, operand="weights"),
    stack_case("stack negated", True),
    usable_case("usable, of a stack"),
    Case("product Q^T G", tensors("Q mm", "G mn weights"), over(_turned),
         dtypes=(FP32, BF16, FP64), timed=BOTH, module=product, operand="arithmetic"),
    Case("projections", tensors("G mn", "M mn momentum", "U nr", "Q_S rr"),
         call("projections", "G", "M", "U", "Q_S"), dtypes=STATES, timed=(FP32,), module=project, operand="arithmetic",
         narrow=True),
    Case("residual", tensors("G mn", "G_tilde mr", "U nr"), over(_residual),
         dtypes=(FP32, FP64), timed=(FP32,), module=product),
    Case("admit kernel",
         tensors("A mr", "G_tilde mr", "e_res 6m+", "M_Q . momentum",
                 "inv_sqrt_lambda_L m+", "inv_sqrt_lambda_S r+", "inv_sqrt_mu .+", "lambda_0 .+"),
         over(_admit), dtypes=(FP32, FP64, BF16_STATE), timed=(FP32,), module=admit),
    Case("weigh", tensors(*WEIGHED, "scale ."), over(_weighed), dtypes=(FP32, FP64), timed=(FP32,), module=weigh,
         operand="arithmetic"),
    Case("weigh without bound", tensors(*WEIGHED), over(_weighed), module=weigh),
    _momentum(dtypes=STATES, timed=(FP32,), operand="arithmetic"),
    _momentum(active=True),
    _momentum(scaled=False),
    _momentum("subspace-only"),
    _momentum("smok-hop"),
    Case("bounded product", tensors("left mm", "T mr", "rows m+", "bounded .?", **POLAR_OF),
         _bounded_product, dtypes=(FP32, FP32_POLAR, FP64), timed=(FP32,), module=product),
    Case("product, not bounded", tensors("left mm", "T mr", "rows m+", **POLAR_OF), _bounded_product,
         module=product),
    product_case("product", "mm, mr", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    product_case("product B^T", "mr, rrT"),
    product_case("product V", "nmT, mr", ("C nr",), timed=(FP32,)),
    product_case("product U^T U", "rnT, nr", timed=(FP32,)),
    symmetric_L_case("symmetric L", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    Case("symmetric S and K", tensors("A rmT", "C rr~", alpha=0.05, beta=0.95, ahead=0.95), call("extrapolated", "A"),
         dtypes=(FP32, FP64), timed=(FP32,), module=triangle),
    Case("turn S and Q_S", tensors("T rr", "S rr~", "Q_S rr"), call("turned", "T", "S", "Q_S"), dtypes=(FP32, FP64),
         timed=(FP32,), module=turn, operand="arithmetic"),
    # Products of tracking and refreshes: columns times an inverse factor, their Gram matrix, what turns with a basis.
    product_case("product V F", "nr, rr", ("alpha .",), timed=(FP32,)),
    product_case("symmetric W", "rnT", timed=(FP32,)),
    Case("orthonormal", lambda s, d, draw: {"Q": basis(s.m, s.m, s.B, draw)[1].to(d.arithmetic)},
         call("orthonormal", "Q"), timed=(FP32,), module=product),
    product_case("product Q^T M", "mmT, mn", timed=(FP32,)),
    Case("symmetric R Q", tensors("Q mm", "L mm~"), _symmetric_RQ, timed=(FP32,), module=triangle),
    Case("symmetric X", tensors("X mn polar", "alpha .+"), call("symmetric_product", "X"), **GRAM),
    Case("symmetric polynomial", tensors("R mm~ polar"), over(_polynomial), **GRAM),
    Case("polynomial", tensors("R mm~ polar"), over(partial(_polynomial, shift=NS_COEFFICIENTS[0])), **GRAM),
    Case("shifted polynomial", tensors("R mm~ polar"), over(_shifted_polynomial), **GRAM),
    newton_schulz_case(False, dtypes=(FP32, FP32_POLAR), module=triangle),
    newton_schulz_case(True, dtypes=(FP32, FP32_POLAR), module=triangle),
    apply_case("X scale left right", dtypes=(FP32, BF16, FP32_POLAR, FP64), timed=BOTH, operand="arithmetic"),
    apply_case("X scale left right active"),
    apply_case("X scale left right", "stochastic", dtypes=(BF16,), operand="arithmetic"),
    apply_case("X scale left right", "master", dtypes=(BF16,), operand="arithmetic"),
    apply_case("X scale"),
    apply_case("left right"),
    apply_case("X scale left right", cautious=True, dtypes=(FP32, BF16, FP32_POLAR, FP64)),
    apply_case("X", after=True, dtypes=(FP32_POLAR, BF16, FP64)),
    apply_case("X", after=True, cautious=True, dtypes=(FP32_POLAR, BF16, FP64)),
    store_case("store", STEPPED, "ae", dtypes=(FP32, BF16_STATE), timed=(FP32,)),
    store_case("store bases", "M_Q L_Q Q_L Q_S", "a", dtypes=(FP32, BF16_STATE)),
    # KL-Shampoo's.
    store_case("store of KL-Shampoo", KL_STEPPED, "ae", dtypes=(FP32, BF16_STATE)),
    store_case("store bases of KL-Shampoo", "M_Q L_Q R_Q Q_L Q_R", "a", dtypes=(FP32, BF16_STATE)),
    apply_case("X active", after=True, dtypes=(FP32_POLAR,)),
    apply_case("X active", "stochastic", after=True, dtypes=(replace(BF16, polar=torch.float32),)),
    product_case("product by Q_R of pairs", "mn, nn pair"),
    product_case("product by Q_R^T of pairs", "mn, nnT pair"),
    product_case("symmetric L of KL-Shampoo of pairs", "mn pair", ("C mm~",), **LIBRARY),
    product_case("symmetric R of pairs", "nmT pair", ("C nn~",)),
    product_case("symmetric R", "nmT", ("C nn~",)),
)  # fmt: skip


def _normalised(i: Inputs) -> Tensor:
    """Orthogonalise X (B,m,n) as printed."""
    X, (a, b, c) = i["X"] * _inverse_norm(i["X"]).to(i["X"].dtype)[:, None, None], NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def _applied(i: Inputs) -> list[Tensor]:
    D = i["scale"][:, None, None] * i["X"] + i["left"] @ i["right"].mT
    return [(1 - LR * WEIGHT_DECAY) * W - LR * own for W, own in zip(i["weights"], D, strict=True)]


PRIMITIVES = (
    replace(newton_schulz_case(None), name="Newton-Schulz", plain=_normalised),
    replace(
        apply_case("X scale left right", timed=(FP32,), plain=_applied, counterpart=apply_case("X scale")), name="apply"
    ),
    product_case(
        "symmetric product", "mn", timed=(FP32,), plain=lambda i: i["A"] @ i["A"].mT,
        counterpart=product_case("symmetric product of the long side", "nmT", ("C nn~",)),
    ),
    *SPECIFIED,
)  # fmt: skip
"""Timed on every device, each beside its formula as it is printed."""
