"""What all figures share; matplotlib's pyplot comes from here, so that it is told first that nothing is displayed."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # files only: no display is needed, and none is opened

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

__all__ = ["plt", "save", "tidy"]


def tidy(axes: Axes, *, grid: bool = True) -> None:
    """Leave no frame above and on the right, and a faint grid."""
    axes.spines[["top", "right"]].set_visible(False)
    if grid:
        axes.grid(alpha=0.25, lw=0.5)


def save(figure: plt.Figure, path: Path) -> None:
    """Write the file, and forget the figure."""
    figure.savefig(path, dpi=120)
    plt.close(figure)
