"""Arguments of the constructors, ``param_groups`` and AdamW's groups, and where one belongs that a call refuses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from prokl.algorithm.settings import COMMON_BOUNDS, PRO_ADVANCED, PRO_BOUNDS, SYNONYMS

P = ParamSpec("P")
R = TypeVar("R")
CONSTRUCTOR = {*COMMON_BOUNDS, *PRO_BOUNDS, *PRO_ADVANCED, "process_group"} - {"lr", "weight_decay", "rank"}
"""Arguments of a constructor that ``param_groups`` does not take."""
PARAM_GROUPS = {"adamw", "adamw_betas", "adamw_eps", "adamw_lr", "adamw_weight_decay", "matrix", "names"}
PARAM_GROUPS |= {"heads", "split", "split_fused", "transposed"}
"""Arguments of ``param_groups`` that no constructor takes."""
ADAMW = {"amsgrad", "capturable", "foreach", "fused"}
"""Keys of AdamW's groups that are arguments of neither."""


def check_known(title: str, arguments: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError for an argument that is not ``known``: with where it belongs, or the nearest one."""
    for key in (key for key in arguments if key not in known):
        if key == "betas":
            where = "AdamW's are adamw_betas of prokl.param_groups, and the matrix method's are momentum and beta2"
        elif key in PARAM_GROUPS:
            where = f"it belongs to the groups, prokl.param_groups(model, {key}=...)"
        elif key in ADAMW:
            where = f'it is AdamW\'s, and belongs to its groups, those with "algorithm": "adamw", as "{key}"'
        elif key in CONSTRUCTOR and "adamw_lr" in known:
            also = ", and AdamW's is adamw_eps" if key == "eps" else ""
            where = f"it goes to the constructor, ProKLShampoo(groups, {key}=...){also}"
        elif key in CONSTRUCTOR | {"rank"}:
            where = (
                "it is ProKLShampoo's, which alone projects and orthogonalises; leave it out. The authors' form is "
                f"{title}(groups, init_eigenvalue=0.1, clip_threshold=None)"
            )
        elif key == "nesterov":
            where = "its momentum is as the method has it; leave it out"
        else:
            spelt = SYNONYMS.get(key, key.replace("wd", "weight_decay").replace("learning_rate", "lr"))
            turned = [name for name in known if sorted(name.split("_")) == sorted(spelt.split("_"))]  # as lr_adamw
            nearest = turned or get_close_matches(spelt, known, n=1)
            raise TypeError(
                f"{title}() got an unexpected keyword argument {key!r}: "
                + (f"the nearest is {nearest[0]!r}." if nearest else f"it takes {', '.join(known)}.")
            )
        raise TypeError(f"{title}() takes no {key}: {where}.")


def with_own_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Say of a call of ``param_groups`` that Python would refuse what to write."""
    known = inspect.signature(function).parameters
    needed = [name for name, p in known.items() if p.default is p.empty]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        title = f"{function.__name__}()"
        check_known(function.__name__, kwargs, known)
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
