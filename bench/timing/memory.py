"""Memory of every method: its state and its workspace.

State is that of a real optimizer with one weight of every shape, times their number. The figure of the paper's table
of memory (``TABLE``) stands in the column ``floor``; beyond it a state holds the scalars listed in ``SCALARS``.

Workspace is the most that tensors made during a step hold at one time, on a CPU with backend="torch"; its ratio is to
what the package bounds it by. It is extrapolated from one weight or a few (``FEW``) to those that are stepped together,
for the shape that takes the most. What LAPACK and a fused kernel take inside is not seen. A bucket holds besides, in no
state, an aspect scale, a row number and two addresses a weight.

Nothing here is timed, and the figures are the same on every machine.

Dimension key: m short side, n long side, r rank.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bench import rows
from bench.optimizers import OPTIMIZERS
from bench.shapes import ParameterSet
from bench.timing.entries import PERIOD
from bench.timing.peak import Peak
from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.shapes import MatrixShape, effective_rank
from prokl.backends import device
from prokl.engine.pieces import Piece, runs
from prokl.matrix_optimizer import MatrixOptimizer

FREQUENCY = PERIOD
DTYPES = (torch.float32, torch.bfloat16)
FEW = {"pro-klshampoo": 4, "kl-shampoo": 2}
"""Weights from which the workspace of many is extrapolated, where they are narrower than the arithmetic: they are
updated one by one then, and what one of them takes meanwhile counts for all. Measured on six shapes: four of
Pro-KLShampoo's take up to 6 % more than their share of 16, two of KL-Shampoo's, whose peak lies elsewhere, exactly it,
as in float32 one does."""
OWN: dict[str, type[MatrixOptimizer]] = {"pro-klshampoo": ProKLShampoo, "kl-shampoo": KLShampoo}

TABLE: dict[str, Callable[[int, int, int], dict[str, int]]] = {
    "pro-klshampoo": lambda m, n, r: {
        "factors": m * m + r * r,
        "eigenbases": m * m + r * r,
        "eigenvalues": m + r,
        "subspace basis": n * r,
        "complement scalar": 1,
        "momentum": m * n,
    },
    "kl-shampoo": lambda m, n, r: {
        "factors": m * m + n * n,
        "eigenbases": m * m + n * n,
        "eigenvalues": m + n,
        "momentum": m * n,
    },
    "muon": lambda m, n, r: {"momentum": m * n},
    "adamw": lambda m, n, r: {"momentum": m * n, "second moment": m * n},
}
"""Elements of one weight in the lines of the paper's table; Muon's and AdamW's likewise, which it does not have."""
SCALARS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(OWN, ("clipped", "lambda_0", "skipped", "step")),
    "muon": (),
    "adamw": ("step",),
}
"""What the state of a weight holds that is in no line: one number each."""


def build(method: str, weights: list[Tensor], rank: int) -> torch.optim.Optimizer:
    """Build an optimizer with state in the dtype of the weights."""
    settings: dict[str, Any] = {"fused": True} if method == "adamw" else {}
    if method in OWN:
        settings = {"state_dtype": weights[0].dtype, "precondition_frequency": FREQUENCY, "backend": "torch"}
    if method == "pro-klshampoo":
        settings |= {"rank": rank, "advanced": {"ns_dtype": torch.bfloat16}}
    return OPTIMIZERS[method].make(weights, **settings)


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a weight with a gradient, both zero: state is made from it and nothing moves."""
    W = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))
    W.grad = torch.zeros_like(W)
    return W


@cache
def state(method: str, m: int, n: int, rank: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the elements and bytes in the tensors of the state of one weight (m,n), from a real optimizer."""
    W = blank((m, n), dtype)
    optimizer = build(method, [W], rank)
    with Peak():
        optimizer.step()
    tensors = [value for value in optimizer.state[W].values() if isinstance(value, Tensor)]
    return sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors)


def settle(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
    """Give weights a state two steps before a refresh, without the decomposition that a start takes.

    Which values it has decides nothing about memory, as long as the bases are some and the gradients usual to it.
    """
    optimizer.step()
    saved = optimizer.state_dict()
    for own in saved["state"].values():
        for key, value in own.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                own[key] = torch.eye(*value.shape) if value.ndim == 2 and key != "M" else torch.ones_like(value)
        own["step"] = FREQUENCY - 3
    optimizer.load_state_dict(saved)
    g = torch.Generator().manual_seed(0)
    for W in weights:
        W.grad = torch.randn(W.shape, generator=g).to(W.dtype)
    optimizer.step()


@cache
def step_of(method: str, m: int, n: int, rank: int, dtype: torch.dtype, count: int) -> tuple[int, int]:
    """Return the bytes that an ordinary and a refresh step of some weights (m,n) take beside what they keep."""
    weights = [blank((m, n), dtype) for _ in range(count)]
    optimizer = build(method, weights, rank)
    with Peak() as peak:
        settle(optimizer, weights)
        found = []
        for _ in range(2):
            peak.restart()
            optimizer.step()
            found.append(peak.extra)
    return found[0], found[1]


def workspace(method: str, parameters: ParameterSet, rank: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the bytes of an ordinary step, of a refresh step, and what bounds both, of a whole set."""
    most = [0, 0, 0]
    for (m, n), count in parameters.oriented.items():
        r = effective_rank(rank, m, n) if method == "pro-klshampoo" else 0
        elements = OWN[method].method.workspace(m, n, r)
        weight = torch.empty(m, n, device="meta")
        alike = [Piece(weight, "", MatrixShape.of(weight))] * count
        together = max(map(len, runs(alike, elements * 4, device.workspace(torch.device("cpu")))))
        some = min(together, 1 if dtype == torch.float32 else FEW[method])
        own = step_of(method, m, n, rank, dtype, some)
        found = [*(-(-b * together // some) for b in own), together * elements * 4]
        most = [max(pair) for pair in zip(most, found, strict=True)]
    return most[0], most[1], most[2]


def plain_workspace(method: str, parameters: ParameterSet, dtype: torch.dtype) -> int:
    """Return the bytes of a step of Muon or AdamW, which go through the weights one by one: two of a shape show it."""
    weights = [blank((m, n), dtype) for m, n in parameters.oriented for _ in range(2)]
    optimizer = build(method, weights, 0)
    with Peak() as peak:
        optimizer.step()  # makes the state
        peak.restart()
        optimizer.step()
    return peak.extra


def state_figures(method: str, s: ParameterSet, rank: int, dtype: torch.dtype) -> Iterator[rows.Row]:
    """Yield elements and bytes of the state, beside what the paper's table says."""
    elements = total = table = 0
    for (m, n), count in s.oriented.items():
        own = state(method, m, n, rank, dtype)
        elements, total = elements + count * own[0], total + count * own[1]
        table += count * sum(TABLE[method](m, n, effective_rank(rank, m, n)).values())
    scalars, note = ", ".join(SCALARS[method]), "floor is the table's"
    note += f"; beyond it, for each weight: {scalars}" if scalars else ""
    note += " (step is a Python integer, not counted)" if method in OWN else ""
    for unit, found, floor in (("elements", elements, table), ("bytes", total, table * dtype.itemsize)):
        yield {"metric": "state", "unit": unit, "median": found, "floor": floor, "note": note}


def workspace_figures(method: str, s: ParameterSet, rank: int, dtype: torch.dtype) -> Iterator[rows.Row]:
    """Yield the temporary memory of a step and, of this package's, of a refresh step, beside their bound."""
    if method not in OWN:
        yield {"metric": "workspace", "unit": "bytes", "median": plain_workspace(method, s, dtype)}
        return
    *both, bound = workspace(method, s, rank, dtype)
    for metric, found in zip(("workspace", "workspace of a refresh step"), both, strict=True):
        row = {"metric": metric, "unit": "bytes", "median": found}
        yield row | {"ratio": found / bound, "note": "ratio is over the bound"}
    yield {"metric": "workspace bound", "unit": "bytes", "median": bound}


def set_rows(s: ParameterSet) -> Iterator[rows.Row]:
    """Yield the rows of a set; ratios of state are to Muon's."""
    pairs = [*((method, 0) for method in ("muon", "adamw", "kl-shampoo")), *(("pro-klshampoo", r) for r in s.ranks)]
    for dtype in DTYPES:
        muon: dict[str, int] = {}
        for method, rank in pairs:
            row: rows.Row = {"model": s.name, "optimizer": method, "backend": "torch" if method in OWN else ""}
            row |= {"rank": rank or None, "dtype": str(dtype).removeprefix("torch."), "shapes": s.text}
            for found in state_figures(method, s, rank, dtype):
                base = muon.setdefault(found["unit"], found["median"])
                yield row | {"ratio": found["median"] / base} | found
            for found in workspace_figures(method, s, rank, dtype):
                yield row | found
