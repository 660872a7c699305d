"""State of which every rank has its own part, as torch.distributed.checkpoint saves, gathers, loads and reshapes it.

Imported only where work is divided: DTensor's modules take a second.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.serialization import DEFAULT_PROTOCOL

from prokl.distributed.ownership import Part

_aten = torch.ops.aten
_LOCAL = {_aten.detach, _aten.clone, _aten._to_copy, _aten.alias}  # all else that they take goes by name


class PartOfState(DTensor):
    """A state tensor that its owners have: this rank's rows of it, or nothing.

    No placement of DTensor says "all on that rank", so this says where the rows are by itself, in the protocol by which
    torch.distributed.checkpoint asks any tensor. Only what makes it whole needs all ranks of its mesh:
    :meth:`full_tensor` and :meth:`redistribute`.

    Attributes:
        parts: rows along the first dimension with the place of their owner; of a tensor that is not of a stack one
            part (0, 1, owner), which is all of it. stacked: whether its first dimension is what ``parts`` divides.
        mine: the rows (start, stop) that are here, or None.
    """

    parts: tuple[Part, ...]
    stacked: bool
    mine: tuple[int, int] | None
    told: ClassVar[bool] = False  # that a file has one rank's part

    @classmethod
    def make(
        cls,
        local: Tensor,
        parts: tuple[Part, ...],
        mine: tuple[int, int] | None,
        stacked: bool,
        shape: Sequence[int],
        mesh: DeviceMesh,
    ) -> PartOfState:
        """Wrap what is here of a tensor of ``shape``: ``local``, which is empty where nothing is."""
        size = torch.Size(shape)
        meta = TensorMeta(size, torch.empty(size, device="meta").stride(), local.dtype)
        # It wraps an empty tensor: a wrapper has its tensor's offset, by which torch's staging takes it for a storage.
        bare = torch.empty(0, dtype=local.dtype, device=local.device)
        made: PartOfState = cls(bare, DTensorSpec(mesh, (Replicate(),), tensor_meta=meta), requires_grad=False)
        made._local_tensor, made.parts, made.mine, made.stacked = local, parts, mine, stacked
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        owners = sorted({part.owner for part in self.parts})
        here = "nothing" if self.mine is None else f"rows {self.mine[0]} to {self.mine[1]}" if self.stacked else "all"
        return f"PartOfState({tuple(self.shape)}, {self.dtype}, of places {owners}; here: {here})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copy and move what is here; anything else would compute with a part as if it were the whole."""
        it, kwargs = args[0], kwargs or {}
        if func.overloadpacket in _LOCAL and isinstance(it, PartOfState):
            local = func(it._local_tensor, **kwargs)
        elif func.overloadpacket is _aten.new_empty and isinstance(it, PartOfState):  # staging, which fills it
            local = it._local_tensor.new_empty(it._local_tensor.shape, **kwargs)
        else:
            raise NotImplementedError(f"{func} of {it!r}: it is a part; full_tensor(), on all ranks, makes it whole.")
        return cls.make(local, it.parts, it.mine, it.stacked, it.shape, it.device_mesh)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle what is here; tell, once, of torch.save, whose protocol nobody else has as a default."""
        if protocol == DEFAULT_PROTOCOL and self.device_mesh.size() > 1 and not PartOfState.told:
            PartOfState.told = True
            warnings.warn(
                f"torch.save writes rank {dist.get_rank()}'s part of this optimizer's state, which no other rank can "
                "load. Save optimizer.gather_state_dict(), which all ranks must call, or by "
                "torch.distributed.checkpoint. Under a trainer that saves the first rank's state_dict(), leave out "
                "process_group=. If every rank saves a file of its own and loads that one, all is well.",
                stacklevel=4,
            )
        return super().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def full_tensor(self, **_: Any) -> Tensor:
        """Return the whole on every rank; needs all ranks of the mesh."""
        group, home, here = self.device_mesh.get_group(), self.device_mesh.device_type, self._local_tensor.device
        # A count of steps lies on the CPU, from where a GPU's group sends nothing.
        full = torch.empty(self.shape, dtype=self.dtype, device=here if here.type == home else home)
        for part in self.parts:
            rows = full[part.start : part.stop] if self.stacked else full
            if part.owner == dist.get_rank(group):
                rows.copy_(self._local_tensor)
            dist.broadcast(rows.view(-1).view(torch.uint8), group_src=part.owner, group=group)
        return full

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> DTensor:
        """Return the whole as a replicated DTensor, all that anyone asks of it; needs all ranks of the mesh."""
        return DTensor.from_local(self.full_tensor(), self.device_mesh, [Replicate()], run_check=False)

    def to_local(self, **_: Any) -> Tensor:
        """Return the whole where it is here, else room for it: torch copies a whole state into what is local."""
        if self.mine is not None and not self.stacked:
            return self._local_tensor
        room = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.mine is not None:
            self._room = room  # of which loading takes the rows that are here
            room[self.mine[0] : self.mine[1]] = self._local_tensor
        return room

    def loaded(self) -> Tensor:
        """Return what is here after torch has loaded into it."""
        room = getattr(self, "_room", None)
        return self._local_tensor if room is None else room[self.mine[0] : self.mine[1]]  # type: ignore[index]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return what this rank has of a distributed checkpoint."""
        if self.mine is None:
            return []
        offsets = [self.mine[0] if self.stacked and dim == 0 else 0 for dim in range(self.ndim)]
        return [ChunkStorageMetadata(torch.Size(offsets), self._local_tensor.shape)]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        """Return what this rank writes into a distributed checkpoint."""
        properties, items = TensorProperties.create_from_tensor(self._local_tensor), []
        for chunk in self.__create_chunk_list__():
            data = TensorWriteData(chunk, properties, self.shape)
            items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        """Return the only chunk that there can be."""
        return self._local_tensor


torch.serialization.add_safe_globals([PartOfState, Part])
