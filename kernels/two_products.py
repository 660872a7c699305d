"""Sum of two symmetric products, by which L is averaged; in PyTorch: ``Algebra.symmetric_products``.

batch: matrices; M: rows and columns; K, K_OF_E: depths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch, triangle
from prokl.kernels.launch import Tile
from prokl.kernels.operands import add_product, operand_dtypes, stored
from prokl.kernels.triangle import lower_place, store_symmetric
from prokl.pair import Operand, Pair


@triton.jit
def two_products_kernel(
    A_ptr,
    E_ptr,
    C_ptr,
    D_ptr,
    alpha_ptr,
    M,
    K,
    K_OF_E,
    gamma: tl.float64,
    beta: tl.float64,
    stride_A_lo,
    stride_E_lo,
    stride_C_b,
    stride_C_m,
    stride_C_n,
    stride_alpha_b,
    LO: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = alpha A A^T + gamma E E^T + beta C, a lower tile and its mirror image a program.

    A (M, K) and E (M, K_OF_E), both pairs where LO, and D (M, M) are contiguous; C (M, M) has any strides.
    """
    i_b, i_m, i_n = lower_place(tl.program_id(0), M, TILE)
    o_m = i_m * TILE + tl.arange(0, TILE)
    o_n = i_n * TILE + tl.arange(0, TILE)
    alpha = tl.load(alpha_ptr + i_b * stride_alpha_b).to(SUM)
    gamma = tl.full((), gamma, SUM)
    acc = tl.zeros((TILE, TILE), SUM)
    # One loop serves both: of two, each one's addresses would take registers through the other, and spill on sm_80.
    for second in range(2):
        of_E = second > 0
        depth = tl.where(of_E, K_OF_E, K)
        at = tl.where(of_E, E_ptr, A_ptr) + i_b * M * depth
        lo = tl.where(of_E, stride_E_lo, stride_A_lo)
        acc = add_product(acc, at, at, o_m, o_n, M, M, depth, lo, depth, 1, lo, 1, depth, LO, LO, OPERAND, TILE_K)
        acc *= tl.where(of_E, gamma, alpha / gamma)
    D_at = D_ptr + i_b * M * M
    store_symmetric(
        acc, 1.0, C_ptr + i_b * stride_C_b, beta, D_at, D_at, 0.0, 0.0, i_m, i_n, M,
        stride_C_m, stride_C_n, True, False, False, TILE,
    )  # fmt: skip


def symmetric_products(
    A: Operand, E: Operand, *, C: Tensor, alpha: Tensor, gamma: float, beta: float, tile: Tile | None = None
) -> Tensor:
    """Compute D = alpha A A^T + gamma E E^T + beta C in one launch; D equals D^T exactly.

    Strides and dtypes are those of :func:`prokl.kernels.symmetric_product.symmetric_product`.

    Args:
        A: (batch,m,k). E: (batch,m,l), of A's dtype.
        C: symmetric (batch,m,m).
        alpha: (batch,). gamma: above 0. beta: a number.
        tile: block sizes, square, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,m), contiguous, in A's dtype, float32 of a pair.
    """
    batch, m, k = launch.matrices("A", A)
    device, l_of_E = stored(A)[0].device, launch.matrices("E", E)[2]
    given: launch.Shapes = {"A": (A, (batch, m, k)), "E": (E, (batch, m, l_of_E)), "C": (C, (batch, m, m))}
    launch.check(device, given | {"alpha": (alpha, (batch,))})
    A, E = (Pair(t.both.contiguous()) if isinstance(t, Pair) else t.contiguous() for t in (A, E))
    (A_hi, A_lo, paired), (E_hi, E_lo, _) = stored(A), stored(E)
    assert E_hi.dtype == A_hi.dtype
    dtypes = operand_dtypes((A, E), C)
    A_hi, E_hi = (launch.multiplicable(t, dtypes[0]) for t in (A_hi, E_hi))
    D = torch.empty((batch, m, m), dtype=torch.float32 if isinstance(A, Pair) else A.dtype, device=device)
    read = A_hi, E_hi, C
    sizes, strides = (m, k, l_of_E), (A_lo, E_lo, *C.stride(), alpha.stride(0))
    numbers = float(gamma), float(beta)
    triangle.start(two_products_kernel, D, read, dtypes, tile, *read, D, alpha, *sizes, *numbers, *strides, LO=paired)
    return D
