"""Tasks of dtypes and forms: float64, a change of dtype, flat vectors, torch.compile."""

import dis
import traceback

import torch
from torch import Tensor, nn

from bench.tasks.guard import brief
from bench.tasks.peers import Peer
from bench.tasks.problem import (
    END,
    MIDDLE,
    Bare,
    Failed,
    Net,
    backward,
    copies,
    distance,
    held,
    normal,
    require_finite,
    train,
)

TRACED = 3
"""Steps of a compiled function: what differs between steps is traced anew, which takes a minute of some peers."""
NUDGE = 1e-8
"""Relative change of a gradient that float64 resolves to eight digits, and float32 not at all."""


def float64(peer: Peer) -> str:
    """Of float64 weights the step is computed in float64: it answers to a change of 1e-8 in proportion."""
    shape = (24, 16)
    ends = []
    for times in range(3):
        model = Bare(torch.zeros(shape, dtype=torch.float64))
        (weight,) = model.weights
        optimizer = peer.optimizer(model)
        torch.manual_seed(0)
        for t in range(MIDDLE):
            weight.grad = normal(t, *shape, dtype=torch.float64)
            if t == MIDDLE - 1:
                weight.grad += times * NUDGE * normal(MIDDLE, *shape, dtype=torch.float64)
            optimizer.step()
        if weight.dtype != torch.float64:
            raise Failed(f"weight became {weight.dtype}")
        ends.append(weight.detach().clone())
    once, twice = ends[1] - ends[0], ends[2] - ends[0]
    answer = float(twice.norm())
    if not answer > 0:
        raise Failed("does not answer: it is computed in less")
    off = float((twice - 2 * once).norm()) / answer
    if not off <= 0.01:
        raise Failed(f"answers out of proportion, by {off:.0%}: it is computed in less")
    return f"{off:.0e} out of proportion"


def refuses(error: BaseException) -> bool:
    """Tell whether somebody raised this on purpose, with a sentence, rather than an operation that failed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or len(str(error).split()) < 3:
        return False
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    assert at is not None
    return dis.opname[at.tb_frame.f_code.co_code[at.tb_lasti]] == "RAISE_VARARGS"


def dtype_change(peer: Peer) -> str:
    """After model.to(bfloat16) on the way it trains on, or says why not before anything moves.

    Vectors may stand still: a norm's gain of 1 is not moved by less than half of bfloat16's unit.
    """
    model = Net()
    optimizer = peer.optimizer(model)
    train(model, optimizer, range(MIDDLE))
    model.to(torch.bfloat16)
    before = copies(model.parameters())
    try:
        losses = train(model, optimizer, range(MIDDLE, END))
    except Exception as error:  # another package may fail in any way
        moved = not all(map(torch.equal, before, model.parameters()))
        if refuses(error) and not moved:
            return f"refuses: {brief(error)}"
        raise Failed(f"{'after weights moved, ' if moved else ''}{brief(error)}") from None
    require_finite(model, "afterwards")
    mine, named = held(optimizer), zip(model.named_parameters(), before, strict=True)
    still = [name for (name, p), was in named if p in mine and p.ndim > 1 and p.equal(was)]
    if still:
        raise Failed(f"{', '.join(still)} did not move any more")
    if not min(losses[1:]) < losses[0]:
        raise Failed(f"the loss rose from {losses[0]:.2f} to {losses[-1]:.2f}")
    return "trains on"


def _flat(peer: Peer, factor: float) -> tuple[Tensor, Tensor]:
    """Return a flat vector that came into a matrix's place before and after some steps.

    The gradients of its first entry are multiplied.
    """
    shape = (24, 16)
    model = Bare(normal(0, *shape))
    optimizer = peer.optimizer(model)
    vector = nn.Parameter(model.weights[0].detach().flatten().clone())
    before = vector.detach().clone()
    for group in optimizer.param_groups:
        group["params"] = [vector if p is model.weights[0] else p for p in group["params"]]
    torch.manual_seed(0)
    for t in range(MIDDLE):
        vector.grad = normal(t + 1, *shape).flatten()
        vector.grad[0] *= factor
        try:
            optimizer.step()
        except Exception as error:  # another package may fail in any way
            moved = not vector.equal(before)
            if refuses(error) and not moved:
                raise Refused(f"refuses: {brief(error)}") from None
            raise Failed(f"{'after it moved, ' if moved else ''}{brief(error)}") from None
    return before, vector.detach()


class Refused(Exception):
    """A sentence came before anything moved."""


def flat_vectors(peer: Peer) -> str:
    """A flat vector in a matrix's place, as ZeRO puts it there, is refused, or stepped entry by entry as vectors are.

    An algorithm for matrices, which it is none of, would let one entry's gradient move others.
    """
    try:
        start, usual = _flat(peer, 1.0)
        _, changed = _flat(peer, 2.0)
    except Refused as refused:
        return str(refused)
    if usual.equal(start):
        raise Failed("does not move, and nothing is said")
    if not usual.isfinite().all():
        raise Failed("not finite afterwards")
    far = distance([usual[1:]], [changed[1:]], [start[1:]])
    if far > 1e-5:
        raise Failed(f"stepped as a matrix of one row: an entry's gradient moves the others by {far:.1g}")
    return "entry by entry"


def compiled(peer: Peer) -> str:
    """torch.compile of a function that calls step runs, and goes where the plain one goes.

    Some compile functions of their own, which then round otherwise: they may differ by twice as much as they do where
    gradients are rounded to bfloat16.
    """
    torch.compiler.set_stance("default")
    start = copies(Net().parameters())
    plain, rounded, traced = _stepped(peer), _stepped(peer, rounded=True), _stepped(peer, traced=True)
    far, chance = distance(plain, traced, start), distance(plain, rounded, start)
    if not far <= 2 * chance:
        raise Failed(f"{far:.2g} of the way from the plain one")
    return "to the bit" if far == 0 else f"up to {far:.1g} of the way"


def _stepped(peer: Peer, rounded: bool = False, traced: bool = False) -> list[Tensor]:
    """Return the weights after some steps."""
    model = Net()
    optimizer = peer.optimizer(model)

    def step() -> None:
        optimizer.step()

    call = torch.compile(step, backend="eager") if traced else step
    torch.manual_seed(0)
    for t in range(TRACED):
        backward(model, t)
        for p in model.parameters() if rounded else ():
            assert p.grad is not None
            p.grad.copy_(p.grad.bfloat16())
        call()
    require_finite(model, "afterwards")
    return copies(model.parameters())
