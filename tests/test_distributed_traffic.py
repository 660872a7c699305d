"""The bytes that a divided step sends and receives are those of the weights that ranks do not own."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bench.models import build, llama
from prokl import ProKLShampoo, param_groups
from tests.distributed.pool import pools  # noqa: F401  (a fixture)
from tests.distributed.traffic import Traffic

MATRICES = 4 * (8 * 24 * 24 + 6 * 24 * 64)  # bytes of two layers of width 24
WEIGHTS = MATRICES + 4 * (2 * 4096 * 24 + 5 * 24)  # with embedding, head and norms


def step_bytes(how):
    """What this rank sends and receives in a step, and the bytes of the weights that it owns."""
    torch.manual_seed(0)
    model, g = build(llama(2, 24, 1, 64, 4096)), torch.Generator().manual_seed(0)
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    group = dist.group.WORLD if how == "ddp" else None
    optimizer = ProKLShampoo(param_groups(model, lr=0.02, adamw_lr=3e-3, rank=8), process_group=group)
    traffic = Traffic()
    for step in range(2):  # the first one divides the weights
        for p in model.parameters():
            p.grad = whole = torch.randn(p.shape, generator=g)
            if isinstance(p, DTensor):
                p.grad = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=None)
        with traffic if step else nullcontext():
            optimizer.step()
    owned = sum(w.stand_in.nbytes for w in optimizer._division.divided() if w.stand_in is not None)
    return traffic.sent, traffic.received, owned


@pytest.mark.slow
def test_each_weight_goes_once_to_every_rank_that_does_not_own_it(pools):  # noqa: F811
    found = pools[2].run(step_bytes, "ddp")
    assert sum(owned for *_, owned in found) == WEIGHTS
    assert [(sent, received) for sent, received, _ in found] == [(owned, WEIGHTS - owned) for *_, owned in found]


@pytest.mark.slow
def test_half_of_a_sharded_matrix_lies_elsewhere_and_of_adamw_nothing_moves(pools):  # noqa: F811
    found = pools[2].run(step_bytes, "fsdp")  # a gradient and a weight come, the stepped weight goes back
    assert sum(owned for *_, owned in found) == MATRICES
    assert sum(sent for sent, *_ in found) == sum(received for _, received, _ in found) == 3 * MATRICES / 2
