"""The processes of one run: alone, or one per device under torchrun, which share every step's batch."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """The place of this process, ``rank`` counted from 0, among ``count``."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """True in the process that prints and writes."""
        return self.rank == 0

    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model as it is to be called: its gradients are the mean over all processes."""
        return DistributedDataParallel(model) if self.count > 1 else model

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over all processes, computed in place; the same in each of them."""
        if self.count > 1:
            distributed.all_reduce(value)
            value /= self.count
        return value

    def any(self, value: bool, device: str) -> bool:
        """Return True if it is true in one of them."""
        if self.count == 1:
            return value
        return self.mean(torch.tensor(float(value), device=device)).item() > 0

    def from_first(self, find: Callable[[], Any]) -> Any:
        """Return what the first process finds."""
        if self.count == 1:
            return find()
        box = [find() if self.first else None]
        distributed.broadcast_object_list(box, src=0)
        return box[0]


ALONE = Processes()


def join(device: str) -> tuple[Processes, str]:
    """Meet the other processes that torchrun started, if it did; return them and the device of this one.

    Args:
        device: "cpu", or "cuda" for the GPU that this process has by its number on the machine.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return ALONE, device
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return Processes(distributed.get_rank(), count), device


def leave() -> None:
    """End what :func:`join` began."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
