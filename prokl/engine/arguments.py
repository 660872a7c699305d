"""The arguments of a constructor: what a preset makes of them, and what is told of those that have no effect."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, cast

import torch
import torch.distributed as dist

from prokl.algorithm.method import Group
from prokl.algorithm.settings import ALSO_CALLED, PRESETS, check_advanced, check_choice, plain
from prokl.engine.adamw import ARGUMENTS
from prokl.engine.pieces import named

P = ParamSpec("P")
OF_PARAM_GROUPS = {"adamw", "adamw_betas", "adamw_eps", "adamw_lr", "adamw_weight_decay", "matrix", "names"}
OF_PARAM_GROUPS |= {"heads", "split", "split_fused", "transposed"}
OF_ADAMW = ARGUMENTS - {"lr", "weight_decay", "eps", "maximize", "betas", "differentiable"}


def _listed(names: Iterable[str], values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={values[name]!r}" for name in names)


def _unreached(groups: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> str | None:
    """Return what to say of settings that are given to a constructor, and that all of its matrix groups override."""
    overrides = {key: [value for g in groups if (value := g.get(key, meant)) != meant] for key, meant in given.items()}
    unreached = [key for key, values in overrides.items() if groups and len(values) == len(groups)]
    if not unreached:
        return None
    listed = ", ".join(f"{key}={', '.join(dict.fromkeys(map(repr, overrides[key])))}" for key in unreached)
    reach, it = ("reaches", "it") if len(unreached) == 1 else ("reach", "them")
    return (
        f"{_listed(unreached, given)} of the constructor {reach} no group, as all have their own: {listed}. Set {it} "
        f"there, as by prokl.param_groups(model, lr=..., adamw_lr=...), or leave {it} out."
    )


def _check_arguments(title: str, arguments: Collection[str], known: Collection[str]) -> None:
    """Raise TypeError for an argument that is not ``known``: with where it belongs, or what is nearest."""
    for key in arguments:
        if key == "betas":
            where = "AdamW's are adamw_betas of prokl.param_groups, the matrix method's momentum and beta2"
        elif key in OF_PARAM_GROUPS:
            where = f"it belongs to the groups, prokl.param_groups(model, {key}=...)"
        elif key in OF_ADAMW:
            where = f'it is AdamW\'s, and belongs to a group {{"params": [...], "algorithm": "adamw", "{key}": ...}}'
        elif key == "nesterov":
            where = "its momentum is as the method has it; leave it out"
        else:
            nearest = get_close_matches(ALSO_CALLED.get(key, key), known, n=1)
            raise TypeError(
                f"{title}() got an unexpected keyword argument {key!r}: "
                + (f"the nearest is {nearest[0]!r}." if nearest else f"it takes {', '.join(known)}.")
            )
        raise TypeError(f"{title}() takes no {key}: {where}.")


def _float16(groups: Sequence[Group]) -> str | None:
    """Return what to say of weights in float16, in which the smallest normal number is 6e-5."""
    trained = [(p, name) for i, group in enumerate(groups) for p, name in named(group, i) if p.requires_grad]
    half = [name for p, name in trained if p.dtype == torch.float16]
    if not half:
        return None
    return (
        f"{len(half)} of {len(trained)} weights that train are float16, {half[0]} among them: small gradients vanish "
        "there, AdamW's eps of 1e-8 is 0, and weights become NaN: use bfloat16 or float32 weights, of which "
        "torch.autocast computes in float16."
    )


def _waits_for_others() -> bool:
    """Return True where a launcher has started several ranks, which have no process group so far."""
    size = os.environ.get("WORLD_SIZE", "")
    return size.isdigit() and int(size) > 1 and not (dist.is_available() and dist.is_initialized())


def _settled(title: str, kwargs: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Take the advanced settings out of the arguments of a call, and return those that were given.

    Until 0.5 each was a keyword of its own; that still works, with one warning.

    Raises:
        TypeError: ``advanced`` is no mapping, or holds what is no advanced setting.
    """
    argument = kwargs.pop("advanced", None)
    settings = {} if argument is None else argument
    check_advanced(f"of {title}", settings, defaults)
    old = {key: kwargs.pop(key) for key in [key for key in kwargs if key in defaults]}
    if old:
        pairs = ", ".join(f"{key!r}: {value!r}" for key, value in old.items())
        warnings.warn(
            f"{_listed(old, old)} of {title}: advanced settings have one argument now, advanced={{{pairs}}}. The "
            "keywords go in a later release; in groups and checkpoints nothing changes.",
            FutureWarning,
            stacklevel=3,
        )
    return {key: plain(value) for key, value in {**settings, **old}.items()}


def _fill(preset: str, given: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a preset gives: the settings of this method that are not given. Say which a default's value hides."""
    values = {key: value for key, value in PRESETS[preset].items() if key in usual}
    unset = [key for key, value in values.items() if key in given and given[key] != value]
    unset = [key for key in unset if given[key] == usual[key]]
    if unset:
        warnings.warn(
            f"preset={preset!r} leaves {_listed(unset, given)} as given, the defaults without a preset; the "
            f"preset's are {_listed(unset, values)}. To have these, leave the others out or give these.",
            stacklevel=3,
        )
    return {key: value for key, value in values.items() if key not in given}


def _say_what_is_by_heads(preset: Any, groups: Any) -> None:
    """Warn about weights that param_groups has divided by attention's heads, which the paper steps whole."""
    count = sum(route.by_heads for route in getattr(groups, "routes", ()))
    if count:
        warnings.warn(
            f"preset={preset!r} is the paper's algorithm, which steps whole weights, and {count} of these are divided "
            "by attention's heads: make the groups by prokl.param_groups(..., heads=False).",
            stacklevel=3,
        )


def constructor(advanced: Mapping[str, Any]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Complete the arguments of a constructor: by ``preset``, and its ``advanced`` by these defaults.

    What is given wins. It is said where a preset, or an argument, has no effect. One that equals its default may be a
    configuration's, which passes all of them.
    """

    def completing(init: Callable[P, None]) -> Callable[P, None]:
        signature = inspect.signature(init)
        usual = {key: p.default for key, p in signature.parameters.items() if key not in ("self", "params", "advanced")}
        usual |= advanced

        @wraps(init)
        def filled(*args: P.args, **kwargs: P.kwargs) -> None:
            title = type(args[0]).__name__
            settings = _settled(title, kwargs, advanced)
            _check_arguments(title, kwargs.keys() - signature.parameters.keys(), [*usual, "params", "advanced"])
            preset = kwargs.get("preset")
            check_choice("preset", preset, (None, *PRESETS))
            bound = signature.bind_partial(*args, **kwargs).arguments
            given = settings | {key: plain(value) for key, value in bound.items() if key in usual}
            if preset is not None:
                more = _fill(cast(str, preset), given, usual)
                _say_what_is_by_heads(preset, bound.get("params"))
                settings |= {key: value for key, value in more.items() if key in advanced}
                kwargs.update({key: value for key, value in more.items() if key not in advanced})
            kwargs["advanced"] = {**advanced, **settings}
            init(*args, **kwargs)
            _say_what_has_no_effect(args[0], given, usual)

        return filled

    return completing


def _say_what_has_no_effect(optimizer: Any, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Warn about arguments that reach nothing, and about weights whose dtype trains badly."""
    if "process_group" in given and given["process_group"] is None and _waits_for_others():
        warnings.warn(
            "process_group=None was given: torch.distributed.group.WORLD is None until init_process_group(), and "
            f"with WORLD_SIZE={os.environ['WORLD_SIZE']} every rank steps all. Make the optimizer after that, or "
            "leave process_group out where this is meant.",
            stacklevel=3,
        )
    resolved = {key: value for key, value in optimizer.defaults.items() if key in given}
    meant = {key: value for key, value in resolved.items() if value != usual[key]}
    if said := _unreached([g for g in optimizer.param_groups if g["algorithm"] == "matrix"], meant):
        warnings.warn(said, stacklevel=3)
    if said := _float16(optimizer.param_groups):
        warnings.warn(said, stacklevel=3)
