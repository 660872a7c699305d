"""Matrices that lie anywhere as one batch, with parts of their squared norms.

In PyTorch: ``prokl.backends.io.TorchIO.gather``, of which ``prokl.kernels.usable`` is the rest.

B: matrices; M: short side; N: long side.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile
from prokl.kernels.operands import store_result, stored
from prokl.kernels.split import empty_pair
from prokl.pair import Operand


@triton.jit
def vectorised(address, slow, fast, ITEM: tl.constexpr):
    """Return True if rows are contiguous and all start at multiples of 16 bytes; ITEM is the size of an element."""
    return (fast == 1) & ((address | (slow * ITEM)) % 16 == 0)


@triton.jit
def pointers(address, slow, fast, o_s, o_f, DTYPE: tl.constexpr, ITEM: tl.constexpr, VECTORISED: tl.constexpr):
    """Return pointers to elements (o_s, o_f) of a matrix with these strides."""
    if VECTORISED:
        # Divide and multiply: the compiler sees multiples of 16 bytes, in this branch alone, and moves as many at once.
        start = tl.multiple_of((address // 16 * 16).to(tl.pointer_type(DTYPE)), 16)  # it does not see through a cast
        return start + o_s[:, None] * (slow // (16 // ITEM) * (16 // ITEM)) + o_f[None, :]
    else:
        return address.to(tl.pointer_type(DTYPE)) + o_s[:, None] * slow + o_f[None, :] * fast


@triton.jit
def _load(address, slow, fast, o_s, o_f, mask, DTYPE: tl.constexpr, ITEM: tl.constexpr):
    if vectorised(address, slow, fast, ITEM):
        x = tl.load(pointers(address, slow, fast, o_s, o_f, DTYPE, ITEM, True), mask, 0.0)
    else:
        x = tl.load(pointers(address, slow, fast, o_s, o_f, DTYPE, ITEM, False), mask, 0.0)
    return x


@triton.jit
def stack_kernel(
    addresses_ptr,
    G_ptr,
    energy_ptr,
    M,
    N,
    stride_G_lo,
    NEGATE: tl.constexpr,
    LO: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEM: tl.constexpr,
    SUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Copy one (TILE_M, TILE_N) tile of a matrix a program, and the sum of its squares.

    addresses (3, B): address, row stride, column stride; G (B, M, N), a pair where LO, and energy (B, tiles): all
    contiguous.
    """
    i = tl.program_id(0)
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    i_n = i % tiles_n
    i_m = (i // tiles_n) % tiles_m
    i_b = (i // (tiles_n * tiles_m)).to(tl.int64)
    o_m = i_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_n = i_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m < M
    m_n = o_n < N
    B = tl.num_programs(0) // (tiles_m * tiles_n)  # an argument would compile the kernel anew by its divisors
    address = tl.load(addresses_ptr + i_b)
    stride_m = tl.load(addresses_ptr + B + i_b)
    stride_n = tl.load(addresses_ptr + 2 * B + i_b)

    if address == 0:
        x = tl.zeros((TILE_M, TILE_N), DTYPE)
    elif stride_m < stride_n:  # columns are closer together in memory: read them as rows, turn the tile
        x = tl.trans(_load(address, stride_n, stride_m, o_n, o_m, m_n[:, None] & m_m[None, :], DTYPE, ITEM))
    else:
        x = _load(address, stride_m, stride_n, o_m, o_n, m_m[:, None] & m_n[None, :], DTYPE, ITEM)
    y = x.to(SUM)
    if NEGATE:
        y = -y
    o = (i_b * M + o_m[:, None]) * N + o_n[None, :]
    store_result(G_ptr, stride_G_lo, o, y if LO else y.to(DTYPE), m_m[:, None] & m_n[None, :], LO)
    tl.store(energy_ptr + i, tl.sum(y * y))


# m, n: block of one program; there is no depth.
TILES: tuple[Tile, ...] = (Tile(64, 64, 1, 4, 1),)
TILES_FP64: tuple[Tile, ...] = (Tile(32, 64, 1, 4, 1),)


def choose_tile(dtype: torch.dtype) -> Tile:
    """Return the tile for this dtype: rows of at least 128 bytes, whole cache lines, either way round."""
    return TILES_FP64[0] if dtype == torch.float64 else TILES[0]


def stack(
    addresses: Tensor,
    m: int,
    n: int,
    *,
    dtype: torch.dtype,
    negate: bool = False,
    pair: bool = False,
    tile: Tile | None = None,
) -> tuple[Operand, Tensor]:
    """Copy the matrices that ``addresses`` points at into one tensor, with the squared norm of each in parts.

    Any strides and sizes from one up. Squares are added in float64 for float64 matrices, else in float32.

    Args:
        addresses: (3,B) int64, as :class:`prokl.backends.pointers.PointerTable` holds it: address, row and column
            stride of each matrix. Address 0 is an absent matrix, which counts as zero. Strides are not negative.
        m: rows of every matrix.
        n: columns of every matrix.
        dtype: dtype of what the addresses point at.
        negate: whether to change the sign of the matrices.
        pair: whether to split them, which are float32.
        tile: block sizes, by default from the dtype.

    Returns:
        (B,m,n), contiguous, in ``dtype`` or a pair, and (B,k), what each program has added up, in the dtype of the sum:
        not finite where an element is not (or its square overflows).
    """
    assert m >= 1 and n >= 1 and dtype in launch.FLOATS, (m, n, dtype)
    count = addresses.shape[-1]
    launch.check(addresses.device, {"addresses": (addresses, (3, count))}, (torch.int64,))
    tile = tile or choose_tile(dtype)
    tiles = triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n)
    total = torch.float64 if dtype == torch.float64 else torch.float32
    assert not pair or dtype == torch.float32
    G: Operand
    if pair:
        G = empty_pair((count, m, n), addresses.device)
    else:
        G = torch.empty((count, m, n), dtype=dtype, device=addresses.device)
    G_hi, G_lo, _ = stored(G)
    energy = torch.empty((count, tiles), dtype=total, device=addresses.device)
    if count > 0:
        launch.start(
            stack_kernel,
            (count * tiles,),
            addresses.device,
            addresses.contiguous(),
            G_hi,
            energy,
            m,
            n,
            G_lo,
            NEGATE=negate,
            LO=pair,
            DTYPE=TRITON_DTYPES[dtype],
            ITEM=dtype.itemsize,
            SUM=TRITON_DTYPES[total],
            TILE_M=tile.m,
            TILE_N=tile.n,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return G, energy
