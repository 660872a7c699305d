"""From runs to rows: means with standard errors, time to a matched loss, and the paper's orderings."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.experiments.protocol import Kind, Tuning
from bench.experiments.study import Study
from bench.experiments.units import Result
from bench.report import mean_after_first, mean_and_error, seconds_to

TARGET = "kl-shampoo"
Row = dict[str, Any]


def rows_of(
    study: Study, group: Sequence[Kind], start: str | float, tuning: Tuning, results: Mapping[Kind, list[Result]]
) -> list[Row]:
    """One row per contender of a comparison in which eigenvalues start alike."""
    (target,) = (kind for kind in group if kind.method == TARGET)
    targets = [result.record.final_loss for result in results[target]]
    return [
        {"model": study.scale.name, "start": start} | _row(study, kind, tuning.selected[kind], results[kind], targets)
        for kind in group
    ]


def _row(study: Study, kind: Kind, hyper: Any, results: Sequence[Result], targets: Sequence[float]) -> Row:
    found = [result.record for result in results]
    loss, error = mean_and_error([r.final_loss for r in found])
    seconds, seconds_error = mean_and_error([seconds_to(r, t) for r, t in zip(found, targets, strict=True)])
    source = study.runner.place.source
    plan = study.scale.settings({}, source.vocabulary, study.device, curve=True).plan()
    return {
        "optimizer": kind.method,
        "rank": kind.rank,
        "seeds": " ".join(map(str, study.seeds)),
        "validation_loss": loss,
        "validation_loss_se": error,
        "validation_loss_per_seed": " ".join(f"{r.final_loss:.5f}" for r in found),
        "model_ms": 1e3 * mean_after_first([r.model_seconds for r in found]),
        "optimizer_ms": 1e3 * mean_after_first([r.optimizer_seconds for r in found]),
        "training_seconds": mean_and_error([r.seconds(len(r.losses)) for r in found])[0],
        "seconds_to_kl_shampoo_loss": seconds,
        "seconds_to_kl_shampoo_loss_se": seconds_error,
        "state_mb": max(r.state_bytes for r in found) / 1e6,
        "peak_gib": study.peak_bytes(hyper, results) / 2**30 or None,
        "diverged_at": " ".join(str(r.diverged_at) for r in found if r.diverged_at is not None),
        "lr": hyper.lr,
        "alpha_kl": hyper.alpha_kl,
        "weight_decay": hyper.weight_decay,
        "adamw_lr": hyper.adamw_lr,
        "adamw_weight_decay": hyper.adamw_weight_decay,
        **plan,
        "data": source.name,
        "data_sha256": source.sha256,
        **results[0].environment,
    }


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
                    "in_paper_range": "yes" if hyper.lr in search.ranges.lr else "",
                }
            )
    return rows


def curve_rows(study: Study, results: Mapping[Kind, list[Result]]) -> list[Row]:
    """Validation loss by step and training seconds, and the mean training loss since the evaluation before."""
    rows = []
    for kind, of_seeds in results.items():
        for seed, result in zip(study.seeds, of_seeds, strict=True):
            before = 0
            for step, loss in result.record.validation:
                since = result.record.losses[before:step]
                rows.append(
                    {
                        "model": study.scale.name,
                        "optimizer": kind.method,
                        "rank": kind.rank,
                        "start": kind.start,
                        "seed": seed,
                        "step": step,
                        "validation_loss": loss,
                        "train_loss": sum(since) / len(since) if since else None,
                        "seconds": round(result.record.seconds(step), 4),
                    }
                )
                before = step
    return rows


def ordering_rows(study: Study, start: str | float, claims: Sequence[tuple[Kind, Kind]], results: Any) -> list[Row]:
    """What the paper found, (lower loss, higher loss), beside the difference here, paired by seed.

    "agrees" and "contradicts" are differences beyond twice their standard error, "undecided" all others.
    """
    rows = []
    for lower, higher in claims:
        losses = [[r.record.final_loss for r in results[kind]] for kind in (higher, lower)]
        difference, error = mean_and_error([a - b for a, b in zip(*losses, strict=True)])
        decided = abs(difference) > 2 * error
        verdict = ("agrees" if difference > 0 else "contradicts") if decided else "undecided"
        rows.append(
            {
                "model": study.scale.name,
                "start": start,
                "lower": lower.label,
                "higher": higher.label,
                "difference": difference,
                "difference_se": error,
                "seeds": " ".join(map(str, study.seeds)),
                "verdict": verdict,
            }
        )
    return rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """A CSV file with the columns of the first row, all or nothing; numbers that there are not are empty."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    os.replace(partial, path)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, float) and math.isnan(value):
        return ""
    return f"{value:.7g}" if isinstance(value, float) else value
