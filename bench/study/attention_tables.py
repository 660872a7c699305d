"""The table of ``bench.study attention``: query and key weights by heads beside whole ones."""

import math
import statistics
from collections.abc import Collection
from typing import Any

from pandas import DataFrame, isna

from bench.markdown import figure, table, with_error
from bench.optimizers import PRO
from bench.study.attention import LRS
from bench.study.lengths import FIRST_SEED, FORMS, HEADS
from bench.study.scales import TINY

SHOWN = {1: "whole", HEADS: "by heads"}
"""Names of the pieces that the table has."""


def _shown(row: dict[Any, Any]) -> bool:
    """Return True if query and key differ from other weights in nothing but pieces, at the best rate of whole ones."""
    alone = (row["qk_rate"], row["vo_pieces"]) == (1, 1) and isna(row["qk_rank"]) and row["qk_pieces"] in SHOWN
    return alone and row["lr"] == LRS[row["optimizer"], row["steps"]][list(TINY).index(row["model"])]


def heads_table(found: DataFrame, lengths: Collection[int]) -> str:
    """Return the losses of whole weights, and those by heads minus these, paired by seed.

    A cell has the first seed's figure, then the mean of the others ± standard error, with their number. Methods that
    were not run by heads have no line.
    """
    losses: dict[str, dict[tuple[str, int], dict[int, float]]] = {}
    tiny = found[found["steps"].isin(lengths) & found["model"].isin(TINY)].sort_values(["steps", "model"])
    for row in filter(_shown, tiny.to_dict("records")):
        loss = math.inf if isna(row["validation_loss"]) else row["validation_loss"]
        cases = losses.setdefault(f"{row['model']}, {row['steps']:,}", {})
        cases.setdefault((row["optimizer"], row["qk_pieces"]), {})[row["seed"]] = loss
    forms = {form for cases in losses.values() for form, pieces in cases if pieces == HEADS}
    lines = []
    for form in sorted(forms, key=[PRO, *FORMS].index):
        for pieces, name in SHOWN.items():
            cells = {"optimizer": FORMS[form].label, "q, k": name}
            for column, cases in losses.items():
                own, beside, sign = dict(cases.get((form, pieces), {})), cases.get((form, 1), {}), ""
                if pieces == HEADS:
                    own, sign = {seed: loss - beside[seed] for seed, loss in own.items() if seed in beside}, "+"
                cells[column] = figure(own.pop(FIRST_SEED, None), 3, sign)
                if others := list(own.values()):
                    error = statistics.stdev(others) / math.sqrt(len(others)) if len(others) > 1 else math.nan
                    cells[column] += f"; {with_error(statistics.mean(others), error, 3, sign)} ({len(others)})"
            lines.append(cells)
    return table(DataFrame(lines), 2)
