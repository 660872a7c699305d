"""The paper's tables that compare optimizers: which of them, on which of its models, and the files."""

from collections.abc import Callable, Sequence

from bench.command import UsageError
from bench.optimizers import PRO, RANKED
from bench.presets import preset
from bench.rows import frame, upsert
from bench.study import figures, results, tables
from bench.study.scales import PAPER, Scale
from bench.study.study import Study, by_key

Compared = list[tuple[str, int | None]]
"""Methods, with their ranks."""


def _main(scale: Scale) -> Compared:
    return [("adamw", None), ("muon", None), ("kl-shampoo", None), *((PRO, rank) for rank in scale.ranks)]


def _ablation(scale: Scale) -> Compared:
    if scale.name == "gpt2-350m":
        return []  # the paper has no ablation on it
    methods = ["subspace-only", "complement-only", "smok-hop", PRO, "kl-shampoo"]
    if scale.name == "llama-450m":
        methods = methods[2:]  # the paper has the others on the smaller models only
    return [(method, scale.largest if method in RANKED else None) for method in methods]


def _cosmos(scale: Scale) -> Compared:
    ranks = scale.ranks[-2:]  # those that the paper compares
    return [(method, rank) for rank in ranks for method in ("cosmos", PRO)]


COMPARISONS: dict[str, Callable[[Scale], Compared]] = {"main": _main, "ablation": _ablation, "cosmos": _cosmos}
"""What is trained on a model; nothing on one for which the paper has no such comparison."""


def possible(name: str, scales: Sequence[Scale]) -> list[Scale]:
    """Return the models on which the paper has a comparison.

    Raises:
        UsageError: there is none.
    """
    compared = COMPARISONS[name]
    if having := [scale for scale in scales if compared(scale)]:
        return having
    names = ", ".join(scale.name for scale in scales)
    others = ", ".join(scale.name for scale in PAPER if compared(scale))
    raise UsageError(f"the paper has no {name} on {names}; give --model with one of {others}")


def run(name: str, studies: Sequence[Study]) -> str:
    """Train what is missing, write the files after every model, which keep others, and draw; return the table."""
    out, first = studies[0].folder, studies[0].place.processes.first
    path, curves = out / f"{name}.csv", out / f"{name}-curves.csv"
    for study in studies:
        model = study.scale.name
        selected = by_key(preset(method, model, rank) for method, rank in COMPARISONS[name](study.scale))
        found = study.results(selected)
        if first:
            upsert(curves, results.curve_rows(study, selected, found), ("model",))
            upsert(path, results.rows_of(study, selected, found), ("model",))
    if not first:
        return ""
    figures.loss(out / f"{name}-loss.png", frame(curves))
    return tables.table_of(frame(path))
