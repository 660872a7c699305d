"""The dictionaries: scalars for loggers, spectra, and the whitened second moment of the gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from prokl.algorithm.settings import RANK, check
from prokl.algorithm.shapes import Rank, effective_rank
from prokl.backends.device import without_autocast
from prokl.diagnostics import measures
from prokl.diagnostics.calibration import gap_bound, over_tail, tail_am_gm
from prokl.diagnostics.weights import Batch, Wrapper, batches, engine_of
from prokl.matrix_optimizer import MatrixOptimizer

FACTORS = {"L": "inv_sqrt_lambda_L", "R": "inv_sqrt_lambda_R", "S": "inv_sqrt_lambda_S", "mu": "inv_sqrt_mu"}
"""Factors, and what an optimizer keeps of each: an inverse square root for every eigenvalue."""


@torch.no_grad()
@without_autocast
def scalars(
    optimizer: MatrixOptimizer | Wrapper,
    model: nn.Module | None = None,
    *,
    rank: Rank = "auto",
    phi: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Return figures of every matrix that has begun, as ``{"prokl/<weight>/<figure>": value}``.

    A matrix begins with its first usable gradient: before the first step the dictionary is empty.

    From the state: ``orthogonality_<basis>``, ||Q^T Q - I||_F of U, Q_L and Q_R as stored; ``spread_L``, the largest
    over the smallest eigenvalue of L; ``clipped``, the steps that ``clip_threshold`` has bounded; ``tail_am_gm_L``,
    ``_R`` and ``gap_bound_L``, ``_R``, AM/GM of the eigenvalues beyond the rank and Claim 1's bound in nats on what
    restricting that factor costs. A factor that has no eigenvalue beyond the rank has no tail.

    From gradients, so call it between ``backward()`` (and ``GradScaler.unscale_``) and ``step()``:
    ``whitened_size``, what ``clip_threshold`` bounds, usually about 1; ``idle_rows``, the share of the gradient's rows
    or columns, whichever is larger, that are exactly zero; ``captured_energy``, ||GU||^2/||G||^2; and of the coming
    update D, without weight decay, ``update_rms``, its root mean square, ``update_to_weight``, lr ||D||/||W||, and
    ``subspace_share``, ||DU||^2/||D||^2. A weight without a gradient lacks them. NaN says that its gradient is not
    finite, or of a share of energy that there is none. ``update_to_weight`` of a weight of zeros is infinite.

    Args:
        optimizer: a ProKLShampoo or KLShampoo on any backend, also in Accelerate's or Lightning's wrapper. The coming
            update is computed in PyTorch.
        model: names the weights of an optimizer that was made without names.
        rank: where the tail of KL-Shampoo's factors begins, "auto" as ProKLShampoo's; Pro-KLShampoo has its own.
        phi: averages of :func:`phi` over minibatches by weight. Pro-KLShampoo keeps no spectrum of R, and gets
            ``tail_am_gm_R`` and ``gap_bound_R`` from these; equal to Claim 1's where L is the full optimum's. A
            singular average, over too few, has no such figures. Each is decomposed, which waits for the device.
            KL-Shampoo has a spectrum of R already, and these change nothing.

    Raises:
        TypeError: another optimizer. ValueError: ``rank`` below 1; ``phi`` of a weight that has not begun, or that
            there is not, or not (n,n); ``model`` without a weight of an optimizer that has no names.
    """
    engine = engine_of(optimizer)
    check("rank", rank, RANK)
    kept, measured, vectors = [], [], []
    for batch in batches(engine, model):
        kept.append(replace(batch, gradient=None, state={}))
        measured.append(measures.of_batch(batch))
        vectors.append(_inverse_square_roots(batch))
    begun = {name for batch in kept for name in batch.names}
    if unknown := sorted((phi or {}).keys() - begun):
        raise ValueError(f"Invalid phi: {unknown[0]!r} is no weight that has begun; there are {sorted(begun)}.")
    host = on_host([*measured, *vectors])
    values: dict[str, dict[str, float]] = {}
    for batch, stacked, roots in zip(kept, host[: len(kept)], host[len(kept) :], strict=True):
        for b, (name, figures) in enumerate(figures_of(batch, stacked).items()):
            spectra = {factor: _descending(roots[factor][b]) for factor in ("L", "R") if factor in roots}
            if batch.rank and phi is not None and name in phi:
                whitened = _spectrum_of(phi[name], name, batch.n)
                spectra |= {} if whitened is None else {"R": whitened}
            begins = batch.rank or (effective_rank(rank, batch.m, batch.n) if rank == "auto" else rank)
            for factor, spectrum in spectra.items():
                if len(spectrum) > begins:
                    other = batch.n if factor == "L" else batch.m
                    figures[f"tail_am_gm_{factor}"] = float(tail_am_gm(spectrum, begins))
                    figures[f"gap_bound_{factor}"] = float(gap_bound(spectrum, begins, other))
            values[name] = figures
    return {f"prokl/{name}/{key}": value for name, figures in values.items() for key, value in figures.items()}


@torch.no_grad()
def eigenvalues(optimizer: MatrixOptimizer | Wrapper, model: nn.Module | None = None) -> dict[str, dict[str, Tensor]]:
    """Return every begun matrix's descending eigenvalues, float64 on the CPU: {weight: {factor: eigenvalues}}.

    Factors are "L", (m,), of the short side, and of the long side "R", (n,), or for Pro-KLShampoo "S", (r,), and
    "mu", (1,), which counts n - r times. ``model`` as in :func:`scalars`.

    Raises:
        TypeError: another optimizer. ValueError: ``model`` as in :func:`scalars`.
    """
    engine = engine_of(optimizer)
    kept, vectors = [], []
    for batch in batches(engine, model, FACTORS.values(), gradients=False):
        kept.append(batch.names)
        vectors.append(_inverse_square_roots(batch))
    return {
        name: {factor: _descending(value[b]) for factor, value in roots.items()}
        for names, roots in zip(kept, on_host(vectors), strict=True)
        for b, name in enumerate(names)
    }


def spectra(
    optimizer: MatrixOptimizer | Wrapper, model: nn.Module | None = None, *, rank: Rank = "auto"
) -> dict[str, dict[str, Tensor]]:
    """Return eigenvalues over their tail mean, as in the paper's Figure 1: {weight: {factor: spectrum}}.

    "L", (m,), and "R", (n,), over the mean of those beyond the rank; for Pro-KLShampoo "L" and, over mu, "S", (r,).
    Descending, float64 on the CPU. Arguments and errors as in :func:`scalars`.
    """
    check("rank", rank, RANK)
    by_weight: dict[str, dict[str, Tensor]] = {}
    for name, factors in eigenvalues(optimizer, model).items():
        if "S" in factors:
            by_weight[name] = {"L": over_tail(factors["L"], len(factors["S"])), "S": factors["S"] / factors["mu"]}
        else:
            begins = effective_rank(rank, len(factors["L"]), len(factors["R"]))
            by_weight[name] = {factor: over_tail(factors[factor], begins) for factor in ("L", "R")}
    return by_weight


@torch.no_grad()
@without_autocast
def phi(optimizer: MatrixOptimizer | Wrapper, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Return Phi_L = G^T L^-1 G (n,n) of every matrix that has a gradient, with the running L: {weight: Phi_L}.

    On the weight's device, in the arithmetic dtype; nothing waits. One minibatch gives a matrix of rank m at most:
    average over several, as the paper does over ten. ``model`` and errors as in :func:`eigenvalues`.
    """
    engine = engine_of(optimizer)
    by_weight: dict[str, Tensor] = {}
    for batch in batches(engine, model, ("Q_L", "inv_sqrt_lambda_L")):
        if batch.gradient is not None:
            Y = batch.state["inv_sqrt_lambda_L"][:, :, None] * (batch.state["Q_L"].mT @ batch.gradient)
            moments = Y.mT @ Y
            by_weight |= {name: moments[b] for b, name in enumerate(batch.names) if batch.has_gradient[b]}
    return by_weight


def figures_of(batch: Batch, stacked: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return what was measured of a batch, on the host by now, for each matrix: {weight: {figure: value}}."""
    return {
        name: {k: float(v[b]) for k, v in stacked.items() if batch.has_gradient[b] or k in measures.STATE_FIGURES}
        for b, name in enumerate(batch.names)
    }


def _spectrum_of(phi: Tensor, name: str, n: int) -> Tensor | None:
    """Return descending eigenvalues on the CPU: NaN for an average that is not finite, None for a singular one."""
    if phi.shape != (n, n):
        raise ValueError(f"Invalid phi: that of {name!r} is {tuple(phi.shape)}, must be ({n}, {n}).")
    if not bool(phi.isfinite().all()):
        return torch.full((n,), torch.nan, dtype=torch.float64, device="cpu")
    values = torch.linalg.eigvalsh(phi).flip(-1).cpu()
    return values if values[-1] > n * torch.finfo(values.dtype).eps * values[0] else None


def _inverse_square_roots(batch: Batch) -> dict[str, Tensor]:
    """Return lambda^-1/2 by factor, each (B, size)."""
    return {
        factor: batch.state[key].reshape(len(batch.names), -1) for factor, key in FACTORS.items() if key in batch.state
    }


def _descending(inverse_square_roots: Tensor) -> Tensor:
    """Return eigenvalues, the largest first."""
    return inverse_square_roots.pow(-2).sort(descending=True).values


def on_host(figures: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Copy to float64 on the CPU, by one copy for each device and dtype."""
    flat: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensors in figures:
        for t in tensors.values():
            flat.setdefault((t.device, t.dtype), []).append(t.reshape(-1))
    host = {key: iter(torch.split(torch.cat(ts).cpu().double(), [len(t) for t in ts])) for key, ts in flat.items()}
    return [
        {name: next(host[t.device, t.dtype]).reshape(t.shape) for name, t in tensors.items()} for tensors in figures
    ]
