"""Round stepped weights to bfloat16: to nearest, up or down at random, or to nearest beside a float32 master.

bfloat16 has 8 bits. Rounded to nearest, a step below half a unit of the last place changes nothing, however many such
steps follow each other. At random, up with a probability that is the distance from the lower neighbour, the mean of
what is written is the stepped weight. A master has the bits that the weight lacks.

Weights of any other dtype are rounded to nearest. Dimension key: B matrices, m short side, n long side, c rows of one
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from prokl.algorithm.names import unwrapped_name

MASTER = "master"
"""Key of the masters in a weight's state: (m,n) float32, oriented; not in ``state_dtype``."""
LARGEST = torch.finfo(torch.bfloat16).max
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, as int64: its multiples fill both halves of a key evenly."""


def mode_of(group: dict[str, Any], dtype: torch.dtype) -> str:
    """Return the group's ``bf16_weights`` for weights that have this dtype."""
    return group["bf16_weights"] if dtype == torch.bfloat16 else "plain"


def noise(keys: Tensor, m: int, n: int) -> Tensor:
    """Return (c,m,n) int32 in [0, 2^16): a hash of a matrix's key (c,) int64 and of the number of the element in it.

    The hash is lowbias32 by C. Wellons without its last shift, and with half of the key in its middle; products wrap.
    """
    low, high = keys.to(torch.int32)[:, None, None], (keys >> 32).to(torch.int32)[:, None, None]
    row, column = (torch.arange(k, dtype=torch.int32, device=keys.device) for k in (m, n))
    x = (row[:, None] * n + column) + low
    x ^= (x >> 16).bitwise_and_(0xFFFF)  # int32 shifts its sign in
    x *= 0x7FEB352D
    x ^= high
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x846CA68B - 2**32
    return x.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def stochastic(x: Tensor, keys: Tensor) -> Tensor:
    """Round (c,m,n) float32 to bfloat16 at random: up with the probability of its distance from the lower neighbour.

    What bfloat16 holds stays as it is. From the largest bfloat16 on, and where it is not a number, x is rounded to
    nearest: no finite number becomes infinite by chance. The same key of ``keys`` (c,), int64, rounds alike on every
    device, in PyTorch and in the kernel.
    """
    up = ((x.view(torch.int32) + noise(keys, *x.shape[1:])) & -0x10000).view(torch.float32)
    return torch.where(x.abs() < LARGEST, up, x).to(torch.bfloat16)


class Rounding:
    """The weights of a bucket as a step reads and writes them: masters, or the weights themselves, and the rounding.

    Args:
        mode: "stochastic", "master" or "plain".
        names: one of each matrix; without wrappers and with its number of steps it is the key of its random numbers,
            whatever else is stepped beside it.
        weights: the bucket's, oriented (c,m,n) each; masters start as they are. Where a master is not its weight's
            rounding the weight counts, so one that lies nowhere so far may be zeros.

    Attributes:
        keys: (B,) int64 on the weights' device, of the next step; None unless stochastic.
        master: (B,m,n) float32; None unless there are masters.
    """

    def __init__(self, mode: str, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self.mode = mode
        self.keys: Tensor | None = None
        self.master: Tensor | None = None
        if mode == "stochastic":
            hashes = [blake2b(unwrapped_name(name).encode(), digest_size=8).digest() for name in names]
            self._start = torch.tensor([int.from_bytes(h, "little", signed=True) for h in hashes], device="cpu")
            self.keys = torch.zeros_like(self._start, device=weights[0].device)
        elif mode == "master":
            self.master = torch.cat([W.float() for W in weights])

    def locate(self, steps: Sequence[int]) -> None:
        """Write the keys of the next step, ``steps`` (B) of each matrix being behind it; nothing waits for the device.

        There have to be keys. They stay the same tensor, so that a CUDA graph follows them.
        """
        assert self.keys is not None
        now = self._start + torch.tensor(steps, device="cpu") * GOLDEN
        cuda = self.keys.is_cuda
        self.keys.copy_(now.pin_memory() if cuda else now, non_blocking=cuda)

    def exact(self, W: Tensor, rows: slice) -> Tensor:
        """Return a member's weight W (c,m,n) as a step begins from it: as its master has it, in the master's dtype.

        Wherever W is not the master's bfloat16, it has been changed by hand or by loading a model, and W counts.
        """
        if self.master is None:
            return W
        master = self.master[rows]
        return torch.where(master.to(torch.bfloat16) == W, master, W)

    def write(self, W: Tensor, new: Tensor, rows: slice, moves: Tensor | None) -> None:
        """Round ``new`` (c,m,n) into W and its master, where the matrices move: (c,) bool, or None for all."""
        if self.mode != "plain":
            new = new.float()  # first, so that W is its master's rounding
        out = new.to(W.dtype) if self.keys is None else stochastic(new, self.keys[rows])
        for held, value in ((W, out), *([(self.master[rows], new)] if self.master is not None else [])):
            held.copy_(value if moves is None else torch.where(moves[:, None, None], value, held))
