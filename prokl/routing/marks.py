"""Read the settings that models mark parameters with: ``_optim`` of S4's layers, timm's ``no_weight_decay()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from prokl.algorithm.names import unwrapped_name
from prokl.algorithm.settings import BETAS, NONNEGATIVE, RATE, check, plain

Own = tuple[tuple[str, Any], ...]
"""Settings of a parameter's own, by name."""
BOUNDS = {"lr": RATE, "weight_decay": NONNEGATIVE, "betas": BETAS, "eps": NONNEGATIVE}


def own_settings(p: Tensor, name: str) -> Own:
    """Return the settings of AdamW that a parameter has in ``_optim``; those that are None are left out.

    Raises:
        ValueError: one is out of bounds or none of AdamW's.
    """
    marked = p.__dict__.get("_optim")
    if not isinstance(marked, Mapping):
        return ()
    own = {key: plain(value) for key, value in marked.items() if value is not None}
    for key, value in own.items():
        if key not in BOUNDS:
            raise ValueError(
                f"Invalid _optim={dict(marked)!r} of {name!r}: {key!r} is none of {', '.join(BOUNDS)}; remove it."
            )
        check(f"_optim[{key!r}] of {name!r}", value, BOUNDS[key])
    return tuple(sorted(own.items()))


def without_decay(model: nn.Module) -> dict[str, str]:
    """Return the parameters that modules ask to have no weight decay, each with the method that says so."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        answers = [asked(module, method) for method in ("no_weight_decay", "no_weight_decay_keywords")]
        names, words = ([n for n in a if isinstance(n, str)] if isinstance(a, Iterable) else [] for a in answers)
        for full, _ in module.named_parameters(remove_duplicate=False) if names or words else ():
            name = f"{prefix}.{full}" if prefix else full
            bare = unwrapped_name(full)
            if bare in names:
                found.setdefault(name, "no_weight_decay()")
            elif any(word in bare for word in words):
                found.setdefault(name, "no_weight_decay_keywords()")
    return found


def asked(model: nn.Module, method: str) -> Any:
    """Return what a method of a model gives; nothing, (), where it has none or fails."""
    ask = getattr(model, method, None)
    try:
        return ask() if callable(ask) else ()
    except Exception:  # the model's own code: a base class's for those with a head, one with arguments, or a broken one
        return ()
