"""The documents' tables of the modelled step."""

from pandas import DataFrame

from bench.markdown import figure, table
from bench.shapes import PAPER
from bench.step_model import ORDINARY, total

SETS = ("brief", "tiles")
"""The sets of rates."""
DTYPE = "bfloat16"
"""Of the weights and gradients whose parts are shown."""
SMALL = 0.02
"""Share of every model's step below which a part is shown with others."""
POOLED = ("elementwise", "qr")
"""Kernels that count as one part whatever stage they are of."""


def totals(rows: DataFrame) -> str:
    """Return launches, operations, bytes and milliseconds of every model by kind of step, by both sets of rates."""
    lines = []
    for (model, dtype), found in rows.groupby(["model", "dtype"], sort=False):
        own = found.to_dict("records")
        cells = {"model": model, "gradients": dtype, "buckets": str(own[0]["buckets"])}
        for kind in ("ordinary", "refresh"):
            cells[f"launches, {kind}"] = f"{total(own, kind, 'launches'):.0f}"
        cells["TFLOP"] = figure(total(own, "ordinary", "gflop") / 1e3, 2)
        cells["GB"] = figure(total(own, "ordinary", "gb"), 1)
        for kind in ("ordinary", "refresh", "amortised"):
            cells[f"{kind}, ms"] = " / ".join(figure(total(own, kind, f"ms_{name}"), 1) for name in SETS)
        lines.append(cells)
    return table(DataFrame(lines), 2)


def parts(rows: DataFrame) -> str:
    """Return the milliseconds of an ordinary step's parts by tiles, the largest first, in bfloat16."""
    rows = rows[(rows["case"] == ORDINARY) & (rows["dtype"] == DTYPE)]
    names = [
        f"`{kernel}`" if kernel in POOLED or kernel == stage else f"{stage}: `{kernel}`"
        for stage, kernel in zip(rows["stage"], rows["kernel"], strict=True)
    ]
    wide = rows.assign(part=names).pivot_table("ms_tiles", "part", "model", "sum", fill_value=0.0)[list(PAPER)]
    small = (wide / wide.sum()).max(axis=1) < SMALL
    wide, rest = wide[~small].sort_values(PAPER[0], ascending=False), wide[small].sum()
    wide.loc["smaller ones"] = rest
    cells = wide.map(lambda ms: figure(ms, 2)).rename_axis(columns=None).rename_axis("ms, by tiles")
    return table(cells.reset_index(), 1)
