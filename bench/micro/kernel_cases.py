"""The kernels beside the PyTorch they stand for, in one table: for compiling ahead of time, timing and testing.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
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
    item,
    shipped,
)
from bench.micro.product_cases import difference_case, newton_schulz_case, polynomial_case, product_case, symmetric_case
from prokl import torch_ops
from prokl.kernels import apply, eigenvalue_ema, precondition, project, residuals, stack
from prokl.kernels.launch import Tile

MOMENTUM, WEIGHTS = 0.95, (1.0, 1.0, 0.95)  # (g, a, b) of Nesterov momentum
LR, WEIGHT_DECAY = 1e-3, 0.1


def _live(s: Sizes, draw: Draw) -> Tensor:
    return draw(s.B, dtype=torch.float32) > -10  # all of them


def _project(live: bool) -> Case:
    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {
            "G": draw(s.B, s.m, s.n, dtype=d.weights),
            "M": draw(s.B, s.m, s.n, dtype=d.momentum),
            "U": draw(s.B, s.n, s.r, dtype=d.arithmetic),
            "live": _live(s, draw) if live else None,
        }

    return Case(
        "project" + " live" * live,
        project,
        inputs,
        lambda i, tile: project.project(**i, tile=tile),
        lambda i: (i["G"].to(i["U"].dtype) @ i["U"], i["M"].to(i["U"].dtype) @ i["U"]),
        lambda s: 4 * s.B * s.m * s.n * s.r,
        lambda s, d: s.B * (s.m * s.n * item(d.weights, d.momentum) + (s.n + 2 * s.m) * s.r * d.arithmetic.itemsize),
        tiles=(lambda d: (None,)) if live else lambda d: shipped(project, d.arithmetic),
        dtypes=(BF16,) if live else (FP32, BF16, BF16_STATE, FP64),
        timed=() if live else (FP32, BF16),
        fitted=lambda s, tile: s if tile is None else replace(s, r=min(s.r, tile.n)),
    )


def _residuals(hat: bool, live: bool) -> Case:
    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {
            "G": draw(s.B, s.m, s.n, dtype=d.weights),
            "M": draw(s.B, s.m, s.n, dtype=d.momentum),
            "G_tilde": draw(s.B, s.m, s.r, dtype=d.arithmetic),
            "G_par": draw(s.B, s.m, s.r, dtype=d.arithmetic) if hat else None,
            "U": draw(s.B, s.n, s.r, dtype=d.arithmetic),
            "live": _live(s, draw) if live else None,
        }

    def call(i: Inputs, tile: Tile | None) -> Any:
        found = residuals.residuals(**i, momentum=MOMENTUM, weights=WEIGHTS, hat=hat, tile=tile)
        return i["M"], *found[:2]

    def in_torch(i: Inputs) -> Any:
        i = i | {"G": i["G"].to(i["U"].dtype)}
        M, G_perp, G_hat_perp, _ = torch_ops.residuals(**i | {"live": None}, momentum=MOMENTUM, weights=WEIGHTS)
        return i["M"].copy_(M), G_perp, G_hat_perp

    return Case(
        "residuals" + " without G^" * (not hat) + " live" * live,
        residuals,
        inputs,
        call,
        in_torch,
        lambda s: 2 * (1 + hat) * s.B * s.m * s.n * s.r,
        lambda s, d: (
            s.B * s.m * s.n * item(d.weights, d.momentum, d.momentum, *[d.arithmetic] * (1 + hat))
            + s.B * (s.n + (1 + hat) * s.m) * s.r * d.arithmetic.itemsize
        ),
        tiles=(lambda d: shipped(residuals, d.arithmetic)) if hat and not live else lambda d: (None,),
        dtypes=(FP32, BF16, BF16_STATE, FP64) if hat and not live else (BF16,),
        timed=(FP32, BF16) if hat and not live else (),
    )


def _precondition() -> Case:
    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {
            "P": draw(s.B, s.m, s.m, dtype=d.arithmetic),
            "G_par": draw(s.B, s.m, s.r, dtype=d.arithmetic),
            "Q_S": draw(s.B, s.r, s.r, dtype=d.arithmetic),
            "a_S": draw(s.B, s.r, dtype=d.arithmetic),
            "alpha": 0.01,
        }

    return Case(
        "precondition",
        precondition,
        inputs,
        lambda i, tile: precondition.precondition(**i, tile=tile),
        lambda i: torch_ops.precondition(**i),
        lambda s: 2 * s.B * s.m * s.r * (s.m + 2 * s.r),
        lambda s, d: s.B * (s.m**2 + 2 * s.m * s.r + s.r**2) * d.arithmetic.itemsize,
        tiles=lambda d: shipped(precondition, d.arithmetic),
        dtypes=(FP32, FP64),
        timed=(FP32,),
        fitted=lambda s, tile: s if tile is None else replace(s, r=min(s.r, tile.n)),
    )


def _stack(negate: bool) -> Case:
    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        matrices = [draw(s.m, s.n, dtype=d.weights) for _ in range(s.B)]
        return {"matrices": matrices, "addresses": draw.table(matrices), "m": s.m, "n": s.n}

    def call(i: Inputs, tile: Tile | None) -> Any:
        dtype = i["matrices"][0].dtype
        return stack.stack(i["addresses"], i["m"], i["n"], dtype=dtype, negate=negate, tile=tile)

    def in_torch(i: Inputs) -> Any:
        matrices = i["matrices"]
        links = SimpleNamespace(counts=[1] * len(matrices), dtype=matrices[0].dtype)
        return torch_ops.stack([g.unsqueeze(0) for g in matrices], links, negate)

    return Case(
        "stack" + " negated" * negate,
        stack,
        inputs,
        call,
        in_torch,
        lambda s: 2 * s.B * s.m * s.n,
        lambda s, d: 2 * s.B * s.m * s.n * d.weights.itemsize,
        tiles=(lambda d: (None,)) if negate else lambda d: shipped(stack, d.weights),
        dtypes=(FP32,) if negate else (FP32, BF16, FP16, FP64),
        timed=() if negate else (FP32, BF16),
    )


def apply_case(Q: bool, B: bool, X: bool = True, live: bool = False) -> Case:
    """W <- (1 - lr weight_decay) W - lr (scale Q X + B U^T), with those of the factors that are named."""

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        matrices = [draw(s.m, s.n, dtype=d.weights) for _ in range(s.B)]
        return {
            "matrices": matrices,
            "addresses": draw.table(matrices),
            "X": draw(s.B, s.m, s.n, dtype=d.polar) if X else None,
            "Q": draw(s.B, s.m, s.m, dtype=d.polar) if Q else None,
            "scale": draw(s.B, dtype=d.arithmetic) if X else None,
            "B": draw(s.B, s.m, s.r, dtype=d.arithmetic) if B else None,
            "U": draw(s.B, s.n, s.r, dtype=d.arithmetic) if B else None,
            "live": _live(s, draw) if live else None,
            "lr": LR + 0 * draw(1, dtype=torch.float64),
            "weight_decay": WEIGHT_DECAY + 0 * draw(1, dtype=torch.float64),
        }

    def call(i: Inputs, tile: Tile | None) -> Any:
        factors = {k: v for k, v in i.items() if k not in ("matrices", "addresses", "X")}
        apply.apply(i["addresses"], i["X"], dtype=i["matrices"][0].dtype, **factors, tile=tile)
        return i["matrices"]

    def in_torch(i: Inputs) -> Any:
        weights = [W.unsqueeze(0) for W in i["matrices"]]
        direction = torch_ops.Direction(*(i[k] for k in ("X", "Q", "scale", "B", "U")))
        settings = SimpleNamespace(lr=LR, weight_decay=WEIGHT_DECAY)
        torch_ops.apply(weights, SimpleNamespace(counts=[1] * len(weights)), direction, settings, None)
        return i["matrices"]

    main = Q and B and not live
    return Case(
        "apply" + " Q" * Q + " X" * X + " B" * B + " live" * live,
        apply,
        inputs,
        call,
        in_torch,
        lambda s: 2 * s.B * s.m * s.n * (s.m * Q + s.r * B),
        lambda s, d: (
            s.B * s.m * s.n * item(d.weights, d.weights, *[d.polar] * X)
            + s.B * (s.m**2 * Q * d.polar.itemsize + (s.m + s.n) * s.r * B * d.arithmetic.itemsize)
        ),
        tiles=(lambda d: shipped(apply, d.polar)) if main else lambda d: (None,),
        dtypes=(FP32, BF16, FP32_POLAR, FP64) if main else (FP32,),
        timed=(FP32, BF16) if main else (),
        polar_flops=lambda s: 2 * s.B * s.m**2 * s.n * Q,
    )


def _eigenvalue_ema(live: bool) -> Case:
    state = ("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_mu", "ell", "rho", "e_res")

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        shapes = ((s.B, s.m), (s.B, s.r), (s.B,), (s.B, s.m), (s.B, s.r), (s.B, s.m))
        tensors = {k: draw(*shape, dtype=d.arithmetic).abs() for k, shape in zip(state, shapes, strict=True)}
        for k in ("eps", "ceiling_L", "ceiling_S", "ceiling_mu"):
            tensors[k] = draw(s.B, dtype=d.arithmetic).abs()
        return tensors | {"beta2": 0.95, "n": s.n, "live": _live(s, draw) if live else None}

    def with_state_first(f: Callable[..., Any], i: Inputs) -> Any:
        return f(*(i[k] for k in state), **{k: v for k, v in i.items() if k not in state})

    return Case(
        "eigenvalue_ema" + " live" * live,
        eigenvalue_ema,
        inputs,
        lambda i, tile: with_state_first(eigenvalue_ema.eigenvalue_ema, i),
        lambda i: with_state_first(torch_ops.eigenvalue_ema, i),
        lambda s: s.B * (12 * s.m + 6 * s.r),
        lambda s, d: s.B * (4 * s.m + 3 * s.r) * d.arithmetic.itemsize,
        dtypes=(FP32,) if live else (FP32, FP64),
        timed=() if live else (FP32,),
    )


CASES: tuple[Case, ...] = (
    _stack(negate=False),
    _stack(negate=True),
    _project(live=False),
    _project(live=True),
    _residuals(hat=True, live=False),
    _residuals(hat=True, live=True),
    _residuals(hat=False, live=False),
    _precondition(),
    # The products of the step, in its order: those of r x r and m x r, X = P G^perp, the tracked basis.
    product_case("product", lambda s: (s.m, s.m, s.r), dtypes=(FP32, FP64), timed=(FP32,), every_tile=True),
    product_case("product A^T", lambda s: (s.m, s.m, s.r), turned="A"),
    product_case("product B^T", lambda s: (s.m, s.r, s.r), turned="B"),
    product_case(
        "product P G",
        lambda s: (s.m, s.m, s.n),
        out=torch.bfloat16,
        timed=(FP32,),
    ),
    product_case(
        "product V",
        lambda s: (s.n, s.m, s.r),
        A="weights",
        turned="A",
        C=True,
        dtypes=(FP32, BF16),
        timed=(FP32, BF16),
    ),
    product_case(
        "product Q X",
        lambda s: (s.m, s.m, s.n),
        A="polar",
        B="polar",
        C=True,
        scaled=True,
        dtypes=(FP32,),
        timed=(FP32,),
        every_tile=True,
    ),
    symmetric_case("symmetric P", lambda s: (s.m, s.m), dtypes=(FP32, FP64), timed=(FP32,), every_tile=True),
    symmetric_case("symmetric E", lambda s: (s.m, s.n), timed=(FP32,)),
    symmetric_case("symmetric L", lambda s: (s.m, s.r), C=True),
    symmetric_case("symmetric sample", lambda s: (s.r, s.m), turned=True),
    symmetric_case("symmetric X", lambda s: (s.m, s.n), A="polar", scaled=True, timed=(FP32,), every_tile=True),
    difference_case(),
    polynomial_case(),
    newton_schulz_case(gram=False),
    newton_schulz_case(gram=True),
    apply_case(Q=True, B=True),
    apply_case(Q=True, B=True, live=True),
    apply_case(Q=True, B=False),
    apply_case(Q=False, B=True),
    apply_case(Q=False, B=True, X=False),
    _eigenvalue_ema(live=False),
    _eigenvalue_ema(live=True),
)


# Bytes of operands that one step of a matrix kernel's first loop reads, from the arguments of the launch by name.
STAGE_BYTES: dict[str, Callable[[dict[str, Any]], int]] = {
    "project": lambda a: (
        a["TILE_N"] * (a["TILE_M"] * item(a["G_ptr"].dtype, a["M_ptr"].dtype) + a["TILE_R"] * a["U_ptr"].dtype.itemsize)
    ),
    "residuals": lambda a: (
        a["TILE_R"]
        * (
            a["TILE_M"] * (a["G_tilde_ptr"].dtype.itemsize + a["HAT"] * a["G_par_ptr"].dtype.itemsize)
            + a["TILE_N"] * a["U_ptr"].dtype.itemsize
        )
    ),
    "precondition": lambda a: (
        a["TILE_K"] * (a["TILE_M"] * a["P_ptr"].dtype.itemsize + a["TILE_R"] * a["G_par_ptr"].dtype.itemsize)
    ),
    "apply": lambda a: (
        a["TILE_K"] * (a["TILE_M"] * a["Q_ptr"].dtype.itemsize + a["TILE_N"] * a["X_ptr"].dtype.itemsize)
        if a["HAS_Q"]
        else a["TILE_R"] * (a["TILE_M"] * a["B_ptr"].dtype.itemsize + a["TILE_N"] * a["U_ptr"].dtype.itemsize)
    ),
    "product": lambda a: (
        a["TILE_K"] * (a["TILE_M"] * a["A_ptr"].dtype.itemsize + a["TILE_N"] * a["B_ptr"].dtype.itemsize)
    ),
    "symmetric_product": lambda a: a["TILE"] * a["TILE_K"] * item(a["A_ptr"].dtype, a["B_ptr"].dtype),
}
"""A kernel that is not here multiplies no matrices."""
