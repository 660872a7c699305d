"""Bound the effect of one gradient on state and weight where it surprises, and update the eigenvalues by it.

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

All that Pro-KLShampoo needs follows from two sums of squares of A = G~' Q_S, G~' = Q_L^T G U, and from the energies of
rows beside the subspace: sums over rows, ell_i = sum_j A_ij^2 a_S,j^2, and means over columns, rho_j = sum_i a_L,i^2
A_ij^2 / m. The whitened sizes are a_L^2 ell and a_S^2 rho; the eigenvalue EMAs take c^2 ell and c^2 rho. Squares of
float32 may leave its range, so that they are in float64; beside the matrix products that costs little.

Dimension key: B matrices, m short side, n long side, r rank, k size of the long side's factor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prokl.algorithm.settings import Hyper
from prokl.algorithm.shapes import State, ceiling, ceiling_factor, widest

UNITS = 100.0
"""Largest lambda_0 in units of a gradient's root mean square: below that the ceilings, at least 10 a side, act on it
in the smallest weights."""

MOMENTUM_CLIP_FACTOR = 2.0
"""Bound of the whitened momentum. Gradients of size 1 that hardly turn reach 1; with 1.25 steps were still bounded
where gradients did not differ at all, or without momentum; with 2 none was."""

ALWAYS_MOVE = ("M_Q", "clipped", "lambda_0")
"""State that a gradient without evidence changes, too."""

Sizes = tuple[Tensor, Tensor, Tensor]
"""Root mean squares of the whitened gradient, by the state before it, in the widest dtype of the device: along each
direction of the short side's factor (B,m) and of the long side's (B,k), and the overall one (B,) that decides."""


class Roots(NamedTuple):
    """Inverse square roots of the eigenvalues that Pro-KLShampoo keeps."""

    L: Tensor
    """Those of lambda_L (B,m)."""
    S: Tensor
    """Those of lambda_S (B,r)."""
    mu: Tensor
    """Inverse root of mu_perp (B,)."""


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


class Admitted(NamedTuple):
    """The bound on one gradient a matrix, and the eigenvalues after it."""

    scale: Tensor | None
    """c (B,), in [0, 1]: what momentum and statistics multiply the gradient by; None for 1 without a bound."""
    used: Roots
    """Damped inverse roots before the step, as the direction takes them."""
    s: Roots
    """Undamped, clipped inverse roots after it: the new state."""
    c_L: Tensor
    """c times the new damped inverse roots of L (B,m), for the factors' EMAs and the tracking."""
    c_S: Tensor
    """c times those of S (B,r)."""
    weight_L: Tensor
    """(1 - beta2) / n (c a_mu)^2 (B,), the weight of G_perp G_perp^T in L."""
    changed: State
    """The new lambda_0 (B,), where ``init_eigenvalue`` is "auto"; empty without a bound."""
    bounded: Tensor | None
    """(B,) bool: whether the gradient, or a direction of a factor, was bounded; None without a bound."""
    evident: Tensor | None
    """(B,) bool: where False, all but ALWAYS_MOVE of the state stays, as the gradient's size is not finite or a new
    inverse root leaves what the state holds. None for True."""


def norm(t: Tensor, dim: int | tuple[int, ...] = (-2, -1)) -> Tensor:
    """Return norms, Frobenius ones (B,) by default, in the widest dtype: squares of whitened float32 may overflow."""
    if widest(t.device) == torch.float64:
        return torch.linalg.vector_norm(t, dim=dim, dtype=torch.float64)
    unit = t.abs().amax(dim, keepdim=True).clamp(torch.finfo(t.dtype).tiny, torch.finfo(t.dtype).max)
    return torch.linalg.vector_norm(t / unit, dim=dim) * unit.squeeze(dim)


def clip_decision(sizes: Sizes, rms: Tensor, state: State, h: Hyper) -> ClipDecision:
    """Decide about gradients of these whitened sizes and root mean square ``rms`` (B,).

    One whose size is not finite counts as zero, with c = 0 and no evidence.
    """
    rows, columns, size = sizes
    kappa, finite, dtype = h.clip_threshold, size.isfinite(), state["inv_sqrt_lambda_L"].dtype
    assert kappa is not None
    scale = torch.where(finite & (size > kappa), kappa / size, finite.to(size.dtype))
    share = (scale / kappa)[:, None]
    rows = 1 / (share * rows).nan_to_num(0.0).clamp(min=1)
    columns = 1 / (share * columns).nan_to_num(0.0).clamp(min=1)
    bounded = (scale < 1) | (rows < 1).any(dim=-1) | (columns < 1).any(dim=-1)
    changed = {}
    if "lambda_0" in state:
        start = state["lambda_0"].to(rms.dtype)
        lower = (h.beta2 * start).maximum(UNITS * rms)
        falls = finite & (rms > 0) & (lower < start)
        changed["lambda_0"] = torch.where(falls, lower, start).to(state["lambda_0"].dtype)
    return ClipDecision(scale.to(dtype), rows.to(dtype), columns.to(dtype), finite, bounded, changed)


def in_range(roots: tuple[Tensor, ...] | list[Tensor], n: int, dtype: torch.dtype) -> Tensor:
    """Return (B,) bool, True where the eigenvalue means of a new state, and the factors with them, can be stored.

    Inverse roots beyond the dtype's largest number would be infinite. Eigenvalue means whose sum is beyond it may go
    with a factor that is: its entries are at most that large. NaN is neither.

    Args:
        roots: inverse roots (B,k), k at most n.
        n: long side.
        dtype: what the state is stored in.
    """
    lowest, highest = torch.cat(roots, dim=1).aminmax(dim=1)
    largest = torch.finfo(dtype).max
    return (lowest > (n / largest) ** 0.5) & (highest <= largest)


def clipped_ema(s: Tensor, statistic: Tensor, beta2: float, limit: Tensor) -> Tensor:
    """Return min((beta2 lambda + (1-beta2) statistic)^-1/2, limit) with lambda = s^-2, broadcast to the shape of s."""
    return torch.minimum((beta2 * s**-2 + (1 - beta2) * statistic).rsqrt(), limit)


def damped(s: Tensor, eps: Tensor) -> Tensor:
    """Return 1/(sqrt(lambda) + eps) from s = lambda^-1/2 (Algorithm 2, (P2)), eps broadcast to the shape of s."""
    return s / (1 + eps * s)


def roots_of(state: State, h: Hyper) -> tuple[Roots, Roots, Tensor, Tensor]:
    """Return a state's inverse roots, undamped and damped, eps (B,) and the ceilings' factor (B,), in the widest dtype.

    eps and the factor are in units of lambda_0, where the start is an "auto" one.
    """
    wide = widest(state["inv_sqrt_mu"].device)
    s_L, s_S = state["inv_sqrt_lambda_L"].to(wide), state["inv_sqrt_lambda_S"].to(wide)
    s, factor = Roots(s_L, s_S, state["inv_sqrt_mu"].to(wide)), ceiling_factor(state).to(wide)
    eps = h.eps / factor
    return s, Roots(damped(s_L, eps[:, None]), damped(s_S, eps[:, None]), damped(s.mu, eps)), eps, factor


def measured(A: Tensor, e_res: Tensor, a: Roots, n: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Sizes]:
    """Measure a gradient by the damped inverse roots ``a``, in their dtype; A and e_res as :func:`admit` takes them.

    Returns:
        ell (B,m), rho (B,r) and e_res (B,m); the units (B,) that these are in, 1 in float64; and the sizes.
    """
    (m, r), wide, unit = A.shape[-2:], a.mu.dtype, torch.ones_like(a.mu)
    e_res = e_res.sum(dim=1) if e_res.ndim == 3 else e_res
    A, e_res, both = A.to(wide), e_res.to(wide), a.L * a.mu[:, None]
    if wide == torch.float64:
        squares = A.square()
        ell = (squares * a.S.square()[:, None, :]).sum(dim=-1)
        rho = squares.mul_(a.L.square()[:, :, None]).mean(dim=-2)
        beside = both.square() * e_res
    else:  # it has no room for A^2: the largest whitened entry is the unit where it is beyond 1
        inside = (A * a.L[:, :, None] * a.S[:, None, :]).abs().amax(dim=(-2, -1))
        unit = torch.maximum(inside, (both * e_res.sqrt()).amax(dim=-1)).clamp(1, torch.finfo(wide).max)
        A, e_res = A / unit[:, None, None], e_res / unit[:, None] / unit[:, None]
        ell = (A * a.S[:, None, :]).square().sum(dim=-1)
        rho = (A * a.L[:, :, None]).square().mean(dim=-2)
        beside = (both * e_res.sqrt()).square()
    inside = a.L.square() * ell
    overall = torch.maximum(inside.sum(dim=-1) / (m * r), beside.sum(dim=-1) / (m * (n - r))).sqrt()
    rows, columns = ((inside + beside) / n).sqrt(), (a.S.square() * rho).sqrt()
    return ell, rho, e_res, unit, (rows * unit[:, None], columns * unit[:, None], overall * unit)


def admit(A: Tensor, G_tilde: Tensor, e_res: Tensor, state: State, h: Hyper, n: int) -> Admitted:
    """Decide about a gradient and average the eigenvalues; see :meth:`prokl.algorithm.algebra.Algebra.admit`."""
    dtype, (m, r) = A.dtype, A.shape[-2:]
    s, a, eps, factor = roots_of(state, h)
    energy = e_res.to(eps.dtype).flatten(1).sum(dim=-1)
    ell, rho, e_res, unit, sizes = measured(A, e_res, a, n)
    scale = bounded = evident = None
    changed: State = {}
    used_L, used_S, c = a.L, a.S, torch.ones_like(eps)
    if h.clip_threshold is not None:
        rms = (norm(G_tilde).square() + energy).div(m * n).sqrt()
        scale, rows, columns, evident, bounded, changed = clip_decision(sizes, rms, state, h)
        used_L, used_S, c = a.L * rows, a.S * columns, scale.to(eps.dtype)
    used = Roots(used_L.to(dtype), used_S.to(dtype), a.mu.to(dtype))

    # The EMAs with clip (Algorithm 2 (3)) by c G: lambda_L and lambda_S, then mu_perp with the new lambda_L.
    weight = (c * unit)[:, None]
    ell, rho, e_res = ell * weight * weight, rho * weight * weight, e_res * weight * weight
    most_L, most_S = ceiling(m) * factor, ceiling(n) * factor
    s_L = clipped_ema(s.L, (ell + a.mu[:, None] ** 2 * e_res) / n, h.beta2, most_L[:, None])
    s_S = clipped_ema(s.S, rho, h.beta2, most_S[:, None])
    a_L, a_S = damped(s_L, eps[:, None]), damped(s_S, eps[:, None])
    s_mu = clipped_ema(s.mu, (e_res * a_L**2).sum(dim=-1) / (m * (n - r)), h.beta2, most_S)
    if evident is not None:
        evident = evident & in_range((s_L, s_S, s_mu[:, None]), n, state["M_Q"].dtype)
    new = Roots(s_L.to(dtype), s_S.to(dtype), s_mu.to(dtype))
    c_L, c_S = (c[:, None] * a_L).to(dtype), (c[:, None] * a_S).to(dtype)
    weight_L = ((1 - h.beta2) / n * (damped(s_mu, eps) * c).square()).to(dtype)
    return Admitted(scale, used, new, c_L, c_S, weight_L, changed, bounded, evident)
