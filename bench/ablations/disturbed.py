"""The optimizers that are disturbed, and one weight on disturbed normal gradients: its steps in usual ones.

Dimension key: m short side, T steps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from bench.optimizers import ADAMW_BETAS, CLIP, OPTIMIZERS, OWN, RANKED
from bench.rows import Row


@dataclass(frozen=True)
class Form:
    """One optimizer, in one form."""

    optimizer: str  # a key of bench.optimizers.OPTIMIZERS
    clip_threshold: str = ""  # a number, or "none" for the paper's form; of this package's alone

    def build(self, weights: Sequence[Tensor], lr: float, rank: int | None = None, **settings: Any) -> Optimizer:
        """Build the optimizer of matrices: its defaults, no weight decay, the ``rank`` where it has one."""
        if rank is not None and self.optimizer in RANKED:
            settings["rank"] = rank
        if self.optimizer == "adamw":
            settings["betas"] = ADAMW_BETAS
        if self.optimizer in OWN:
            settings["clip_threshold"] = None if self.clip_threshold == "none" else float(self.clip_threshold)
        return OPTIMIZERS[self.optimizer].make(weights, lr=lr, weight_decay=0.0, **settings)


def bounded(method: str) -> Form:
    """Return a method of this package as it is by default."""
    return Form(method, f"{CLIP:g}")


def paper(method: str) -> Form:
    """Return a method of this package in the paper's form."""
    return Form(method, "none")


FORMS = (*(form(method) for method in OWN for form in (bounded, paper)), Form("muon"), Form("adamw"))


BEFORE = 60
"""Ordinary gradients first. The mean step of their second half is the usual one."""
AFTER = 30
"""Steps that are watched after the first one that counts."""
NEAR = 0.1
"""Relative distance from the usual step within which a step is as usual."""
WIDE, MIDDLE, SMALL = (256, 512), (128, 256), (64, 128)
"""Shapes: the smaller for what takes a thousand steps, and where float32 holds the square of what is huge. On the
smallest the eigenvalues' floor, 1 / (m n) of both factors' product, is above gradients 1e-4 times the usual."""
SEED = 0


@dataclass(frozen=True)
class Case:
    """A disturbance of a weight's gradients after the ordinary ones."""

    name: str
    value: str  # what tells it from others of its name
    shape: tuple[int, int]
    factors: tuple[float, ...]  # what these gradients are multiplied by
    returning: bool = False  # whether the steps after them count, not theirs
    lasting: bool = False  # whether no ordinary gradients follow
    rows: int | None = None  # how many rows of the gradient, the first ones, are multiplied; None: all
    scale: float = 1.0  # of the ordinary gradients

    @property
    def every(self) -> list[float]:
        """The factors of the whole run."""
        return [1.0] * BEFORE + [*self.factors] + [1.0] * (0 if self.lasting else AFTER + self.returning)

    @property
    def start(self) -> int:
        """The first step that counts."""
        return BEFORE + (len(self.factors) if self.returning else 0)


CASES = (
    *(Case("spike", f"{size} times", WIDE, (float(size),)) for size in ("10", "100", "1000", "1e4")),
    *(Case("zeros", f"{n} steps", SMALL, (0.0,) * n, returning=True) for n in (100, 200, 1000)),
    *(Case("faint", f"{n} steps", SMALL, (1e-4,) * n, returning=True) for n in (1000, 1500)),
    *(Case("row", f"{n} steps", WIDE, (0.0,) * n, returning=True, rows=1) for n in (200, 400)),
    Case("huge", "1e23 times", SMALL, (1e23,), scale=1e-6),
    Case("scale", "1e4 times", MIDDLE, (1e4,) * 300, lasting=True),
    Case("scale", "1e-4 times", MIDDLE, (1e-4,) * 1500, lasting=True),
)


@torch.no_grad()
def run(case: Case, form: Form, **settings: Any) -> tuple[Tensor, bool]:
    """Step a weight through a case, with the optimizer's own ``settings``.

    Returns:
        The norm of every row of every step, (T, m) in float64, and whether the state ended finite.
    """
    W = torch.nn.Parameter(torch.zeros(case.shape))
    optimizer = form.build([W], 1.0, **settings)
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for factor in case.every:
        W.zero_()  # so that it holds one step afterwards, unrounded
        W.grad = case.scale * torch.randn(case.shape, generator=generator)
        W.grad[: case.rows] *= factor
        optimizer.step()
        found.append(torch.linalg.vector_norm(W.detach(), dim=1, dtype=torch.float64))
    tensors = [value for value in optimizer.state[W].values() if isinstance(value, Tensor)]
    return torch.stack(found), all(bool(tensor.isfinite().all()) for tensor in tensors)


def figures(case: Case, form: Form, **settings: Any) -> dict[str, tuple[float, str]]:
    """Return what a case shows with units, by metric: inf of what is not finite, NaN of what did not happen."""
    each, finite = run(case, form, **settings)
    steps = in_usual_steps(each, case.start)
    largest = steps[1:].max().item() if finite else math.inf
    if case.lasting:
        far = ((steps - 1).abs() > NEAR).nonzero()
        until = int(far[-1]) + 1 if len(far) else 0
        return {
            "largest step": (max(steps[0].item(), largest), "usual steps"),
            "as usual again after": (until if until < len(steps) else math.nan, "steps"),
        }
    found = {
        "first step": (steps[0].item(), "usual steps"),
        f"largest of the next {AFTER}": (largest, "usual steps"),
    }
    if case.rows is not None:
        own = in_usual_steps(each[:, : case.rows], case.start)
        found["row's first step"] = (own[0].item(), "usual steps")
        found[f"row's largest of the next {AFTER}"] = (own[1:].max().item(), "usual steps")
    return found


def in_usual_steps(each: Tensor, start: int) -> Tensor:
    """Return the norms of the steps from ``start`` on over that of usual ones; inf where one is not finite."""
    norms = torch.linalg.vector_norm(each, dim=1)
    usual = norms[BEFORE - AFTER : BEFORE].mean()
    return (norms[start:] / usual).nan_to_num(nan=math.inf, posinf=math.inf)


def measure(name: str, form: Form) -> Iterator[Row]:
    """Yield the rows of all cases of this name."""
    for case in CASES:
        if case.name == name:
            shapes = "x".join(map(str, case.shape))
            for metric, (figure, unit) in figures(case, form).items():
                note = f"not as usual within {len(case.factors)} steps" if math.isnan(figure) else ""
                row = {"value": case.value, "metric": metric, "unit": unit, "median": figure}
                yield row | {"shapes": shapes, "seed": SEED, "note": note}
