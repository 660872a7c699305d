"""Times whole optimizer steps beside Muon's, AdamW's and other packages'.

The optimizers take turns, period by period, for about a second each. Newton-Schulz is in bfloat16 with two rows in
float32, or in float32 alone on a CPU that would emulate bfloat16; ratios are to torch.optim.Muon with the same one. On
a GPU the steps are replayed from CUDA graphs, but for one row. The reference, weight by weight, is measured on a CPU.
Nothing is reported of an optimizer that does not go where the reference goes, or whose weights end not finite. A peer
that cannot run gets a row that says why; what is this package's and fails is wrong.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bench import rows
from bench.rivals import emulated
from bench.shapes import ParameterSet, Problem
from bench.timing.entries import PERIOD, Entry, model_entries, peers
from bench.timing.runs import TimedRun, enter, take_turns

FEWEST, MOST = 3, 15  # periods timed at least and at most
SLOWEST = 10.0  # seconds that a period may take; a slower optimizer is left out


def step_ms(run: TimedRun) -> list[float]:
    """Return the amortised step of every period."""
    return [1e3 * sum(period) / PERIOD for period in run.periods]


def run_rows(run: TimedRun, medians: dict[Any, float], polar: torch.dtype) -> Iterator[rows.Row]:
    """Yield the rows of one optimizer, of which ``medians`` has those of all of its set, by key.

    ``polar`` is the dtype of the Muon that ratios are to where an optimizer has no Newton-Schulz.
    """
    entry = run.entry
    row = {**head(entry, run.problem.parameters), "unit": "ms", "rounds": len(run.periods)}
    reference = medians.get(("muon", "", None, entry.polar or polar, ""))
    ratio = None if reference is None else medians[entry.key] / reference
    yield row | {"metric": "step", "ratio": ratio} | rows.quartiles(step_ms(run))
    if entry.backend:
        between = [1e3 * statistics.mean(period[:-1]) for period in run.periods]
        yield row | {"metric": "step without refresh"} | rows.quartiles(between)
        yield row | {"metric": "refresh step"} | rows.quartiles([1e3 * period[-1] for period in run.periods])


def head(entry: Entry, s: ParameterSet) -> rows.Row:
    """Return what every row of an optimizer has."""
    who = {"model": s.name, "optimizer": entry.optimizer, "backend": entry.backend, "rank": entry.rank}
    return who | {"dtype": entry.dtypes, "shapes": s.text, "note": entry.note}


def set_rows(
    runs: Sequence[TimedRun], left_out: Sequence[tuple[Entry, str]], s: ParameterSet, polar: torch.dtype
) -> list[rows.Row]:
    """Return all rows of a set that has been timed."""
    right = [run for run in runs if run.trouble is None]
    medians = {run.entry.key: statistics.median(step_ms(run)) for run in right}
    found = [row for run in right for row in run_rows(run, medians, polar)]
    for entry, why in [*left_out, *((run.entry, run.trouble) for run in runs if run.trouble)]:
        note = "; ".join(filter(None, [why, entry.note]))
        found.append(head(entry, s) | {"metric": "step", "unit": "ms", "note": note})
    return found


def measure(s: ParameterSet, device: torch.device, seconds: float) -> list[rows.Row]:
    """Time all optimizers on one set, for some seconds each."""
    polar = torch.float32 if emulated(device) else torch.bfloat16
    entries = model_entries(s, device, polar) + peers(s.ranks[len(s.ranks) // 2], polar)
    runs, left_out = enter(entries, Problem(s, device), SLOWEST)
    take_turns(runs, seconds, FEWEST, MOST)
    return set_rows(runs, left_out, s, polar)
