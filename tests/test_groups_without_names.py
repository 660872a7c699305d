"""Groups that others add to and divide: bare parameters, and vectors that come without an algorithm."""

import re

import pytest
import torch
import torch.distributed as dist

from prokl import param_groups
from tests.inputs import PRO, both, weight
from tests.routing import RATES
from tests.test_frozen_weights import model
from tests.training import named, refused, train, weights_of


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


@pytest.mark.parametrize(
    "new, message",
    [
        (
            {"params": [weight(8)]},
            r"shape \(8,\); .*at least 2 dimensions.* for this weight put it in a group "
            r'\{"params": \[\.\.\.\], "algorithm": "adamw", "lr": \.\.\.\} with an lr of AdamW\'s',
        ),
        ({"params": [weight(8), weight(4, 4)], "split": [None, 2]}, r"a list goes by place"),
        ({"params": [weight(4, 4)], "beta2": 2.0}, r"Invalid beta2=2\.0"),
        ({"params": [weight(4, 4), "no weight"]}, r"optimizer can only optimize Tensors"),
        ({"params": {weight(8)}}, r"optimizer parameters need to be organized in ordered collections"),
    ],
)
def test_an_unclear_group_is_refused_with_what_to_write(new, message):
    optimizer = PRO([{"params": [p for _, p in named((4, 6))]}])
    with refused(optimizer, re.compile(message, re.DOTALL), (ValueError, TypeError)):
        optimizer.add_param_group(new)
