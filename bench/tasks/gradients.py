"""Tasks of gradients that are not finite, or not there."""

from functools import partial

import torch
from torch import Tensor

from bench.tasks.peers import Peer
from bench.tasks.problem import END, MIDDLE, Failed, Net, held, require_finite, train


def _survives_nan(peer: Peer, name: str, what: str) -> str:
    model = Net()
    weight = model.get_parameter(name)
    optimizer = peer.optimizer(model, weight, what)
    train(model, optimizer, range(MIDDLE))

    def spoil(t: int) -> None:
        assert weight.grad is not None
        weight.grad.view(-1)[0] = torch.nan

    train(model, optimizer, [MIDDLE], change=spoil)
    require_finite(model, "after it")
    before = weight.detach().clone()
    train(model, optimizer, range(MIDDLE + 1, END))
    require_finite(model, "later")
    if weight.equal(before):
        raise Failed("does not move any more")
    return "trains on"


def nan_in_matrix(peer: Peer) -> str:
    """One NaN in a matrix's gradient leaves all weights finite, and the matrix trains on."""
    return _survives_nan(peer, "up_proj.weight", "matrices")


def nan_elsewhere(peer: Peer) -> str:
    """One NaN in an embedding's gradient leaves all weights finite, and the embedding trains on."""
    return _survives_nan(peer, "embedding.weight", "embeddings")


def missing(peer: Peer) -> str:
    """A matrix and a norm that have no gradient in the first steps, and later in some, stay then and train else."""
    model = Net()
    optimizer = peer.optimizer(model)
    watched = [(name, model.get_parameter(name)) for name in ("up_proj.weight", "norm.weight")]
    without = {0, 1, 2, MIDDLE, MIDDLE + 1}
    for t in range(END):
        before = [p.detach().clone() for _, p in watched]
        train(model, optimizer, [t], change=partial(_drop, [p for _, p in watched]) if t in without else None)
        for (name, p), was in zip(watched, before, strict=True):
            if t in without and not p.equal(was):
                raise Failed(f"{name} moved without a gradient")
            if t == END - 1 and p in held(optimizer) and p.equal(was):
                raise Failed(f"{name} does not move")
    require_finite(model, "afterwards")
    return "as they should"


def _drop(weights: list[Tensor], t: int) -> None:
    for p in weights:
        p.grad = None
