"""From runs to rows: means with standard errors, time to a matched loss, and the paper's orderings."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
from pandas import DataFrame

from bench.optimizers import Hyper
from bench.paired import CONFIDENCE, paired
from bench.rows import Row
from bench.study.protocol import Kind, Tuning, paper_range
from bench.study.study import Study
from bench.study.units import Result
from bench.training.run import Record

LOSS = "validation_loss"
TARGETS = ("kl-shampoo", "muon")  # whose final losses the paper measures the time to
Found = Mapping[Kind, list[Result]]
"""Results by seed."""


def reached(losses: Sequence[float], at: Sequence[float], target: float) -> float:
    """Return where a loss first reaches ``target``, interpolated between evaluations; nan if never."""
    below = np.flatnonzero(np.asarray(losses) <= target)
    if not len(below):
        return math.nan
    part = slice(max(0, below[0] - 1), below[0] + 1)
    return float(np.interp(-target, np.negative(losses[part]), at[part]))


def rows_of(
    study: Study, group: Sequence[Kind], start: str | float, selected: Mapping[Kind, Hyper], results: Found, timed: bool
) -> list[Row]:
    """Return a row for each of a comparison in which eigenvalues start alike; with times where they are compared."""
    targets = {k.method: [r.record.final_loss for r in results[k]] for k in group if k.method in TARGETS and not k.lr}
    rows = []
    for kind in group:
        found, hyper = results[kind], selected[kind]
        by_seed = [{method: losses[i] for method, losses in targets.items()} for i in range(len(found))]
        runs = DataFrame([_run(r.record, its, timed) for r, its in zip(found, by_seed, strict=True)])
        errors = runs[[name for name in runs if name == LOSS or name.startswith("seconds_to")]].sem(skipna=False)
        diverged = [result.record.diverged_at for result in found]
        rows.append(
            {"model": study.scale.name, "start": start, "optimizer": kind.method, "rank": kind.rank}
            | runs.mean(skipna=False).to_dict()  # a value that one seed lacks is no mean of the others
            | {f"{name}_se": error for name, error in errors.items()}
            | {
                "seeds": " ".join(map(str, study.seeds)),
                "validation_loss_per_seed": " ".join(f"{loss:.5f}" for loss in runs[LOSS]),
                "state_mb": max(result.record.state_bytes for result in found) / 1e6,
                "peak_gib": study.peak_bytes(hyper, found) / 2**30 or None,
                "diverged_at": " ".join(str(step) for step in diverged if step is not None),
            }
            | _settings(hyper)
            | study.plan(curve=True)
            | environment_of(found)
        )
    return rows


def _run(record: Record, targets: Mapping[str, float], timed: bool) -> dict[str, float]:
    """Return what is averaged over seeds; a step's times leave out the first, which initialises."""
    values = {LOSS: record.final_loss}
    if timed:
        for name, times in (("model_ms", record.model_seconds), ("optimizer_ms", record.optimizer_seconds)):
            values[name] = 1e3 * fmean(times[1:]) if times[1:] else math.nan
        values["first_optimizer_step_ms"] = 1e3 * record.optimizer_seconds[0] if record.losses else math.nan
        values["training_seconds"] = record.seconds(len(record.losses))
        losses, at = [loss for _, loss in record.validation], [record.seconds(step) for step, _ in record.validation]
        for method, loss in targets.items():
            values[f"seconds_to_{method.replace('-', '_')}_loss"] = reached(losses, at, loss)
    return values


def _settings(hyper: Hyper) -> Row:
    names = ("lr", "alpha_kl", "weight_decay", "adamw_lr", "adamw_weight_decay")
    return {name: getattr(hyper, name) for name in names}


def environment_of(results: Sequence[Result]) -> Row:
    """Return where, with what and when units were made: the distinct values, as they may be of several commands."""
    names = dict.fromkeys(name for result in results for name in result.environment)
    return {name: " ".join(sorted({r.environment.get(name, "") for r in results} - {""})) for name in names}


def sweep_rows(study: Study, tuning: Tuning) -> list[Row]:
    """Return a row for all hyper-parameters that were tried, in every search that was made."""
    rows = []
    for kind, search in tuning.searches.items():
        edge = f"at the edge of {', '.join(search.edges)}" if search.edges else "yes"
        for hyper in sorted(search.found.tried, key=lambda hyper: (hyper.alpha_kl or 0, hyper.lr)):
            rows.append(
                {"model": study.scale.name, "optimizer": kind.method, "rank": kind.rank, "start": kind.start}
                | _settings(hyper)
                | {"seed": study.seeds[0], LOSS: study.swept[hyper].record.final_loss}
                | {"selected": edge if hyper == search.found.best else ""}
                | {"in_paper_range": _in_paper_range(study, kind, hyper)}
                | study.plan(curve=False)
                | environment_of([study.swept[hyper]])
            )
    return rows


def _in_paper_range(study: Study, kind: Kind, hyper: Hyper) -> str:
    """Say whether all that is searched lies between values that the paper tried, or which do not."""
    paper, outside = paper_range(kind, study.scale), []
    for name in ("lr", "alpha_kl", *(("weight_decay",) if study.scale.is_paper else ())):
        value, tried = getattr(hyper, name), getattr(paper, name)
        if value is not None and not min(tried) <= value <= max(tried):
            outside.append(name)
    return f"no: {', '.join(outside)}" if outside else "yes"


def curve_rows(study: Study, results: Found, timed: bool) -> list[Row]:
    """Return validation loss by step, and the mean training loss since the evaluation before; seconds if ``timed``."""
    rows: list[Row] = []
    for kind, of_seeds in results.items():
        for seed, result in zip(study.seeds, of_seeds, strict=True):
            named = {"model": study.scale.name, "optimizer": kind.method, "rank": kind.rank, "start": kind.start}
            before = 0
            for step, loss in result.record.validation:
                since = result.record.losses[before:step]
                own = {"seed": seed, "step": step, "validation_loss": loss} | ({"lr": kind.lr} if kind.lr else {})
                own["train_loss"] = fmean(since) if since else None
                rows.append(named | own | ({"seconds": result.record.seconds(step)} if timed else {}))
                before = step
    return rows


def ordering_rows(study: Study, start: str | float, claims: Sequence[tuple[Kind, Kind]], results: Found) -> list[Row]:
    """Return what the paper found, (lower loss, higher loss), beside the difference here, paired by seed.

    "agrees" and "contradicts" are decided differences (:mod:`bench.paired`), "undecided" all others. The first seed is
    also the one that hyper-parameters were selected on, so that it may flatter what was searched longest.
    """
    rows = []
    for lower, higher in claims:
        apart = paired(*([r.record.final_loss for r in results[kind]] for kind in (higher, lower)))
        verdict = "agrees" if apart.mean > 0 else "contradicts"
        named = {"model": study.scale.name, "start": start, "lower": lower.label, "higher": higher.label}
        found = {"difference": apart.mean, "difference_se": apart.error, "seeds": " ".join(map(str, study.seeds))}
        rows.append(named | found | {"confidence": CONFIDENCE, "verdict": verdict if apart.decided else "undecided"})
    return rows
