"""The paper's table of memory and cost, evaluated for its models: state of the matrix weights, operations of a step.

Memory is what ``bench.timing.memory`` holds real optimizers to, line by line; operations are what ``bench.costs``
counts in the code, not the paper's leading order. Embedding, head and norms, which AdamW has under every method, are
left out.
"""

from pathlib import Path

from matplotlib.colors import to_rgba
from pandas import DataFrame

from bench.costs import terms
from bench.drawing import plt, save, tidy
from bench.optimizers import OPTIMIZERS, label
from bench.rows import Row, frame, write
from bench.shapes import SETS, ParameterSet
from bench.study.options import Still, beginning
from bench.study.scales import SCALES
from bench.timing.memory import FREQUENCY, TABLE
from prokl.algorithm.shapes import effective_rank

OPERATIONS = {
    "products": lambda t: t.kind != "factorisation" and not t.newton_schulz,
    "newton_schulz": lambda t: t.newton_schulz,
    "factorisations": lambda t: t.kind == "factorisation",
}


def costs_of(parameters: ParameterSet) -> list[Row]:
    """Return a row per method and rank: elements by line of the paper's table, operations of a step by kind."""
    rows = []
    for method in ("adamw", "muon", "kl-shampoo", "pro-klshampoo"):
        for rank in parameters.ranks if method == "pro-klshampoo" else (0,):
            lines: dict[str, int] = {}
            operations = dict.fromkeys(OPERATIONS, 0.0)
            for (m, n), count in parameters.oriented.items():
                r = effective_rank(rank, m, n)
                for line, elements in TABLE[method](m, n, r).items():
                    lines[line] = lines.get(line, 0) + count * elements
                for term in terms(method, m, n, r):
                    kind = next(kind for kind, holds in OPERATIONS.items() if holds(term))
                    operations[kind] += count * term.flops / (FREQUENCY if term.refresh else 1)
            every = dict.fromkeys((line for table in TABLE.values() for line in table(1, 1, 1)), 0) | lines
            own = {"model": parameters.name, "optimizer": method, "rank": rank or None}
            state = {"state_elements": sum(lines.values()), "state_mib_bf16": sum(lines.values()) * 2 / 2**20}
            flops = {f"gflop_{kind}": value / 1e9 for kind, value in operations.items()}
            rows.append(own | state | {line.replace(" ", "_"): n for line, n in every.items()} | flops)
    return rows


def run(o: Still) -> str:
    """Write memory-cost.csv and .png of the paper's models."""
    scales, out = beginning(SCALES["paper"], o.model), o.out
    write(out / "memory-cost.csv", [row for scale in scales for row in costs_of(SETS[scale.name])])
    rows = frame(out / "memory-cost.csv")
    _draw(out / "memory-cost.png", rows)
    return ""


def _labels(rows: DataFrame) -> list[str]:
    return [label(method, rank) for method, rank in zip(rows["optimizer"], rows["rank"].fillna(0), strict=True)]


def _draw(path: Path, rows: DataFrame) -> None:
    rows = rows.assign(operations=1e9 * rows[[f"gflop_{kind}" for kind in OPERATIONS]].sum(axis=1), name=_labels(rows))
    methods = rows.drop_duplicates("name").set_index("name")
    shades = {32: 0.6, 64: 0.8}
    figure_, grid = plt.subplots(1, 2, figsize=(13, 4.2), layout="constrained")
    columns = {"state_elements": "state, elements", "operations": "operations of a step"}
    for axes, (column, title) in zip(grid, columns.items(), strict=True):
        bars = rows.pivot(index="model", columns="name", values=column).loc[rows["model"].unique(), methods.index]
        named = zip(methods["optimizer"], methods["rank"].fillna(0), strict=True)
        colours = [to_rgba(OPTIMIZERS[method].colour, shades.get(rank, 1.0)) for method, rank in named]
        bars.plot.bar(ax=axes, color=colours, width=0.8, rot=0, xlabel="", ylabel=title, legend=axes is grid[0])
        tidy(axes, grid=False)
    grid[0].legend(frameon=False, fontsize="small")
    save(figure_, path)
