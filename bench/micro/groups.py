"""What the microbenchmarks time: groups of contenders on one bucket of weights, and the rows of what was measured.

A group is a primitive on the weights of one shape: our forms of it, the plain one, and what KL-Shampoo needs in its
place. On a GPU there are also the kernels, each beside its PyTorch form. ``pytest bench`` runs them all.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from bench import costs, records
from bench.micro.case import Case, Dtypes, Inputs, Sizes, best
from bench.micro.checks import Numbers, standard
from bench.micro.kernel_cases import CASES
from bench.micro.ledger import KL, OURS, PLAIN
from bench.micro.primitive_cases import PRIMITIVES
from bench.rates import Rates
from bench.shapes import ParameterSet
from prokl.shapes import effective_rank

FLUSH = 256 * 2**20
"""Bytes that are written to empty the L2 cache: five times that of an H200, and time for the host to run ahead."""


@dataclass(frozen=True)
class Contender:
    """One form of an operation.

    Attributes:
        name: OURS, PLAIN or KL.
        backend: of ours and KL-Shampoo's: "triton", "extension" or "torch".
        case: whose inputs, work and check are meant; KL-Shampoo's is another than the group's.
        run: from inputs to results.
        obstacle: why it cannot run here, or None.
        note: what a reader must know.
    """

    name: str
    backend: str
    case: Case
    run: Callable[[Inputs], Any]
    obstacle: str | None = None
    note: str = ""


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
        """Key of its rows."""
        s = self.sizes
        weights = "" if self.dtypes.weights == torch.float32 else f", {self.dtypes.name}"
        return f"{self.case.name}, {s.B} of {s.m}x{s.n}, r={s.r}{weights}"

    def contenders(self, device: torch.device) -> list[Contender]:
        """Who takes part on this device; the plain form, which the others are compared with, comes first."""
        case = self.case
        found = [Contender(PLAIN, "torch", case, standard(case))]
        if case.call is not None and device.type == "cuda":
            call, backend = case.call, "extension" if case.verify else "triton"
            run = lambda i: case.dense(call(i, None))  # noqa: E731
            found.append(Contender(OURS, backend, case, run, case.obstacle(device)))
        if case.plain is not None:
            note = "the plain form itself on a CPU" if case.plain_on_cpu and device.type == "cpu" else ""
            found.append(Contender(OURS, "torch", case, lambda i: case.dense(case.torch(i)), note=note))
        if (other := case.counterpart) is not None:
            table, call = best(device), other.call
            theirs = other.torch if call is None or table.name == "torch" else lambda i: call(i, None)
            found.append(Contender(KL, table.name, other, theirs))
        return found


def buckets(sets: Iterable[ParameterSet]) -> dict[Sizes, list[str]]:
    """The buckets of these sets at their largest rank, each once, with the names of the sets that it is in."""
    found: dict[Sizes, list[str]] = {}
    for s in sets:
        for (m, n), count in s.oriented.items():
            found.setdefault(Sizes(count, m, n, effective_rank(s.ranks[-1], m, n)), []).append(s.name)
    return found


def groups(sets: Iterable[ParameterSet], device: torch.device) -> list[Group]:
    """The primitives on all buckets; on a GPU the kernels besides."""
    cases: Sequence[Case] = PRIMITIVES if device.type == "cpu" else (*PRIMITIVES, *CASES)
    found = buckets(sets).items()
    return [Group(case, s, d, tuple(names)) for case in cases for s, names in found for d in case.timed]


def fitted(d: Dtypes, device: torch.device, rates: Rates | None) -> Dtypes:
    """The dtypes with Newton-Schulz in the one that is faster here: on a CPU not always bfloat16."""
    half = device.type == "cuda" or (rates is not None and rates.half > rates.single)
    return d if half else replace(d, polar=torch.float32)


def fresh(c: Contender, g: Group, d: Dtypes, device: torch.device) -> Inputs:
    """The inputs of a contender, always the same."""
    return c.case.inputs(g.sizes, d, Numbers(device))


class Moment:
    """A point in the work of a GPU's current stream; the difference of two is in seconds and waits for the later."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def __sub__(self, earlier: Moment) -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


def timer(device: torch.device) -> Callable[[], Any]:
    """A clock: on a GPU it reads the time at which the work before it is done, so that launching costs nothing."""
    return Moment if device.type == "cuda" else perf_counter


def once(c: Contender, inputs: Inputs, device: torch.device) -> float:
    """Seconds of one call."""
    clock = timer(device)
    start = clock()
    c.run(inputs)
    return clock() - start


def flusher(device: torch.device) -> Callable[[], None] | None:
    """Empties a GPU's L2 cache; meanwhile the host runs ahead."""
    if device.type != "cuda":
        return None
    flush = torch.empty(FLUSH, dtype=torch.int8, device=device)

    def empty() -> None:
        flush.zero_()

    return empty


def dtypes_in_words(c: Contender, s: Sizes, d: Dtypes) -> str:
    """Of the weights, and of Newton-Schulz where it takes part and differs."""
    words = str(d.weights).removeprefix("torch.")
    other = c.case.polar_flops(s) > 0 and d.polar != d.weights
    return words + (f", Newton-Schulz {str(d.polar).removeprefix('torch.')}" if other else "")


def head(c: Contender, g: Group, d: Dtypes) -> dict[str, Any]:
    """What every row of a contender has."""
    s = g.sizes
    notes = [c.note] if c.note else [] if c.case is g.case else [c.case.name]
    return {
        "set": g.name,
        "contender": c.name,
        "backend": "" if c.name == PLAIN else c.backend,
        "metric": "time",
        "unit": "ms",
        "rank": s.r,
        "dtype": dtypes_in_words(c, s, d),
        "shapes": f"{s.B}x{s.m}x{s.n}",
        "note": "; ".join([*notes, f"of {', '.join(g.sets)}"]),
    }


def measured_row(c: Contender, g: Group, d: Dtypes, seconds: Sequence[float], rates: Rates) -> dict[str, Any]:
    """The row of a contender that was timed; without the ratio, which takes the others."""
    s = g.sizes
    polar = c.case.polar_flops(s)
    cost = costs.Cost(polar, c.case.flops(s) - polar, c.case.bytes(s, d))
    figures = {k: 1e3 * v for k, v in records.quartiles(seconds).items()}
    return head(c, g, d) | figures | {"rounds": len(seconds), "floor": 1e3 * costs.floor(cost, rates)}


def left_out_row(c: Contender, g: Group, d: Dtypes, why: str) -> dict[str, Any]:
    """The row of a contender that cannot run, or takes too long."""
    row = head(c, g, d)
    return row | {"note": f"left out: {why}; {row['note']}"}
