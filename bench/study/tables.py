"""The table of a comparison in Markdown, from the rows of its runs and of their curves."""

import math
from collections.abc import Sequence

import numpy as np
from pandas import DataFrame, Series

from bench.markdown import figure, table, with_error
from bench.optimizers import label

TARGETS = ("kl-shampoo", "muon")  # methods to whose final losses the paper measures the time


def reached(losses: Sequence[float], at: Sequence[float], target: float) -> float:
    """Return where a loss first reaches ``target``, interpolated between evaluations; nan if never."""
    below = np.flatnonzero(np.asarray(losses) <= target)
    if not len(below):
        return math.nan
    part = slice(max(0, below[0] - 1), below[0] + 1)
    return float(np.interp(-target, np.negative(losses[part]), at[part]))


def seconds_to(method: str, runs: DataFrame, curves: DataFrame) -> Series:
    """Return, by model, method, rank and seed, after how many seconds a run had a method's final loss on its seed."""
    of = ["model", "seed"]
    targets = runs[runs["optimizer"] == method].set_index(of)["validation_loss"].rename("target")
    found = {}
    for key, its in curves.join(targets, on=of).groupby(["model", "optimizer", "rank", "seed"]):
        losses, at = (its[name].to_numpy(float) for name in ("validation_loss", "seconds"))
        found[key] = reached(losses, at, its["target"].iloc[0])
    return Series(found, dtype=float)


def table_of(runs: DataFrame, curves: DataFrame) -> str:
    """Return loss, cost and time, a line for every method, and what it was given; means are over the seeds.

    A figure that one seed lacks is no mean of the others. Columns that say nothing in any line are left out.
    """
    runs, curves = (rows.fillna({"rank": 0}) for rows in (runs, curves))  # of a method without one
    seconds = {method: seconds_to(method, runs, curves) for method in TARGETS}
    lines = []
    for (model, method, rank), its in runs.groupby(["model", "optimizer", "rank"], sort=False):
        mean = its[["validation_loss", "model_ms", "optimizer_ms", "state_mb"]].mean(skipna=False)
        diverged = " ".join(map(str, filter(None, its["diverged_at"])))
        loss = with_error(mean["validation_loss"], its["validation_loss"].sem())
        cells = {"model": model, "optimizer": label(method, rank)}
        cells |= {name: f"{its[name].iloc[0]:g}".replace("nan", "-") for name in ("lr", "alpha_kl") if name in its}
        cells["validation loss"] = f"diverged at step {diverged}" if diverged else loss
        cells["model ms/step"] = figure(mean["model_ms"], 1)
        cells["optimizer ms/step"] = figure(mean["optimizer_ms"], 1)
        cells["state MB"] = figure(mean["state_mb"], 2)
        if "peak_gib" in its:
            cells["GPU peak GiB"] = figure(its["peak_gib"].max(), 2)
        for target, every in seconds.items():
            own = every.get((model, method, rank))
            cells[f"s to {label(target)}'s loss"] = figure(None if own is None else own.mean(skipna=False), 1)
        lines.append(cells)
    found = DataFrame(lines)
    return table(found.loc[:, (found != "-").any()], 2)
