"""One figure of a live optimizer: spectra of all weights by shape, and the scalars of every weight by its name."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from prokl.algorithm.shapes import Rank, effective_rank
from prokl.diagnostics.report import scalars, spectra
from prokl.diagnostics.weights import Wrapper
from prokl.matrix_optimizer import MatrixOptimizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

PANELS = {
    "tail_am_gm": "tail AM/GM",
    "gap_bound": "Claim 1 bound, nats",
    "captured_energy": "energy captured by U",
    "subspace_share": "share of the update in U",
    "orthogonality": r"$\|Q^\top Q - I\|_F$",
    "spread_L": "spread of L",
    "whitened_size": "whitened size of the gradient",
    "clipped": "bounded steps",
    "update_rms": "update, rms",
    "update_to_weight": "update over weight, with lr",
    "idle_rows": "idle rows",
}
COLUMNS = 4
LABELS = 80  # weights that are named at most: of more every second, third, ...


def plot(
    optimizer: MatrixOptimizer | Wrapper,
    path: str | PathLike[str] | None = None,
    model: nn.Module | None = None,
    *,
    rank: Rank = "auto",
    phi: dict[str, Tensor] | None = None,
) -> Figure:
    """Draw :func:`spectra` and :func:`scalars`: a column of spectra for every shape, a panel for every figure.

    Needs matplotlib; opens no window and leaves its backend alone.

    Args:
        optimizer: as in :func:`scalars`.
        path: file to write, in the format that its suffix says; None writes none.
        model: as in :func:`scalars`.
        rank: likewise.
        phi: likewise.

    Returns:
        The figure, for ``SummaryWriter.add_figure`` or ``wandb.Image``; before the first step it only says so.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: another optimizer.
        ValueError: ``path`` is a folder, in a folder that does not exist, or has no suffix.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("prokl.diagnostics.plot needs matplotlib: pip install matplotlib.") from error
    if path is not None:
        _check_path(path)
    by_weight = spectra(optimizer, model, rank=rank)
    if not by_weight:
        figure = Figure(figsize=(6, 1))
        figure.text(0.5, 0.5, "No matrix weight has been stepped with a gradient yet.", ha="center", va="center")
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure
    colours = dict(
        zip(
            by_weight,
            colormaps["viridis"]([i / max(1, len(by_weight) - 1) for i in range(len(by_weight))]),
            strict=True,
        )
    )
    shapes: dict[str, list[str]] = {}
    for name, factors in by_weight.items():
        long = f"S {len(factors['S'])}" if "S" in factors else f"R {len(factors['R'])}"
        shapes.setdefault(f"{long}, L {len(factors['L'])}", []).append(name)
    figures = _by_panel(scalars(optimizer, model, rank=rank, phi=phi))
    below = -(-len(figures) // COLUMNS) * max(2.2, 0.5 + 0.11 * min(len(by_weight), LABELS))
    figure = Figure(figsize=(3 * max(len(shapes), COLUMNS), 5 + below), layout="constrained")
    halves = figure.subfigures(2, 1, squeeze=False, height_ratios=[5, below])
    _draw_spectra(halves[0, 0], by_weight, shapes, colours, rank)
    _draw_scalars(halves[1, 0], figures, colours)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _check_path(path: str | PathLike[str]) -> None:
    file = Path(path)
    if file.is_dir() or not file.suffix:
        what = "a folder" if file.is_dir() else "without a suffix, which says the format"
        raise ValueError(f"Invalid path={str(path)!r}: it is {what}; write the name of a file, as 'spectra.png'.")
    if not file.parent.is_dir():
        raise ValueError(f"Invalid path={str(path)!r}: there is no folder {str(file.parent)!r}; make it before.")


def _by_panel(values: dict[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {panel: {series: {weight: value}}} of the panels that have values."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for key, value in values.items():
        _, rest = key.split("/", 1)
        name, figure = rest.rsplit("/", 1)
        panel = next(p for p in PANELS if figure.startswith(p))
        series = figure.removeprefix(panel).removeprefix("_")
        panels.setdefault(panel, {}).setdefault(series, {})[name] = value
    return {panel: panels[panel] for panel in PANELS if panel in panels}


def _draw_spectra(
    figure: SubFigure,
    by_weight: dict[str, dict[str, Tensor]],
    shapes: dict[str, list[str]],
    colours: dict[str, Any],
    rank: Rank,
) -> None:
    grid = figure.subplots(2, len(shapes), squeeze=False)
    for (above, below), (shape, names) in zip(grid.T, shapes.items(), strict=True):
        for name in names:
            for factor, values in by_weight[name].items():
                axes = below if factor == "L" else above
                axes.plot(range(1, len(values) + 1), values, color=colours[name], lw=1.1)
                axes.set_ylabel(f"{factor} / {'mu' if factor == 'S' else 'tail mean'}")
        above.set_title(f"{shape}: {len(names)} matrices", fontsize="small")
        factors = by_weight[names[0]]
        begins = len(factors["S"]) if "S" in factors else effective_rank(rank, len(factors["L"]), len(factors["R"]))
        for axes in (above, below):
            axes.axvline(begins, color="black", ls="--", lw=0.6)
            axes.axhline(1, color="black", ls=":", lw=0.6)
            axes.set(yscale="log", xlabel="index")


def _draw_scalars(figure: SubFigure, panels: dict[str, dict[str, dict[str, float]]], colours: dict[str, Any]) -> None:
    """Draw a panel per figure with a line per weight, named on the left in the colour of its spectra."""
    names = list(colours)
    index = {name: i for i, name in enumerate(names)}
    grid = figure.subplots(-(-len(panels) // COLUMNS), COLUMNS, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (panel, by_series) in zip(grid.flat, panels.items(), strict=False):
        for series, values in by_series.items():
            axes.plot(list(values.values()), [index[n] for n in values], ".", ms=4, label=series)
        axes.set_title(PANELS[panel], fontsize="small")
        axes.grid(axis="y", alpha=0.25, lw=0.5)
        axes.ticklabel_format(axis="x", useOffset=False)
        axes.locator_params(axis="x", nbins=4)
        axes.tick_params(axis="x", labelsize="x-small")
        axes.xaxis.get_offset_text().set_fontsize("x-small")
        axes.tick_params(axis="y", labelsize=6)
        if any(by_series):
            axes.legend(fontsize="x-small")
    shown = range(0, len(names), -(-len(names) // LABELS))
    grid[0, 0].set_yticks(shown, [names[i] for i in shown])
    for axes in grid[:, 0]:
        for i, label in zip(shown, axes.get_yticklabels(), strict=True):
            label.set_color(colours[names[i]])
    grid[0, 0].invert_yaxis()
