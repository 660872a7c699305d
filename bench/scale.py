"""A divided step at scale, predicted: ``python -m bench.scale [--out bench/results/scale.csv]``.

Owners, state and messages are those of the package's own rules (:mod:`bench.model.ranks`). The time of what a rank
steps is that of the modelled H200 (:mod:`bench.step_model`, tiles, bfloat16 weights, refreshes amortised), that of
messages follows from the assumed links below; they overlap as in a real step, but ranks wait for the slowest of each
wave. Nothing here is measured.
"""

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from bench import rows
from bench.command import Parser, UsageError, command
from bench.model import rates
from bench.model.published import PUBLISHED, Published
from bench.model.ranks import DTYPE, NODE, Plan, Size, Traffic, plan
from bench.model.trace import steps
from bench.shapes import ParameterSet
from bench.step_model import KNOWN, MODELLED, RANK
from bench.steps.entries import PERIOD

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
LAUNCHERS = ("ddp", "fsdp2", "hsdp")
ON_NODE, BETWEEN = 0.8 * 450e9, 0.8 * 50e9
"""Bytes a second that a GPU sends, and receives, by NVLink 4 and by one network adapter of 400 Gbit/s; four fifths of
what is promised."""
LATENCY = 30e-6
"""Seconds of a collective without bytes."""


@cache
def wave_seconds(size: Size, count: int) -> float:
    """Return the seconds of a step of so many matrices of a size, refreshes amortised, on the modelled GPU."""
    if not count:
        return 0.0
    found = steps(ParameterSet("", ((count, *size),), ()), DTYPE, RANK)
    ordinary, refresh = (
        sum(rates.tiles(event) for bucket in buckets for event in bucket) for buckets in found.values()
    )
    return ordinary + (refresh - ordinary) / PERIOD


def sending_seconds(traffic: Traffic) -> float:
    """Return the seconds of some messages: of the rank whose wire is the busiest."""
    ways = [*traffic.sent, *traffic.received]
    return max(max(near / ON_NODE, far / BETWEEN) for near, far in ways) + LATENCY * traffic.collectives


def step_seconds(p: Plan) -> float:
    """Return the seconds of a divided step: messages one after another beside the waves' work, in the step's order."""
    work = [max(wave_seconds(wave.size, count) for count in set(wave.owned)) for wave in p.waves]
    there = [sending_seconds(wave.lent) for wave in p.waves]
    wire = there[0]
    arrived, now = [wire], 0.0
    wire += sending_seconds(p.adamw)
    for i, wave in enumerate(p.waves):
        now = max(now, arrived[i])
        if i + 1 < len(p.waves):
            wire = max(wire, now) + there[i + 1]
            arrived.append(wire)
        now += work[i]
        wire = max(wire, now) + sending_seconds(wave.given)
        if i:
            wire += sending_seconds(p.waves[i - 1].copied)
    return max(now, wire) + sending_seconds(p.waves[-1].copied)


def figures(p: Plan) -> Iterator[tuple[str, str, float]]:
    """Yield (metric, unit, value) of a plan, of the rank that has the most."""
    traffic = [p.adamw, *(way for wave in p.waves for way in wave.traffic)]
    yield "owners", "ranks", sum(cost > 0 for cost in p.costs)
    yield "balance", "largest work over mean", max(p.costs) / mean(p.costs)
    yield "state", "bytes", max(p.state)
    for way in ("sent", "received"):
        totals = [sum(map(sum, of_rank)) for of_rank in zip(*(getattr(one, way) for one in traffic), strict=True)]
        yield way, "bytes", max(totals)
    by_rank = zip(*(wave.owned for wave in p.waves), strict=True)
    sizes = [wave.size for wave in p.waves]
    own = {counts: sum(map(wave_seconds, sizes, counts)) for counts in set(by_rank)}
    yield "work", "ms", 1e3 * max(own.values())
    yield "step", "ms", 1e3 * step_seconds(p)


def alone(model: Published) -> Iterator[tuple[str, str, float]]:
    """Yield the same of one rank that does everything, as under DDP without division; received is the all-reduce's."""
    p = plan(model, 1, "ddp", RANK)
    yield "state", "bytes", p.state[0]
    yield "received", "bytes of the gradients' all-reduce", 2 * model.elements * DTYPE.itemsize
    yield "step", "ms", 1e3 * step_seconds(p)


def model_rows(model: Published, launchers: Sequence[str], worlds: Sequence[int]) -> Iterator[rows.Row]:
    """Yield the rows of a model."""
    given: rows.Row = {"model": model.name, "optimizer": "pro-klshampoo", "rank": RANK}
    for metric, unit, value in alone(model):
        yield given | {"case": "alone", "ranks": 1, "metric": metric, "unit": unit, "median": value}
    for launcher, world in product(launchers, worlds):
        if launcher == "hsdp" and world <= NODE:
            continue  # one replica: fsdp2
        for metric, unit, value in figures(plan(model, world, launcher, RANK)):
            yield given | {"case": launcher, "ranks": world, "metric": metric, "unit": unit, "median": value}


@command
def main(argv: Sequence[str]) -> int:
    """Predict, print, write; return the exit status."""
    parser = Parser(prog="python -m bench.scale", description=(__doc__ or "").partition("\n")[0])
    names = ", ".join(PUBLISHED)
    parser.add_argument("--models", nargs="+", choices=PUBLISHED, default=[*PUBLISHED], metavar="MODEL", help=names)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS, help=", ".join(LAUNCHERS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=RANKS, default=RANKS, help="numbers of GPUs")
    parser.add_argument("--out", type=Path, metavar="CSV", help="also put the rows there, in place of the same models'")
    a = parser.parse_args(argv)
    if a.out and a.out.is_dir():
        raise UsageError(f"--out {a.out}: must be a file; name one in it")
    environment = rows.environment(torch.device("cpu"))
    here = {"device": MODELLED} | {name: environment[name] for name in KNOWN}
    for name in a.models:
        found = []
        for row in model_rows(PUBLISHED[name], a.launchers, a.ranks):
            print(f"{name} {row['case']:6}{row['ranks']:6} {row['metric']:9}{row['median']:18,.3f} {row['unit']}")
            found.append(row | here)
        if a.out:
            rows.upsert(a.out, found, key=("model",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
