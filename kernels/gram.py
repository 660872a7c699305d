"""Gram matrix of an X that is normalised before it is formed; in PyTorch: ``Algebra.normalised_gram``.

batch: matrices; M: rows; K: columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch, triangle
from prokl.kernels.launch import Tile
from prokl.kernels.operands import add_product, operand_dtypes
from prokl.kernels.triangle import lower_place, store_symmetric


@triton.jit
def _total(ptr, PARTS):
    """Return the sum of the parts of one matrix's squared norm, which are contiguous."""
    o = tl.arange(0, 512)
    total = tl.zeros((512,), tl.float32)
    for first in range(0, PARTS, 512):
        total += tl.load(ptr + first + o, first + o < PARTS, 0.0)
    return tl.sum(total)


@triton.jit
def _inverse_norm(squares_ptr, PARTS, noise):
    """Return 1 / ||X||, or zero where X is negligible, or its squared norm too small or too large to be multiplied.

    squares: PARTS of the squared norm of X, then of what X was made from, and of that of which this is a residual.
    """
    energy = _total(squares_ptr, PARTS)
    full = _total(squares_ptr + 2 * PARTS, PARTS)
    negligible = _total(squares_ptr + PARTS, PARTS) <= tl.full((), noise, tl.float32) * full
    vanishes = (negligible & (full < float("inf"))) | (energy < SMALLEST) | (energy > LARGEST)
    return tl.where(vanishes, 0.0, 1.0 / tl.sqrt(tl.where(vanishes, 1.0, energy)))


# float32's: below it the square of the inverse norm, which the product takes, overflows.
# Newton-Schulz takes the norm of a row up to twice X's own, as its singular values overshoot 1.
SMALLEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max / 4)


@triton.jit
def gram_kernel(
    X_ptr,
    D_ptr,
    size_ptr,
    squares_ptr,
    square_ptr,
    factor_ptr,
    M,
    K,
    PARTS,
    noise: tl.float64,
    stride_size_b,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = s^2 X X^T, a lower tile and its mirror image a program, where s is what _inverse_norm says.

    X (M, K) and squares (3, PARTS) are contiguous; square and factor take s^2 and size s.
    """
    i_b, i_m, i_n = lower_place(tl.program_id(0), M, TILE)
    o_m = i_m * TILE + tl.arange(0, TILE)
    o_n = i_n * TILE + tl.arange(0, TILE)
    X_at = X_ptr + i_b * M * K
    acc = tl.zeros((TILE, TILE), SUM)
    acc = add_product(acc, X_at, X_at, o_m, o_n, M, M, K, 0, K, 1, 0, 1, K, False, False, OPERAND, TILE_K)
    s = _inverse_norm(squares_ptr + 3 * i_b * PARTS, PARTS, noise)
    if i_m == 0:
        tl.store(square_ptr + i_b, s * s)
        tl.store(factor_ptr + i_b, s * tl.load(size_ptr + i_b * stride_size_b).to(tl.float32))
    acc = tl.where(s == 0, tl.zeros_like(acc), acc)  # which may be infinite there
    D_at = D_ptr + i_b * M * M
    store_symmetric(acc, s * s, D_at, 0.0, D_at, D_at, 0.0, 0.0, i_m, i_n, M, 0, 0, False, False, False, False, TILE)


def normalised_gram(
    X: Tensor, squares: Tensor, noise: float, size: Tensor, *, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute s^2 X X^T in one launch, for s = 1 / ||X||, or 0 where X is negligible or its norm out of range.

    Strides and dtypes are those of :func:`prokl.kernels.symmetric_product.symmetric_product`. An s of 0 takes X away,
    whatever it holds.

    Args:
        X: (batch,m,k).
        squares: (batch,3,parts) float32, parts that add up to squared norms: of X, of what X was made from, and of
            that of which this is a residual.
        noise: ratio of the last two up to which X is negligible; nothing is where the last overflows.
        size: (batch,).
        tile: block sizes, by default from the sizes and the dtypes.

    Returns:
        The product (batch,m,m), in the dtype of X; s^2, and size s (batch,), in float32.
    """
    batch, m, k = launch.matrices("X", X)
    launch.check(X.device, {"X": (X, (batch, m, k)), "size": (size, (batch,))})
    launch.check(X.device, {"squares": (squares, (batch, 3, squares.shape[-1]))}, (torch.float32,))
    X, squares = X.contiguous(), squares.contiguous()
    D = torch.empty((batch, m, m), dtype=X.dtype, device=X.device)
    square, factor = (torch.empty(batch, dtype=torch.float32, device=X.device) for _ in range(2))
    tensors, sizes = (X, D, size, squares, square, factor), (m, k, squares.shape[2])
    triangle.start(gram_kernel, D, (X,), operand_dtypes((X,)), tile, *tensors, *sizes, float(noise), size.stride(0))
    return D, square, factor
