"""The tables of ``bench.study gpt-124m``, and which of its rows are drawn."""

import math
from collections.abc import Iterator

from pandas import DataFrame

from bench.markdown import figure, table, with_error
from bench.study.gpt124m import ADAMW, BY_HEADS, OURS, SCALES, WHOLE, of_floor

PICTURES = {"step": ("gpt-124m-loss.png", "steps"), "seconds": ("gpt-124m-seconds.png", "seconds")}
"""File and words, by the column that losses are drawn against."""

SOURCE = ["data_sha256", "vocabulary"]  # runs on other ones are no seeds of each other


def shown(found: DataFrame) -> str:
    """Return a table for every model, length and data set, and the pictures; or that there is no run."""
    if found.empty:
        return "None of these runs has been made yet.\n"
    texts = [_table(group) for _, group in found.groupby(["model", "steps", *SOURCE], sort=False)]
    texts += [f"![Validation loss against {x}](../bench/results/{file})\n" for file, x in PICTURES.values()]
    return "\n".join(texts)


def best_runs(found: DataFrame) -> dict[str, DataFrame]:
    """Return the runs of every method at its best rate on the smaller model, by case, of all seeds.

    Those of the usual length, on the data and with the vocabulary that have the most rows. Changes alone that divide
    a method's weights in the other way.
    """
    scale = SCALES["full"][0]
    its = found[(found["model"] == scale.name) & (found["steps"] == scale.steps)]
    its = its[(its["base"] == "") | its["case"].str.endswith((BY_HEADS, WHOLE))]
    its = max((group for _, group in its.groupby(SOURCE)), key=len, default=its)
    return {case: group[group["lr"] == best_rate(group)] for case, group in its.groupby("case", sort=False)}


def costs(found: DataFrame) -> str:
    """Return what a step of every method costs, and where it ends, at its best rate."""
    lines = []
    for case, its in best_runs(found).items():
        row = its.iloc[-1]
        lines.append(
            {
                "GPT-2 124M's shape, on a GPU": case,
                # AdamW's search began with two rates, whose better one the other methods' embeddings take.
                "loss": "" if case == ADAMW else figure(its["validation_loss"].mean(), 3),
                "optimizer, ms a step": figure(row["optimizer_ms"], 1),
                "its median": figure(row["optimizer_median_ms"], 1),
                "tokens/s": f"{row['tokens_per_second']:,.0f}",
                "state, MB": figure(row["state_mb"], 0),
            }
        )
    return table(DataFrame(lines), 1)


def best_rate(its: DataFrame) -> float:
    """Return the rate with the lowest loss on the first seed, of equal ones the lowest."""
    first = its[its["seed"] == 0].sort_values("lr")
    return float(first["lr"].iloc[first["validation_loss"].fillna(math.inf).argmin()])


def _table(group: DataFrame) -> str:
    one = group.iloc[-1]
    said = (
        f"{one['model']}'s shape, {one['parameters'] / 1e6:.1f}M parameters with a vocabulary of "
        f"{one['vocabulary']:,}; {one['steps']:,} steps of {one['batch']} × {one['context']:,} tokens; {one['data']} "
        f"({one['data_sha256'][:8]}); {', '.join(dict.fromkeys(group['device']))}."
    )
    return f"{said}\n\n{table(DataFrame([*_lines(group)]), 2)}"


def _lines(group: DataFrame) -> Iterator[dict[str, str]]:
    """Yield a line for every method, then for every change, which is compared with its base at the same rate."""
    usual = (group["model"].iloc[0], group["steps"].iloc[0]) == (SCALES["full"][0].name, SCALES["full"][0].steps)
    group = group.sort_values("base", key=lambda base: base != "", kind="stable")
    for case, its in group.groupby("case", sort=False):
        base, lr, best, apart = its["base"].iloc[0], best_rate(its), "", ""
        chosen, other = its[its["lr"] == lr], group[group["case"] == (base or OURS)]
        if not base:
            at_edge = usual and lr in (its["lr"].min(), its["lr"].max())
            best = f"{lr:.3g}{', search open' * at_edge}"
        if case != OURS:
            apart = _apart(chosen, other[other["lr"] == (lr if base or other.empty else best_rate(other))])
        last = chosen.iloc[-1]
        times = [last[f"optimizer_{which}ms"] for which in ("", "median_", "longest_")]
        measured = last.get("tokens_per_second", math.nan) > 0
        yield {
            "case": str(case),
            "validation loss by lr": _by_rate(its),
            "best lr": best,
            "− that of Pro-KLShampoo, or of the method changed": apart,
            "tokens/s": f"{last['tokens_per_second']:,.0f}" if measured else "-",
            "of products' rate": f"{of_floor(last):.0%}" if measured else "-",
            "optimizer ms: mean / median / longest": " / ".join(figure(ms, 1) for ms in times),
            "host ms": figure(last["host_ms"], 1),
            "state MB": figure(last["state_mb"], 0),
            "peak GiB": figure(last.get("peak_gib"), 1),
        }


def _by_rate(its: DataFrame) -> str:
    """Return losses by rate; those of further seeds stand after a stroke."""
    each = {lr: own.sort_values("seed")["validation_loss"] for lr, own in its.groupby("lr")}
    said = {lr: ("diverged" if math.isnan(loss) else figure(loss, 3) for loss in losses) for lr, losses in each.items()}
    return ", ".join(f"{lr:.3g}: {' / '.join(losses)}" for lr, losses in said.items())


def _apart(its: DataFrame, other: DataFrame) -> str:
    """Return the mean difference of losses over the seeds that both have, with its standard error or "one seed"."""
    a, b = (own.set_index("seed")["validation_loss"] for own in (its, other))
    apart = (a - b).dropna()
    if apart.empty:
        return "-"
    return with_error(apart.mean(), apart.sem(), 3, sign="+") + (", one seed" if len(apart) == 1 else "")
