"""Saving and loading on every rank, by each of torch's routes; all of it as a trainer would."""

import io
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from tests.distributed.placements import Run, here, whole

SAVED, END = 6, 11  # `late` begins after the one; a refresh, an absent weight and bad gradients lie between
DCP = ("nested", "flattened", "async")
FULL = ("full", "broadcast", "gathered")


def options(route):
    """Return torch's options of a route."""
    return StateDictOptions(
        flatten_optimizer_state_dict=route == "flattened",
        full_state_dict=route in FULL,
        broadcast_from_rank0=route == "broadcast",
    )


def contents(run, route):
    """Return what a route saves."""
    given = options(route)
    if route == "broadcast":  # what only the loading side has a meaning for
        given = options("full")
    return {
        "model": get_model_state_dict(run.net, options=given),
        "optimizer": get_optimizer_state_dict(run.net, run.optimizer, options=given),
    }


def first():
    """Return True on the rank that writes alone."""
    return not dist.is_initialized() or dist.get_rank() == 0


def save(run, folder, route):
    """Save a run into a folder; needs all ranks."""
    if route == "async":
        dcp.async_save(contents(run, route), checkpoint_id=folder).result()
    elif route in DCP:
        dcp.save(contents(run, route), checkpoint_id=folder)
    else:
        found = contents(run, "full")
        if route == "gathered":
            found["optimizer"] = run.optimizer.gather_state_dict()
        if first():
            torch.save(found, folder)


def load(run, folder, route, model=True):
    """Load a run from a folder, or its optimizer alone; needs all ranks."""
    given = options(route)
    if route in DCP:
        found = contents(run, route)
        found = found if model else {"optimizer": found["optimizer"]}
        dcp.load(found, checkpoint_id=folder)
    else:
        found = {"model": {}, "optimizer": {}}
        if route != "broadcast" or first():
            found = torch.load(folder, weights_only=True)
    if model:
        set_model_state_dict(run.net, found["model"], options=given)
    if route == "gathered":
        run.optimizer.load_state_dict(found["optimizer"])
    else:
        set_optimizer_state_dict(run.net, run.optimizer, found["optimizer"], options=given)


def gathered(run):
    """Return all state, whole, as bytes that torch.load reads, on the first rank; needs all ranks."""
    packed = run.optimizer.gather_state_dict()
    return written({"state": packed["state"], "groups": packed["param_groups"]}) if packed else b""


def written(value):
    """Return what torch.save writes, as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read(value):
    """Return what :func:`written` was given."""
    return torch.load(io.BytesIO(value), weights_only=True)


def outcome(run):
    """Return all weights, whole, and what the optimizer counts on this rank; needs all ranks."""
    return whole(run.weights), run.optimizer.skipped(), run.optimizer.clipped()


def save_and_go_on(folder, routes, how, **given):
    """Train, save by every route, and go on to the end; return the outcome and the state at saving."""
    run = Run(how, **given).train(0, SAVED)
    for route in routes:
        save(run, Path(folder) / route, route)
    state = gathered(run)
    return outcome(run.train(SAVED, END)), state


def resume(folder, route, how, **given):
    """Load and go on to the end; return the outcome and the state after loading."""
    run = Run(how, **given)
    load(run, Path(folder) / ("full" if route == "broadcast" else route), route)
    state = gathered(run)
    return outcome(run.train(SAVED, END)), state


def everything(run):
    """Return the bits of all that this rank has of weights and state."""
    found = {f"weight {name}": here(p) for name, p in run.weights.items()}
    for i, own in run.optimizer.state_dict()["state"].items():
        found |= {f"state {i} {key}": here(value) if torch.is_tensor(value) else value for key, value in own.items()}
    return {k: written(v.clone().contiguous()) if torch.is_tensor(v) else v for k, v in found.items()}


def refuse(folder, route, how, **given):
    """Load into a run that has begun and does not fit; return how that failed, and what changed by it."""
    run = Run(how, **given).train(0, 2)
    before = everything(run)
    try:
        load(run, Path(folder) / route, route, model=False)
    except BaseException as error:
        after = everything(run)
        return type(error).__name__, str(error), [key for key in before if before[key] != after.get(key)]
    return None, "", []
