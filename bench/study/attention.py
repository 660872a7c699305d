"""Attention's weights in pieces and at rates of their own: which runs are made, and in which order.

One seed chooses, three others confirm. A rate is the best known one of whole weights, or one power of STEP to a side of
it. Newton-Schulz multiplies in float32 everywhere, and each run is evaluated at its end alone.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from bench import rows
from bench.optimizers import PRO, Hyper
from bench.study import runs
from bench.study.lengths import FIRST_SEED, FORMS, HEADS, STEP, rounded
from bench.study.scales import TINY
from bench.study.size import LARGER, cost
from bench.training.run import Record, Scale

PIECES = {"whole": 1, "two heads": 3, "heads": HEADS, "half heads": 12}
QK_RATES = (0.5, 1.0, 2.0, 4.0)
OTHER_SEEDS = (1, 2, 3)
LRS: dict[tuple[str, int], tuple[float, float]] = {
    (PRO, 400): (0.01333, 0.01333),
    (PRO, 1600): (0.008889, 0.008889),
    (PRO, 6400): (0.005926, 0.005926),
    ("muon-0.9", 400): (0.01333, 0.02),
    ("muon-0.9", 1600): (0.005926, 0.008889),
    ("kl-shampoo", 400): (0.005, 0.005),
    ("kl-shampoo", 1600): (0.002222, 0.005),
    ("adamw", 400): (0.00225, 0.00225),
    ("adamw", 1600): (0.001, 0.005063),
}
"""Rates of gpt2-tiny and llama-tiny by form and steps: the best of whole weights on the first seed in lengths.csv."""
LARGER_STEPS, LARGER_LR = 300, 0.02
KEY = ("model", "steps", "optimizer", "qk_pieces", "qk_rate", "qk_rank", "vo_pieces", "lr", "seed")
"""Columns of a trial, in the order of its attributes."""


@dataclass(frozen=True)
class Trial:
    """One run; ``form`` is a name of FORMS, the rest as in :class:`Hyper`."""

    model: str
    steps: int
    form: str
    qk_pieces: int
    qk_rate: float
    qk_rank: int | None
    vo_pieces: int
    lr: float
    seed: int

    @property
    def key(self) -> tuple[str, ...]:
        """The values of its row in the columns KEY."""
        return tuple(map(rows.text, vars(self).values()))

    @property
    def hyper(self) -> Hyper:
        """The hyper-parameters that it is built with."""
        own = {name: getattr(self, name) for name in ("lr", "qk_pieces", "qk_rate", "qk_rank", "vo_pieces")}
        return replace(FORMS[self.form].default, **own)

    @property
    def scale(self) -> Scale:
        """The model and its training."""
        return replace(TINY.get(self.model, LARGER), steps=self.steps, evaluations=1)


Losses = Mapping[tuple[str, ...], float]
"""Final losses of trained runs, by key; infinite for runs that diverged."""


def trials(
    steps: int, pieces: int = 1, rate: float = 1.0, form: str = PRO, rank: int | None = None, vo: int = 1,
    power: int = 0, seed: int = FIRST_SEED,
) -> tuple[Trial, ...]:  # fmt: skip
    """Return a case on both tiny models; ``power`` is of STEP, times the rate of LRS."""
    lrs = (lr if power == 0 else rounded(lr * STEP**power) for lr in LRS[form, steps])
    return tuple(
        Trial(model, steps, form, pieces, rate, rank, vo, lr, seed) for model, lr in zip(TINY, lrs, strict=True)
    )


def chosen(steps: int, known: Losses, count: int) -> list[tuple[int, float]]:
    """Return the cases of the pieces and rates of q and k, v and o whole, with the lowest sum of both models' losses.

    Whole weights and heads at rate 1, which are trained anyway, are left out; so is what is not known yet.
    """
    totals = {}
    for case in product(PIECES.values(), QK_RATES):
        keys = [trial.key for trial in trials(steps, *case)]
        if case not in ((1, 1.0), (HEADS, 1.0)) and all(key in known for key in keys):
            totals[case] = sum(known[key] for key in keys)
    return sorted(totals, key=lambda case: totals[case])[:count]


def larger(pieces: int, rate: float, seed: int) -> Trial:
    """Return a case on the larger model."""
    return Trial(LARGER.name, LARGER_STEPS, PRO, pieces, rate, None, 1, LARGER_LR, seed)


def wanted(known: Losses) -> Iterator[Trial]:
    """Yield all runs, the most telling first; which cases are confirmed beside the main ones follows from the losses.

    The cases were fixed before the first run. As the machine was shared, the order was changed when losses were known:
    of the first seed at 400 steps, then of heads at 1,600. Runs were added as well: at twice the rate, and, when the
    lower lr had turned out better beside that, at still lower ones, and its other seeds. The larger model, then
    two heads a piece at 1,600, were put before what was left of the grid.
    """
    short, middle, long = 400, 1600, 6400
    rivals, halves, both = ("muon-0.9", "kl-shampoo"), PIECES["half heads"], (1, HEADS)
    main, grid = list(product(both, (1.0, 2.0))), list(product(PIECES.values(), QK_RATES))
    for case in sorted(grid, key=lambda case: case not in main):
        yield from trials(short, *case)
    for case in product(both, (1.0, 2.0, 4.0)):
        yield from trials(middle, *case)
    for seed, pieces in product(OTHER_SEEDS[:2], both):
        yield from trials(middle, pieces, seed=seed)
    for pieces in both:
        yield from trials(short, pieces, vo=HEADS)
    yield from trials(short, HEADS, rank=4)  # "auto" is 2, a sixth of 16 rows
    for seed, case in product(OTHER_SEEDS, ((1, 1.0), (HEADS, 1.0), (HEADS, 2.0))):
        yield from trials(short, *case, seed=seed)
    for seed in OTHER_SEEDS[:2]:
        yield from trials(middle, HEADS, 2.0, seed=seed)
    for form, pieces in product(rivals, both):
        yield from trials(short, pieces, form=form)
    yield from trials(long, HEADS)  # lengths.csv has whole weights
    for pieces in both:
        yield from trials(middle, pieces, form=rivals[0])
    for case in main[::-1]:
        yield from trials(short, *case, power=-1)
    yield from trials(middle, HEADS, 2.0, power=-1)
    for rate, power in ((2.0, -2), (4.0, -1)):
        yield from trials(short, HEADS, rate, power=power)
    yield from trials(middle, HEADS, power=-1)
    yield from trials(middle, HEADS, 2.0, power=-1, seed=OTHER_SEEDS[0])
    for form, seed, pieces in product(rivals, OTHER_SEEDS, both):
        yield from trials(short, pieces, form=form, seed=seed)
    for seed, rate in product(OTHER_SEEDS, (1.0, 2.0)):
        yield from trials(middle, HEADS, rate, power=-1, seed=seed)
    for seed, pieces in product((FIRST_SEED, OTHER_SEEDS[0]), both):
        yield larger(pieces, 1.0, seed)
    yield from trials(middle, PIECES["two heads"])
    for case in main[::-1]:
        yield from trials(short, *case, power=1)
    for form, pieces in product(rivals, both):
        yield from trials(short, pieces, 2.0, form)
    for rate in (1.0, 2.0, 4.0):
        yield from trials(short, 1, rate, "adamw")
    for seed, case in product(OTHER_SEEDS, dict.fromkeys((*main, *chosen(short, known, 2)))):
        yield from trials(short, *case, seed=seed)
    for seed in OTHER_SEEDS[:2]:
        yield from trials(middle, 1, 2.0, seed=seed)
    yield from trials(middle, halves, 1.0)
    for pieces in both:
        yield from trials(long, pieces)
    for pieces in both:
        yield from trials(middle, pieces, form=rivals[1])
    for seed, case in product(OTHER_SEEDS, dict.fromkeys((*main, *chosen(middle, known, 1)))):
        yield from trials(middle, *case, seed=seed)
    for pieces in both:
        yield from trials(middle, pieces, vo=HEADS)
    for power, pieces in product((-1, 1), both):
        yield from trials(middle, pieces, power=power)
    yield from trials(middle, HEADS, rank=4)
    yield from trials(middle, halves, 2.0)
    yield larger(HEADS, 2.0, FIRST_SEED)
    yield from trials(long, HEADS, 2.0)
    for form in rivals:
        yield from trials(middle, HEADS, 2.0, form)
    for form, seed, pieces in product(rivals, OTHER_SEEDS, both):
        yield from trials(middle, pieces, form=form, seed=seed)
    for case in grid:
        yield from trials(short, *case, vo=HEADS)
    for case in grid:
        yield from trials(middle, *case)
    for rate in (1.0, 2.0, 4.0):
        yield from trials(middle, 1, rate, "adamw")


def losses_of(path: Path) -> dict[tuple[str, ...], float]:
    """Return the losses of a file's rows by key."""
    return {
        tuple(row.get(name, "") for name in KEY): float(row["validation_loss"] or math.inf) for row in rows.read(path)
    }


@dataclass(frozen=True, kw_only=True)
class Options(runs.Options):
    """Train tiny models with attention's weights in pieces and at rates of their own: attention.csv."""


def run(o: Options) -> str:
    """Train what is wanted and has no row."""
    path = o.out / "attention.csv"

    def missing() -> Iterator[Trial]:
        known = losses_of(path)
        return (trial for trial in wanted(known) if trial.key not in known)

    def task(trial: Trial) -> runs.Task:
        return runs.Task(trial.scale, None, trial.form, trial.hyper, trial.seed, o.folder)

    def done(trial: Trial, record: Record, where: rows.Row) -> None:
        own = dict(zip(KEY, trial.key, strict=True)) | {"adamw_lr": trial.hyper.adamw_lr}
        own |= {"validation_loss": record.final_loss, "diverged_at": record.diverged_at}
        own |= {"state_mb": record.state_bytes / 1e6, "optimizer_per_model": cost(record)}
        rows.upsert(path, [own | where], KEY)

    runs.work(missing, task, done, o.jobs)
    return ""
