"""The tables of ``bench.study lengths`` from its rows: losses by method and length."""

import math
from collections.abc import Iterable

import numpy as np
from pandas import DataFrame, Series

from bench.markdown import figure, table, with_error
from bench.rows import RESULTS, frame
from bench.study.lengths import FIRST_SEED, FORMS, Unit, at_default, tuned, units
from bench.study.tables import reached

REFERENCE = "muon"  # the form to whose final loss the others' steps are counted
OURS = "pro-klshampoo-heads"  # the form of a user who sets nothing
DRAWN = ("adamw", "muon", "muon-0.9-heads", "soap", "kl-shampoo", OURS)
"""The methods that are shown first, in their better form."""
MAIN = ("adamw", "muon-0.9", "muon-0.9-heads", "soap", "kl-shampoo", "kl-shampoo-heads", "pro-klshampoo", OURS)
"""The methods of the README, those with heads also with whole queries and keys."""
AS_QUICK = 1.5  # largest ratio of the times of two runs on one machine; the machines differ by two


def best_units(found: DataFrame) -> dict[tuple[str, int], dict[str, Unit | None]]:
    """Return the best settings of every method by model and length, None where they are not known."""
    losses = units(found)
    models = list(dict.fromkeys(unit.model for unit in losses))
    lengths = sorted({(unit.model, unit.steps) for unit in losses}, key=lambda one: (models.index(one[0]), one[1]))
    return {one: {form: tuned(*one, form, losses)[0] for form in FORMS} for one in lengths}


def of_unit(rows: DataFrame, unit: Unit) -> DataFrame:
    """Return the rows of a unit's settings on all seeds."""
    same = (rows["model"] == unit.model) & (rows["steps"] == unit.steps) & (rows["optimizer"] == unit.form)
    same &= rows["lr"] == unit.lr
    for name, value in (("adamw_lr", unit.adamw_lr), ("alpha_kl", unit.alpha_kl)):
        if name in rows:
            same &= rows[name].isna() if value is None else rows[name] == value
    return rows[same]


def by_seed(found: DataFrame, unit: Unit | None) -> Series:
    """Return the final losses of a unit's settings by seed, infinite where a run diverged."""
    if unit is None:
        return Series(dtype=float)
    return of_unit(found, unit).set_index("seed")["validation_loss"].fillna(math.inf)


def _others(losses: Series) -> Series:
    """Return the losses of the seeds that rates are not selected on."""
    return losses.drop(FIRST_SEED, errors="ignore")


def judged(seeds: Iterable[int]) -> list[int]:
    """Return which seeds count: not the one that rates are selected on, unless there is no other."""
    found = sorted(seeds)
    return [seed for seed in found if seed != FIRST_SEED] or found


def losses_table(found: DataFrame) -> str:
    """Return what a user gets: final losses at the defaults and tuned, by model and length; step and state by model.

    Means are of all seeds but the one on which rates are selected, for methods with any of these; a length that has
    fewer seeds than others has less of an error, or none.
    """
    shown = [form for form in FORMS if form in set(found["optimizer"][found["seed"] != FIRST_SEED])]
    every, times = best_units(found), optimizer_ms(found)
    models = dict.fromkeys(model for model, _ in every)
    lines: list[dict[str, object]] = []
    for form in shown:
        its = found[found["optimizer"] == form]
        cells: dict[str, object] = {"optimizer": FORMS[form].label}
        for (model, steps), best in every.items():
            both = [_others(by_seed(its, unit)) for unit in (at_default(model, steps, form, FIRST_SEED), best[form])]
            if any(map(len, both)):
                means = (with_error(one.mean(), one.sem(), 3) if len(one) else "-" for one in both)
                cells[f"{model}, {steps:,}"] = " / ".join(means)
        if len(cells) > 1:
            state = its.groupby("model")["state_mb"].median().reindex(models)
            cells["step, ms"] = " / ".join(figure(times.get((model, form)), 0) for model in models)
            cells["state, MB"] = " / ".join(figure(mb, 1) for mb in state)
            lines.append(cells)
    lengths = [name for one in every if any((name := f"{one[0]}, {one[1]:,}") in cells for cells in lines)]
    columns = ["optimizer", *lengths, "step, ms", "state, MB"]
    return table(DataFrame(lines, columns=columns).fillna("-"), 1)


def short_table(found: DataFrame, steps: int) -> str:
    """Return the tuned losses of the main methods at one length, by model: means of the seeds that rates are not on."""
    every = {model: best for (model, length), best in best_units(found).items() if length == steps}
    lines = []
    for form in MAIN:
        means = {model: figure(_others(by_seed(found, best[form])).mean(), 3) for model, best in every.items()}
        lines.append({"optimizer": FORMS[form].label} | means)
    return table(DataFrame(lines), 1)


def reached_table(found: DataFrame, length: int) -> str:
    """Return after which share of the reference's steps and seconds tuned methods have its final loss, where they have.

    Of runs of one length, by model; seconds are steps times :func:`step_ms`.
    """
    curve = frame(RESULTS / "lengths-curves.csv").sort_values("step")
    every_ms = step_ms(found)
    lines: dict[str, dict[str, object]] = {}
    for model, best in ((model, best) for (model, steps), best in best_units(found).items() if steps == length):
        own = {form: dict(list(of_unit(curve, unit).groupby("seed"))) for form, unit in best.items() if unit}
        reference = own.pop(REFERENCE, {})
        for form, its in own.items():
            shares = []
            for seed in judged(its.keys() & reference.keys()):
                losses, steps = (its[seed][name].to_numpy(float) for name in ("validation_loss", "step"))
                shares.append(reached(losses, steps, reference[seed]["validation_loss"].iloc[-1]) / length)
            if not shares or math.isnan(share := float(np.mean(shares))):
                continue
            slower = every_ms[model, form] / every_ms[model, REFERENCE]
            cells = lines.setdefault(form, {"optimizer": FORMS[form].label})
            cells |= {f"{model}, steps": f"{share:.2f}", f"{model}, seconds": figure(share * slower, 2)}
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
