"""The tables of ``bench.study attention``: what attention's weights in pieces and at rates of their own change."""

import math
import statistics
from collections.abc import Collection
from typing import Any

from pandas import DataFrame, isna

from bench.markdown import figure, table, with_error
from bench.optimizers import PRO
from bench.study.attention import LARGER_LR, LRS, PIECES
from bench.study.lengths import FIRST_SEED, FORMS
from bench.study.scales import TINY

Case = tuple[str, int | None, int, int, float]
"""Optimizer, rank of query and key (None is "auto"), pieces of value and output, pieces and rate of query and key."""
NAMES = {count: name for name, count in PIECES.items()}


def whole(form: str) -> Case:
    """Return an optimizer's case of whole weights at one rate."""
    return form, None, 1, 1, 1.0


def base_lr(model: str, steps: int, form: str) -> float:
    """Return the rate that cases of a model are compared at."""
    return LRS[form, steps][list(TINY).index(model)] if model in TINY else LARGER_LR


def _case(row: dict[Any, Any]) -> Case:
    rank = None if isna(row["qk_rank"]) else row["qk_rank"]
    return row["optimizer"], rank, row["vo_pieces"], row["qk_pieces"], row["qk_rate"]


def _order(case: Case) -> tuple[Any, ...]:
    return [PRO, *FORMS].index(case[0]), case[1] or 0, *case[2:]


def _cells(case: Case) -> dict[str, str]:
    form, rank, vo, qk, rate = case
    more = f", r = {rank}" if rank else ""
    return {"optimizer": FORMS[form].label, "q, k": NAMES[qk] + more, "q, k × lr": f"{rate:g}", "v, o": NAMES[vo]}


def cases_table(found: DataFrame, lengths: Collection[int]) -> str:
    """Return the losses of whole weights at one rate, and those of other cases minus these, paired by seed.

    A cell has the first seed's figure, then the mean of the others ± standard error, with their number. The last column
    is the optimizer's time over the model's, a figure a model.
    """
    losses: dict[str, dict[Case, dict[int, float]]] = {}
    costs: dict[Case, dict[str, str]] = {}
    for row in found.sort_values(["steps", "model"]).to_dict("records"):
        if row["steps"] in lengths and row["lr"] == base_lr(row["model"], row["steps"], row["optimizer"]):
            loss = math.inf if isna(row["validation_loss"]) else row["validation_loss"]
            case, column = _case(row), f"{row['model']}, {row['steps']:,}"
            losses.setdefault(column, {}).setdefault(case, {})[row["seed"]] = loss
            if row["seed"] == FIRST_SEED:
                costs.setdefault(case, {})[column] = figure(row["optimizer_per_model"], 2)
    lines = []
    for case in sorted(costs, key=_order):
        cells, base = _cells(case), whole(case[0])
        for column, of_case in losses.items():
            own, beside, sign = dict(of_case.get(case, {})), of_case.get(base, {}), ""
            if case != base:
                own, sign = {seed: loss - beside[seed] for seed, loss in own.items() if seed in beside}, "+"
            cells[column] = figure(own.pop(FIRST_SEED, None), 3, sign)
            if others := list(own.values()):
                error = statistics.stdev(others) / math.sqrt(len(others)) if len(others) > 1 else math.nan
                cells[column] += f"; {with_error(statistics.mean(others), error, 3, sign)} ({len(others)})"
        lines.append(cells | {"optimizer / model": " / ".join(costs[case].get(column, "-") for column in losses)})
    return table(DataFrame(lines), 4)


def rates_table(found: DataFrame) -> str:
    """Return the first seed's losses of Pro-KLShampoo by lr, of the cases that were trained at several."""
    by_lr: dict[str, dict[Case, dict[float, float]]] = {}
    for row in found.sort_values(["steps", "model", "lr"]).to_dict("records"):
        if (row["optimizer"], row["seed"], row["model"] in TINY) == (PRO, FIRST_SEED, True):
            its = by_lr.setdefault(f"{row['model']}, {row['steps']:,}", {}).setdefault(_case(row), {})
            its[row["lr"]] = row["validation_loss"]
    several = {column: {case: its for case, its in cases.items() if len(its) > 1} for column, cases in by_lr.items()}
    several = {column: cases for column, cases in several.items() if cases}
    lines = []
    for case in sorted({case for cases in several.values() for case in cases}, key=_order):
        cells = _cells(case)
        del cells["optimizer"]
        for column, cases in several.items():
            its = cases.get(case, {}).items()
            cells[column] = ", ".join(f"{lr:.3g}: {figure(loss, 3)}" for lr, loss in its) or "-"
        lines.append(cells)
    return table(DataFrame(lines), 3)
