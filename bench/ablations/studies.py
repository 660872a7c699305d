"""The studies, each a few lines: what is trained, and what its variants change."""

from collections.abc import Callable, Iterator, Mapping

import torch

from bench import rows
from bench.ablations import digits, disturbed, experts, language
from bench.ablations.disturbed import FORMS, Form, bounded
from bench.ablations.language import SMALL
from bench.ablations.study import Settings, Study, Unit
from bench.optimizers import OPTIMIZERS, RANKED, Hyper
from bench.study import lengths as protocol
from bench.study.scales import TINY
from bench.training.sources import open_source


def same(variants: Mapping[str, Settings]) -> Callable[[str, str], Mapping[str, Settings]]:
    """Return variants that are those of every model and optimizer."""
    return lambda model, optimizer: variants


# The defaults with one thing changed at a time.
USUAL = "as it is"
EXPERTS, EXPERT_TOKENS, LAST = "experts of 4 tokens, r = 8", 4, 20
"""A case, the tokens of each expert in a step, and the last steps whose mean is its loss."""
LLAMA = TINY["llama-tiny"]


def changed(model: str, form: str) -> Mapping[str, Settings]:
    """Return what is changed: rate, rank, batch, scale of the loss, start, width; experts are a task of their own."""
    if model == "experts":
        return {EXPERTS: {}}
    lr = protocol.FORMS[form].default.lr
    return {
        USUAL: {},
        "lr × 1/2": {"lr": lr / 2},
        "lr × 2": {"lr": lr * 2},
        **{f"rank {rank}": {"rank": rank} for rank in (4, 8, 16, 32, 64) if form in RANKED},
        "batch × 1/4": {"batch": LLAMA.batch // 4},
        "batch × 4": {"batch": LLAMA.batch * 4},
        "loss × 1e-3": {"factor": lambda name, step: 1e-3},
        "loss × 1e3": {"factor": lambda name, step: 1e3},
        "projections start at zero": {"zero": ("o_proj.weight", "down_proj.weight")},
        "width 192": {"width": 192},
        "width 384": {"width": 384},
    }


def robust(unit: Unit, settings: Settings) -> Iterator[rows.Row]:
    """Yield the rows of a changed run, or of experts that see fewer tokens than r."""
    default = protocol.FORMS[unit.optimizer].default
    if unit.model != "experts":
        yield from language.figures(LLAMA, default, unit, settings)
        return
    form, lr = bounded(unit.optimizer) if unit.optimizer != "muon" else Form("muon"), default.lr
    found = experts.losses(form, unit.steps, 0, 0, EXPERT_TOKENS, lr)
    rank = experts.RANK if unit.optimizer in RANKED else None
    yield {"rank": rank, "lr": lr, "metric": "training loss", "unit": "1", "median": sum(found[-LAST:]) / LAST}


# Gradients that are no ordinary ones: a layer without any for 200 steps, all of them 3,000 times as large.
SILENT, SPIKES = range(100, 300), range(100, 400, 80)
DISTURBANCES: dict[str, tuple[str, Callable[[str, int], float]]] = {
    "undisturbed": ("", lambda name, step: 1.0),
    "layer": ("200 steps", lambda name, step: 0.0 if step in SILENT and name.startswith("blocks.1.") else 1.0),
    "spikes": ("3000 times", lambda name, step: 3000.0 if step in SPIKES else 1.0),
}
"""Value, as rows have it, and factor, by case of the GPT."""
CASES = (*dict.fromkeys(case.name for case in disturbed.CASES), "experts", *DISTURBANCES)


def form_of(name: str) -> Form:
    """Return an optimizer of the disturbances by its name, such as "kl-shampoo none"."""
    return Form(*name.split())


def disturb(unit: Unit, settings: Settings) -> Iterator[rows.Row]:
    """Yield the rows of a case: one weight's steps, the experts, or the GPT."""
    form = form_of(unit.optimizer)
    if unit.variant == "experts":
        yield from experts.measure(form)
    elif unit.variant not in DISTURBANCES:
        yield from disturbed.measure(unit.variant, form)
    else:
        value, factor = DISTURBANCES[unit.variant]
        own, adamw = OPTIMIZERS[form.optimizer], OPTIMIZERS["adamw"]
        rank = SMALL.largest if form.optimizer in RANKED else None
        h = Hyper(form.optimizer, own.lr, adamw.lr, rank=rank, bounded=form.clip_threshold != "none")
        source = open_source(None, SMALL.config.context)
        of = {"seed": unit.seed, "steps": unit.steps} | source.row
        for row in language.figures(SMALL, h, unit, {"factor": factor}):
            yield {"value": value, "median": torch.inf} | of | row


def of_case(unit: Unit) -> rows.Row:
    """Return what tells the rows of a disturbance from those of others."""
    form = form_of(unit.optimizer)
    return {"case": unit.variant, "optimizer": form.optimizer, "clip_threshold": form.clip_threshold}


def of_digits(model: str, form: str) -> Mapping[str, Settings]:
    """Return the default rate and rates beside it, by their factor."""
    return {f"{factor:g}": {"lr": protocol.FORMS[form].default.lr * factor} for factor in (0.25, 0.5, 1.0, 2.0, 4.0)}


STUDIES = {
    "robustness": Study(
        "the defaults with one thing changed at a time",
        (LLAMA.name, "experts"),
        ("pro-klshampoo", "muon"),
        changed,
        robust,
    ),
    "digits": Study(
        "images instead of text", ("mixer",), tuple(protocol.FORMS), of_digits, digits.figures, seeds=(0, 1, 2)
    ),
    "disturbances": Study(
        "spikes, silence and other scales of gradients",
        ("",),
        tuple(f"{form.optimizer} {form.clip_threshold}".strip() for form in FORMS),
        same(dict.fromkeys(CASES, {})),
        disturb,
        key=of_case,
    ),
}


def measure(unit: Unit) -> list[rows.Row]:
    """Run a unit on one thread; return its rows with where that was."""
    torch.set_num_threads(1)
    return [row | rows.environment(torch.device("cpu")) for row in STUDIES[unit.study].rows(unit)]
