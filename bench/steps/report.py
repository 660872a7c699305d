"""Tables and plot of the step benchmark's rows; :mod:`bench.tables` puts them into the documents."""

from collections.abc import Sequence
from pathlib import Path

from bench.drawing import plt, save
from bench.markdown import NAMES, Row, figure, markdown, rows_of
from bench.shapes import SMALL

RECORD = "step-cpu.csv"
MUON = "muon"
KINDS = ("measured", "paper")


def label(row: Row, dtype: str) -> str:
    """What a contender is called: rank where there are several, Newton-Schulz's dtype where it is not ``dtype``."""
    words = NAMES.get(row["contender"], row["contender"])
    if row["rank"] and row["contender"] == "pro-klshampoo":
        words += f", r = {row['rank']}"
    if row["backend"] == "reference":
        words += ", weight by weight"
    if row["contender"] in (MUON, "pro-klshampoo") and row["dtype"] != dtype:
        words += f", Newton–Schulz in {polar(row['dtype'])}"
    return words


def polar(dtype: str) -> str:
    """The dtype of Newton-Schulz: of "float32" or "float32, Newton-Schulz bfloat16"."""
    return dtype.rpartition(" ")[2]


def usual(rows: Sequence[Row]) -> str:
    """The dtypes of the most rows, which are those of the first Muon."""
    return next(row["dtype"] for row in rows if row["contender"] == MUON)


def steps_of(rows: Sequence[Row], sets: Sequence[str]) -> list[Row]:
    """Amortised steps on these sets."""
    return [row for row in rows if row["metric"] == "step" and row["set"] in sets]


def alike(rows: Sequence[Row]) -> list[Row]:
    """Without the two rows of a set with the other dtype of Newton-Schulz."""
    return [row for row in rows if row["dtype"] == usual(rows) or row["contender"] not in (MUON, "pro-klshampoo")]


def steps(rows: Sequence[Row] | None = None) -> str:
    """Milliseconds a step and ratio to Muon in the same dtype, by contender and set, and why some have none."""
    rows = steps_of(rows_of(RECORD) if rows is None else rows, SMALL)
    dtype = usual(rows)
    cells: dict[str, dict[str, str]] = {}
    reasons: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        if row["median"]:
            text = f"{figure(row['median'], 1)} ({figure(row['ratio'], 2)})"
            cells.setdefault(label(row, dtype), {})[row["set"]] = text
        else:
            reasons.setdefault(label(row, dtype), {}).setdefault(row["note"], []).append(row["set"])
    body = [[name, *(found.get(s, "-") for s in SMALL)] for name, found in cells.items()]
    table = markdown(["ms a step (ratio to Muon)", *SMALL], "l" + "r" * len(SMALL), body)
    absent = [
        f"- {name}" + ("" if len(sets) == len(SMALL) else f" on {', '.join(sets)}") + f": {why}."
        for name, notes in reasons.items()
        for why, sets in notes.items()
    ]
    return table + ("\nNot run:\n\n" + "\n".join(absent) + "\n" if absent else "")


def aspects(rows: Sequence[Row] | None = None) -> str:
    """Pro-KLShampoo against Muon and against KL-Shampoo stepped weight by weight, by n/m."""
    rows = rows_of(RECORD) if rows is None else rows
    points = sorted((s for s in {row["set"] for row in rows} if s.startswith("n/m=")), key=lambda s: int(s[4:]))

    def of(contender: str, metric: str, column: str) -> list[str]:
        found = {
            row["set"]: row[column]
            for row in rows
            if row["contender"] == contender and row["metric"] == metric and row["backend"] != "reference"
        }
        return [figure(found.get(point, ""), 2) for point in points]

    against = "step over klshampoo reference"
    body = [
        ["Pro-KLShampoo over Muon", *of("pro-klshampoo", "step", "ratio")],
        ["Pro-KLShampoo over KL-Shampoo, weight by weight", *of("pro-klshampoo", against, "median")],
        ["KL-Shampoo, batched, over the same", *of("klshampoo", against, "median")],
    ]
    return markdown(["time of a step", *points], "l" + "r" * len(points), body)


def growth(rows: Sequence[Row] | None = None) -> str:
    """Measured exponents of the step's time beside those of the paper's leading terms."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows_of(RECORD) if rows is None else rows:
        if row["metric"].startswith("exponent of"):
            kind = "paper" if row["metric"].endswith("paper's count") else "measured"
            found.setdefault((row["set"], label(row, row["dtype"])), {})[kind] = row
    body = [
        [variable, who, own["measured"]["note"], *(figure(own[k]["median"] if k in own else "", 2) for k in KINDS)]
        for (variable, who), own in found.items()
    ]
    return markdown(["growth with", "step", "where", *KINDS], "lllrr", body)


def floors(rows: Sequence[Row] | None = None) -> str:
    """How many times the predicted floor the steps of this package, Muon and AdamW take."""
    rows = [row for row in alike(steps_of(rows_of(RECORD) if rows is None else rows, SMALL)) if row["floor"]]
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["median"]:
            times = float(row["median"]) / float(row["floor"])
            cells.setdefault(label(row, usual(rows)), {})[row["set"]] = f"{figure(row['floor'], 1)} ({times:.1f})"
    body = [[name, *(found.get(s, "-") for s in SMALL)] for name, found in cells.items()]
    return markdown(["floor, ms (step over floor)", *SMALL], "l" + "r" * len(SMALL), body)


def plot(path: Path, rows: Sequence[Row] | None = None) -> None:
    """Step time by method and set as bars, the predicted floor as a line across each."""
    rows = alike(steps_of(rows_of(RECORD) if rows is None else rows, SMALL))
    shown = [row for row in rows if row["median"]]
    dtype = usual(rows)
    labels = list(dict.fromkeys(label(row, dtype) for row in shown))
    figure_, axes = plt.subplots(1, len(SMALL), figsize=(3.2 * len(SMALL), 0.32 * len(labels) + 1.3), sharey=True)
    for axis, name in zip(axes, SMALL, strict=True):
        for row in shown:
            if row["set"] != name:
                continue
            y = labels.index(label(row, dtype))
            color = "tab:blue" if row["contender"] in ("pro-klshampoo", "smok-hop") else "0.6"
            axis.barh(y, float(row["median"]), color="tab:orange" if row["contender"] == MUON else color)
            if row["floor"]:
                axis.plot([float(row["floor"])] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1.5)
        axis.set(title=name, xscale="log", xlabel="ms a step; line: floor")
        axis.set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    figure_.tight_layout()
    save(figure_, path)
