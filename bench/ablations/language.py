"""Language models in training with a variant's settings, and what is watched along a run."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from bench import rows
from bench.ablations.study import Settings, Unit
from bench.models import byte_gpt
from bench.optimizers import Hyper, build
from bench.study.scales import AUTO, DEMO, SCALES, Scale
from bench.training.run import Run, Trainee, Watch, nothing
from bench.training.sources import Source, open_source
from prokl import diagnostics

SMALL = replace(DEMO, config=byte_gpt(2, 64, 2, 64), ranks=(16,), evaluations=1, eval_windows=128)
"""A byte-level GPT that a core trains in a minute."""
TINY = {scale.name: scale for scale in SCALES["tiny"]}
FIRST = 20
"""Steps that a watch leaves out: the start, in which no eigenvalue has met the gradients yet."""
THREE = ("q_proj", "k_proj", "v_proj")
BASES = ("U", "Q_L", "Q_R")  # Q_S is one only just after a refresh
GROUP_KEYS = ("precision", "clip_threshold", "transposed", "bf16_weights")
"""Settings that are keys of a matrix group."""


@cache
def data(context: int) -> Source:
    """Return what models are trained on: the standard library."""
    return open_source(None, context)


def figures(
    scales: Mapping[str, Scale], hyper: Callable[[str, str], Hyper], watch: Watch, unit: Unit, settings: Settings
) -> Iterator[rows.Row]:
    """Train a unit; yield its final loss, and the rows that ``watch`` left in ``record.observed["rows"]``."""
    fields_of_hyper = {name: settings[name] for name in settings.keys() & {field.name for field in fields(Hyper)}}
    h = replace(hyper(unit.model, unit.optimizer), **fields_of_hyper)
    scale = replace(scales[unit.model], steps=unit.steps)
    record = train(scale, h, unit.seed, {k: v for k, v in settings.items() if k not in fields_of_hyper}, watch).record
    own = {name: getattr(h, name) for name in ("rank", "lr", "alpha_kl", "adamw_lr")}
    loss = {"metric": "validation loss", "unit": "nats"}
    diverged = record.diverged_at is not None
    yield own | loss | ({"note": "diverged"} if diverged else {"median": record.final_loss})
    yield from (own | row for row in record.observed.get("rows", ()))


def train(
    scale: Scale, h: Hyper, seed: int, settings: Settings, watch: Watch = nothing, source: Source | None = None
) -> Trainee:
    """Train on one seed with a variant's settings: those of :func:`change`, and these.

    * ``batch``, ``state_dtype``: in place of the scale's.
    * ``width``: of the model, with as many more heads and columns of the MLP.
    * ``constant``: whether rates are.
    """
    source = source or data(scale.config.context)
    own = scale.settings({h.method: h}, source.vocabulary, "cpu", curve=False)
    more = dict(settings)
    if width := more.pop("width", None):
        share = width // own.model.width
        wide = {"width": width, "heads": own.model.heads * share, "mlp_width": own.model.mlp_width * share}
        own = replace(own, model=replace(own.model, **wide))
    constant = more.pop("constant", False)
    own = replace(own, **{name: more.pop(name) for name in ("batch", "state_dtype") if name in more})

    def begin(trainee: Trainee) -> Callable[[int], None]:
        change(trainee, h, more)
        return watch(trainee)

    run = Run(own, seed, source, watch=begin)
    if constant:
        run.scale = lambda step, steps: 1.0
    while not run.finished:
        run.advance()
    return run.trainees[0]


def change(trainee: Trainee, h: Hyper, settings: Settings) -> None:
    """Change a trainee before its first step.

    * ``zero``: names of layers that start at zero.
    * ``pieces``: q, k and v share a weight, which starts as the three do and is read as so many pieces; None: as one.
    * GROUP_KEYS: of the matrix groups.
    * ``dtypes``: of the matrices and of all else as stored; the model computes in float32 on them.
    * ``model_dtype``: of a model that computes in it, too.
    * ``factor``: what a gradient is multiplied by, given its weight's name and the step, from 0.
    """
    settings, model = dict(settings), trainee.model
    for name, weight in model.named_parameters():
        if name.endswith(tuple(settings.get("zero", ()))):
            nn.init.zeros_(weight)
    if "pieces" in settings:
        fused = {id(weight) for weight in fuse(model)}
        trainee.optimizers = build(model, h, None)
        group = trainee.optimizers[0].param_groups[0]
        group["split"] = [settings["pieces"] if id(weight) in fused else None for weight in group["params"]]
    if dtype := settings.get("model_dtype"):
        model.to(dtype)
    groups = trainee.optimizers[0].param_groups
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
    trainee.peak_lrs = [[group["lr"] for group in optimizer.param_groups] for optimizer in trainee.optimizers]
    if factor := settings.get("factor"):
        for name, weight in model.named_parameters():
            weight.register_hook(partial(_multiplied, trainee, factor, name))
    if unknown := settings.keys() - {"zero", "pieces", "dtypes", "model_dtype", "factor", *GROUP_KEYS}:
        raise KeyError(f"nobody changes {', '.join(sorted(unknown))}")


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


class Third(nn.Module):
    """One of the three linear layers that share a weight."""

    def __init__(self, fused: nn.Linear, i: int) -> None:
        super().__init__()
        self.fused, self.i = fused, i

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., W) to (..., W)."""
        return F.linear(x, self.fused.weight.chunk(3)[self.i])


def fuse(model: nn.Module) -> list[nn.Parameter]:
    """Put q, k and v of every block into one weight, and return these."""
    weights = []
    for block in model.blocks:
        fused = nn.Linear(model.config.width, 3 * model.config.width, bias=False)
        fused.weight = nn.Parameter(torch.cat([getattr(block, name).weight.detach() for name in THREE]))
        for i, name in enumerate(THREE):
            setattr(block, name, Third(fused, i))
        weights.append(fused.weight)
    return weights


def recorded(model: str, method: str) -> Hyper:
    """Return what the recorded run of a model was built with, of the largest rank where there are several."""
    row = recorded_row(model, method)
    numbers = {name: float(row[name]) for name in ("lr", "adamw_lr", "alpha_kl") if row.get(name)}
    rank = int(row["rank"]) if row["rank"] else None
    return Hyper(method, rank=rank, init_eigenvalue=AUTO, preset="paper", **numbers)


def recorded_row(model: str, method: str) -> dict[str, str]:
    """Return the row of main.csv, or of pretrain-summary.csv for its model."""
    file = "pretrain-summary.csv" if model == DEMO.name else "main.csv"
    its = [row for row in rows.read(rows.RESULTS / file) if (row["model"], row["optimizer"]) == (model, method)]
    return max((row for row in its if row["start"] == AUTO), key=lambda row: int(row["rank"] or 0))


def watch_bounded(trainee: Trainee) -> Callable[[int], None]:
    """Count the gradients that are bounded after FIRST steps."""

    def now() -> list[int]:
        return [count for optimizer in trainee.optimizers for count in optimizer.clipped().values()]

    before = 0

    def look(step: int) -> None:
        nonlocal before
        if step == FIRST:
            before = sum(now())
        if step == trainee.settings.steps:
            every = (step - FIRST) * len(now())
            found = {"metric": "bounded gradients", "unit": "", "median": sum(now()) - before}
            note = f"of {every} gradients after step {FIRST}"
            trainee.record.observed["rows"] = [found | {"note": note}]

    return look


def watch_sizes(trainee: Trainee) -> Callable[[int], None]:
    """Collect the root mean squares of the matrices' updates over lr, by shape, after the first FIRST steps."""
    weights = [p for p in trainee.model.blocks.parameters() if p.ndim == 2]
    groups = [group for optimizer in trainee.optimizers for group in optimizer.param_groups]
    rate_of = {p: group for group in groups for p in group["params"]}
    sizes: dict[str, list[float]] = {}
    before = [p.detach().clone() for p in weights]

    def look(step: int) -> None:
        for p, old in zip(weights, before, strict=True):
            if step > FIRST:
                moved = (p.detach() - old).double().square().mean().sqrt().item()
                sizes.setdefault("x".join(map(str, p.shape)), []).append(moved / rate_of[p]["lr"])
            old.copy_(p.detach())
        named = {"metric": "update rms", "unit": "lr"}
        if step == trainee.settings.steps:
            its = [named | {"shapes": shape} | rows.quartiles(found) for shape, found in sizes.items()]
            trainee.record.observed["rows"] = its

    return look


def watch_drift(every: int, trainee: Trainee) -> Callable[[int], None]:
    """Collect the largest ||Q^T Q - I||_F of every basis, the loss, and the bounded steps so far."""
    found: list[rows.Row] = trainee.record.observed.setdefault("rows", [])

    def look(step: int) -> None:
        if step % every and step != trainee.settings.steps:
            return
        (optimizer,) = trainee.optimizers
        scalars = diagnostics.scalars(optimizer)
        for basis in BASES:
            errors = [value for key, value in scalars.items() if key.endswith(f"/orthogonality_{basis}")]
            if errors:
                found.append({"step": step, "metric": f"orthogonality of {basis}", "unit": "", "median": max(errors)})
        loss = trainee.record.losses[-1]
        found.append({"step": step, "metric": "training loss", "unit": "nats", "median": loss})
        bounded = sum(optimizer.clipped().values())
        found.append({"step": step, "metric": "bounded steps", "unit": "", "median": bounded})

    return look
