"""Language models in training with a variant's settings."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from bench import rows
from bench.ablations.study import Settings, Unit
from bench.models import byte_gpt
from bench.optimizers import Hyper
from bench.study.scales import DEMO, SCALES, Scale
from bench.training.run import Run, Trainee, nothing
from bench.training.sources import Source, open_source

SMALL = replace(DEMO, config=byte_gpt(2, 64, 2, 64), ranks=(16,), evaluations=1, eval_windows=128)
"""A byte-level GPT that a core trains in a minute."""
TINY = {scale.name: scale for scale in SCALES["tiny"]}
GROUP_KEYS = ("clip_threshold", "bf16_weights")
"""Settings that are keys of a matrix group."""


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

    def begin(trainee: Trainee) -> Callable[[int], None]:
        change(trainee, h, more)
        return nothing(trainee)

    run = Run(own, seed, source, watch=begin)
    while not run.finished:
        run.advance()
    return run.trainees[0]


def change(trainee: Trainee, h: Hyper, settings: Settings) -> None:
    """Change a trainee before its first step.

    * ``zero``: names of layers that start at zero.
    * GROUP_KEYS: of the matrix groups.
    * ``dtypes``: of the matrices and of all else as stored; the model computes in float32 on them.
    * ``factor``: what a gradient is multiplied by, given its weight's name and the step, from 0.
    """
    model, groups = trainee.model, trainee.optimizers[0].param_groups
    if unknown := settings.keys() - {"zero", "dtypes", "factor", *GROUP_KEYS}:
        raise KeyError(f"nobody changes {', '.join(sorted(unknown))}")
    for name, weight in model.named_parameters():
        if name.endswith(tuple(settings.get("zero", ()))):
            nn.init.zeros_(weight)
    for name in settings.keys() & GROUP_KEYS:
        having = [group for group in groups if group.get("algorithm") == "matrix"]
        if not having:
            raise KeyError(f"{h.method} has no group that {name} could be changed of")
        for group in having:
            group[name] = settings[name]
    if dtypes := settings.get("dtypes"):
        for group in groups:
            for weight in group["params"]:
                weight.data = weight.data.to(dtypes[group["algorithm"] == "adamw"])
        trainee.model = trainee.called = InFloat32(model)
    if factor := settings.get("factor"):
        for name, weight in model.named_parameters():
            weight.register_hook(partial(_multiplied, trainee, factor, name))


def _multiplied(trainee: Trainee, factor: Callable[[str, int], float], name: str, gradient: Tensor) -> Tensor:
    return gradient * factor(name, len(trainee.record.losses))


class InFloat32(nn.Module):
    """A model that computes in float32 whatever its weights are stored in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stored = model

    def forward(self, tokens: Tensor) -> Any:
        """Map tokens to logits."""
        return functional_call(self.stored, {name: p.float() for name, p in self.stored.named_parameters()}, tokens)
