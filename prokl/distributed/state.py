"""State of divided weights between this rank's optimizer and state dicts: parts out, parts of whatever comes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.algorithm.method import Method
from prokl.backends.rounding import MASTER
from prokl.distributed.ownership import Part
from prokl.distributed.weights import LocalWeight
from prokl.engine.adamw import MAXIMUM, MOMENTS
from prokl.engine.checkpoint import unwrapped
from prokl.engine.weights import StateLayout, Weight, is_dtensor, layout_of_state, weights_of


def layout_of_weight(one: Weight, method: Method) -> StateLayout:
    """Return shape and dtype of all state of a whole matrix weight, by its key."""
    merged: StateLayout = {}
    p, group = one.p, one.group
    for member in one.members():
        layout = layout_of_state(member, method, group)
        layout["step" + member.suffix] = ((member.shape.count,) if p.ndim == 3 else (), torch.int64)
        merged.update(layout)
    return merged


def _rows(weight: LocalWeight, key: str) -> tuple[bool, tuple[int, int] | None]:
    """Return whether state has an entry for every matrix of a stack, and the rows (start, stop) of it that are here.

    Counts of skipped gradients have none. State that is not of a stack is one row, of one owner.
    """
    stacked = weight.stacked and key.partition(".")[0] != "skipped"
    mine = (0, 1) if weight.mine is None or not stacked else (weight.mine.start, weight.mine.stop)
    return stacked, None if weight.mine is None else mine


def _placed(weight: LocalWeight) -> tuple[Any, Sequence[Any]]:
    """Return the mesh of AdamW's state of a weight that is not stepped as it is, and how it is placed there."""
    from torch.distributed.tensor import Shard

    if weight.parts:
        return weight.team.mesh(weight.p.device), [Shard(0)]
    return weight.p.device_mesh, weight.p.placements  # type: ignore[attr-defined]


def parts_of_state(one: Weight, weight: LocalWeight, entry: dict[str, Any], method: Method) -> dict[str, Any]:
    """Return a matrix weight's state as parts, with what a wrapper keeps beside it as it is.

    ``entry`` is this rank's state, with steps as tensors; it is empty where this rank owns nothing.
    """
    from prokl.distributed.part_of_state import PartOfState

    layout, exported = layout_of_weight(one, method), {}
    for key, (shape, dtype) in layout.items():
        stacked, mine = _rows(weight, key)
        parts = weight.parts if stacked else (Part(0, 1, weight.parts[0].owner),)
        device = "cpu" if key.partition(".")[0] == "step" and not shape else weight.p.device
        if mine is None:
            held = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
        elif key in entry or key.partition(".")[0] != MASTER:
            # In the dtype that all ranks know of, also where no step has followed a cast yet. What has no dimension is
            # copied, as torch's staging of an asynchronous save does not.
            held = entry[key].to(dtype, copy=not shape)
        else:  # it begins with the next step
            held = torch.zeros((mine[1] - mine[0], *shape[1:]) if stacked else shape, dtype=dtype, device=device)
        exported[key] = PartOfState.make(held, parts, mine, stacked, shape, weight.team.mesh(weight.p.device))
    return exported | {key: value for key, value in entry.items() if key not in layout}


def exported_state(one: Weight, weight: LocalWeight, entry: dict[str, Any], method: Method) -> dict[str, Any]:
    """Return a weight's entry of a state dict, with what each rank has a part of in DTensors that say so."""
    if one.matrix and weight.parts:
        # Anew also of what others own: another dtype of a weight is another one of its state.
        own = {key: value for key, value in entry.items() if weight.mine is not None or not is_dtensor(value)}
        return parts_of_state(one, weight, own, method)
    p, stand_in = weight.p, weight.stand_in
    if one.matrix or stand_in is None or (stand_in is p and not weight.parts):
        return entry
    from torch.distributed.tensor import DTensor

    (mesh, placements), exported = _placed(weight), dict(entry)
    stride = torch.empty(p.shape, device="meta").stride()
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.ndim and value.shape == stand_in.shape:
            exported[key] = DTensor.from_local(value, mesh, placements, run_check=False, shape=p.shape, stride=stride)
            exported[key].of_rank = dist.get_rank()  # a file keeps it: of another rank it has the same placements
    return exported


def check_undivided(state: dict[str, Any]) -> None:
    """Raise ValueError for loaded state of which ranks have parts, where no work is divided."""
    for one in weights_of(state["param_groups"]):
        for value in map(unwrapped, state["state"].get(one.p, {}).values()):
            if is_dtensor(value):
                raise ValueError(_of_another(one.name, value))


def check_part(weight: LocalWeight, key: str, value: Any, name: str) -> None:
    """Raise ValueError for loaded state that is another rank's part, or AdamW's of another weight; waits for nobody."""
    if key in (*MOMENTS, MAXIMUM) and isinstance(value, Tensor) and value.shape != weight.p.shape:
        raise ValueError(
            f"The loaded state of {name} has {key} of shape {tuple(value.shape)}; must be the weight's, "
            f"{tuple(weight.p.shape)}. Load a state dict of the same model."
        )
    if not hasattr(value, "parts") and not hasattr(value, "of_rank"):
        return
    if weight.parts:
        here = _rows(weight, key)[1]
        fits = value.device_mesh == weight.team.mesh(weight.p.device) and getattr(value, "mine", here) == here
    else:
        fits = not hasattr(value, "parts") and value.device_mesh == getattr(weight.p, "device_mesh", None)
    if not fits or getattr(value, "of_rank", dist.get_rank()) != dist.get_rank():
        raise ValueError(_of_another(name, value))


def _of_another(name: str, value: Any) -> str:
    owners = sorted({part.owner for part in value.parts}) if hasattr(value, "parts") else []
    whose = f"is held by rank {', '.join(map(str, owners))} of its process group" if owners else "is one rank's part"
    return (
        f"The loaded state of {name} {whose}, and what was loaded is the part of another rank, of another number of "
        "ranks, or of owners found with other settings or frozen weights: freeze what was frozen at the first step, "
        "load, and unfreeze it then. Save with torch.distributed.checkpoint, which can be loaded on any number of "
        "ranks, or save optimizer.gather_state_dict(), which all ranks must call."
    )


def own_state(one: Weight, weight: LocalWeight, loaded: dict[str, Any], method: Method) -> dict[str, Any]:
    """Return what this rank steps of a weight's loaded state, as far as it fits, whether that is whole or its part.

    All ranks call it, as making a DTensor whole takes them all. Unknown keys stay.
    """
    loaded = {key: unwrapped(value) for key, value in loaded.items()}
    if not one.matrix:
        return {key: _own_shard(weight, value) for key, value in loaded.items()}
    if not weight.parts or not loaded:
        return loaded
    owned, layout = {}, layout_of_weight(one, method)
    for key, value in loaded.items():
        if is_dtensor(value) and not hasattr(value, "parts"):
            value = value.full_tensor()
        stacked, mine = _rows(weight, key)
        if mine is None:
            continue
        shape = layout[key][0] if stacked and key in layout else None
        if hasattr(value, "parts"):
            value = value.loaded()
        elif shape and isinstance(value, (list, tuple)) and len(value) == shape[0]:
            value = list(value[mine[0] : mine[1]])
        elif shape and isinstance(value, Tensor) and value.shape == shape:
            value = value[mine[0] : mine[1]]
        owned[key] = value
    return owned


def _own_shard(weight: LocalWeight, value: Any) -> Any:
    """Return this rank's shard of loaded AdamW state, as far as it fits."""
    from torch.distributed.tensor import distribute_tensor

    if weight.stand_in is weight.p and not weight.parts:
        return value
    mesh, placements = _placed(weight)
    if is_dtensor(value) and (value.device_mesh, tuple(value.placements)) == (mesh, tuple(placements)):
        return value.to_local()
    whole = value.full_tensor() if is_dtensor(value) else value
    if isinstance(whole, Tensor) and whole.ndim and whole.shape == weight.p.shape:
        # Without communication: every rank has the whole.
        return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
    return whole
