"""The cases of :mod:`bench.micro.kernel_cases` that are products, and what is made of nothing but products.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.costs import NS_STEPS
from bench.micro.case import BF16, FP32, FP32_POLAR, Case, Draw, Dtypes, Inputs, Sizes, shipped
from prokl import polar, torch_ops
from prokl.kernels import newton_schulz, product, symmetric_product

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def product_case(
    name: str,
    shape: Callable[[Sizes], tuple[int, int, int]],
    *,
    A: str = "arithmetic",
    B: str = "arithmetic",
    turned: str = "",
    C: bool = False,
    scaled: bool = False,
    out: torch.dtype | None = None,
    dtypes: tuple[Dtypes, ...] = (FP32,),
    timed: tuple[Dtypes, ...] = (),
    every_tile: bool = False,
) -> Case:
    """A product of (m,k) and (k,n) for shape's (m, k, n); A and B name the dtypes.

    Args:
        turned: which of A and B is the transpose of what is stored.
        C: beta C is added.
        scaled: alpha and beta are tensors, one number a matrix.
        out: dtype of the result, which comes with its energy then.
    """

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        m, k, n = shape(s)
        left, right = getattr(d, A), getattr(d, B)
        i: Inputs = {
            "A": draw(s.B, k, m, dtype=left).mT if turned == "A" else draw(s.B, m, k, dtype=left),
            "B": draw(s.B, n, k, dtype=right).mT if turned == "B" else draw(s.B, k, n, dtype=right),
            "C": draw(s.B, m, n, dtype=right) if C else None,
            "out_dtype": out,
        }
        if scaled:
            i |= {"alpha": draw(s.B, dtype=d.arithmetic), "beta": draw(s.B, dtype=d.arithmetic)}
        elif C:
            i |= {"alpha": 0.05, "beta": 0.95}
        return i

    def in_torch(i: Inputs) -> Any:
        result = torch_product(i["A"].to(i["B"].dtype), i["B"], i)
        if i["out_dtype"] is None:
            return result
        return result.to(i["out_dtype"]), torch.linalg.vector_norm(result, dim=(-2, -1)).square()

    def moved(s: Sizes, d: Dtypes) -> float:
        m, k, n = shape(s)
        right = getattr(d, B)
        result = m * n * ((out or right).itemsize + C * right.itemsize)
        return s.B * (m * k * getattr(d, A).itemsize + k * n * right.itemsize + result)

    def flops(s: Sizes) -> float:
        m, k, n = shape(s)
        return 2 * s.B * m * k * n

    return Case(
        name,
        product,
        inputs,
        lambda i, tile: product.product(**i, energy=out is not None, tile=tile),
        in_torch,
        flops,
        moved,
        tiles=(lambda d: shipped(product, getattr(d, B))) if every_tile else lambda d: (None,),
        dtypes=dtypes,
        timed=timed,
        polar_flops=flops if A == "polar" else lambda s: 0.0,
    )


def torch_product(A: Tensor, B: Tensor, i: Inputs) -> Tensor:
    """Alpha A B + beta C, where alpha and beta may be tensors, one number a matrix."""
    alpha, beta, C = i.get("alpha", 1.0), i.get("beta", 1.0), i.get("C")
    if isinstance(alpha, Tensor):
        scaled = alpha.to(A.dtype)[:, None, None] * (A @ B)
        if C is None:
            return scaled
        return scaled + (beta.to(A.dtype)[:, None, None] if isinstance(beta, Tensor) else beta) * C
    return torch_ops.product(A, B, C=C, alpha=alpha, beta=beta)


def symmetric_case(
    name: str,
    shape: Callable[[Sizes], tuple[int, int]],
    *,
    A: str = "arithmetic",
    turned: bool = False,
    C: bool = False,
    scaled: bool = False,
    dtypes: tuple[Dtypes, ...] = (FP32,),
    timed: tuple[Dtypes, ...] = (),
    every_tile: bool = False,
) -> Case:
    """A A^T of A (m,k) for shape's (m, k); the arguments are those of :func:`product_case`."""

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        m, k = shape(s)
        dtype = getattr(d, A)
        i: Inputs = {"A": draw(s.B, k, m, dtype=dtype).mT if turned else draw(s.B, m, k, dtype=dtype)}
        if C:
            X = draw(s.B, m, m, dtype=dtype)
            i |= {"C": X + X.mT, "alpha": 0.05, "beta": 0.95}
        if scaled:
            i["alpha"] = draw(s.B, dtype=d.arithmetic)
        return i

    def flops(s: Sizes) -> float:
        m, k = shape(s)
        return s.B * m * (m + 1) * k

    def moved(s: Sizes, d: Dtypes) -> float:
        m, k = shape(s)
        return s.B * (m * k + (1 + C) * m * m) * getattr(d, A).itemsize

    return Case(
        name,
        symmetric_product,
        inputs,
        lambda i, tile: symmetric_product.symmetric_product(**i, tile=tile),
        lambda i: torch_product(i["A"], i["A"].mT, i),
        flops,
        moved,
        tiles=(lambda d: shipped(symmetric_product, getattr(d, A))) if every_tile else lambda d: (None,),
        dtypes=dtypes,
        timed=timed,
        polar_flops=flops if A == "polar" else lambda s: 0.0,
    )


def difference_case() -> Case:
    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        K = draw(s.B, s.r, s.r, dtype=d.arithmetic)
        return {
            "A": draw(s.B, s.m, s.n, dtype=d.weights),
            "minus": (draw(s.B, s.m, s.r, dtype=d.arithmetic), K + K.mT),
        }

    def in_torch(i: Inputs) -> Any:
        (V, K), A = i["minus"], i["A"].to(i["minus"][1].dtype)
        return A @ A.mT - V @ K @ V.mT

    return Case(
        "symmetric difference",
        symmetric_product,
        inputs,
        lambda i, tile: symmetric_product.symmetric_product(**i, out_dtype=i["minus"][1].dtype, tile=tile),
        in_torch,
        lambda s: s.B * (s.m * (s.m + 1) * (s.n + s.r) + 2 * s.m * s.r**2),
        lambda s, d: s.B * (s.m * s.n * d.weights.itemsize + (s.m**2 + s.m * s.r) * d.arithmetic.itemsize),
        dtypes=(FP32, BF16),
    )


def polynomial_case() -> Case:
    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        X = draw(s.B, s.m, s.m, dtype=d.polar)
        R = X + X.mT
        return {"A": R, "B": R, "C": R, "alpha": NS_COEFFICIENTS[2], "beta": NS_COEFFICIENTS[1]}

    def flops(s: Sizes) -> float:
        return s.B * s.m * (s.m + 1) * s.m

    return Case(
        "symmetric polynomial",
        symmetric_product,
        inputs,
        lambda i, tile: symmetric_product.symmetric_polynomial(**i, tile=tile),
        lambda i: torch_product(i["A"], i["B"], i),
        flops,
        lambda s, d: 2 * s.B * s.m**2 * d.polar.itemsize,
        tiles=lambda d: shipped(symmetric_product, d.polar),
        dtypes=(FP32, FP32_POLAR),
        timed=(FP32,),
        polar_flops=flops,
    )


def newton_schulz_case(gram: bool | None) -> Case:
    """Newton-Schulz in either form, or (None) in the one that a step takes."""

    def form(m: int, n: int) -> bool:
        return polar.use_gram(m, n) if gram is None else gram

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        X = draw(s.B, s.m, s.n, dtype=d.polar)
        return {"X": X, "inverse_norm": 1 / torch.linalg.vector_norm(X.to(d.arithmetic), dim=(-2, -1))}

    def in_torch(i: Inputs) -> Any:
        X = i["X"] * i["inverse_norm"].to(i["X"].dtype).view(-1, 1, 1)
        return *polar.newton_schulz_factors(X, NS_STEPS, NS_COEFFICIENTS, form(*X.shape[1:])), None

    def dense(results: Any) -> Any:
        Q, Y, scale = results
        Y = Y if Q is None else Q @ Y
        return Y if scale is None else Y * scale[:, None, None]

    def flops(s: Sizes) -> float:
        m, n = s.m, s.n
        return s.B * m * m * (11 * m + 9 * n if form(m, n) else NS_STEPS * (m + n + 2 * n))

    return Case(
        "newton_schulz" + {None: "", True: " gram", False: " standard"}[gram],
        newton_schulz,
        inputs,
        lambda i, tile: newton_schulz.newton_schulz_factors(
            i["X"], i["inverse_norm"], NS_STEPS, NS_COEFFICIENTS, gram=form(*i["X"].shape[1:])
        ),
        in_torch,
        flops,
        lambda s, d: 2 * s.B * s.m * s.n * d.polar.itemsize,
        dtypes=(FP32, FP32_POLAR),
        timed=(FP32,),
        dense=dense,
        polar_flops=flops,
    )
