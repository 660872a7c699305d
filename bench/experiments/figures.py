"""Loss curves and sweeps, drawn from the rows of the CSV files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from bench.drawing import plt, save, tidy
from bench.experiments.tables import VARIED, Row
from bench.training.contenders import CONTENDERS, with_rank

WIDTHS = (1.0, 1.6, 2.4)  # of a method's lines, by rank
PANELS = (
    ("step", "validation_loss", "steps", "validation loss, nats per token"),
    ("seconds", "validation_loss", "seconds of training", "validation loss, nats per token"),
    ("step", "train_loss", "steps", "training loss since the last evaluation"),
)
TRACES = (
    ("tail_variance", "variance outside the subspace", "log"),
    ("clipped_L", "share of L's eigenvalues at their floor", "linear"),
)


def loss(path: Path, curves: Sequence[Row], rows: Sequence[Row]) -> None:
    """Loss against steps and seconds, a line of panels per model and start; bands are one standard error over seeds.

    Args:
        curves: of main-curves.csv and the like; where they have no seconds, there is no such panel.
        rows: of main.csv, which say which contenders a start is compared with.
    """
    groups = list(dict.fromkeys((row["model"], row["start"]) for row in rows))
    panels = [panel for panel in PANELS if any(panel[0] in row for row in curves)]
    size = (5 * len(panels), 3.8 * len(groups))
    figure, grid = plt.subplots(len(groups), len(panels), figsize=size, squeeze=False, layout="constrained")
    for line, (model, start) in zip(grid, groups, strict=True):
        here = [r for r in curves if r["model"] == model and r["start"] in ("", start)]
        named = {(r["optimizer"], r["rank"]): [] for r in rows if (r["model"], r["start"]) == (model, start)}
        for row in here:
            if (row["optimizer"], row["rank"]) in named:
                named[row["optimizer"], row["rank"]].append(row)
        for axes, (x, y, x_label, y_label) in zip(line, panels, strict=True):
            for (method, rank), found in named.items():
                _curve(axes, found, x, y, **_style(method, rank, list(named)))
            axes.set(xlabel=x_label, ylabel=y_label, title=f"{model}, start {start}")
            _fit(axes)
            tidy(axes)
        line[0].legend(frameon=False, fontsize="small")
    save(figure, path)


def _curve(axes: Axes, rows: Sequence[Row], x: str, y: str, **style: object) -> None:
    """Mean over the seeds at every evaluation that all of them have."""
    by_step: dict[int, list[Row]] = {}
    for row in rows:
        if row[y] != "":
            by_step.setdefault(int(row["step"]), []).append(row)
    seeds = max(map(len, by_step.values()), default=0)
    points = [found for _, found in sorted(by_step.items()) if len(found) == seeds]
    if not points:
        return
    losses = np.array([[float(row[y]) for row in found] for found in points])
    where = [np.mean([float(row[x]) for row in found]) for found in points]
    mean, error = losses.mean(axis=1), losses.std(axis=1, ddof=1) / np.sqrt(seeds) if seeds > 1 else 0.0
    (drawn,) = axes.plot(where, mean, **style)
    axes.fill_between(where, mean - error, mean + error, color=drawn.get_color(), alpha=0.2, lw=0)


def _style(method: str, rank: str, among: Sequence[tuple[str, str]]) -> dict[str, object]:
    ranks = sorted({int(r) for m, r in among if m == method and r})
    width = WIDTHS[ranks.index(int(rank)) - len(ranks)] if rank else 1.6
    return {"color": CONTENDERS[method].colour, "lw": width, "label": with_rank(method, rank)}


def _fit(axes: Axes) -> None:
    """Leaves the steep first descent out, which would squeeze the differences that the figure is for."""
    lines = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    lines = [values for values in lines if len(values)]
    if lines:
        low, high = min(v.min() for v in lines), max(v[len(v) // 4 :].max() for v in lines)
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def sweep(path: Path, rows: Sequence[Row]) -> None:
    """Final loss against learning rate for every search; a circle marks what was selected."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    size = (6.5 * len(models), 4.5)
    figure, (line,) = plt.subplots(1, len(models), figsize=size, squeeze=False, layout="constrained")
    for axes, model in zip(line, models, strict=True):
        here = [row for row in rows if row["model"] == model]
        searches: dict[tuple[str, str, str, str], list[Row]] = {}
        for row in here:
            searches.setdefault((row["optimizer"], row["rank"], row["start"], row["alpha_kl"]), []).append(row)
        for (method, rank, start, _), found in searches.items():
            points = sorted((float(r["lr"]), float(r["validation_loss"])) for r in found if r["validation_loss"])
            style = _style(method, rank, [(m, r) for m, r, _, _ in searches])
            chosen = [r for r in found if r["selected"]]
            style["label"] = f"{style['label']}{f', start {start}' if start else ''}" if chosen else None
            dashes = "--" if start not in ("", "auto") else "-"
            axes.plot(*zip(*points, strict=True), ls=dashes, marker=".", ms=3, alpha=1 if chosen else 0.35, **style)
            for row in chosen:
                axes.plot(float(row["lr"]), float(row["validation_loss"]), "o", mfc="none", color=style["color"])
        losses = sorted(float(row["validation_loss"]) for row in here if row["validation_loss"])
        worst = max(float(row["validation_loss"]) for row in here if row["selected"])
        title = f"{model}; circle: selected, pale: other alpha_kl"
        axes.set(xscale="log", xlabel="learning rate", ylabel="final validation loss, one seed", title=title)
        # The worst tenth lies outside, as far as nothing is selected there.
        axes.set_ylim(losses[0] - 0.02, max(worst, losses[int(0.9 * (len(losses) - 1))]) + 0.02)
        axes.legend(frameon=False, fontsize="x-small")
        tidy(axes)
    save(figure, path)


def sensitivity(path: Path, rows: Sequence[Row], traces: Sequence[Row]) -> None:
    """Differences of losses by what was varied, bars of one standard error, and eigenvalues along a run by their start.

    Args:
        rows: of sensitivity.csv.
        traces: of sensitivity-eigenvalues.csv; there may be none of a model.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    columns = len(VARIED) + len(TRACES)
    size = (4.2 * columns, 3.6 * len(models))
    figure, grid = plt.subplots(len(models), columns, figsize=size, squeeze=False, layout="constrained")
    for line, model in zip(grid, models, strict=True):
        for axes, (varied, (_, label)) in zip(line, VARIED.items(), strict=False):
            of = [row for row in rows if (row["model"], row["varied"]) == (model, varied)]
            _differences(axes, of)
            axes.set(xlabel=label, ylabel="difference of validation losses", title=model)
            axes.set_visible(bool(of))
        of = [row for row in traces if row["model"] == model]
        for axes, (column, label, scaled) in zip(line[len(VARIED) :], TRACES, strict=True):
            _traces(axes, of, column)
            axes.set(yscale=scaled, xlabel="steps", ylabel=label, title=model)
            axes.set_visible(bool(of))
        for axes in line:
            tidy(axes)
    save(figure, path)


def _traces(axes: Axes, rows: Sequence[Row], column: str) -> None:
    """A line for every start."""
    starts = list(dict.fromkeys(row["start"] for row in rows))
    for start, colour in zip(starts, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(starts))), strict=True):
        own = [row for row in rows if row["start"] == start]
        steps, values = ([float(row[name]) for row in own] for name in ("step", column))
        axes.plot(steps, values, color=colour, label=f"start {start}")
    if starts:
        axes.legend(frameon=False, fontsize="small")


def _differences(axes: Axes, rows: Sequence[Row]) -> None:
    """A line for every pair of contenders, over values at equal distances."""
    values = list(dict.fromkeys(row["value"] for row in rows))
    lines: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        start = row["start"] if row["varied"] == "steps" else ""
        lines.setdefault((row["optimizer"], row["minus"], start), []).append(row)
    for (method, minus, start), own in lines.items():
        label = f"{CONTENDERS[method].label}{f', start {start}' if start else ''} − {CONTENDERS[minus].label}"
        mean, error = ([float(row[name] or "nan") for row in own] for name in ("difference", "difference_se"))
        style = {"marker": ".", "capsize": 2, "color": CONTENDERS[method].colour, "label": label}
        dashes = "-" if start in ("", "auto") else "--"
        axes.errorbar([values.index(row["value"]) for row in own], mean, error, ls=dashes, **style)
    axes.axhline(0, color="black", lw=0.8)
    axes.set_xticks(range(len(values)), values)
    if lines:
        axes.legend(frameon=False, fontsize="small")
