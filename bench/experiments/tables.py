"""The paper's tables in Markdown, from the rows of the CSV files."""

from collections.abc import Sequence

from bench.markdown import figure, markdown
from bench.training.contenders import CONTENDERS, with_rank

Row = dict[str, str]
VARIED = {
    "start": ("start", "start of the eigenvalues"),
    "steps": ("steps", "steps"),
    "lr": ("lr ×", "learning rate / Pro-KLShampoo's"),
    "rank": ("r =", "rank"),
}
"""What sensitivity.csv has rows of, in front of a value in a table, and beside an axis."""


def main_table(rows: Sequence[Row]) -> str:
    """Loss, cost and time of every contender, by model and start of the eigenvalues; ``rows`` of main.csv."""
    head = ["model", "start", "optimizer", "lr", "alpha_kl", "validation loss"]
    head += ["model ms/step", "optimizer ms/step", "state MB", "GPU peak GiB", "s to KL-Shampoo's loss"]
    head += ["s to Muon's loss"]
    body = [
        [*_who(row), _rate(row["lr"]), _rate(row["alpha_kl"]), _loss(row)]
        + [figure(row[name], 1) for name in ("model_ms", "optimizer_ms")]
        + [figure(row["state_mb"], 2), figure(row["peak_gib"], 2)]
        + [figure(row[f"seconds_to_{target}_loss"], 1) for target in ("kl_shampoo", "muon")]
        for row in rows
    ]
    return _without_empty(head, "lll" + "r" * 9, body)


def ablation_table(rows: Sequence[Row]) -> str:
    """Final loss of the variants in the paper's layout, a line per model and start; ``rows`` of ablation.csv."""
    methods = list(dict.fromkeys(row["optimizer"] for row in rows))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["model"], row["start"]), {})[row["optimizer"]] = _loss(row)
    body = [[*line, *(losses.get(method, "-") for method in methods)] for line, losses in lines.items()]
    return markdown(["model", "start", *(CONTENDERS[m].label for m in methods)], "ll" + "r" * len(methods), body)


def orderings_table(rows: Sequence[Row]) -> str:
    """The paper's orderings beside the differences measured; ``rows`` of main-orderings.csv and the like."""
    body = [
        [
            *(row["model"], row["start"], row["lower"], row["higher"]),
            _with_error(figure(row["difference"], 4), row["difference_se"]),
            row["verdict"],
        ]
        for row in rows
    ]
    level = "".join(sorted({f", at {float(row['confidence']):.0%}" for row in rows}))
    head = ["model", "start", "lower in the paper", "higher", "higher − lower", f"here{level}"]
    return markdown(head, "llllrl", body)


def sweep_table(rows: Sequence[Row]) -> str:
    """Learning rates tried and selected, a line per search; ``rows`` of main-sweep.csv and the like."""
    searches: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        searches.setdefault((row["model"], row["start"] or "-", _label(row)), []).append(row)
    body = []
    for name, tried in searches.items():
        chosen = next(row for row in tried if row["selected"])
        rates = sorted({float(row["lr"]) for row in tried})
        alphas = sorted({float(row["alpha_kl"]) for row in tried if row["alpha_kl"]})
        body.append(
            [*name, ", ".join(f"{x:g}" for x in rates)]
            + [_rate(chosen["lr"]) + (" (edge)" if "lr" in chosen["selected"] else "")]
            + [", ".join(f"{x:g}" for x in alphas) or "-"]
            + [_rate(chosen["alpha_kl"]) + (" (edge)" if "alpha_kl" in chosen["selected"] else "")]
        )
    return markdown(["model", "start", "optimizer", "lr tried", "lr", "alpha_kl tried", "alpha_kl"], "lllrrrr", body)


def cosmos_table(rows: Sequence[Row]) -> str:
    """COSMOS and Pro-KLShampoo at matched rank, in the paper's layout; ``rows`` of cosmos.csv."""
    pairs: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in rows:
        if row["rank"]:
            pairs.setdefault((row["model"], row["start"], row["rank"]), {})[row["optimizer"]] = row
    body = []
    for name, pair in pairs.items():
        cosmos, pro = pair["cosmos"], pair["pro-klshampoo"]
        difference = float(pro["validation_loss"] or "nan") - float(cosmos["validation_loss"] or "nan")
        sizes = [figure(row[size], 2) for size in ("state_mb", "peak_gib") for row in (cosmos, pro)]
        body.append([*name, _loss(cosmos), _loss(pro), f"{difference:+.4f}", *sizes])
    head = ["model", "start", "r", "COSMOS", "Pro-KLShampoo", "Pro − COSMOS"]
    head += [f"{name} {size}" for size in ("state MB", "GPU peak GiB") for name in ("COSMOS", "Pro")]
    return _without_empty(head, "ll" + "r" * 8, body)


def sensitivity_table(rows: Sequence[Row], varied: str) -> str:
    """Differences of two contenders by what was varied, a star where they are told from 0; rows of sensitivity.csv."""
    of = [row for row in rows if row["varied"] == varied]
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in of:
        start = f", start {row['start']}" if varied == "steps" else ""
        own = with_rank(row["optimizer"], None if varied == "rank" else row["rank"])
        name = f"{own}{start} − {CONTENDERS[row['minus']].label}"
        cell = _with_error(f"{float(row['difference'] or 'nan'):+.4f}", row["difference_se"])
        lines.setdefault((row["model"], name), {})[row["value"]] = cell + (" *" if row["decided"] == "yes" else "")
    values = list(dict.fromkeys(row["value"] for row in of))
    body = [[*line, *(cells.get(value, "-") for value in values)] for line, cells in lines.items()]
    head = ["model", "difference of losses", *(f"{VARIED[varied][0]} {value}" for value in values)]
    return markdown(head, "ll" + "r" * len(values), body)


def _label(row: Row) -> str:
    return with_rank(row["optimizer"], row["rank"])


def _who(row: Row) -> list[str]:
    return [row["model"], row["start"], _label(row)]


def _rate(text: str) -> str:
    return f"{float(text):g}" if text else "-"


def _loss(row: Row) -> str:
    if row["diverged_at"]:
        return f"diverged at step {row['diverged_at']}"
    return _with_error(figure(row["validation_loss"], 4), row["validation_loss_se"])


def _with_error(mean: str, error: str) -> str:
    """One seed has no standard error."""
    return mean + (f" ± {figure(error, 4)}" if error else "")


def _without_empty(head: list[str], right: str, body: list[list[str]]) -> str:
    """The table without columns that say nothing in any line."""
    kept = [c for c in range(len(head)) if any(line[c] != "-" for line in body)]
    lines = [[line[c] for c in kept] for line in (head, *body)]
    return markdown(lines[0], "".join(right[c] for c in kept), lines[1:])
