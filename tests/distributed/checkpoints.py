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

from tests.distributed.placements import Run, refusal, whole, written

SAVED, END = 6, 11  # `late` begins after the one; a refresh, an absent weight and bad gradients lie between
DCP = ("nested", "flattened", "async", "torchtitan")
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
    if route == "torchtitan":
        return {"model": get_model_state_dict(run.net), **flat(run.optimizer)}
    if route == "broadcast":  # what only the loading side has a meaning for
        given = options("full")
    return {
        "model": get_model_state_dict(run.net, options=given),
        "optimizer": get_optimizer_state_dict(run.net, run.optimizer, options=given),
    }


WEIGHT_KEYS = ("params", "param_names")


def flat(optimizer):
    """Return an optimizer's state dict as torchtitan saves it: one dict, by names of weights."""
    packed, found = optimizer.state_dict(), {}
    for group in packed["param_groups"]:
        settings = {key: value for key, value in group.items() if key not in WEIGHT_KEYS}
        for place, name in zip(group["params"], group["param_names"], strict=True):
            found |= {f"state.{name}.{key}": value for key, value in packed["state"][place].items()}
            found |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
    return found


def load_flat(optimizer, found):
    """Load what :func:`flat` returned, as torchtitan does: the keys of the live state, into groups without names."""
    state, groups = {}, []
    for group in optimizer.param_groups:
        places = []
        for p, name in zip(group["params"], group["param_names"], strict=True):
            places.append(len(state))
            state[len(state)] = {key: found[f"state.{name}.{key}"] for key in optimizer.state[p]}
        settings = {key: found[f"param_groups.{name}.{key}"] for key in group if key not in WEIGHT_KEYS}
        groups.append({"params": places, **settings})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


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
    if route == "torchtitan":  # which makes the state by a step of zero gradients
        for p in run.weights.values():
            p.grad = torch.zeros_like(p)
        run.optimizer.step()
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
    elif route == "torchtitan":
        load_flat(run.optimizer, found)
    else:
        set_optimizer_state_dict(run.net, run.optimizer, found["optimizer"], options=given)


def gathered(run):
    """Return all state, whole, as bytes that torch.load reads, on the first rank; needs all ranks."""
    packed = run.optimizer.gather_state_dict()
    return written({"state": packed["state"], "groups": packed["param_groups"]}) if packed else b""


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


def refuse(folder, route, how, **given):
    """Load into a run that has begun and does not fit; return how that failed, and what changed by it."""
    run = Run(how, **given).train(0, 2)
    return refusal(run, load, run, Path(folder) / route, route, model=False)
