"""The cases of a bucket's I/O: gradients in, weights and state out.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.micro.case import Bind, Case, Draw, Dtypes, Inputs, Sizes, tensors
from prokl.algorithm.algebra import Algebra, Direction
from prokl.algorithm.evidence import ALWAYS_MOVE
from prokl.algorithm.shapes import MatrixShape, compute_dtype
from prokl.backends.io import Layout, Member, Rates, Slot, TorchIO
from prokl.backends.io import usable as judged
from prokl.backends.rounding import Rounding, mode_of
from prokl.backends.triton_ops import TritonIO
from prokl.kernels import apply, stack, store, usable
from prokl.pair import Pair

LR, WEIGHT_DECAY = 1e-3, 0.1
FACTORS = ("X mn polar", "scale .", "left mr", "right nr", "active .?")
"""Factors of a direction, with their sides, and the mask of matrices that step."""
STATE = {"M_Q": "mn", "U": "nr", "L_Q": "mm", "S": "rr", "R_Q": "nn", "Q_L": "mm", "Q_S": "rr", "Q_R": "nn"}
STATE |= {"inv_sqrt_lambda_L": "m", "inv_sqrt_lambda_S": "r", "inv_sqrt_lambda_R": "n"}
STATE |= dict.fromkeys(("inv_sqrt_mu", "clipped", "lambda_0"), ".")
"""Sides of what a step stores."""
KL_STEPPED = "M_Q L_Q R_Q inv_sqrt_lambda_L inv_sqrt_lambda_R clipped lambda_0"
STEPPED = "U L_Q S Q_S inv_sqrt_lambda_L inv_sqrt_lambda_S inv_sqrt_mu clipped lambda_0"
"""Keys of what a step stores, in the order of the state."""


def matrices(factors: str = "", half: bool = False) -> Callable[[Sizes, Dtypes, Draw], Inputs]:
    """Return what draws separate weights, and those factors of a direction that are named; left and right in half."""
    specs = [spec for spec in FACTORS if spec.split()[0] in factors.split()]
    drawn = tensors(*(f"{spec} polar" if half and spec in ("left mr", "right nr") else spec for spec in specs))

    def inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        return {"weights": [draw(s.m, s.n, dtype=d.weights) for _ in range(s.B)], **drawn(s, d, draw)}

    return inputs


def io(i: Inputs, ops: Algebra, mode: str = "plain") -> TorchIO:
    """Return a bucket's I/O on these weights, which are their own gradients; ``mode`` rounds bfloat16 ones."""
    parameters = [torch.nn.Parameter(W, requires_grad=False) for W in i["weights"]]
    for p, W in zip(parameters, i["weights"], strict=True):
        p.grad = W
    W = parameters[0]
    members = [Member(p, "", MatrixShape(1, *W.shape), range(b, b + 1)) for b, p in enumerate(parameters)]
    layout = Layout(len(members), *W.shape, compute_dtype(W.dtype), W.dtype, W.device)
    mode = mode_of({"bf16_weights": mode}, W.dtype)
    rounding = Rounding(mode, ["weight"] * len(members), [member.weight() for member in members])
    found = TorchIO(members, layout, rounding)
    if ops.name == "triton":
        found = TritonIO(members, layout, rounding, getattr(ops, "pairs", False))
    found.locate([Rates(LR, WEIGHT_DECAY, range(len(members)))])
    return found


def stack_case(name: str, negate: bool, **fields: Any) -> Case:
    """Return what gathers gradients, with the other sign or not."""

    def bind(i: Inputs, ops: Algebra) -> Callable[[], Any]:
        own, W = io(i, ops), i["weights"][0]
        skipped = torch.zeros(len(i["weights"]), dtype=torch.int64, device=W.device)

        def run() -> Any:
            G = own.gather(negate, skipped).G
            return G if isinstance(G, Pair) else ops.operand(G.to(W.dtype))

        return run

    return Case(name, matrices(), bind, module=stack, **fields)


def usable_case(name: str, **fields: Any) -> Case:
    """Return what judges a stack of matrices, all of one member, by energies (B,r) in parts."""

    def bind(i: Inputs, ops: Algebra) -> Callable[[], list[Tensor]]:
        energy: Tensor = i["energy"]
        B, device = len(energy), energy.device
        starts = torch.tensor([0, B], device=device)
        owner, skipped = (torch.zeros(k, dtype=torch.int64, device=device) for k in (B, 1))

        def run() -> list[Tensor]:
            if ops.name == "triton":
                found = usable.usable(energy, starts, B, skipped)
            else:
                found = judged(energy.sum(dim=1), owner, skipped)
            return [t.to(energy.dtype) for t in found]

        return run

    return Case(name, tensors("energy r+"), bind, module=usable, **fields)


def store_case(name: str, keys: str, masks: str, **fields: Any) -> Case:
    """Return what stores these keys of the state where ``masks``, a letter each, are all True."""
    specs = [f"{key} {STATE[key]} {'arithmetic' if STATE[key] == '.' else 'momentum'}" for key in keys.split()]
    specs += [f"new_{spec.rpartition(' ')[0]}" for spec in specs] + [f"{mask} .?" for mask in masks]

    def bind(i: Inputs, ops: Algebra) -> Callable[[], list[Tensor]]:
        slots = []
        for key in keys.split():
            to, value, own = i[key], i[f"new_{key}"], masks[:1] if key in ALWAYS_MOVE else masks
            slots.append(Slot(to, value, tuple(i[mask] for mask in own)))

        def run() -> list[Tensor]:
            (TritonIO if ops.name == "triton" else TorchIO).store(slots)
            return [slot.to for slot in slots]

        return run

    return Case(name, tensors(*specs), bind, module=store, **fields)


def _apply(mode: str = "plain", **decay: bool) -> Bind:
    def bind(i: Inputs, ops: Algebra) -> Callable[[], list[Tensor]]:
        own, direction = io(i, ops, mode), Direction(*(i.get(spec.split()[0]) for spec in FACTORS[:4]), **decay)

        def run() -> list[Tensor]:
            own.apply(direction, range(len(i["weights"])), i.get("active"))
            weights: list[Tensor] = i["weights"]
            return weights

        return run

    return bind


def apply_case(
    factors: str, mode: str = "plain", after: bool = False, cautious: bool = False, half: bool = False, **fields: Any
) -> Case:
    """Return W <- (1 - lr weight_decay) W - lr (scale X + left right^T), with those of the factors that are named."""
    name = f"apply {factors}" + " decay after" * after + " cautiously" * cautious
    name += f" {mode}" * (mode != "plain") + " low rank in half" * half
    bind = _apply(mode, decay_after=after, cautious_decay=cautious)
    return Case(name, matrices(factors, half), bind, module=apply, **fields)
