"""A learning rate in a tensor, which schedulers fill in place, is each group's own."""

import copy

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import KL, PRO, both, weight
from tests.training import differences, train


def halve(groups):
    for group in groups:
        group["lr"].mul_(0.5)


def rates(groups):
    return [float(group["lr"]) for group in groups]


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("optimizer", [list, PRO, KL, torch.optim.AdamW])
def test_groups_of_a_model_do_not_share_a_tensor_lr(optimizer, names):
    lr, adamw_lr = torch.tensor(0.5, requires_grad=True), torch.tensor(0.25)
    model = nn.Sequential(nn.LSTM(4, 5), nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    made = optimizer(param_groups(model, lr=lr, adamw_lr=adamw_lr, names=names))
    groups = made if optimizer is list else made.param_groups
    assert len(groups) == (3 if names else 4)
    halve(groups)
    assert rates(groups) == [0.25] * (len(groups) - 2) + [0.125] * 2
    assert (lr.item(), adamw_lr.item()) == (0.5, 0.25)
    assert all(g["lr"].is_leaf and not g["lr"].requires_grad for g in groups)


@both
def test_an_optimizers_groups_do_not_share_a_tensor_lr(cls):
    """Given to the constructor, to groups that are added, and by a file whose groups shared it."""
    lr = torch.tensor(0.5)
    optimizer = cls([{"params": [weight(4, 6, seed=i)]} for i in range(2)], lr=lr)
    halve(optimizer.param_groups)
    optimizer.add_param_group({"params": [weight(4, 6, seed=2)]})  # begins at the constructor's, not at a decayed one
    assert rates(optimizer.param_groups) == [0.25, 0.25, 0.5] and float(lr) == 0.5
    lr.fill_(8.0)
    given = {"params": [weight(4, 6, seed=3)], "lr": lr}, {"params": [weight(6)], "algorithm": "adamw", "lr": lr}
    optimizer.add_param_group({"params": [weight(4, 6, seed=4)]})
    for group in given:
        optimizer.add_param_group(group)
    halve(optimizer.param_groups[3:])
    assert rates(optimizer.param_groups) == [0.25, 0.25, 0.5, 0.25, 4.0, 4.0] and float(lr) == 8.0
    assert all(group["lr"] is lr for group in given)  # what was given stays as it was
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group["lr"] = lr
    optimizer.load_state_dict(state)
    halve(optimizer.param_groups)
    assert rates(optimizer.param_groups) == [4.0] * 6 and float(lr) == 8.0


@both
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_rate_of_one_dimension_steps_as_one_of_none_does(cls, backend):
    """A float64 one would make the products float64; one on the CPU would not multiply weights that are elsewhere."""
    shapes = torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    one, other = (cls([("w", weight(8, 12))], backend=backend, weight_decay=0.1) for _ in shapes)
    for optimizer, lr in zip((one, other), shapes, strict=True):
        optimizer.param_groups[0]["lr"] = lr
    assert differences(train(one, range(4)), train(other, range(4))) == set()
