"""Batched matrix product with an addend, scales per matrix and the result's energy; in PyTorch: ``torch.baddbmm``.

batch: matrices; M: rows; N: columns; K: depth.
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile


@triton.jit
def scale_of(ptr, value, stride, i_b, PER_MATRIX: tl.constexpr, SUM: tl.constexpr):
    """Return the scale of matrix i_b: its element at ptr, or value (fp64, rounded once) for all of them."""
    if PER_MATRIX:
        return tl.load(ptr + i_b * stride).to(SUM)
    else:
        return tl.full((), value, SUM)


@triton.jit
def product_kernel(
    A_ptr,
    B_ptr,
    C_ptr,
    D_ptr,
    alpha_ptr,
    beta_ptr,
    energy_ptr,
    M,
    N,
    K,
    alpha: tl.float64,
    beta: tl.float64,
    stride_A_b,
    stride_A_m,
    stride_A_k,
    stride_B_b,
    stride_B_k,
    stride_B_n,
    stride_C_b,
    stride_C_m,
    stride_C_n,
    stride_alpha_b,
    stride_beta_b,
    HAS_C: tl.constexpr,
    ENERGY: tl.constexpr,
    ALPHA_PER_MATRIX: tl.constexpr,
    BETA_PER_MATRIX: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Compute D = alpha A B + beta C, (TILE_M, TILE_N) of one matrix a program, and the sum of squares of that tile.

    A (M, K), B (K, N), C (M, N) have any strides and are multiplied as OPERAND; D (M, N) and energy (tiles) are
    contiguous, the latter of SUM.
    """
    i = tl.program_id(0)
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    i_b = (i // (tiles_m * tiles_n)).to(tl.int64)
    i_tile = i % (tiles_m * tiles_n)
    # Column by column within GROUP rows of tiles: programs that run together share rows of A and columns of B in L2.
    first = i_tile // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    i_m = first + i_tile % (GROUP * tiles_n) % rows
    i_n = i_tile % (GROUP * tiles_n) // rows
    o_m = i_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_n = i_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    o_k = tl.arange(0, TILE_K).to(tl.int64)
    m_m = o_m[:, None] < M
    m_n = o_n[None, :] < N

    A_at = A_ptr + i_b * stride_A_b + o_m[:, None] * stride_A_m + o_k[None, :] * stride_A_k
    B_at = B_ptr + i_b * stride_B_b + o_k[:, None] * stride_B_k + o_n[None, :] * stride_B_n
    step = tl.full((), TILE_K, tl.int64)
    acc = tl.zeros((TILE_M, TILE_N), SUM)
    for k in range(0, K, TILE_K):
        m_k = o_k < K - k
        a = tl.load(A_at, m_m & m_k[None, :], 0.0).to(OPERAND)
        b = tl.load(B_at, m_k[:, None] & m_n, 0.0).to(OPERAND)
        acc = tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=SUM)
        A_at += step * stride_A_k
        B_at += step * stride_B_k

    d = acc * scale_of(alpha_ptr, alpha, stride_alpha_b, i_b, ALPHA_PER_MATRIX, SUM)
    if HAS_C:
        C_at = C_ptr + i_b * stride_C_b + o_m[:, None] * stride_C_m + o_n[None, :] * stride_C_n
        c = tl.load(C_at, m_m & m_n, 0.0).to(SUM)
        d += c * scale_of(beta_ptr, beta, stride_beta_b, i_b, BETA_PER_MATRIX, SUM)
    if ENERGY:
        # Outside the matrix d is zero.
        tl.store(energy_ptr + i.to(tl.int64), tl.sum(d * d))
    tl.store(D_ptr + (i_b * M + o_m[:, None]) * N + o_n[None, :], d.to(D_ptr.dtype.element_ty), m_m & m_n)


GROUP = 8  # rows of tiles: with 128 x 128 tiles, 64 programs read 8 + 8 strips instead of 64 + 64
PROGRAMS = 132  # processors of an H100 or H200; fewer programs than this leave some of them idle

# Wide tiles do most arithmetic for a byte read. 128 divides m = 768 and 3072; (128 + 128) x 64 elements in three
# stages are 96 KB in half precision and registers are at most 128, so that two programs fit a processor of sm_90 (one
# where C is added). 128 x 256 spills with a C of float32; in float32, where TF32 parts take registers too, 128 x 128
# spills on sm_80.
UNALIGNED = Tile(64, 64, 32, 8, 3)
IEEE = Tile(64, 64, 16, 8, 3)  # without tensor cores operands are held in registers, too many of them at a depth of 32
TILES_HALF: tuple[Tile, ...] = (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 4), UNALIGNED)
TILES_FP32: tuple[Tile, ...] = (Tile(128, 64, 32, 8, 3), UNALIGNED, IEEE)
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)
TILES: tuple[Tile, ...] = tuple(dict.fromkeys((*TILES_HALF, *TILES_FP32, *TILES_FP64)))


def aligned(*tensors: Tensor) -> bool:
    """Return True if 16 bytes of every tensor can be loaded at once, as far as Triton can tell from its strides.

    Elsewhere every element has an address in registers, which large tiles have none left for.
    """
    return all(
        1 in t.stride()[1:]
        and all(stride % 16 == 0 or stride == 1 for stride in t.stride()[1:])
        and t.stride(0) % 16 == 0
        and t.storage_offset() * t.element_size() % 16 == 0
        for t in tensors
    )


def choose_tile(batch: int, m: int, n: int, operand: torch.dtype, precision: str = "tf32x3", wide: bool = True) -> Tile:
    """Return the largest tile of this dtype that still gives every processor a program, or the smallest.

    Args:
        batch: number of matrices.
        m: rows of the result.
        n: columns of the result.
        operand: dtype that is multiplied.
        precision: of float32 operands.
        wide: whether all that is read and written is :func:`aligned`.
    """
    if operand == torch.float64:
        return TILES_FP64[0]
    if operand == torch.float32 and precision == "ieee":
        return IEEE
    if not wide:
        return UNALIGNED
    tiles = TILES_FP32[:-1] if operand == torch.float32 else TILES_HALF[:-1]
    for tile in tiles:
        if m >= tile.m and n >= tile.n and batch * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n) >= PROGRAMS:
            return tile
    return tiles[-1]


def check_scales(batch: int, device: torch.device, **scales: float | Tensor) -> None:
    """Raise ValueError unless every scale is a number or one number a matrix on this device."""
    for name, scale in scales.items():
        if isinstance(scale, Tensor):
            launch.check(name, scale, (batch,), device, like="A")


def check_out_dtype(out_dtype: torch.dtype) -> None:
    """Raise ValueError unless results can be stored in this dtype."""
    if out_dtype not in launch.FLOATS:
        raise ValueError(f"Invalid out_dtype={out_dtype}: must be one of {launch.FLOATS}.")


def scale_arguments(scale: float | Tensor, dummy: Tensor) -> tuple[Tensor, float, int]:
    """Return pointer (dummy where it is not read), value and stride of a scale, for :func:`scale_of`."""
    return (scale, 0.0, scale.stride(0)) if isinstance(scale, Tensor) else (dummy, float(scale), 0)


@overload
def product(
    A: Tensor,
    B: Tensor,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    energy: Literal[False] = False,
    precision: str = "tf32x3",
    tile: Tile | None = None,
) -> Tensor: ...
@overload
def product(
    A: Tensor,
    B: Tensor,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    energy: Literal[True],
    precision: str = "tf32x3",
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]: ...
def product(
    A: Tensor,
    B: Tensor,
    *,
    C: Tensor | None = None,
    alpha: float | Tensor = 1.0,
    beta: float | Tensor = 1.0,
    out_dtype: torch.dtype | None = None,
    energy: bool = False,
    precision: str = "tf32x3",
    tile: Tile | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute D = alpha A B + beta C for every matrix of a batch.

    Any strides, sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor. The sum is in
    float64 where A, B or C is, else in float32; A and B of one half precision are multiplied as they are where the
    sum is in float32, others in the dtype of the sum.

    Args:
        A: left factors (batch,m,k).
        B: right factors (batch,k,n).
        C: addends (batch,m,n), or None. Not read where ``beta`` is the number 0, as in ``torch.baddbmm``.
        alpha: scale of the product: a number, or (batch,) on the device, one a matrix.
        beta: likewise, scale of C.
        out_dtype: dtype of D; by default the wider of A's and B's.
        energy: whether to return the sums of squares too.
        precision: how float32 operands are multiplied, one of :data:`prokl.kernels.launch.PRECISIONS`.
        tile: block sizes, by default from the sizes and the dtypes.

    Returns:
        D (batch,m,n), contiguous. With ``energy`` also ||D||_F^2 (batch,) in the dtype of the sum, of D before it is
        rounded to ``out_dtype``, summed in a fixed order.

    Raises:
        ValueError: a shape, a dtype, a device or a value; the message names the argument and the bound.
    """
    if A.ndim != 3 or 0 in A.shape[1:]:
        raise ValueError(f"A has shape {tuple(A.shape)}; must be (batch, m, k) with m, k >= 1.")
    if B.ndim != 3 or B.shape[2] == 0:
        raise ValueError(f"B has shape {tuple(B.shape)}; must be (batch, k, n) with n >= 1.")
    batch, m, k = A.shape
    n = B.shape[2]
    out_dtype = out_dtype or torch.promote_types(A.dtype, B.dtype)
    launch.check_precision(precision)
    launch.check("A", A, (batch, m, k), A.device)
    launch.check("B", B, (batch, k, n), A.device, like="A")
    if C is not None:
        launch.check("C", C, (batch, m, n), A.device, like="A")
    check_scales(batch, A.device, alpha=alpha, beta=beta)
    check_out_dtype(out_dtype)
    if not isinstance(beta, Tensor) and beta == 0:
        C = None
    sum_dtype = launch.arithmetic_dtype(A, B) if C is None else launch.arithmetic_dtype(A, B, C)
    operand = launch.operand_dtype(sum_dtype, A, B)
    D = torch.empty((batch, m, n), dtype=out_dtype, device=A.device)
    tile = tile or choose_tile(batch, m, n, operand, precision, aligned(A, B, D, *(() if C is None else (C,))))
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    parts = torch.empty((batch, tiles if energy else 0), dtype=sum_dtype, device=A.device)
    alpha_at, alpha_value, stride_alpha = scale_arguments(alpha, A)
    beta_at, beta_value, stride_beta = scale_arguments(beta, A)
    if batch:
        launch.start(
            product_kernel,
            (batch * tiles,),
            A.device,
            A,
            B,
            A if C is None else C,  # not read
            D,
            alpha_at,
            beta_at,
            parts if energy else D,
            m,
            n,
            k,
            alpha_value,
            beta_value,
            *A.stride(),
            *B.stride(),
            *((0, 0, 0) if C is None else C.stride()),
            stride_alpha,
            stride_beta,
            HAS_C=C is not None,
            ENERGY=energy,
            ALPHA_PER_MATRIX=isinstance(alpha, Tensor),
            BETA_PER_MATRIX=isinstance(beta, Tensor) and C is not None,
            OPERAND=TRITON_DTYPES[operand],
            SUM=TRITON_DTYPES[sum_dtype],
            PRECISION=precision if operand == torch.float32 else "ieee",
            GROUP=GROUP,
            TILE_M=tile.m,
            TILE_N=tile.n,
            TILE_K=tile.k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return (D, parts.sum(1)) if energy else D
