"""Language models in training with a variant's settings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bench import rows
from bench.models import byte_gpt
from bench.optimizers import Hyper
from bench.study.scales import DEMO
from bench.training.run import Run, Scale
from bench.training.sources import open_source

Settings = Mapping[str, Any]
"""The settings that a variant changes, by name."""
SMALL = replace(DEMO, config=byte_gpt(2, 64, 2, 64), ranks=(16,), eval_windows=128)
"""A byte-level GPT that a core trains in a minute."""


def figures(scale: Scale, h: Hyper, seed: int, steps: int, settings: Settings) -> Iterator[rows.Row]:
    """Train; yield the final loss. Settings are fields of :class:`Hyper`, and those of :func:`train`."""
    of_hyper = {name: settings[name] for name in settings.keys() & {field.name for field in fields(Hyper)}}
    h, scale = replace(h, **of_hyper), replace(scale, steps=steps, evaluations=1)
    record = train(scale, h, seed, {k: v for k, v in settings.items() if k not in of_hyper}).record
    own = {name: getattr(h, name) for name in ("rank", "lr", "alpha_kl", "adamw_lr")}
    loss = {"metric": "validation loss", "unit": "nats"}
    diverged = record.diverged_at is not None
    yield own | loss | ({"note": "diverged"} if diverged else {"median": record.final_loss})


def train(scale: Scale, h: Hyper, seed: int, settings: Settings, data: Path | None = None) -> Run:
    """Train on one seed with a variant's settings, on the standard library or other ``data``.

    * ``batch``: in place of the scale's.
    * ``width``: of the model, with as many more heads and columns of the MLP.
    * ``zero``: names of layers that start at zero.
    * ``factor``: what a gradient is multiplied by, given its weight's name and the step, from 0.
    """
    if unknown := settings.keys() - {"batch", "width", "zero", "factor"}:
        raise KeyError(f"nobody changes {', '.join(sorted(unknown))}")
    source = open_source(data, scale.config.context)
    own = scale.config
    if width := settings.get("width"):
        share = width // own.width
        own = replace(own, width=width, heads=own.heads * share, mlp_width=own.mlp_width * share)
    run = Run(replace(scale, config=own, batch=settings.get("batch", scale.batch)), h, seed, source)
    for name, weight in run.model.named_parameters():
        if name.endswith(tuple(settings.get("zero", ()))):
            nn.init.zeros_(weight)
        if factor := settings.get("factor"):
            weight.register_hook(partial(_multiplied, run, factor, name))
    while not run.finished:
        run.advance()
    return run


def _multiplied(run: Run, factor: Callable[[str, int], float], name: str, gradient: Tensor) -> Tensor:
    return gradient * factor(name, run.done)
