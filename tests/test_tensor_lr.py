"""A learning rate in a tensor, which schedulers fill in place, is each group's own."""

import copy

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import KL, PRO, weight

both = pytest.mark.parametrize("cls", [PRO, KL])


def halve(groups):
    for group in groups:
        group["lr"].mul_(0.5)


@pytest.mark.parametrize("names", [True, False])
@pytest.mark.parametrize("optimizer", [list, PRO, KL, torch.optim.AdamW])
def test_groups_of_a_model_do_not_share_it_with_each_other_or_the_caller(optimizer, names):
    lr, adamw_lr = torch.tensor(0.5, requires_grad=True), torch.tensor(0.25)
    model = nn.Sequential(nn.LSTM(4, 5), nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    made = optimizer(param_groups(model, lr=lr, adamw_lr=adamw_lr, names=names))
    groups = made if optimizer is list else made.param_groups
    assert len(groups) == (3 if names else 4)
    halve(groups)
    assert [float(g["lr"]) for g in groups] == [0.25] * (len(groups) - 2) + [0.125] * 2
    assert (lr.item(), adamw_lr.item()) == (0.5, 0.25)
    assert all(g["lr"].is_leaf and not g["lr"].requires_grad for g in groups)


@both
def test_one_of_more_dimensions_is_refused_as_it_would_not_go_with_every_weight(cls):
    with pytest.raises(ValueError, match=r"Invalid lr=tensor.*of at most one dimension"):
        cls([weight(4, 6)], lr=torch.full((1, 1, 1, 1), 0.02))
    optimizer = cls([weight(4, 6)], lr=torch.full((1,), 0.02))
    optimizer.param_groups[0]["lr"] = torch.full((1, 1), 0.02)
    with pytest.raises(ValueError, match=r"Invalid lr=tensor.*of at most one dimension"):
        optimizer.step()


@both
def test_groups_that_take_the_constructors_do_not_share_it_with_each_other_the_defaults_or_the_caller(cls):
    lr = torch.tensor(0.5)
    optimizer = cls([{"params": [weight(4, 6, seed=i)]} for i in range(2)], lr=lr)
    halve(optimizer.param_groups)
    optimizer.add_param_group({"params": [weight(4, 6, seed=2)]})  # begins at the constructor's, not at a decayed one
    assert [float(g["lr"]) for g in optimizer.param_groups] == [0.25, 0.25, 0.5]
    assert float(lr) == 0.5
    lr.fill_(8.0)
    optimizer.add_param_group({"params": [weight(4, 6, seed=3)]})
    assert float(optimizer.param_groups[-1]["lr"]) == 0.5


@both
def test_groups_that_are_added_with_one_tensor_do_not_share_it(cls):
    lr = torch.tensor(0.5)
    optimizer = cls([weight(4, 6)])
    given = {"params": [weight(4, 6, seed=1)], "lr": lr}, {"params": [weight(6)], "algorithm": "adamw", "lr": lr}
    for group in given:
        optimizer.add_param_group(group)
    halve(optimizer.param_groups[1:])
    assert [float(g["lr"]) for g in optimizer.param_groups[1:]] == [0.25, 0.25] and float(lr) == 0.5
    assert all(group["lr"] is lr for group in given)  # what was given stays as it was


@both
def test_groups_of_a_loaded_state_that_shared_it_do_not(cls):
    optimizer, other = (cls([{"params": [weight(4, 6, seed=i)]} for i in range(2)], lr=0.1) for _ in range(2))
    state, lr = optimizer.state_dict(), torch.tensor(0.5)
    for group in state["param_groups"]:
        group["lr"] = lr
    other.load_state_dict(copy.deepcopy(state))
    halve(other.param_groups)
    assert [float(g["lr"]) for g in other.param_groups] == [0.25, 0.25] and float(lr) == 0.5


@pytest.mark.parametrize(
    "make", [lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), None], ids=["StepLR", "by hand"]
)
def test_a_schedule_changes_each_group_once(make):
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = PRO(param_groups(model, lr=0.5, adamw_lr=torch.tensor(0.25)))
    scheduler = make(optimizer) if make else None
    optimizer.step()
    if scheduler:
        scheduler.step()
    else:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    assert [float(g["lr"]) for g in optimizer.param_groups] == [0.25, 0.125, 0.125]
