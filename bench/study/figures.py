"""Loss curves, drawn from the rows of the result files."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame, isna

from bench.optimizers import OPTIMIZERS, PRO, label
from bench.study.gpt124m import ADAMW, KEY, OURS
from bench.study.gpt124m_tables import best_runs
from bench.study.lengths import FORMS
from bench.study.lengths_tables import DRAWN, best_units, by_seed, judged, of_unit, step_ms
from bench.study.lengths_tables import OURS as DEFAULT

WIDTHS = (1.0, 1.6, 2.4)  # of a method's lines, by rank
DPI = 120
PANELS = {"step": "steps", "seconds": "seconds of training"}  # axes that losses are drawn against, with their labels


def loss(path: Path, curves: DataFrame) -> None:
    """Draw loss against steps and seconds, a line of panels per model; bands are one standard error."""
    models = list(curves.dropna(subset="validation_loss").groupby("model", sort=False))
    size = (5 * len(PANELS), 3.8 * len(models))
    figure = Figure(size, layout="constrained")
    grid = figure.subplots(len(models), len(PANELS), squeeze=False)
    for line, (model, here) in zip(grid, models, strict=True):
        for axes, (x, label_of_x) in zip(line, PANELS.items(), strict=True):
            for (method, rank), found in here.groupby(["optimizer", "rank"], sort=False, dropna=False):
                ranks = sorted(here[here["optimizer"] == method]["rank"].dropna().unique())
                its = {"color": OPTIMIZERS[str(method)].colour, "alpha": 1.0 if method == PRO else 0.65}
                its["lw"] = 1.6 if isna(rank) else WIDTHS[ranks.index(rank) - len(ranks)]
                curve(axes, found, x, label=label(str(method), None if isna(rank) else rank), **its)
            axes.set(xlabel=label_of_x, ylabel="validation loss, nats per token", title=model)
            fit(axes)
        line[0].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=DPI)


def curve(axes: Axes, rows: DataFrame, x: str, **style: Any) -> None:
    """Draw the mean loss over the seeds at every evaluation that all of them have."""
    y, at = "validation_loss", rows.dropna(subset="validation_loss").groupby("step")
    points = at.agg(x=(x, "mean"), mean=(y, "mean"), error=(y, "sem"), seeds=(y, "size"))
    points = points[points["seeds"] == points["seeds"].max()].fillna({"error": 0.0})
    if points.empty:
        return
    where, mean, error = (points[name].to_numpy(float) for name in ("x", "mean", "error"))
    (drawn,) = axes.plot(where, mean, **style)
    axes.fill_between(where, mean - error, mean + error, color=drawn.get_color(), alpha=0.2, lw=0)


def fit(axes: Axes, descent: float = 0.25) -> None:
    """Leave out the frame above and on the right, and the first ``descent`` of points, which squeezes differences."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.5)
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    lines = [values for values in lines if len(values)]
    if lines:
        low, high = min(v.min() for v in lines), max(v[int(descent * len(v)) :].max() for v in lines)
        room = 0.05 * (high - low) or 1.0
        axes.set_ylim(low - room, high + room)


STEPS = 1600
APART = 0.06  # least distance of two names at the ends of lines, as a share of the height


def lengths(path: Path, found: DataFrame, curves: DataFrame, x: str = "step") -> None:
    """Draw the main methods' loss, each tuned, a panel per model; bands are one standard error.

    ``x`` is "step", or "seconds": steps times what one takes, as in the table of shares.
    """
    every, every_ms = best_units(found), step_ms(found)
    models = list(dict.fromkeys(model for model, _ in every))
    figure = Figure((5.5 * len(models), 3.8), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False)
    for axes, model in zip(panels[0], models, strict=True):
        best = {form: unit for form in DRAWN if (unit := every.get((model, STEPS), {}).get(form))}
        seeds = judged(set.intersection(*(set(by_seed(found, unit).index) for unit in best.values())))
        ends = {}
        for form, unit in best.items():
            its = of_unit(curves, unit).sort_values("step")
            its = its[its["seed"].isin(seeds)].assign(seconds=its["step"] * every_ms[model, form] / 1e3)
            colour = OPTIMIZERS[unit.hyper().method].colour
            style = {"lw": 2.4} if form == DEFAULT else {"lw": 1.3, "alpha": 0.6}
            style["ls"] = "--" if colour in {its for _, its in ends.values()} else "-"  # one method in two forms
            curve(axes, its, x, label=FORMS[form].label, color=colour, **style)
            ends[form] = axes.get_lines()[-1].get_xydata()[-1], colour
        of = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
        axes.set(xlabel=PANELS[x], ylabel="validation loss, nats per byte", title=f"{model}, {STEPS:,} steps, {of}")
        fit(axes)
        if x == "step":
            _name_ends(axes, ends)
        else:
            axes.legend(frameon=False)  # ends lie beside each other here
    figure.savefig(path, dpi=DPI)


def gpt124m(path: Path, found: DataFrame, curves: DataFrame, x: str) -> None:
    """Draw the losses of every method at its best rate, which ``best_runs`` gives, against "step" or "seconds".

    AdamW's are far above the others, and the title says where they end. Seconds are steps times what one takes after
    the first validation; bands are one standard error.
    """
    figure = Figure((6.5, 4.2), layout="constrained")
    axes, colours, title = figure.subplots(), set(), "GPT-2 124M's shape"
    for case, its in best_runs(found).items():
        if case == ADAMW:
            title += f"; AdamW ends at {its['validation_loss'].mean():.2f}"
            continue
        own = curves.merge(its[[*KEY, "batch", "context", "tokens_per_second"]], on=list(KEY))
        own = own.assign(seconds=own["step"] * own["batch"] * own["context"] / own["tokens_per_second"])
        colour = OPTIMIZERS[its["optimizer"].iloc[0]].colour
        style = {"lw": 2.4} if case == OURS else {"lw": 1.3, "alpha": 0.6}
        style["ls"] = "--" if colour in colours else "-"  # one method in two forms
        colours.add(colour)
        curve(axes, own, x, label=f"{case}, lr {its['lr'].iloc[0]:.3g}", color=colour, **style)
    axes.set(xlabel=PANELS[x], ylabel="validation loss, nats per token", title=title)
    fit(axes, descent=0.5)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=DPI)


def _name_ends(axes: Axes, ends: dict[str, tuple[np.ndarray, str]]) -> None:
    """Write every line's name right of its end, no two over each other; a thin line leads there."""
    low, high = axes.get_ylim()
    left, last = axes.get_xlim()
    below = -np.inf
    for form, ((right, loss), colour) in sorted(ends.items(), key=lambda end: end[1][0][1]):
        below = max(loss, below + APART * (high - low))
        bold = "bold" if form == DEFAULT else "normal"
        place = (last + 0.04 * (last - left), below)
        lead = {"arrowstyle": "-", "color": colour, "lw": 0.8, "shrinkA": 1, "shrinkB": 1, "relpos": (0, 0.5)}
        axes.annotate(
            FORMS[form].label, (right, loss), place, color=colour, weight=bold, va="center", arrowprops=lead,
            annotation_clip=False,
        )  # fmt: skip
