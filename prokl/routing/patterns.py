"""Patterns of parameter names that overrule the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from prokl.algorithm.names import unwrapped_name
from prokl.routing.rules import Owner


def quoted(argument: str, patterns: str | Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Check that every pattern matches a name, and return each under the words that quote it.

    Raises:
        TypeError: a pattern is no string.
        ValueError: a pattern matches no name.
    """
    if not isinstance(patterns, Iterable):
        raise TypeError(f'Invalid {argument}={patterns!r}: must be patterns of names, as in {argument}=["*.router.*"].')
    by_quote = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must hold patterns of names, got {pattern!r}; pass strings.")
        if not any(_matches(pattern, name) for name in names):
            raise ValueError(f"{argument}={pattern!r} matches no parameter; model.named_parameters() has the names.")
        by_quote[f"{argument}={pattern!r}"] = pattern
    return by_quote


def first_match(patterns: Mapping[str, str], owners: Sequence[Owner]) -> str | None:
    """Return the words that quote the first pattern that matches one of a parameter's names."""
    return next((q for q, pattern in patterns.items() if any(_matches(pattern, o.name) for o in owners)), None)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(unwrapped_name(name), pattern)
