"""The tables of disturbed steps and runs, from the rows of disturbances.csv."""

import math
from collections.abc import Sequence

from pandas import DataFrame, isna

from bench.disturbances import experts, steps
from bench.disturbances.forms import FORMS
from bench.markdown import table
from bench.optimizers import label

Line = tuple[str, str, tuple[str, ...]]
"""Title in front of the case's value, case, and the metrics of which the largest is shown."""
LENGTHS = ("first step", f"largest of the next {steps.AFTER}")

STEPS: tuple[Line, ...] = (
    ("one gradient larger", "spike", LENGTHS),
    ("zero gradients", "zeros", LENGTHS),
    ("gradients of 1e-4", "faint", LENGTHS),
    ("one row zero", "row", LENGTHS),
    ("the same, the row's own step", "row", tuple(f"row's {metric}" for metric in LENGTHS)),
    ("gradients of 1e-6, then one larger", "huge", LENGTHS),
    ("another scale for good", "scale", ("largest step",)),
    ("the same, steps until as usual", "scale", ("as usual again after",)),
)
LOSSES: tuple[Line, ...] = (
    ("experts, before they are idle", "experts", ("loss before",)),
    ("idle experts, worst after return", "experts", (f"worst loss of the next {experts.AFTER}",)),
    ("GPT, undisturbed", "undisturbed", ("validation loss",)),
    ("GPT, a layer's gradients zero", "layer", ("validation loss",)),
    ("GPT, gradient spikes", "spikes", ("validation loss",)),
)
DIGITS = {"steps": 0, "usual steps": 2}
"""Decimals by unit; of losses more."""


def steps_table(rows: DataFrame) -> str:
    """Return the largest steps, and how long a change of scale is felt."""
    return _table(rows, STEPS)


def losses_table(rows: DataFrame) -> str:
    """Return the losses of the mixture of experts and of the GPT."""
    return _table(rows, LOSSES)


def _table(rows: DataFrame, lines: Sequence[Line]) -> str:
    """Return a line for every case and value, a column for every optimizer: the paper's form in parentheses."""
    found = []
    for title, case, metrics in lines:
        own = rows[(rows["case"] == case) & rows["metric"].isin(metrics)]
        for value, its in own.groupby("value", sort=False):
            figures = its.groupby(["optimizer", "clip_threshold"])["median"].max()
            digits = DIGITS.get(its["unit"].iloc[0], 3)
            cells = {"case": f"{title}, {value}" if value else title}
            for form in FORMS:
                figure = short(figures[form.optimizer, form.clip_threshold], digits)
                name = label(form.optimizer)
                cells[name] = f"{cells[name]} ({figure})" if name in cells else figure
            found.append(cells)
    return table(DataFrame(found), 1)


def short(figure: float, digits: int) -> str:
    """Return a figure with at most this many decimals, fewer where it is large; "-" where there is none."""
    if isna(figure):
        return "-"
    if math.isinf(figure):
        return "not finite"
    if figure >= 1e5:
        return f"{figure:.0e}".replace("e+", "e").replace("e0", "e")
    return f"{figure:,.{0 if figure >= 100 else min(digits, 1) if figure >= 10 else digits}f}"
