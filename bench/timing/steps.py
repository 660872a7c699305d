"""Times whole optimizer steps beside Muon's, AdamW's and other packages'.

Refreshes are amortised over periods of ten steps. The optimizers take turns, period by period, for about a second
each. Newton-Schulz runs in the dtype that is faster here, bfloat16 or float32, in all but two rows; ratios are to
torch.optim.Muon with the same one. On a GPU the steps are replayed from CUDA graphs, but for one row. The reference,
weight by weight, is measured at the largest rank only. Nothing is reported of an optimizer that does not go where the
reference goes, or whose weights end not finite. A peer that cannot run gets a row that says why; what is this package's
and fails is wrong.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench import costs, rows
from bench.rates import Rates, main_dtype
from bench.shapes import ASPECTS, ParameterSet
from bench.timing.entries import PERIOD, Entry, aspect_entries, model_entries, peers
from bench.timing.problem import Problem
from bench.timing.runs import TimedRun, enter, take_turns

FEWEST = 3
"""Periods timed at least."""
SLOWEST = 10.0
"""Seconds that a period may take; a slower optimizer is left out."""
EMULATED = 4
"""Times that products in bfloat16 take as long as in float32 from which rows with them are left out: a CPU that has
no instructions for them takes ten times as long."""
KL_EACH = ("kl-shampoo", "reference", None, None, False)
"""Key of KL-Shampoo stepped weight by weight, as its authors' code does."""


def step_ms(run: TimedRun) -> list[float]:
    """Return the amortised step of every period."""
    return [1e3 * sum(period) / PERIOD for period in run.periods]


def run_rows(run: TimedRun, medians: dict[Any, float], rates: Rates) -> Iterator[rows.Row]:
    """Yield the rows of one optimizer; ``medians`` are those of all of its set, by key."""
    entry, s = run.entry, run.problem.parameters
    row = {**head(entry, s), "unit": "ms", "rounds": len(run.periods)}
    floor = None
    if entry.optimizer in costs.METHODS:
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
