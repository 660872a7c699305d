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
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.io import BucketIO, Layout, Member, TorchIO
from prokl.kernels import apply, eigenvalue_ema, precondition, product, project, residuals, stack, symmetric_product

LR, WEIGHT_DECAY = 1e-3, 0.1
BOTH = (FP32, BF16)
STORED = (FP32, BF16, BF16_STATE, FP64)
ACTIVE = ((), ("active .?",))


def call(name: str, *arguments: str, **more: Any) -> Callable[[Inputs, Primitives], Callable[[], Any]]:
    """Return what binds the primitive ``name`` to these inputs; all others, and ``more``, go by name."""

    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        given = [i[key] for key in arguments]
        rest = more | {key: value for key, value in i.items() if key not in arguments}
        return lambda: getattr(ops, name)(*given, **rest)

    return bind


def matrices(factors: str = "") -> Callable[[Sizes, Dtypes, Draw], Inputs]:
    """Return what draws separate weights, and those factors of a direction that are named."""
    drawn = tensors(*(spec for spec in FACTORS if spec.split()[0] in factors.split()))

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {"weights": [draw(s.m, s.n, dtype=d.weights) for _ in range(s.B)], **drawn(s, d, draw)}

    return inputs


FACTORS = ("X mn polar", "Q mm polar", "scale .", "left mr", "right nr", "active .?")


def io(i: Inputs, ops: Primitives) -> BucketIO:
    """Return a bucket's I/O on these weights, which are their own gradients."""
    parameters = [torch.nn.Parameter(W, requires_grad=False) for W in i["weights"]]
    for p, W in zip(parameters, i["weights"], strict=True):
        p.grad = W
    W = parameters[0]
    members = [Member(p, "", MatrixShape(1, *W.shape), b) for b, p in enumerate(parameters)]
    arithmetic = torch.float64 if W.dtype == torch.float64 else torch.float32
    layout = Layout(len(members), W.shape[0], W.shape[1], arithmetic, W.dtype, W.device)
    if ops.name == "triton":
        from prokl.backends.triton_ops import TritonIO

        found: BucketIO = TritonIO(members, layout)
    else:
        found = TorchIO(members, layout)
    found.locate(replace(H, lr=LR, weight_decay=WEIGHT_DECAY))
    return found


def _stack(negate: bool) -> Case:
    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        own, dtype = io(i, ops), i["weights"][0].dtype
        return lambda: [t.to(dtype) if t.ndim == 3 else t for t in own.gather(negate)]

    name, dtypes = "stack negated" if negate else "stack", (FP32,) if negate else (FP32, BF16, FP16, FP64)
    timed = () if negate else BOTH
    flops = lambda s: 2.0 * s.m * s.n  # noqa: E731
    return Case(
        name, matrices(), bind, flops, dtypes=dtypes, timed=timed, module=stack, operand="" if negate else "weights"
    )


def apply_case(factors: str, active: bool = False, **more: Any) -> Case:
    """Return W <- (1 - lr weight_decay) W - lr (scale Q X + left right^T), with those of the factors that are named."""
    have = set(factors.split())

    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        own = io(i, ops)
        direction = Direction(*(i.get(spec.split()[0]) for spec in FACTORS[:5]))

        def run() -> list[Tensor]:
            own.apply(direction, i.get("active"))
            weights: list[Tensor] = i["weights"]
            return weights

        return run

    def polar(s: Sizes) -> float:
        return 2.0 * s.m * s.m * s.n * ("Q" in have)

    return Case(
        "apply " + factors + " active" * active,
        matrices(factors + " active" * active),
        bind,
        lambda s: polar(s) + 2 * s.m * s.n * s.r * ("left" in have),
        polar,
        module=apply,
        **more,
    )


def _project(active: bool) -> Case:
    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        own = _as_read(i, ops)
        return lambda: ops.project(own["G"], own["M"], own["U"], own.get("active"))

    return Case(
        "project" + " active" * active,
        tensors("G mn weights", "M mn momentum", "U nr", *ACTIVE[active]),
        bind,
        lambda s: 4 * s.m * s.n * s.r,
        dtypes=(BF16,) if active else STORED,
        timed=() if active else BOTH,
        module=project,
        operand="" if active else "arithmetic",
        narrow=True,
    )


def _residuals(hat: bool, active: bool) -> Case:
    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        own = _as_read(i, ops)
        more = (H.momentum, H.gradient_weights, own.get("active"))
        G_par = own["G_par"] if hat else None
        return lambda: ops.residuals(own["G"], own["M"], own["G_tilde"], G_par, own["U"], *more)

    main = hat and not active
    return Case(
        "residuals" + " without G^" * (not hat) + " active" * active,
        tensors("G mn weights", "M mn momentum", "G_tilde mr", "G_par mr", "U nr", *ACTIVE[active]),
        bind,
        lambda s: 2 * (1 + hat) * s.m * s.n * s.r,
        dtypes=STORED if main else (BF16,),
        timed=BOTH if main else (),
        module=residuals,
        operand="arithmetic" if main else "",
    )


def _as_read(i: Inputs, ops: Primitives) -> Inputs:
    """Return the gradients as a bucket's I/O gives them: only Triton's leaves them in the weights' dtype."""
    return i if ops.name == "triton" else i | {"G": i["G"].to(i["U"].dtype)}


def product_case(name: str, left: str, right: str, sides: str, more: tuple[str, ...] = (), **fields: Any) -> Case:
    """Return a product of operands of these sides; ``sides`` are m, k and n of the product."""
    scales: dict[str, Any] = {} if "alpha ." in more or not more else {"alpha": 0.05, "beta": 0.95}
    inputs = tensors(f"A {left}", f"B {right}", *more, **scales)
    return Case(name, inputs, call("product", "A", "B"), _count(sides), module=product, **fields)


def symmetric_case(name: str, A: str, sides: str, more: tuple[str, ...] = (), **fields: Any) -> Case:
    """Return A A^T; ``sides`` are m and k of the product."""
    scales: dict[str, Any] = {} if "alpha ." in more or not more else {"alpha": 0.05, "beta": 0.95}
    inputs = tensors(f"A {A}", *more, **scales)

    def flops(s: Sizes) -> float:
        m, k = (getattr(s, side) for side in sides)
        return float(m * (m + 1) * k)

    return Case(name, inputs, call("symmetric_product", "A"), flops, module=symmetric_product, **fields)


def _count(sides: str) -> Callable[[Sizes], float]:
    def flops(s: Sizes) -> float:
        m, k, n = (getattr(s, side) for side in sides)
        return float(2 * m * k * n)

    return flops


def newton_schulz_case(gram: bool) -> Case:
    """Return Newton-Schulz in either form."""

    def bind(i: Inputs, ops: Primitives) -> Callable[[], Any]:
        X, scale = i["X"], i["scale"]
        if ops.name != "triton":  # as its whiten does
            X, scale = X * scale.to(X.dtype)[:, None, None], None

        def run() -> Direction:
            Q, Y, left = newton_schulz_factors(X, scale, NS_STEPS, NS_COEFFICIENTS, ops, gram=gram)
            return Direction(Y, Q, left)

        return run

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        X = draw(s.B, s.m, s.n, dtype=d.polar)
        return {"X": X, "scale": 1 / torch.linalg.vector_norm(X.to(d.arithmetic), dim=(-2, -1))}

    count = counts.newton_schulz_gram if gram else counts.newton_schulz_standard
    flops = lambda s: sum(t.least for t in count(s.m, s.n, NS_STEPS))  # noqa: E731
    name, both = "newton_schulz " + ("gram" if gram else "standard"), (FP32, FP32_POLAR)
    return Case(name, inputs, bind, flops, flops, dtypes=both, timed=(FP32,), module=symmetric_product)


def newton_schulz(X: Tensor) -> Tensor:
    """Orthogonalise X (B,m,n) as printed, without its normalisation."""
    a, b, c = NS_COEFFICIENTS
    for _ in range(NS_STEPS):
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X


def _eigenvalue_ema(active: bool) -> Case:
    state = ("inv_sqrt_lambda_L m+", "inv_sqrt_lambda_S r+", "inv_sqrt_mu .+", "ell m+", "rho r+", "e_res m+")
    rest = ("eps .+", "ceiling_L .+", "ceiling_S .+", "ceiling_mu .+")
    drawn = tensors(*state, *rest, *ACTIVE[active], beta2=H.beta2)

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return drawn(s, d, draw) | {"n": s.n}

    return Case(
        "eigenvalue_ema" + " active" * active,
        inputs,
        call("eigenvalue_ema", *(spec.split()[0] for spec in state)),
        lambda s: 12 * s.m + 6 * s.r,
        dtypes=(FP32,) if active else (FP32, FP64),
        timed=() if active else (FP32,),
        module=eigenvalue_ema,
    )


def _whiten(i: Inputs, ops: Primitives) -> Callable[[], Any]:
    def run() -> Direction:
        X, scale = ops.whiten(i["P"], i["G_perp"], torch.logical_not(i["active"]), i["dtype"])
        return Direction(X, None, scale)

    return run


def _inputs_of_polynomial(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    R = draw(s.B, s.m, s.m, dtype=d.polar)
    R = R + R.mT
    return {"A": R, "B": R, "C": R, "alpha": NS_COEFFICIENTS[2], "beta": NS_COEFFICIENTS[1]}


def _inputs_of_whiten(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    return {"dtype": d.polar, **tensors("P mm", "G_perp mn", "active .?")(s, d, draw)}


KERNELS: tuple[Case, ...] = (
    _stack(negate=False),
    _stack(negate=True),
    _project(active=False),
    _project(active=True),
    _residuals(hat=True, active=False),
    _residuals(hat=True, active=True),
    _residuals(hat=False, active=False),
    Case(
        "precondition",
        tensors("P mm", "G_par mr", "Q_S rr", "a_S r", alpha=0.01),
        call("precondition", "P", "G_par", "Q_S", "a_S"),
        lambda s: 2 * s.m * s.r * (s.m + 2 * s.r),
        dtypes=(FP32, FP64),
        timed=(FP32,),
        module=precondition,
        operand="arithmetic",
        narrow=True,
    ),
    # The products of the step, in its order: those of r x r and m x r, X = P G^perp, the tracked basis.
    product_case("product", "mm", "mr", "mmr", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    product_case("product A^T", "mmT", "mr", "mmr"),
    product_case("product B^T", "mr", "rrT", "mrr"),
    Case("whiten", _inputs_of_whiten, _whiten, lambda s: 2 * s.m * s.m * s.n, timed=(FP32,), module=product),
    product_case("product V", "nmT", "mr", "nmr", ("C nr",), timed=(FP32,)),
    product_case(
        "product Q X",
        "mm polar",
        "mn polar",
        "mmn",
        ("C mn polar", "alpha .", "beta ."),
        timed=(FP32,),
        operand="polar",
        polar_flops=_count("mmn"),
    ),
    symmetric_case("symmetric P", "mm", "mm", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    symmetric_case("symmetric E", "mn", "mn", timed=(FP32,)),
    symmetric_case("symmetric L", "mr", "mr", ("C mm~",)),
    symmetric_case("symmetric sample", "rmT", "rm"),
    symmetric_case("symmetric X", "mn polar", "mn", ("alpha .",), timed=(FP32,), operand="polar"),
    Case(
        "symmetric polynomial",
        _inputs_of_polynomial,
        call("symmetric_polynomial", "A", "B"),
        lambda s: s.m * (s.m + 1) * s.m,
        lambda s: s.m * (s.m + 1) * s.m,
        dtypes=(FP32, FP32_POLAR),
        timed=(FP32,),
        module=symmetric_product,
        operand="polar",
    ),
    newton_schulz_case(gram=False),
    newton_schulz_case(gram=True),
    apply_case("X Q scale left right", dtypes=(FP32, BF16, FP32_POLAR, FP64), timed=BOTH, operand="polar"),
    apply_case("X Q scale left right", active=True),
    apply_case("X Q scale"),
    apply_case("X scale left right"),
    apply_case("left right"),
    _eigenvalue_ema(active=False),
    _eigenvalue_ema(active=True),
)


def _normalised(i: Inputs) -> Tensor:
    return newton_schulz(i["X"] * i["scale"].to(i["X"].dtype)[:, None, None])


def _applied(i: Inputs) -> list[Tensor]:
    D = i["scale"][:, None, None] * i["X"] + i["left"] @ i["right"].mT
    return [(1 - LR * WEIGHT_DECAY) * W - LR * own for W, own in zip(i["weights"], D, strict=True)]


def _chosen(i: Inputs, ops: Primitives) -> Callable[[], Any]:
    return newton_schulz_case(use_gram(*i["X"].shape[1:])).bind(i, ops)


def _chosen_flops(s: Sizes) -> float:
    return newton_schulz_case(use_gram(s.m, s.n)).flops(s)


PRIMITIVES = (
    replace(
        newton_schulz_case(True), name="Newton-Schulz", bind=_chosen, flops=_chosen_flops, polar_flops=_chosen_flops,
        plain=_normalised, module=None,
    ),
    replace(
        apply_case("X scale left right"), name="apply", timed=(FP32,), plain=_applied, module=None,
        counterpart=replace(apply_case("X scale"), name="KL-Shampoo's apply"),
    ),
    replace(
        symmetric_case("symmetric product", "mn", "mn", timed=(FP32,)), plain=lambda i: i["A"] @ i["A"].mT, module=None,
        counterpart=symmetric_case("symmetric product of the long side", "nmT", "nm", ("C nn~",)),
    ),
)  # fmt: skip
"""Timed on every device, each beside its formula as it is printed."""
