"""One picture of a live optimizer: the spectra of all weights, by shape."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from torch import nn

from prokl.algorithm.shapes import Rank, effective_rank
from prokl.diagnostics.report import spectra
from prokl.matrix_optimizer import MatrixOptimizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(
    optimizer: MatrixOptimizer | Any,
    path: str | PathLike[str] | None = None,
    model: nn.Module | None = None,
    *,
    rank: Rank = "auto",
) -> Figure:
    """Draw :func:`spectra`: a column for every shape, the long side's factor above and L below, a line a matrix.

    Needs matplotlib; opens no window and leaves its backend alone. A dashed line says where the tail begins.

    Args:
        optimizer: as in :func:`scalars`.
        path: file to write, in the format that its suffix says; None writes none.
        model: as in :func:`scalars`.
        rank: as in :func:`spectra`.

    Returns:
        The figure, for ``SummaryWriter.add_figure`` or ``wandb.Image``; without axes before the first step.

    Raises:
        ImportError: matplotlib is not installed. Else as :func:`spectra`.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("prokl.diagnostics.plot needs matplotlib: pip install matplotlib.") from error
    columns: dict[tuple[int, int], list[dict[str, list[float]]]] = {}
    for factors in spectra(optimizer, model, rank=rank).values():
        lines = {factor: values.tolist() for factor, values in factors.items()}
        columns.setdefault((len(lines["L"]), len(lines.get("R") or lines["S"])), []).append(lines)
    figure = Figure(figsize=(3 * max(1, len(columns)), 5), layout="constrained")
    grid: Any = figure.subplots(2, len(columns), squeeze=False) if columns else None
    for column, ((short, long), matrices) in enumerate(columns.items()):
        for axes, key in ((grid[0][column], "S" if "S" in matrices[0] else "R"), (grid[1][column], "L")):
            for lines in matrices:
                axes.plot(range(1, len(lines[key]) + 1), lines[key], lw=1.1)
            axes.axvline(
                long if "S" in matrices[0] else effective_rank(rank, short, long), color="black", ls="--", lw=0.6
            )
            axes.axhline(1, color="black", ls=":", lw=0.6)
            axes.set(yscale="log", xlabel="index", ylabel=f"{key} / {'mu' if key == 'S' else 'tail mean'}")
        grid[0][column].set_title(f"{len(matrices)} matrices, short side {short}", fontsize="small")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
