"""Times whole optimizer steps beside Muon's, AdamW's and other packages': ``python -m bench.step_cpu [--out CSV]``.

Refreshes are amortised over periods of ten steps. Contenders take turns, period by period, for about a second each.
Newton-Schulz runs in the dtype that is faster here, bfloat16 or float32, in all but two rows; ratios are to
torch.optim.Muon with the same one. The reference, weight by weight, is measured at the largest rank only. Nothing is
reported of a contender that does not go where the reference goes, or whose weights end not finite. A peer that cannot
run gets a row that says why; what is this package's and fails is wrong, and the exit status 1.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench import costs, records
from bench.errors import UsageError, command
from bench.rates import Rates, machine_rows, main_dtype, measure_rates, recorded
from bench.shapes import PAPER, SETS, SMALL, SWEEPS, ParameterSet, Sweep
from bench.steps.contenders import PERIOD, Contender, main_contenders, sweep_contenders
from bench.steps.exponents import PAPER as PAPER_COUNTS
from bench.steps.exponents import exponent, predicted
from bench.steps.gate import Gate
from bench.steps.lanes import Lane, enter, take_turns
from bench.steps.peers import peers
from bench.steps.problem import Problem

FEWEST = 3
"""Periods timed at least."""
SLOWEST = 10.0
"""Seconds that a period may take; a slower contender is left out."""
EMULATED = 4
"""Times that products in bfloat16 take as long as in float32 from which rows with them are left out: a CPU that has
no instructions for them takes ten times as long."""
KL_EACH = ("klshampoo", "reference", None, None)
"""Key of KL-Shampoo stepped weight by weight, as its authors' code does."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Attributes:
        seconds: of timing per contender and set.
        rounds: periods at most.
    """

    seconds: float
    rounds: int


def sizes(s: ParameterSet) -> str:
    """Shapes of a set in one cell."""
    return " ".join(f"{count}x{rows}x{cols}" for count, rows, cols in s.shapes)


def step_ms(lane: Lane) -> list[float]:
    """Amortised step of every period."""
    return [1e3 * sum(period) / PERIOD for period in lane.periods]


def lane_rows(lane: Lane, medians: dict[Any, float], rates: Rates) -> Iterator[Row]:
    """The rows of a contender; ``medians`` are all contenders' of its set, by key."""
    c, s = lane.contender, lane.problem.parameters
    row = {**head(c, s), "unit": "ms", "rounds": len(lane.periods)}
    steps = step_ms(lane)
    floor = None
    if c.method:
        floor = 1e3 * costs.floor(costs.total(s, c.rank or 1, PERIOD, c.method, "least"), rates)
    reference = medians.get(("muon", "", None, c.polar or main_dtype(rates)))
    ratio = None if reference is None else medians[c.key] / reference
    yield row | {"metric": "step", "ratio": ratio, "floor": floor} | records.quartiles(steps)
    if c.own is None:
        return
    between = [1e3 * statistics.mean(period[:-1]) for period in lane.periods]
    yield row | {"metric": "step without refresh"} | records.quartiles(between)
    yield row | {"metric": "refresh step"} | records.quartiles([1e3 * period[-1] for period in lane.periods])
    if c.key != KL_EACH and KL_EACH in medians:
        against = medians[c.key] / medians[KL_EACH]
        yield row | {"metric": "step over klshampoo reference", "unit": "1", "median": against}


def head(c: Contender, s: ParameterSet) -> Row:
    """What every row of a contender has."""
    who = {"set": s.name, "contender": c.name, "backend": c.backend, "rank": c.rank}
    return who | {"dtype": c.dtypes, "shapes": sizes(s), "note": c.note}


def rows_of(
    lanes: Sequence[Lane], left_out: Sequence[tuple[Contender, str]], s: ParameterSet, rates: Rates
) -> list[Row]:
    """All rows of a set that has been timed."""
    right = [lane for lane in lanes if lane.trouble is None]
    medians = {lane.contender.key: statistics.median(step_ms(lane)) for lane in right}
    rows = [row for lane in right for row in lane_rows(lane, medians, rates)]
    for c, why in [*left_out, *((lane.contender, lane.trouble) for lane in lanes if lane.trouble)]:
        rows.append(head(c, s) | {"metric": "step", "unit": "ms", "note": "; ".join(filter(None, [why, c.note]))})
    return rows


def measure_set(s: ParameterSet, device: torch.device, gate: Gate, effort: Effort, rates: Rates) -> list[Row]:
    """All contenders on one set."""
    polar = main_dtype(rates)
    contenders = main_contenders(s, device, polar)
    emulated: list[tuple[Contender, str]] = []
    if rates.single > EMULATED * rates.half:
        why = f"left out: products in bfloat16 take {rates.single / rates.half:.1f} times as long as in float32 here"
        emulated = [(c, why) for c in contenders if c.polar == torch.bfloat16]
        contenders = [c for c in contenders if c.polar != torch.bfloat16]
    contenders += peers(s.ranks[len(s.ranks) // 2], polar)
    lanes, left_out = enter(contenders, Problem(s, device), gate, SLOWEST)
    take_turns(lanes, effort.seconds, FEWEST, effort.rounds)
    return rows_of(lanes, [*emulated, *left_out], s, rates)


def measure_sweep(w: Sweep, device: torch.device, gate: Gate, effort: Effort, rates: Rates) -> list[Row]:
    """The contenders of the sweeps on all points in turns, and how their time grows."""
    entered = [
        (s, *enter(sweep_contenders(s.ranks[0], device, main_dtype(rates)), Problem(s, device), gate, SLOWEST))
        for _, s in w.points
    ]
    take_turns([lane for _, lanes, _ in entered for lane in lanes], effort.seconds, FEWEST, effort.rounds)
    rows = [row for s, lanes, left_out in entered for row in rows_of(lanes, left_out, s, rates)]
    return rows + list(growth(w, rows))


def growth(w: Sweep, rows: Sequence[Row]) -> Iterator[Row]:
    """Exponents of the contenders that have a figure at every point."""
    steps: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["metric"] == "step" and "median" in row:
            steps.setdefault((row["contender"], row["backend"]), {})[row["set"]] = row["median"]
    for (contender, backend), medians in steps.items():
        if len(medians) < len(w.points):
            continue
        row = {"set": w.variable, "contender": contender, "backend": backend, "unit": "1"}
        row["note"] = f"{w.fixed}; {w.variable} from {w.points[0][0]} to {w.points[-1][0]}"
        measured = exponent([(x, medians[s.name]) for x, s in w.points])
        yield row | {"metric": f"exponent of {w.variable}", "median": measured}
        if contender in PAPER_COUNTS:
            expected = predicted(contender, w.points, PERIOD)
            yield row | {"metric": f"exponent of {w.variable}, paper's count", "median": expected}


def words(row: Row) -> str:
    """A row as a line."""
    who = [row["set"], row.get("contender"), row.get("backend"), f"r={row['rank']}" if row.get("rank") else ""]
    line = " ".join(filter(None, [*who, row["metric"]])) + ": "
    if "median" not in row:
        return line + row["note"]
    line += f"{row['median']:.4g} {row['unit']}".removesuffix(" 1")
    if "q1" in row:
        line += f" [{row['q1']:.4g}, {row['q3']:.4g}]"
    if row.get("ratio"):
        line += f", {row['ratio']:.2f} x"
    return line


def units(names: Sequence[str]) -> dict[str, tuple[list[str], Callable[..., list[Row]], ParameterSet | Sweep]]:
    """By name: the sets that a measurement fills, what measures it, and of what."""
    found: dict[str, tuple[list[str], Callable[..., list[Row]], ParameterSet | Sweep]] = {}
    for name in names:
        if name in SETS:
            found[name] = [name], measure_set, SETS[name]
        else:
            found[name] = [name, *(s.name for _, s in SWEEPS[name].points)], measure_sweep, SWEEPS[name]
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line.

    Raises:
        UsageError: there is no such device, or a number is out of bounds, in one line with the remedy.
    """
    parser = argparse.ArgumentParser(prog="python -m bench.step_cpu", description=(__doc__ or "").partition("\n")[0])
    every = [*SETS, *SWEEPS]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=every,
        metavar="SET",
        help=f"of {', '.join(every)} (default: the small sets and all sweeps; on cuda the paper's sets)",
    )
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="per contender and set (default: 1)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="periods at most (default: 15)")
    parser.add_argument(
        "--out", type=Path, metavar="CSV", help="put the rows there, in place of those of the same sets"
    )
    parser.add_argument("--again", action="store_true", help="measure also what --out has of this commit and machine")
    a = parser.parse_args(argv)
    if not a.seconds > 0 or a.rounds < FEWEST:
        raise UsageError(f"--seconds {a.seconds:g} --rounds {a.rounds}: must be more than 0, and at least {FEWEST}")
    a.device = torch.device(a.device)
    if a.device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    if a.out:
        records.read(a.out)  # now, not after measuring
    a.sets = a.sets or (list(PAPER) if a.device.type == "cuda" else [*SMALL, *SWEEPS])
    return a


@command
def main(argv: Sequence[str]) -> int:
    """Measure, print, write; the exit status, which is 1 where something was wrong."""
    a = parse(argv)
    torch.set_float32_matmul_precision("highest")
    here = records.environment(a.device)
    gate, effort, wrong = Gate(), Effort(a.seconds, a.rounds), False
    rates: Rates | None = None

    def finish(rows: list[Row]) -> None:
        for row in rows:
            print(words(row), flush=True)
        if a.out:
            records.merge(a.out, [row | here for row in rows])

    for name, (sets, measure, subject) in units(a.sets).items():
        if a.out and not a.again and all(records.measured(a.out, s, here) for s in sets):
            print(f"{name}: in {a.out} already; --again measures it anew", flush=True)
            continue
        rates = rates or recorded(a.out, here)  # the floors of the sets in the file are made of those
        if rates is None:
            rates = measure_rates(a.device, torch.get_num_threads())
            finish(machine_rows(rates))
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        rows = measure(subject, a.device, gate, effort, rates)
        wrong |= any(row["note"].startswith("wrong") for row in rows)
        finish(rows)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
