"""A group of one rank: bit for bit one process, DTensors, state dicts and checkpoints, and what hooks keep.

On a GPU with NCCL, and on the CPU with gloo, so that all of it is known to run before a GPU is at hand.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests.inputs import PRO, normal, same_bits

SHAPES = {"a": (12, 20), "b": (20, 12), "experts": (3, 12, 20), "table": (9, 12), "gain": (12,)}
STEPS, SAVED = 9, 5


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request, tmp_path):
    backend = {"cuda": "nccl", "cpu": "gloo"}[request.param]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.device(request.param)
    dist.destroy_process_group()


def made(device, divided, sharded=False):
    net = nn.Module()
    for i, (name, shape) in enumerate(SHAPES.items()):
        net.register_parameter(name, nn.Parameter(normal(*shape, seed=i).to(device)))
    if sharded:
        fully_shard(net)
    weights = list(net.named_parameters())
    groups = [{"params": weights[:3]}, {"params": weights[3:], "algorithm": "adamw", "lr": 0.01}]
    group = dist.group.WORLD if divided else None
    return net, PRO(groups, rank=4, precondition_frequency=3, process_group=group)


def train(net, optimizer, first, last, between=lambda: None):
    for call in range(first, last):
        for i, p in enumerate(net.parameters()):
            g = normal(*p.shape, seed=100 * call + i).to(p.device)
            if hasattr(p, "placements"):
                g = dist.tensor.distribute_tensor(g, p.device_mesh, p.placements)
            p.grad = g
        optimizer.step()
        between()
    return net


def weights(net):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]


def assert_same(one, other):
    assert all(same_bits(p, q) for p, q in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
def test_a_group_of_one_is_one_process_bit_for_bit_and_so_is_what_it_saves(sharded, device, tmp_path):
    alone = train(*made(device, False), 0, STEPS)
    net, optimizer = made(device, not sharded, sharded)
    train(net, optimizer, 0, SAVED)
    saved = copy.deepcopy([w.detach() for w in weights(net)])
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path / "checkpoint")
    options = StateDictOptions(full_state_dict=True)
    whole = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))  # of one rank it is the live state
    assert all(type(v) is torch.Tensor for own in whole["state"].values() for v in own.values())
    assert_same(train(net, optimizer, SAVED, STEPS), alone)

    for full in (False, True):
        other, resumed = made(device, not sharded, sharded)
        with torch.no_grad():
            for p, w in zip(other.parameters(), saved, strict=True):
                (p.to_local() if sharded else p).copy_(w)
        if full:
            set_optimizer_state_dict(other, resumed, copy.deepcopy(whole), options=options)
        else:
            found = {"optimizer": get_optimizer_state_dict(other, resumed)}
            dcp.load(found, checkpoint_id=tmp_path / "checkpoint")
            set_optimizer_state_dict(other, resumed, found["optimizer"])
        assert_same(train(other, resumed, SAVED, STEPS), alone)


def test_an_empty_state_dict_is_loaded_and_training_begins(device):
    """As Accelerate does."""
    net, optimizer = made(device, True)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(train(net, optimizer, 0, 3), train(*made(device, True), 0, 3))


def test_what_hooks_keep_beside_the_weights_goes_along(device):
    net, optimizer = made(device, True)
    train(net, optimizer, 0, 3)
    optimizer.state["mark"] = 1
    assert optimizer.gather_state_dict()["state"]["mark"] == 1
    saved = optimizer.state_dict()
    assert saved["state"]["mark"] == 1
    del optimizer.state["mark"]
    optimizer.load_state_dict(saved)
    assert optimizer.state["mark"] == 1 and optimizer.state[net.a].keys() == saved["state"][0].keys()


def test_an_offload_between_steps_leaves_the_bits_and_frees_what_the_rank_has(device):
    net, optimizer = made(device, True)

    def offload():
        optimizer.offload()
        own = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        assert own and not any(v._is_view() for v in own)

    assert_same(train(net, optimizer, 0, 3, offload), train(*made(device, True), 0, 3))
