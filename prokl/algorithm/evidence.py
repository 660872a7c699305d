"""Bound the effect of one gradient on state and weight where it surprises, and ignore a gradient of zeros.

The state predicts whitened gradients of size 1: E[g g^T] = L (x) R makes E ||L^-1/2 G R^-1/2||^2 = m n. So the root
mean square of the whitened gradient, by the state before it, says how surprising the gradient is. Pro-KLShampoo takes
the larger one of its subspace's and its complement's. ``clip_threshold`` (kappa) bounds it:

* Beyond kappa the gradient is scaled down to it, c = kappa / size, before momentum and statistics see it: Algorithm 2
  then takes c G for G. The ratios by which a factor's eigenvalues grow in a step have a mean of at most beta2 +
  (1 - beta2) kappa^2, both factors' product at most its square. In units of the gradient that is 3.4
  with beta2 = 0.9, and 2.2 with 0.95. For Pro-KLShampoo it is some 2.3 with 0.9, as mu_perp takes the new lambda_L: it
  follows 1e4 times larger ones in some 12 steps.
  A lone gradient of size kappa among independent ones of size 1 makes the whitened momentum
  sqrt((1 + mu)^2 kappa^2 + mu^4 / (1 - mu^2)) large where sqrt((1 + mu)^2 + mu^4 / (1 - mu^2)) is usual: 3.6 times.
* A direction of a factor in which c G alone is beyond kappa, for example of a row whose gradient was zero until now,
  takes a larger eigenvalue for this step, the one by which it is kappa. Its own eigenvalue follows fast: it may grow by
  (1 - beta2) kappa^2 m in one step.
* The whitened momentum itself is held below MOMENTUM_CLIP_FACTOR times what gradients of size 1 that never turn amount
  to. It is beyond where eigenvalues fall faster than the momentum: with momentum 0.99 and beta2 0.9, after a hundred
  gradients of 1e-4, a step without it was 2,120 usual ones; with momentum 0.9 and beta2 0.5 the fuzz met 1e6 and more.
* A gradient of exactly zero teaches nothing and moves nothing, however many follow. Smaller ones are evidence, and what
  follows them is bounded.
* lambda_0, the unit of an "auto" start's ceilings and damping, falls to UNITS times what gradients are, so that the
  ceilings of a start out of proportion do not keep the eigenvalues from coming down.

Dimension key: B matrices, m short side, k size of the long side's factor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from prokl.algorithm.settings import Hyper
from prokl.algorithm.shapes import widest
from prokl.algorithm.types import State

UNITS = 100.0
"""Largest lambda_0 in units of a gradient's root mean square: below that the ceilings, at least 10 a side, act on it
in the smallest weights."""

MOMENTUM_CLIP_FACTOR = 2.0
"""Bound of the whitened momentum. Gradients of size 1 that hardly turn reach 1; with 1.25 steps were still bounded
where gradients did not differ at all, or without momentum; with 2 none was."""

ALWAYS_MOVE = ("M_Q", "clipped", "lambda_0")
"""State that a gradient without evidence changes, too."""


class Sizes(NamedTuple):
    """Root mean squares of the whitened gradient, by the state before it, in the widest dtype of the device."""

    rows: Tensor
    """Sizes along each direction of the short side's factor (B,m)."""
    columns: Tensor
    """Sizes along each direction of the long side's factor (B,k)."""
    overall: Tensor
    """Size of the whole gradient (B,), by which the decision is made."""


class ClipDecision(NamedTuple):
    """The decision about one gradient a matrix."""

    scale: Tensor
    """c (B,), in [0, 1]: what momentum and statistics multiply the gradient by."""
    rows: Tensor
    """(B,m), in (0, 1]: what the direction multiplies the short side's inverse roots by."""
    columns: Tensor
    """(B,k), likewise of the long side."""
    evident: Tensor
    """(B,) bool: whether the gradient is evidence, as its size is finite; where False, all but ALWAYS_MOVE stays."""
    bounded: Tensor
    """(B,) bool: whether something is below 1."""
    changed: State
    """The new lambda_0 (B,), where ``init_eigenvalue`` is "auto"."""


def clip_decision(sizes: Sizes, rms: Tensor, state: State, h: Hyper) -> ClipDecision:
    """Decide about gradients of these whitened ``sizes`` and root mean square ``rms`` (B,).

    One whose size is not finite counts as zero, with c = 0 and no evidence.
    """
    kappa, size = h.clip_threshold, sizes.overall
    assert kappa is not None
    finite = size.isfinite()
    scale = torch.where(finite & (size > kappa), kappa / size, finite.to(size.dtype))
    rows, columns = (
        1 / ((scale / kappa)[:, None] * t).nan_to_num(0.0).clamp(min=1) for t in (sizes.rows, sizes.columns)
    )
    bounded = (scale < 1) | (rows < 1).any(dim=-1) | (columns < 1).any(dim=-1)
    changed = {}
    if "lambda_0" in state:
        start = state["lambda_0"].to(rms.dtype)
        lower = (h.beta2 * start).maximum(UNITS * rms)
        falls = finite & (rms > 0) & (lower < start)
        changed["lambda_0"] = torch.where(falls, lower, start).to(state["lambda_0"].dtype)
    scale, rows, columns = (t.to(state["inv_sqrt_lambda_L"].dtype) for t in (scale, rows, columns))
    return ClipDecision(scale, rows, columns, finite, bounded, changed)


def clip_factor(norm: Tensor, largest: float) -> Tensor:
    """Return the factors (B,) that bring ``norm`` (B,) down to ``largest`` where it is beyond."""
    return torch.where(norm > largest, largest / norm, 1.0)


def norm(t: Tensor, dim: int | tuple[int, ...] = (-2, -1)) -> Tensor:
    """Return norms, Frobenius ones (B,) by default, in the widest dtype: squares of whitened float32 may overflow."""
    if widest(t.device) == torch.float64:
        return torch.linalg.vector_norm(t, dim=dim, dtype=torch.float64)
    unit = t.abs().amax(dim, keepdim=True).clamp(torch.finfo(t.dtype).tiny, torch.finfo(t.dtype).max)
    return torch.linalg.vector_norm(t / unit, dim=dim) * unit.squeeze(dim)


def in_range(roots: Iterable[Tensor], n: int, dtype: torch.dtype) -> Tensor:
    """Return (B,) bool, True where the eigenvalue means of a new state, and the factors with them, can be stored.

    Inverse roots beyond the dtype's largest number would be infinite. Eigenvalue means whose sum is beyond it may go
    with a factor that is: its entries are at most that large. NaN is neither.

    Args:
        roots: inverse roots (B,k) or (B,), k at most n.
        n: long side.
        dtype: what the state is stored in.
    """
    lowest, highest = torch.cat([t.reshape(len(t), -1) for t in roots], dim=1).aminmax(dim=1)
    largest = torch.finfo(dtype).max
    return (lowest > (n / largest) ** 0.5) & (highest <= largest)
