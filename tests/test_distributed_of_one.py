"""A divided optimizer of one rank: loaded before it has any state, as Accelerate does; what hooks keep."""

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


def test_what_hooks_keep_beside_the_weights_goes_along(group):
    p = torch.nn.Parameter(normal(6, 9, seed=1))
    optimizer = PRO([p], rank=3, process_group=group)
    trained(optimizer)
    optimizer.state["mark"] = 1
    assert optimizer.gather_state_dict()["state"]["mark"] == 1
    saved = optimizer.state_dict()
    assert saved["state"]["mark"] == 1
    del optimizer.state["mark"]
    optimizer.load_state_dict(saved)
    assert optimizer.state["mark"] == 1 and optimizer.state[p].keys() == saved["state"][0].keys()


def test_an_offload_between_steps_leaves_the_bits_and_frees_what_the_rank_has(group):
    def made(offloads):
        weights = [torch.nn.Parameter(normal(*shape, seed=1)) for shape in ((6, 9), (3, 5, 7))]
        optimizer = PRO(weights, rank=3, process_group=group)
        for _ in range(3):
            found = trained(optimizer, 1)
            if offloads:
                optimizer.offload()
                own = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
                assert own and not any(v._is_view() for v in own)
        return found

    assert all(same_bits(p, q) for p, q in zip(made(True), made(False), strict=True))
