"""Write a step's new state where the state is kept: several tensors in one launch.

In PyTorch: ``prokl.backends.io.TorchIO.store``.

B: matrices; E: elements of one of a slot's, of which there are any number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from prokl.kernels import launch
from prokl.kernels.split import converted


@triton.jit
def store_kernel(
    to_ptr,
    value_ptr,
    mask_ptr,
    E,
    stride_to_b,
    stride_value_b,
    MOST,
    COUNT: tl.constexpr,
    SLOTS: tl.constexpr,
    MASKS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy elements [i TILE, (i + 1) TILE) of one matrix of every slot a program; MOST is the largest E.

    Only if all of the COUNT masks (B,) that the bits of MASKS[s] name are True. Tuples have an entry for each of SLOTS,
    mask_ptr one for each mask.
    """
    i = tl.program_id(0)
    tiles = tl.cdiv(MOST, TILE)
    i_b = (i // tiles).to(tl.int64)
    first = (i % tiles).to(tl.int64) * TILE
    o_e = first + tl.arange(0, TILE)
    held = 0
    for k in tl.static_range(COUNT):
        held += tl.load(mask_ptr[k] + i_b).to(tl.int32) << k
    for s in tl.static_range(SLOTS):
        if (first < E[s]) & ((held & MASKS[s]) == MASKS[s]):
            x = tl.load(value_ptr[s] + i_b * stride_value_b[s] + o_e, o_e < E[s])
            if x.dtype != to_ptr[s].dtype.element_ty:
                x = converted(x, to_ptr[s].dtype.element_ty)
            tl.store(to_ptr[s] + i_b * stride_to_b[s] + o_e, x, o_e < E[s])


TILE = 4096  # sixteen elements a thread
WARPS = 8


def _contiguous_matrices(t: Tensor) -> bool:
    """Return True if each t[b] is contiguous, whatever lies between them."""
    expected = 1
    for size, stride in zip(t.shape[:0:-1], t.stride()[:0:-1], strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def store(slots: Sequence[tuple[Tensor, Tensor, Sequence[Tensor]]]) -> None:
    """Copy values to where they are kept, in the dtype that is kept, matrix by matrix where masks say so.

    All in one launch, whose programs run in any order: nothing that is written may be read for another element.

    Args:
        slots: (to, value, masks) of B matrices each. ``to`` and ``value`` (B,...) have one shape, and any of float16,
            bfloat16, float32 and float64; matrices of ``to`` are contiguous, and may lie apart. Where one of the
            ``masks`` (B,) bool, contiguous, is False a matrix stays as it is; without masks all are copied.
    """
    masks: dict[int, Tensor] = {}
    destinations: list[Tensor] = []
    values: list[Tensor] = []
    bits: list[int] = []
    for i, (to, value, masks_of_slot) in enumerate(slots):
        first = slots[0][0]
        if not _contiguous_matrices(to):
            raise ValueError(f"slots[{i}].to has strides {to.stride()}; each of its matrices must be contiguous.")
        shape = (len(first), *to.shape[1:])
        launch.check(first.device, {f"slots[{i}].to": (to, shape), f"slots[{i}].value": (value, shape)})
        for k, mask in enumerate(masks_of_slot):
            launch.check(first.device, {f"slots[{i}].masks[{k}]": (mask, shape[:1])}, (torch.bool,))
            masks[id(mask)] = mask.contiguous()
        if to.numel():
            destinations.append(to)
            values.append(value if _contiguous_matrices(value) else value.contiguous())
            bits.append(sum({1 << [*masks].index(id(mask)) for mask in masks_of_slot}))
    if not destinations:
        return
    B, device = len(destinations[0]), destinations[0].device
    sizes = tuple(to.numel() // B for to in destinations)
    launch.start(
        store_kernel,
        (B * triton.cdiv(max(sizes), TILE),),
        device,
        tuple(destinations),
        tuple(values),
        tuple(masks.values() or destinations[:1]),  # which is not read: there is no empty tuple of pointers
        sizes,
        tuple(t.stride(0) for t in destinations),
        tuple(t.stride(0) for t in values),
        max(sizes),
        COUNT=len(masks),
        SLOTS=len(sizes),
        MASKS=tuple(bits),
        TILE=TILE,
        num_warps=WARPS,
    )
