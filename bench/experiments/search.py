"""The search for one method's hyper-parameters: a grid, widened while the best learning rate lies at its edge."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import product

from bench.errors import UsageError
from bench.presets import Range
from bench.settings import Hyper

GRID = sorted(float(f"{digit}e{power}") for power in range(-7, 2) for digit in (1, 2, 3, 5))
"""Learning rates that a range is widened by, one at a time; the paper's are mostly of these."""
WIDEST = 10
"""How far beyond its range on either side a search goes at most, as a factor."""


def above(lr: float) -> float:
    """The next larger rate of the grid."""
    return next(rate for rate in GRID if rate > lr * (1 + 1e-9))


def below(lr: float) -> float:
    """The next smaller rate of the grid."""
    return next(rate for rate in reversed(GRID) if rate < lr * (1 - 1e-9))


@dataclass
class Search:
    """One method's search.

    Attributes:
        base: what is not searched.
        tried: final validation loss by what was tried; nan where it diverged.
    """

    base: Hyper
    ranges: Range
    tried: dict[Hyper, float] = field(default_factory=dict)

    def pending(self) -> list[Hyper]:
        """What to try next; empty once the best learning rate has a worse one on either side, or is WIDEST away.

        Raises:
            UsageError: everything diverged.
        """
        grid = [
            replace(self.base, lr=lr, weight_decay=decay, alpha_kl=alpha)
            for lr, decay, alpha in product(self.ranges.lr, self.ranges.weight_decay, self.ranges.alpha_kl or (None,))
        ]
        if missing := [hyper for hyper in grid if hyper not in self.tried]:
            return missing
        edge, beyond = self.edge, []
        if edge == "low":
            beyond = [below(self.best.lr)]
        elif edge == "high":
            beyond = [above(self.best.lr)]
        low, high = min(self.ranges.lr) / WIDEST, max(self.ranges.lr) * WIDEST
        return [replace(self.best, lr=lr) for lr in beyond if low * (1 - 1e-9) <= lr <= high * (1 + 1e-9)]

    @property
    def edge(self) -> str:
        """Where the best learning rate has no worse one on one side: that side, "low" or "high"; else empty."""
        best = self.best
        rates = [h.lr for h in self.tried if replace(h, lr=best.lr) == best]
        return "low" if best.lr == min(rates) else "high" if best.lr == max(rates) else ""

    @property
    def best(self) -> Hyper:
        """The lowest loss so far; of equal ones the first tried."""
        finite = {hyper: loss for hyper, loss in self.tried.items() if not math.isnan(loss)}
        if not finite:
            rates = sorted({hyper.lr for hyper in self.tried})
            raise UsageError(f"{self.base.method} diverged at every learning rate tried: {rates}; check the model")
        return min(finite, key=finite.__getitem__)


def search_all(searches: Iterable[Search], measure: Callable[[list[Hyper]], list[float]]) -> None:
    """Runs searches side by side until each has found its optimum.

    Args:
        searches: that do not depend on each other.
        measure: gives the loss of each of a list of hyper-parameters.
    """
    searches = list(searches)
    while pending := [(search, hyper) for search in searches for hyper in search.pending()]:
        for (search, hyper), loss in zip(pending, measure([hyper for _, hyper in pending]), strict=True):
            search.tried[hyper] = loss
