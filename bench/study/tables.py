"""The table of a comparison in Markdown, from its rows."""

from collections.abc import Callable

from pandas import DataFrame, Series, isna

from bench.markdown import figure, table, with_error
from bench.optimizers import label

Cell = Callable[[Series], str]


def _name(row: Series) -> str:
    rank = row.get("rank")
    return label(row["optimizer"], None if isna(rank) else rank)


def _g(name: str) -> Cell:
    return lambda row: "-" if isna(row[name]) else f"{row[name]:g}"


def _fixed(name: str, digits: int) -> Cell:
    return lambda row: figure(row.get(name), digits)


def _loss(row: Series) -> str:
    if row["diverged_at"]:
        return f"diverged at step {row['diverged_at']}"
    return with_error(row["validation_loss"], row["validation_loss_se"])


COLUMNS: dict[str, Cell] = {
    "model": lambda row: row["model"],
    "optimizer": _name,
    "lr": _g("lr"),
    "alpha_kl": _g("alpha_kl"),
    "validation loss": _loss,
    "model ms/step": _fixed("model_ms", 1),
    "optimizer ms/step": _fixed("optimizer_ms", 1),
    "state MB": _fixed("state_mb", 2),
    "GPU peak GiB": _fixed("peak_gib", 2),
    "s to KL-Shampoo's loss": _fixed("seconds_to_kl_shampoo_loss", 1),
    "s to Muon's loss": _fixed("seconds_to_muon_loss", 1),
}


def table_of(rows: DataFrame) -> str:
    """Return loss, cost and time, a line for every row; columns that say nothing in any line are left out."""
    cells = DataFrame({title: [cell(row) for _, row in rows.iterrows()] for title, cell in COLUMNS.items()})
    return table(cells.loc[:, (cells != "-").any()], 2)
