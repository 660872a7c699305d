"""The studies, each a few lines: its runs, by what tells their rows from others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench import rows
from bench.ablations import digits, disturbed, experts, language
from bench.ablations.disturbed import Form, bounded
from bench.ablations.language import SMALL, Settings
from bench.optimizers import OPTIMIZERS, RANKED, Hyper
from bench.study.lengths import FORMS
from bench.study.scales import TINY
from bench.training.sources import open_source


@dataclass(frozen=True)
class Unit:
    """One run, as a process of its own calls it.

    Attributes:
        key: what tells its rows from those of others.
        make: yields them: ``metric``, ``unit``, ``median``, and what the run was made of.
    """

    key: rows.Row
    make: Callable[[], Iterable[rows.Row]]

    def __call__(self) -> list[rows.Row]:
        """Run on one thread; return the rows with where that was."""
        torch.set_num_threads(1)
        return [self.key | row | rows.environment(torch.device("cpu")) for row in self.make()]


def _unit(model: str, form: str, value: str, seed: int, make: Callable[[], Iterable[rows.Row]]) -> Unit:
    return Unit({"model": model, "optimizer": form, "value": value, "seed": seed, "steps": STEPS}, make)


STEPS = 400
"""Steps of every run that trains a model."""


# The defaults with one thing changed at a time.
EXPERTS, EXPERT_TOKENS, LAST = "experts of 4 tokens, r = 8", 4, 20
"""A case, the tokens of each expert in a step, and the last steps whose mean is its loss."""
LLAMA = TINY["llama-tiny"]


def constant(factor: float, name: str, step: int) -> float:
    """Return what every gradient is multiplied by."""
    return factor


def changed(form: str) -> Mapping[str, Settings]:
    """Return what is changed: rate, rank, batch, scale of the loss, start, width."""
    lr = FORMS[form].default.lr
    return {
        "as it is": {},
        "lr × 1/2": {"lr": lr / 2},
        "lr × 2": {"lr": lr * 2},
        **{f"rank {rank}": {"rank": rank} for rank in (4, 8, 16, 32, 64) if form in RANKED},
        "batch × 1/4": {"batch": LLAMA.batch // 4},
        "batch × 4": {"batch": LLAMA.batch * 4},
        "loss × 1e-3": {"factor": partial(constant, 1e-3)},
        "loss × 1e3": {"factor": partial(constant, 1e3)},
        "projections start at zero": {"zero": ("o_proj.weight", "down_proj.weight")},
        "width 192": {"width": 192},
        "width 384": {"width": 384},
    }


def robustness(seeds: Sequence[int]) -> Iterator[Unit]:
    """Yield Pro-KLShampoo's and Muon's defaults on the more sensitive model, with changes; and few tokens."""
    for seed in seeds:
        for form in ("pro-klshampoo", "muon"):
            for name, settings in changed(form).items():
                make = partial(language.figures, LLAMA, FORMS[form].default, seed, STEPS, settings)
                yield _unit(LLAMA.name, form, name, seed, make)
            yield _unit("experts", form, EXPERTS, seed, partial(few_tokens, form, STEPS))


def few_tokens(form: str, steps: int) -> Iterator[rows.Row]:
    """Yield the row of experts that see fewer tokens than r."""
    own, lr = Form("muon") if form == "muon" else bounded(form), FORMS[form].default.lr
    found = experts.losses(own, steps, 0, 0, EXPERT_TOKENS, lr)
    rank = experts.RANK if form in RANKED else None
    yield {"rank": rank, "lr": lr, "metric": "training loss", "unit": "1", "median": sum(found[-LAST:]) / LAST}


FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of the default rate that runs on images try."""


def images(seeds: Sequence[int]) -> Iterator[Unit]:
    """Yield every method's default rate and rates beside it, by their factor."""
    for seed in seeds:
        for form, own in FORMS.items():
            for factor in FACTORS:
                h = replace(own.default, lr=own.default.lr * factor)
                yield _unit("mixer", form, f"{factor:g}", seed, partial(digits.figures, h, seed, STEPS))


# Gradients that are no ordinary ones: a layer without any for 200 steps, all of them 3,000 times as large.
SILENT, SPIKES = range(100, 300), range(100, 400, 80)


def silent(name: str, step: int) -> float:
    """Return 0 for a layer's gradients while it has none."""
    return 0.0 if step in SILENT and name.startswith("blocks.1.") else 1.0


def spiking(name: str, step: int) -> float:
    """Return what all gradients are multiplied by now and then."""
    return 3000.0 if step in SPIKES else 1.0


GPT_CASES: dict[str, tuple[str, Callable[[str, int], float]]] = {
    "undisturbed": ("", partial(constant, 1.0)),
    "layer": ("200 steps", silent),
    "spikes": ("3000 times", spiking),
}
"""Value, as rows have it, and factor, by case of the GPT."""


def disturbances(seeds: Sequence[int]) -> Iterator[Unit]:
    """Yield every case for every optimizer: one weight's steps, the experts, and the GPT on the first seed."""
    for form in disturbed.FORMS:
        cases: dict[str, Callable[[], Iterable[rows.Row]]] = {
            case.name: partial(disturbed.measure, case.name, form) for case in disturbed.CASES
        }
        cases |= {"experts": partial(experts.measure, form)}
        cases |= {name: partial(of_gpt, name, form, seeds[0], STEPS) for name in GPT_CASES}
        for name, make in cases.items():
            yield Unit({"case": name, "optimizer": form.optimizer, "clip_threshold": form.clip_threshold}, make)


def of_gpt(case: str, form: Form, seed: int, steps: int) -> Iterator[rows.Row]:
    """Yield the row of a GPT in training, whose gradients are disturbed."""
    value, factor = GPT_CASES[case]
    rank = SMALL.largest if form.optimizer in RANKED else None
    lr, adamw_lr = (OPTIMIZERS[method].lr for method in (form.optimizer, "adamw"))
    h = Hyper(form.optimizer, lr, adamw_lr, rank=rank, bounded=form.clip_threshold != "none")
    of: dict[str, Any] = {"seed": seed, "steps": steps} | open_source(None, SMALL.config.context).row
    for row in language.figures(SMALL, h, seed, steps, {"factor": factor}):
        yield {"value": value, "median": torch.inf} | of | row


@dataclass(frozen=True)
class Study:
    """Runs that answer a question, by seeds."""

    what: str
    units: Callable[[Sequence[int]], Iterator[Unit]]
    seeds: tuple[int, ...] = (0,)


STUDIES = {
    "robustness": Study("the defaults with one thing changed at a time", robustness),
    "digits": Study("images instead of text", images, (0, 1, 2)),
    "disturbances": Study("spikes, silence and other scales of gradients", disturbances),
}
