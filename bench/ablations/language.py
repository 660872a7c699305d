"""Language models in training with a variant's settings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial

from torch import Tensor, nn

from bench import rows
from bench.ablations.study import Settings, Unit
from bench.models import byte_gpt
from bench.optimizers import Hyper
from bench.study.scales import DEMO, Scale
from bench.training.run import Run, Trainee
from bench.training.sources import Source, open_source

SMALL = replace(DEMO, config=byte_gpt(2, 64, 2, 64), ranks=(16,), evaluations=1, eval_windows=128)
"""A byte-level GPT that a core trains in a minute."""


@cache
def data(context: int) -> Source:
    """Return what models are trained on: the standard library."""
    return open_source(None, context)


def figures(
    scales: Mapping[str, Scale], hyper: Callable[[str, str], Hyper], unit: Unit, settings: Settings
) -> Iterator[rows.Row]:
    """Train a unit; yield its final loss."""
    fields_of_hyper = {name: settings[name] for name in settings.keys() & {field.name for field in fields(Hyper)}}
    h = replace(hyper(unit.model, unit.optimizer), **fields_of_hyper)
    scale = replace(scales[unit.model], steps=unit.steps)
    record = train(scale, h, unit.seed, {k: v for k, v in settings.items() if k not in fields_of_hyper}).record
    own = {name: getattr(h, name) for name in ("rank", "lr", "alpha_kl", "adamw_lr")}
    loss = {"metric": "validation loss", "unit": "nats"}
    diverged = record.diverged_at is not None
    yield own | loss | ({"note": "diverged"} if diverged else {"median": record.final_loss})


def train(scale: Scale, h: Hyper, seed: int, settings: Settings, source: Source | None = None) -> Trainee:
    """Train on one seed with a variant's settings: those of :func:`change`, and these.

    * ``batch``: in place of the scale's.
    * ``width``: of the model, with as many more heads and columns of the MLP.
    """
    source = source or data(scale.config.context)
    own = scale.settings({h.method: h}, source.vocabulary, "cpu", curve=False)
    more = dict(settings)
    if width := more.pop("width", None):
        share = width // own.model.width
        wide = {"width": width, "heads": own.model.heads * share, "mlp_width": own.model.mlp_width * share}
        own = replace(own, model=replace(own.model, **wide))
    own = replace(own, batch=more.pop("batch", own.batch))

    run = Run(own, seed, source)
    change(run.trainees[0], more)
    while not run.finished:
        run.advance()
    return run.trainees[0]


def change(trainee: Trainee, settings: Settings) -> None:
    """Change a trainee before its first step.

    * ``zero``: names of layers that start at zero.
    * ``clip_threshold``: of the matrix groups.
    * ``factor``: what a gradient is multiplied by, given its weight's name and the step, from 0.
    """
    model = trainee.model
    if unknown := settings.keys() - {"zero", "clip_threshold", "factor"}:
        raise KeyError(f"nobody changes {', '.join(sorted(unknown))}")
    for name, weight in model.named_parameters():
        if name.endswith(tuple(settings.get("zero", ()))):
            nn.init.zeros_(weight)
    if "clip_threshold" in settings:
        for group in trainee.optimizers[0].param_groups:
            if group["algorithm"] == "matrix":
                group["clip_threshold"] = settings["clip_threshold"]
    if factor := settings.get("factor"):
        for name, weight in model.named_parameters():
            weight.register_hook(partial(_multiplied, trainee, factor, name))


def _multiplied(trainee: Trainee, factor: Callable[[str, int], float], name: str, gradient: Tensor) -> Tensor:
    return gradient * factor(name, len(trainee.record.losses))
