"""Check what must hold of a weight and its state after every step, whatever the gradients; see :mod:`tests.fuzz`.

Every check compares a measured figure with a bound, over all steps of a weight at once.

Dimension key: T steps, c matrices of a weight, m short side, n long side, r rank.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from prokl import KLShampoo
from prokl.algorithm.evidence import MOMENTUM_CLIP_FACTOR
from prokl.algorithm.method import Method
from prokl.algorithm.settings import POLAR_VARIANTS, SUBSPACE_VARIANTS, Group, ProHyper
from prokl.algorithm.shapes import MatrixShape, ceiling, compute_dtype
from prokl.engine.bucket import LOOKS
from tests.fuzz_cases import FLOAT32_MAX, Case

NEWTON_SCHULZ = 1.3
"""Most that Newton-Schulz makes of a singular value. In exact arithmetic 1.2024: the default quintic's local maximum
(x^2 = 0.3075), and it maps [0, 1.2024] into itself. Beyond 1.264 it diverges; the rest is half precision's rounding."""

BASES = ("U", "Q_L", "Q_R", "Q_S")
FACTORS = ("L_Q", "S", "R_Q")
REFRESHED = ("Q_L", "Q_S", "Q_R", "M_Q", "L_Q", "R_Q")
ROOTS = ("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_lambda_R", "inv_sqrt_mu")


def snapshot(p: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """Return copies of a weight and its state by key, each (c, ...), the weight oriented."""
    shape = MatrixShape.of(p)
    steps = state.get("step", -1)
    found = {"W": shape.oriented(p.detach().clone()), "step": torch.as_tensor(steps).expand(shape.count).clone()}
    found["skipped"] = state.get("skipped", torch.zeros((), dtype=torch.int64)).expand(shape.count).clone()
    for key, value in state.items():
        if key not in found:
            found[key] = value.clone() if p.ndim == 3 else value.clone()[None]
    return found


class History:
    """A weight's snapshots, the one before the first step included, and its gradients."""

    def __init__(
        self,
        case: Case,
        method: Method,
        group: Group,
        index: int,
        snapshots: Sequence[dict[str, Tensor]],
        grads: Sequence[Tensor | None],
    ) -> None:
        self.case, self.index = case, index
        last = snapshots[-1]
        self.values = {  # state that is not yet there counts as zeros, as which it begins
            key: torch.stack([s.get(key, torch.zeros_like(value)) for s in snapshots]) for key, value in last.items()
        }
        p = torch.empty(case.shapes[index])
        self.shape = MatrixShape.of(p)
        self.given = torch.tensor([g is not None for g in grads])
        oriented = [self.shape.oriented((torch.zeros_like(p) if g is None else g).double()) for g in grads]
        self.energy = torch.stack(oriented).square().sum(dim=(-2, -1))  # (T, c)
        begun = self.values["step"] >= 0
        self.begun, self.stepped = begun[1:], begun[:-1] & self.given[:, None]
        self.arithmetic = compute_dtype(case.dtype, self.values["M_Q"].dtype) if "M_Q" in last else torch.float32
        self.unit = torch.finfo(self.values["M_Q"].dtype).eps / 2 if "M_Q" in last else 0.0
        self.rounding = torch.finfo(self.arithmetic).eps / 2
        self.balanced = case.settings.get("precision") == "balanced" and self.arithmetic == torch.float32
        self.h = method.hyper(group, self.shape.m, self.shape.n, self.arithmetic, p.device)

    def broken(self, check: str, measured: Tensor, bound: Tensor | float, where: Tensor | None = None) -> Iterator[str]:
        """Yield a line on the first place (T, c) at which ``measured`` is not within ``bound``, of those that count."""
        bound = torch.as_tensor(bound, dtype=torch.float64).expand(measured.shape)
        bad = ~(measured <= bound)  # NaN is bad
        if where is not None:
            bad &= where
        if bad.any():
            t, b = bad.nonzero()[0].tolist()
            place = f"weight {self.index} matrix {b} step {t}"
            yield f"{check}: {place}: {float(measured[t, b]):.4g} is beyond {float(bound[t, b]):.4g}"


def check_finite(a: History) -> Iterator[str]:
    for key, value in a.values.items():
        bad = (~value[1:].isfinite()).double()
        yield from a.broken(f"{key} not finite, entries", bad.flatten(2).sum(-1) if bad.ndim > 2 else bad, 0.0)


def check_still(a: History) -> Iterator[str]:
    """A missing gradient changes nothing; a zero one clocks and bases; one that is not finite only clocks and counters.

    But after LOOKS calls in vain a matrix may begin with an earlier gradient. Sums of squares near float32's largest
    and near the arithmetic's smallest may fall on either side.
    """
    none = ~a.given[:, None].expand_as(a.energy)
    zero = (a.energy == 0) & ~none
    whole = torch.where(a.energy.isnan(), math.inf, a.energy).amax(dim=1, keepdim=True).expand_as(a.energy)
    bad, good = (whole > FLOAT32_MAX * (1 + 1e-4)) & ~none, whole < FLOAT32_MAX * (1 - 1e-4)
    usable = good & (a.energy > 100 * torch.finfo(a.arithmetic).tiny) & ~none
    step = a.values["step"][:-1]
    begins, seen = a.begun & (step < 0), (~(none | zero | bad)).cumsum(dim=0) > 0
    late = begins & (step < -LOOKS) & seen & ~none
    for key, value in a.values.items():
        new, old = (bits(v) for v in (value[1:], value[:-1]))
        changed = (new != old).double().flatten(2).sum(-1)
        if key == "step":
            yield from a.broken("step of a missing gradient", changed, 0.0, none)
            yield from a.broken("step of a usable gradient", 1 - changed, 0.0, usable)
        elif key == "skipped":
            yield from a.broken("counted as skipped", changed, 0.0, none | good)
            yield from a.broken("not counted as skipped", 1 - changed, 0.0, bad)
        else:
            # A zero one, too, may be that of a refresh step, in which bases follow what was learnt before.
            still = (none | bad if key in REFRESHED else none | zero | bad) & ~(late & (key != "W"))
            yield from a.broken(f"{key} without a usable gradient, changed entries", changed, 0.0, still)
            if key == "W":
                yield from a.broken("W by the initialising gradient, changed entries", changed, 0.0, begins)


def bits(t: Tensor) -> Tensor:
    """Return (T, c, k) integers that are equal where the bits are."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.reshape(*t.shape[:2], -1).contiguous().view(integers[t.element_size()])


def orthonormality(a: History, columns: int) -> float:
    """Return how far Q^T Q of so many columns may be from I in Frobenius norm.

    Twice the rounding of Q's entries in storage, and Householder's or Cholesky QR's, of which n and columns operations
    make up an entry of the product.
    """
    return 2.02 * a.unit * columns**0.5 + 20 * a.shape.n * a.rounding * columns**0.5


def check_bases(a: History) -> Iterator[str]:
    """Bases are orthonormal; Q_S is one at a refresh that took place."""
    for key in BASES:
        if key not in a.values:
            continue
        Q = a.values[key][1:].double()
        k = Q.shape[-1]
        error = torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(k, dtype=Q.dtype))
        where = a.begun
        if key == "Q_S":
            new, old = (bits(v) for v in (a.values[key][1:], a.values[key][:-1]))
            step, own = a.values["step"][1:], a.case.settings
            first = torch.isin(step, torch.tensor([2, 4, 8] if own["init_eigenvalue"] == "auto" else []))
            tau = own["precondition_frequency"]
            refresh = (step % tau == 0) | first & (step < tau)
            where = a.stepped & refresh & (new != old).any(dim=-1)
        yield from a.broken(f"{key} not orthonormal", error, orthonormality(a, k), where)


def check_factors(a: History) -> Iterator[str]:
    """L, S and R are symmetric and positive semi-definite to rounding.

    Every step rounds a factor in storage (unit roundoff times its norm) and in the product (m or n operations). With
    increments that are positive semi-definite beta2^k ||L_(t-k)|| <= ||L_t||, so that t steps' errors are within t
    times the last norm; S is also turned into a subspace of which it may know less, and so has the largest norm so far.
    Below the smallest normal number rounding is absolute, in E before mu_perp divides it, and that of a pair's parts is
    bfloat16's. Balanced products of A and A^T lack lo lo^T, of 2^-18 of its trace at most, which is up to sqrt(k) times
    the norm.
    """
    dropped = 2**-18 if a.balanced else 0.0
    grown = 1.0
    if "inv_sqrt_mu" in a.values:
        grown = 1 + a.values["inv_sqrt_mu"][1:].double().square().cummax(dim=0).values
    absolute = smallest(a.values["M_Q"].dtype) + smallest(torch.bfloat16 if a.balanced else a.arithmetic) * grown
    for key in FACTORS:
        if key not in a.values:
            continue
        X = a.values[key][1:].double()
        steps = torch.arange(1, len(X) + 1)[:, None]
        largest = X.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(X.dtype).tiny)
        size = torch.linalg.matrix_norm(X / largest) * largest[..., 0, 0]  # squares of 1e-160 vanish
        if key == "S":
            size = size.cummax(dim=0).values
        allowed = steps * ((a.unit + 4 * a.shape.n * a.rounding + dropped * X.shape[-1] ** 0.5) * size)
        allowed += steps * X.shape[-1] * absolute
        yield from a.broken(f"{key} not symmetric", torch.linalg.matrix_norm(X - X.mT), 2 * allowed, a.begun)
        lowest = torch.full_like(size, math.nan)
        sane = X.flatten(2).isfinite().all(-1)
        lowest[sane] = torch.linalg.eigvalsh((X + X.mT)[sane] / 2)[:, 0]
        yield from a.broken(f"{key} not positive semi-definite", -lowest, allowed, a.begun)


def smallest(dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    return limits.smallest_normal * limits.eps


def check_roots(a: History) -> Iterator[str]:
    """Inverse roots are positive, and beyond their ceilings, which follow lambda_0, none grows."""
    for key in ROOTS:
        if key not in a.values:
            continue
        s = a.values[key].double().reshape(len(a.begun) + 1, a.shape.count, -1)
        positive = (s[1:] > 0).all(dim=-1).double()
        yield from a.broken(f"{key} not positive", 1 - positive, 0.0, a.begun)
        limit = torch.full_like(s[:-1, :, 0], ceiling(a.shape.m if key.endswith("_L") else a.shape.n))
        if "lambda_0" in a.values:
            start = a.values["lambda_0"].double()
            limit = limit * torch.where(start[:-1] > 0, start[:-1], start[1:]).rsqrt()
        limit = torch.maximum(limit, s[:-1].amax(dim=-1)) * (1 + a.unit + 8 * a.rounding)
        yield from a.broken(f"{key} above its ceiling", s[1:].amax(dim=-1), limit, a.begun)


def check_counters(a: History) -> Iterator[str]:
    """The count of bounded steps grows; lambda_0 falls, by beta2 a step at most."""
    counted = a.values["clipped"].double()
    yield from a.broken("clipped shrinks by", counted[:-1] - counted[1:], 0.0)
    if "lambda_0" in a.values:
        units = a.values["lambda_0"].double()
        before, after = units[:-1], units[1:]
        lowest = before * a.h.beta2 * (1 - 4 * a.rounding)
        yield from a.broken("lambda_0 grows by", after - before, 0.0, a.stepped)
        yield from a.broken("lambda_0 falls by", before - after, before - lowest, a.stepped)


def longest_direction(a: History) -> float:
    """Return the largest Frobenius norm of a direction.

    The subspace part is cut at 2 weight * gain * sqrt(m r), in coordinates of U, as Smok-Hop's complement at
    2 gain * sqrt(m (n - r)) and KL-Shampoo's direction at 2 gain * sqrt(m n), in coordinates of Q_L and Q_R. Gain is
    what momentum makes of whitened gradients of size 1. Newton-Schulz's part has m singular values, of which rounding
    may fill those that the complement has not. Beside it balanced products take both factors of the subspace part in
    bfloat16, each entry within 2^-9: r orthonormal columns are then off by 2^-9 sqrt(r) at most.
    """
    m, n = a.shape.m, a.shape.n
    if a.case.optimizer is KLShampoo:
        longest = MOMENTUM_CLIP_FACTOR * a.h.gain * (m * n) ** 0.5 * (1 + orthonormality(a, m) + orthonormality(a, n))
        return longest * a.h.direction_scale
    h = a.h
    assert isinstance(h, ProHyper)
    r = a.values["U"].shape[-1]
    total = 0.0
    if h.variant in SUBSPACE_VARIANTS:
        whitened = MOMENTUM_CLIP_FACTOR * h.gain * (m * r) ** 0.5
        halves = (1 + 2**-9) * (1 + 2**-9 * r**0.5) if a.balanced and h.variant in POLAR_VARIANTS else 1.0
        total += h.alpha_kl * whitened * (1 + orthonormality(a, r)) * halves
    if h.variant in POLAR_VARIANTS:
        total += NEWTON_SCHULZ * (a.shape.aspect_scale if h.adjust_lr_fn == "original" else 1.0) * m**0.5
    elif h.variant == "smok-hop":
        total += MOMENTUM_CLIP_FACTOR * h.gain * (m * (n - r)) ** 0.5 * (1 + orthonormality(a, m))
    return total * h.direction_scale


def check_moves(a: History) -> Iterator[str]:
    """A step moves a weight by lr times the direction and the decay at most, and its rounding."""
    lr, decay = float(a.h.lr), float(a.h.lr) * a.h.weight_decay
    W = a.values["W"].double()
    size = torch.linalg.matrix_norm(W)
    most = lr * longest_direction(a) * (1 + 1e-4)
    limits = torch.finfo(a.case.dtype)
    # The step's operations in the arithmetic dtype, and one rounding in the weight's.
    noise = (limits.eps + 8 * a.rounding) * (size[:-1] + most) + smallest(a.case.dtype) * W[0, 0].numel()
    moved = torch.linalg.matrix_norm(W[1:] - W[:-1])
    yield from a.broken("moved", moved, most + decay * size[:-1] + noise)


def check(a: History) -> list[str]:
    """Return a line for every bound that a weight broke, each check's first."""
    found = [*check_finite(a), *check_still(a)]
    if "M_Q" in a.values:
        for one in (check_bases, check_factors, check_roots, check_counters, check_moves):
            found += one(a)
    return found
