"""The bytes that collectives send and receive on one rank."""

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Bytes that this rank sent and received under it, in collectives of one group.

    What a collective moves is counted, not what an algorithm does with it: the parts of an all-gather go to every other
    rank, as does the tensor of a broadcast, from its root. Over all ranks as much is sent as received.

    Args:
        ranks: of the group. place: of this rank in it.
    """

    def __init__(self, ranks: int, place: int) -> None:
        super().__init__()
        self.ranks, self.place = ranks, place
        self.sent = self.received = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with the tensors that it has comes here
        if func.namespace == "c10d":
            sent, received = self._moved(func._opname, args)
            self.sent, self.received = self.sent + sent, self.received + received
        return func(*args, **(kwargs or {}))

    def _moved(self, name: str, args: Any) -> tuple[int, int]:
        """Return the bytes sent and received.

        Raises:
            NotImplementedError: for a collective that is not known here.
        """
        others = self.ranks - 1
        if name == "_allgather_base_":
            return args[1].nbytes * others, args[0].nbytes - args[1].nbytes
        if name == "broadcast_":
            size, root = sum(t.nbytes for t in args[0]), args[2]
            return (size * others, 0) if root == self.place else (0, size)
        if name == "alltoall_base_":
            into, out, into_rows, out_rows = args[0], args[1], args[3], args[4]
            own_into, own_out = into_rows[self.place] * into.itemsize, out_rows[self.place] * out.itemsize
            return out.nbytes - own_out, into.nbytes - own_into
        raise NotImplementedError(f"c10d::{name} is not counted; say in bench/timing/traffic.py what it moves.")
