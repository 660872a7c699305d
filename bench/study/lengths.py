"""Fix what is trained before it is: methods, their rates, and the search for the best rate at every length.

A method's rates are its default one times powers of STEP. On the first seed three neighbouring ones are tried, around
the best of the next shorter length whose search has ended, else around the method's ``centre``, and further ones while
the best lies at an edge, FURTHEST away at most; then alpha_kl likewise where a method has one to tune. AdamW comes
first: its best rate is then that of embedding, head and norms beside every other method, and when the rest is known
README's is tried in its place. The best of all these and of the defaults as they are, which have README's rate for
embedding, head and norms, is trained on all seeds, and so are the defaults.

A length of LONG steps or more is for few methods and is not searched: tried are the rate that the trend of the two
longest shorter lengths gives and the next lower one, with README's rate for embedding, head and norms, beside the
defaults. Newton-Schulz multiplies in float32 everywhere, so that rows of any CPU go together.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal, TypeVar

from bench import command, rows
from bench.optimizers import OPTIMIZERS, Hyper
from bench.study import runs
from bench.study.scales import TINY
from bench.training.run import Record

if TYPE_CHECKING:
    from pandas import DataFrame

T = TypeVar("T")
ADAMW_LR = 3e-3  # README's rate of embedding, head and norms beside the defaults; it is tried beside AdamW's best
HEADS = 6  # heads of both models
RANK = 16  # rank of COSMOS and of the paper's form: a sixth of the width of 96, as its 128 is of 768
STEP = 1.5
FURTHEST = 8  # powers of STEP that a search goes from where it began, a factor of 26
FIRST_SEED = 0
LONG = 6400
EVALUATIONS = 20
KEY = ("model", "steps", "optimizer", "lr", "adamw_lr", "alpha_kl", "seed")
"""Columns of a unit, in its order but for the method's."""


@dataclass(frozen=True)
class Form:
    """A method as it is compared."""

    label: str
    default: Hyper  # its settings as they are, with the rate that powers of STEP are multiplied with
    centre: Mapping[str, int]  # powers of STEP around which the search begins, by family of models
    alpha: bool = False  # whether alpha_kl is tuned, too


_FASTER = ", momentum, beta2 0.9"


def _form(method: str, lr: float, gpt2: int, llama: int, label: str = "", alpha: bool = False, **more: object) -> Form:
    adamw_lr = None if method == "adamw" else ADAMW_LR
    default = Hyper(method, lr, adamw_lr, float32=True, **more)  # type: ignore[arg-type]
    return Form(label or OPTIMIZERS[method].label, default, {"gpt2": gpt2, "llama": llama}, alpha)


FORMS: dict[str, Form] = {
    "adamw": _form("adamw", 1e-3, 2, 2),
    "muon": _form("muon", 2e-2, -2, 0),
    "muon-0.9": _form("muon", 2e-2, -1, -1, "Muon, momentum 0.9", momentum=0.9),
    "muon-0.9-heads": _form("muon", 2e-2, -1, -1, "Muon, momentum 0.9, by heads", momentum=0.9, qk_pieces=HEADS),
    "kl-shampoo": _form("kl-shampoo", 5e-3, 0, 0),
    "kl-shampoo-0.9": _form("kl-shampoo", 5e-3, 0, 0, f"KL-Shampoo{_FASTER}", momentum=0.9, beta2=0.9),
    "kl-shampoo-heads": _form("kl-shampoo", 5e-3, 0, 0, "KL-Shampoo, by heads", qk_pieces=HEADS),
    "pro-klshampoo": _form("pro-klshampoo", 2e-2, -1, -1),
    "pro-klshampoo-heads": _form("pro-klshampoo", 2e-2, -1, -1, "Pro-KLShampoo, by heads", qk_pieces=HEADS),
    "pro-klshampoo-paper": _form(
        "pro-klshampoo", 2e-2, -2, 1, "Pro-KLShampoo, paper's form", True,
        rank=RANK, alpha_kl=0.01, preset="paper", bounded=False,
    ),
    "soap": _form("soap", 3e-3, 0, 0),
    "normuon": _form("normuon", 2e-2, -2, 0),
    "muon-polar-express": _form("muon-polar-express", 2e-2, -2, 0),
    "cosmos": _form("cosmos", 1e-3, 1, 1, rank=RANK),
    "adamw-cautious": _form("adamw-cautious", 1e-3, 2, 2),
    "online-kl-shampoo": _form("online-kl-shampoo", 9.434e-2, -5, -4),
    "online-kl-shampoo-0.9": _form(
        "online-kl-shampoo", 9.434e-2, -5, -4, f"Online KL-Shampoo{_FASTER}", momentum=0.9, beta2=0.9
    ),
}  # fmt: skip
"""Forms by name, in the order in which they are trained. Rates are README's of Pro-KLShampoo, a small model's of
KL-Shampoo and not its class's, the class's of torch's AdamW, Muon's author's of all Muons, Online KL-Shampoo's authors'
of both its forms, and of the others those of the packages' classes; centres were chosen after the runs of 400 steps
that findings.md has, and for methods without one by analogy."""


@dataclass(frozen=True)
class Unit:
    """One run."""

    model: str
    steps: int
    form: str
    lr: float
    adamw_lr: float | None
    alpha_kl: float | None
    seed: int

    def hyper(self) -> Hyper:
        """Return what it is built with."""
        return replace(FORMS[self.form].default, lr=self.lr, adamw_lr=self.adamw_lr, alpha_kl=self.alpha_kl)


Losses = Mapping[Unit, float]
"""Final losses of what has been trained, infinite for what diverged."""


def rounded(value: float) -> float:
    """Return a rate as it is trained and recorded, with four digits."""
    return float(f"{value:.4g}")


def power(value: float | None, base: float | None) -> int:
    """Return the power of STEP that a tried value is of its base."""
    assert value and base
    return round(math.log(value / base, STEP))


def climbed(
    at: Callable[[int], T], powers: Sequence[int], within: range, loss: Callable[[T], float | None]
) -> tuple[list[T], T | None]:
    """Search for the best power of a rate: try some, then those beside the best until both have been tried.

    It is a function of the losses that are known, so that a command goes on from its rows, and runs may end in any
    order. The lower power of equal losses is better.

    Returns:
        What is tried, in its order, as far as the losses say; the best of it once the search has ended.
    """
    tried = list(powers)
    while True:
        trials = {k: at(k) for k in tried}
        losses = {k: its for k, trial in trials.items() if (its := loss(trial)) is not None}
        if len(losses) < len(trials):
            return list(trials.values()), None
        best = min(sorted(losses), key=losses.__getitem__)
        beside = [k for k in (best - 1, best + 1) if k in within and k not in tried]
        if not beside:
            return list(trials.values()), trials[best]
        tried += beside


def tuned(model: str, steps: int, form: str, losses: Losses) -> tuple[Unit | None, tuple[Unit, ...]]:
    """Return the best settings of a form on the first seed, once they are known, and what is to be trained before."""
    if steps >= LONG:
        return _by_trend(model, steps, form, losses)
    own, adamw_lr = FORMS[form], None
    if form != "adamw":
        first, missing = tuned(model, steps, "adamw", losses)
        if first is None:
            return None, missing
        adamw_lr = first.lr
    unit = Unit(model, steps, form, own.default.lr, adamw_lr, own.default.alpha_kl, FIRST_SEED)
    starts = {"lr": own.centre[model.partition("-")[0]]} | ({"alpha_kl": 1} if own.alpha else {})
    if before := next(_shorter(model, steps, form, losses), None):
        starts = {name: power(getattr(before, name), getattr(own.default, name)) for name in starts}
        unit = replace(unit, alpha_kl=before.alpha_kl if own.alpha else unit.alpha_kl)
    for name, start in starts.items():
        base = getattr(own.default, name)

        def at(k: int, unit: Unit = unit, name: str = name, base: float = base) -> Unit:
            return replace(unit, **{name: rounded(base * STEP**k)})

        within = range(start - FURTHEST, start + FURTHEST + 1)
        tried, best = climbed(at, (start - 1, start, start + 1), within, losses.get)
        if best is None:
            return None, tuple(one for one in tried if one not in losses)
        unit = best
    others = [] if adamw_lr is None else [replace(unit, adamw_lr=ADAMW_LR)]
    return _best_of([unit, *others, at_default(model, steps, form, FIRST_SEED)], losses)


def _best_of(units: Sequence[Unit], losses: Losses) -> tuple[Unit | None, tuple[Unit, ...]]:
    """Return the first of the best units if all are known, and those that are not."""
    missing = tuple(dict.fromkeys(one for one in units if one not in losses))
    return None if missing else min(units, key=lambda one: losses[one]), missing


def _shorter(model: str, steps: int, form: str, losses: Losses) -> Iterator[Unit]:
    """Yield the best of every shorter length whose search has ended, the longest first."""
    lengths = {one.steps for one in losses if one.model == model and one.form == form and one.steps < steps}
    units = (tuned(model, length, form, losses)[0] for length in sorted(lengths, reverse=True))
    yield from (unit for unit in units if unit is not None)


def _by_trend(model: str, steps: int, form: str, losses: Losses) -> tuple[Unit | None, tuple[Unit, ...]]:
    """Return the best of the defaults, the trend's rate, at most one power from that of the longest, and the next."""
    default = at_default(model, steps, form, FIRST_SEED)
    known = list(islice(_shorter(model, steps, form, losses), 2))
    base = FORMS[form].default.lr
    k = power(known[0].lr, base) if known else FORMS[form].centre[model.partition("-")[0]]
    if len(known) == 2:
        longer, shorter = known
        further = math.log(steps / longer.steps) / math.log(longer.steps / shorter.steps)
        k += max(-1, min(1, round(further * (k - power(shorter.lr, base)))))
    alpha = known[0].alpha_kl if known else default.alpha_kl
    rates = (rounded(base * STEP**power) for power in (k, k - 1))
    return _best_of([default, *(replace(default, lr=lr, alpha_kl=alpha) for lr in rates)], losses)


def at_default(model: str, steps: int, form: str, seed: int) -> Unit:
    """Return the unit of a form's defaults as they are."""
    h = FORMS[form].default
    return Unit(model, steps, form, h.lr, h.adamw_lr, h.alpha_kl, seed)


def wanted(
    models: Sequence[str], lengths: Sequence[int], forms: Sequence[str], seeds: Sequence[int], losses: Losses
) -> Iterator[Unit]:
    """Yield what can be trained now, in the order in which it is: shorter runs, and searches, first."""
    searched: set[tuple[str, str]] = set()  # a longer search waits for the end of a shorter one
    for steps in sorted(lengths):
        found: dict[tuple[str, str], Unit | None] = {}
        for form in forms:
            for model in models:
                its = (None, ()) if (model, form) in searched else tuned(model, steps, form, losses)
                found[model, form] = its[0]
                yield from its[1]
        searched |= {key for key, unit in found.items() if unit is None}
        for seed in seeds:
            for (model, form), best in found.items():
                units = (at_default(model, steps, form, seed), *((replace(best, seed=seed),) if best else ()))
                yield from (unit for unit in units if unit not in losses)


def units(found: "DataFrame") -> dict[Unit, float]:
    """Return the losses of a file's rows by unit, infinite where a run diverged."""
    from pandas import isna

    losses = {}
    for row in found.reindex(columns=[*KEY, "validation_loss"]).to_dict("records"):
        loss, *key = (None if isna(row[name]) else row[name] for name in ("validation_loss", *KEY))
        losses[Unit(*key)] = math.inf if loss is None else loss
    return losses


@dataclass(frozen=True, kw_only=True)
class Options(runs.Options):
    """Train what bench/study/lengths.py asks for: every method at its defaults and tuned, at every length."""

    models: tuple[Literal[tuple(TINY)], ...] = tuple(TINY)  # type: ignore[valid-type]
    """Some of them."""
    lengths: tuple[int, ...] = (400, 1600)  # Steps of a run; a method's search begins at its best of the shorter one
    forms: tuple[Literal[tuple(FORMS)], ...] = tuple(FORMS)  # type: ignore[valid-type]
    """Some of them; AdamW's search is part of every other."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)

    def __post_init__(self) -> None:
        super().__post_init__()
        command.at_least(1, lengths=self.lengths)


def run(o: Options) -> None:
    """Train what is wanted until nothing is; what is wanted follows from the losses of what was trained."""
    command.make_folder(o.out)
    path, curves = o.out / "lengths.csv", o.out / "lengths-curves.csv"
    losses = units(rows.frame(path))

    def task(unit: Unit) -> runs.Task:
        scale = replace(TINY[unit.model], steps=unit.steps, evaluations=EVALUATIONS)
        return runs.Task(scale, None, unit.form, unit.hyper(), unit.seed, o.folder)

    def done(unit: Unit, record: Record, where: rows.Row) -> None:
        losses[unit] = record.final_loss if math.isfinite(record.final_loss) else math.inf
        own = {"optimizer" if name == "form" else name: value for name, value in asdict(unit).items()}
        row = own | {"rank": unit.hyper().rank} | runs.figures(record) | where
        runs.keep(path, curves, row, runs.curve(record), KEY)

    def missing() -> Iterator[Unit]:
        return wanted(o.models, o.lengths, o.forms, o.seeds, losses)

    if next(missing(), None) is None:
        print(f"{path} has the row of every run: nothing is trained. --out takes another folder.")
        return
    runs.work(missing, task, done, o.jobs)
