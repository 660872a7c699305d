"""A model three times as wide as the tiny ones: which runs of it are made, and their table.

Losses do not depend on what else the machine does. Times do: what is kept of them is a ratio within a run.
"""

import math
import statistics
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pandas import DataFrame

from bench import rows
from bench.markdown import figure, table
from bench.models import CONFIGS
from bench.optimizers import PRO, Hyper
from bench.study import runs
from bench.study.lengths import FIRST_SEED, FORMS, STEP, rounded
from bench.training.run import Record, Scale

LARGER = Scale("llama-288", CONFIGS["llama-288"], (12, 24, 48), 1000, 1, 128, batch=8)
"""A step has 2,048 bytes, four times the tiny scale's."""
PERIOD = 10
"""Steps, one of which refreshes."""
KEY = ("model", "steps", "case", "lr", "adamw_lr", "seed")


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        case: what it is a run of, as rows name it.
        base: the case that this one is a change of; "" for none.
        hyper: what it is built with.
        seed: of it.
        longer: steps beyond those of the others.
    """

    case: str
    base: str
    hyper: Hyper
    seed: int = FIRST_SEED
    longer: int = 0

    @property
    def key(self) -> tuple[str, ...]:
        """The values of its row in the columns KEY."""
        own = (LARGER.name, self.scale.steps, self.case, self.hyper.lr, self.hyper.adamw_lr, self.seed)
        return tuple(map(rows.text, own))

    @property
    def scale(self) -> Scale:
        """The model and its training."""
        return replace(LARGER, steps=LARGER.steps + self.longer)


Losses = Mapping[tuple[str, ...], float]
"""Final losses of trained runs, by key; infinite for runs that diverged."""

RATES = {
    PRO: (0.01333, 0.02),
    "kl-shampoo": (0.005, 0.003333),
    "muon-0.9": (0.01333, 0.008889),
    "soap": (0.0045, 0.003),
    "pro-klshampoo-paper": (0.01333, 0.008889),
    "muon": (0.01333, 0.008889),
    "adamw": (0.00225, 0.0015),
}
"""Two neighbours on the larger model, the likelier first: around what lies between llama-tiny's best at 400 steps and
at 1,600. The third one lies beyond the better of these."""
LONGER = {"muon-0.9": 124}
"""Further steps of a method in the seconds that Pro-KLShampoo takes for 1,000: at the best rates so far its optimizer
takes 0.616 of the model's time, this one's 0.437."""
RANKS = {PRO: None, "pro-klshampoo-paper": LARGER.largest}
"""A sixth of the width, as the default is."""
CHANGES: dict[str, dict[str, Any]] = {
    "r = 24": {"rank": 24},
    "alpha_kl 0.01": {"alpha_kl": 0.01},
    "momentum 0.95, beta2 0.95": {"momentum": 0.95, "beta2": 0.95},
    "r = 32": {"rank": 32},
}
"""Changes of Pro-KLShampoo's defaults: half of the rank that "auto" is on the larger model, 48, and so on."""


def size(known: Losses) -> Iterator[Trial]:
    """Yield methods at their first rates, changes of the defaults, second rates; and what follows from their losses.

    That is every method at its third rate, then a method for as many seconds and a second seed of the two best.
    """
    by_method = {form: [_of_method(form, lr) for lr in rates] for form, rates in RATES.items()}

    def best(form: str) -> Trial:
        return min(by_method[form], key=lambda trial: known[trial.key])

    first, second = zip(*by_method.values(), strict=True)
    yield from first
    default = _of_method(PRO, FORMS[PRO].default.lr)
    for case, changes in CHANGES.items():
        yield replace(default, case=case, base=default.case, hyper=replace(default.hyper, **changes))
    yield from second
    if any(trial.key not in known for trial in (*first, *second)):
        return
    for form, its in by_method.items():
        up = best(form).hyper.lr == max(RATES[form])
        its.append(_of_method(form, rounded(max(RATES[form]) * STEP if up else min(RATES[form]) / STEP)))
        yield its[-1]
    if any(its[-1].key not in known for its in by_method.values()):
        return
    yield from (replace(best(form), longer=steps) for form, steps in LONGER.items())
    two = sorted(map(best, by_method), key=lambda trial: known[trial.key])[:2]
    yield from (replace(trial, seed=FIRST_SEED + 1) for trial in two)


def _of_method(form: str, lr: float) -> Trial:
    own = FORMS[form]
    hyper = replace(own.default, lr=lr, rank=RANKS.get(form))
    return Trial(own.label, "", hyper)


def losses_of(path: Path) -> dict[tuple[str, ...], float]:
    """Return the losses of a file's rows by key."""
    found = {}
    for row in rows.read(path):
        found[tuple(row.get(name, "") for name in KEY)] = float(row["validation_loss"] or math.inf)
    return found


@dataclass(frozen=True, kw_only=True)
class Options(runs.Options):
    """Train a model three times as wide as the tiny ones, of 5.1M parameters: size.csv.

    Methods and single changes of Pro-KLShampoo.
    """


def run(o: Options) -> str:
    """Train what is wanted and has no row, each evaluated at its end alone."""
    path = o.out / "size.csv"

    def wanted() -> Iterator[Trial]:
        known = losses_of(path)
        return (trial for trial in size(known) if trial.key not in known)

    def task(trial: Trial) -> runs.Task:
        return runs.Task(trial.scale, None, trial.case, trial.hyper, trial.seed, o.folder)

    def done(trial: Trial, record: Record, where: rows.Row) -> None:
        own = dict(zip(KEY, trial.key, strict=True)) | {"base": trial.base, "optimizer": trial.hyper.method}
        own |= {"rank": trial.hyper.rank, "validation_loss": record.final_loss, "optimizer_per_model": cost(record)}
        if (step := record.diverged_at) is not None:
            own["note"] = f"diverged at step {step}"
        rows.upsert(path, [own | where], KEY)

    runs.work(wanted, task, done, o.jobs)
    return ""


def cost(record: Record) -> float | None:
    """Return the time of the optimizer per time of the model: the median over periods of ten steps, without the first.

    What else the machine does slows both alike.
    """
    periods = [slice(t, t + PERIOD) for t in range(1, len(record.losses) - PERIOD + 1, PERIOD)]
    ratios = [sum(record.optimizer_seconds[own]) / sum(record.model_seconds[own]) for own in periods]
    return statistics.median(ratios) if ratios else None


def size_table(found: DataFrame) -> str:
    """Return what is known of the larger model's grid: losses by rate, differences of the first seed's, and times.

    A second seed's loss stands after a stroke. The lowest loss is compared with KL-Shampoo's lowest, that of a longer
    run with Pro-KLShampoo's, and a change of Pro-KLShampoo with that at the same rate.
    """
    losses: dict[str, dict[float, float]] = {}
    seconds: dict[tuple[str, float], float] = {}
    times: dict[str, float] = {}
    for row in found.to_dict("records"):
        if row["seed"] != FIRST_SEED:
            seconds[row["case"], row["lr"]] = row["validation_loss"]
        else:
            case, loss = row["case"], row["validation_loss"]
            if row["steps"] > LARGER.steps:
                case += f", {row['steps']:,} steps"
            losses.setdefault(case, {})[row["lr"]] = math.inf if math.isnan(loss) else loss
            times.setdefault(case, row["optimizer_per_model"])
    lowest = {case: min(by_rate.values()) for case, by_rate in losses.items()}
    rival, pro = (FORMS[form].label for form in ("kl-shampoo", PRO))
    lines = []

    def add(case: str, rates: Collection[float], beside: str, apart: float, label: str = "") -> None:
        each = {lr: [losses[case].get(lr)] for lr in sorted({*rates, *losses[case]})}
        for lr, both in each.items():
            both += [seconds[case, lr]] if (case, lr) in seconds else []
        shown = ", ".join(f"{lr:.3g}: {' / '.join(figure(loss, 3) for loss in both)}" for lr, both in each.items())
        line = {"case": label or case, "validation loss by lr": shown, f"lowest − {rival}'s": "", f"− {pro}": ""}
        lines.append(line | {beside: figure(apart, 3, "+"), "optimizer / model, seconds": figure(times[case], 2)})

    methods = {FORMS[form].label: rates for form, rates in RATES.items()}
    for case, rates in methods.items():
        if case in losses:
            add(case, rates, f"lowest − {rival}'s", lowest[case] - lowest.get(rival, math.nan))
    for case in losses:
        if case in CHANGES:
            ((lr, loss),) = losses[case].items()
            add(case, (), f"− {pro}", loss - losses[pro][lr], f"{pro}, {case}")
        elif case not in methods:
            add(case, (), f"− {pro}", lowest[case] - lowest[pro])
    return table(DataFrame(lines), 2) if lines else "None of these runs has been made yet.\n"
