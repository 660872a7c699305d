"""Patterns of parameter names that overrule the rules."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import Tensor, nn

from prokl.algorithm.names import unwrapped_name
from prokl.routing.owners import Owner


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
            got = f"a {type(pattern).__name__}" if isinstance(pattern, (Tensor, nn.Module)) else repr(pattern)
            raise TypeError(f"{argument} must hold patterns of names, got {got}; pass names, which are strings.")
        if not any(_matches(pattern, name) for name in names):
            raise ValueError(f"{argument}={pattern!r} matches no parameter; {_hint(pattern, names)}.")
        by_quote[f"{argument}={pattern!r}"] = pattern
    return by_quote


def first_match(patterns: Mapping[str, str], owners: Sequence[Owner]) -> str | None:
    """Return the first pattern that matches one of a parameter's names, as messages quote it; None if none does."""
    return next((q for q, pattern in patterns.items() if any(_matches(pattern, o.name) for o in owners)), None)


def _matches(pattern: str, name: str) -> bool:
    bare = unwrapped_name(name)
    return pattern in (name, bare) or fnmatchcase(name, pattern) or fnmatchcase(bare, pattern)


def _hint(pattern: str, names: Sequence[str]) -> str:
    """Return the pattern that was meant: a regular expression's, an index's, or that of a part of names."""
    plain = re.sub(r"\[(\d+)\]", r".\1", pattern.strip("^$").replace(".*", "*").replace("\\.", "."))
    forms = [form for text in (plain, unwrapped_name(plain)) for form in (text, f"*.{text}", f"{text}.*")]
    for form in (*forms, f"*.{plain}.*", f"*{plain}", f"*{plain}*"):
        count = sum(_matches(form, name) for name in names)
        if count and form.strip("*."):
            why = "patterns are fnmatch's, of names as PyTorch has them"
            why = "patterns match whole names" if pattern in form else why
            return f"{why}, and {form!r} matches {count}"
    lower = {name.lower(): name for name in names}
    nearest = get_close_matches(plain.lower(), lower, n=1, cutoff=0.8)
    return f"the nearest name is {lower[nearest[0]]!r}" if nearest else "model.named_parameters() has the names"
