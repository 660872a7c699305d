"""The kernels, each as a step calls it through the primitives or a bucket's I/O: to compile, check and time them.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from collections.abc import Callable
from dataclasses import replace
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
    Draw,
    Dtypes,
    Inputs,
    Sizes,
    tensors,
)
from bench.micro.stages import NS_COEFFICIENTS, NS_STEPS, H
from prokl.algorithm import counts
from prokl.algorithm.newton_schulz import newton_schulz_factors, use_gram
from prokl.algorithm.primitives import Direction, Primitives
from prokl.algorithm.shapes import MatrixShape, compute_dtype
from prokl.backends.io import BucketIO, Layout, Member, TorchIO
from prokl.backends.rounding import Rounding, mode_of
from prokl.backends.triton_ops import TritonIO
from prokl.kernels import (
    apply,
    eigenvalue_ema,
    momentum,
    precondition,
    product,
    project,
    split,
    stack,
    symmetric_product,
)
from prokl.pair import Operand, Pair

LR, WEIGHT_DECAY = 1e-3, 0.1
BOTH = (FP32, BF16)
STORED = (FP32, BF16, BF16_STATE, FP64)
FACTORS = ("X mn polar", "Q mm polar", "scale .", "left mr", "right nr", "active .?")
"""Of a direction, and which matrices step."""
Bind = Callable[[Inputs, Primitives], Callable[[], Any]]


def arithmetic(t: Operand) -> torch.dtype:
    """Return the dtype of a tensor, or that of which a pair holds the halves."""
    return torch.float32 if isinstance(t, Pair) else t.dtype


def call(name: str, *arguments: str) -> Bind:
    """Return what binds the primitive ``name`` to these inputs in order, and to all others by name.

    A bucket's I/O gives gradients G in the weights' dtype to Triton alone, to others in the arithmetic one.
    """

    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        if "G" in i and ops.name != "triton":
            i = i | {"G": i["G"].to(arithmetic(i["U"]))}
        given = [i[key] for key in arguments]
        rest = {key: value for key, value in i.items() if key not in arguments}
        return lambda: getattr(ops, name)(*given, **rest)

    return bind


def matrices(factors: str = "", half: bool = False) -> Callable[[Sizes, Dtypes, Draw], Inputs]:
    """Return what draws separate weights, and those factors of a direction that are named; left and right in half."""
    specs = [spec for spec in FACTORS if spec.split()[0] in factors.split()]
    drawn = tensors(*(f"{spec} polar" if half and spec in ("left mr", "right nr") else spec for spec in specs))

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {"weights": [draw(s.m, s.n, dtype=d.weights) for _ in range(s.B)], **drawn(s, d, draw)}

    return inputs


def io(i: Inputs, ops: Primitives, mode: str = "plain") -> BucketIO:
    """Return a bucket's I/O on these weights, which are their own gradients; ``mode`` rounds bfloat16 ones."""
    parameters = [torch.nn.Parameter(W, requires_grad=False) for W in i["weights"]]
    for p, W in zip(parameters, i["weights"], strict=True):
        p.grad = W
    W = parameters[0]
    members = [Member(p, "", MatrixShape(1, *W.shape), range(b, b + 1)) for b, p in enumerate(parameters)]
    layout = Layout(len(members), *W.shape, compute_dtype(W.dtype), W.dtype, W.device)
    mode = mode_of({"bf16_weights": mode}, W.dtype)
    rounding = Rounding(mode, ["weight"] * len(members), [member.weight() for member in members])
    found: BucketIO = (TritonIO if ops.name == "triton" else TorchIO)(members, layout, rounding)
    found.locate(replace(H, lr=LR, weight_decay=WEIGHT_DECAY))
    return found


def _stack(negate: bool) -> Bind:
    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        own, dtype = io(i, ops), i["weights"][0].dtype
        return lambda: [t.to(dtype) if t.ndim == 3 else t for t in own.gather(negate)]

    return bind


def _apply(mode: str = "plain", **decay: bool) -> Bind:
    def bind(i: Inputs, ops: Primitives) -> Callable[[], list[Tensor]]:
        own, direction = io(i, ops, mode), Direction(*(i.get(spec.split()[0]) for spec in FACTORS[:5]), **decay)

        def run() -> list[Tensor]:
            own.apply(direction, range(len(i["weights"])), i.get("active"))
            weights: list[Tensor] = i["weights"]
            return weights

        return run

    return bind


def apply_case(
    factors: str, mode: str = "plain", after: bool = False, cautious: bool = False, half: bool = False, **fields: Any
) -> Case:
    """Return W <- (1 - lr weight_decay) W - lr (scale Q X + left right^T), with those of the factors that are named."""
    Q, low_rank = "Q" in factors, "left" in factors
    name = f"apply {factors}" + " decay after" * after + " cautiously" * cautious
    polar = lambda s: 2.0 * s.m * s.m * s.n * Q  # noqa: E731
    flops = lambda s: polar(s) + 2 * s.m * s.n * (s.r * low_rank or 1)  # noqa: E731  (1: the step itself)
    name += f" {mode}" * (mode != "plain") + " low rank in half" * half
    bind = _apply(mode, decay_after=after, cautious_decay=cautious)
    return Case(name, matrices(factors, half), bind, flops, polar, module=apply, **fields)


def product_case(name: str, sides: str, operands: str, more: tuple[str, ...] = (), **fields: Any) -> Case:
    """Return A B of sides m, k and n, or A A^T of sides m and k; ``operands`` and ``more`` are their tensors."""
    specs = [f"{letter} {spec.strip()}" for letter, spec in zip("AB", operands.split(","), strict=False)]
    scales: dict[str, Any] = {} if "alpha ." in more or not more else {"alpha": 0.05, "beta": 0.95}
    name_of, module = ("product", product) if len(specs) == 2 else ("symmetric_product", symmetric_product)

    def flops(s: Sizes) -> float:
        m, k, *n = (getattr(s, side) for side in sides)
        return float(2 * m * k * n[0] if n else m * (m + 1) * k)

    bind = call(name_of, *"AB"[: len(specs)])
    return Case(name, tensors(*specs, *more, **scales), bind, flops, module=module, **fields)


def newton_schulz_case(gram: bool | None, **fields: Any) -> Case:
    """Return Newton-Schulz in either form, or (None) in the one that a step takes."""

    def form(m: int, n: int) -> bool:
        return use_gram(m, n) if gram is None else gram

    def bind(i: Inputs, ops: Primitives) -> Callable[[], Direction]:
        X, scale = i["X"], _inverse_norm(i["X"])
        if ops.name != "triton":  # as its whiten does
            X, scale = X * scale.to(X.dtype)[:, None, None], None

        def run() -> Direction:
            Q, Y, left = newton_schulz_factors(X, scale, NS_STEPS, NS_COEFFICIENTS, ops, gram=form(*X.shape[1:]))
            return Direction(Y, Q, left)

        return run

    def flops(s: Sizes) -> float:
        count = counts.newton_schulz_gram if form(s.m, s.n) else counts.newton_schulz_standard
        return sum(t.least for t in count(s.m, s.n, NS_STEPS))

    name = "newton_schulz " + ("gram" if gram else "standard")
    return Case(name, tensors("X mn polar"), bind, flops, flops, timed=(FP32,), **fields)


def _inverse_norm(X: Tensor) -> Tensor:
    return 1 / torch.linalg.vector_norm(X, dim=(-2, -1), dtype=compute_dtype(X.dtype))


def _whiten(i: Inputs, ops: Primitives) -> Callable[[], Direction]:
    def run() -> Direction:
        X, scale = ops.whiten(i["P"], i["G_perp"], torch.logical_not(i["active"]), i["dtype"])
        return Direction(X, None, scale)

    return run


def _polynomial(i: Inputs, ops: Primitives) -> Callable[[], Tensor]:
    R, (_, b, c) = i["R"], NS_COEFFICIENTS
    return lambda: ops.symmetric_polynomial(R, R, C=R, alpha=c, beta=b)


def _optional(active: bool, *specs: str, **constants: Any) -> Callable[[Sizes, Dtypes, Draw], Inputs]:
    """Return :func:`tensors` with ``active``, which is a tensor or None."""
    return tensors(*specs, "active .?", **constants) if active else tensors(*specs, active=None, **constants)


def _split(i: Inputs, ops: Primitives) -> Callable[[], Pair]:
    return lambda: (split.split if ops.name == "triton" else Pair.split)(i["x"])


def _project(active: bool, pair: bool = False, **fields: Any) -> Case:
    inputs = _optional(active, "G mn weights", "M mn momentum", "U nr" + " pair" * pair)
    name = "projection" + " active" * active + " of pairs" * pair
    bind = call("project", "G", "M", "U", "active")
    return Case(name, inputs, bind, lambda s: 4 * s.m * s.n * s.r, module=project, narrow=True, **fields)


def _residual(i: Inputs, ops: Primitives) -> Callable[[], Operand]:
    G = i["G"] if ops.name == "triton" else i["G"].to(arithmetic(i["U"]))
    return lambda: ops.product_operand(i["G_tilde"], i["U"].mT, C=G, alpha=-1.0)


def _row_energies(i: Inputs, ops: Primitives) -> Callable[[], Tensor]:
    G_perp = i["G_perp"]
    E = None if isinstance(G_perp, Pair) else ops.symmetric_product(G_perp)  # which pairs do without
    return lambda: ops.row_energies(i["Q"], G_perp, E)


def _momentum(hat: bool, scaled: bool, active: bool, pair: bool = False, **fields: Any) -> Case:
    specs = ["G mn weights", "M mn momentum", "U nr" + " pair" * pair, *["G_par mr"] * hat, *["scale .+"] * scaled]
    more = {name: None for name, given in (("G_par", hat), ("scale", scaled)) if not given}
    inputs = _optional(active, *specs, momentum=H.momentum, weights=H.gradient_weights, **more)
    bind = call("momentum", "G", "M", "G_par", "U", "momentum", "weights", "scale", "active")
    name = "momentum update" + " without G^" * (not hat) + " without bound" * (not scaled) + " active" * active
    name += " of pairs" * pair
    flops = lambda s: 2 * s.m * s.n * s.r if hat else 3 * s.m * s.n  # noqa: E731
    return Case(name, inputs, bind, flops, module=momentum, **fields)


def _eigenvalue_ema(active: bool, **fields: Any) -> Case:
    state = ("inv_sqrt_lambda_L m+", "inv_sqrt_lambda_S r+", "inv_sqrt_mu .+", "ell m+", "rho r+", "e_res m+")
    rest = ("eps .+", "ceiling_L .+", "ceiling_S .+", "ceiling_mu .+")
    inputs = _optional(active, *state, *rest, beta2=H.beta2, n=lambda s, d: s.n)
    bind, name = call("eigenvalue_ema", *(spec.split()[0] for spec in state)), "eigenvalue_ema" + " active" * active
    return Case(name, inputs, bind, lambda s: 12 * s.m + 6 * s.r, module=eigenvalue_ema, **fields)


KERNELS: tuple[Case, ...] = (
    Case(
        "stack", matrices(), _stack(False), lambda s: 2 * s.m * s.n,
        dtypes=(FP32, BF16, FP16, FP64), timed=BOTH, module=stack, operand="weights",
    ),
    Case("stack negated", matrices(), _stack(True), lambda s: 2 * s.m * s.n, module=stack),
    _project(active=False, dtypes=STORED, timed=BOTH, operand="arithmetic"),
    _project(active=True, dtypes=(BF16,)),
    _momentum(hat=True, scaled=True, active=False, dtypes=STORED, timed=BOTH, operand="arithmetic"),
    _momentum(hat=True, scaled=True, active=True, dtypes=(BF16,)),
    _momentum(hat=True, scaled=False, active=False, dtypes=(BF16,)),
    _momentum(hat=False, scaled=True, active=False, dtypes=(BF16,)),
    Case(
        "precondition", tensors("P mm", "G_par mr", "Q_S rr", "a_S r", alpha=0.01),
        call("precondition", "P", "G_par", "Q_S", "a_S"), lambda s: 2 * s.m * s.r * (s.m + 2 * s.r),
        dtypes=(FP32, FP64), timed=(FP32,), module=precondition, operand="arithmetic", narrow=True,
    ),
    # The products of the step: G_perp, those of r x r and m x r, X = P G^perp, the tracked basis.
    Case(
        "product G_perp", tensors("G mn weights", "G_tilde mr", "U nr"), _residual, lambda s: 2 * s.m * s.n * s.r,
        dtypes=(FP32, BF16, FP64), timed=BOTH, module=product,
    ),
    product_case("product", "mmr", "mm, mr", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    product_case("product A^T", "mmr", "mmT, mr"),
    product_case("product B^T", "mrr", "mr, rrT"),
    Case(
        "whiten", tensors("P mm", "G_perp mn", "active .?", dtype=lambda s, d: d.polar), _whiten,
        lambda s: 2 * s.m * s.m * s.n, timed=(FP32,), module=product,
    ),
    product_case("product V", "nmr", "nmT, mr", ("C nr", "alpha ."), timed=(FP32,)),
    # Of tracking and refreshes: columns times an inverse factor, their Gram matrix, Q^T L Q.
    product_case("product V F", "nrr", "nr, rr", ("alpha .",)),
    product_case("symmetric W", "rn", "rnT", timed=(FP32,)),
    Case(
        "congruence", tensors("L mm~", "Q mm"), call("congruence", "L", "Q"), lambda s: s.m * (3 * s.m + 1) * s.m,
        timed=(FP32,), module=symmetric_product,
    ),
    product_case(
        "product Q X", "mmn", "mm polar, mn polar", ("C mn polar", "alpha .", "beta ."),
        timed=(FP32,), operand="polar", polar_flops=lambda s: 2 * s.m * s.m * s.n,
    ),
    product_case("symmetric P", "mm", "mm", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    product_case("symmetric E", "mn", "mn", timed=(FP32,)),
    product_case("symmetric L", "mr", "mr", ("C mm~",)),
    product_case("symmetric sample", "rm", "rmT"),
    product_case("symmetric X", "mn", "mn polar", ("alpha .",), timed=(FP32,), operand="polar"),
    Case(
        "symmetric polynomial", tensors("R mm~ polar"), _polynomial,
        lambda s: s.m * (s.m + 1) * s.m, lambda s: s.m * (s.m + 1) * s.m,
        dtypes=(FP32, FP32_POLAR), timed=(FP32,), module=symmetric_product, operand="polar",
    ),
    newton_schulz_case(False, dtypes=(FP32, FP32_POLAR), module=symmetric_product),
    newton_schulz_case(True, dtypes=(FP32, FP32_POLAR), module=symmetric_product),
    apply_case("X Q scale left right", dtypes=(FP32, BF16, FP32_POLAR, FP64), timed=BOTH, operand="polar"),
    apply_case("X Q scale left right active"),
    apply_case("X Q scale left right", "stochastic", dtypes=(BF16,), operand="polar"),
    apply_case("X Q scale left right", "master", dtypes=(BF16,), operand="polar"),
    apply_case("X Q scale"),
    apply_case("X scale left right"),
    apply_case("left right"),
    apply_case("X Q scale left right", cautious=True, dtypes=(FP32, BF16, FP32_POLAR, FP64)),
    apply_case("X", after=True, dtypes=(FP32_POLAR, BF16, FP64)),
    apply_case("X", after=True, cautious=True, dtypes=(FP32_POLAR, BF16, FP64)),
    _eigenvalue_ema(active=False, dtypes=(FP32, FP64), timed=(FP32,)),
    _eigenvalue_ema(active=True),
    # What a balanced step takes instead.
    Case("split", tensors("x mn"), _split, lambda s: 2 * s.m * s.n, timed=(FP32,), module=split),
    _project(active=True, pair=True, dtypes=(FP32, BF16, BF16_STATE), timed=BOTH, operand="pair"),
    _momentum(
        hat=True, scaled=True, active=True, pair=True, dtypes=(FP32, BF16, BF16_STATE), timed=BOTH, operand="pair"
    ),
    Case(
        "product G_perp of pairs", tensors("G mn weights", "G_tilde mr pair", "U nr pair"), _residual,
        lambda s: 2 * s.m * s.n * s.r, dtypes=(FP32, BF16), timed=BOTH, module=product,
    ),
    Case(
        "row energies of pairs", tensors("Q mm", "G_perp mn pair"), _row_energies,
        lambda s: 2 * s.m * s.m * s.n, timed=(FP32,), module=product,
    ),
    Case(
        "whiten of pairs", tensors("P mm pair", "G_perp mn pair", "active .?", dtype=lambda s, d: d.polar), _whiten,
        lambda s: 2 * s.m * s.m * s.n, dtypes=(FP32, FP32_POLAR), timed=(FP32,), module=product,
    ),
    apply_case("X Q scale left right active", half=True),
    apply_case("X Q scale left right active", "stochastic", half=True, dtypes=(BF16,)),
    apply_case("X scale left right active", half=True),
    apply_case("X scale left right active", "stochastic", half=True, dtypes=(BF16,)),
    product_case("product of pairs", "mmr", "mm pair, mr pair", timed=(FP32,), operand="pair"),
    product_case("product V of pairs", "nmr", "nmT pair, mr pair", ("C nr", "alpha ."), timed=(FP32,), operand="pair"),
    product_case("symmetric E of pairs", "mn", "mn pair", timed=(FP32,), operand="pair"),
    Case(
        "symmetric P of pairs", tensors("A mm pair"), call("symmetric_operand", "A"),
        lambda s: s.m * (s.m + 1) * s.m, timed=(FP32,), module=symmetric_product, operand="pair",
    ),
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
        "symmetric product", "mn", "mn", timed=(FP32,), plain=lambda i: i["A"] @ i["A"].mT,
        counterpart=product_case("symmetric product of the long side", "nm", "nmT", ("C nn~",)),
    ),
)  # fmt: skip
"""Timed on every device, each beside its formula as it is printed."""
