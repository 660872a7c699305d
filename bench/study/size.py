"""A model three times as wide as the tiny ones: which runs of it are made, and their table.

Losses do not depend on what else the machine does; times would, and are not kept.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pandas import DataFrame

from bench import rows
from bench.markdown import figure, table
from bench.models import CONFIGS
from bench.optimizers import Hyper
from bench.study import runs
from bench.study.lengths import FIRST_SEED, FORMS, STEP, rounded
from bench.training.run import Record, Scale

LARGER = Scale("llama-288", CONFIGS["llama-288"], (12, 24, 48), 1000, 1, 128, batch=8)
"""A step has 2,048 bytes, four times the tiny scale's."""
PRO = "pro-klshampoo"
KEY = ("model", "steps", "case", "lr", "adamw_lr", "seed")


@dataclass(frozen=True)
class Trial:
    """One run.

    Attributes:
        case: what it is a run of, as rows name it.
        base: the case that this one is a change of; "" for none.
        hyper: what it is built with.
        seed: of it.
    """

    case: str
    base: str
    hyper: Hyper
    seed: int = FIRST_SEED

    @property
    def key(self) -> tuple[str, ...]:
        """What its row has in the columns KEY."""
        own = (LARGER.name, LARGER.steps, self.case, self.hyper.lr, self.hyper.adamw_lr, self.seed)
        return tuple(map(rows.text, own))


Losses = Mapping[tuple[str, ...], float]
"""Of what has been trained, by key; infinite for what diverged."""

RATES = {
    PRO: (0.01333, 0.02),
    "kl-shampoo": (0.005, 0.003333),
    "muon": (0.01333, 0.008889),
    "adamw": (0.00225, 0.0015),
    "soap": (0.0045, 0.003),
    "muon-0.9": (0.01333, 0.008889),
    "pro-klshampoo-paper": (0.01333, 0.008889),
}
"""Two neighbours on the larger model, the likelier first: around what lies between llama-tiny's best at 400 steps and
at 1,600. The third one lies beyond the better of these."""
RANKS = {PRO: None, "pro-klshampoo-paper": LARGER.largest}
"""A sixth of the width, as the default is."""
CHANGES: dict[str, dict[str, Any]] = {
    "r = 24": {"rank": 24},
    "alpha_kl 0.01": {"alpha_kl": 0.01},
    "momentum 0.95, beta2 0.95": {"momentum": 0.95, "beta2": 0.95},
    "r = 32": {"rank": 32},
}
"""Of Pro-KLShampoo's defaults: half of the rank that "auto" is on the larger model, 48, and so on."""


def size(known: Losses) -> Iterator[Trial]:
    """Yield methods at their first rates, changes of the defaults, second rates; and what follows from their losses.

    That is every method at its third rate, then a second seed of the two best methods at theirs.
    """
    by_method = {form: [_of_method(form, lr) for lr in rates] for form, rates in RATES.items()}

    def best(its: list[Trial]) -> Trial:
        return min(its, key=lambda trial: known[trial.key])

    first, second = zip(*by_method.values(), strict=True)
    yield from first
    default = _of_method(PRO, FORMS[PRO].default.lr)
    for case, changes in CHANGES.items():
        yield replace(default, case=case, base=default.case, hyper=replace(default.hyper, **changes))
    yield from second
    if any(trial.key not in known for trial in (*first, *second)):
        return
    for form, its in by_method.items():
        up = best(its).hyper.lr == max(RATES[form])
        its.append(_of_method(form, rounded(max(RATES[form]) * STEP if up else min(RATES[form]) / STEP)))
        yield its[-1]
    if any(its[-1].key not in known for its in by_method.values()):
        return
    bests = sorted(map(best, by_method.values()), key=lambda trial: known[trial.key])
    yield from (replace(trial, seed=FIRST_SEED + 1) for trial in bests[:2])


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

    Methods and single changes of Pro-KLShampoo; the runs were fixed before they were trained.
    """


def run(o: Options) -> str:
    """Train what is wanted and has no row, each evaluated at its end alone."""
    path = o.out / "size.csv"

    def wanted() -> Iterator[Trial]:
        known = losses_of(path)
        return (trial for trial in size(known) if trial.key not in known)

    def task(trial: Trial) -> runs.Task:
        return runs.Task(LARGER, None, trial.case, trial.hyper, trial.seed, o.folder)

    def done(trial: Trial, record: Record, where: rows.Row) -> None:
        own = dict(zip(KEY, trial.key, strict=True)) | {"base": trial.base, "optimizer": trial.hyper.method}
        own |= {"rank": trial.hyper.rank, "validation_loss": record.final_loss}
        if (step := record.diverged_at) is not None:
            own["note"] = f"diverged at step {step}"
        rows.upsert(path, [own | where], KEY)

    runs.work(wanted, task, done, o.jobs)
    return ""


def size_table(found: DataFrame) -> str:
    """Return what is known of the larger model's grid: losses by rate, and how far the lowest is, of the first seed.

    That is from KL-Shampoo's lowest, or of a change of Pro-KLShampoo from that at the same rate.
    """
    first = [row for row in found.to_dict("records") if row["seed"] == FIRST_SEED]
    losses: dict[str, dict[float, float]] = {}
    for row in first:
        loss = row["validation_loss"]
        losses.setdefault(row["case"], {})[row["lr"]] = math.inf if math.isnan(loss) else loss
    lowest = {case: min(by_rate.values(), default=math.nan) for case, by_rate in losses.items()}
    rival, pro = (FORMS[form].label for form in ("kl-shampoo", PRO))
    lines = []
    for case, rates in {FORMS[form].label: rates for form, rates in RATES.items()}.items():
        if not (own := losses.get(case)):
            continue
        shown = ", ".join(f"{lr:.3g}: {figure(own.get(lr), 3)}" for lr in sorted({*rates, *own}))
        apart = figure(lowest[case] - lowest.get(rival, math.nan), 3, "+")
        lines.append({"case": case, "validation loss by lr": shown, f"lowest − {rival}'s": apart, f"− {pro}": ""})
    for case in (name for name in CHANGES if name in losses):
        ((lr, loss),) = losses[case].items()
        named = {"case": f"{pro}, {case}", "validation loss by lr": f"{lr:.3g}: {figure(loss, 3)}"}
        lines.append(named | {f"lowest − {rival}'s": "", f"− {pro}": figure(loss - losses[pro][lr], 3, "+")})
    return table(DataFrame(lines), 2) if lines else "None of these runs has been made yet.\n"
