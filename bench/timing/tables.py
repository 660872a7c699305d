"""The table of whole steps, from its rows."""

from pandas import DataFrame, Series

from bench.markdown import figure, table
from bench.optimizers import label
from bench.shapes import SETS
from bench.timing.entries import BATCHED, EAGER, HEADS

OWN = ("muon", "pro-klshampoo")  # the optimizers that are measured with both dtypes of Newton-Schulz


def name(row: Series, dtype: str) -> str:
    """Name an optimizer: rank where there are several, Newton-Schulz's dtype where ``dtype`` is another."""
    said = label(row["optimizer"], row["rank"] if row["optimizer"] == "pro-klshampoo" and row["rank"] > 0 else None)
    if row["backend"] == "reference":
        said += ", weight by weight"
    if (note := row.get("note")) in (EAGER, HEADS):
        said += f", {note}"
    if row["optimizer"] in OWN and dtype and row["dtype"] != dtype:
        said += f", Newton–Schulz in {row['dtype'].rpartition(' ')[2]}"
    return said


def timed(rows: DataFrame) -> DataFrame:
    """Return those of rows that have the time of a whole step on one of the sets."""
    return rows[(rows["metric"] == "step") & rows["model"].isin(SETS) & rows["median"].notna()] if len(rows) else rows


def ratios(run: DataFrame) -> tuple[str, list[float]]:
    """Return what ratios are to, and the ratios: Muon in the same dtype; on a GPU BATCHED, NaN of another dtype's."""
    batched = run[run["optimizer"] == BATCHED].set_index("model")
    if batched.empty:
        return "Muon", list(run["ratio"])
    other = run["optimizer"].isin(OWN) & (run["dtype"] != run["model"].map(batched["dtype"]))
    return BATCHED, list((run["median"] / run["model"].map(batched["median"])).mask(other))


def costs(rows: DataFrame) -> str:
    """Return milliseconds a step and :func:`ratios` of all that ran."""
    run = timed(rows)
    usual = next(iter(run.loc[run["optimizer"] == "muon", "dtype"]), "")  # of the most rows
    base, found = ratios(run)
    cells = [f"{figure(ms, 1)} ({figure(ratio, 2)})" for ms, ratio in zip(run["median"], found, strict=True)]
    run = run.assign(name=[name(row, usual) for _, row in run.iterrows()], cell=cells)
    wide = run.pivot(index="name", columns="model", values="cell")
    sets = [s for s in SETS if s in wide]
    wide = wide.reindex(index=run["name"].unique(), columns=sets).astype(object).fillna("-")
    return table(wide.rename_axis(columns=None).rename_axis(f"ms a step (ratio to {base})").reset_index(), 1)
