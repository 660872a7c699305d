"""Groups that are added: a slip that would be taken in silence is named, and what others divide or add to works."""

import pytest
import torch
import torch.distributed as dist

from prokl import param_groups
from tests.inputs import PRO, both, weight
from tests.routing import RATES
from tests.test_frozen_weights import model
from tests.training import refused, train, weights_of

of_either = pytest.mark.parametrize("algorithm", ["matrix", "adamw"])


def refused_everywhere(cls, group, says, error=ValueError):
    """Hold a group beside another to an error, in the constructor and when it is added."""
    with pytest.raises(error, match=says):
        cls([{"params": [weight(4, 6)]}, dict(group)])
    optimizer = cls([weight(4, 6)])
    with refused(optimizer, says, error):
        optimizer.add_param_group(dict(group))
    assert len(optimizer.param_groups) == 1


@both
@pytest.mark.parametrize("wrap", [lambda m: m, torch.nn.Sequential, lambda m: torch.nn.ModuleList([m])])
def test_a_module_in_place_of_parameters_is_told_what_to_pass(cls, wrap):
    model = wrap(torch.nn.Linear(4, 6))
    says = (
        rf"^params .* got a module \({type(model).__name__}\): pass prokl.param_groups\(model, .*model.parameters\(\)"
    )
    with pytest.raises(TypeError, match=says):
        cls(model)
    refused_everywhere(cls, {"params": model}, says, TypeError)


@both
def test_a_parameter_list_is_taken_as_pytorch_takes_it(cls):
    weights = torch.nn.ParameterList([weight(4, 6), weight(3, 5)])
    for given in (weights, [{"params": weights}]):
        assert [group["params"] for group in cls(given).param_groups] == [list(weights)]


def settings_of(cls, algorithm):
    return cls([weight(4, 6)]).defaults if algorithm == "matrix" else torch.optim.AdamW([weight(4, 6)]).defaults


def misspelt(setting):
    """A letter more, a letter less, without an underscore, in capitals."""
    found = {setting + "s", setting[:1] + setting[2:], setting.replace("_", "", 1), setting.upper()}
    return found - {setting, "l"}


@of_either
@both
def test_a_misspelt_setting_is_named_with_the_one_that_is_meant(cls, algorithm):
    settings = settings_of(cls, algorithm)
    pairs = [(setting, key) for setting in settings for key in misspelt(setting)]
    other = ("split", "heads") if algorithm == "matrix" else ("lr", "learning_rate")
    for nearest, key in [*pairs, ("weight_decay", "wieght_decay"), other]:
        says = rf"^Invalid {key}=0\.3 of a new group: .* the nearest is {nearest}\. Write '{nearest}', or"
        refused_everywhere(cls, {"params": [weight(3, 5)], "algorithm": algorithm, "lr": 0.1, key: 0.3}, says)


@of_either
def test_a_process_group_of_a_group_is_refused_with_the_remedy(algorithm):
    group = {"params": [weight(3, 5)], "algorithm": algorithm, "lr": 0.1, "process_group": None}
    refused_everywhere(PRO, group, r"^Invalid process_group=None of a new group: groups have none; pass it to the cons")


@both
@pytest.mark.parametrize("use_muon, algorithm", [(True, "matrix"), (False, "adamw")])
def test_groups_of_other_muons_are_told_the_algorithm_to_name(cls, use_muon, algorithm):
    group = {"params": [weight(3, 5), weight(5)], "lr": 0.1, "use_muon": use_muon}
    refused_everywhere(cls, group, rf'^Invalid use_muon={use_muon} of a .* write "algorithm": "{algorithm}"')
    cls([group | {"params": [weight(3, 5)], "algorithm": algorithm}])


# Keys of PyTorch's schedulers and averages, timm, Megatron, mmengine, Lightning, and of other optimizers' groups.
THEIRS = """
    initial_lr max_lr min_lr base_lr swa_lr lr_scale lr_mult pre_lr_mult lr_max d_lr scheduled_lr
    max_momentum min_momentum base_momentum wd wd_mult wd_scale decay_mult weight_decay_mult layer_decay no_weight_decay
    name names group_name param_group_name layer layer_id depth id k r d scale proj_type update_proj_gap
    is_expert_parallel is_decoupled_lr use_muon train_mode weight_sum warmup_steps rho adaptive moe fixup nesterov
""".split()
NUMBERED = {"matrix": ("beta1", "beta3", "lr0", "eps2", "momentum2", "rank1"), "adamw": ("lr0", "eps2", "betas2")}
"""A setting with another number is no misspelling."""


@both
@of_either
def test_keys_of_schedulers_trainers_and_others_are_kept(cls, algorithm):
    settings = settings_of(PRO, "matrix") | settings_of(PRO, "adamw")
    composed = [f"{word}_{key}" for word in ("initial", "max", "min", "base", "swa") for key in settings]
    composed += [f"{key}_{word}" for word in ("scale", "mult", "schedule") for key in settings]
    own = dict.fromkeys([*THEIRS, *NUMBERED[algorithm], *composed], 0.3) | {7: "any key is PyTorch's to take"}
    optimizer = cls([weight(4, 6)])
    optimizer.add_param_group({"params": [weight(3, 5)], "algorithm": algorithm, "lr": 0.1, **own})
    assert own.items() <= optimizer.param_groups[1].items()


@both
def test_another_algorithms_setting_is_no_misspelling(cls):
    """ZeroRedundancyOptimizer puts what it was made with into every group, and both take the same groups."""
    groups = [
        {**PRO([weight(4, 6)]).defaults, "params": [weight(4, 6)], "betas": (0.9, 0.99)},
        {"params": [weight(6)], "algorithm": "adamw", "lr": 0.1, "beta2": 0.9, "momentum": 0.9, "rank": 4},
    ]
    assert len(cls(groups).param_groups) == 2


@both
def test_any_key_may_be_in_a_loaded_file(cls):
    source, target = cls([weight(4, 6)]), cls([weight(4, 6)])
    source.param_groups[0]["weight_decy"] = 0.3
    target.load_state_dict(source.state_dict())
    assert target.param_groups[0]["weight_decy"] == 0.3


@both
@of_either
def test_two_weights_of_one_name_are_refused_wherever_they_stand(cls, algorithm):
    """One optimizer over two models, each with names of its own."""
    groups = [
        {"params": [("a", weight(4, 6)), ("b", weight(3, 5))]},
        {"params": [("c", weight(4, 6)), ("b", weight(4, 6))], "algorithm": algorithm, "lr": 0.1},
    ]
    across = (
        r"^Invalid name 'b': a weight of group 0 and one of group 1 have it, .*\(\"decoder\.\" \+ name, parameter\)"
    )
    with pytest.raises(ValueError, match=across):
        cls(groups)
    optimizer = cls(groups[:1])
    with refused(optimizer, across):
        optimizer.add_param_group(groups[1])
    with refused(optimizer, "^Invalid name 'd': two weights of group 1 have it"):
        optimizer.add_param_group({"params": [("d", weight(4, 6)), ("d", weight(4, 6))]})
    optimizer.add_param_group({"params": [("decoder." + name, p) for name, p in groups[1]["params"]]})
    assert optimizer.param_groups[1]["param_names"] == ["decoder.c", "decoder.b"]


@both
def test_unnamed_weights_are_told_apart_as_groups_change(cls):
    weights = [weight(4, 6, seed=i, dtype=torch.bfloat16) for i in range(4)]
    optimizer = cls([{"params": [p]} for p in weights[:3]])
    for come in ([], weights[3:]):
        if come:
            del optimizer.param_groups[0]
            optimizer.add_param_group({"params": come})
        train(optimizer, [0])
        names = [member.name for bucket in optimizer.engine.buckets for member in bucket.members]
        assert len(names) == len(set(names)) == len(optimizer.clipped()) == len(optimizer.param_groups)
        assert set(names) == optimizer.clipped().keys()


@both
def test_a_loaded_file_may_not_bring_two_weights_of_one_name(cls):
    source, target = (cls([("a", weight(4, 6)), ("b", weight(4, 6))]) for _ in range(2))
    state = source.state_dict()
    state["param_groups"][0]["param_names"] = ["a", "a"]
    with refused(target, "^The loaded state dict: Invalid name 'a': .* remove 'param_names' from its"):
        target.load_state_dict(state)
    del state["param_groups"][0]["param_names"]
    target.load_state_dict(state)
    assert target.param_groups[0]["param_names"] == ["a", "b"]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_weight_that_is_given_twice_is_one_weight():
    w = weight(4, 6)
    assert PRO([("w", w), ("w", w)]).param_groups[0]["params"] == [w, w]


# Bare parameters, as others add and divide them


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
