"""Groups that others add to and divide: bare parameters, and vectors that come without an algorithm."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from prokl import param_groups
from tests.inputs import PRO, both, weight
from tests.routing import RATES
from tests.test_frozen_weights import model
from tests.training import named, refused, silent, train, weights_of


def groups_of(net):
    return param_groups(net, **RATES, names=False, split_fused=True)


def assert_all_move(optimizer, weights=None):
    weights = weights_of(optimizer) if weights is None else weights
    before = [p.detach().clone() for p in weights]
    train(optimizer, range(2), weights)  # a matrix weight moves from its second gradient on
    assert not any(map(torch.equal, before, weights))


@both
def test_groups_may_be_added_without_names_and_be_empty(cls):
    """Groups whose weights are on other ranks are empty."""
    optimizer = cls(groups_of(model(frozen=())))
    optimizer.add_param_group({"params": [weight(8, 8)]})
    assert_all_move(optimizer)
    assert optimizer.param_groups[-1]["algorithm"] == "matrix"
    groups = [dict(group) for group in groups_of(model(frozen=()))]
    for group in (groups[0], *groups[2:]):
        group["params"] = []
    assert_all_move(cls(groups))


@both
def test_zero_redundancy_optimizer_steps_as_the_optimizer_itself(cls, tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imports for two seconds

    models, late = [model(frozen=()), model(frozen=())], [weight(8, 6), weight(8, 6)]
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        own = cls(groups_of(models[0]))
        sharded = ZeroRedundancyOptimizer(groups_of(models[1]), optimizer_class=cls, lr=RATES["lr"])
        assert [set(g) - set(own.param_groups[i]) for i, g in enumerate(sharded.param_groups)] == [set()] * 4
        for optimizer, p in zip((own, sharded), late, strict=True):
            train(optimizer, range(2))
            optimizer.add_param_group({"params": [p], "lr": 0.03})
            train(optimizer, range(2, 4))
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        assert torch.equal(*late)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("form", [list, iter])
def test_vectors_without_an_algorithm_go_to_adamw_with_a_warning(form):
    optimizer = PRO(groups_of(model(frozen=())))
    optimizer.param_groups[-1].update(betas=(0.7, 0.8), amsgrad=True)
    matrix, bias, scale = weight(8, 8), weight(8), nn.Parameter(torch.ones(()))
    warning = (
        r"2 of 3 weights of a new group without an algorithm are below 2-D, one of shape \(8,\) among them: .*lr=0.001"
    )
    with pytest.warns(UserWarning, match=warning) as caught:
        optimizer.add_param_group({"params": form([bias, matrix, scale]), "lr": 0.005, "rank": 2})
    assert caught[0].filename == __file__
    vectors, rest = optimizer.param_groups[-2:]  # the last is the one whose lr was given: trainers set it by its place
    assert (vectors["params"], vectors["algorithm"], vectors["lr"]) == ([bias, scale], "adamw", 1e-3)
    assert (vectors["betas"], vectors["amsgrad"], vectors["weight_decay"]) == ((0.7, 0.8), True, 0.0)
    assert (rest["params"], rest["algorithm"], rest["lr"], rest["rank"]) == ([matrix], "matrix", 0.005, 2)
    assert_all_move(optimizer)


def test_vectors_alone_go_to_adamw_named_or_not():
    optimizer, gain = PRO(param_groups(model(frozen=()), **RATES)), weight(8)
    with pytest.warns(UserWarning, match="1 of 1 weights .* below 2-D, late.gain among them"):
        optimizer.add_param_group({"params": [("late.gain", gain)]})
    group = optimizer.param_groups[-1]
    assert (group["params"], group["param_names"], group["algorithm"]) == ([gain], ["late.gain"], "adamw")
    optimizer, matrix = PRO(groups_of(model(frozen=()))), weight(8, 8)
    with pytest.warns(UserWarning, match=r"1 of 1 weights .* below 2-D, one of shape \(8,\) among them"):
        optimizer.add_param_group({"params": gain})
    optimizer.add_param_group({"params": matrix, "lr": 0.5})
    vectors, rest = optimizer.param_groups[-2:]
    assert (vectors["params"], vectors["algorithm"], vectors["lr"]) == ([gain], "adamw", 1e-3)
    assert (rest["params"], rest["algorithm"], rest["lr"]) == ([matrix], "matrix", 0.5)


def test_a_tensor_lr_is_not_shared_between_the_groups():
    adamw = {"params": [weight(4)], "algorithm": "adamw", "lr": torch.tensor(1e-3)}
    optimizer = PRO([{"params": [weight(4, 6)]}, adamw])
    with pytest.warns(UserWarning, match="below 2-D"):
        optimizer.add_param_group({"params": [weight(5)]})
    first, second = (g["lr"] for g in optimizer.param_groups[1:])
    assert first is not second and torch.equal(first, second)


@pytest.mark.parametrize(
    "rates, new, message",
    [
        (
            [],
            {"params": [weight(8)]},
            r"shape \(8,\); .*at least 2 dimensions.* for this weight put it in a group "
            r'\{"params": \[\.\.\.\], "algorithm": "adamw", "lr": \.\.\.\} with an lr of AdamW\'s',
        ),
        (
            [1e-3],
            {"params": [weight(8)], "lr": 0.02},
            r'1 of 1 weights .* its own lr: say whose by "algorithm": "adamw" \(whose lr is 0\.001 so far\)',
        ),
        (
            [1e-3, 2e-3],
            {"params": [weight(8), weight(4, 4)]},
            r"1 of 2 weights .* several lrs, \[0\.001, 0\.002\]: give them a group .*\"algorithm\": \"adamw\"",
        ),
        ([1e-3], {"params": [weight(8), weight(4, 4)], "split": [None, 2]}, r"a list goes by place"),
        ([1e-3], {"params": [weight(8), weight(4, 4)], "beta2": 2.0}, r"Invalid beta2=2\.0"),
        ([1e-3], {"params": [weight(8), "no weight"]}, r"optimizer can only optimize Tensors"),
        ([1e-3], {"params": {weight(8)}}, r"optimizer parameters need to be organized in ordered collections"),
    ],
)
def test_an_unclear_group_is_refused_with_what_to_write(rates, new, message):
    adamw = [{"params": [weight(4)], "algorithm": "adamw", "lr": lr} for lr in rates]
    optimizer = PRO([{"params": [p for _, p in named((4, 6))]}, *adamw])
    with refused(optimizer, re.compile(message, re.DOTALL), (ValueError, TypeError)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.add_param_group(new)


def test_a_warning_as_an_error_leaves_nothing_added():
    optimizer = PRO(groups_of(model(frozen=())))
    with refused(optimizer, "below 2-D", UserWarning), silent():
        optimizer.add_param_group({"params": [weight(8), weight(8, 8)]})
