"""Tasks of an optimizer that is saved, copied or pickled on the way: it has to go on as if it had not been."""

import copy
import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.tasks.peers import Peer
from bench.tasks.problem import END, MIDDLE, Failed, Net, copies, require_finite, require_same, train


def _dtypes(values: Any) -> Iterator[str]:
    """Yield the dtypes of the floating tensors that a state has, wherever in it they are."""
    if isinstance(values, Tensor):
        if values.is_floating_point():
            yield str(values.dtype).removeprefix("torch.")
    elif isinstance(values, dict):
        for value in values.values():
            yield from _dtypes(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _dtypes(value)


def _resumes(peer: Peer, dtype: torch.dtype) -> str:
    model = Net(dtype)
    start = copies(model.parameters())
    optimizer = peer.optimizer(model)
    train(model, optimizer, range(MIDDLE))
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    kept = set(_dtypes(optimizer.state_dict()["state"]))
    train(model, optimizer, range(MIDDLE, END))
    require_finite(model, "after training")

    stream.seek(0)
    saved = torch.load(stream)
    fresh = Net(dtype, seed=7)
    fresh.load_state_dict(saved["model"])
    resumed = peer.optimizer(fresh)
    resumed.load_state_dict(saved["optimizer"])
    found = set(_dtypes(resumed.state_dict()["state"]))
    train(fresh, resumed, range(MIDDLE, END))
    try:
        require_same(list(model.parameters()), list(fresh.parameters()), start, "resumed run")
    except Failed as failed:
        if found == kept:
            raise
        raise Failed(f"state comes back in {', '.join(sorted(found))}; {failed}") from None
    return "to the bit"


def resume(peer: Peer) -> str:
    """Saved, and loaded by torch.load into fresh objects, training goes on to the same bits."""
    return _resumes(peer, torch.float32)


def bf16_resume(peer: Peer) -> str:
    """The same with bfloat16 weights."""
    return _resumes(peer, torch.bfloat16)


def _goes_on(model: Net, optimizer: Any, other: Net, twin: Any) -> str:
    """Train both on, the copy first, and compare."""
    untouched = copies(model.parameters())
    train(other, twin, range(MIDDLE, END))
    if all(map(torch.equal, other.parameters(), untouched)):
        raise Failed("the copy's weights do not move: its optimizer has others")
    require_same(untouched, list(model.parameters()), untouched, "the original, which the copy's steps moved")
    train(model, optimizer, range(MIDDLE, END))
    require_same(list(model.parameters()), list(other.parameters()), untouched, "the copy")
    return "to the bit"


def deepcopy(peer: Peer) -> str:
    """A deep copy of model and optimizer goes on to the same bits, and moves its own weights alone."""
    model = Net()
    optimizer = peer.optimizer(model)
    train(model, optimizer, range(MIDDLE))
    return _goes_on(model, optimizer, *copy.deepcopy((model, optimizer)))


def pickled(peer: Peer) -> str:
    """The same through pickle."""
    model = Net()
    optimizer = peer.optimizer(model)
    train(model, optimizer, range(MIDDLE))
    return _goes_on(model, optimizer, *pickle.loads(pickle.dumps((model, optimizer))))
