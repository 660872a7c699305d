"""Spectra of factors in the paper's layout: a panel per layer type, a colour per depth, a line style per stage."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from torch import Tensor

from bench.drawing import plt, save, tidy
from prokl.diagnostics import over_tail

LAYER_TYPES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIDES = {
    "R": "R, long side\neigenvalue / tail mean",
    "S": "S, inside the subspace\neigenvalue / $\\mu_\\perp$",
    "L": "L, short side\neigenvalue / tail mean",
    "Phi_L": "$\\Phi_L$, long side\neigenvalue / tail mean",
}
STYLES = ("-", "--", ":", "-.")
LOWEST = 1e-4  # below it eigenvalues of a singular matrix are rounding

Spectra = Mapping[str, Mapping[str, Tensor]]
"""{weight: {factor: descending eigenvalues over their tail mean}}."""


def place_of(weight: str) -> tuple[int, str]:
    """Return depth and layer type of a weight, from its name, such as "blocks.3.up_proj.weight"."""
    _, depth, layer_type, _ = weight.split(".")
    return int(depth), layer_type


def normalised(factors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return descending eigenvalues over the mean of those beyond ``rank``; S, which has no tail, over "mu"."""
    return {
        factor: values / factors["mu"] if factor == "S" else over_tail(values, rank)
        for factor, values in factors.items()
        if factor != "mu"
    }


def draw(path: Path, stages: Mapping[str, Spectra], factors: Sequence[str], rank: int, title: str) -> None:
    """Write the figure.

    Args:
        stages: spectra by what the legend says of them; nothing where there is only one.
        factors: of SIDES, a row of panels each.
        rank: where a dashed line stands.
    """
    places = {place_of(weight) for spectra in stages.values() for weight in spectra}
    types = [t for t in LAYER_TYPES if t in {layer_type for _, layer_type in places}]
    depths = sorted({depth for depth, _ in places})
    colours = dict(zip(depths, plt.get_cmap("viridis")(np.linspace(0, 0.85, len(depths))), strict=True))
    size = (2.4 * len(types), 2.5 * len(factors))
    figure, grid = plt.subplots(
        len(factors), len(types), figsize=size, sharey="row", squeeze=False, layout="constrained"
    )
    for style, spectra in zip(STYLES, stages.values(), strict=False):
        for weight, found in spectra.items():
            depth, layer_type = place_of(weight)
            for row, factor in enumerate(factors):
                if factor in found:
                    values = found[factor].numpy()
                    axes = grid[row, types.index(layer_type)]
                    axes.plot(np.arange(1, len(values) + 1), values, color=colours[depth], lw=1.2, ls=style)
    for axes in grid.flat:
        _mark(axes, rank)
    for column, layer_type in enumerate(types):
        grid[0, column].set_title(layer_type.removesuffix("_proj"))
        grid[-1, column].set_xlabel("index")
    for row, factor in enumerate(factors):
        grid[row, 0].set_ylabel(SIDES[factor])
    handles = [Line2D([], [], color=colour, label=f"layer {depth}") for depth, colour in colours.items()]
    if len(stages) > 1:
        handles += [Line2D([], [], color="gray", ls=s, label=t) for s, t in zip(STYLES, stages, strict=False)]
    handles.append(Line2D([], [], color="black", ls=(0, (5, 5)), lw=0.8, label=f"r = {rank}"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    save(figure, path)


def _mark(axes: Axes, rank: int) -> None:
    axes.axvline(rank, color="black", ls=(0, (5, 5)), lw=0.8)
    axes.axhline(1, color="black", ls=":", lw=0.6)
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], LOWEST))
    tidy(axes)
