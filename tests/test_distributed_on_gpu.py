"""One GPU as a group of one rank, with NCCL: DTensors, state dicts and checkpoints on a device.

The body also runs on the CPU with gloo, so that it is known to run before a GPU is at hand.
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

import prokl
from tests.inputs import normal, same_bits

SHAPES = {"a": (12, 20), "b": (20, 12), "experts": (3, 12, 20), "table": (9, 12), "gain": (12,)}
STEPS, SAVED = 9, 5


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request, tmp_path):
    backend = {"cuda": "nccl", "cpu": "gloo"}[request.param]
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.device(request.param)
    dist.destroy_process_group()


def made(device, divided, sharded):
    net = nn.Module()
    for i, (name, shape) in enumerate(SHAPES.items()):
        net.register_parameter(name, nn.Parameter(normal(*shape, seed=i).to(device)))
    if sharded:
        fully_shard(net)
    weights = list(net.named_parameters())
    groups = [{"params": weights[:3]}, {"params": weights[3:], "algorithm": "adamw", "lr": 0.01}]
    group = dist.group.WORLD if divided else None
    return net, prokl.ProKLShampoo(groups, rank=4, precondition_frequency=3, process_group=group)


def train(net, optimizer, first, last):
    for call in range(first, last):
        for i, p in enumerate(net.parameters()):
            g = normal(*p.shape, seed=100 * call + i).to(p.device)
            p.grad = (
                g if not hasattr(p, "placements") else dist.tensor.distribute_tensor(g, p.device_mesh, p.placements)
            )
        optimizer.step()


def weights(net):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
def test_a_group_of_one_is_one_process_bit_for_bit_and_so_is_what_it_saves(sharded, device, tmp_path):
    alone, expected = made(device, False, False)
    net, optimizer = made(device, not sharded, sharded)
    train(alone, expected, 0, STEPS)
    train(net, optimizer, 0, SAVED)
    saved = copy.deepcopy([w.detach() for w in weights(net)])
    dcp.save({"optimizer": get_optimizer_state_dict(net, optimizer)}, checkpoint_id=tmp_path / "checkpoint")
    options = StateDictOptions(full_state_dict=True)
    whole = copy.deepcopy(get_optimizer_state_dict(net, optimizer, options=options))  # of one rank it is the live state
    assert all(type(v) is torch.Tensor for own in whole["state"].values() for v in own.values())
    train(net, optimizer, SAVED, STEPS)
    assert all(same_bits(p, q) for p, q in zip(weights(net), weights(alone), strict=True))

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
        train(other, resumed, SAVED, STEPS)
        assert all(same_bits(p, q) for p, q in zip(weights(other), weights(alone), strict=True))
