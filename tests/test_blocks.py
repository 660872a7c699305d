"""Blocks of DTensors: what this package reads off placements is what PyTorch puts on every rank."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from prokl.distributed.ownership import Block, Home, blocks, check_placements, divide, homes, whole_block
from prokl.distributed.weights import LocalWeight

SHAPES = [(12, 8), (5, 8), (1, 3), (7, 6, 5), (4, 3, 3, 2)]
# Every shape on one dimension of ranks; of more dimensions each shape meets one mesh, as they cut one after another.
OTHERS = [(2, 3), (2, 2, 2), (2, 3), (2, 3), (2, 2, 2)]
PLACED = [*((shape, (4,)) for shape in SHAPES), *zip(SHAPES, OTHERS, strict=True)]


def placements_of(mesh_shape, shape):
    """Every combination of replicas and shards of the first two dimensions."""
    options = [Replicate(), Shard(0), Shard(1)]
    found = [()]
    for _ in mesh_shape:
        found = [(*before, option) for before in found for option in options]
    return found


def on_every_rank(mesh_shape, shape, place):
    """Return what ``place``, which makes a DTensor of a numbered tensor, puts on each rank of a mesh."""
    world, found = torch.Size(mesh_shape).numel(), []
    numbered = torch.arange(torch.Size(shape).numel()).view(shape)
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            found.append(place(numbered, init_device_mesh("cpu", mesh_shape)).to_local().clone())
        finally:
            dist.destroy_process_group()
    return numbered, found


@pytest.mark.parametrize("shape, mesh_shape", PLACED, ids=str)
def test_a_block_is_what_pytorch_puts_on_the_rank(shape, mesh_shape):
    for placements in placements_of(mesh_shape, shape):
        mine = blocks(shape, mesh_shape, placements)
        numbered, theirs = on_every_rank(
            mesh_shape, shape, lambda t, mesh, p=placements: distribute_tensor(t, mesh, p, src_data_rank=None)
        )
        for block, local in zip(mine, theirs, strict=True):
            assert torch.equal(numbered[block.within(whole_block(shape))], local), (placements, block)


@pytest.mark.parametrize("count", [8, 12, 5])
def test_fsdp_over_tensor_parallel_cuts_each_shard_once_more(count):
    # A weight of `count` rows: first the shards of tensor parallelism, then FSDP's of each of these.
    found = blocks((count, 3), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    outer = torch.arange(count).chunk(2)
    expected = [(outer[t].chunk(2) + (outer[t][:0],))[d].tolist() for d in range(2) for t in range(2)]
    assert [list(range(*block.bounds[0])) for block in found] == expected
    assert all(block.bounds[1] == (0, 3) for block in found)


def test_blocks_meet_and_lie_within_each_other():
    a, b = Block(((0, 4), (2, 6))), Block(((2, 8), (0, 5)))
    assert a.meet(b) == Block(((2, 4), (2, 5))) and a.meet(b).shape == (2, 3)
    assert a.meet(b).within(a) == (slice(2, 4), slice(0, 3))
    assert 0 in a.meet(Block(((6, 7), (0, 1)))).shape
    assert whole_block(()).shape == ()


def test_a_matrix_has_a_home_where_it_lies_whole():
    everywhere = (Home(0, 1, (0, 1, 2)),)
    assert homes((5, 4), False, blocks((5, 4), (3,), (Replicate(),))) == everywhere
    assert homes((5, 4), False, blocks((5, 4), (3,), (Shard(0),))) == everywhere  # it lies whole on none
    assert homes((1, 4), False, blocks((1, 4), (3,), (Shard(0),))) == (Home(0, 1, (0,)),)  # one row, on the first
    # A stack by its first dimension: each rank has its matrices, the last none of five on four.
    assert homes((5, 4, 3), True, blocks((5, 4, 3), (4,), (Shard(0),))) == (
        Home(0, 2, (0,)),
        Home(2, 4, (1,)),
        Home(4, 5, (2,)),
    )
    replicas = blocks((4, 4, 3), (2, 2), (Replicate(), Shard(0)))
    assert homes((4, 4, 3), True, replicas) == (Home(0, 2, (0, 2)), Home(2, 4, (1, 3)))
    assert homes((4, 4, 3), True, blocks((4, 4, 3), (2,), (Shard(1),))) == (Home(0, 4, (0, 1)),)


def test_a_sum_that_is_still_to_be_made_is_refused():
    from torch.distributed.tensor import Partial

    with pytest.raises(ValueError, match="w is a DTensor with placement .*must be Shard or Replicate: redistribute"):
        check_placements("w", [Shard(0), Partial()])


def test_ranks_with_copies_of_shards_send_equal_amounts():
    """An owner gives each shard to one of its copies, which passes it on to the others."""
    world, node, shape = 64, 8, (64, 64)
    held = list(blocks(shape, (world // node, node), (Replicate(), Shard(0))))
    found = homes(shape, False, held)
    sent = [0] * world
    for parts in divide([(1.0, found)] * world, [0.0] * world):
        team = SimpleNamespace(size=world, index=-1)
        for transfer in LocalWeight(torch.empty(shape, device="meta"), team, parts, held).transfers():
            elements, owner, sender = math.prod(transfer.block.shape), transfer.part.owner, transfer.sender
            sent[owner] += elements * (sender != owner)
            sent[sender] += 2 * elements * (sender != owner) + elements * (len(transfer.holders) - 1)
    assert max(sent) <= 1.05 * sum(sent) / world
