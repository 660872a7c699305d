"""Cells and tables in Markdown."""

from typing import Any

from pandas import DataFrame, isna


def table(frame: DataFrame, left: int) -> str:
    """Return a table of cells that are text, the first ``left`` columns aligned to the left."""
    sides = ["left"] * left + ["right"] * (len(frame.columns) - left)
    return frame.to_markdown(index=False, disable_numparse=True, colalign=sides) + "\n"


def figure(value: Any, digits: int, sign: str = "") -> str:
    """Return a figure with this many decimals; "-" where there is none, ``sign`` "+" for one of either sign."""
    return "-" if isna(value) else f"{value:{sign}.{digits}f}"


def with_error(mean: Any, error: Any, digits: int = 4, sign: str = "") -> str:
    """Return a mean with its standard error, which a single value does not have."""
    return figure(mean, digits, sign) + ("" if isna(error) else f" ± {figure(error, digits)}")
