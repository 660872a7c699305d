"""The search for one method's hyper-parameters: a grid that grows while the best lies at its edge."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from bench.command import UsageError
from bench.optimizers import Hyper
from bench.presets import Range

GRID = sorted(float(f"{digit}e{power}") for power in range(-9, 4) for digit in (1, 2, 3, 5))
"""Values that a range grows by, one at a time; the paper's are mostly of these."""
GROWING = ("lr", "alpha_kl")
WIDEST = 10
"""How far beyond its range on either side a search goes at most, as a factor."""


def beside(value: float, values: Iterable[float]) -> list[float]:
    """Return the next smaller and the next larger one, among those of a range and, outside it, those of the grid."""
    inside = set(values)
    ladder = sorted(inside | {v for v in GRID if not min(inside) * (1 - 1e-9) <= v <= max(inside) * (1 + 1e-9)})
    place = ladder.index(value)
    return [ladder[place - 1], ladder[place + 1]]


@dataclass
class Search:
    """One method's search: all of the ranges, then the neighbours of the best until none of them is better.

    Ranges grow along learning rate and alpha_kl. One of a single value is not searched, and does not grow.

    Attributes:
        base: what is not searched.
        tried: final validation loss by what was tried; nan where it diverged.
    """

    base: Hyper
    ranges: Range
    tried: dict[Hyper, float] = field(default_factory=dict)

    def pending(self) -> list[Hyper]:
        """Return what to try next; empty once all that is left of the best's neighbours is further away than WIDEST.

        Raises:
            UsageError: everything diverged.
        """
        grid = [
            replace(self.base, lr=lr, weight_decay=decay, alpha_kl=alpha)
            for lr, decay, alpha in product(self.ranges.lr, self.ranges.weight_decay, self.ranges.alpha_kl or (None,))
        ]
        if missing := [hyper for hyper in grid if hyper not in self.tried]:
            return missing
        return [hyper for hyper in self._neighbours() if hyper not in self.tried and self._allowed(hyper)]

    @property
    def edges(self) -> list[str]:
        """In what the best could still be too low or too high, because that is as far as a search goes."""
        beyond = [hyper for hyper in self._neighbours() if hyper not in self.tried]
        return sorted(
            {name for hyper in beyond for name in GROWING if getattr(hyper, name) != getattr(self.best, name)}
        )

    def _neighbours(self) -> list[Hyper]:
        """Return the best with one value a step lower or higher."""
        best = self.best
        return [
            replace(best, **{name: value})
            for name in GROWING
            if len(values := getattr(self.ranges, name)) > 1
            for value in beside(getattr(best, name), values)
        ]

    def _allowed(self, hyper: Hyper) -> bool:
        for name in GROWING:
            values = getattr(self.ranges, name)
            low, high = (min(values) / WIDEST, max(values) * WIDEST) if values else (None, None)
            if values and not low * (1 - 1e-9) <= getattr(hyper, name) <= high * (1 + 1e-9):
                return False
        return True

    @property
    def best(self) -> Hyper:
        """The lowest loss so far; of equal ones the first tried."""
        finite = {hyper: loss for hyper, loss in self.tried.items() if not math.isnan(loss)}
        if not finite:
            rates = sorted({hyper.lr for hyper in self.tried})
            raise UsageError(f"{self.base.method} diverged at every learning rate tried: {rates}; check the model")
        return min(finite, key=finite.__getitem__)


def search_all(searches: Iterable[Search], measure: Callable[[list[Hyper]], list[float]]) -> None:
    """Run searches side by side until each has found its optimum.

    Args:
        searches: that do not depend on each other.
        measure: gives the loss of each of a list of hyper-parameters.
    """
    searches = list(searches)
    while pending := [(search, hyper) for search in searches for hyper in search.pending()]:
        for (search, hyper), loss in zip(pending, measure([hyper for _, hyper in pending]), strict=True):
            search.tried[hyper] = loss
