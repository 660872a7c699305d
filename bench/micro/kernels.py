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
    Inputs,
    Parts,
    arithmetic,
    beside,
    call,
    over,
    tensors,
)
from bench.micro.io import KL_STEPPED, LR, STEPPED, WEIGHT_DECAY, apply_case, stack_case, store_case, usable_case
from bench.micro.stages import NS_COEFFICIENTS, NS_STEPS, H
from prokl.algorithm.algebra import Admitted, Direction, Roots
from prokl.algorithm.newton_schulz import newton_schulz
from prokl.algorithm.shapes import compute_dtype
from prokl.algorithm.stages import Projected, ProKLShampooStages, Residual
from prokl.kernels import (
    admit,
    combine,
    momentum,
    norms,
    precondition,
    product,
    project,
    split,
    symmetric_product,
)
from prokl.pair import Operand, Pair

BOTH = (FP32, BF16)
STORED = (FP32, BF16, BF16_STATE, FP64)
GRAM: dict[str, Any] = {"dtypes": (FP32, FP32_POLAR), "timed": (FP32,), "module": symmetric_product}
GRAM |= {"operand": "polar", "polar": True}
"""Of what Newton-Schulz multiplies on Gram matrices."""
POLAR: dict[str, Any] = {"dtype": lambda s, d: d.polar}
"""To what results are rounded for Newton-Schulz, or beside its."""
WHITENED = ("size 7+", "whole 7+")
"""Norms of what is whitened, in parts."""
NOISE = 1e-9
"""Of a residual; see :class:`prokl.algorithm.stages.Residual`."""


def product_case(name: str, operands: str, more: tuple[str, ...] = (), **fields: Any) -> Case:
    """Return A B, or A A^T where there is one operand; ``more`` are other tensors that it takes."""
    specs = [f"{letter} {spec.strip()}" for letter, spec in zip("AB", operands.split(","), strict=False)]
    scales: dict[str, Any] = {} if "alpha ." in more or not more else {"alpha": 0.05, "beta": 0.95}
    name_of, module = ("product", product) if len(specs) == 2 else ("symmetric_product", symmetric_product)
    bind = call(name_of, *"AB"[: len(specs)])
    return Case(name, tensors(*specs, *more, **scales), bind, module=module, **fields)


def newton_schulz_case(gram: bool | None, **fields: Any) -> Case:
    """Return Newton-Schulz in either form, or (None) in the one that a step takes."""

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Direction]:
        X, scale = i["X"], _inverse_norm(i["X"])
        if ops.name != "triton":  # as its whiten does
            X, scale = X * scale.to(X.dtype)[:, None, None], None

        def run() -> Direction:
            return Direction(newton_schulz(X, scale, NS_STEPS, NS_COEFFICIENTS, ops, gram=gram), scale)

        return run

    name = "newton_schulz " + ("gram" if gram else "standard")
    return Case(name, tensors("X mn polar"), bind, polar=True, timed=(FP32,), **fields)


def _inverse_norm(X: Tensor) -> Tensor:
    return 1 / torch.linalg.vector_norm(X, dim=(-2, -1), dtype=compute_dtype(X.dtype))


def _whiten(
    ops: ProKLShampooStages, P: Operand, G_perp: Operand, size: Tensor, whole: Tensor, dtype: torch.dtype
) -> Direction:
    X, scale = ops.whiten(P, Residual(G_perp, size, whole, 0.0), dtype)
    return Direction(X, scale)


def _polynomial(ops: ProKLShampooStages, R: Tensor) -> Tensor:
    _, b, c = NS_COEFFICIENTS
    return ops.symmetric_polynomial(R, R, C=R, alpha=c, beta=b)


def _shifted_polynomial(ops: ProKLShampooStages, R: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = NS_COEFFICIENTS
    return ops.shifted_polynomial(R, R, C=R, alpha=c, beta=b, shift=a)


def _project(active: bool, pair: bool = False, **fields: Any) -> Case:
    inputs = tensors("G mn weights", "M mn momentum", "U nr" + " pair" * pair, *["active .?"] * active)
    name = "projection" + " active" * active + " of pairs" * pair
    bind = call("projections", "G", "M", "U", "active")
    return Case(name, inputs, bind, module=project, narrow=True, **fields)


def _residual(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Operand]:
    triton, pairs = ops.name == "triton", isinstance(i["U"], Pair)
    G = i["G"] if triton else i["G"].to(arithmetic(i["U"]))
    form = product.product_pair if triton and pairs else ops.product
    return lambda: form(i["G_tilde"], i["U"].mT, C=G, alpha=-1.0)


def _momentum(hat: bool, scaled: bool, active: bool, pair: bool = False, **fields: Any) -> Case:
    specs = ["G mn weights", "M mn momentum", "G_tilde mr", "M_tilde mr", "U nr" + " pair" * pair]
    inputs = tensors(*specs, *["scale .+"] * scaled, *["active .?"] * active)
    h = H if hat else replace(H, variant="subspace-only")

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        own = beside(ops, pairs=isinstance(i["U"], Pair))
        G = i["G"] if ops.name == "triton" else i["G"].to(arithmetic(i["U"]))
        projected = Projected(i["G_tilde"], i["M_tilde"], None, i["U"], None)

        def found() -> tuple[Any, ...]:
            M, ahead = own.momentum(G, projected, i.get("scale"), {"M": i["M"]}, h, i.get("active"))
            G_par = ahead.G_par
            if isinstance(i["U"], Pair) and isinstance(G_par, Tensor):  # PyTorch splits it where it is multiplied
                G_par = Pair.split(G_par)
            return (M, G_par, ahead.residual.G_hat_perp) if hat else (M, G_par)

        return found

    name = "momentum update" + " without G^" * (not hat) + " without bound" * (not scaled) + " active" * active
    name += " of pairs" * pair
    return Case(name, inputs, bind, module=momentum, **fields)


def _split(ops: ProKLShampooStages, x: Tensor, a: Tensor | None = None) -> Pair:
    return Pair.split(x if a is None else x * a.sqrt()[:, None, :])


def _combined(ops: ProKLShampooStages, x: Tensor, y: Tensor, scale: Tensor | None = None) -> Operand:
    total = H.gradient_weights[0] * (x if scale is None else x * scale[:, None, None]) + H.momentum * y
    return Pair.split(total) if x.dtype == torch.float32 else total  # of pairs the error is that of their halves


def _combine(x: Tensor, y: Tensor, scale: Tensor | None = None) -> Operand:
    return combine.combine(x, H.gradient_weights[0], y, H.momentum, scale, pair=True)


def _samples(
    ops: ProKLShampooStages, GQ: Tensor, QtG: Tensor, a_L: Tensor, a_S: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    return ops.samples(GQ, QtG, Roots(a_L, a_S, a_L), scale, 0.1)  # of mu none is read


def _normalising(ops: ProKLShampooStages, energy: Tensor, size: Tensor, whole: Tensor) -> Tensor:
    negligible = Residual(energy, size, whole, NOISE).negligible()
    return torch.where(negligible, 0.0, energy.sum(dim=1).rsqrt())


def _admit(ops: ProKLShampooStages, A: Tensor, QtG: Tensor, e_res: Tensor, **state: Tensor) -> Admitted:
    return ops.admit(A, QtG, e_res, state, H, 1 << 12)


KERNELS: tuple[Case, ...] = (
    stack_case("stack", False, dtypes=(FP32, BF16, FP16, FP64), timed=BOTH, operand="weights"),
    stack_case("stack negated", True),
    usable_case("usable, of a stack"),
    _project(active=False, dtypes=STORED, timed=BOTH, operand="arithmetic"),
    _project(active=True, dtypes=(BF16,)),
    _momentum(hat=True, scaled=True, active=False, dtypes=STORED, timed=BOTH, operand="arithmetic"),
    _momentum(hat=True, scaled=True, active=True, dtypes=(BF16,)),
    _momentum(hat=True, scaled=False, active=False, dtypes=(BF16,)),
    _momentum(hat=False, scaled=True, active=False, dtypes=(BF16,)),
    Case(
        "precondition", tensors("P mm", "G_par mr", "Q_S rr", "a_S r+", alpha=0.01),
        call("precondition", "P", "G_par", "Q_S", "a_S"),
        dtypes=(FP32, FP64), timed=(FP32,), module=precondition, operand="arithmetic", narrow=True,
    ),
    # The products of the step: G_perp, those of r x r and m x r, X = P G^perp, the tracked basis.
    Case(
        "product G_perp", tensors("G mn weights", "G_tilde mr", "U nr"), _residual,
        dtypes=(FP32, BF16, FP64), timed=BOTH, module=product,
    ),
    product_case("product", "mm, mr", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    product_case("product A^T", "mmT, mr"),
    product_case("product B^T", "mr, rrT"),
    Case(
        "whiten", tensors("P mm", "G_perp mn", *WHITENED, **POLAR), over(_whiten), timed=(FP32,), module=product,
    ),
    product_case("product V", "nmT, mr", ("C nr", "alpha ."), timed=(FP32,)),
    # Of tracking and refreshes: columns times an inverse factor, their Gram matrix, Q^T L Q.
    product_case("product V F", "nr, rr", ("alpha .",)),
    product_case("symmetric W", "rnT", timed=(FP32,)),
    Case(
        "congruence", tensors("L mm~", "Q mm"), call("congruence", "L", "Q"),
        timed=(FP32,), module=symmetric_product,
    ),
    product_case(
        "product Q X", "mm polar, mn polar", ("C mn polar", "alpha .", "beta ."),
        timed=(FP32,), operand="polar", polar=True,
    ),
    product_case("symmetric P", "mm", dtypes=(FP32, FP64), timed=(FP32,), operand="arithmetic"),
    product_case("symmetric E", "mn", timed=(FP32,)),
    Case(
        "factor EMA", tensors("L mm~", "X mr", "E mm~", "tail .+", beta=H.beta2, alpha=0.1),
        call("factor_ema", "L", "X", "E", "tail", "beta", "alpha"),
        timed=(FP32,), module=symmetric_product,
    ),
    Case(
        "coordinates' EMA", tensors("S rr~", "Z rmT", beta=H.beta2, alpha=0.1),
        call("coordinates_ema", "S", "Z", "beta", "alpha"),
        module=symmetric_product,
    ),
    Case(
        "symmetric X", tensors("X mn polar", "scale .+ polar"), call("gram", "X", "scale"), **GRAM,
    ),
    Case("symmetric polynomial", tensors("R mm~ polar"), over(_polynomial), **GRAM),
    Case("shifted polynomial", tensors("R mm~ polar"), over(_shifted_polynomial), **GRAM),
    newton_schulz_case(False, dtypes=(FP32, FP32_POLAR), module=symmetric_product),
    newton_schulz_case(True, dtypes=(FP32, FP32_POLAR), module=symmetric_product),
    apply_case("X scale left right", dtypes=(FP32, BF16, FP32_POLAR, FP64), timed=BOTH, operand="arithmetic"),
    apply_case("X scale left right active"),
    apply_case("X scale left right", "stochastic", dtypes=(BF16,), operand="arithmetic"),
    apply_case("X scale left right", "master", dtypes=(BF16,), operand="arithmetic"),
    apply_case("X scale"),
    apply_case("left right"),
    apply_case("X scale left right", cautious=True, dtypes=(FP32, BF16, FP32_POLAR, FP64)),
    apply_case("X", after=True, dtypes=(FP32_POLAR, BF16, FP64)),
    apply_case("X", after=True, cautious=True, dtypes=(FP32_POLAR, BF16, FP64)),
    # What lies between the products.
    Case(
        "admit kernel",
        tensors(
            "A mr", "QtG mr", "e_res m+", "M . momentum",
            "inv_sqrt_lambda_L m+", "inv_sqrt_lambda_S r+", "inv_sqrt_mu .+", "lambda_0 .+",
        ),
        over(_admit), dtypes=(FP32, FP64, BF16_STATE), timed=(FP32,), module=admit,
    ),
    Case(
        "combine scaled and split", tensors("x mr", "y mr", "scale ."), over(_combined, _combine),
        timed=(FP32,), module=combine,
    ),
    Case("combine and split", tensors("x mr", "y mr"), over(_combined, _combine), module=combine),
    Case(
        "samples", tensors("GQ mr", "QtG mr", "a_L m", "a_S r", "scale .+"), over(_samples),
        dtypes=(FP32, FP64), timed=(FP32,), module=combine,
    ),
    Case("samples without bound", tensors("GQ mr", "QtG mr", "a_L m", "a_S r"), over(_samples), module=combine),
    Case(
        "cut", tensors("t mr", "bounded .?", "clipped .+", largest=0.1, **POLAR),
        call("cut", "t", "largest", "dtype", "bounded", "clipped"),
        dtypes=(FP32, FP32_POLAR, FP64), timed=(FP32,), module=norms,
    ),
    Case(
        "inverse norm", tensors("energy m+", "size r+", "whole r+"),
        over(_normalising, lambda energy, size, whole: norms.inverse_norm(energy, size, whole, NOISE)),
        dtypes=(FP32, FP64), timed=(FP32,), module=norms,
    ),
    store_case("store", STEPPED, "ae", dtypes=(FP32, BF16_STATE), timed=(FP32,)),
    store_case("store bases", "Q_L Q_S", "a", dtypes=(FP32, BF16_STATE)),
    Case("split scaled", tensors("x mm", "a m+"), over(_split, split.split), timed=(FP32,), module=split),
    Case(
        "split two", tensors("x mm", "y nr"),
        over(lambda ops, x, y: (Pair.split(x), Pair.split(y)), split.split_two),
        timed=(FP32,), module=split,
    ),
    Case("split", tensors("x mn"), over(_split, split.split), timed=(FP32,), module=split),
    # What a balanced step takes instead.
    _project(active=True, pair=True, dtypes=(FP32, BF16, BF16_STATE), timed=BOTH, operand="pair"),
    _momentum(
        hat=True, scaled=True, active=True, pair=True, dtypes=(FP32, BF16, BF16_STATE), timed=BOTH, operand="pair"
    ),
    Case(
        "product G_perp of pairs", tensors("G mn weights", "G_tilde mr pair", "U nr pair"), _residual,
        dtypes=(FP32, BF16), timed=BOTH, module=product,
    ),
    Case(
        "row energies of pairs", tensors("Q mm pair", "G_perp mn pair"),
        over(
            lambda ops, Q, G_perp: ops.product(Q.mT, G_perp).square().sum(dim=-1),
            lambda Q, G_perp: Parts(product.row_energies(Q.mT, G_perp)),
        ),
        timed=(FP32,), module=product,
    ),
    Case(
        "whiten of pairs", tensors("P mm pair", "G_perp mn pair", *WHITENED, **POLAR), over(_whiten),
        dtypes=(FP32, FP32_POLAR), timed=(FP32,), module=product,
    ),
    apply_case("X scale left right active", half=True, timed=(FP32,), operand="polar"),
    apply_case("X scale left right active", "stochastic", half=True, dtypes=(BF16,)),
    product_case("product of pairs", "mm pair, mr pair", timed=(FP32,), operand="pair"),
    product_case("product V of pairs", "nmT pair, mr pair", ("C nr", "alpha ."), timed=(FP32,), operand="pair"),
    product_case("symmetric E of pairs", "mn pair", timed=(FP32,), operand="pair"),
    Case(
        "product of pairs, split", tensors("A mr pair", "B rr pair"),
        over(lambda ops, A, B: ops.product(A, B), product.product_pair),
        module=product, operand="pair",
    ),
    # And KL-Shampoo's.
    store_case("store of KL-Shampoo", KL_STEPPED, "ae", dtypes=(FP32, BF16_STATE)),
    apply_case("X active", after=True, dtypes=(FP32_POLAR,)),
    apply_case("X active", "stochastic", after=True, dtypes=(replace(BF16, polar=torch.float32),)),
    product_case("product Q_L^T G of pairs", "mmT pair, mn pair"),
    product_case("product by Q_R^T of pairs", "mn pair, nnT pair"),
    product_case("symmetric L of pairs", "mn pair", ("C mm~",)),
    product_case("symmetric R of pairs", "nmT pair", ("C nn~",)),
    product_case("symmetric R", "nmT", ("C nn~",)),
    Case(
        "symmetric P of pairs", tensors("A mm pair"),
        over(lambda ops, A: ops.symmetric_product(A), symmetric_product.symmetric_product_pair),
        timed=(FP32,), module=symmetric_product, operand="pair",
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
        "symmetric product", "mn", timed=(FP32,), plain=lambda i: i["A"] @ i["A"].mT,
        counterpart=product_case("symmetric product of the long side", "nmT", ("C nn~",)),
    ),
)  # fmt: skip
"""Timed on every device, each beside its formula as it is printed."""
