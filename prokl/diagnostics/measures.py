"""Measures of a batch of weights on their device: products of matrices only, so that nothing waits.

No SVD and no eigendecomposition: on a GPU they factor one matrix after another and wait for each.

Dimension key: B matrices, m short side, n long side, r rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prokl.algorithm.algebra import Algebra
from prokl.algorithm.newton_schulz import gram_factor
from prokl.algorithm.settings import POLAR_VARIANTS, ProHyper
from prokl.algorithm.types import Direction
from prokl.backends.device import on_device
from prokl.backends.io import in_float32
from prokl.diagnostics.weights import Batch

OPS = Algebra(host_readable=False)
"""PyTorch's form, which runs on any device."""

BASES = ("U", "Q_L", "Q_S", "Q_R")

OF_STATE = ("clipped", *(f"orthogonality_{key}" for key in BASES))
"""Figures that need no gradient."""

SQUARINGS = 12
"""Of A A^T in :func:`operator_norm`, whose relative error is at most log(m) / 2^13: 8e-4 at m = 1000."""

TO_ISOMETRY = 12
"""Steps of the convergent cubic Newton-Schulz iteration in :func:`polar_error`. Singular values from 0.03 up reach 1;
what a smaller one lacks changes the error by less than the value itself."""


def of_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ||Q^T Q - I||_F (B,) of every basis, as it is stored, and the count of bounded steps (B,)."""
    figures = {"clipped": state["clipped"]}
    for key in BASES:
        if key in state:
            gram = state[key].mT @ state[key]
            gram.diagonal(dim1=-2, dim2=-1).sub_(1)
            figures[f"orthogonality_{key}"] = torch.linalg.matrix_norm(gram)
    return figures


def operator_norm(A: Tensor) -> Tensor:
    """Return the largest singular value (B,) of A (B,m,n), from below.

    With N = A A^T and W = N^p / tr(N^p) by squaring, tr(N W) is a mean of the eigenvalues of N in which the largest
    weighs most: of m eigenvalues all others together take at most a share log(m) / p of it away.
    """
    N = A @ A.mT
    tiny = torch.finfo(N.dtype).tiny
    W = N / _trace(N).clamp(min=tiny)[:, None, None]
    for _ in range(SQUARINGS):
        W = W @ W
        W = W / _trace(W).clamp(min=tiny)[:, None, None]
    return (N * W).sum(dim=(-2, -1)).clamp(min=0).sqrt()


def polar_error(X: Tensor, U: Tensor) -> Tensor:
    """Return ||X - P||_F / ||P||_F (B,) for Newton-Schulz's output X (B,m,n) and the exact polar factor P.

    P is a partial isometry of rank k = min(m, n - r) whose rows are orthogonal to U (B,n,r). Newton-Schulz leaves
    singular vectors as they are, up to rounding: the distance is that of the singular values from 1, and what rounding
    has put into the range of U, with k < m up to an order of magnitude below 1 in bfloat16. So it is
    ||X||_F^2 - 2 tr (Y Y^T)^1/2 + k with Y = X (I - U U^T). NaN where X is zero.
    """
    k = min(X.shape[-2], U.shape[-2] - U.shape[-1])
    Y = torch.baddbmm(X, X @ U, U.mT, alpha=-1)
    R = Y @ Y.mT
    R = (R + R.mT) / 2
    nuclear = (gram_factor(R, [(1.5, -0.5, 0.0)] * TO_ISOMETRY, OPS) * R).sum(dim=(-2, -1))
    squares = torch.linalg.vector_norm(X, dim=(-2, -1)).square()
    error = ((squares - 2 * nuclear + k).clamp(min=0) / k).sqrt()
    return error.masked_fill(squares == 0, torch.nan)


def of_gradient(batch: Batch) -> dict[str, Tensor]:
    """Measure what takes a gradient, each (B,): captured energy of U, the coming update's sizes and polar error.

    NaN where a gradient is missing or not finite: such a weight will not move. Nor will one whose gradient is zero,
    unless nothing bounds its step: its sizes are 0, its captured energy and polar error NaN.
    """
    if batch.gradient is None:
        return {}
    G, h = batch.gradient, batch.method.hyper(batch.group)
    squares = torch.linalg.vector_norm(G, dim=(-2, -1)).square()
    usable = in_float32(squares) & on_device(batch.has_gradient, torch.bool, G.device)
    figures = {}
    if "U" in batch.state:
        captured, norm = (torch.linalg.vector_norm(t, dim=(-2, -1)) for t in (G @ batch.state["U"], G))
        figures["captured_energy"] = (captured / norm).square()
    figures["whitened_size"] = batch.method.whitened_size(OPS, G, batch.state, h)
    direction = coming_direction(batch, G, usable)
    D = direction.dense()
    figures["update_rms"] = torch.linalg.vector_norm(D, dim=(-2, -1)) / (batch.m * batch.n) ** 0.5
    figures["update_norm"] = operator_norm(D)
    if isinstance(h, ProHyper) and h.variant in POLAR_VARIANTS:
        assert direction.X is not None
        output = direction.X.to(D.dtype)
        figures["polar_error"] = polar_error(output, batch.state["U"])
    if h.clip_threshold is not None:
        still = {"update_rms": 0.0, "update_norm": 0.0, "polar_error": torch.nan}
        figures |= {
            key: figures[key].masked_fill(squares == 0, value) for key, value in still.items() if key in figures
        }
    return {key: value.masked_fill(~usable, torch.nan) for key, value in figures.items()}


def coming_direction(batch: Batch, G: Tensor, usable: Tensor) -> Direction:
    """Return D of the step W <- (1 - lr wd) W - lr D that the gradient G (B,m,n) leads to, in PyTorch.

    The batch's M_Q may be overwritten.
    """
    scales = on_device([shape.aspect_scale for shape in batch.shapes], G.dtype, G.device)
    return batch.method.step(OPS, G, batch.state, batch.method.hyper(batch.group), scales, usable)[0]


def _trace(A: Tensor) -> Tensor:
    return A.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
