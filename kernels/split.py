"""A float32 tensor as a pair of bfloat16, in one pass; in PyTorch: ``prokl.pair.Pair.split``.

B: matrices; M: rows; N: columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.pair import Pair

INTERPRETED: tl.constexpr = tl.constexpr(launch.INTERPRETED)


@triton.jit
def nearest(x):
    """Return x (float32, finite) in bfloat16, halves to even; the interpreter's own conversion cuts off instead."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def converted(x, DTYPE: tl.constexpr):
    """Return x as PyTorch converts it: to half precision through float32."""
    if DTYPE == tl.float64:
        return x.to(tl.float64)
    elif DTYPE == tl.bfloat16:
        return nearest(x.to(tl.float32))
    else:
        return x.to(tl.float32).to(DTYPE)


@triton.jit
def halves(x):
    """Return x (float32) as hi, it in bfloat16, and lo, what is left of it in bfloat16."""
    hi = nearest(x)
    return hi, nearest(x - hi.to(tl.float32))


@triton.jit
def split_kernel(x_ptr, both_ptr, COUNT, TILE: tl.constexpr):
    """Split TILE of the COUNT elements of x a program, into both (2, COUNT); they are contiguous."""
    o = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + o, o < COUNT, 0.0)
    hi, lo = halves(x)
    tl.store(both_ptr + o, hi, o < COUNT)
    tl.store(both_ptr + COUNT + o, lo, o < COUNT)


@triton.jit
def split_two_kernel(x_ptr, y_ptr, of_x_ptr, of_y_ptr, COUNT_X, COUNT_Y, TILE: tl.constexpr):
    """Split TILE of the COUNT_X elements of x, or of the COUNT_Y of y, a program, as split_kernel does."""
    i = tl.program_id(0)
    tiles_x = tl.cdiv(COUNT_X, TILE)
    if i < tiles_x:
        o = i.to(tl.int64) * TILE + tl.arange(0, TILE)
        hi, lo = halves(tl.load(x_ptr + o, o < COUNT_X, 0.0))
        tl.store(of_x_ptr + o, hi, o < COUNT_X)
        tl.store(of_x_ptr + COUNT_X + o, lo, o < COUNT_X)
    else:
        o = (i - tiles_x).to(tl.int64) * TILE + tl.arange(0, TILE)
        hi, lo = halves(tl.load(y_ptr + o, o < COUNT_Y, 0.0))
        tl.store(of_y_ptr + o, hi, o < COUNT_Y)
        tl.store(of_y_ptr + COUNT_Y + o, lo, o < COUNT_Y)


TILE = 2048  # eight elements a thread: 16 bytes of each half a store
WARPS = 8


def empty_pair(shape: tuple[int, ...], device: torch.device) -> Pair:
    """Return a contiguous pair of this shape that holds nothing yet."""
    return Pair(torch.empty((2, *shape), dtype=torch.bfloat16, device=device))


def split(x: Tensor) -> Pair:
    """Split float32 into hi + lo of bfloat16.

    Args:
        x: of any shape and strides.

    Returns:
        A contiguous pair of its shape.

    Raises:
        ValueError: another dtype, or a device that kernels do not run on; the message names the bound.
    """
    launch.check(x.device, {"x": (x, tuple(x.shape))}, (torch.float32,))
    x = x.contiguous()
    pair = empty_pair(tuple(x.shape), x.device)
    if x.numel():
        grid = (triton.cdiv(x.numel(), TILE),)
        launch.start(split_kernel, grid, x.device, x, pair.both, x.numel(), TILE=TILE, num_warps=WARPS)
    return pair


def split_two(x: Tensor, y: Tensor) -> tuple[Pair, Pair]:
    """Split two float32 tensors in one launch; arguments and errors as of :func:`split`."""
    launch.check(x.device, {name: (t, tuple(t.shape)) for name, t in (("x", x), ("y", y))}, (torch.float32,))
    x, y = x.contiguous(), y.contiguous()
    pairs = empty_pair(tuple(x.shape), x.device), empty_pair(tuple(y.shape), x.device)
    if x.numel() or y.numel():
        grid = (triton.cdiv(x.numel(), TILE) + triton.cdiv(y.numel(), TILE),)
        arguments = (x, y, pairs[0].both, pairs[1].both, x.numel(), y.numel())
        launch.start(split_two_kernel, grid, x.device, *arguments, TILE=TILE, num_warps=WARPS)
    return pairs
