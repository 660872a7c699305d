"""Groups that others add to and divide: bare parameters, and vectors that come without an algorithm."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import prokl
from prokl import param_groups

RATES = {"lr": 0.02, "adamw_lr": 1e-3}
KINDS = {"ProKLShampoo": 4, "KLShampoo": None}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 9)


def groups_of(model, kind="ProKLShampoo", **options):
    return param_groups(model, **RATES, rank=KINDS[kind], names=False, split_fused=True, **options)


def optimizer_of(model, kind="ProKLShampoo"):
    return getattr(prokl, kind)(groups_of(model, kind))


def step(optimizer, parameters, times=2):  # a matrix weight moves from its second gradient on
    for _ in range(times):
        for p in parameters:
            p.grad = torch.randn_like(p)
        optimizer.step()


def weight(*shape):
    return nn.Parameter(torch.randn(shape))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_may_be_added_without_names(kind):
    model, late = Model(), weight(8, 8)
    named = getattr(prokl, kind)(param_groups(model, **RATES, rank=KINDS[kind]))
    with pytest.raises(ValueError, match="should be with/without names"):
        named.add_param_group({"params": [late]})
    optimizer = optimizer_of(model, kind)
    optimizer.add_param_group({"params": [late]})
    before = {p: p.detach().clone() for p in [*model.parameters(), late]}
    step(optimizer, before)
    assert not any(torch.equal(p, old) for p, old in before.items())
    assert optimizer.param_groups[-1]["algorithm"] == "matrix"


@pytest.mark.parametrize("kind", KINDS)
def test_zero_redundancy_optimizer_steps_as_the_optimizer_itself(kind, tmp_path):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imports for two seconds

    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    extra = [weight(8, 6), weight(8, 6)]
    extra[1].data.copy_(extra[0].data)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        own = optimizer_of(models[0], kind)
        sharded = ZeroRedundancyOptimizer(
            groups_of(models[1], kind), optimizer_class=getattr(prokl, kind), lr=RATES["lr"]
        )
        assert [set(g) - set(own.param_groups[i]) for i, g in enumerate(sharded.param_groups)] == [set()] * 4
        for optimizer, model, late in zip((own, sharded), models, extra, strict=True):
            torch.manual_seed(1)
            step(optimizer, model.parameters())
            optimizer.add_param_group({"params": [late], "lr": 0.03})
            step(optimizer, [*model.parameters(), late])
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
        assert torch.equal(*extra)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("form", [list, iter])
def test_vectors_that_come_without_an_algorithm_go_to_adamw_and_a_warning_says_so(form):
    optimizer = optimizer_of(Model())
    optimizer.param_groups[-1].update(betas=(0.7, 0.8), amsgrad=True)
    matrix, bias, scale = weight(8, 8), weight(8), weight()
    said = (
        r"2 of 3 weights of a new group without an algorithm are below 2-D, one of shape \(8,\) among them: .*lr=0.001"
    )
    with pytest.warns(UserWarning, match=said) as caught:
        optimizer.add_param_group({"params": form([bias, matrix, scale]), "lr": 0.005, "rank": 2})
    assert caught[0].filename == __file__
    vectors, rest = optimizer.param_groups[-2:]  # the last is the one whose lr was given: trainers set it by its place
    assert (vectors["params"], vectors["algorithm"], vectors["lr"]) == ([bias, scale], "adamw", 1e-3)
    assert (vectors["betas"], vectors["amsgrad"], vectors["weight_decay"]) == ((0.7, 0.8), True, 0.0)
    assert (rest["params"], rest["algorithm"], rest["lr"], rest["rank"]) == ([matrix], "matrix", 0.005, 2)
    before = [p.detach().clone() for p in (matrix, bias, scale)]
    step(optimizer, (matrix, bias, scale))
    assert not any(map(torch.equal, (matrix, bias, scale), before))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_may_be_empty_as_one_whose_weights_are_on_other_ranks(kind):
    groups = [dict(group) for group in groups_of(Model(), kind)]
    kept = groups[1]["params"]
    for group in (groups[0], *groups[2:]):
        group["params"] = []
    optimizer = getattr(prokl, kind)(groups)
    before = [p.detach().clone() for p in kept]
    step(optimizer, kept)
    assert not any(map(torch.equal, kept, before))


def test_vectors_alone_go_to_adamw_where_nothing_else_is_said_of_them():
    optimizer = prokl.ProKLShampoo(param_groups(Model(), **RATES, rank=4))
    gain = weight(8)
    with pytest.warns(UserWarning, match="1 of 1 weights .* below 2-D, late.gain among them"):
        optimizer.add_param_group({"params": [("late.gain", gain)]})
    group = optimizer.param_groups[-1]
    assert (group["params"], group["param_names"], group["algorithm"]) == ([gain], ["late.gain"], "adamw")


def test_a_tensor_alone_is_divided_as_a_list_of_it_is():
    optimizer, gain, matrix = optimizer_of(Model()), weight(8), weight(8, 8)
    with pytest.warns(UserWarning, match=r"1 of 1 weights .* below 2-D, one of shape \(8,\) among them"):
        optimizer.add_param_group({"params": gain})
    optimizer.add_param_group({"params": matrix, "lr": 0.5})
    vectors, rest = optimizer.param_groups[-2:]
    assert (vectors["params"], vectors["algorithm"], vectors["lr"]) == ([gain], "adamw", 1e-3)
    assert (rest["params"], rest["algorithm"], rest["lr"]) == ([matrix], "matrix", 0.5)


def test_a_tensor_lr_is_not_shared_between_the_groups():
    optimizer = prokl.ProKLShampoo(
        [{"params": [weight(4, 6)]}, {"params": [weight(4)], "algorithm": "adamw", "lr": torch.tensor(1e-3)}], rank=2
    )
    with pytest.warns(UserWarning, match="below 2-D"):
        optimizer.add_param_group({"params": [weight(5)]})
    first, second = (g["lr"] for g in optimizer.param_groups[1:])
    assert first is not second and torch.equal(first, second)


@pytest.mark.parametrize(
    "groups, new, message",
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
def test_where_it_is_not_certain_nothing_is_added_and_the_error_says_what_to_write(groups, new, message):
    adamw = [{"params": [weight(4)], "algorithm": "adamw", "lr": lr} for lr in groups]
    optimizer = prokl.ProKLShampoo([{"params": [weight(4, 6)]}, *adamw], rank=2)
    before = [list(g["params"]) for g in optimizer.param_groups]
    with warnings.catch_warnings(), pytest.raises((ValueError, TypeError), match=re.compile(message, re.DOTALL)):
        warnings.simplefilter("ignore")
        optimizer.add_param_group(new)
    assert [len(g["params"]) for g in optimizer.param_groups] == list(map(len, before))


def test_a_warning_that_is_turned_into_an_error_leaves_nothing_added():
    optimizer = optimizer_of(Model())
    count = len(optimizer.param_groups)
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="below 2-D"):
        warnings.simplefilter("error")
        optimizer.add_param_group({"params": [weight(8), weight(8, 8)]})
    assert len(optimizer.param_groups) == count


def test_a_model_of_which_only_the_head_trains_so_far_is_no_error():
    model = Model().requires_grad_(False)
    model.head.requires_grad_(True)
    groups = groups_of(model)
    assert [g["algorithm"] for g in groups] == ["adamw", "adamw"]
    step(prokl.ProKLShampoo(groups), model.head.parameters(), 1)
    lone = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3))
    lone[0].requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter of model"):
        groups_of(lone)


@pytest.mark.parametrize("model", [Model(), nn.LayerNorm(4)], ids=["matrices", "none"])
def test_a_model_of_which_nothing_trains_is_told_so(model):
    model.requires_grad_(False)
    says = (
        rf"^No parameter of model \({type(model).__name__}\) requires grad, .*: unfreeze .* before making the groups\.$"
    )
    with pytest.raises(ValueError, match=says):
        param_groups(model, **RATES)
