"""A small byte-level GPT whose gradients are disturbed on the way: its validation loss at the end."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import torch

from bench.disturbances.forms import Form
from bench.experiments.protocol import kind
from bench.experiments.scales import AUTO, DEMO, Scale
from bench.models import BYTES, byte_gpt
from bench.optimizers import OPTIMIZERS, Hyper
from bench.rows import Row
from bench.training.run import Run, Trainee
from bench.training.sources import Source, open_source

SCALE = replace(DEMO, config=byte_gpt(2, 64, 2, 64), ranks=(16,), evaluations=1, eval_windows=128)
SEED = 0
SILENT, SILENT_LAYER = range(100, 300), "blocks.1."
SPIKES, SPIKE = range(100, 400, 80), 3000.0


Factor = Callable[[str, int], float]
"""What a gradient is multiplied by, given the name of its weight and the step, from 0."""

DISTURBANCES: dict[str, tuple[str, Factor]] = {
    "undisturbed": ("", lambda name, step: 1.0),
    "layer": (
        f"{len(SILENT)} steps",
        lambda name, step: 0.0 if step in SILENT and name.startswith(SILENT_LAYER) else 1.0,
    ),
    "spikes": (f"{SPIKE:g} times", lambda name, step: SPIKE if step in SPIKES else 1.0),
}
"""Value, as rows have it, and factor, by case."""


def validation_loss(form: Form, factor: Factor, source: Source, scale: Scale) -> float:
    """Train at the learning rates of :mod:`bench.optimizers`; return the final loss, inf for one that diverged."""

    def watch(trainee: Trainee) -> Callable[[int], None]:
        for optimizer in trainee.optimizers:
            for group in optimizer.param_groups:
                if "clip_threshold" in group:
                    group.update(form.bound)
        done = 0

        def disturb(name: str, p: torch.Tensor) -> None:
            assert p.grad is not None
            p.grad.mul_(factor(name, done))

        def look(step: int) -> None:
            nonlocal done
            done = step

        for name, p in trainee.model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: disturb(name, p))
        return look

    settings = scale.settings({form.optimizer: hyper(form, scale)}, BYTES, "cpu", curve=False)
    run = Run(settings, SEED, source, watch=watch)
    while not run.finished:
        run.advance()
    (record,) = run.records().values()
    return record.final_loss if record.diverged_at is None else torch.inf


def hyper(form: Form, scale: Scale) -> Hyper:
    """Return what the optimizer is built with."""
    rank = kind(form.optimizer, scale.largest, AUTO).rank
    return Hyper(form.optimizer, OPTIMIZERS[form.optimizer].lr, OPTIMIZERS["adamw"].lr, rank=rank)


@cache
def standard_library() -> Source:
    """Return what is trained on."""
    return open_source(None, SCALE.config.context)


def measure(case: str, form: Form) -> Iterator[Row]:
    """Yield the row of a case."""
    (value, factor), source, h = DISTURBANCES[case], standard_library(), hyper(form, SCALE)
    loss = validation_loss(form, factor, source, SCALE)
    more = {"lr": h.lr, "rank": h.rank, "adamw_lr": h.adamw_lr, "seed": SEED, "steps": SCALE.steps}
    more |= {"data": source.name, "data_sha256": source.sha256}
    yield form.row(case, value, "validation loss", "nats", loss, **more)
