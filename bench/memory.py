"""Memory of every method: ``python -m bench.memory [--sets gpt2-124m] [--out bench/results/memory.csv]``.

State is that of a real optimizer with one weight of every shape, times their number. It must hold exactly what the
paper's table of memory says (``TABLE``), in every line, and beside it nothing but the scalars listed in ``SCALARS``; of
a configuration for which it does not, nothing is reported. The table's figure stands in the column ``floor``.

Workspace is the most that tensors made during a step hold at one time, on a CPU with backend="torch", and must not
exceed what the package bounds it by. It is extrapolated from one weight or a few (``FEW``) to those that are stepped
together, for the shape that takes the most. What LAPACK and a fused kernel take inside is not seen. A bucket holds
besides, in no state, an aspect scale, a row number and two addresses a weight.

Nothing here is timed, and the figures are the same on every machine.

Dimension key: m short side, n long side, r rank.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import records
from bench.errors import UsageError, command
from bench.shapes import SETS, ParameterSet
from bench.steps.contenders import PERIOD
from bench.steps.peak import Peak
from prokl import KLShampoo, ProKLShampoo
from prokl.base import MatrixOptimizer
from prokl.buckets import split
from prokl.initial import YOUNG
from prokl.shapes import effective_rank

FREQUENCY = PERIOD
OLD = FREQUENCY * (YOUNG // FREQUENCY + 1)
"""A step that refreshes, and late enough that the steps before it correct no start."""
DTYPES = (torch.float32, torch.bfloat16)
FEW = {"pro-klshampoo": 4, "klshampoo": 2}
"""Weights from which the workspace of many is extrapolated, where they are narrower than the arithmetic: they are
updated one by one then, and what one of them takes meanwhile counts for all. Measured on six shapes: four of
Pro-KLShampoo's take up to 6 % more than their share of 16, two of KL-Shampoo's, whose peak lies elsewhere, exactly it,
as in float32 one does."""

TABLE: dict[str, Callable[[int, int, int], dict[str, int]]] = {
    "pro-klshampoo": lambda m, n, r: {
        "factors": m * m + r * r,
        "eigenbases": m * m + r * r,
        "eigenvalues": m + r,
        "subspace basis": n * r,
        "complement scalar": 1,
        "momentum": m * n,
    },
    "klshampoo": lambda m, n, r: {
        "factors": m * m + n * n,
        "eigenbases": m * m + n * n,
        "eigenvalues": m + n,
        "momentum": m * n,
    },
    "muon": lambda m, n, r: {"momentum": m * n},
    "adamw": lambda m, n, r: {"momentum": m * n, "second moment": m * n},
}
"""Elements of one weight in the lines of the paper's table; Muon's and AdamW's likewise, which it does not have."""
LINES = {
    **dict.fromkeys(("L", "S", "R"), "factors"),
    **dict.fromkeys(("Q_L", "Q_S", "Q_R"), "eigenbases"),
    **dict.fromkeys(("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_lambda_R"), "eigenvalues"),
    "U": "subspace basis",
    "inv_sqrt_mu": "complement scalar",
    **dict.fromkeys(("M", "momentum_buffer", "exp_avg"), "momentum"),
    "exp_avg_sq": "second moment",
}
"""Line of the table that a tensor of the state belongs to."""
SCALARS: dict[str, tuple[str, ...]] = {
    "pro-klshampoo": ("lambda_0", "skipped", "step"),
    "klshampoo": ("lambda_0", "skipped", "step"),
    "muon": (),
    "adamw": ("step",),
}
"""What the state of a weight holds that is in no line: one number each."""


@dataclass(frozen=True)
class State:
    """What the state of a weight holds, or of several.

    Attributes:
        elements: numbers in tensors.
        bytes: of those.
        table: elements that the paper's table gives.
    """

    elements: int
    bytes: int
    table: int

    def __add__(self, other: "State") -> "State":
        return State(self.elements + other.elements, self.bytes + other.bytes, self.table + other.table)

    def __mul__(self, count: int) -> "State":
        return State(self.elements * count, self.bytes * count, self.table * count)


def optimizer_of(method: str, weights: list[Tensor], rank: int) -> torch.optim.Optimizer:
    """The optimizer, with state in the dtype of the weights."""
    common: dict[str, Any] = {"state_dtype": weights[0].dtype, "precondition_frequency": FREQUENCY, "backend": "torch"}
    if method == "pro-klshampoo":
        return ProKLShampoo(weights, rank=rank, ns_dtype=torch.bfloat16, **common)
    if method == "klshampoo":
        return KLShampoo(weights, **common)
    return torch.optim.Muon(weights) if method == "muon" else torch.optim.AdamW(weights, fused=True)


def blank(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A weight with a gradient, both zero: state is made from it and nothing moves."""
    W = torch.nn.Parameter(torch.zeros(*shape, dtype=dtype))
    W.grad = torch.zeros_like(W)
    return W


def checked(method: str, state: dict[str, Any], m: int, n: int, r: int) -> State:
    """What a weight's state holds.

    Raises:
        ArithmeticError: it is not what table and scalars say.
    """
    table = TABLE[method](m, n, r)
    found, scalars = dict.fromkeys(table, 0), []
    for key, value in state.items():
        if key in LINES:
            found[LINES[key]] = found.get(LINES[key], 0) + value.numel()
        elif not isinstance(value, Tensor) or value.numel() == 1:
            scalars.append(key)
        else:
            raise ArithmeticError(f"{key} of shape {tuple(value.shape)} is in no line of the table")
    if found != table or tuple(sorted(scalars)) != SCALARS[method]:
        raise ArithmeticError(f"the state has {found} and {sorted(scalars)}; must be {table} and {SCALARS[method]}")
    tensors = [value for value in state.values() if isinstance(value, Tensor)]
    return State(sum(t.numel() for t in tensors), sum(t.nbytes for t in tensors), sum(table.values()))


@cache
def state(method: str, m: int, n: int, rank: int, dtype: torch.dtype) -> State:
    """State of one weight (m,n), from a real optimizer.

    Raises:
        ArithmeticError: it is not what the table says.
    """
    W = blank((m, n), dtype)
    optimizer = optimizer_of(method, [W], rank)
    with Peak():
        optimizer.step()
    return checked(method, optimizer.state[W], m, n, effective_rank(rank, m, n))


def settle(optimizer: torch.optim.Optimizer, weights: Sequence[Tensor]) -> None:
    """Give weights a state past its first steps, two before a refresh, without the SVD that a start takes.

    Which values it has decides nothing about memory, as long as the bases are some.
    """
    optimizer.step()
    saved = optimizer.state_dict()
    for own in saved["state"].values():
        for key, value in own.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                own[key] = torch.eye(*value.shape) if value.ndim == 2 and key != "M" else torch.ones_like(value)
        own["step"] = OLD - 3
    optimizer.load_state_dict(saved)
    g = torch.Generator().manual_seed(0)
    for W in weights:
        W.grad = torch.randn(W.shape, generator=g).to(W.dtype)
    optimizer.step()


@cache
def step_of(method: str, m: int, n: int, rank: int, dtype: torch.dtype, count: int) -> tuple[int, int]:
    """Bytes that an ordinary and a refresh step of some weights (m,n) take beside weights, gradients and state."""
    weights = [blank((m, n), dtype) for _ in range(count)]
    optimizer = optimizer_of(method, weights, rank)
    with Peak() as peak:
        settle(optimizer, weights)
        found = []
        for _ in range(2):
            peak.restart()
            optimizer.step()
            found.append(peak.extra)
    return found[0], found[1]


def workspace(method: str, parameters: ParameterSet, rank: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes that an ordinary step takes, a refresh step, and what the package bounds both by, for a whole set.

    Raises:
        ArithmeticError: a step takes more than the bound.
    """
    cls: type[MatrixOptimizer] = ProKLShampoo if method == "pro-klshampoo" else KLShampoo
    most = [0, 0, 0]
    for (m, n), count in parameters.oriented.items():
        r = effective_rank(rank, m, n) if method == "pro-klshampoo" else 0
        elements = cls.method.workspace(m, n, r)
        weight = torch.empty(m, n, device="meta")
        together = max(map(len, split([(weight, "")] * count, elements, 4)))
        some = min(together, 1 if dtype == torch.float32 else FEW[method])
        own = step_of(method, m, n, rank, dtype, some)
        found = [*(-(-b * together // some) for b in own), together * elements * 4]
        if max(found[:2]) > found[2]:
            raise ArithmeticError(f"{together} of {m}x{n} take {max(found[:2])} bytes; the bound is {found[2]}")
        most = [max(pair) for pair in zip(most, found, strict=True)]
    return most[0], most[1], most[2]


def plain_workspace(method: str, parameters: ParameterSet, dtype: torch.dtype) -> int:
    """Bytes that a step of Muon or AdamW takes, which go through the weights one by one: two of every shape show it."""
    weights = [blank((m, n), dtype) for m, n in parameters.oriented for _ in range(2)]
    optimizer = optimizer_of(method, weights, 0)
    with Peak() as peak:
        optimizer.step()  # makes the state
        peak.restart()
        optimizer.step()
    return peak.extra


def rows_of(parameters: ParameterSet) -> Iterator[dict[str, Any]]:
    """The rows of a set; one with an empty median and a note says what is wrong."""
    shapes = " ".join(f"{count}x{rows}x{cols}" for count, rows, cols in parameters.shapes)
    contenders: list[tuple[str, int]] = [("muon", 0), ("adamw", 0), ("klshampoo", 0)]
    contenders += [("pro-klshampoo", rank) for rank in parameters.ranks]
    for dtype in DTYPES:
        muon: dict[str, int] = {}
        for method, rank in contenders:
            own = method in ("klshampoo", "pro-klshampoo")
            row = {
                "set": parameters.name,
                "contender": method,
                "backend": "torch" if own else "",
                "rank": rank or None,
                "dtype": str(dtype).removeprefix("torch."),
                "shapes": shapes,
            }
            try:
                for unit, found in _state_figures(method, parameters, rank, dtype):
                    muon.setdefault(unit, found["median"])
                    yield row | {"metric": "state", "unit": unit, "ratio": found["median"] / muon[unit]} | found
            except ArithmeticError as error:
                yield row | {"metric": "state", "note": f"wrong: {error}"}
            try:
                for metric, found in _workspace_figures(method, parameters, rank, dtype):
                    yield row | {"metric": metric, "unit": "bytes"} | found
            except ArithmeticError as error:
                yield row | {"metric": "workspace", "note": f"wrong: {error}"}


def _state_figures(
    method: str, parameters: ParameterSet, rank: int, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Any]]]:
    found = State(0, 0, 0)
    for (m, n), count in parameters.oriented.items():
        found += state(method, m, n, rank, dtype) * count
    scalars = ", ".join(SCALARS[method])
    note = f"floor is the table's; beyond it, for each weight: {scalars}" if scalars else "floor is the table's"
    if "skipped" in SCALARS[method]:
        note += " (step is a Python integer, not counted)"
    yield "elements", {"median": found.elements, "floor": found.table, "note": note}
    yield "bytes", {"median": found.bytes, "floor": found.table * dtype.itemsize, "note": note}


def _workspace_figures(
    method: str, parameters: ParameterSet, rank: int, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Any]]]:
    if method in ("muon", "adamw"):
        yield "workspace", {"median": plain_workspace(method, parameters, dtype)}
        return
    ordinary, refresh, bound = workspace(method, parameters, rank, dtype)
    note = "ratio is over the bound"
    yield "workspace", {"median": ordinary, "ratio": ordinary / bound, "note": note}
    yield "workspace of a refresh step", {"median": refresh, "ratio": refresh / bound, "note": note}
    yield "workspace bound", {"median": bound}


def words(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    rank = f" r={row['rank']}" if row["rank"] else ""
    what = f"{row['set']} {row['contender']}{rank} {row['dtype']} {row['metric']}"
    if "median" not in row:
        return f"{what}: {row['note']}"
    figure = f"{row['median']} {row['unit']}"
    table = f", the table says {row['floor']}" if "floor" in row else ""
    return f"{what}: {figure}{table}"


def measure(sets: Sequence[str], out: Path | None, again: bool) -> int:
    """Print the rows of these sets and put them into the file, unless it has them; 1 where one is wrong."""
    here = records.environment(torch.device("cpu"))
    wrong = False
    for name in sets:
        if out and not again and records.measured(out, name, here):
            print(f"{name}: in {out} already; --again measures it anew", flush=True)
            continue
        rows = []
        for row in rows_of(SETS[name]):
            wrong |= "median" not in row
            print(words(row), flush=True)
            rows.append(row | here)
        if out:
            records.merge(out, rows)
    return int(wrong)


@command
def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*SETS], metavar="SET", help=", ".join(SETS))
    parser.add_argument("--out", type=Path, metavar="CSV", help="also put the rows there, in place of the same sets'")
    parser.add_argument("--again", action="store_true", help="measure also what --out has of this commit and machine")
    a = parser.parse_args(argv)
    if a.out and a.out.is_dir():
        raise UsageError(f"--out {a.out}: must be a file; name one in it")
    if a.out:
        records.read(a.out)  # now, not after measuring
    return measure(a.sets, a.out, a.again)


if __name__ == "__main__":
    sys.exit(main())
