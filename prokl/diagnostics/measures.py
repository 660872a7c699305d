"""Measures of a batch of weights on their device: products of matrices only, so that nothing waits.

No SVD and no eigendecomposition: on a GPU they factor one matrix after another and wait for each.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra, Direction
from prokl.algorithm.settings import Hyper
from prokl.backends.device import on_device
from prokl.backends.io import in_float32
from prokl.diagnostics.weights import Batch

OPS = Algebra(host_readable=False)
"""PyTorch's form, which runs on any device."""

BASES = ("U", "Q_L", "Q_R")
"""Q_S is a basis only just after a refresh."""

STATE_FIGURES = ("clipped", "spread_L", *(f"orthogonality_{key}" for key in BASES))
"""Figures that need no gradient."""


def of_batch(batch: Batch) -> dict[str, Tensor]:
    """Return all figures that are one number a matrix, each (B,)."""
    return of_state(batch.state) | of_gradient(batch)


def of_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return, each (B,), ||Q^T Q - I||_F of every basis as stored, L's spread, and the count of bounded steps."""
    lowest, highest = state["inv_sqrt_lambda_L"].aminmax(dim=-1)
    figures = {"clipped": state["clipped"], "spread_L": (highest / lowest).square()}
    for key in BASES:
        if key in state:
            gram = state[key].mT @ state[key]
            gram.diagonal(dim1=-2, dim2=-1).sub_(1)
            figures[f"orthogonality_{key}"] = torch.linalg.matrix_norm(gram)
    return figures


def of_gradient(batch: Batch) -> dict[str, Tensor]:
    """Measure what takes a gradient, each (B,): see :func:`prokl.diagnostics.scalars`.

    NaN where a gradient is missing or not finite: such a weight will not move. Nor will one whose gradient is zero,
    unless nothing bounds its step: its sizes are 0, its shares NaN.
    """
    if batch.gradient is None:
        return {}
    assert batch.weight_rms is not None
    G = batch.gradient
    h = batch.method.hyper(batch.group, batch.m, batch.n, G.dtype, G.device)
    squares = torch.linalg.vector_norm(G, dim=(-2, -1)).square()
    usable = in_float32(squares) & on_device(batch.has_gradient, torch.bool, G.device)
    zero = G == 0
    idle = torch.maximum(*(zero.all(dim=dim).to(G.dtype).mean(dim=-1) for dim in (-1, -2)))
    figures = {"whitened_size": batch.method.whitened_size(OPS, G, batch.state, h), "idle_rows": idle}
    D = coming_direction(batch, G, usable, h).dense()
    norm = torch.linalg.vector_norm(D, dim=(-2, -1))
    figures["update_rms"] = norm / (batch.m * batch.n) ** 0.5
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


def coming_direction(batch: Batch, G: Tensor, usable: Tensor, h: Hyper) -> Direction:
    """Return D of the step W <- (1 - lr wd) W - lr D that the gradient G (B,m,n) leads to, in PyTorch.

    The batch's M_Q may be overwritten.
    """
    scales = on_device([shape.aspect_scale for shape in batch.shapes], G.dtype, G.device)
    return batch.method.step(OPS, G, batch.state, h, scales, usable)[0]
