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
from prokl.kernels.operands import add_product, operand_dtypes
from prokl.kernels.triangle import lower_place, store_symmetric


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
    stride_C_b,
    stride_C_m,
    stride_C_n,
    stride_alpha_b,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = alpha A A^T + gamma E E^T + beta C, a lower tile and its mirror image a program.

    A (M, K), E (M, K_OF_E) and D (M, M) are contiguous; C (M, M) has any strides.
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
        acc = add_product(acc, at, at, o_m, o_n, M, M, depth, 0, depth, 1, 0, 1, depth, False, False, OPERAND, TILE_K)
        acc *= tl.where(of_E, gamma, alpha / gamma)
    D_at = D_ptr + i_b * M * M
    store_symmetric(
        acc, 1.0, C_ptr + i_b * stride_C_b, beta, D_at, D_at, 0.0, 0.0, i_m, i_n, M,
        stride_C_m, stride_C_n, True, False, False, False, TILE,
    )  # fmt: skip


def symmetric_products(
    A: Tensor, E: Tensor, *, C: Tensor, alpha: Tensor, gamma: float, beta: float, tile: Tile | None = None
) -> Tensor:
    """Compute D = alpha A A^T + gamma E E^T + beta C in one launch; D equals D^T exactly.

    Strides and dtypes are those of :func:`prokl.kernels.symmetric_product.symmetric_product`.

    Args:
        A: (batch,m,k). E: (batch,m,l), of A's dtype.
        C: symmetric (batch,m,m).
        alpha: (batch,). gamma: above 0. beta: a number.
        tile: block sizes, square, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,m), contiguous, in the dtype of the sum.
    """
    batch, m, k = launch.matrices("A", A)
    l_of_E = launch.matrices("E", E)[2]
    given: launch.Shapes = {"A": (A, (batch, m, k)), "E": (E, (batch, m, l_of_E)), "C": (C, (batch, m, m))}
    launch.check(A.device, given | {"alpha": (alpha, (batch,))})
    assert E.dtype == A.dtype
    dtypes = operand_dtypes((A, E), C)
    A, E = (launch.multiplicable(t.contiguous(), dtypes[0]) for t in (A, E))
    D = torch.empty((batch, m, m), dtype=dtypes[0], device=A.device)
    sizes, numbers, strides = (m, k, l_of_E), (float(gamma), float(beta)), (*C.stride(), alpha.stride(0))
    read = A, E, C
    triangle.start(two_products_kernel, D, read, dtypes, tile, *read, D, alpha, *sizes, *numbers, *strides)
    return D
