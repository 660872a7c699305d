"""The studies' tables from their rows; bench.tables puts them into the documents."""

import math
from collections.abc import Sequence

from pandas import DataFrame, isna

from bench.ablations import disturbed, experts
from bench.ablations.disturbed import FORMS
from bench.ablations.studies import EXPERTS, changed
from bench.markdown import figure, table
from bench.optimizers import label
from bench.study.lengths import FORMS as TUNED

LOSS = "validation loss"


def robustness_table(found: DataFrame) -> str:
    """Return the losses of each method by what was changed."""
    by = found.set_index(["value", "optimizer"])["median"]
    methods = [method for method in TUNED if method in set(found["optimizer"])]
    methods.sort(key=lambda method: method != "pro-klshampoo")
    lines = []
    for name in (*changed(methods[0]), EXPERTS):
        lines.append({"changed": name} | {label(method): figure(by.get((name, method)), 3) for method in methods})
    return table(DataFrame(lines), 1)


Line = tuple[str, str, tuple[str, ...], tuple[str, ...]]
"""Title in front of the case's value, case, the values that are shown, and the metrics of which the largest is."""
SHOWN = ("pro-klshampoo", "kl-shampoo", "muon", "adamw")
"""The optimizers that are shown; the rows have the variants too."""
LENGTHS = ("first step", f"largest of the next {disturbed.AFTER}")

DISTURBED: tuple[Line, ...] = (
    ("one gradient larger", "spike", ("1e4 times",), LENGTHS),
    ("zero gradients", "zeros", ("1000 steps",), LENGTHS),
    ("gradients of 1e-4", "faint", ("1500 steps",), LENGTHS),
    ("one row zero, the row's own step", "row", ("400 steps",), tuple(f"row's {metric}" for metric in LENGTHS)),
    ("another scale for good", "scale", ("1e4 times",), ("largest step",)),
    ("the same, steps until as usual", "scale", ("1e4 times",), ("as usual again after",)),
)
LOSSES: tuple[Line, ...] = (
    ("experts, before they are idle", "experts", ("",), ("loss before",)),
    ("idle experts, worst after return", "experts", ("500 steps",), (f"worst loss of the next {experts.AFTER}",)),
    ("GPT, undisturbed", "undisturbed", ("",), (LOSS,)),
    ("GPT, a layer's gradients zero", "layer", ("200 steps",), (LOSS,)),
    ("GPT, gradient spikes", "spikes", ("3000 times",), (LOSS,)),
)
DIGITS = {"steps": 0, "usual steps": 2}
"""Decimals by unit; of losses more."""


def disturbances_table(rows: DataFrame, lines: Sequence[Line]) -> str:
    """Return a line for every case and value, a column for every optimizer shown: the paper's form in parentheses."""
    found = []
    for title, case, values, metrics in lines:
        own = rows[(rows["case"] == case) & rows["value"].isin(values) & rows["metric"].isin(metrics)]
        for value, its in own.groupby("value", sort=False):
            figures = its.groupby(["optimizer", "clip_threshold"])["median"].max()
            digits = DIGITS.get(its["unit"].iloc[0], 3)
            cells = {"case": f"{title}, {value}" if value else title}
            for form in (form for form in FORMS if form.optimizer in SHOWN):
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
