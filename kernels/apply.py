"""Weight decay and step, straight into weights that lie anywhere; in PyTorch: ``prokl.backends.io.TorchIO.apply``.

B: matrices; M: short side; N: long side; R: rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.launch import TRITON_DTYPES, Tile
from prokl.kernels.operands import dot
from prokl.kernels.split import converted
from prokl.kernels.stack import pointers, vectorised

LARGEST: tl.constexpr = tl.constexpr(torch.finfo(torch.bfloat16).max)


@triton.jit
def _decayed(W, D, decay, CAUTIOUS: tl.constexpr):
    return tl.where(D * W >= 0, decay * W, W) if CAUTIOUS else decay * W


@triton.jit
def _stepped(W, D, decay, lr, AFTER: tl.constexpr, CAUTIOUS: tl.constexpr):
    return _decayed(W - lr * D, D, decay, CAUTIOUS) if AFTER else _decayed(W, D, decay, CAUTIOUS) - lr * D


@triton.jit
def _stochastic(x, key, index):
    """Round float32 to what bfloat16 holds, bit for bit as ``prokl.backends.rounding.stochastic``."""
    noise = index.to(tl.uint32) + key.to(tl.uint32)
    noise = (noise ^ (noise >> 16)) * 0x7FEB352D ^ (key >> 32).to(tl.uint32)
    noise = (noise ^ (noise >> 15)) * 0x846CA68B
    up = ((x.to(tl.uint32, bitcast=True) + (noise >> 16)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < LARGEST, up, x)


@triton.jit
def _update(
    at, mask, decay, lr, D, key, master_ptr, index,
    AFTER: tl.constexpr, CAUTIOUS: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_MASTER: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = at.dtype.element_ty
    W = tl.load(at, mask, 0.0).to(D.dtype)
    if HAS_MASTER:
        master = tl.load(master_ptr + index, mask, 0.0)
        W = tl.where(converted(master, DTYPE).to(D.dtype) == W, master.to(D.dtype), W)
    W = _stepped(W, D, decay, lr, AFTER, CAUTIOUS)
    if HAS_KEYS:
        W = _stochastic(W.to(tl.float32), key, index)
    if HAS_MASTER:
        W = W.to(tl.float32)  # first, so that the weight is its master's rounding
        tl.store(master_ptr + index, W, mask)
    tl.store(at, converted(W, DTYPE), mask)


@triton.jit
def _update_rows(
    address, slow, fast, o_s, o_f, SLOW, FAST, decay, lr, D, key, master_ptr, i_s, i_f,
    DTYPE: tl.constexpr, ITEM: tl.constexpr,
    AFTER: tl.constexpr, CAUTIOUS: tl.constexpr, HAS_KEYS: tl.constexpr, HAS_MASTER: tl.constexpr,
):  # fmt: skip
    mask = (o_s[:, None] < SLOW) & (o_f[None, :] < FAST)
    index = o_s[:, None] * i_s + o_f[None, :] * i_f  # of an element in its matrix (M, N)
    if vectorised(address, slow, fast, ITEM):
        at = pointers(address, slow, fast, o_s, o_f, DTYPE, ITEM, True)
        _update(at, mask, decay, lr, D, key, master_ptr, index, AFTER, CAUTIOUS, HAS_KEYS, HAS_MASTER)
    else:
        at = pointers(address, slow, fast, o_s, o_f, DTYPE, ITEM, False)
        _update(at, mask, decay, lr, D, key, master_ptr, index, AFTER, CAUTIOUS, HAS_KEYS, HAS_MASTER)


@triton.jit
def apply_kernel(
    addresses_ptr,
    X_ptr,
    left_ptr,
    right_ptr,
    scale_ptr,
    active_ptr,
    keys_ptr,
    master_ptr,
    lr_ptr,
    weight_decay_ptr,
    M,
    N,
    R,
    stride_X_b,
    stride_X_m,
    stride_X_n,
    stride_left_b,
    stride_left_m,
    stride_left_r,
    stride_right_b,
    stride_right_n,
    stride_right_r,
    stride_scale_b,
    stride_active_b,
    stride_keys_b,
    stride_lr_b,
    stride_weight_decay_b,
    HAS_X: tl.constexpr,
    HAS_LOW_RANK: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_ACTIVE: tl.constexpr,
    AFTER: tl.constexpr,
    CAUTIOUS: tl.constexpr,
    HAS_KEYS: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEM: tl.constexpr,
    OPERAND: tl.constexpr,
    SUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_R: tl.constexpr,
):
    """Do W <- (1 - lr weight_decay) W - lr (scale X + left right^T), a (TILE_M, TILE_N) tile of W a program.

    addresses (3, B), contiguous: address, row stride, column stride of W (M, N) of DTYPE. left (M, R) and right (N, R)
    are multiplied as OPERAND; the rest, with X (M, N), is done in SUM. lr and weight_decay (B).
    AFTER: W is multiplied by 1 - lr weight_decay after the step; CAUTIOUS: only its elements that do not differ in
    sign from D's. keys (B) rounds W at random; master (B, M, N), contiguous, is what W is stepped from where it is its
    rounding.
    """
    i = tl.program_id(0)
    tiles_m = tl.cdiv(M, TILE_M)
    tiles_n = tl.cdiv(N, TILE_N)
    # Programs that read the same columns of X run side by side, so that all but one find them in the L2 cache.
    i_m = i % tiles_m
    i_n = (i // tiles_m) % tiles_n
    i_b = (i // (tiles_m * tiles_n)).to(tl.int64)
    B = tl.num_programs(0) // (tiles_m * tiles_n)  # as in stack_kernel
    address = tl.load(addresses_ptr + i_b)
    stride_m = tl.load(addresses_ptr + B + i_b)
    stride_n = tl.load(addresses_ptr + 2 * B + i_b)
    moves = address != 0
    if HAS_ACTIVE:
        moves = moves & tl.load(active_ptr + i_b * stride_active_b)
    if not moves:
        return

    o_m = i_m.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    o_n = i_n.to(tl.int64) * TILE_N + tl.arange(0, TILE_N)
    m_m = o_m < M
    m_n = o_n < N
    D = tl.zeros((TILE_M, TILE_N), SUM)
    if HAS_X:
        X_at = X_ptr + i_b * stride_X_b + o_m[:, None] * stride_X_m + o_n[None, :] * stride_X_n
        D = tl.load(X_at, m_m[:, None] & m_n[None, :], 0.0).to(SUM)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + i_b * stride_scale_b).to(SUM)
        D = tl.where(scale == 0, tl.zeros_like(D), D * scale)  # X may be infinite there
    if HAS_LOW_RANK:
        o_r = tl.arange(0, TILE_R).to(tl.int64)
        step_r = tl.full((), TILE_R, tl.int64)
        left_at = left_ptr + i_b * stride_left_b + o_m[:, None] * stride_left_m + o_r[None, :] * stride_left_r
        right_at = right_ptr + i_b * stride_right_b + o_r[:, None] * stride_right_r + o_n[None, :] * stride_right_n
        for k in range(0, R, TILE_R):
            m_r = o_r < R - k
            b = tl.load(left_at, m_m[:, None] & m_r[None, :], 0.0).to(OPERAND)
            u = tl.load(right_at, m_r[:, None] & m_n[None, :], 0.0).to(OPERAND)
            D = dot(b, u, D)
            left_at += step_r * stride_left_r
            right_at += step_r * stride_right_r

    lr = tl.load(lr_ptr + i_b * stride_lr_b).to(tl.float64)
    decay = (1.0 - lr * tl.load(weight_decay_ptr + i_b * stride_weight_decay_b).to(tl.float64)).to(SUM)
    lr = lr.to(SUM)
    key = tl.load(keys_ptr + i_b * stride_keys_b) if HAS_KEYS else i_b
    master = master_ptr + i_b * M * N
    if stride_m < stride_n:  # columns are closer together in memory: turn the tile, write them as rows
        _update_rows(
            address, stride_n, stride_m, o_n, o_m, N, M, decay, lr, tl.trans(D), key, master, 1, N,
            DTYPE, ITEM, AFTER, CAUTIOUS, HAS_KEYS, HAS_MASTER,
        )  # fmt: skip
    else:
        _update_rows(
            address, stride_m, stride_n, o_m, o_n, M, N, decay, lr, D, key, master, N, 1,
            DTYPE, ITEM, AFTER, CAUTIOUS, HAS_KEYS, HAS_MASTER,
        )  # fmt: skip


# m, n: block of W; k: how much of r is added at a time, beyond which float32 spills.
# In products of parts, which follow one another, a warp takes 16 rows: eight would compute all of 64 rows twice.
TILES_FP32: tuple[Tile, ...] = (Tile(64, 64, 32, 4, 3), Tile(64, 32, 16, 4, 3))
TILES_HALF: tuple[Tile, ...] = (TILES_FP32[0], Tile(64, 16, 16, 4, 3))
TILES_FP64: tuple[Tile, ...] = (Tile(32, 32, 16, 4, 2),)


def choose_tile(m: int, n: int, r: int, operand: torch.dtype) -> Tile:
    """Return the tile for these sizes (r is 0 without left and right), and the dtype that these are multiplied in.

    Sizes that are no multiples of 16 need an address for every element, and take smaller ones. On an H200 the fastest
    of eight, which spills, was 6 % faster than 64 x 64.
    """
    if operand == torch.float64:
        return TILES_FP64[0]
    tiles = TILES_FP32 if operand == torch.float32 else TILES_HALF
    return tiles[1] if m % 16 or n % 16 or r % 16 else tiles[0]


def apply(
    addresses: Tensor,
    X: Tensor | None,
    *,
    dtype: torch.dtype,
    lr: Tensor,
    weight_decay: Tensor,
    scale: Tensor | None = None,
    left: Tensor | None = None,
    right: Tensor | None = None,
    active: Tensor | None = None,
    decay_after: bool = False,
    cautious_decay: bool = False,
    keys: Tensor | None = None,
    master: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Do W <- (1 - lr weight_decay) W - lr (scale X + left right^T) for the weights that ``addresses`` point at.

    Any strides and sizes from one up, and any of float16, bfloat16, float32 and float64 for each tensor. Arithmetic
    is in float64 where X, left, right, scale or the weights are, else in float32, and W is rounded once. Two half
    factors of one dtype are multiplied as they are.

    Args:
        addresses: (3,B) int64, as :class:`prokl.backends.pointers.PointerTable` holds it: address, row and column
            stride of each weight (m,n). Address 0 is a weight that does not move. Weights do not overlap.
        X: (B,m,n), or None when the direction is left right^T alone.
        dtype: dtype of the weights.
        lr: learning rate, one float32 or float64 element, or one a weight (B,), read on the device.
        weight_decay: likewise.
        scale: (B,); None is 1. Where it is 0, X counts as 0, whatever it holds.
        left: (B,m,r); None is zero.
        right: (B,n,r), with left.
        active: (B,) bool; where False, the weight keeps its bits. None: all step.
        decay_after: whether 1 - lr weight_decay multiplies the stepped weight, and not what the step starts from.
        cautious_decay: whether it multiplies only those elements that do not differ in sign from the direction's.
        keys: (B,) int64; bfloat16 weights are rounded by :func:`prokl.backends.rounding.stochastic` with them.
        master: (B,m,n) float32, contiguous: bfloat16 weights are stepped from it wherever they are its rounding to
            nearest, and it gets the step too. Without keys and master weights are rounded to nearest.
        tile: block sizes, by default from sizes and dtypes.
    """
    assert (left is None) == (right is None) and (X is not None or scale is None)
    if X is None:
        assert left is not None and right is not None
        (count, m, r), n = launch.matrices("left", left), launch.matrices("right", right)[1]
    else:
        count, m, n = launch.matrices("X", X)
        r = 0 if left is None else launch.matrices("left", left)[2]
    device = addresses.device
    launch.check(device, {"addresses": (addresses, (3, count))}, (torch.int64,))
    given = {"X": (X, (count, m, n)), "left": (left, (count, m, r)), "right": (right, (count, n, r))}
    launch.check(device, given | {"scale": (scale, (count,))})
    for name, t in (("lr", lr), ("weight_decay", weight_decay)):
        shape = (1,) * t.ndim if t.numel() == 1 else (count,)
        launch.check(device, {name: (t, shape)}, (torch.float32, torch.float64))
    launch.check(device, {"active": (active, (count,))}, (torch.bool,))
    launch.check(device, {"keys": (keys, (count,))}, (torch.int64,))
    launch.check(device, {"master": (master, (count, m, n))}, (torch.float32,))
    assert dtype in launch.FLOATS and (keys is None or master is None)
    assert (keys is None and master is None) or dtype == torch.bfloat16
    if master is not None and not master.is_contiguous():
        raise ValueError(f"master has strides {master.stride()}; must be contiguous.")
    if count == 0:
        return

    present = [t for t in (X, left, right, scale) if t is not None]
    total = operand = torch.float64 if dtype == torch.float64 else launch.arithmetic_dtype(*present)
    if left is not None and right is not None:
        operand = launch.operand_dtype(total, left, right)
        left, right = (launch.multiplicable(t, total) for t in (left, right))
    tile = tile or choose_tile(m, n, r, operand)
    launch.start(
        apply_kernel,
        (count * triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),),
        device,
        addresses.contiguous(),
        *(lr if t is None else t for t in (X, left, right, scale, active, keys, master)),  # lr: not read as such
        lr,
        weight_decay,
        m,
        n,
        r,
        *(stride for t in (X, left, right) for stride in ((0, 0, 0) if t is None else t.stride())),
        *(0 if t is None else t.stride(0) for t in (scale, active, keys)),
        *(t.expand(count).stride(0) for t in (lr, weight_decay)),
        HAS_X=X is not None,
        HAS_LOW_RANK=left is not None,
        HAS_SCALE=scale is not None,
        HAS_ACTIVE=active is not None,
        AFTER=decay_after,
        CAUTIOUS=cautious_decay,
        HAS_KEYS=keys is not None,
        HAS_MASTER=master is not None,
        DTYPE=TRITON_DTYPES[dtype],
        ITEM=dtype.itemsize,
        OPERAND=TRITON_DTYPES[operand],
        SUM=TRITON_DTYPES[total],
        TILE_M=tile.m,
        TILE_N=tile.n,
        TILE_R=tile.k,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
