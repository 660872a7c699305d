"""The arguments of :func:`prokl.param_groups`: an error that says where one belongs that it does not take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from prokl.algorithm.settings import PRO_ADVANCED, SYNONYMS

P = ParamSpec("P")
R = TypeVar("R")
CONSTRUCTOR_ARGUMENTS = {
    "momentum",
    "beta2",
    "alpha_kl",
    "precondition_frequency",
    "variant",
    "state_dtype",
    *PRO_ADVANCED,
}
CONSTRUCTOR_ARGUMENTS |= {"bf16_weights", "backend", "maximize", "adjust_lr_fn", "process_group"}
ADAMW_ARGUMENTS = {"amsgrad", "foreach", "fused", "capturable"}


def with_own_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Say of a call that Python would refuse what to write."""
    known = inspect.signature(function).parameters
    needed = [name for name, p in known.items() if p.default is p.empty]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        title = f"{function.__name__}()"
        for key in kwargs.keys() - known.keys():
            raise TypeError(f"{title} takes no {key}: {_belongs(key, [*known])}.")
        if len(args) > 1:
            raise TypeError(f"{title} takes the model by its place and all else by name, as lr=0.02; got {len(args)}.")
        missing = [name for name in needed[len(args) :] if name not in kwargs]
        if missing:
            raise TypeError(
                f"{title} lacks {' and '.join(missing)}: write {function.__name__}(model, lr=0.02, adamw_lr=...) with "
                "AdamW's own rate, usually around 1e-3."
            )
        return function(*args, **kwargs)

    return checked


def _belongs(key: str, known: list[str]) -> str:
    if key == "betas":
        return "AdamW's are adamw_betas, and the matrix method's are momentum and beta2 of the constructor"
    if key in CONSTRUCTOR_ARGUMENTS:
        also = ", and AdamW's is adamw_eps" if key == "eps" else ""
        return f"it goes to the constructor, ProKLShampoo(groups, {key}=...){also}"
    if key in ADAMW_ARGUMENTS:
        return f'set it in the groups that this makes, as group["{key}"], where group["algorithm"] is "adamw"'
    spelt = key.replace("_wd", "_weight_decay").replace("learning_rate", "lr")
    nearest = get_close_matches(SYNONYMS.get(key, spelt), known, n=1)
    return f"the nearest is {nearest[0]}" if nearest else f"it takes {', '.join(known)}"
