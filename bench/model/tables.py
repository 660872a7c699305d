"""The documents' tables of the modelled step."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pandas import DataFrame

from bench.markdown import figure, table
from bench.shapes import PAPER
from bench.steps.entries import PERIOD

ORDINARY, ON_TOP = "ordinary", "refresh, on top"
"""Cases: of an ordinary step, and what a refresh step does besides."""
SETS = ("brief", "tiles")
"""The sets of rates."""
DTYPE = "bfloat16"
"""Of the weights and gradients whose parts are shown."""
SHOWN = ("before", "balanced")
"""Precisions whose parts are shown: of the step before there were pairs, and with them."""
SMALL = 0.02
"""Share of every model's step below which a part is shown with others."""
POOLED = ("elementwise", "qr")
"""Kernels that count as one part whatever stage they are of."""


def total(found: Sequence[Mapping[str, Any]], kind: str, column: str) -> float:
    """Add up a column of a model, precision and dtype: of an ordinary step, a refresh step, or refreshes amortised."""
    ordinary, on_top = (sum(float(row[column]) for row in found if row["case"] == case) for case in (ORDINARY, ON_TOP))
    return ordinary + on_top * {"ordinary": 0.0, "refresh": 1.0, "amortised": 1 / PERIOD}[kind]


def totals(rows: DataFrame) -> str:
    """Return launches, operations, bytes and milliseconds of every model by kind of step, by both sets of rates."""
    lines = []
    for (model, dtype, precision), found in rows.groupby(["model", "dtype", "precision"], sort=False):
        own = found.to_dict("records")
        cells = {"model": model, "gradients": dtype, "precision": precision, "buckets": str(own[0]["buckets"])}
        for kind in ("ordinary", "refresh"):
            cells[f"launches, {kind}"] = f"{total(own, kind, 'launches'):.0f}"
        cells["TFLOP"] = figure(total(own, "ordinary", "gflop") / 1e3, 2)
        cells["GB"] = figure(total(own, "ordinary", "gb"), 1)
        for kind in ("ordinary", "refresh", "amortised"):
            cells[f"{kind}, ms"] = " / ".join(figure(total(own, kind, f"ms_{name}"), 1) for name in SETS)
        lines.append(cells)
    models, dtypes = list(PAPER), list(dict.fromkeys(rows["dtype"]))
    lines.sort(key=lambda cells: (models.index(cells["model"]), dtypes.index(cells["gradients"])))
    return table(DataFrame(lines), 3)


def parts(rows: DataFrame) -> str:
    """Return the milliseconds of an ordinary step's parts by tiles, the largest before first, in bfloat16."""
    rows = rows[(rows["case"] == ORDINARY) & (rows["dtype"] == DTYPE) & rows["precision"].isin(SHOWN)]
    names = [
        f"`{kernel}`" if kernel in POOLED or kernel == stage else f"{stage}: `{kernel}`"
        for stage, kernel in zip(rows["stage"], rows["kernel"], strict=True)
    ]
    columns = [(model, precision) for model in PAPER for precision in SHOWN]
    named = rows.assign(part=names)
    wide = named.pivot_table("ms_tiles", "part", ["model", "precision"], "sum", fill_value=0.0)[columns]
    small = (wide / wide.sum()).max(axis=1) < SMALL
    wide, rest = wide[~small].sort_values(columns[0], ascending=False), wide[small].sum()
    wide.loc["smaller ones"] = rest
    lines = [
        {"ms, by tiles": part} | {m: " / ".join(figure(own[m, precision], 2) for precision in SHOWN) for m in PAPER}
        for part, own in wide.iterrows()
    ]
    return table(DataFrame(lines), 1)


WORLDS = (1, 8, 64, 256, 1024)
"""Numbers of ranks that are shown."""
SCALED = {"owners": ("owners", 1, 0), "balance": ("largest work over mean", 1, 2), "state": ("state, GB", 1e9, 2)}
SCALED |= {"received": ("received, GB", 1e9, 2), "sent": ("sent, GB", 1e9, 2)}
SCALED |= {"work": ("work, ms", 1, 1), "step": ("step, ms", 1, 1)}
"""Heading, divisor and decimals of a divided step's figures."""


def scaled(rows: DataFrame) -> str:
    """Return the predicted figures of divided steps, of the rank that has the most."""
    lines = []
    for (model, case, ranks), own in rows[rows["ranks"].isin(WORLDS)].groupby(["model", "case", "ranks"], sort=False):
        found = dict(zip(own["metric"], own["median"], strict=True))
        cells = {"model": model, "launcher": case, "GPUs": f"{ranks:,}"}
        for metric, (heading, unit, digits) in SCALED.items():
            cells[heading] = figure(found.get(metric, math.nan) / unit, digits)
        lines.append(cells)
    return table(DataFrame(lines), 2)
