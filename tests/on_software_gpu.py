"""Triton's backend over CPU tensors, as over a GPU's, with its launches sent to a launcher: an emulator, a count."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from prokl.backends.select import Backend, _triton_backend, select
from prokl.backends.triton_ops import TritonIO
from prokl.kernels import launch


def watched_io(watch: Callable[[Tensor], None]) -> type[TritonIO]:
    """Return the reading and writing that tells of every tensor that kernels reach by its address alone."""

    class Watched(TritonIO):
        def locate(self, rates):
            super().locate(rates)
            copies = [weight for _, weight in self._copied]
            for t in (*(member.p for member in self.members), *copies, *self._gradients):
                if t is not None:
                    watch(t.detach())

    return Watched


@contextmanager
def on_software_gpu(
    launcher: Callable[..., None],
    watch: Callable[[Tensor], None] = lambda t: None,
    *,
    use_cuda_qr: bool = False,
    host_readable: bool = False,
) -> Iterator[None]:
    """Have optimizers on a CPU step by Triton's kernels, without graphs, unless they ask for another backend.

    Args:
        launcher: called with kernel, grid, device, the kernel's arguments and, by name, its constants.
        watch: called with every weight and gradient before a step.
        use_cuda_qr: whether QR comes from the extension. host_readable: whether a step may read on the host.
    """
    io = watched_io(watch)
    chosen: dict[bool, Backend] = {}

    def here(backend, device, precision=None, dtype=torch.float32):
        if backend in ("torch", "reference"):
            return select(backend, device, precision, dtype)
        balanced = precision == "balanced" and dtype == torch.float32
        made = _triton_backend(use_cuda_qr, host_readable, balanced, False)
        return chosen.setdefault(balanced, replace(made, io=partial(io, pairs=balanced)))

    everywhere = patch.multiple(launch, start=launcher, DEVICES=(*launch.DEVICES, "cpu"))
    with everywhere, patch("prokl.backends.select.select", here):
        yield
