"""The most memory that tensors made by some code hold at one time."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Peak(TorchDispatchMode):
    """Bytes that storages made under it hold now, and the most that they have held since :meth:`restart`."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.most = self.start = 0

    def restart(self) -> None:
        self.most = self.start = self.now

    @property
    def extra(self) -> int:
        """The most since :meth:`restart`, beyond what was there then."""
        return self.most - self.start

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self._hold(t.untyped_storage(), known)
        return out

    def _hold(self, storage: torch.UntypedStorage, known: set[int]) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if size and address not in known and address not in self.sizes:
            self.sizes[address] = size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._release, address)

    def _release(self, address: int) -> None:
        self.now -= self.sizes.pop(address, 0)
