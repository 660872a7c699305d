"""The one search: what is tried first, then what lies beside the best until all of that has been tried.

It is a function of the losses that are known, so that a command goes on from its rows, and runs may end in any order.
Values are powers of STEP times a base.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
"""A run's settings, with ``lr`` and ``alpha_kl``."""
STEP = 1.5
FURTHEST = 8
"""Powers of STEP that a search goes from where it began, a factor of 26."""


@dataclass(frozen=True)
class Climbed(Generic[T]):
    """A search as far as losses are known: the best, or what is still to be trained to know it."""

    best: T | None
    wanted: tuple[T, ...] = ()


def climb(first: Sequence[T], beside: Callable[[T], Iterable[T]], losses: Mapping[T, float]) -> Climbed[T]:
    """Search from ``first`` on; losses are infinite for what diverged, and of equal ones the lower rate is better."""
    tried = list(first)
    while True:
        if wanted := tuple(one for one in tried if one not in losses):
            return Climbed(None, wanted)
        best = min(tried, key=lambda one: (losses[one], one.lr, one.alpha_kl or 0.0))
        more = [one for one in dict.fromkeys(beside(best)) if one not in tried]
        if not more:
            return Climbed(best)
        tried += more


def rounded(value: float) -> float:
    """Return a rate as it is trained and recorded, with four digits."""
    return float(f"{value:.4g}")


def power(value: float | None, base: float | None) -> int:
    """Return the power of STEP that a tried value is of its base."""
    assert value and base
    k = 0
    while value > rounded(base * STEP**k):
        k += 1
    while value < rounded(base * STEP**k):
        k -= 1
    return k


def powers(base: float, *powers: int) -> list[float]:
    """Return these powers of STEP times a base."""
    return [rounded(base * STEP**k) for k in powers]
