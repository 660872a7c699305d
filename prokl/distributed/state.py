"""State of divided weights between this rank's optimizer and state dicts: parts out, parts of whatever comes in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prokl.algorithm.method import Method
from prokl.backends.rounding import MASTER, mode_of
from prokl.distributed.blocks import rows, whole_block
from prokl.distributed.ownership import Part
from prokl.distributed.weights import Divided, Undivided, is_dtensor
from prokl.engine.adamw import MAXIMUM, MOMENTS
from prokl.engine.checkpoint import unwrapped
from prokl.engine.matrix_state import needed
from prokl.engine.weights import StateLayout, Weight, weights_of


def layout_of_weight(one: Weight, method: Method[Any]) -> StateLayout:
    """Return shape and dtype of all state of a whole matrix weight, by its key."""
    merged: StateLayout = {}
    p, group = one.p, one.group
    for member in one.members():
        layout = needed(member, method, group)
        layout["step" + member.suffix] = ((member.shape.count,) if p.ndim == 3 else (), torch.int64)
        if mode_of(group, p.dtype) == MASTER:
            layout[MASTER + member.suffix] = (layout["M_Q" + member.suffix][0], torch.float32)
        merged.update(layout)
    return merged


def _stacked(weight: Divided, key: str) -> bool:
    """Return True for state with an entry for every matrix of a stack; its counts of skipped gradients have none."""
    return weight.stacked and key.partition(".")[0] != "skipped"


def parts_of_state(weight: Divided, entry: dict[str, Any], layout: StateLayout) -> dict[str, Any]:
    """Return a matrix weight's state as parts, with what a wrapper keeps beside it as it is.

    Args:
        weight: whose. entry: this rank's state, steps as tensors; empty where it owns nothing. layout: of the whole.
    """
    from prokl.distributed.part_of_state import PartOfState

    mesh, exported = weight.team.mesh(weight.p.device), {}
    for key, (shape, dtype) in layout.items():
        stacked = _stacked(weight, key)
        parts = weight.parts if stacked else (Part(0, 1, weight.parts[0].owner),)
        mine = None if weight.mine is None else (weight.mine.start, weight.mine.stop) if stacked else (0, 1)
        device = "cpu" if key.partition(".")[0] == "step" and not shape else weight.p.device
        held = entry[key] if mine is not None else torch.empty((0, *shape[1:]), dtype=dtype, device=device)
        exported[key] = PartOfState.make(held, parts, mine, stacked, shape, mesh)
    return exported | {key: value for key, value in entry.items() if key not in layout}


def shards_of_state(weight: Divided | Undivided, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the AdamW state of rows, or of a DTensor's shard, as DTensors."""
    from torch.distributed.tensor import DTensor, Shard

    p, shape = weight.p, None if weight.stand_in is None else weight.stand_in.shape
    if isinstance(weight, Undivided):
        if weight.stand_in is p:
            return entry
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
    else:
        mesh, placements = weight.team.mesh(p.device), [Shard(0)]
    stride = torch.empty(p.shape, device="meta").stride()
    exported = dict(entry)
    for key, value in entry.items():
        if isinstance(value, Tensor) and value.ndim and value.shape == shape:
            exported[key] = DTensor.from_local(value, mesh, placements, run_check=False, shape=p.shape, stride=stride)
            exported[key].of_rank = dist.get_rank()  # a file keeps it: of another rank it has the same placements
    return exported


def check_undivided(state: dict[str, Any]) -> None:
    """Raise ValueError for loaded state of which ranks have parts, where no work is divided."""
    for one in weights_of(state["param_groups"]):
        for value in map(unwrapped, state["state"].get(one.p, {}).values()):
            if is_dtensor(value):
                raise ValueError(partial_message(one.name, value))


def own_parts(weight: Divided, loaded: dict[str, Any], layout: StateLayout) -> dict[str, Any]:
    """Return what this rank owns of loaded state; all ranks call it, as making a DTensor whole takes them all."""
    owned = {}
    for key, value in loaded.items():
        if is_dtensor(value) and not hasattr(value, "parts"):
            value = value.full_tensor()
        if weight.mine is not None:
            owned[key] = _own_part(weight, key, value, layout.get(key, (None,))[0])
    return owned


def _own_part(weight: Divided, key: str, value: Any, shape: tuple[int, ...] | None) -> Any:
    """Return this rank's part of loaded state of a matrix weight, as far as it fits.

    Args:
        weight: of which this rank owns a part. key: of the state. value: what was loaded, the whole or the part. shape:
            of the whole; None of what the state does not know.
    """
    mine = weight.mine
    assert mine is not None
    if hasattr(value, "parts"):
        return value.loaded()
    if shape is None or not _stacked(weight, key):
        return value
    if isinstance(value, (list, tuple)) and len(value) == shape[0]:
        return list(value[mine.start : mine.stop])
    fits = isinstance(value, Tensor) and value.shape == shape
    return value[mine.start : mine.stop] if fits else value


def check_part(weight: Divided | Undivided, key: str, value: Any, name: str) -> None:
    """Raise ValueError for loaded state that is another rank's part, or AdamW's of another weight; waits for nobody."""
    if key in (*MOMENTS, MAXIMUM) and isinstance(value, Tensor) and value.shape != weight.p.shape:
        raise ValueError(
            f"The loaded state of {name} has {key} of shape {tuple(value.shape)}; must be the weight's, "
            f"{tuple(weight.p.shape)}. Load a state dict of the same model."
        )
    if not hasattr(value, "parts") and not hasattr(value, "of_rank"):
        return
    if isinstance(weight, Divided):
        mine, mesh = weight.mine, weight.team.mesh(weight.p.device)
        rows_here = None if mine is None else (mine.start, mine.stop) if _stacked(weight, key) else (0, 1)
        fits = value.device_mesh == mesh and getattr(value, "mine", rows_here) == rows_here
    else:
        fits = not hasattr(value, "parts") and value.device_mesh == getattr(weight.p, "device_mesh", None)
    if not fits or getattr(value, "of_rank", dist.get_rank()) != dist.get_rank():
        raise ValueError(partial_message(name, value))


def partial_message(name: str, value: Any) -> str:
    """Say that a loaded state is one rank's."""
    owners = sorted({part.owner for part in value.parts}) if hasattr(value, "parts") else []
    whose = f"is held by rank {', '.join(map(str, owners))} of its process group" if owners else "is one rank's part"
    return (
        f"The loaded state of {name} {whose}, and what was loaded is the part of another rank, of another number of "
        "ranks, or of owners found with other settings or frozen weights: freeze what was frozen at the first step, "
        "load, and unfreeze it then. Save with torch.distributed.checkpoint, which can be loaded on any number of "
        "ranks, or save optimizer.gather_state_dict(), which all ranks must call."
    )


def own_shard(weight: Divided | Undivided, value: Any) -> Any:
    """Return this rank's shard of loaded AdamW state, as far as it fits."""
    if isinstance(weight, Undivided):
        if weight.stand_in is weight.p:
            return value
        mesh, placements = weight.p.device_mesh, weight.p.placements  # type: ignore[attr-defined]
        if is_dtensor(value):
            same = value.device_mesh == mesh and tuple(value.placements) == tuple(placements)
            return value.to_local() if same else _distributed(value.full_tensor(), mesh, placements)
        whole_one = isinstance(value, Tensor) and value.ndim and value.shape == weight.p.shape
        return _distributed(value, mesh, placements) if whole_one else value
    if is_dtensor(value):
        mesh = weight.team.mesh(weight.p.device)
        if value.device_mesh == mesh and [p.is_shard(0) for p in value.placements] == [True]:
            return value.to_local()
        value = value.full_tensor()
    if isinstance(value, Tensor) and value.ndim and value.shape == weight.p.shape:
        mine = weight.mine
        assert mine is not None
        return value[rows(weight.p.shape, mine.start, mine.stop).within(whole_block(weight.p.shape))]
    return value


def _distributed(value: Tensor, mesh: Any, placements: Any) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    # Without communication: every rank has the whole.
    return distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
