"""The experiments that compare optimizers: which, under which start, what the paper found of them, and the files."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pandas import DataFrame

from bench.command import UsageError
from bench.rows import frame, upsert
from bench.study import figures, results, tables
from bench.study.protocol import PRO, Kind, check, kind
from bench.study.scales import SCALES, Scale
from bench.study.study import Study

Claims = list[tuple[Kind, Kind]]


@dataclass(frozen=True)
class Comparison:
    """A table of the paper with its curves."""

    name: str  # of the command, and how its files begin
    # what is trained, by scale and start; none for a model on which the paper has no such comparison
    kinds: Callable[[Scale, str | float], list[Kind]]
    claims: Callable[[Scale, str | float], Claims]  # pairs that the paper found in this order, the lower loss first
    table: Callable[[DataFrame], str]  # Markdown from rows
    timed: bool = False  # whether it compares times, so that all have to train side by side

    def possible(self, scales: Sequence[Scale], starts: Sequence[str | float], search: bool) -> tuple[Scale, ...]:
        """Return the models on which the paper has this comparison, with all hyper-parameters or ranges that it needs.

        Raises:
            UsageError: there is none, or a rate is of an optimizer that it does not train.
        """
        having = tuple(scale for scale in scales if self.kinds(scale, starts[0]))
        if not having:
            names = ", ".join(scale.name for scale in scales)
            others = ", ".join(scale.name for scale in SCALES["paper"] if self.kinds(scale, starts[0]))
            raise UsageError(f"the paper has no {self.name} on {names}; give --model with one of {others}")
        for scale in having:
            trained = {"adamw", *(k.method for k in self.kinds(scale, starts[0]))}
            if unknown := sorted(scale.lr.keys() - trained):
                raise UsageError(f"--lr {unknown[0]}: {self.name} trains {', '.join(sorted(trained))}; leave it out")
            for start in starts:
                check(self.kinds(scale, start), scale, search)
        return having

    def run(self, studies: Sequence[Study], starts: Sequence[str | float], out: Path) -> str:
        """Train what is missing and write the files after every model, which keep others; the tables in Markdown."""
        first = studies[0].place.processes.first
        for study in studies:
            groups = {start: self.kinds(study.scale, start) for start in starts}
            tuning = study.tune([k for group in groups.values() for k in group])
            found = study.final({k: tuning.selected[k] for group in groups.values() for k in group}, self.timed)
            fresh = {"-sweep": results.sweep_rows(study, tuning)}
            fresh["-curves"] = results.curve_rows(study, found, self.timed)
            fresh[""], fresh["-orderings"] = [], []
            for start, group in groups.items():
                fresh[""] += results.rows_of(study, group, start, tuning.selected, found, self.timed)
                fresh["-orderings"] += results.ordering_rows(study, start, self.claims(study.scale, start), found)
            for part, its in fresh.items():
                if its and first:
                    upsert(out / f"{self.name}{part}.csv", its, ("model",))
        return self.present(out) if first else ""

    def present(self, out: Path) -> str:
        """Draw the figures from the files, and return the table, and the paper's orderings beside what was found."""
        self.draw(out)
        return f"{self.table(self._rows(out))}\n{tables.orderings_table(self._rows(out, '-orderings'))}"

    def draw(self, folder: Path) -> None:
        """Draw the figures from the CSV files of this folder, beside them."""
        figures.loss(folder / f"{self.name}-loss.png", self._rows(folder, "-curves"), self._rows(folder))
        if not (sweep := self._rows(folder, "-sweep")).empty:
            figures.sweep(folder / f"{self.name}-sweep.png", sweep)

    def _rows(self, folder: Path, part: str = "") -> DataFrame:
        return frame(folder / f"{self.name}{part}.csv")


def draw(folder: Path) -> None:
    """Draw main-*.png, ablation-*.png and cosmos-*.png again, of those whose CSV files are in this folder."""
    for comparison in COMPARISONS.values():
        if (folder / f"{comparison.name}.csv").exists():
            comparison.draw(folder)


def _main_kinds(scale: Scale, start: str | float) -> list[Kind]:
    pro = (Kind(PRO, rank, start) for rank in scale.ranks)
    return [Kind("adamw"), Kind("muon"), Kind("kl-shampoo", None, start), *pro]


def _main_claims(scale: Scale, start: str | float) -> Claims:
    adamw, muon, kl, *pro = _main_kinds(scale, start)
    return [(k, other) for k in pro for other in (kl, muon, adamw)]


def _ablation_kinds(scale: Scale, start: str | float) -> list[Kind]:
    if scale.name == "gpt2-350m":
        return []  # the paper has no ablation on it
    methods = ["subspace-only", "complement-only", "smok-hop", PRO, "kl-shampoo"]
    if scale.name == "llama-450m":
        methods = methods[2:]  # the paper has the others on the smaller models only
    return [kind(method, scale.largest, start) for method in methods]


def _ablation_claims(scale: Scale, start: str | float) -> Claims:
    kinds = {k.method: k for k in _ablation_kinds(scale, start)}
    lower = {
        "complement-only": ["subspace-only"],
        PRO: ["complement-only", "subspace-only"],
        "kl-shampoo": ["complement-only", "subspace-only"],
    }
    claims = [(a, b) for a, others in lower.items() for b in others] + [(PRO, "smok-hop"), (PRO, "kl-shampoo")]
    return [(kinds[a], kinds[b]) for a, b in claims if {a, b} <= kinds.keys()]


def _cosmos_kinds(scale: Scale, start: str | float) -> list[Kind]:
    ranks = scale.ranks[-2:]  # those that the paper compares
    return [kind(method, rank, start) for rank in ranks for method in ("cosmos", PRO)]


def _cosmos_claims(scale: Scale, start: str | float) -> Claims:
    kinds = _cosmos_kinds(scale, start)
    pairs = list(zip(kinds[1::2], kinds[::2], strict=True))
    # On LLaMA 450M without weight decay the paper has COSMOS ahead.
    return [(cosmos, pro) for pro, cosmos in pairs] if scale.name == "llama-450m" else pairs


COMPARISONS = {
    c.name: c
    for c in (
        Comparison("main", _main_kinds, _main_claims, tables.main_table, timed=True),
        Comparison("ablation", _ablation_kinds, _ablation_claims, tables.losses_table),
        Comparison("cosmos", _cosmos_kinds, _cosmos_claims, tables.main_table),
    )
}
