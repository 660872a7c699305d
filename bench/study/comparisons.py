"""The paper's tables that compare optimizers: which of them, on which of its models, and the files."""

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

from bench.command import UsageError
from bench.rows import frame, upsert
from bench.study import figures, results, tables
from bench.study.protocol import PRO, Kind, kind, of_paper
from bench.study.scales import PAPER, Scale
from bench.study.study import Study


def _main(scale: Scale, start: str | float) -> list[Kind]:
    pro = (Kind(PRO, rank, start) for rank in scale.ranks)
    return [Kind("adamw"), Kind("muon"), Kind("kl-shampoo", None, start), *pro]


def _ablation(scale: Scale, start: str | float) -> list[Kind]:
    if scale.name == "gpt2-350m":
        return []  # the paper has no ablation on it
    methods = ["subspace-only", "complement-only", "smok-hop", PRO, "kl-shampoo"]
    if scale.name == "llama-450m":
        methods = methods[2:]  # the paper has the others on the smaller models only
    return [kind(method, scale.largest, start) for method in methods]


def _cosmos(scale: Scale, start: str | float) -> list[Kind]:
    ranks = scale.ranks[-2:]  # those that the paper compares
    return [kind(method, rank, start) for rank in ranks for method in ("cosmos", PRO)]


COMPARISONS: dict[str, Callable[[Scale, str | float], list[Kind]]] = {
    "main": _main,
    "ablation": _ablation,
    "cosmos": _cosmos,
}
"""What is trained, by scale and start; nothing for a model on which the paper has no such comparison."""


def possible(name: str, scales: Sequence[Scale]) -> list[Scale]:
    """Return the models on which the paper has a comparison.

    Raises:
        UsageError: there is none.
    """
    kinds = COMPARISONS[name]
    if having := [scale for scale in scales if kinds(scale, "auto")]:
        return having
    names = ", ".join(scale.name for scale in scales)
    others = ", ".join(scale.name for scale in PAPER if kinds(scale, "auto"))
    raise UsageError(f"the paper has no {name} on {names}; give --model with one of {others}")


def run(name: str, studies: Sequence[Study], starts: Sequence[str | float], out: Path) -> str:
    """Train what is missing, write the files after every model, which keep others, and draw; return the table."""
    path, curves = out / f"{name}.csv", out / f"{name}-curves.csv"
    first = studies[0].place.processes.first
    for study in studies:
        groups = {start: COMPARISONS[name](study.scale, start) for start in starts}
        selected = {k: of_paper(k, study.scale.name) for group in groups.values() for k in group}
        found = study.results(selected)
        if first:
            upsert(curves, results.curve_rows(study, found), ("model",))
            own = (results.rows_of(study, group, start, selected, found) for start, group in groups.items())
            upsert(path, chain(*own), ("model",))
    if not first:
        return ""
    figures.loss(out / f"{name}-loss.png", frame(curves), frame(path))
    return tables.main_table(frame(path))
