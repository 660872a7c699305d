"""Check the state of a matrix weight, loaded or replaced: keys, shapes, dtypes, values; convert that of prokl 0.5."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.method import Group, Method
from prokl.algorithm.reference import in_eigenbases
from prokl.algorithm.shapes import widest
from prokl.backends.device import without_autocast
from prokl.backends.io import Member
from prokl.backends.rounding import MASTER, mode_of
from prokl.engine.weights import StateLayout, clock, layout_of_state


def check_state(
    p: Tensor, parts: list[Member], entry: dict[str, Any], method: Method[Any], group: Group, optimizer: str
) -> None:
    """Raise ValueError where the live state of a matrix weight was replaced by what a step cannot go on from.

    It reads no values, which would wait for the device; a loaded state is checked for them, too.
    """
    for member, layout in zip(parts, layouts_of(entry, p, parts, method, group), strict=False):
        reason = misfit(entry, layout, member, optimizer)
        if reason is None and not _has_clock(member, entry):
            bound = f"{member.shape.count} integers" if p.ndim == 3 else "an integer"
            reason = f"step={entry['step' + member.suffix]!r}; must be {bound} of at least -1"
        if reason is not None:
            raise ValueError(
                f"The state of {member.name} (weight {tuple(p.shape)}) has {reason}. Set it back, or remove the state, "
                "optimizer.state.pop(p), to begin anew."
            )


def layouts_of(
    entry: dict[str, Any], p: Tensor, parts: list[Member], method: Method[Any], group: Group
) -> list[StateLayout]:
    """Return what every piece of a weight needs, by key; nothing where its state has none of it, and begins."""
    layouts = [needed(member, method, group) for member in parts]
    if entry.keys().isdisjoint({"step", "lambda_0"}.union(*layouts, {"step" + member.suffix for member in parts})):
        return []
    for member, layout in zip(parts, layouts, strict=True):
        if mode_of(group, p.dtype) == MASTER and MASTER + member.suffix in entry:  # else they start as W
            layout[MASTER + member.suffix] = (layout["M_Q" + member.suffix][0], torch.float32)
    return layouts


def check_split(entry: dict[str, Any], parts: list[Member], name: str, split: Any) -> None:
    """Raise ValueError for the state of a weight that was divided otherwise: its keys would pass for a wrapper's."""
    held = {key[3:] for key in entry if key == "M_Q" or (key.startswith("M_Q.") and key[4:].isdigit())}
    if held and held != {member.suffix for member in parts}:
        raise ValueError(
            f"Invalid split={split!r} of {name}: its loaded state is of {len(held)} piece(s). Load it with the split "
            "that it was saved with; prokl.param_groups(..., heads=False) keeps queries and keys whole."
        )


def needed(member: Member, method: Method[Any], group: Group) -> StateLayout:
    """Return shape and dtype of every state tensor that a piece needs, by its key."""
    leading = (member.shape.count,) if member.p.ndim == 3 else ()
    layout = layout_of_state(member, method, method.rank(group, member.shape.m, member.shape.n), group)
    needed = {**{key: (leading + shape, dtype) for key, (shape, dtype) in layout.items()}, "skipped": ((), torch.int64)}
    return {key + member.suffix: value for key, value in needed.items()}


def misfit(entry: dict[str, Any], needed: StateLayout, member: Member, optimizer: str) -> str | None:
    """Return why live or loaded state does not fit a piece, as the text of an error; None if it fits.

    Other keys are a wrapper's, and stay.
    """
    for key, (shape, dtype) in needed.items():
        value = entry.get(key)
        if not isinstance(value, Tensor) or value.shape != shape:
            others = [str(k) for k in entry if k not in needed]
            other = f"{', '.join(others[:3])}{', ...' * (len(others) > 3)} and no tensor {key}"
            has = f"{key} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else other
            return f"{has} where {optimizer} needs {shape}"
        plain = value.layout == torch.strided and value.device.type != "meta" and not value.is_complex()
        if not plain or value.is_floating_point() != dtype.is_floating_point:
            actual = f"{key} of {value.dtype} and layout {value.layout} on {value.device}"
            return f"{actual} where {optimizer} needs {dtype} in plain memory"
    if "lambda_0" + member.suffix in entry.keys() - needed.keys():
        return f"lambda_0{member.suffix} where {optimizer} needs none, as its init_eigenvalue is a number"
    return None if "step" + member.suffix in entry else f"no step{member.suffix} where {optimizer} needs one"


def check_values(entry: dict[str, Any], needed: StateLayout, member: Member) -> None:
    """Raise ValueError unless a loaded state that fits a piece has values that a step can go on from."""
    if not _has_clock(member, entry):
        bound = f"{member.shape.count} integers" if member.p.ndim == 3 else "an integer"
        raise ValueError(
            f"The loaded state of {member.name} has step={entry['step' + member.suffix]!r}: must be {bound} of at "
            "least -1, which is before the first gradient. The file is damaged: load an earlier one."
        )
    begun = torch.tensor(clock(member, entry), device="cpu") >= 0
    for key in needed:
        value = entry[key][begun.to(entry[key].device)] if member.p.ndim == 3 and entry[key].ndim else entry[key]
        if not begun.any() or not value.is_floating_point():
            continue
        positive = key.startswith(("inv_sqrt", "lambda_0"))
        if not bool(value.isfinite().all()) or (positive and bool((value < 0).any())):
            bad = "negative or not finite" if positive else "not finite"
            raise ValueError(
                f"The loaded state of {member.name} has {key} with values that are {bad}: the file is damaged, or its "
                "run had failed. Load an earlier one."
            )


def _has_clock(member: Member, entry: dict[str, Any]) -> bool:
    step = entry["step" + member.suffix]
    if isinstance(step, Tensor):
        step = step.tolist() if step.ndim == (member.p.ndim == 3) else None
    steps = step if member.p.ndim == 3 else [step]
    right = isinstance(steps, (list, tuple)) and len(steps) == member.shape.count
    return right and all(type(count) is int and count >= -1 for count in steps)


@without_autocast
def upgraded(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a weight's loaded state with that of 0.5, M, L and R in the weight's coordinates, in the eigenbases.

    Raises:
        ValueError: it is of a version before 0.5.
    """
    for key in [key for key in entry if key == "M" or (key.startswith("M.") and key[2:].isdigit())]:
        suffix = key[1:]
        keys = ("M", "L", "R", "Q_L", "Q_R")
        own = {k: entry[k + suffix] for k in keys if isinstance(entry.get(k + suffix), Tensor)}
        if not own.keys() >= {"M", "L", "Q_L"}:
            continue  # what is missing is told with the shapes
        if "clipped" + suffix not in entry:
            raise ValueError(
                f"The loaded state of {name} is of prokl 0.4 or older, whose files prokl 0.6 does not read. Load it "
                "with prokl 0.5 and save it there, then load that file."
            )
        if any(hasattr(t, "placements") for t in own.values()):  # a DTensor
            raise ValueError(
                f"The loaded state of {name} is of prokl 0.5, and a part: prokl 0.6 keeps M and L in another basis. "
                "Load what gather_state_dict() of prokl 0.5 gave, or one file made by dcp_to_torch_save."
            )
        stored, of_bases = own["M"].dtype, torch.promote_types(own["M"].dtype, torch.float32)
        own = {k: t.to(widest(t.device)) for k, t in own.items()}  # torch's TF32 switches leave its products alone
        bases = {k: orthonormalised(own[k]) for k in ("Q_L", "Q_R") if k in own}
        turned = in_eigenbases(own | bases)
        entry = {k: t for k, t in entry.items() if k not in {"M" + suffix, "L" + suffix, "R" + suffix}}
        entry |= {k + suffix: t.to(of_bases if k in bases else stored) for k, t in turned.items()}
    return entry


def orthonormalised(Q: Tensor) -> Tensor:
    """Return the orthonormal basis nearest to one that bfloat16 rounded; zeros, of matrices that begin, stay zeros.

    Newton-Schulz's iteration squares what deviates, 2e-2 of a bfloat16 basis: below float64's rounding after four.
    """
    for _ in range(4):
        Q = 1.5 * Q - 0.5 * Q @ (Q.mT @ Q)
    return Q
