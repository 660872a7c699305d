"""The tables of ``bench.study lengths`` from its rows: losses by method and length."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from pandas import DataFrame, Series

from bench.markdown import figure, table, with_error
from bench.rows import RESULTS, frame
from bench.study.lengths import FIRST_SEED, FORMS, Unit, at_default, tuned, units
from bench.study.tables import reached

REFERENCE = "muon"
"""The form to whose final loss the others' steps are counted."""
OURS = "pro-klshampoo-heads"
"""The form of a user who sets nothing."""
DRAWN = ("adamw", "muon", "muon-0.9-heads", "soap", "kl-shampoo", OURS)
"""The methods that are shown first, in their better form."""
MAIN = ("adamw", "muon-0.9", "muon-0.9-heads", "soap", "kl-shampoo", "kl-shampoo-heads", "pro-klshampoo", OURS)
"""The methods of the README, those with heads also with whole queries and keys."""
AS_QUICK = 1.5
"""Largest ratio of the times of two runs on one machine; the machines differ by two."""


@dataclass(frozen=True)
class Runs:
    """The runs of one method on one model at one length: final losses by seed."""

    default: Series  # at the defaults as they are
    unit: Unit | None  # the best settings, where they are known
    best: Series  # at these


def compared(found: DataFrame) -> dict[tuple[str, int], dict[str, Runs]]:
    """Return the runs of every method by model and length, from a file's rows."""
    losses = units(found)
    by_seed: dict[Unit, dict[int, float]] = {}
    for unit, loss in losses.items():
        by_seed.setdefault(replace(unit, seed=FIRST_SEED), {})[unit.seed] = loss

    def runs(model: str, steps: int, form: str) -> Runs:
        unit, _ = tuned(model, steps, form, losses)
        default, best = (
            Series(by_seed.get(one, {}), dtype=float).sort_index()  # type: ignore[arg-type]
            for one in (at_default(model, steps, form, FIRST_SEED), unit)
        )
        return Runs(default, unit, best)

    models = list(dict.fromkeys(unit.model for unit in losses))
    lengths = sorted({(models.index(unit.model), unit.steps) for unit in losses})
    return {(models[i], steps): {form: runs(models[i], steps, form) for form in FORMS} for i, steps in lengths}


def judged(seeds: Iterable[int], alone: bool = True) -> list[int]:
    """Return which seeds count: not the one that rates are selected on, unless, with ``alone``, there is no other."""
    found = sorted(seeds)
    others = [seed for seed in found if seed != FIRST_SEED]
    return others or found if alone else others


def losses_table(found: DataFrame) -> str:
    """Return what a user gets: final losses at the defaults and tuned, by model and length; step and state by model.

    Means are of all seeds but the one on which rates are selected, for methods with any of these; a length that has
    fewer seeds than others has less of an error, or none.
    """
    shown = [form for form in FORMS if form in set(found["optimizer"][found["seed"] != FIRST_SEED])]
    every, times = compared(found), optimizer_ms(found)
    models = dict.fromkeys(model for model, _ in every)
    lines: list[dict[str, object]] = []
    for form in shown:
        its = found[found["optimizer"] == form]
        cells: dict[str, object] = {"optimizer": FORMS[form].label}
        for (model, steps), runs in every.items():
            both = [its[judged(its.index, alone=False)] for its in (runs[form].default, runs[form].best)]
            if any(map(len, both)):
                cells[f"{model}, {steps:,}"] = " / ".join(map(_mean, both))
        if len(cells) == 1:
            continue
        state = its.groupby("model")["state_mb"].median().reindex(models)
        cells["step, ms"] = " / ".join(figure(times.get((model, form)), 0) for model in models)
        cells["state, MB"] = " / ".join(figure(mb, 1) for mb in state)
        lines.append(cells)
    lengths = [name for one in every if any((name := f"{one[0]}, {one[1]:,}") in cells for cells in lines)]
    columns = ["optimizer", *lengths, "step, ms", "state, MB"]
    return table(DataFrame(lines, columns=columns).fillna("-"), 1)


def short_table(found: DataFrame, steps: int) -> str:
    """Return the tuned losses of the main methods at one length, by model: means of the seeds that rates are not on."""
    every = {model: runs for (model, length), runs in compared(found).items() if length == steps}
    lines = []
    for form in MAIN:
        best = {model: runs[form].best for model, runs in every.items()}
        means = {model: f"{its[judged(its.index, alone=False)].mean():.3f}" for model, its in best.items() if len(its)}
        lines.append({"optimizer": FORMS[form].label} | means)
    return table(DataFrame(lines).fillna("-"), 1)


def _mean(losses: Series) -> str:
    return with_error(losses.mean(), losses.sem(), 3) if len(losses) else "-"


def reached_table(found: DataFrame, length: int) -> str:
    """Return after which share of the reference's steps and seconds tuned methods have its final loss, where they have.

    Of runs of one length, by model; seconds are steps times :func:`step_ms`.
    """
    curve = frame(RESULTS / "lengths-curves.csv")
    every_ms = step_ms(found)
    lines: dict[str, dict[str, object]] = {}
    for model, every in ((model, every) for (model, steps), every in compared(found).items() if steps == length):
        best = {form: runs.unit for form, runs in every.items() if runs.unit is not None}
        own = {form: dict(list(curves_of(curve, unit).groupby("seed"))) for form, unit in best.items()}
        reference = own.pop(REFERENCE, {})
        for form, its in own.items():
            both = judged(its.keys() & reference.keys())
            steps = np.mean([_share(its[seed], reference[seed]) for seed in both]) if both else math.nan
            if math.isnan(steps):
                continue
            slower = every_ms[model, form] / every_ms[model, REFERENCE]
            cells = lines.setdefault(form, {"optimizer": FORMS[form].label})
            cells |= {f"{model}, steps": f"{steps:.2f}", f"{model}, seconds": figure(steps * slower, 2)}
    return table(DataFrame([lines[form] for form in FORMS if form in lines]).fillna("-"), 1)


def optimizer_ms(found: DataFrame) -> Series:
    """Return what an optimizer's step takes, by model and method.

    Runs were made on several machines and shared their cores: each is taken to be as much slower than on the quickest
    as its forward and backward passes were, which are the same for all. Returned is the median of a method's runs that
    were at most AS_QUICK times as slow, or of all where there is none.
    """
    slower = found["model_ms"] / found.groupby("model")["model_ms"].transform("min")
    of, scaled = [found["model"], found["optimizer"]], found["optimizer_ms"] / slower
    quick = scaled.where(slower <= AS_QUICK)
    return quick.groupby(of).median().fillna(scaled.groupby(of).median())


def step_ms(found: DataFrame) -> Series:
    """Return the same with forward and backward."""
    return optimizer_ms(found).add(found.groupby("model")["model_ms"].min(), level="model")


def curves_of(curve: DataFrame, unit: Unit) -> DataFrame:
    """Return the curves of a unit's settings on all seeds."""
    same = (curve["model"] == unit.model) & (curve["steps"] == unit.steps) & (curve["optimizer"] == unit.form)
    same &= curve["lr"] == unit.lr
    for name, value in (("adamw_lr", unit.adamw_lr), ("alpha_kl", unit.alpha_kl)):
        if name in curve:
            same &= curve[name].isna() if value is None else curve[name] == value
    return curve[same].sort_values("step")


def _share(its: DataFrame, reference: DataFrame) -> float:
    """Return the share of the reference's steps after which its final loss is reached; nan if never."""
    losses, steps = (its[name].to_numpy(float) for name in ("validation_loss", "step"))
    return reached(losses, steps, reference["validation_loss"].iloc[-1]) / reference["step"].iloc[-1]
