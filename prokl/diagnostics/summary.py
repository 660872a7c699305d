"""A dozen numbers for a whole optimizer, and a sentence for each of them that looks wrong."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import nn

from prokl.backends.device import without_autocast
from prokl.diagnostics.report import figures_of
from prokl.diagnostics.weights import counts, lent, named, unwrapped
from prokl.matrix_optimizer import MatrixOptimizer

MEDIANS = ("update_to_weight", "whitened_size", "spread_L", "subspace_share")
WORST = ("update_to_weight", "whitened_size", "spread_L", "idle_rows", "orthogonality")
"""Figures of a matrix whose median, and whose largest value, over all matrices are reported."""

# Figures beyond these look wrong. docs/diagnostics.md has the runs, healthy and sick, that they lie between.
LARGE_UPDATE = 0.2
"""Bound of ``update_to_weight``. It is at most 0.15 in healthy runs, except for weights that start at zero; at ten
times the rate it was 0.38 and 0.45 in the median at the fifth step."""
MANY_CLIPPED = 0.25
"""Bound of ``clipped``. It is at most 0.12 in the first 25 steps of healthy runs, and less after them."""
MANY_IDLE = 0.5
"""Bound of ``idle_rows_worst``. It is 0 in healthy runs, and 0.84 or more where half of the vocabulary never occurs."""
NO_BASIS = 0.1
"""Bound of ``orthogonality_worst``. It is at most 6.4e-3 in 5,000 steps with a bfloat16 state (docs/findings.md)."""
EARLY = 25
"""Steps in which much is bounded, and in which a weight behind others that start at zero need not have begun."""


@dataclass(frozen=True)
class Health:
    """The result of :func:`health`; printed, it is a line for each number and the words."""

    numbers: dict[str, float]
    """Flat, for a logger: {"prokl/<figure>": value}."""
    worst: dict[str, str]
    """The matrix or weight with the worst figure, or with most of a count, the first of several that are level:
    {"prokl/<figure>": name}."""
    words: list[str]
    """One line for each thing that looks wrong, with its remedy; empty where nothing does."""
    totals: dict[str, dict[str, int]] = field(repr=False)
    """Counts by name since the state was made, from which a later call counts: "steps", "clipped", "skipped"."""

    def __str__(self) -> str:
        """Return a line for each number, then the words."""
        lines = [f"{key:<31}{value:>10.3g}  {self.worst.get(key, '')}" for key, value in self.numbers.items()]
        return "\n".join([line.rstrip() for line in lines] + self.words)


@torch.no_grad()
@without_autocast
def health(optimizer: MatrixOptimizer | Any, model: nn.Module | None = None, since: Health | None = None) -> Health:
    """Return a dozen numbers for the optimizer, and a sentence for each that looks wrong; wait for the device once.

    Call it between ``backward()`` (and ``GradScaler.unscale_``) and ``step()``. Some numbers
    are left out before the first step, without gradients, and of a method without a subspace.

    Medians and the worst are over the matrices that have begun, of the figures of :func:`scalars`:
    ``update_to_weight_median`` and ``_worst``, ``whitened_size_median`` and ``_worst``, ``spread_L_median`` and
    ``_worst``, ``subspace_share_median``, ``idle_rows_worst``, and ``orthogonality_worst`` of all bases. NaN is worse
    than any number, and no part of a median. A weight of zeros has no ``update_to_weight``.

    Counts: ``clipped``, the share of the steps since the last call that ``clip_threshold`` bounded; ``skipped``, the
    gradients since then that were not finite; ``without_gradient``, the weights that may move, AdamW's too, and have
    no gradient now.

    If the work is divided, each rank has the numbers of the matrices that it steps, and waits for no other; figures
    that need gradients are there only for matrices that lie whole on their owner, as under DDP.

    Args:
        optimizer: as in :func:`scalars`.
        model: likewise.
        since: the result of the last call; None counts from the start of the state. A count that is lower than it was
            then has begun anew, and counts from its start.

    Raises:
        TypeError: another optimizer, or a ``since`` that is no :class:`Health`. ValueError: ``model`` as in
            :func:`scalars`.
    """
    if since is not None and not isinstance(since, Health):
        raise TypeError(
            f"since must be what the last health() returned, or None, got a {type(since).__name__}: pass that whole, "
            "not its numbers."
        )
    inner = unwrapped(optimizer)
    with lent(inner) as engine:
        steps, stopped = counts(engine, model)
        matrices, skipped = figures_of(engine, model, stopped)
    for own in matrices.values():
        bases = [value for figure, value in own.items() if figure.startswith("orthogonality_")]
        own["orthogonality"] = math.nan if any(map(math.isnan, bases)) else max(bases)
        if math.isinf(own.get("update_to_weight", 0.0)):
            del own["update_to_weight"]
    totals = {
        "steps": steps,
        "clipped": {name: int(own["clipped"]) for name, own in matrices.items()},
        "skipped": {name: int(count) for name, count in skipped.items()},
    }
    before: Mapping[str, Mapping[str, int]] = {} if since is None else since.totals
    gained = {key: _gained(now, before.get(key, {})) for key, now in totals.items()}
    moving = [(w.p, name or w.name) for w, name in named(inner.param_groups, model) if w.p.requires_grad]
    without = [name for p, name in moving if p.grad is None]

    numbers, worst = {}, {}
    for figure in dict.fromkeys((*MEDIANS, *WORST)):
        values = {name: own[figure] for name, own in matrices.items() if figure in own}
        if values and figure in MEDIANS:
            numbers[f"{figure}_median"] = median([v for v in values.values() if v == v] or [math.nan])
        if values and figure in WORST:
            name = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
            numbers[f"{figure}_worst"], worst[f"{figure}_worst"] = values[name], name
    numbers["clipped"] = sum(gained["clipped"].values()) / max(1, sum(gained["steps"].values()))
    numbers["skipped"] = float(sum(gained["skipped"].values()))
    numbers["without_gradient"] = float(len(without))
    worst |= {count: gained[count].most_common(1)[0][0] for count in ("clipped", "skipped") if numbers[count]}
    worst |= {"without_gradient": without[0]} if without else {}
    words = list(_words(numbers, worst, matrices, steps, gained, without, len(moving)))
    flat = {f"prokl/{key}": value for key, value in numbers.items()}
    return Health(flat, {f"prokl/{key}": name for key, name in worst.items()}, words, totals)


def _gained(now: Mapping[str, int], before: Mapping[str, int]) -> Counter[str]:
    """Return by how much each count has grown, from 0 where it is below what it was, or was not begun."""
    start = {name: max(0, before.get(name, 0)) for name in now}
    return Counter(
        {name: max(0, count - start[name] if count >= start[name] else count) for name, count in now.items()}
    )


def _words(
    of: Mapping[str, float],
    worst: Mapping[str, str],
    matrices: Mapping[str, Mapping[str, float]],
    steps: Mapping[str, int],
    gained: Mapping[str, Counter[str]],
    without: Sequence[str],
    moving: int,
) -> Iterator[str]:
    """Yield a sentence for each number that looks wrong; ``without`` are those of ``moving`` that lack a gradient."""
    if waiting := [name for name, step in steps.items() if step < -EARLY]:
        yield (
            f"{_some(waiting)}: none of {EARLY} gradients or more has been usable so far. They were zero, not finite, "
            "or too small to square. See whether the weight is used, and the loss scale."
        )
    if without and len(without) < moving:
        yield (
            f"{len(without)} of {moving} weights have no gradient ({_some(without)}) and do not move. Freeze what is "
            "not to be trained, requires_grad_(False); else see why the loss does not depend on it."
        )
    elif without and matrices:
        yield (
            "No weight has a gradient, so nothing is known of the update. Call health() between backward() and step()."
        )
    elif without:
        yield (
            f"None of the {moving} weights has a gradient, nor has had one. If backward() has run, the optimizer was "
            "made of other weights than those that are trained: make it after the model is copied, loaded, wrapped or "
            "sharded."
        )
    count, ratios = len(gained["steps"]), {name: own.get("update_to_weight", 0.0) for name, own in matrices.items()}
    large = [name for name, ratio in ratios.items() if ratio > LARGE_UPDATE]
    if 2 * len(large) > count:  # of all matrices, begun or not
        name = max(large, key=lambda name: ratios[name])
        yield (
            f"The coming step moves {len(large)} of {count} matrices by more than {LARGE_UPDATE:.0%} of their size, "
            f"{name} by {ratios[name]:.0%}. Lower lr, or warm it up."
        )
    if math.isnan(of.get("whitened_size_worst", 0.0)):
        yield (
            f"The gradient of {worst['whitened_size_worst']} is not finite, so the coming step leaves it as it is. "
            "Skip steps whose loss is not finite, and look at the batch, the loss scale and the rates."
        )
    if of["skipped"]:
        yield (
            f"Gradients that were not finite since the last call: {of['skipped']:.0f}, {_whose(gained['skipped'])}. "
            "They moved nothing. Skip steps whose loss is not finite, and look at the batches, the loss scale and the "
            "rates."
        )
    if of["clipped"] > MANY_CLIPPED and sum(gained["steps"].values()) >= EARLY * len(matrices):
        yield (
            f"clip_threshold bounded {of['clipped']:.0%} of the steps since the last call, "
            f"{_whose(gained['clipped'])}: gradients are far larger than those before them. Lower lr, and look for "
            "batches of another kind."
        )
    if of.get("idle_rows_worst", 0.0) >= MANY_IDLE:
        yield (
            f"{of['idle_rows_worst']:.0%} of the gradient's rows or columns are zero in {worst['idle_rows_worst']}. If "
            "it is an embedding, give it to AdamW; else see which inputs or units are always zero."
        )
    if of.get("orthogonality_worst", 0.0) > NO_BASIS:
        yield (
            f"A basis of {worst['orthogonality_worst']} is off orthogonality by {of['orthogonality_worst']:.2g}. Load "
            "the last checkpoint. If it comes again with state_dtype=torch.bfloat16, keep the state in float32."
        )


def _whose(counts: Counter[str]) -> str:
    """Say whose most of a count is, or how many each has of those that have as many."""
    largest = max(counts.values())
    names = [name for name, count in counts.items() if count == largest]
    return f"most of {names[0]}" if len(names) == 1 else f"{largest} each of {_some(names)}"


def _some(names: Sequence[str]) -> str:
    """Name the first three."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
