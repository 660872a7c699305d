"""Seeded gradient streams and runs of two optimizers side by side."""

from __future__ import annotations

import torch
from torch import Tensor

VARIANTS = ("pro-klshampoo", "smok-hop", "subspace-only", "complement-only")


def gradient_stream(shapes, steps, seed=0, scale=1.0, noise=0.3, signal_rank=3, dtype=torch.float64):
    """``steps`` lists of gradients: a fixed low-rank signal with changing weights, plus noise, drawn in float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*size):
        return torch.randn(*size, generator=g, dtype=torch.float64)

    signals = [(normal(*s[:-1], signal_rank), normal(*s[:-2], signal_rank, s[-1])) for s in shapes]
    return [
        [
            (scale * ((a * normal(signal_rank)) @ b + noise * normal(*s))).to(dtype)
            for (a, b), s in zip(signals, shapes, strict=True)
        ]
        for _ in range(steps)
    ]


def run(cls, stream, *, absent=lambda i, t: False, dtype=torch.float64, observe=None, **kwargs):
    """Step ``cls(parameters, **kwargs)`` over a stream; ``absent(i, t)`` withholds parameter i's gradient."""
    weights = torch.Generator().manual_seed(1)
    parameters = [
        torch.nn.Parameter(torch.randn(g.shape, generator=weights, dtype=torch.float64).to(g.device, dtype))
        for g in stream[0]
    ]
    optimizer = cls(parameters, **kwargs)
    for t, gradients in enumerate(stream):
        for i, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
            p.grad = None if absent(i, t) else g.to(p.dtype)
        optimizer.step()
        if observe is not None:
            observe(t, parameters, optimizer)
    return parameters, optimizer


def relative(a: Tensor, b: Tensor) -> float:
    """Frobenius norm of a - b over that of b; of a where b is zero."""
    a, b = a.detach(), b.detach()
    size = torch.linalg.vector_norm(b.double())
    return float(torch.linalg.vector_norm(a.double() - b.double()) / torch.where(size > 0, size, 1.0))


def state_tensors(state):
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and k not in ("step", "skipped")}


def same_clocks(a, b):
    """Whether two states' ``step``, an int or a stack's tensor, agree."""
    return torch.equal(torch.as_tensor(a["step"]), torch.as_tensor(b["step"]))
