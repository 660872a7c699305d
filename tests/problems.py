"""Seeded gradient streams and runs of two optimizers side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from prokl import ProKLShampoo
from prokl.backends.select import select

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


def precision_of(backend, device, precision=None):
    """Return the precision that a setting, or None, means to a backend on a device."""
    found, balanced = (select(backend, torch.device(device), p) for p in (precision, "balanced"))
    return "balanced" if found.name != "reference" and found is balanced else "faithful"


FACTOR = 4
"""Largest ratio of a run's error to the reference's in the same dtypes, both against float64: what sums in another
order, or another QR, make of it."""
PAIRS = 2**7
"""Factor by which a balanced product may err more than one of float32. An operand is off by up to 2^-17 of itself, half
a unit in the last place of the smaller half, and not 2^-24; the product lo lo that is left out is as large in norm."""
HALVES = 2.0**-8
"""Error of a direction with both parts, of which a balanced step stores the subspace's factors in bfloat16: 2^-9.2 in
norm each, 2^-8.7 together, if the complement's part is nothing beside it."""
AVERAGES = 2.0**-11
"""Error that comes from the bases, as a balanced step rounds factors of L's and U's averages to bfloat16: no bound but
what was seen here, 2.4e-4, with room. It grows with the conditions, to 3e-3 at 1e4 where the bases drift fast."""


def rounding(cls, variant="pro-klshampoo", **_):
    """Return the error that an optimizer's balanced steps may owe to factors in bfloat16."""
    return (AVERAGES + HALVES * (variant == "pro-klshampoo")) * (cls is ProKLShampoo)


def allowed(precision, own, single, rounding):
    """Return a bound on a run's distance from float64's, from the reference's error in these dtypes and in float32.

    A balanced run may err by ``rounding`` besides.
    """
    if precision == "faithful":
        return FACTOR * own
    return FACTOR * (own + PAIRS * single) + rounding


def ways(cls, stream, **kwargs):
    """Distances moved by float32 weights, in float64, after every step but the first, which moves nothing; lr is 1.

    So the rounding of the weights, which no product has a part in, is nothing beside them.
    """
    found = []

    def observe(t, parameters, optimizer):
        found.append([p.detach().double().clone() for p in parameters])

    run(cls, stream, **{"lr": 1.0, "dtype": torch.float32, "observe": observe, **kwargs})
    return [[p - start for p, start in zip(own, found[0], strict=True)] for own in found[1:]]


def held(found, cls, stream, precision, **kwargs):
    """Say how large the errors of a run are, whose ways these are, at most over what they may be in this precision.

    After every step: the error is the mean over the weights that have moved, relative to the distance.
    """
    return held_each([found], cls, stream, precision, **kwargs)[0]


def largest(values):
    """The largest of some numbers, and NaN if one is, which max() passes over."""
    return float(torch.tensor([*values], dtype=torch.float64).max())


def held_each(runs, cls, stream, precision, **kwargs):
    """:func:`held` of several runs on one stream."""

    def error(one, exact):
        moved = [(p, q) for p, q in zip(one, exact, strict=True) if q.any()]
        return sum(relative(p, q) for p, q in moved) / len(moved)

    own = {"dtype": torch.float32, **kwargs}
    single = {**own, "dtype": torch.float32, "state_dtype": None}
    exact = {**single, "dtype": torch.float64}
    if cls is ProKLShampoo:
        single["ns_dtype"], exact["ns_dtype"] = torch.float32, torch.float64
    exact, own, single = (ways(cls, stream, backend="reference", **given) for given in (exact, own, single))
    *each, own, single = ([error(*both) for both in zip(run, exact, strict=True)] for run in (*runs, own, single))
    may = [allowed(precision, *of_reference, rounding(cls, **kwargs)) for of_reference in zip(own, single, strict=True)]
    most = [largest(e / m for e, m in zip(errors, may, strict=True)) for errors in each]
    for errors, of in zip(each, most, strict=True):
        print(f"{precision}: errors of {min(errors):.1e} to {max(errors):.1e}, {of:.2f} of what they may be")
    return most


def state_tensors(state):
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and k not in ("step", "skipped")}


def same_clocks(a, b):
    """Return whether two states' ``step``, an int or a stack's tensor, agree."""
    return torch.equal(torch.as_tensor(a["step"]), torch.as_tensor(b["step"]))


def assert_runs_agree(found, wanted, tolerance):
    """Hold a run's weights and state to another's; each is parameters and optimizer."""
    for p, q in zip(found[0], wanted[0], strict=True):
        assert relative(p, q) <= tolerance, q.shape
        state, expected = found[1].state[p], wanted[1].state[q]
        assert state.keys() == expected.keys() and same_clocks(state, expected)
        for key, value in state_tensors(expected).items():
            assert relative(state[key], value) <= tolerance, (q.shape, key)
