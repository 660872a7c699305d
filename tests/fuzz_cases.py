"""The cases of :mod:`tests.fuzz`: shapes, settings and gradients, all drawn from one integer."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.settings import AdjustLrFn
from tests.inputs import INF, NAN, VARIANTS

FLOAT32_MAX = torch.finfo(torch.float32).max
"""A gradient whose sum of squares is beyond this is not finite to the optimizers, in float64 too."""

STRUCTURES = ("normal", "low rank", "rank one", "one row", "one column", "asleep")
SIZES = ("usual", "tiny", "denormal", "huge", "brim", "largest")
OTHERS = ("flip", "repeat", "zero", "missing", "not finite")


@dataclass(frozen=True)
class Case:
    """One optimizer, its weights and how their gradients are drawn."""

    seed: int
    optimizer: type
    settings: dict[str, Any]
    path: str
    """"reference", "torch" or "blind", as in tests.inputs."""
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    steps: int
    kinds: tuple[str, ...]
    """Kinds of gradients to draw from; a kind may stand there several times."""
    scale: float
    """Usual size of a gradient's entries, log10."""
    jumps: tuple[float, float]
    """Probability and size, log10, of a lasting change of scale."""

    def weights(self) -> list[torch.nn.Parameter]:
        g = torch.Generator().manual_seed(self.seed)
        drawn = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in self.shapes)
        return [torch.nn.Parameter(t.to(self.dtype)) for t in drawn]


def _shape(rng: random.Random) -> tuple[int, ...]:
    """Draw a vector, a matrix, a stack or a convolution, its sides up to 24 and 40."""
    short, long = rng.choice([1, 1, 2, 3, rng.randint(1, 24), rng.randint(1, 24)]), rng.randint(1, 40)
    form = rng.random()
    if form < 0.1:  # square, or nearly
        long = short + rng.choice([0, 0, 1])
    sides = (short, long) if rng.random() < 0.5 else (long, short)
    if math.prod(sides) == 1:
        sides = (1, 2)
    if form > 0.85:
        k = rng.choice([2, 2, 3])
        return (sides[0], max(1, sides[1] // k**2), k, k)
    return (rng.randint(1, 4), *sides) if form > 0.65 else sides


def _settings(rng: random.Random, pro: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "lr": 10 ** rng.uniform(-4, 0),
        "weight_decay": rng.choice([0.0, 0.0, 0.1, 1.0]),
        "momentum": rng.choice([0.95, 0.95, 0.0, 0.5, 0.9, 0.99, rng.uniform(0, 0.99)]),
        "beta2": rng.choice([0.95, 0.95, 0.9, 0.99, 0.0, 0.5, 0.999, rng.uniform(0, 0.999)]),
        "eps": rng.choice([1e-8, 1e-8, 0.0, 1e-12, 1e-4, 1e-2]),
        "precondition_frequency": rng.choice([10, *range(1, 11)]),
        "init_eigenvalue": rng.choice(["auto", "auto", 0.1, 10 ** rng.uniform(-12, 12)]),
        "clip_threshold": rng.choice([5.0, 5.0, max(1.5, 1 + 10 ** rng.uniform(-3, 2))]),
        "maximize": rng.random() < 0.2,
        "state_dtype": rng.choice([None, None, torch.bfloat16, torch.float32, torch.float64]),
    }
    if settings["state_dtype"] == torch.bfloat16:  # in which slower averages are refused
        settings["beta2"] = min(settings["beta2"], 0.995)
    if pro:
        settings["rank"] = rng.choice([rng.randint(1, 4), rng.randint(1, 40), 40])
        settings["variant"] = rng.choice([VARIANTS[0], *VARIANTS])
        settings["alpha_kl"] = rng.choice(["auto", 0.01, 0.0, 0.1, 1.0, 10.0])
        settings["ns_steps"] = rng.choice([5, 5, 1, 2, 3, 4, 6, 8])
        settings["ns_dtype"] = rng.choice([None, None, torch.float16, torch.bfloat16, torch.float32, torch.float64])
    return settings


def _later_settings(rng: random.Random, variant: str | None) -> dict[str, Any]:
    """Draw what came later, from numbers of its own, so that the rest of a seed's case stays as it was."""
    return {
        "adjust_lr_fn": "original" if variant == "subspace-only" else rng.choice(get_args(AdjustLrFn)),
        "cautious_weight_decay": rng.random() < 0.5,
        "precision": rng.choice([None, None, "balanced"]),
    }


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    rng.random()  # once told two kinds of cases apart; without it all seeds would be other cases
    pro = rng.random() < 0.7
    dtype = rng.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16])
    shapes: list[tuple[int, ...]] = []
    for _ in range(rng.choice([1, 1, 2, 2, 3, 4])):
        shapes.append(rng.choice(shapes) if shapes and rng.random() < 0.4 else _shape(rng))
    settings = _settings(rng, pro)
    settings |= _later_settings(random.Random(f"later {seed}"), settings.get("variant"))
    kinds = [rng.choice(STRUCTURES + SIZES + OTHERS) for _ in range(rng.randint(1, 5))]
    if rng.random() < 0.8:
        kinds += rng.randint(len(kinds) + 1, 3 * len(kinds) + 1) * ["normal"]
    path = rng.choice(["torch", "torch", "blind", "blind", "reference"])
    if path == "reference":
        settings.pop("precision", None)  # it is as exact as its dtype
    return Case(
        seed=seed,
        optimizer=ProKLShampoo if pro else KLShampoo,
        settings=settings,
        path=path,
        dtype=dtype,
        shapes=tuple(shapes),
        steps=rng.randint(8, rng.choice([12, 12, 12, 40])),
        kinds=tuple(kinds),
        scale=rng.choice([0.0, -3.0, rng.uniform(-8, 4), rng.uniform(-22, 18)]),
        jumps=(rng.choice([0.0, 0.0, 0.05, 0.3]), rng.choice([1.0, 4.0, 12.0, 30.0])),
    )


class _Stream:
    """The gradients of one matrix, one after another."""

    def __init__(self, case: Case, shape: tuple[int, int], rng: random.Random, generator: torch.Generator) -> None:
        self.case, self.shape, self.rng, self.generator = case, shape, rng, generator
        self.scale, self.last = case.scale, torch.zeros(shape, dtype=torch.float64)
        self.asleep = torch.rand(shape[0], 1, generator=generator) < 0.3

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _structured(self, kind: str) -> Tensor:
        rows, cols = self.shape
        G = self._normal(rows, cols)
        if kind == "rank one":
            G = self._normal(rows, 1) @ self._normal(1, cols)
        elif kind == "low rank":  # with noise: the usual gradient
            G = self._normal(rows, 3) @ self._normal(3, cols) + 0.1 * G
        elif kind == "one row":
            G = G * (torch.arange(rows) == self.rng.randrange(rows))[:, None]
        elif kind == "one column":
            G = G * (torch.arange(cols) == self.rng.randrange(cols))
        elif kind == "asleep":
            G = G * ~self.asleep
        return G

    def _size(self, kind: str) -> float:
        """Draw the entries' size, log10."""
        limits = torch.finfo(self.case.dtype)
        if kind == "tiny":
            return self.scale - self.rng.uniform(1, 12)
        if kind == "denormal":
            return math.log10(limits.smallest_normal) - self.rng.uniform(0, 3)
        if kind == "huge":
            return self.scale + self.rng.uniform(1, 20)
        if kind == "brim":  # the sum of squares is just about FLOAT32_MAX
            return math.log10(self.rng.uniform(0.2, 1.1) * (FLOAT32_MAX / math.prod(self.shape)) ** 0.5)
        return math.log10(limits.max) if kind == "largest" else self.scale

    def draw(self, kind: str) -> Tensor:
        """Return the next gradient, in float64; "missing" is up to the weight."""
        probability, size = self.case.jumps
        if self.rng.random() < probability:
            self.scale += self.rng.uniform(-size, size)
        if kind == "zero":
            return torch.zeros(self.shape, dtype=torch.float64)
        if kind == "flip":
            self.last = -self.last
        elif kind != "repeat":
            limit = torch.finfo(self.case.dtype).max
            size = min(max(self._size(kind), -320.0), 308.0)
            self.last = (self._structured(kind) * 10**size).clamp(-limit, limit)
        if kind != "not finite":
            return self.last
        bad = self.last.clone()
        bad.view(-1)[self.rng.randrange(bad.numel())] = self.rng.choice([NAN, INF, -INF])
        return bad


def gradients(case: Case) -> Iterator[list[Tensor | None]]:
    """Yield the gradients of every step, in the weights' dtype; kinds tend to stay."""
    rng, generator = random.Random(case.seed + 0.5), torch.Generator().manual_seed(case.seed + 1)
    streams, kinds = [], []
    for shape in case.shapes:
        count = shape[0] if len(shape) == 3 else 1
        sides = shape[1:] if len(shape) == 3 else (shape[0], math.prod(shape[1:]))
        streams.append([_Stream(case, sides, rng, generator) for _ in range(count)])
        kinds.append([rng.choice(case.kinds) for _ in range(count)])
    for _ in range(case.steps):
        step: list[Tensor | None] = []
        for shape, own, kind in zip(case.shapes, streams, kinds, strict=True):
            for i in range(len(own)):
                if rng.random() < 0.5:
                    kind[i] = rng.choice(case.kinds)
            drawn = [stream.draw(k) for stream, k in zip(own, kind, strict=True)]
            step.append(None if "missing" in kind else torch.stack(drawn).reshape(shape).to(case.dtype))
        yield step
