"""The paper's table of brackets on alpha_kl: per layer type of every model, at the largest rank of its scale."""

from pathlib import Path

from pandas import DataFrame

from bench.drawing import plt, save, tidy
from bench.models import FAMILIES
from bench.rows import Row, frame, write
from bench.shapes import PAPER
from bench.study.options import Still, beginning
from bench.study.scales import SCALES, Scale
from prokl.algorithm.shapes import MatrixShape
from prokl.diagnostics import alpha_kl_bracket

SWEPT = (0.005, 0.01, 0.015)  # the paper's


def brackets(scale: Scale) -> list[Row]:
    """Return a row per layer type, with the columns of the paper's table."""
    config, rank = scale.config, scale.largest
    width, hidden = config.width, config.mlp_width
    up = "MLP gate, up" if FAMILIES[config.family].gated else "MLP up"
    shapes = {"attention": (width, width), up: (hidden, width), "MLP down": (width, hidden)}
    rows = []
    for layer, (m, n) in shapes.items():
        shape = MatrixShape(1, m, n)
        low, high = alpha_kl_bracket(m, n, rank)
        k = min(shape.m, shape.n - rank)
        own = {"m": m, "n": n, "rank": rank, "c_a": shape.aspect_scale, "k": k, "low": low, "high": high}
        rows.append({"model": scale.name, "layer": layer} | own)
    return rows


def run(o: Still) -> str:
    """Write alpha-kl.csv and .png; return what is in all brackets of the paper's models."""
    scales, out = beginning((*SCALES["paper"], *SCALES["small"], *SCALES["tiny"]), o.model), o.out
    write(out / "alpha-kl.csv", [row for scale in scales for row in brackets(scale)])
    rows = frame(out / "alpha-kl.csv")
    _draw(out / "alpha-kl.png", rows)
    paper = rows[rows["model"].isin(PAPER)]
    return "" if paper.empty else f"All of the paper's at once: {paper['low'].max():.2g} to {paper['high'].min():.2g}"


def _draw(path: Path, rows: DataFrame) -> None:
    figure, axes = plt.subplots(figsize=(8, 0.28 * len(rows) + 1), layout="constrained")
    axes.hlines(range(len(rows)), rows["low"], rows["high"], color="tab:red", lw=4)
    for value in SWEPT:
        axes.axvline(value, color="black", ls="--", lw=0.8)
    axes.set_yticks(range(len(rows)), rows["model"] + ", " + rows["layer"], fontsize="small")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="alpha_kl; dashed: the values that the paper sweeps")
    tidy(axes, grid=False)
    save(figure, path)
