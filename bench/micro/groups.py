"""Group the forms that microbenchmarks time on one bucket of weights, and make rows of the times.

A group is an operation on the weights of one shape: its plain form, ours over every backend that is fit for the device,
and what KL-Shampoo does in its place. On a GPU there are also the kernels, each beside its PyTorch form in float32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bench import rows
from bench.micro.case import Case, Dtypes, Sizes
from bench.micro.kernels import KERNELS, PRIMITIVES
from bench.shapes import ParameterSet
from bench.timing.entries import backends
from prokl import ops
from prokl.algorithm.algebra import Algebra
from prokl.algorithm.shapes import effective_rank
from prokl.backends.select import select

PLAIN, OURS, KL, LIBRARY = "plain", "pro-klshampoo", "kl-shampoo", "library"
"""Names in the column ``optimizer``: the formula as it is printed, this package's form, KL-Shampoo's in its place, or
the library's product of factors that lie deep."""
HEADS = ParameterSet("gpt2-124m by heads", ((288, 64, 768),), (32, 64))
"""Query and key in pieces, one a head, on which the library's product is timed too."""
KEY = ("case", "optimizer", "backend")
"""Columns that tell a row from the others."""


@dataclass(frozen=True)
class Form:
    """One form of an operation.

    Attributes:
        name: PLAIN, OURS, KL or LIBRARY.
        backend: whose primitives, but for the plain form.
        case: whose inputs and work are meant; KL-Shampoo's is another than the group's.
    """

    name: str
    backend: str
    case: Case

    def primitives(self, device: torch.device) -> Algebra | None:
        """Return the backend's operations of the case's precision; None for the plain form."""
        return None if self.name == PLAIN else select(self.backend, device, self.case.precision).ops

    @property
    def called(self) -> Case:
        """Return the case as this form computes it."""
        library = self.case.library
        return replace(self.case, bind=lambda i, _: library(i)) if library and self.name == LIBRARY else self.case


@dataclass(frozen=True)
class Group:
    """Forms that are shown side by side: an operation on a bucket, in some dtypes, of all parameter sets with it."""

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
        found += [Form(KL, own[-1], self.case.counterpart)] if self.case.counterpart else []
        return found + ([Form(LIBRARY, "torch", self.case)] if self.case.library else [])


def groups(sets: Iterable[ParameterSet], device: torch.device) -> list[Group]:
    """Return the primitives on all buckets of the sets at their largest rank; on a GPU the kernels besides.

    Those that are timed beside the library's product are so at the least rank, too, and on heads.
    """
    sets, smallest = list(sets), []
    largest = _buckets((s, s.ranks[-1]) for s in sets)
    if device.type == "cuda":
        smallest = [(s, s.ranks[0]) for s in sets]
    beside_library = largest | _buckets([*smallest, *((HEADS, rank) for rank in HEADS.ranks)])
    found = []
    for case in (*PRIMITIVES, *(KERNELS if device.type == "cuda" else ())):
        buckets = beside_library if case.library else largest
        found += [Group(case, s, d, tuple(names)) for s, names in buckets.items() for d in case.timed]
    return found


def _buckets(ranked: Iterable[tuple[ParameterSet, int]]) -> dict[Sizes, list[str]]:
    """Return the sets that have a bucket, each of these sets at a rank."""
    found: dict[Sizes, list[str]] = {}
    for s, rank in ranked:
        for (m, n), count in s.oriented.items():
            found.setdefault(Sizes(count, m, n, effective_rank(rank, m, n)), []).append(s.name)
    return found


def row(form: Form, g: Group, d: Dtypes, device: torch.device) -> rows.Row:
    """Return what the row of a form has that is not measured."""
    s, dtype = g.sizes, str(d.weights).removeprefix("torch.")
    if form.case.polar and d.polar != d.weights:
        dtype += f", Newton-Schulz {str(d.polar).removeprefix('torch.')}"
    notes = [form.case.name] if form.name == KL else []
    if form.name == OURS and form.case.name in ("track", "refresh"):
        notes.append(f"QR by {ops.explain_qr(device, form.backend)}")
    who = {"case": g.name, "optimizer": form.name, "backend": form.backend, "rank": s.r}
    what = {"metric": "time", "unit": "ms", "dtype": dtype, "shapes": f"{s.B}x{s.m}x{s.n}"}
    return who | what | {"note": "; ".join([*notes, f"of {', '.join(g.sets)}"])}


class Results:
    """Writes the rows of a run as they come.

    Attributes:
        device: where it is measured.
        seconds: of timing a form.
    """

    def __init__(self, device: torch.device, seconds: float, path: Path | None) -> None:
        self.device, self.seconds = device, seconds
        self._path = path
        self._here = rows.environment(device)
        self._plain: dict[str, float] = {}

    def has(self, found: rows.Row) -> bool:
        """Return True if the file has this row, of this commit and machine."""
        key = {name: found[name] for name in KEY}
        return self._path is not None and rows.measured(self._path, key, self._here)

    def add(self, found: rows.Row) -> None:
        """Write a row with its ratio to the plain form's of its group, which is the first of it."""
        case = found["case"]
        if found["optimizer"] == PLAIN:
            self._plain[case] = found["median"]
        elif case not in self._plain and self._path is not None:  # it went before an interruption
            (plain,) = rows.having(rows.read(self._path), {"case": case, "optimizer": PLAIN})
            self._plain[case] = float(plain["median"])
        if self._path is not None:
            rows.upsert(self._path, [found | {"ratio": found["median"] / self._plain[case]} | self._here], KEY)
