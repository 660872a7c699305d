"""Tables and plot of the step benchmark's rows, for the README; :mod:`bench.tables` puts them there."""

from collections.abc import Sequence
from pathlib import Path

from bench.markdown import NAMES, Row, figure, markdown, rows_of
from bench.shapes import SMALL

RECORD = "step-cpu.csv"
MUON = "muon"


def label(row: Row) -> str:
    """What a contender is called: rank and dtype where there are several, "per weight" for the specification."""
    words = NAMES.get(row["contender"], row["contender"])
    if row["rank"] and row["contender"] == "pro-klshampoo":
        words += f", r = {row['rank']}"
    if row["backend"] == "reference":
        words += ", weight by weight"
    return words


def steps_of(rows: Sequence[Row], sets: Sequence[str]) -> list[Row]:
    """Amortised steps on these sets."""
    return [row for row in rows if row["metric"] == "step" and row["set"] in sets]


def alike(rows: Sequence[Row]) -> list[Row]:
    """Without the two rows of a set with the other dtype of Newton-Schulz; the first Muon has that of the most."""
    dtype = next(row["dtype"] for row in rows if row["contender"] == MUON)
    return [row for row in rows if row["dtype"] == dtype or row["contender"] not in (MUON, "pro-klshampoo")]


def steps(rows: Sequence[Row] | None = None) -> str:
    """Milliseconds a step and ratio to Muon, by contender and set, and why some have none."""
    rows = alike(steps_of(rows_of(RECORD) if rows is None else rows, SMALL))
    cells: dict[str, dict[str, str]] = {}
    reasons: dict[str, str] = {}
    for row in rows:
        if row["median"]:
            cells.setdefault(label(row), {})[row["set"]] = f"{figure(row['median'], 1)} ({figure(row['ratio'], 2)})"
        else:
            reasons[label(row)] = row["note"]
    body = [[name, *(found.get(s, "-") for s in SMALL)] for name, found in cells.items()]
    table = markdown(["ms a step (ratio to Muon)", *SMALL], "l" + "r" * len(SMALL), body)
    absent = [f"{name}: {why}." for name, why in reasons.items() if name not in cells]
    return table + ("\nNot run: " + " ".join(absent) + "\n" if absent else "")


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


def plot(path: Path, rows: Sequence[Row] | None = None) -> None:
    """Step time by method and set as bars, the predicted floor as a line across each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = alike(steps_of(rows_of(RECORD) if rows is None else rows, SMALL))
    shown = [row for row in rows if row["median"]]
    labels = list(dict.fromkeys(label(row) for row in shown))
    figure_, axes = pyplot.subplots(1, len(SMALL), figsize=(3.2 * len(SMALL), 0.32 * len(labels) + 1.3), sharey=True)
    for axis, name in zip(axes, SMALL, strict=True):
        for row in shown:
            if row["set"] != name:
                continue
            y = labels.index(label(row))
            color = "tab:blue" if row["contender"] in ("pro-klshampoo", "smok-hop") else "0.6"
            axis.barh(y, float(row["median"]), color="tab:orange" if row["contender"] == MUON else color)
            if row["floor"]:
                axis.plot([float(row["floor"])] * 2, [y - 0.4, y + 0.4], color="black", linewidth=1.5)
        axis.set(title=name, xscale="log", xlabel="ms a step; line: floor")
        axis.set_yticks(range(len(labels)), labels)
    axes[0].invert_yaxis()
    figure_.tight_layout()
    figure_.savefig(path, dpi=110)
    pyplot.close(figure_)
