"""The tables of ``bench.study lengths`` from its rows: losses by method and length, and what the defaults lose."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pandas import DataFrame, Series

from bench.markdown import figure, table, with_error
from bench.rows import RESULTS, frame
from bench.study.lengths import FIRST_SEED, FORMS, Unit, at_default, tuned, units
from bench.study.results import reached
from bench.study.search import power, powers

CURVES = RESULTS / "lengths-curves.csv"
REFERENCES = ("muon", "kl-shampoo")
"""Whose final losses the others' steps are counted to."""
MAIN = ("adamw", "muon", "soap", "kl-shampoo", "pro-klshampoo")
"""The methods that are shown first."""
AS_QUICK = 1.5
"""Of two runs on one machine one may be so much slower; the machines differ by two."""


@dataclass(frozen=True)
class Runs:
    """The runs of one method on one model at one length: final losses by seed.

    Attributes:
        default: at the defaults as they are.
        unit: the best settings; None where they are not known.
        best: at these.
        tried: the rates of the grid that the best was chosen from, and the default one.
    """

    default: Series
    unit: Unit | None
    best: Series
    tried: Sequence[float] = ()


def compared(found: DataFrame) -> dict[tuple[str, int], dict[str, Runs]]:
    """Return the runs of every method by model and length, from a file's rows."""
    losses = units(found)
    by_seed: dict[Unit, dict[int, float]] = {}
    for unit, loss in losses.items():
        by_seed.setdefault(replace(unit, seed=FIRST_SEED), {})[unit.seed] = loss

    def runs(model: str, steps: int, form: str) -> Runs:
        base, unit = FORMS[form].default.lr, tuned(model, steps, form, losses).unit
        default, best = (
            Series(by_seed.get(one, {}), dtype=float).sort_index()  # type: ignore[arg-type]
            for one in (at_default(model, steps, form, FIRST_SEED), unit)
        )
        if unit is None:
            return Runs(default, unit, best)
        free = {name: getattr(unit, name) for name in ("lr", "alpha_kl", "adamw_lr")}
        rates = {one.lr for one in losses if replace(one, **free) == unit}
        return Runs(default, unit, best, sorted(lr for lr in rates if [lr] == powers(base, power(lr, base))))

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
    lines, seeds = [], {}
    for form in shown:
        its = found[found["optimizer"] == form]
        own = FORMS[form]
        cells: dict[str, object] = {"optimizer": own.label, "to tune": "lr, α_kl" if own.alpha else "lr"}
        for (model, steps), runs in every.items():
            both = [its[judged(its.index, alone=False)] for its in (runs[form].default, runs[form].best)]
            if any(map(len, both)):
                cells[f"{model}, {steps:,}"] = " / ".join(map(_mean, both))
                seeds[form] = max(seeds.get(form, 0), *map(len, both))
        if form not in seeds:
            continue
        by_model = its.groupby("model", sort=False)
        cells["step, ms"] = " / ".join(figure(times[model, form], 0) for model in by_model.groups)
        cells["state, MB"] = " / ".join(f"{mb:.1f}" for mb in by_model["state_mb"].median())
        cells["seeds"] = seeds[form]
        lines.append(cells)
    lengths = [name for one in every if any((name := f"{one[0]}, {one[1]:,}") in cells for cells in lines)]
    columns = ["optimizer", "to tune", *lengths, "step, ms", "state, MB", "seeds"]
    return table(DataFrame(lines, columns=columns).fillna("-"), 2)


def short_table(found: DataFrame, steps: int) -> str:
    """Return the tuned losses of the main methods at one length, by model: means of the seeds that rates are not on."""
    every = {model: runs for (model, length), runs in compared(found).items() if length == steps}
    lines = []
    for form in MAIN:
        best = {model: runs[form].best for model, runs in every.items()}
        means = {model: f"{its[judged(its.index, alone=False)].mean():.3f}" for model, its in best.items() if len(its)}
        lines.append({"optimizer": FORMS[form].label} | means)
    return table(DataFrame(lines).fillna("-"), 1)


def settings_table(found: DataFrame, steps: int) -> str:
    """Return, by model at one length, what was tried and selected, and what the defaults lose to it, paired by seed."""
    lines = []
    for (model, length), every in compared(found).items():
        for form, runs in every.items():
            if (unit := runs.unit) is None or length != steps:
                continue
            cells: dict[str, object] = {"model": model, "optimizer": FORMS[form].label}
            cells["lr tried"] = ", ".join(f"{lr:.3g}" for lr in runs.tried)
            cells["lr"] = f"{unit.lr:.3g}" + (f", α_kl {unit.alpha_kl:.3g}" if FORMS[form].alpha else "")
            cells["AdamW's"] = "" if unit.adamw_lr is None else f"{unit.adamw_lr:.3g}"
            cells["tuned"] = _mean(runs.best[judged(runs.best.index)])
            cells["defaults − tuned"] = _difference(runs.default, runs.best)
            for other in REFERENCES:
                apart = "-" if form == other else _difference(runs.best, every[other].best)
                cells[f"− {FORMS[other].label}, tuned"] = apart
            cells["seeds"] = len(judged(runs.best.index))
            lines.append(cells)
    return table(DataFrame(lines), 2)


def _mean(losses: Series) -> str:
    return with_error(losses.mean(), losses.sem(), 3) if len(losses) else "-"


def _difference(losses: Series, minus: Series) -> str:
    """Return the mean difference over the judged seeds that both have, with its standard error where it has one."""
    seeds = judged(losses.index.intersection(minus.index))
    if not seeds:
        return "-"
    difference = losses[seeds] - minus[seeds]
    return with_error(difference.mean(), difference.sem(), 3, sign="+")


def reached_table(found: DataFrame, length: int, curves: Path = CURVES) -> str:
    """Return after which share of a reference's steps and seconds tuned methods have its final loss, where they have.

    Of runs of one length; seconds are steps times :func:`step_ms`.
    """
    curve = frame(curves)
    every_ms = step_ms(found)
    lines = []
    for model, every in ((model, every) for (model, steps), every in compared(found).items() if steps == length):
        best = {form: runs.unit for form, runs in every.items() if runs.unit is not None}
        own = {form: dict(list(curves_of(curve, unit).groupby("seed"))) for form, unit in best.items()}
        for form, its in own.items():
            cells: dict[str, object] = {"model": model, "optimizer": FORMS[form].label}
            for reference in REFERENCES:
                if reference not in own:
                    continue
                both = judged(its.keys() & own[reference].keys())
                steps = np.mean([_share(its[seed], own[reference][seed]) for seed in both]) if both else math.nan
                slower = every_ms[model, form] / every_ms[model, reference]
                known = form != reference and not math.isnan(steps)
                cells[f"steps to {FORMS[reference].label}'s"] = f"{steps:.2f}" if known else "-"
                cells[f"seconds to {FORMS[reference].label}'s"] = figure(steps * slower if known else None, 2)
            if set(list(cells.values())[2:]) - {"-"}:
                lines.append(cells)
    return table(DataFrame(lines).fillna("-"), 2)


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
