"""Tables and figures of the rows of whole steps, primitives and memory, for bench.tables."""

from collections.abc import Sequence
from pathlib import Path

from pandas import DataFrame, Series

from bench.drawing import plt, save, tidy
from bench.markdown import figure, table
from bench.optimizers import OPTIMIZERS, label
from bench.shapes import ASPECTS, PAPER, SMALL
from bench.timing.entries import EAGER

LAUNCHERS = {"ddp": "DDP", "fsdp2": "FSDP2"}
PLAIN = "plain"
"""In the place of the optimizer: a primitive's formula as it is printed."""
MAIN = ("Muon", "AdamW", "Pro-KLShampoo, r = 32", "KL-Shampoo", "pytorch_optimizer.SOAP")
"""The optimizers of the README's table."""
OWN = ("muon", "pro-klshampoo")
"""The optimizers that are measured with both dtypes of Newton-Schulz."""


def name(row: Series, dtype: str = "float32") -> str:
    """Name an optimizer: rank where there are several, Newton-Schulz's dtype where it is not that of ``dtype``."""
    said = label(row["optimizer"], row["rank"] if row["optimizer"] == "pro-klshampoo" and row["rank"] > 0 else None)
    if row["backend"] == "reference":
        said += ", weight by weight"
    if row.get("note") == EAGER:
        said += f", {EAGER}"
    if row["optimizer"] in OWN and row["dtype"] != dtype:
        said += f", Newton–Schulz in {row['dtype'].rpartition(' ')[2]}"
    return said


def steps_on(rows: DataFrame, models: Sequence[str]) -> tuple[DataFrame, str]:
    """Return the amortised steps on these models with names, and the dtypes of the most rows, the first Muon's."""
    found = rows[(rows["metric"] == "step") & rows["model"].isin(models)]
    usual = found.loc[found["optimizer"] == "muon", "dtype"].iloc[0]
    return found.assign(name=[name(row, usual) for _, row in found.iterrows()]), usual


def pivot(rows: DataFrame, title: str, index: Sequence[str], columns: Sequence[str], cells: str = "cell") -> str:
    """Return a table of the cells by name and model, both in the order given; "-" where there is none."""
    wide = rows.pivot(index="name", columns="model", values=cells).reindex(index=index, columns=columns)
    return table(wide.astype(object).fillna("-").rename_axis(columns=None).rename_axis(title).reset_index(), 1)


def costs(rows: DataFrame, names: Sequence[str] | None = None) -> str:
    """Return milliseconds a step and ratio to Muon in the same dtype, of these optimizers or of all that ran."""
    found, _ = steps_on(rows, SMALL)
    run = found[found["median"].notna()]
    cells = [f"{figure(ms, 1)} ({figure(ratio, 2)})" for ms, ratio in zip(run["median"], run["ratio"], strict=True)]
    return pivot(run.assign(cell=cells), "ms a step (ratio to Muon)", names or run["name"].unique(), SMALL)


def steps(rows: DataFrame) -> str:
    """Return the costs of all optimizers, and why some have none."""
    found, _ = steps_on(rows, SMALL)
    text, absent = costs(rows), found[found["median"].isna()]
    reasons = [
        f"- {who}" + ("" if len(own) == len(SMALL) else f" on {', '.join(own['model'])}") + f": {why}."
        for (who, why), own in absent.groupby(["name", "note"], sort=False)
    ]
    return text + ("\nNot run:\n\n" + "\n".join(reasons) + "\n" if reasons else "")


def aspects(rows: DataFrame) -> str:
    """Return the step of Pro-KLShampoo against Muon's and KL-Shampoo's weight by weight, by n/m."""
    rows = rows[(rows["backend"] != "reference") & rows["model"].isin(ASPECTS)]
    against = "step over klshampoo reference"
    lines = {
        "Pro-KLShampoo over Muon": ("pro-klshampoo", "step", "ratio"),
        "Pro-KLShampoo over KL-Shampoo, weight by weight": ("pro-klshampoo", against, "median"),
        "KL-Shampoo, batched, over the same": ("kl-shampoo", against, "median"),
    }
    found = []
    for line, (optimizer, metric, column) in lines.items():
        own = rows[(rows["optimizer"] == optimizer) & (rows["metric"] == metric)]
        found += [(line, row["model"], figure(row[column], 2)) for _, row in own.iterrows()]
    cells = DataFrame(found, columns=["name", "model", "cell"])
    return pivot(cells, "time of a step", list(lines), [model for model in ASPECTS if model in set(rows["model"])])


def primitives(rows: DataFrame) -> str:
    """Return the milliseconds of every primitive: plain, ours by backend, and KL-Shampoo's in its place."""
    rows = rows[rows["metric"] == "time"]
    plain = rows[rows["optimizer"] == PLAIN].set_index("case")["median"]
    titles = []
    for _, row in rows.iterrows():
        ours = f"ours, {row['backend']}"
        titles.append({PLAIN: "plain", "kl-shampoo": "KL-Shampoo's"}.get(row["optimizer"], ours))
    times = rows["median"] / rows["case"].map(plain)
    cells = [
        figure(ms, 2) + ("" if title == "plain" or figure(t, 2) == "-" else f" ({figure(t, 2)})")
        for ms, t, title in zip(rows["median"], times, titles, strict=True)
    ]
    head = ["plain", *dict.fromkeys(title for title in titles if title.startswith("ours")), "KL-Shampoo's"]
    found = DataFrame({"name": rows["case"], "model": titles, "cell": cells})
    return pivot(found, "ms (times the plain form's)", rows["case"].unique(), head)


def memory(rows: DataFrame, metric: str, models: Sequence[str] = PAPER) -> str:
    """Return "state" or "workspace" of every method and rank on these models, in 10^6 bytes, in float32."""
    rows = rows[(rows["metric"] == metric) & (rows["unit"] == "bytes") & (rows["dtype"] == "float32")]
    rows = rows[rows["model"].isin(models)]
    named = rows.assign(name=[name(row) for _, row in rows.iterrows()], cell=[f"{b / 1e6:.0f}" for b in rows["median"]])
    return pivot(named, f"{metric}, MB", named["name"].unique(), models)


def divided(rows: DataFrame) -> str:
    """Return what ranks have, take and send, by launcher and number of ranks: the most that one of them does."""
    units = {"state": 1e6, "step": 1, "CPU time of a step": 1, "sent": 1e6, "received": 1e6}
    found = []
    for (case, ranks), own in rows.groupby(["case", "ranks"]):
        most = own.groupby("metric")[["median", "ratio"]].max()
        both = (
            figure(most["median"][metric] / unit, int(unit > 1)) + f" ({figure(most['ratio'][metric], 2)})"
            for metric, unit in units.items()
        )
        cells = [cell.removesuffix(" (-)") for cell in both]
        found.append([f"{LAUNCHERS[case]}, {ranks} rank{'s' if ranks > 1 else ''}", *cells])
    head = ["largest of a rank (ratio)", "state, MB", "ms a step", "CPU's ms", "MB sent", "MB received"]
    return table(DataFrame(found, columns=head), 1)


def plot_aspects(rows: DataFrame, path: Path) -> None:
    """Draw the step time against n/m, with quartiles, beside lines of slope 1 and 3."""
    found, _ = steps_on(rows, list(ASPECTS))
    drawing, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for who, own in found.groupby("name", sort=False):
        row = own.iloc[0]
        own = own.assign(aspect=own["model"].str.partition("=")[2].astype(int)).sort_values("aspect")
        style = {"color": OPTIMIZERS[row["optimizer"]].colour, "ls": ":" if row["backend"] == "reference" else "-"}
        axis.plot(own["aspect"], own["median"], marker="o", markersize=4, label=who, **style)
        axis.fill_between(own["aspect"], own["q1"], own["q3"], color=style["color"], alpha=0.2, linewidth=0)
    ends = [4, 16]
    for power, start in ((1, 3.2), (3, 5.0)):  # ms at n/m = 4, where both are near the curves and hide none
        axis.plot(ends, [start * (x / ends[0]) ** power for x in ends], color="0.5", ls="--", lw=1)
        axis.annotate(f"∝ (n/m){'³' if power == 3 else ''}", (ends[1], start * 4**power), color="0.4", fontsize="small")
    axis.set(xscale="log", yscale="log", xlabel="n/m", ylabel="ms a step")
    axis.set_xticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    axis.legend(frameon=False, fontsize="small")
    tidy(axis)
    save(drawing, path)
