"""From runs to rows: means with standard errors, time to a matched loss, and the paper's orderings."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.experiments.protocol import Kind, Tuning, paper_range
from bench.experiments.study import Study
from bench.experiments.units import Result
from bench.markdown import read_rows
from bench.training.report import mean_after_first, mean_and_error, seconds_to
from bench.training.run import Record
from bench.training.settings import Hyper

TARGETS = ("kl-shampoo", "muon")  # whose final losses the paper measures the time to
CONFIDENCE = 0.95
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t, two-sided at CONFIDENCE, for 1 to 9 degrees of freedom: Abramowitz and Stegun, table 26.10."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """Of two contenders' final losses, paired by seed: mean, its standard error, and whether it is told from 0."""

    mean: float
    error: float
    decided: bool


def paired(losses: Sequence[float], minus: Sequence[float]) -> Difference:
    """The first ones minus the second ones, by seed in the same order.

    It is decided where a two-sided t test over the seeds tells it from 0 at CONFIDENCE; with more seeds than the table
    of quantiles has, its last one is taken, which is above theirs.
    """
    mean, error = mean_and_error([a - b for a, b in zip(losses, minus, strict=True)])
    quantile = T_QUANTILES[min(len(losses) - 2, len(T_QUANTILES) - 1)] if len(losses) > 1 else math.inf
    return Difference(mean, error, abs(mean) > quantile * error)


def rows_of(
    study: Study,
    group: Sequence[Kind],
    start: str | float,
    tuning: Tuning,
    results: Mapping[Kind, list[Result]],
    timed: bool,
) -> list[Row]:
    """One row per contender of a comparison in which eigenvalues start alike; with times where they are compared."""
    targets = {k.method: [r.record.final_loss for r in results[k]] for k in group if k.method in TARGETS}
    rows = []
    for kind in group:
        times = _times([r.record for r in results[kind]], targets) if timed else {}
        named = {"model": study.scale.name, "start": start}
        rows.append(named | _row(study, kind, tuning.selected[kind], results[kind], times))
    return rows


def _times(found: Sequence[Record], targets: Mapping[str, Sequence[float]]) -> Row:
    """Of a step and of the run, and until the final loss of each target on the same seed."""
    row = {
        "model_ms": 1e3 * mean_after_first([r.model_seconds for r in found]),
        "optimizer_ms": 1e3 * mean_after_first([r.optimizer_seconds for r in found]),
        "training_seconds": mean_and_error([r.seconds(len(r.losses)) for r in found])[0],
    }
    for method, losses in targets.items():
        seconds, error = mean_and_error([seconds_to(r, loss) for r, loss in zip(found, losses, strict=True)])
        name = f"seconds_to_{method.replace('-', '_')}_loss"
        row |= {name: seconds, f"{name}_se": error}
    return row


def _row(study: Study, kind: Kind, hyper: Hyper, results: Sequence[Result], times: Row) -> Row:
    found = [result.record for result in results]
    loss, error = mean_and_error([r.final_loss for r in found])
    return {
        "optimizer": kind.method,
        "rank": kind.rank,
        "seeds": " ".join(map(str, study.seeds)),
        "validation_loss": loss,
        "validation_loss_se": error,
        "validation_loss_per_seed": " ".join(f"{r.final_loss:.5f}" for r in found),
        **times,
        "state_mb": max(r.state_bytes for r in found) / 1e6,
        "peak_gib": study.peak_bytes(hyper, results) / 2**30 or None,
        "diverged_at": " ".join(str(r.diverged_at) for r in found if r.diverged_at is not None),
        "lr": hyper.lr,
        "alpha_kl": hyper.alpha_kl,
        "weight_decay": hyper.weight_decay,
        "adamw_lr": hyper.adamw_lr,
        "adamw_weight_decay": hyper.adamw_weight_decay,
        **study.plan(curve=True),
        **environment_of(results),
    }


def environment_of(results: Sequence[Result]) -> dict[str, str]:
    """Where, with what and when the units were made: the distinct values, since they may be of several commands."""
    names = dict.fromkeys(name for result in results for name in result.environment)
    return {name: " ".join(sorted({r.environment.get(name, "") for r in results} - {""})) for name in names}


def sweep_rows(study: Study, tuning: Tuning) -> list[Row]:
    """One row per hyper-parameters that were tried, in every search that was made."""
    rows = []
    for kind, search in tuning.searches.items():
        for hyper, loss in sorted(search.tried.items(), key=lambda item: (item[0].alpha_kl or 0, item[0].lr)):
            rows.append(
                {
                    "model": study.scale.name,
                    "optimizer": kind.method,
                    "rank": kind.rank,
                    "start": kind.start,
                    "lr": hyper.lr,
                    "alpha_kl": hyper.alpha_kl,
                    "weight_decay": hyper.weight_decay,
                    "adamw_lr": hyper.adamw_lr,
                    "adamw_weight_decay": hyper.adamw_weight_decay,
                    "seed": study.seeds[0],
                    "validation_loss": loss,
                    "selected": ""
                    if hyper != search.best
                    else f"at the edge of {', '.join(search.edges)}"
                    if search.edges
                    else "yes",
                    "in_paper_range": _in_paper_range(study, kind, hyper),
                    **study.plan(curve=False),
                    **environment_of([study.swept[hyper]]),
                }
            )
    return rows


def _in_paper_range(study: Study, kind: Kind, hyper: Hyper) -> str:
    """Whether all that is searched lies between values that the paper tried, or which do not."""
    paper, outside = paper_range(kind, study.scale), []
    for name in ("lr", "alpha_kl", *(("weight_decay",) if study.scale.is_paper else ())):
        value, tried = getattr(hyper, name), getattr(paper, name)
        if value is not None and not min(tried) <= value <= max(tried):
            outside.append(name)
    return f"no: {', '.join(outside)}" if outside else "yes"


def curve_rows(study: Study, results: Mapping[Kind, list[Result]], timed: bool) -> list[Row]:
    """Validation loss by step, and the mean training loss since the evaluation before; seconds where ``timed``."""
    rows = []
    for kind, of_seeds in results.items():
        for seed, result in zip(study.seeds, of_seeds, strict=True):
            before = 0
            for step, loss in result.record.validation:
                since = result.record.losses[before:step]
                row = {
                    "model": study.scale.name,
                    "optimizer": kind.method,
                    "rank": kind.rank,
                    "start": kind.start,
                    "seed": seed,
                    "step": step,
                    "validation_loss": loss,
                    "train_loss": sum(since) / len(since) if since else None,
                }
                rows.append(row | ({"seconds": round(result.record.seconds(step), 4)} if timed else {}))
                before = step
    return rows


def ordering_rows(study: Study, start: str | float, claims: Sequence[tuple[Kind, Kind]], results: Any) -> list[Row]:
    """What the paper found, (lower loss, higher loss), beside the difference here, paired by seed.

    "agrees" and "contradicts" are decided differences (:func:`paired`), "undecided" all others. The first seed is also
    the one that hyper-parameters were selected on, so that it may flatter what was searched longest.
    """
    rows = []
    for lower, higher in claims:
        difference = paired(*([r.record.final_loss for r in results[kind]] for kind in (higher, lower)))
        verdict = "agrees" if difference.mean > 0 else "contradicts"
        rows.append(
            {
                "model": study.scale.name,
                "start": start,
                "lower": lower.label,
                "higher": higher.label,
                "difference": difference.mean,
                "difference_se": difference.error,
                "seeds": " ".join(map(str, study.seeds)),
                "confidence": CONFIDENCE,
                "verdict": verdict if difference.decided else "undecided",
            }
        )
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """A CSV file, all or nothing; what a row does not have and numbers that there are not are empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, dict.fromkeys(name for row in rows for name in row), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    os.replace(partial, path)


def merge(path: Path, rows: Sequence[Row]) -> None:
    """Puts rows into a CSV file in place of those of the same models; what it has of others stays."""
    by_model: dict[str, list[Row]] = {}
    for row in read_rows(path) if path.exists() else []:
        by_model.setdefault(row["model"], []).append(row)
    fresh: dict[str, list[Row]] = {}
    for row in rows:
        fresh.setdefault(row["model"], []).append(row)
    write(path, [row for its in (by_model | fresh).values() for row in its])


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    return f"{value:.7g}" if isinstance(value, float) else value
