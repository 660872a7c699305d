"""A divided optimizer whose state dict is loaded before it has any state, as Accelerate does when it wraps one."""

import copy

import pytest
import torch
import torch.distributed as dist

from tests.inputs import PRO, normal, same_bits


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def trained(optimizer, steps=3):
    for step in range(steps):
        for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            p.grad = normal(*p.shape, seed=10 * step + i)
        optimizer.step()
    return [p.detach() for g in optimizer.param_groups for p in g["params"]]


def test_an_empty_state_dict_is_loaded_and_training_begins(group):
    def made():
        shapes = {"matrix": (6, 9), "stack": (3, 5, 7), "bias": (4,)}
        weights = [(name, torch.nn.Parameter(normal(*shape, seed=1))) for name, shape in shapes.items()]
        adamw = {"params": weights[2:], "algorithm": "adamw", "lr": 0.1}
        return PRO([{"params": weights[:2]}, adamw], rank=3, process_group=group)

    wrapped = made()
    wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert all(same_bits(p, q) for p, q in zip(trained(wrapped), trained(made()), strict=True))
