"""Figures of every matrix: scalars for loggers, spectra, and the whitened second moment of the gradients.

They are measured for a batch of matrices on their device, by products of matrices only, so that nothing waits: an SVD
or an eigendecomposition on a GPU factors one matrix after another and waits for each.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prokl.algorithm.algebra import Algebra
from prokl.algorithm.settings import RANK, check
from prokl.algorithm.shapes import Rank, effective_rank
from prokl.backends.device import on_device, without_autocast
from prokl.backends.io import in_float32
from prokl.diagnostics.weights import Batch, batches, lent, unwrapped
from prokl.engine.engine import Engine
from prokl.matrix_optimizer import MatrixOptimizer

OPS = Algebra(host_readable=False)
"""PyTorch's form, which runs on any device."""
BASES = ("U", "Q_L", "Q_R")
"""Q_S is a basis only just after a refresh."""
FACTORS = {"L": "inv_sqrt_lambda_L", "R": "inv_sqrt_lambda_R", "S": "inv_sqrt_lambda_S", "mu": "inv_sqrt_mu"}
"""Factors, and the state that holds an inverse square root of every eigenvalue of each."""


@torch.no_grad()
@without_autocast
def scalars(optimizer: MatrixOptimizer | Any, model: nn.Module | None = None) -> dict[str, float]:
    """Return figures of every matrix that has begun, as ``{"prokl/<weight>/<figure>": value}``.

    A matrix begins with its first usable gradient: before the first step the dictionary is empty.

    From the state: ``orthogonality_<basis>``, ||Q^T Q - I||_F of U, Q_L and Q_R as stored; ``spread_L``, the largest
    over the smallest eigenvalue of L; ``clipped``, the steps that ``clip_threshold`` has bounded.

    From gradients, so call it between ``backward()`` (and ``GradScaler.unscale_``) and ``step()``:
    ``whitened_size``, which ``clip_threshold`` bounds, usually about 1; ``idle_rows``, the share of the gradient's rows
    or columns, whichever is larger, that are exactly zero; ``captured_energy``, ||GU||^2/||G||^2; and of the coming
    update D, without weight decay, ``update_rms``, its root mean square, ``update_to_weight``, lr ||D||/||W||, and
    ``subspace_share``, ||DU||^2/||D||^2. A weight without a gradient lacks them. NaN says that its gradient is not
    finite, or of a share of energy that there is none. ``update_to_weight`` of a weight of zeros is infinite.

    Args:
        optimizer: a ProKLShampoo or KLShampoo on any backend, also in Accelerate's or Lightning's wrapper. The coming
            update is computed in PyTorch.
        model: names the weights of an optimizer that was made without names.

    Raises:
        TypeError: another optimizer. ValueError: ``model`` without a weight of an optimizer that has no names.
    """
    with lent(unwrapped(optimizer)) as engine:
        figures, _ = figures_of(engine, model, {})
    return {f"prokl/{name}/{key}": value for name, own in figures.items() for key, value in own.items()}


@torch.no_grad()
@without_autocast
def spectra(
    optimizer: MatrixOptimizer | Any, model: nn.Module | None = None, *, rank: Rank = "auto"
) -> dict[str, dict[str, Tensor]]:
    """Return eigenvalues over their tail mean, as in the paper's Figure 1: {weight: {factor: spectrum}}.

    "L", (m,), and "R", (n,), over the mean of those beyond the rank, or the smallest where none is; for Pro-KLShampoo
    "L" and, over mu, "S", (r,). Descending, float64 on the CPU.

    Args:
        optimizer: as in :func:`scalars`.
        model: likewise.
        rank: where the tail of KL-Shampoo's factors begins, "auto" as ProKLShampoo's; Pro-KLShampoo has its own.

    Raises:
        TypeError: another optimizer. ValueError: ``model`` as in :func:`scalars`, or ``rank`` below 1.
    """
    check("rank", rank, RANK)
    names, roots = [], []
    for batch in batches(unwrapped(optimizer).engine, model):
        names.append(batch.names)
        kept = {factor: batch.state[key] for factor, key in FACTORS.items() if key in batch.state}
        roots.append({factor: value.reshape(len(batch.names), -1) for factor, value in kept.items()})
    by_weight: dict[str, dict[str, Tensor]] = {}
    for of_names, of_batch in zip(names, on_host(roots), strict=True):
        values = {factor: value.pow(-2).sort(dim=-1, descending=True).values for factor, value in of_batch.items()}
        m, n = (values[factor].shape[-1] if factor in values else 0 for factor in "LR")
        begins = values["S"].shape[-1] if "S" in values else effective_rank(rank, m, n)
        mu = values.pop("mu", None)
        for factor, value in values.items():
            tail = value[:, min(begins, value.shape[-1] - 1) :].mean(dim=-1, keepdim=True)
            values[factor] = value / (mu if mu is not None and factor == "S" else tail)
        by_weight |= {name: {factor: v[b] for factor, v in values.items()} for b, name in enumerate(of_names)}
    return by_weight


@torch.no_grad()
@without_autocast
def phi(optimizer: MatrixOptimizer | Any, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Return Phi_L = G^T L^-1 G (n,n) of every matrix that has a gradient, with the running L: {weight: Phi_L}.

    On the weight's device, in the arithmetic dtype; nothing waits. One minibatch gives a matrix of rank m at most:
    average over several, as the paper does over ten. Arguments and errors as in :func:`scalars`.
    """
    by_weight: dict[str, Tensor] = {}
    with lent(unwrapped(optimizer)) as engine:
        for batch in batches(engine, model):
            if batch.gradient is not None:
                Y = batch.state["inv_sqrt_lambda_L"][:, :, None] * (batch.state["Q_L"].mT @ batch.gradient)
                moments = Y.mT @ Y
                by_weight |= {name: moments[b] for b, name in enumerate(batch.names) if batch.has_gradient[b]}
    return by_weight


def figures_of(
    engine: Engine, model: nn.Module | None, counts: dict[str, Tensor]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Return the figures of :func:`scalars`, {weight: {figure: value}}, and ``counts``, by one wait for the device."""
    kept, measured = [], []
    for batch in batches(engine, model):
        kept.append((batch.names, batch.has_gradient))
        measured += [_of_state(batch.state), _of_gradient(batch)]
    *host, counted = on_host([*measured, counts])
    figures: dict[str, dict[str, float]] = {}
    for (names, has_gradient), of_state, of_gradient in zip(kept, host[::2], host[1::2], strict=True):
        for b, name in enumerate(names):
            own = of_state | (of_gradient if has_gradient[b] else {})
            figures[name] = {key: float(values[b]) for key, values in own.items()}
    return figures, {name: float(count) for name, count in counted.items()}


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


def _of_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the figures that need no gradient, each (B,)."""
    lowest, highest = state["inv_sqrt_lambda_L"].aminmax(dim=-1)
    figures = {"clipped": state["clipped"], "spread_L": (highest / lowest).square()}
    for key in BASES:
        if key in state:
            gram = state[key].mT @ state[key]
            gram.diagonal(dim1=-2, dim2=-1).sub_(1)
            figures[f"orthogonality_{key}"] = torch.linalg.matrix_norm(gram)
    return figures


def _of_gradient(batch: Batch) -> dict[str, Tensor]:
    """Return the figures that need a gradient, each (B,); the batch's M_Q may be overwritten.

    NaN where a gradient is missing or not finite: such a weight will not move. Nor will one whose gradient is zero,
    unless nothing bounds its step: its sizes are 0, its shares NaN.
    """
    if batch.gradient is None:
        return {}
    assert batch.weight_rms is not None
    G, method = batch.gradient, batch.method
    m, n = G.shape[-2:]
    h = method.hyper(batch.group, m, n, G.dtype, G.device)
    squares = torch.linalg.vector_norm(G, dim=(-2, -1)).square()
    usable = in_float32(squares) & on_device(batch.has_gradient, torch.bool, G.device)
    zero = G == 0
    idle = torch.maximum(*(zero.all(dim=dim).to(G.dtype).mean(dim=-1) for dim in (-1, -2)))
    figures = {"whitened_size": method.whitened_size(OPS, G, batch.state, h), "idle_rows": idle}
    scales = on_device([shape.aspect_scale for shape in batch.shapes], G.dtype, G.device)
    D = method.step(OPS, G, batch.state, h, scales, usable)[0].dense()
    figures["update_rms"] = torch.linalg.vector_norm(D, dim=(-2, -1)) / (m * n) ** 0.5
    if "U" in batch.state:
        U = batch.state["U"]
        for figure, whole in (("captured_energy", G), ("subspace_share", D)):
            part, size = (torch.linalg.vector_norm(t, dim=(-2, -1)) for t in (whole @ U.to(whole.dtype), whole))
            figures[figure] = (part / size).square()
    if h.clip_threshold is not None:
        still = {"update_rms": 0.0, "subspace_share": torch.nan}
        figures |= {
            key: figures[key].masked_fill(squares == 0, value) for key, value in still.items() if key in figures
        }
    ratio = figures["update_rms"] * batch.group["lr"] / batch.weight_rms
    figures["update_to_weight"] = ratio.masked_fill(batch.weight_rms == 0, torch.inf)
    return {key: value.masked_fill(~usable, torch.nan) for key, value in figures.items()}
