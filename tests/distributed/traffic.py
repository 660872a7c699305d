"""The bytes that collectives send and receive on one rank."""

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Bytes that this rank sends to others and receives from them, of weights and gradients.

    They are exact where all ranks take part in every collective.
    """

    def __init__(self):
        super().__init__()
        self.sent = self.received = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with the tensors that it has comes here
        if func.namespace == "c10d":
            sent, received = self.moved(func._opname, args)
            self.sent, self.received = self.sent + sent, self.received + received
        return func(*args, **(kwargs or {}))

    def moved(self, name, args):
        others, place = dist.get_world_size() - 1, dist.get_rank()
        if name == "allreduce_":
            return 0, 0  # flags of gradients that are not finite; their way is the backend's
        if name == "_allgather_base_":
            return args[1].nbytes * others, args[0].nbytes - args[1].nbytes
        if name == "broadcast_":
            size = sum(t.nbytes for t in args[0])
            return (size * others, 0) if args[2] == place else (0, size)
        if name == "alltoall_base_":
            into, out, into_rows, out_rows = args[0], args[1], args[3], args[4]
            kept = into_rows[place] * into.itemsize, out_rows[place] * out.itemsize
            return out.nbytes - kept[1], into.nbytes - kept[0]
        raise NotImplementedError(f"c10d::{name} is not counted")
