"""The table of the modelled step; bench.tables puts it into the documents."""

from pandas import DataFrame

from bench.markdown import figure, table
from bench.timing.entries import PERIOD


def steps_table(found: DataFrame) -> str:
    """Return launches, operations, bytes and milliseconds of every model, refreshes amortised in the last column."""
    lines = []
    for (model, dtype, precision), own in found.groupby(["model", "dtype", "precision"], sort=False):
        ordinary, refresh = (own[own["case"] == kind].iloc[0] for kind in ("ordinary", "refresh"))
        cells = {"model": model, "gradients": dtype, "precision": precision}
        cells["launches"] = f"{ordinary['launches']} / {refresh['launches']}"
        cells["TFLOP"] = " / ".join(figure(row["gflop"] / 1e3, 2) for row in (ordinary, refresh))
        cells["GB"] = " / ".join(figure(row["gb"], 1) for row in (ordinary, refresh))
        cells["ms"] = " / ".join(figure(row["ms"], 1) for row in (ordinary, refresh))
        mean = ordinary["ms"] + (refresh["ms"] - ordinary["ms"]) / PERIOD
        lines.append(cells | {"ms of a mean step": figure(mean, 1)})
    return table(DataFrame(lines), 3)
