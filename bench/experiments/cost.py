"""The paper's table of memory and cost, evaluated for its models: state of the matrix weights, operations of a step.

Memory is what ``bench.memory`` holds real optimizers to, line by line; operations are what ``bench.costs`` counts in
the code, not the paper's leading order. Embedding, head and norms, which AdamW has under every method, are left out.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.costs import terms
from bench.drawing import plt, save, tidy
from bench.experiments import results
from bench.experiments.scales import Scale
from bench.markdown import Row, markdown, read_rows
from bench.memory import FREQUENCY, TABLE
from bench.shapes import SETS, ParameterSet
from bench.training.contenders import CONTENDERS, with_rank
from prokl.shapes import effective_rank

HAVING = ("paper",)  # scales
NAMES = {"adamw": "adamw", "muon": "muon", "klshampoo": "kl-shampoo", "pro-klshampoo": "pro-klshampoo"}
"""Of CONTENDERS, by the names of bench.memory and bench.costs."""
OPERATIONS = {
    "products": lambda t: t.kind != "factorisation" and not t.polar,
    "newton_schulz": lambda t: t.polar,
    "factorisations": lambda t: t.kind == "factorisation",
}


def costs_of(parameters: ParameterSet) -> list[results.Row]:
    """A row per method and rank: elements of state by line of the paper's table, operations of a step by kind."""
    rows = []
    for method, name in NAMES.items():
        for rank in parameters.ranks if method == "pro-klshampoo" else (0,):
            lines: dict[str, int] = {}
            operations = dict.fromkeys(OPERATIONS, 0.0)
            for (m, n), count in parameters.oriented.items():
                r = effective_rank(rank, m, n)
                for line, elements in TABLE[method](m, n, r).items():
                    lines[line] = lines.get(line, 0) + count * elements
                for term in terms(method, "torch", m, n, r):
                    kind = next(kind for kind, holds in OPERATIONS.items() if holds(term))
                    operations[kind] += count * term.flops / (FREQUENCY if term.refresh else 1)
            every = dict.fromkeys((line for table in TABLE.values() for line in table(1, 1, 1)), 0) | lines
            own = {"model": parameters.name, "optimizer": name, "rank": rank or None}
            state = {"state_elements": sum(lines.values()), "state_mib_bf16": sum(lines.values()) * 2 / 2**20}
            flops = {f"gflop_{kind}": value / 1e9 for kind, value in operations.items()}
            rows.append(own | state | {line.replace(" ", "_"): n for line, n in every.items()} | flops)
    return rows


def run(scales: Sequence[Scale], out: Path) -> str:
    """Writes memory-cost.csv and .png of these; the table in Markdown."""
    rows = [row for scale in scales for row in costs_of(SETS[scale.name])]
    results.write(out / "memory-cost.csv", rows)
    _draw(out / "memory-cost.png", rows)
    return table(read_rows(out / "memory-cost.csv"))


def table(rows: Sequence[Row]) -> str:
    """In Markdown; ``rows`` of memory-cost.csv."""
    head = ["model", "optimizer", "state, M elements", "of it factors and bases", "products, GFLOP/step"]
    head += ["Newton-Schulz", f"factorisations, 1/{FREQUENCY} of a refresh"]
    body = [
        [row["model"], _label(row), f"{float(row['state_elements']) / 1e6:.1f}"]
        + [f"{sum(float(row[name]) for name in ('factors', 'eigenbases', 'subspace_basis')) / 1e6:.1f}"]
        + [f"{float(row[f'gflop_{kind}']):.1f}" for kind in OPERATIONS]
        for row in rows
    ]
    return markdown(head, "llrrrrr", body)


def _label(row: results.Row) -> str:
    return with_rank(row["optimizer"], row["rank"])


def _draw(path: Path, rows: list[results.Row]) -> None:
    figure, grid = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    contenders = list(dict.fromkeys(_label(row) for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    for axes, column, label in zip(
        grid, ("state_elements", None), ("state, elements", "operations of a step"), strict=True
    ):
        for i, contender in enumerate(contenders):
            own = [row for row in rows if _label(row) == contender]
            values = [row[column] if column else 1e9 * sum(row[f"gflop_{k}"] for k in OPERATIONS) for row in own]
            shade = 0.4 + 0.2 * (own[0]["rank"] is None or [32, 64, 128].index(own[0]["rank"]) + 1)
            style = {"color": CONTENDERS[own[0]["optimizer"]].colour, "alpha": min(1.0, shade), "label": contender}
            axes.bar(np.arange(len(own)) + 0.13 * (i - len(contenders) / 2), values, 0.12, **style)
        axes.set_xticks(range(len(models)), models)
        axes.set_ylabel(label)
        tidy(axes, grid=False)
    grid[0].legend(frameon=False, fontsize="small")
    save(figure, path)
