"""Times whole optimizer steps beside Muon's, AdamW's and other packages': ``python -m bench.step [--out CSV]``.

Refreshes are amortised over periods of ten steps. The optimizers take turns, period by period, for about a second
each. Newton-Schulz runs in the dtype that is faster here, bfloat16 or float32, in all but two rows; ratios are to
torch.optim.Muon with the same one. On a GPU the steps are replayed from CUDA graphs, but for one row. The reference,
weight by weight, is measured at the largest rank only. Nothing is reported of an optimizer that does not go where the
reference goes, or whose weights end not finite. A peer that cannot run gets a row that says why; what is this package's
and fails is wrong, and the exit status 1.

With --kernels it lists where the time of a step goes instead, kernel by kernel.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import costs, rows
from bench.command import Parser, UsageError, command
from bench.rates import Rates, machine_rates, main_dtype
from bench.shapes import ASPECTS, PAPER, SETS, SMALL, ParameterSet
from bench.steps import kernels
from bench.steps.entries import PERIOD, Entry, aspect_entries, model_entries
from bench.steps.peers import peers
from bench.steps.problem import Problem
from bench.steps.runs import TimedRun, enter, take_turns

FEWEST = 3
"""Periods timed at least."""
SLOWEST = 10.0
"""Seconds that a period may take; a slower optimizer is left out."""
EMULATED = 4
"""Times that products in bfloat16 take as long as in float32 from which rows with them are left out: a CPU that has
no instructions for them takes ten times as long."""
KL_EACH = ("kl-shampoo", "reference", None, None, False)
"""Key of KL-Shampoo stepped weight by weight, as its authors' code does."""
EVERY = SETS | ASPECTS


def step_ms(run: TimedRun) -> list[float]:
    """Return the amortised step of every period."""
    return [1e3 * sum(period) / PERIOD for period in run.periods]


def run_rows(run: TimedRun, medians: dict[Any, float], rates: Rates) -> Iterator[rows.Row]:
    """Yield the rows of one optimizer; ``medians`` are those of all of its set, by key."""
    entry, s = run.entry, run.problem.parameters
    row = {**head(entry, s), "unit": "ms", "rounds": len(run.periods)}
    floor = None
    if entry.counted:
        floor = 1e3 * costs.floor(costs.total(s, entry.rank or 1, PERIOD, entry.optimizer, least=True), rates)
    reference = medians.get(("muon", "", None, entry.polar or main_dtype(rates), False))
    ratio = None if reference is None else medians[entry.key] / reference
    yield row | {"metric": "step", "ratio": ratio, "floor": floor} | rows.quartiles(step_ms(run))
    if not entry.backend:
        return
    between = [1e3 * statistics.mean(period[:-1]) for period in run.periods]
    yield row | {"metric": "step without refresh"} | rows.quartiles(between)
    yield row | {"metric": "refresh step"} | rows.quartiles([1e3 * period[-1] for period in run.periods])
    if entry.key != KL_EACH and KL_EACH in medians:
        against = medians[entry.key] / medians[KL_EACH]
        yield row | {"metric": "step over klshampoo reference", "unit": "1", "median": against}


def head(entry: Entry, s: ParameterSet) -> rows.Row:
    """Return what every row of an optimizer has."""
    who = {"model": s.name, "optimizer": entry.optimizer, "backend": entry.backend, "rank": entry.rank}
    return who | {"dtype": entry.dtypes, "shapes": s.text, "note": entry.note}


def set_rows(
    runs: Sequence[TimedRun], left_out: Sequence[tuple[Entry, str]], s: ParameterSet, rates: Rates
) -> list[rows.Row]:
    """Return all rows of a set that has been timed."""
    right = [run for run in runs if run.trouble is None]
    medians = {run.entry.key: statistics.median(step_ms(run)) for run in right}
    found = [row for run in right for row in run_rows(run, medians, rates)]
    for entry, why in [*left_out, *((run.entry, run.trouble) for run in runs if run.trouble)]:
        note = "; ".join(filter(None, [why, entry.note]))
        found.append(head(entry, s) | {"metric": "step", "unit": "ms", "note": note})
    return found


def measure(s: ParameterSet, device: torch.device, rates: Rates, seconds: float, rounds: int) -> list[rows.Row]:
    """Time all optimizers on one set, for some seconds each and ``rounds`` periods at most."""
    polar, left_out = main_dtype(rates), []
    if s.name in ASPECTS:
        entries = aspect_entries(s, device, polar)
    else:
        entries = model_entries(s, device, polar) + peers(s.ranks[len(s.ranks) // 2], polar)
    if rates.single > EMULATED * rates.half:
        why = f"left out: products in bfloat16 take {rates.single / rates.half:.1f} times as long as in float32 here"
        left_out = [(entry, why) for entry in entries if entry.polar == torch.bfloat16]
        entries = [entry for entry in entries if entry.polar != torch.bfloat16]
    runs, others = enter(entries, Problem(s, device), SLOWEST)
    take_turns(runs, seconds, FEWEST, rounds)
    return set_rows(runs, left_out + others, s, rates)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line.

    Raises:
        UsageError: there is no such device, or a number is out of bounds, in one line with the remedy.
    """
    parser = Parser(prog="python -m bench.step", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--sets",
        nargs="+",
        choices=EVERY,
        metavar="SET",
        help=f"of {', '.join(EVERY)} (default: the small sets and n/m; on cuda and with --kernels models alone)",
    )
    parser.add_argument("--kernels", action="store_true", help="list kernels, or on a CPU PyTorch's operators")
    parser.add_argument("--seconds", type=float, default=1.0, metavar="S", help="per optimizer and set (default: 1)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="periods at most (default: 15)")
    parser.add_argument("--out", type=Path, metavar="CSV", help="put the rows there, in place of the same sets'")
    parser.add_argument("--again", action="store_true", help="measure also what --out has of this commit and machine")
    a = parser.parse_args(argv)
    if not a.seconds > 0 or a.rounds < FEWEST:
        raise UsageError(f"--seconds {a.seconds:g} --rounds {a.rounds}: must be more than 0, and at least {FEWEST}")
    a.device = torch.device(a.device)
    if a.device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: there is no CUDA device here; leave it out to measure on the CPU")
    if a.out:
        rows.read(a.out)  # now, not after measuring
    models = PAPER if a.device.type == "cuda" else SMALL
    a.sets = a.sets or [*models, *(ASPECTS if models == SMALL and not a.kernels else ())]
    return a


@command
def main(argv: Sequence[str]) -> int:
    """Measure, print, write; return the exit status, which is 1 where something was wrong."""
    a = parse(argv)
    torch.set_float32_matmul_precision("highest")
    here, rates, failed = rows.environment(a.device), None, False
    for name in a.sets:
        if a.out and not a.again and rows.measured(a.out, {"model": name}, here):
            print(f"{name}: in {a.out} already; --again measures it anew", flush=True)
            continue
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        if a.kernels:
            found = list(kernels.measure(EVERY[name], a.device))
            failed |= any("median" not in row for row in found)
        else:
            rates = rates or machine_rates(a.device, a.out, here)
            found = measure(EVERY[name], a.device, rates, a.seconds, a.rounds)
            failed |= any(row["note"].startswith("wrong") for row in found)
        for row in found:
            print(rows.describe(row), flush=True)
        if a.out:
            rows.upsert(a.out, [row | here for row in found], key=("model", "case"))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
