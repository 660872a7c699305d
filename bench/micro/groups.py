"""What the microbenchmarks time: groups of forms on one bucket of weights, and the rows of what was measured.

A group is an operation on the weights of one shape: its plain form, ours over every backend that is fit for the device,
and what KL-Shampoo does in its place. On a GPU there are also the kernels, each beside its PyTorch form.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from bench import costs, rows
from bench.counts import Cost
from bench.micro.case import Case, Dtypes, Sizes
from bench.micro.kernels import KERNELS, PRIMITIVES
from bench.micro.stages import STAGES
from bench.rates import Rates, machine_rates
from bench.shapes import ParameterSet
from bench.timing.entries import backends
from prokl import ops
from prokl.algorithm.shapes import effective_rank
from prokl.algorithm.stages import ProKLShampooStages
from prokl.backends.select import select

PLAIN, OURS, KL = "plain", "pro-klshampoo", "kl-shampoo"
"""In the column ``optimizer``: the formula as it is printed, this package's form, and KL-Shampoo's in its place."""


@dataclass(frozen=True)
class Form:
    """One form of an operation.

    Attributes:
        name: PLAIN, OURS or KL.
        backend: whose primitives, of ours and KL-Shampoo's.
        case: whose inputs and work are meant; KL-Shampoo's is another than the group's.
    """

    name: str
    backend: str
    case: Case

    def primitives(self, device: torch.device) -> ProKLShampooStages | None:
        """Return the backend's primitives, as exact as float32; None for the plain form. Pairs have own cases."""
        return None if self.name == PLAIN else select(self.backend, device, "faithful").stages[OURS]


@dataclass(frozen=True)
class Group:
    """What is shown side by side.

    Attributes:
        case: the operation.
        sizes: the bucket.
        dtypes: of weights, state and products.
        sets: names of the parameter sets that have such a bucket.
    """

    case: Case
    sizes: Sizes
    dtypes: Dtypes
    sets: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the key of its rows."""
        s = self.sizes
        weights = "" if self.dtypes.weights == torch.float32 else f", {self.dtypes.name}"
        return f"{self.case.name}, {s.B} of {s.m}x{s.n}, r={s.r}{weights}"

    def forms(self, device: torch.device) -> list[Form]:
        """Return the forms for this device; the plain one, which the others are compared with, comes first."""
        own = backends(device) if self.case.plain else [b for b in backends(device) if b != "torch"]
        found = [Form(PLAIN, "", self.case), *(Form(OURS, backend, self.case) for backend in own)]
        return found + ([Form(KL, own[-1], self.case.counterpart)] if self.case.counterpart else [])


def buckets(sets: Iterable[ParameterSet]) -> dict[Sizes, list[str]]:
    """Return the buckets of these sets at their largest rank, each once, with the names of the sets that have it."""
    found: dict[Sizes, list[str]] = {}
    for s in sets:
        for (m, n), count in s.oriented.items():
            found.setdefault(Sizes(count, m, n, effective_rank(s.ranks[-1], m, n)), []).append(s.name)
    return found


def groups(sets: Iterable[ParameterSet], device: torch.device) -> list[Group]:
    """Return stages and primitives on all buckets; on a GPU the kernels besides."""
    cases = (*STAGES, *PRIMITIVES, *(KERNELS if device.type == "cuda" else ()))
    found = buckets(sets).items()
    return [Group(case, s, d, tuple(names)) for case in cases for s, names in found for d in case.timed]


def fitted(d: Dtypes, device: torch.device, rates: Rates | None) -> Dtypes:
    """Return the dtypes with Newton-Schulz in the one that is faster here: on a CPU not always bfloat16."""
    half = device.type == "cuda" or (rates is not None and rates.half > rates.single)
    return d if half else replace(d, polar=torch.float32)


def row(form: Form, g: Group, d: Dtypes, device: torch.device) -> rows.Row:
    """Return what the row of a form has that is not measured."""
    s, dtype = g.sizes, str(d.weights).removeprefix("torch.")
    if form.case.polar_flops(s) > 0 and d.polar != d.weights:
        dtype += f", Newton-Schulz {str(d.polar).removeprefix('torch.')}"
    notes = [form.case.name] if form.name == KL else []
    if form.name == OURS and form.case.name in ("track subspace", "refresh eigenbases"):
        notes.append(f"QR by {ops.explain_qr(device, form.backend)}")
    return {
        "case": g.name,
        "optimizer": form.name,
        "backend": form.backend,
        "metric": "time",
        "unit": "ms",
        "rank": s.r,
        "dtype": dtype,
        "shapes": f"{s.B}x{s.m}x{s.n}",
        "note": "; ".join([*notes, f"of {', '.join(g.sets)}"]),
    }


def measured(form: Form, g: Group, seconds: Sequence[float], traffic: int, rates: Rates) -> rows.Row:
    """Return what was measured of a form, as columns of its row; ``traffic`` is in bytes."""
    s = g.sizes
    polar = form.case.polar_flops(s)
    cost = Cost(s.B * polar, s.B * (form.case.flops(s) - polar), traffic)
    figures = {k: 1e3 * v for k, v in rows.quartiles(seconds).items()}
    return figures | {"rounds": len(seconds), "floor": 1e3 * costs.floor(cost, rates)}


class Results:
    """Takes the rows of a run and writes those of a group when all of its forms have one: none is written half.

    Attributes:
        device: where it is measured.
        seconds: of timing a form.
    """

    def __init__(self, device: torch.device, seconds: float, path: Path | None, again: bool) -> None:
        self.device, self.seconds = device, seconds
        self._path, self._again = path, again
        self._here = rows.environment(device)
        self._rows: dict[str, dict[str, rows.Row]] = {}
        self.rates = cache(lambda: machine_rates(device, path, self._here))

    def has(self, group: str) -> bool:
        """Return True if the file had this group of this commit and machine before the run."""
        if self._path is None or self._again or group in self._rows:
            return False
        return rows.measured(self._path, {"case": group}, self._here)

    def add(self, found: rows.Row, of: int) -> None:
        """Keep a row; write a group that has all ``of`` its rows, with ratios to the plain form."""
        own = self._rows.setdefault(found["case"], {})
        own[f"{found['optimizer']} {found['backend']}"] = found
        if len(own) < of or self._path is None:
            return
        plain = next((r["median"] for r in own.values() if r["optimizer"] == PLAIN and "median" in r), None)
        ratios = [{"ratio": r["median"] / plain} if plain and "median" in r else {} for r in own.values()]
        whole = [r | ratio | self._here for r, ratio in zip(own.values(), ratios, strict=True)]
        rows.upsert(self._path, whole, key=("model", "case"))

    def fail(self, group: str) -> None:
        """Remove what the file has of a group, whose forms are not all right."""
        found = rows.read(self._path) if self._path else []
        kept = [r for r in found if r.get("case") != group]
        if self._path and len(kept) < len(found):
            rows.write(self._path, kept)
