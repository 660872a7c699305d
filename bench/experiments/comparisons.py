"""The experiments that compare contenders: which, under which start, what the paper found of them, and the files."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.experiments import figures, results, tables
from bench.experiments.protocol import PRO, Kind, kind
from bench.experiments.scales import Scale
from bench.experiments.study import Study

Claims = list[tuple[Kind, Kind]]


@dataclass(frozen=True)
class Comparison:
    """A table of the paper with its curves.

    Attributes:
        name: of the command, and how its files begin.
        kinds: the contenders by scale and start.
        claims: pairs that the paper found in this order, the lower loss first.
        table: Markdown from rows.
        timed: whether it compares times, so that all contenders have to train side by side.
    """

    name: str
    kinds: Callable[[Scale, str | float], list[Kind]]
    claims: Callable[[Scale, str | float], Claims]
    table: Callable[[Sequence[tables.Row]], str]
    timed: bool = False

    def run(self, studies: Sequence[Study], starts: Sequence[str | float], out: Path) -> str:
        """Trains what is missing and writes the files after every model; the tables in Markdown."""
        rows: dict[str, list[results.Row]] = {"": [], "-sweep": [], "-orderings": [], "-curves": []}
        for study in studies:
            groups = {start: self.kinds(study.scale, start) for start in starts}
            tuning = study.tune([k for group in groups.values() for k in group])
            found = study.final({k: tuning.selected[k] for group in groups.values() for k in group}, self.timed)
            rows["-sweep"] += results.sweep_rows(study, tuning)
            rows["-curves"] += results.curve_rows(study, found)
            for start, group in groups.items():
                rows[""] += results.rows_of(study, group, start, tuning, found)
                rows["-orderings"] += results.ordering_rows(study, start, self.claims(study.scale, start), found)
            for part, its in rows.items():
                if its and study.runner.place.processes.first:
                    results.write(out / f"{self.name}{part}.csv", its)
        if not studies[0].runner.place.processes.first:
            return ""
        return self.present(out)

    def present(self, out: Path) -> str:
        """Draws the figures from the files, and gives their tables."""
        rows = {part: _read(out / f"{self.name}{part}.csv") for part in ("", "-sweep", "-orderings", "-curves")}
        figures.loss(out / f"{self.name}-loss.png", rows["-curves"], rows[""])
        if rows["-sweep"]:
            figures.sweep(out / f"{self.name}-sweep.png", rows["-sweep"])
        parts = [self.table(rows[""]), tables.orderings_table(rows["-orderings"])]
        parts += [tables.sweep_table(rows["-sweep"])] if rows["-sweep"] else []
        return "\n".join(parts)


def _read(path: Path) -> list[tables.Row]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _main_kinds(scale: Scale, start: str | float) -> list[Kind]:
    return [Kind("adamw"), Kind("muon"), Kind("kl-shampoo", None, start), *_pro(scale, start)]


def _pro(scale: Scale, start: str | float) -> list[Kind]:
    return [Kind(PRO, rank, start) for rank in scale.ranks]


def _main_claims(scale: Scale, start: str | float) -> Claims:
    others = _main_kinds(scale, start)[:3]
    return [(pro, other) for pro in _pro(scale, start) for other in reversed(others)]


def _ablation_kinds(scale: Scale, start: str | float) -> list[Kind]:
    methods = ["subspace-only", "complement-only", "smok-hop", PRO, "kl-shampoo"]
    if scale.name == "llama-450m":
        methods = methods[2:]  # the paper has the others on the smaller models only
    return [kind(method, scale.largest, start) for method in methods]


def _ablation_claims(scale: Scale, start: str | float) -> Claims:
    by_method = {k.method: k for k in _ablation_kinds(scale, start)}
    pairs = [
        ("complement-only", "subspace-only"),
        (PRO, "complement-only"),
        (PRO, "subspace-only"),
        ("kl-shampoo", "complement-only"),
        ("kl-shampoo", "subspace-only"),
        (PRO, "smok-hop"),
        (PRO, "kl-shampoo"),
    ]
    return [(by_method[a], by_method[b]) for a, b in pairs if a in by_method and b in by_method]


def _cosmos_kinds(scale: Scale, start: str | float) -> list[Kind]:
    ranks = scale.ranks[-2:]  # those that the paper compares
    matched = [kind(method, rank, start) for rank in ranks for method in ("cosmos", PRO)]
    return [Kind("kl-shampoo", None, start), *matched]


def _cosmos_claims(scale: Scale, start: str | float) -> Claims:
    pairs = [(kind(PRO, rank, start), kind("cosmos", rank, start)) for rank in scale.ranks[-2:]]
    # On LLaMA 450M without weight decay the paper has COSMOS ahead.
    return [(b, a) if scale.name == "llama-450m" else (a, b) for a, b in pairs]


COMPARISONS = {
    c.name: c
    for c in (
        Comparison("main", _main_kinds, _main_claims, tables.main_table, timed=True),
        Comparison("ablation", _ablation_kinds, _ablation_claims, tables.ablation_table),
        Comparison("cosmos", _cosmos_kinds, _cosmos_claims, tables.cosmos_table),
    )
}
