"""The kernels between the products of a step, each as a step calls it: to compile, check and time them.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.micro.case import BF16_STATE, FP32, FP32_POLAR, FP64, Case, Inputs, call, tensors
from bench.micro.io import STEPPED, store_case
from bench.micro.stages import H
from prokl.algorithm.algebra import Roots
from prokl.algorithm.stages import ProKLShampooStages, Residual
from prokl.kernels import admit, combine, norms, split
from prokl.pair import Pair


def _split_two(i: Inputs, ops: ProKLShampooStages) -> Callable[[], tuple[Pair, Pair]]:
    if ops.name == "triton":
        return lambda: split.split_two(i["x"], i["y"])
    return lambda: (Pair.split(i["x"]), Pair.split(i["y"]))


def _split(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Pair]:
    x, a = i["x"], i.get("a")
    if ops.name == "triton":
        return lambda: split.split(x, a)
    return lambda: Pair.split(x if a is None else x * a.sqrt()[:, None, :])


def _combine(scaled: bool, pair: bool, **fields: Any) -> Case:
    inputs = tensors("x mr", "y mr", *["scale ."] * scaled)
    weights = H.gradient_weights[0], H.momentum

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        x, y, c = i["x"], i["y"], i.get("scale")
        if ops.name != "triton":
            sum_of = lambda: weights[0] * (x if c is None else x * c[:, None, None]) + weights[1] * y  # noqa: E731
            # Of pairs the error is that of their halves.
            return (lambda: Pair.split(sum_of()) if x.dtype == torch.float32 else sum_of()) if pair else sum_of
        return lambda: combine.combine(x, weights[0], y, weights[1], c, pair)

    name = "combine" + " scaled" * scaled + " and split" * pair
    return Case(name, inputs, bind, lambda s: 3 * s.m * s.r, module=combine, **fields)


def _samples(scaled: bool, **fields: Any) -> Case:
    inputs = tensors("GQ mr", "QtG mr", "a_L m", "a_S r", *["scale .+"] * scaled)

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        roots = Roots(i["a_L"], i["a_S"], i["a_L"])  # of mu none is read
        return lambda: ops.samples(i["GQ"], i["QtG"], roots, i.get("scale"), 0.1)

    name = "samples" + " without bound" * (not scaled)
    return Case(name, inputs, bind, lambda s: 3 * s.m * s.r, module=combine, **fields)


def _normalising(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Tensor]:
    energy, residual = i["energy"], Residual(i["energy"], i["size"], i["whole"], 1e-9)
    if ops.name == "triton":
        return lambda: norms.inverse_norm(*residual)
    return lambda: torch.where(residual.negligible(), 0.0, energy.sum(dim=1).rsqrt())


def _admit(**fields: Any) -> Case:
    roots = ("inv_sqrt_lambda_L m+", "inv_sqrt_lambda_S r+", "inv_sqrt_mu .+", "lambda_0 .+")
    drawn = tensors("A mr", "QtG mr", "e_res m+", "M . momentum", *roots)
    names = ("A", "QtG", "e_res")

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        state = {name: t for name, t in i.items() if name not in names}
        return lambda: ops.admit(*(i[name] for name in names), state, H, 1 << 12)

    return Case("admit kernel", drawn, bind, lambda s: 8 * s.m * s.r, module=admit, **fields)


SMALL: tuple[Case, ...] = (
    _admit(dtypes=(FP32, FP64, BF16_STATE), timed=(FP32,)),
    _combine(scaled=True, pair=False, dtypes=(FP32, FP64)),
    _combine(scaled=False, pair=False),
    _combine(scaled=True, pair=True, timed=(FP32,)),
    _combine(scaled=False, pair=True),
    _samples(scaled=True, dtypes=(FP32, FP64), timed=(FP32,)),
    _samples(scaled=False),
    Case(
        "cut", tensors("t mr", "bounded .?", "clipped .+", largest=0.1, dtype=lambda s, d: d.polar),
        call("cut", "t", "largest", "dtype", "bounded", "clipped"), lambda s: 3 * s.m * s.r,
        dtypes=(FP32, FP32_POLAR, FP64), timed=(FP32,), module=norms,
    ),
    Case(
        "inverse norm", tensors("energy m+", "size r+", "whole r+"), _normalising, lambda s: s.m + 2 * s.r,
        dtypes=(FP32, FP64), timed=(FP32,), module=norms,
    ),
    store_case("store", STEPPED, "ae", dtypes=(FP32, BF16_STATE), timed=(FP32,)),
    store_case("store bases", "Q_L Q_S", "a", dtypes=(FP32, BF16_STATE)),
    Case("split scaled", tensors("x mm", "a m+"), _split, lambda s: 3 * s.m * s.m, timed=(FP32,), module=split),
    Case(
        "split two", tensors("x mm", "y nr"), _split_two, lambda s: 2 * (s.m * s.m + s.n * s.r),
        timed=(FP32,), module=split,
    ),
    Case("split", tensors("x mn"), _split, lambda s: 2 * s.m * s.n, timed=(FP32,), module=split),
)  # fmt: skip
