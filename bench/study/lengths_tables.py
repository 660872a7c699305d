"""The tables of ``bench.study lengths`` from its rows: losses by method and length, and what the defaults lose."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from pandas import DataFrame, Series

from bench.markdown import figure, table, with_error
from bench.rows import RESULTS, frame
from bench.study.lengths import FIRST_SEED, FORMS, STEP, Tuned, Unit, at_default, power, rounded, tuned

CURVES = RESULTS / "lengths-curves.csv"
REFERENCES = ("muon", "kl-shampoo")
"""Whose final losses the others' steps are counted to."""
MAIN = ("adamw", "muon", "soap", "kl-shampoo", "pro-klshampoo")
"""The methods that are shown first."""
AS_QUICK = 1.5
"""Of two runs on one machine one may be so much slower; the machines differ by two."""


class Compared:
    """The runs of one model at one length: every method at its defaults and, where its search has ended, tuned."""

    def __init__(self, losses: dict[Unit, float], model: str, steps: int) -> None:
        self.losses, self.model, self.steps = losses, model, steps
        self.tuned: dict[str, Tuned] = {form: tuned(model, steps, form, losses) for form in FORMS}

    def at_default(self, form: str) -> Series:
        """Return the final losses by seed at the defaults as they are."""
        return self._by_seed(at_default(self.model, self.steps, form, FIRST_SEED))

    def at_best(self, form: str) -> Series:
        """Return the final losses by seed at the best settings; empty where they are not known."""
        unit = self.tuned[form].unit
        return Series(dtype=float) if unit is None else self._by_seed(unit)

    def _by_seed(self, unit: Unit) -> Series:
        found = {one.seed: loss for one, loss in self.losses.items() if replace(one, seed=unit.seed) == unit}
        return Series(found, dtype=float).sort_index()

    def tried(self, form: str) -> list[float]:
        """Return the rates of the grid that the best was chosen from, and the default one."""
        unit, base = self.tuned[form].unit, FORMS[form].default.lr
        if unit is None:
            return []
        free = ("lr", "alpha_kl", "adamw_lr")
        same = (one for one in self.losses if replace(one, **{name: getattr(unit, name) for name in free}) == unit)
        return sorted({one.lr for one in same if one.lr == rounded(base * STEP ** power(one.lr, base))})


def judged(seeds: Iterable[int], selecting: bool | None = None) -> list[int]:
    """Return which seeds count: not the one that rates are selected on, unless ``selecting`` or, if None, no other."""
    found = sorted(seeds)
    first, others = ([seed for seed in found if (seed == FIRST_SEED) is one] for one in (True, False))
    return first if selecting else others if selecting is False else others or first


def units(found: DataFrame) -> dict[Unit, float]:
    """Return the losses of a file's rows by unit, infinite where a run diverged."""

    def number(value: float) -> float | None:
        return None if math.isnan(value) else float(value)

    losses = {}
    for row in found.to_dict("records"):
        alpha = number(row.get("alpha_kl", math.nan))
        unit = Unit(
            row["model"],
            int(row["steps"]),
            row["optimizer"],
            row["lr"],
            number(row["adamw_lr"]),
            alpha,
            int(row["seed"]),
        )
        loss = float(row["validation_loss"])
        losses[unit] = math.inf if math.isnan(loss) else loss
    return losses


def _compared(found: DataFrame) -> Iterator[Compared]:
    losses = units(found)
    for model in dict.fromkeys(unit.model for unit in losses):
        for steps in sorted({unit.steps for unit in losses if unit.model == model}):
            yield Compared(losses, model, steps)


def losses_table(found: DataFrame, selecting: bool) -> str:
    """Return what a user gets: final losses at the defaults and tuned, by model and length; step and state by model.

    Of the seed on which rates are selected, or of the mean of all others, for methods with any of these; a length that
    has fewer seeds than others has less of an error, or none.
    """
    has = found["seed"] == FIRST_SEED if selecting else found["seed"] != FIRST_SEED
    shown = [form for form in FORMS if form in set(found["optimizer"][has])]
    every, times = list(_compared(found)), optimizer_ms(found)
    lines, seeds = [], {}
    for form in shown:
        its = found[found["optimizer"] == form]
        own = FORMS[form]
        cells: dict[str, object] = {"optimizer": own.label, "to tune": "lr, α_kl" if own.alpha else "lr"}
        for one in every:
            both = [losses[judged(losses.index, selecting)] for losses in (one.at_default(form), one.at_best(form))]
            if any(map(len, both)):
                cells[f"{one.model}, {one.steps:,}"] = " / ".join(map(_mean, both))
                seeds[form] = max(seeds.get(form, 0), *map(len, both))
        if form not in seeds:
            continue
        by_model = its.groupby("model", sort=False)
        cells["step, ms"] = " / ".join(figure(times[model, form], 0) for model in by_model.groups)
        cells["state, MB"] = " / ".join(f"{mb:.1f}" for mb in by_model["state_mb"].median())
        cells["seeds"] = seeds[form]
        lines.append(cells)
    lengths = [name for one in every if any((name := f"{one.model}, {one.steps:,}") in cells for cells in lines)]
    columns = ["optimizer", "to tune", *lengths, "step, ms", "state, MB", "seeds"]
    return table(DataFrame(lines, columns=columns).fillna("-"), 2)


def short_table(found: DataFrame, steps: int) -> str:
    """Return the tuned losses of the main methods at one length, by model: means of the seeds that rates are not on."""
    every = [one for one in _compared(found) if one.steps == steps]
    lines = []
    for form in MAIN:
        tuned = {one.model: one.at_best(form) for one in every}
        means = {model: f"{its[judged(its.index, False)].mean():.3f}" for model, its in tuned.items() if len(its)}
        lines.append({"optimizer": FORMS[form].label} | means)
    return table(DataFrame(lines).fillna("-"), 1)


def settings_table(found: DataFrame) -> str:
    """Return, by model and length, what was tried and selected, and what the defaults lose to it, paired by seed."""
    lines = []
    for one in _compared(found):
        for form, own in FORMS.items():
            unit, best, default = one.tuned[form].unit, one.at_best(form), one.at_default(form)
            if unit is None:
                continue
            cells: dict[str, object] = {"model": one.model, "steps": f"{one.steps:,}", "optimizer": own.label}
            cells["lr tried"] = ", ".join(f"{lr:.3g}" for lr in one.tried(form))
            cells["lr"] = f"{unit.lr:.3g}" + (f", α_kl {unit.alpha_kl:.3g}" if own.alpha else "")
            cells["AdamW's"] = "" if unit.adamw_lr is None else f"{unit.adamw_lr:.3g}"
            cells["tuned"] = _mean(best[judged(best.index)])
            cells["defaults − tuned"] = _difference(default, best)
            for reference in REFERENCES:
                cells[f"− {FORMS[reference].label}, tuned"] = (
                    "-" if form == reference else _difference(best, one.at_best(reference))
                )
            cells["seeds"] = len(judged(best.index))
            lines.append(cells)
    return table(DataFrame(lines), 3)


def _mean(losses: Series) -> str:
    return with_error(losses.mean(), losses.sem(), 3) if len(losses) else "-"


def _difference(losses: Series, minus: Series) -> str:
    """Return the mean difference over the judged seeds that both have, with its standard error where it has one."""
    seeds = judged(losses.index.intersection(minus.index))
    if not seeds:
        return "-"
    difference = losses[seeds] - minus[seeds]
    return with_error(difference.mean(), difference.sem(), 3, sign="+")


def reached_table(found: DataFrame, curves: Path = CURVES) -> str:
    """Return after which share of a reference's steps and seconds tuned methods have its final loss.

    Seconds are steps times :func:`step_ms`.
    """
    curve = frame(curves)
    every_ms = step_ms(found)
    lines = []
    for one in _compared(found):
        best = {form: its.unit for form, its in one.tuned.items() if its.unit is not None}
        own = {form: _by_seed(curves_of(curve, unit)) for form, unit in best.items()}
        for form, its in own.items():
            cells: dict[str, object] = {"model": one.model, "steps": f"{one.steps:,}", "optimizer": FORMS[form].label}
            for reference in REFERENCES:
                if reference not in own:
                    continue
                both = judged(its.keys() & own[reference].keys())
                steps = np.mean([_reached(its[seed], own[reference][seed]) for seed in both]) if both else math.nan
                slower = every_ms[one.model, form] / every_ms[one.model, reference]
                known = form != reference and not math.isnan(steps)
                cells[f"steps to {FORMS[reference].label}'s"] = f"{steps:.2f}" if known else "-"
                cells[f"seconds to {FORMS[reference].label}'s"] = figure(steps * slower if known else None, 2)
            lines.append(cells)
    return table(DataFrame(lines).fillna("-"), 3)


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


def _by_seed(curve: DataFrame) -> dict[int, DataFrame]:
    return {int(seed): its for seed, its in curve.groupby("seed")}


def _reached(its: DataFrame, reference: DataFrame) -> float:
    """Return the share of the reference's steps after which its final loss is reached; nan if never."""
    losses = its["validation_loss"].to_numpy()
    target = reference["validation_loss"].iloc[-1]
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return math.nan
    part = slice(max(0, below[0] - 1), below[0] + 1)
    step = np.interp(-target, -losses[part], its["step"].to_numpy(dtype=float)[part])
    return float(step / reference["step"].iloc[-1])
