"""From runs to rows: means with standard errors, and time to a matched loss."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from pandas import DataFrame

from bench.optimizers import Hyper
from bench.rows import Row
from bench.study.study import Study
from bench.study.units import Result
from bench.training.run import Record

LOSS = "validation_loss"
SETTINGS = ("lr", "alpha_kl", "weight_decay", "adamw_lr", "adamw_weight_decay")
TARGETS = ("kl-shampoo", "muon")  # whose final losses the paper measures the time to
Selected, Found = Mapping[str, Hyper], Mapping[str, list[Result]]
"""What trained, and its results by seed."""


def reached(losses: Sequence[float], at: Sequence[float], target: float) -> float:
    """Return where a loss first reaches ``target``, interpolated between evaluations; nan if never."""
    below = np.flatnonzero(np.asarray(losses) <= target)
    if not len(below):
        return math.nan
    part = slice(max(0, below[0] - 1), below[0] + 1)
    return float(np.interp(-target, np.negative(losses[part]), at[part]))


def rows_of(study: Study, selected: Selected, results: Found) -> list[Row]:
    """Return a row for each of what is compared."""
    targets = {key: [result.record.final_loss for result in results[key]] for key in selected if key in TARGETS}
    rows = []
    for key, hyper in selected.items():
        found = results[key]
        by_seed = [{method: losses[i] for method, losses in targets.items()} for i in range(len(found))]
        runs = DataFrame([_run(r.record, its) for r, its in zip(found, by_seed, strict=True)])
        diverged = [result.record.diverged_at for result in found]
        rows.append(
            {"model": study.scale.name, "optimizer": hyper.method, "rank": hyper.rank}
            | runs.mean(skipna=False).to_dict()  # a value that one seed lacks is no mean of the others
            | {
                f"{LOSS}_se": runs[LOSS].sem(skipna=False),
                "seeds": " ".join(map(str, study.seeds)),
                "validation_loss_per_seed": " ".join(f"{loss:.5f}" for loss in runs[LOSS]),
                "state_mb": max(result.record.state_bytes for result in found) / 1e6,
                "peak_gib": max(result.peak_bytes for result in found) / 2**30 or None,
                "diverged_at": " ".join(str(step) for step in diverged if step is not None),
            }
            | {name: getattr(hyper, name) for name in SETTINGS}
            | study.plan
            | environment_of(found)
        )
    return rows


def _run(record: Record, targets: Mapping[str, float]) -> dict[str, float]:
    """Return what is averaged over seeds; a step's times leave out the first, which initialises."""
    values = {LOSS: record.final_loss}
    for name, times in (("model_ms", record.model_seconds), ("optimizer_ms", record.optimizer_seconds)):
        values[name] = 1e3 * fmean(times[1:]) if times[1:] else math.nan
    losses, at = [loss for _, loss in record.validation], [record.seconds(step) for step, _ in record.validation]
    for method, loss in targets.items():
        values[f"seconds_to_{method.replace('-', '_')}_loss"] = reached(losses, at, loss)
    return values


def environment_of(results: Sequence[Result]) -> Row:
    """Return where, with what and when units were made: the distinct values, as they may be of several commands."""
    names = dict.fromkeys(name for result in results for name in result.environment)
    return {name: " ".join(sorted({r.environment.get(name, "") for r in results} - {""})) for name in names}


def curve_rows(study: Study, selected: Selected, results: Found) -> list[Row]:
    """Return validation loss and seconds by step."""
    rows: list[Row] = []
    for key, hyper in selected.items():
        for seed, result in zip(study.seeds, results[key], strict=True):
            named = {"model": study.scale.name, "optimizer": hyper.method, "rank": hyper.rank}
            for step, loss in result.record.validation:
                own = {"seed": seed, "step": step, "validation_loss": loss, "seconds": result.record.seconds(step)}
                rows.append(named | own)
    return rows
