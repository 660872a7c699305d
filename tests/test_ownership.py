"""Where weights lie is what PyTorch puts on every rank; owners are balanced, the same whoever asks, stable later."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.io import Member
from prokl.distributed.division import matrix_cost
from prokl.distributed.ownership import Home, Part, blocks, divide, homes, whole_block
from prokl.distributed.state import own_state
from prokl.distributed.team import Team
from prokl.distributed.weights import LocalWeight
from prokl.engine.weights import weights_of
from tests.inputs import KL

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


def anywhere(count, cost, world):
    """A weight of ``count`` matrices, of which every rank has a copy."""
    return cost, (Home(0, count, tuple(range(world))),)


def loads_of(weights, parts, world):
    loads = [0.0] * world
    for (cost, _), own in zip(weights, parts, strict=True):
        for part in own:
            loads[part.owner] += cost * (part.stop - part.start)
    return loads


def test_small_cases_by_hand():
    assert divide([anywhere(1, c, 2) for c in (5.0, 3.0, 3.0, 2.0)], [0.0, 0.0]) == [
        (Part(0, 1, 0),),
        (Part(0, 1, 1),),
        (Part(0, 1, 1),),
        (Part(0, 1, 0),),
    ]
    assert divide([anywhere(5, 1.0, 2)], [0.0, 0.0]) == [(Part(0, 2, 1), Part(2, 5, 0))]  # the longer run first
    assert divide([anywhere(2, 1.0, 3)], [4.0, 0.0, 0.0]) == [(Part(0, 1, 1), Part(1, 2, 2))]
    assert divide([], [1.0]) == []


@pytest.mark.parametrize("seed", range(40))
def test_matrices_are_dealt_out_within_grahams_bound(seed):
    rng = random.Random(seed)
    world, largest = rng.randint(1, 9), rng.choice([1, 20])
    drawn = [(rng.randint(1, largest), rng.choice([1.0, 2.5, 7.0, 11.0])) for _ in range(rng.randint(1, 40))]
    weights = [anywhere(count, cost, world) for count, cost in drawn]
    loads = [0.0] * world
    parts = divide(weights, loads)
    assert loads == pytest.approx(loads_of(weights, parts, world))
    for (count, _), own in zip(drawn, parts, strict=True):
        assert [part.start for part in own] == [0, *(part.stop for part in own[:-1])] and own[-1].stop == count
        assert len(own) == min(count, world) == len({part.owner for part in own})
        sizes = [part.stop - part.start for part in own]
        assert max(sizes) - min(sizes) <= 1
    # Two lower bounds of the best largest load: the mean, and the longest job.
    best = max(sum(loads) / world, max(cost for _, cost in drawn))
    # Graham (1969): (4/3 - 1/(3 world)) of the best, which may be up to a job beyond these lower bounds.
    assert largest > 1 or max(loads) <= best + max(cost for _, cost in drawn) * (1 - 1 / world)


@pytest.mark.parametrize(
    "weights, each",
    [([anywhere(1, 3.0, 4)] * 10 + [anywhere(1, 1.0, 4)] * 6, [9.0] * 4), ([anywhere(4, 1.0, 16)] * 8, [2.0] * 16)],
    ids=["equal shapes", "small stacks"],
)
def test_what_can_be_dealt_evenly_is(weights, each):
    loads = [0.0] * len(each)
    divide(weights, loads)
    assert loads == each


def test_what_lies_whole_somewhere_is_owned_there():
    homes = (Home(0, 3, (0, 2)), Home(3, 6, (1, 3)))
    weights = [(1.0, homes)] * 4
    parts = divide(weights, [0.0] * 4)
    assert all({part.owner for part in own} == {0, 1, 2, 3} for own in parts)
    assert all(part.owner in ((0, 2), (1, 3))[part.start >= 3] for own in parts for part in own)
    assert loads_of(weights, parts, 4) == [6.0] * 4


def test_a_few_ranks_that_hold_everything_get_help():
    """An example is 128 experts in shards of 1,024 ranks, where the first 128 have one each of every stack."""
    homes = tuple(Home(i, i + 1, (i,)) for i in range(4))
    loads = [0.0] * 16
    parts = divide([(1.0, homes)] * 12, loads)
    assert max(loads) <= 4 / 3 * sum(loads) / 16 and min(loads) > 0
    at_home = [part for own in parts for part in own if part.owner == part.start]
    assert len(at_home) == 4 * 4  # as many as fit
    assert all(len({part.owner for part in own}) == 4 for own in parts)
    # Where nobody has more than a fair share, nothing moves: five experts on four ranks.
    uneven = (Home(0, 2, (0,)), Home(2, 4, (1,)), Home(4, 5, (2,)))
    assert divide([(1.0, uneven)], [0.0] * 4) == [(Part(0, 2, 0), Part(2, 4, 1), Part(4, 5, 2))]


def test_weights_that_come_later_change_no_owner():
    first = [anywhere(1, float(c), 3) for c in (4, 2, 2, 1, 1)]
    loads = [0.0] * 3
    before = divide(first, loads)
    again = [0.0] * 3
    assert divide(first, again) == before
    later = divide([anywhere(1, 3.0, 3)], loads)
    assert later[0][0].owner == min(range(3), key=lambda rank: again[rank])


@pytest.mark.parametrize("given", [[3, 5, 4], (3, 5, 4), torch.tensor([3, 5, 4])])
def test_a_rank_takes_its_own_of_what_is_loaded_for_a_stack(given):
    optimizer = KL([torch.nn.Parameter(torch.zeros(3, 2, 4))])
    (one,), parts = weights_of(optimizer.param_groups), (Part(0, 1, 1), Part(1, 3, 0))
    weight = SimpleNamespace(stacked=True, mine=parts[1], parts=parts)
    loaded = {"step": given, "L_Q": torch.arange(12.0).view(3, 2, 2), "skipped": 7}
    owned = own_state(one, weight, loaded, KL.method)
    assert list(owned["step"]) == [5, 4] and owned["skipped"] == 7
    assert torch.equal(owned["L_Q"], loaded["L_Q"][1:])


def test_copies_of_a_block_make_a_group_without_the_other_ranks(monkeypatch):
    """All ranks of a job would have to make it otherwise, those without a copy too."""
    of_all = torch.arange(8).view(2, 2, 2)
    mesh, made = SimpleNamespace(ndim=3, mesh=of_all, get_group=lambda dim: f"dim {dim}"), []
    ranks = {"whole": range(8), "dim 0": (0, 4), "dim 1": (0, 2), "dim 2": (0, 1), "new": (0, 1, 4, 5)}
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(ranks[group]))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    monkeypatch.setattr(torch.distributed, "new_group", lambda *given, **how: made.append((given, how)) or "new")
    monkeypatch.setattr("prokl.distributed.team._level_counts_of_groups", made.append)
    team = Team("whole")
    assert team.copies([0, 1], mesh).group == "dim 2" and not made
    assert team.copies([0, 1, 4, 5], mesh) is team.copies([0, 1, 4, 5], mesh)
    assert made == [["whole"], (([0, 1, 4, 5],), {"use_local_synchronization": True})]


# The cost of a matrix


TAU = 3


def counted(run):
    def baddbmm(C, A, B, **_):
        return 2 * math.prod(A) * B[-1]

    in_place = {torch.ops.aten.baddbmm_: baddbmm}  # torch's counter does not know it
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return counter.get_total_flops()


def householder(n, k):
    """R and Q (n,k) of n x k: 2 nk^2 - 2/3 k^3 each (Golub and Van Loan, Matrix Computations, section 5.2)."""
    return 4 * n * k * k - 4 / 3 * k**3


@pytest.mark.parametrize(
    "newton_schulz", [{"ns_steps": 1}, {}, {"ns_steps": 7}, {"ns_coefficients": "polar-express"}], ids=str
)
@pytest.mark.parametrize("shape", [(24, 24), (24, 32), (60, 20)], ids=str)
@pytest.mark.parametrize("cls", [ProKLShampoo, KLShampoo])
def test_a_matrix_costs_its_products_and_amortised_qrs(cls, shape, newton_schulz):
    (m, n), r, g = sorted(shape), 5, torch.Generator().manual_seed(1)
    W = torch.nn.Parameter(torch.randn(shape, generator=g))
    own = {"rank": r, **newton_schulz} if cls is ProKLShampoo else {}
    optimizer = cls([W], backend="torch", precondition_frequency=TAU, init_eigenvalue=0.1, **own)
    products = []
    for _ in range(2 + TAU):
        W.grad = torch.randn(shape, generator=g)
        products.append(counted(optimizer.step))
    ordinary, refresh, after = products[2:]  # the first one initialises
    assert after == ordinary < refresh
    bases, every = ((m, r), householder(n, r)) if own else ((m, n), 0)
    in_refreshes = refresh - ordinary + sum(householder(k, k) for k in bases)
    piece = Member(W.detach(), "W", MatrixShape.of(W))
    found = matrix_cost(piece, cls.method, optimizer.param_groups[0])
    assert found == pytest.approx(ordinary + every + in_refreshes / TAU, rel=1e-12)
