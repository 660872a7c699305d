"""The paper's tables in Markdown, from the rows of the result files."""

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


_MS = {"model ms/step": _fixed("model_ms", 1), "optimizer ms/step": _fixed("optimizer_ms", 1)}
_TO_KL = {"s to KL-Shampoo's loss": _fixed("seconds_to_kl_shampoo_loss", 1)}
_WHO: dict[str, Cell] = {"model": lambda row: row["model"], "start": lambda row: row["start"], "optimizer": _name}
MAIN = (
    _WHO
    | {"lr": _g("lr"), "alpha_kl": _g("alpha_kl"), "validation loss": _loss}
    | _MS
    | {"state MB": _fixed("state_mb", 2), "GPU peak GiB": _fixed("peak_gib", 2)}
    | _TO_KL
    | {"s to Muon's loss": _fixed("seconds_to_muon_loss", 1)}
)
PRETRAIN = (
    {"optimizer": lambda row: label(row["optimizer"]), "lr": _g("lr"), "validation loss": _loss}
    | _MS
    | {"state MB": _fixed("state_mb", 1)}
    | _TO_KL
)


def by_row(rows: DataFrame, columns: dict[str, Cell], left: int) -> str:
    """Return a line for every row; columns that say nothing in any line are left out."""
    cells = DataFrame({title: [cell(row) for _, row in rows.iterrows()] for title, cell in columns.items()})
    return table(cells.loc[:, (cells != "-").any()], left)


def main_table(rows: DataFrame) -> str:
    """Return loss, cost and time by model and start of the eigenvalues; ``rows`` of main.csv."""
    return by_row(rows, MAIN, 3)


def pretrain_table(rows: DataFrame) -> str:
    """Return the same of one model and start; ``rows`` of what bench.pretrain writes."""
    return by_row(rows, PRETRAIN, 1)
