"""The search for one method's hyper-parameters: a grid that grows while the best lies at its edge."""

import math
from collections.abc import Callable, Iterable, Iterator
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
    """

    base: Hyper  # what is not searched
    ranges: Range
    # final validation loss by what was tried; nan where it diverged
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
        return [hyper for hyper, allowed in self._neighbours() if allowed]

    @property
    def edges(self) -> list[str]:
        """In what the best could still be too low or too high, because that is as far as a search goes."""
        beyond = [hyper for hyper, allowed in self._neighbours() if not allowed]
        return [name for name in sorted(GROWING) if any(getattr(h, name) != getattr(self.best, name) for h in beyond)]

    def _neighbours(self) -> Iterator[tuple[Hyper, bool]]:
        """Yield the best with one value a step lower or higher, not tried yet, and whether that is near enough."""
        for name in GROWING:
            values = getattr(self.ranges, name)
            for value in beside(getattr(self.best, name), values) if len(values) > 1 else ():
                hyper = replace(self.best, **{name: value})
                if hyper not in self.tried:
                    yield hyper, min(values) / WIDEST * (1 - 1e-9) <= value <= max(values) * WIDEST * (1 + 1e-9)

    @property
    def best(self) -> Hyper:
        """The lowest loss so far; of equal ones the first tried."""
        finite = {hyper: loss for hyper, loss in self.tried.items() if not math.isnan(loss)}
        if not finite:
            rates = sorted({hyper.lr for hyper in self.tried})
            raise UsageError(f"{self.base.method} diverged at every learning rate tried: {rates}; check the model")
        return min(finite, key=finite.__getitem__)


def search_all(searches: Iterable[Search], measure: Callable[[list[Hyper]], list[float]]) -> None:
    """Run searches side by side until each has found its optimum; ``measure`` gives the loss of each of a list."""
    searches = list(searches)
    while pending := [(search, hyper) for search in searches for hyper in search.pending()]:
        for (search, hyper), loss in zip(pending, measure([hyper for _, hyper in pending]), strict=True):
            search.tried[hyper] = loss
