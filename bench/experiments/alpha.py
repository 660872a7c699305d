"""The paper's table of brackets on alpha_kl: per layer type of every model, at the largest rank of its scale."""

from collections.abc import Sequence
from pathlib import Path

from bench.drawing import plt, save, tidy
from bench.experiments import results
from bench.experiments.scales import Scale
from bench.markdown import Row, markdown, read_rows
from bench.models import FAMILIES
from bench.shapes import PAPER
from prokl.diagnostics import alpha_kl_bracket
from prokl.shapes import MatrixShape

HAVING = ("paper", "small", "tiny")  # scales
SWEPT = (0.005, 0.01, 0.015)  # the paper's


def brackets(scale: Scale) -> list[results.Row]:
    """A row per layer type, with the columns of the paper's table."""
    config, rank = scale.config, scale.largest
    width, hidden = config.width, config.mlp_width
    up = "MLP gate, up" if FAMILIES[config.family].gated else "MLP up"
    shapes = {"attention": (width, width), up: (hidden, width), "MLP down": (width, hidden)}
    rows = []
    for layer, (m, n) in shapes.items():
        shape = MatrixShape(1, m, n)
        low, high = alpha_kl_bracket(m, n, rank)
        k = min(shape.m, shape.n - rank)
        own = {"m": m, "n": n, "r": rank, "c_a": shape.aspect_scale, "k": k, "low": low, "high": high}
        rows.append({"model": scale.name, "layer": layer} | own)
    return rows


def run(scales: Sequence[Scale], out: Path) -> str:
    """Writes alpha-kl.csv and .png of these; a table in Markdown, and what is in all brackets of the paper's models."""
    rows = [row for scale in scales for row in brackets(scale)]
    results.write(out / "alpha-kl.csv", rows)
    _draw(out / "alpha-kl.png", rows)
    text = table(read_rows(out / "alpha-kl.csv"))
    if paper := [row for row in rows if row["model"] in PAPER]:
        low, high = max(row["low"] for row in paper), min(row["high"] for row in paper)
        text += f"\nAll of the paper's at once: {low:.2g} to {high:.2g}\n"
    return text


def table(rows: Sequence[Row]) -> str:
    """In Markdown; ``rows`` of alpha-kl.csv."""
    head = ["model", "layer", "rows", "columns", "r", "c_a", "k", "bracket on alpha_kl"]
    body = [
        [row["model"], row["layer"], *(row[x] for x in ("m", "n", "r")), f"{float(row['c_a']):.3g}", row["k"]]
        + [f"{float(row['low']):.2g} to {float(row['high']):.2g}"]
        for row in rows
    ]
    return markdown(head, "llrrrrrr", body)


def _draw(path: Path, rows: list[results.Row]) -> None:
    figure, axes = plt.subplots(figsize=(8, 0.28 * len(rows) + 1), layout="constrained")
    for i, row in enumerate(rows):
        axes.plot([row["low"], row["high"]], [i, i], color="tab:red", lw=4, solid_capstyle="butt")
    for value in SWEPT:
        axes.axvline(value, color="black", ls="--", lw=0.8)
    axes.set_yticks(range(len(rows)), [f"{row['model']}, {row['layer']}" for row in rows], fontsize="small")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="alpha_kl; dashed: the values that the paper sweeps")
    tidy(axes, grid=False)
    save(figure, path)
