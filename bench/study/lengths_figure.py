"""The figures of ``bench.study lengths``: validation loss along the runs of one length, against steps and seconds."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from pandas import DataFrame

from bench.drawing import plt, save, tidy
from bench.optimizers import OPTIMIZERS
from bench.study.figures import curve, fit
from bench.study.lengths import FORMS
from bench.study.lengths_tables import MAIN, Compared, curves_of, judged, step_ms, units

STEPS = 1600
OURS = "pro-klshampoo"
APART = 0.06
"""Least distance of two names at the ends of lines, as a share of the height."""


def draw(path: Path, found: DataFrame, curves: DataFrame, x: str = "step", steps: int = STEPS) -> None:
    """Draw the main methods' loss, each tuned, a panel per model; bands are one standard error.

    Args:
        path: of the file.
        found: the rows. curves: their losses along the way.
        x: "step", or "seconds": steps times what one takes, as in the table of shares.
        steps: length of the runs.
    """
    losses, every_ms = units(found), step_ms(found)
    models = list(dict.fromkeys(unit.model for unit in losses))
    figure, panels = plt.subplots(1, len(models), figsize=(5.5 * len(models), 3.8), squeeze=False, layout="constrained")
    for axes, model in zip(panels[0], models, strict=True):
        compared = Compared(losses, model, steps)
        best = {form: unit for form in MAIN if (unit := compared.tuned[form].unit)}
        seeds = judged(set.intersection(*(set(compared.at_best(form).index) for form in best)) if best else ())
        ends = {}
        for form, unit in best.items():
            its = curves_of(curves, unit)
            its = its[its["seed"].isin(seeds)].assign(seconds=its["step"] * every_ms[model, form] / 1e3)
            colour = OPTIMIZERS[unit.hyper().method].colour
            faint = {} if form == OURS else {"alpha": 0.6}
            curve(
                axes,
                its,
                x,
                "validation_loss",
                label=FORMS[form].label,
                color=colour,
                lw=2.4 if form == OURS else 1.3,
                **faint,
            )
            if drawn := axes.get_lines():
                ends[form] = drawn[-1].get_xydata()[-1], colour
        of = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        label = "steps" if x == "step" else "seconds of training"
        axes.set(xlabel=label, ylabel="validation loss, nats per byte", title=f"{model}, {steps:,} steps, {of}")
        fit(axes)
        tidy(axes)
        if x == "step":
            _name_ends(axes, ends)
        else:
            axes.legend(frameon=False)  # ends lie beside each other here
    save(figure, path)


def _name_ends(axes: Axes, ends: dict[str, tuple[np.ndarray, str]]) -> None:
    """Write the name of every line right of its end, in its colour, no two over each other."""
    low, high = axes.get_ylim()
    below = -np.inf
    for form, ((right, loss), colour) in sorted(ends.items(), key=lambda end: end[1][0][1]):
        below = max(loss, below + APART * (high - low))
        bold = "bold" if form == OURS else "normal"
        axes.annotate(FORMS[form].label, (right, below), (6, -4), textcoords="offset points", color=colour, weight=bold)
