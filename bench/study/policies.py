"""The studies that are worked off: every method at every length of a run, and a larger model."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from bench import command, rows
from bench.study import queue
from bench.study.lengths import FORMS, Unit, wanted
from bench.study.lengths_tables import units as losses_of_units
from bench.study.queue import Job
from bench.study.scales import SCALES
from bench.study.size import KEY as TRIAL_KEY
from bench.study.size import LARGER, Trial, losses_of, row_of, size
from bench.study.units import Result

MODELS = {scale.name: scale for scale in SCALES["tiny"]}
"""Of lengths."""
KEY = ("model", "steps", "optimizer", "lr", "adamw_lr", "alpha_kl", "seed")
EVALUATIONS = 20


@dataclass(frozen=True, kw_only=True)
class LengthsOptions(queue.Options):
    """Train every method at its defaults and tuned, at every length: lengths.csv, and losses along the way.

    What bench/study/lengths.py asks for, which was fixed before it was trained.
    """

    models: tuple[Literal[tuple(MODELS)], ...] = tuple(MODELS)  # type: ignore[valid-type]
    """Some of them."""
    lengths: tuple[int, ...] = (400, 1600)  # Steps of a run; a method's search begins at its best of the shorter one
    forms: tuple[Literal[tuple(FORMS)], ...] = tuple(FORMS)  # type: ignore[valid-type]
    """Some of them; AdamW's search is part of every other."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        command.at_least(1, lengths=self.lengths)
        command.some(models=self.models, lengths=self.lengths, forms=self.forms, seeds=self.seeds)


class Lengths:
    """Every method at every length; what is wanted follows from the losses of what was trained."""

    def __init__(self, o: LengthsOptions) -> None:
        self.o, self.path, self.curves = o, o.out / "lengths.csv", o.out / "lengths-curves.csv"
        self.losses = losses_of_units(rows.frame(self.path))

    def wanted(self) -> Iterator[Unit]:
        """Yield what can be trained now."""
        return wanted(self.o.models, self.o.lengths, self.o.forms, self.o.seeds, self.losses)

    def job(self, unit: Unit) -> Job:
        """Return how a unit is trained."""
        return Job(MODELS[unit.model], unit.form, unit.hyper(), unit.seed, unit.steps, EVALUATIONS)

    def done(self, unit: Unit, result: Result, data: rows.Row) -> str:
        """Write a run's curve, and then its row, which says that the run is done."""
        row, curve = rows_of(unit, result, data)
        self.losses[unit] = row["validation_loss"] if math.isfinite(row["validation_loss"]) else math.inf
        rows.upsert(self.curves, curve, KEY)
        rows.upsert(self.path, [row], KEY)
        rate = f"lr {unit.lr:g}" + (f" alpha_kl {unit.alpha_kl:g}" if unit.alpha_kl else "")
        return f"{unit.model}, {unit.steps} steps, {unit.form} {rate}, seed {unit.seed}: {self.losses[unit]:.4f}"


def rows_of(unit: Unit, result: Result, data: rows.Row) -> tuple[rows.Row, list[rows.Row]]:
    """Return the row of a run, and those of its curve."""
    key = {"optimizer" if name == "form" else name: value for name, value in asdict(unit).items()}
    record = result.record
    steps = len(record.losses)
    own = {"rank": unit.hyper().rank, "validation_loss": record.final_loss, "state_mb": record.state_bytes / 1e6}
    own |= {"model_ms": 1e3 * sum(record.model_seconds) / max(1, steps)}
    own |= {"optimizer_ms": 1e3 * sum(record.optimizer_seconds[1:]) / max(1, steps - 1)}
    own |= {"diverged_at": record.diverged_at}
    curve = [
        key | {"step": step, "validation_loss": loss, "seconds": record.seconds(step)}
        for step, loss in record.validation
    ]
    return key | own | data | result.environment, curve


@dataclass(frozen=True, kw_only=True)
class SizeOptions(queue.Options):
    """Train a model three times as wide as the tiny ones, of 5.1M parameters: size.csv.

    Methods and single changes of Pro-KLShampoo; the runs were fixed before they were trained.
    """


class Size:
    """The larger model on a fixed grid."""

    def __init__(self, o: SizeOptions) -> None:
        self.path = o.out / "size.csv"

    def wanted(self) -> Iterator[Trial]:
        """Yield what can be trained now and has no row."""
        known = losses_of(self.path)
        return (trial for trial in size(known) if trial.key not in known)

    def job(self, trial: Trial) -> Job:
        """Return how a trial is trained: evaluated at its end alone."""
        return Job(MODELS.get(trial.model, LARGER), trial.case, trial.hyper, trial.seed, trial.steps, 1)

    def done(self, trial: Trial, result: Result, data: rows.Row) -> str:
        """Write the row."""
        row = row_of(trial, result, data)
        rows.upsert(self.path, [row], TRIAL_KEY)
        return f"{', '.join(trial.key)}: {row['validation_loss']:.4f}"


POLICIES = {"lengths": (LengthsOptions, Lengths), "size": (SizeOptions, Size)}


def main(name: str, argv: Sequence[str]) -> int:
    """Work off one of the two."""
    kind, policy = POLICIES[name]
    o = command.options(kind, argv, f"bench.study {name}")
    command.make_folder(o.out)
    queue.work_off(policy(o), o.folder, o.jobs)
    return 0
