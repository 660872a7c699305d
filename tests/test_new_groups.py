"""What a group may hold when it is added: a slip that would be taken in silence is named, and nothing has changed."""

import pytest
import torch

from tests.inputs import KL, PRO, weight

both = pytest.mark.parametrize("cls", [PRO, KL])


def groups_are(optimizer, *expected):
    return [group["params"] for group in optimizer.param_groups] == list(expected)


@both
@pytest.mark.parametrize(
    "model",
    [torch.nn.Linear(4, 6), torch.nn.Sequential(torch.nn.Linear(4, 6)), torch.nn.ModuleList([torch.nn.Linear(4, 6)])],
    ids=lambda model: type(model).__name__,
)
def test_a_module_in_the_place_of_parameters_is_told_what_to_pass(cls, model):
    says = (
        rf"^params .* got a module \({type(model).__name__}\): pass prokl.param_groups\(model, .*model.parameters\(\)"
    )
    for params in (model, [{"params": model}]):
        with pytest.raises(TypeError, match=says):
            cls(params)
    w = weight(4, 6)
    optimizer = cls([w])
    with pytest.raises(TypeError, match=says):
        optimizer.add_param_group({"params": model})
    assert groups_are(optimizer, [w])


@both
def test_a_list_of_parameters_that_is_a_module_is_taken_as_pytorch_takes_it(cls):
    weights = torch.nn.ParameterList([weight(4, 6), weight(3, 5)])
    assert groups_are(cls(weights), list(weights))
    assert groups_are(cls([{"params": weights}]), list(weights))


MISSPELT = {
    "weight_decy": "weight_decay",
    "wieght_decay": "weight_decay",
    "Weight_Decay": "weight_decay",
    "weight_decays": "weight_decay",
    "LR": "lr",
    "lrs": "lr",
    "epss": "eps",
    "maximise": "maximize",
    "algoritm": "algorithm",
}
OF_A_MATRIX = {
    "momentun": "momentum",
    "beta": "beta2",
    "beta_2": "beta2",
    "precondition_freq": "precondition_frequency",
    "init_eigenvalues": "init_eigenvalue",
    "clip_treshold": "clip_threshold",
    "cautios_weight_decay": "cautious_weight_decay",
    "adjust_lr": "adjust_lr_fn",
    "transpose": "transposed",
    "splits": "split",
}
OF_ADAMW = {"beta": "betas", "beta1": "betas", "amsgrd": "amsgrad", "for_each": "foreach"}
CASES = [
    *((algorithm, *pair) for algorithm in ("matrix", "adamw") for pair in MISSPELT.items()),
    *(("matrix", *pair) for pair in OF_A_MATRIX.items()),
    *(("adamw", *pair) for pair in OF_ADAMW.items()),
]


@both
@pytest.mark.parametrize("algorithm, key, nearest", CASES)
def test_a_misspelt_setting_is_named_with_the_one_that_is_meant(cls, algorithm, key, nearest):
    w, late = weight(4, 6), weight(3, 5)
    group = {"params": [late], "algorithm": algorithm, "lr": 0.1, key: 0.3}
    says = rf"^Invalid {key}=0\.3 of a new group: .* the nearest is {nearest}\. Write '{nearest}', or"
    with pytest.raises(ValueError, match=says):
        cls([{"params": [w]}, group])
    optimizer = cls([w])
    with pytest.raises(ValueError, match=says):
        optimizer.add_param_group(group)
    assert groups_are(optimizer, [w])


@both
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
@pytest.mark.parametrize("key, value", [("preset", "paper"), ("process_group", None)])
def test_what_only_a_constructor_takes_is_refused_in_a_group(cls, algorithm, key, value):
    w = weight(4, 6)
    group = {"params": [weight(3, 5)], "algorithm": algorithm, "lr": 0.1, key: value}
    optimizer = cls([w])
    with pytest.raises(ValueError, match=rf"^Invalid {key}={value!r} of a new group: .* Pass it to the constructor"):
        optimizer.add_param_group(group)
    assert groups_are(optimizer, [w])


# Of PyTorch's schedulers and averages, timm, Megatron, mmengine, Lightning, and of other optimizers' groups.
THEIRS = [
    *("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "lr_scale", "lr_mult", "pre_lr_mult", "lr_max", "d_lr"),
    *("max_momentum", "min_momentum", "base_momentum", "wd", "wd_mult", "wd_scale", "decay_mult", "weight_decay_mult"),
    *(
        "layer_decay",
        "no_weight_decay",
        "name",
        "names",
        "group_name",
        "param_group_name",
        "layer",
        "layer_id",
        "depth",
    ),
    *(
        "is_expert_parallel",
        "is_decoupled_lr",
        "use_muon",
        "update_proj_gap",
        "scale",
        "proj_type",
        "k",
        "r",
        "d",
        "id",
    ),
    *("train_mode", "weight_sum", "scheduled_lr", "warmup_steps", "rho", "adaptive", "moe", "fixup", "nesterov"),
]


@both
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
def test_a_key_of_a_scheduler_a_trainer_or_another_optimizer_is_kept(cls, algorithm):
    settings = (PRO([weight(4, 6)]).defaults | torch.optim.AdamW([weight(4, 6)]).defaults).keys()
    composed = [f"{word}_{key}" for word in ("initial", "max", "min", "base", "swa") for key in settings]
    composed += [f"{key}_{word}" for word in ("scale", "mult", "schedule") for key in settings]
    own = dict.fromkeys([*THEIRS, *composed], 0.3) | {7: "any key is PyTorch's to take"}
    optimizer = cls([weight(4, 6)])
    optimizer.add_param_group({"params": [weight(3, 5)], "algorithm": algorithm, "lr": 0.1, **own})
    assert own.items() <= optimizer.param_groups[1].items()


@both
@pytest.mark.parametrize(
    "algorithm, keys",
    [("matrix", ["beta1", "beta3", "lr0", "eps2", "momentum2", "rank1"]), ("adamw", ["lr0", "eps2", "betas2"])],
)
def test_a_setting_with_another_number_is_no_misspelling(cls, algorithm, keys):
    own = dict.fromkeys(keys, 0.3)
    optimizer = cls([weight(4, 6)])
    optimizer.add_param_group({"params": [weight(3, 5)], "algorithm": algorithm, "lr": 0.1, **own})
    assert own.items() <= optimizer.param_groups[1].items()


@both
def test_a_setting_of_the_other_algorithm_or_optimizer_is_no_misspelling(cls):
    """As ZeroRedundancyOptimizer puts what it was made with into every group, and both take the same groups."""
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
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
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
    before = optimizer.param_groups[0]["params"]
    with pytest.raises(ValueError, match=across):
        optimizer.add_param_group(groups[1])
    with pytest.raises(ValueError, match="^Invalid name 'd': two weights of group 1 have it"):
        optimizer.add_param_group({"params": [("d", weight(4, 6)), ("d", weight(4, 6))]})
    assert groups_are(optimizer, before)
    optimizer.add_param_group({"params": [("decoder." + name, p) for name, p in groups[1]["params"]]})
    assert optimizer.param_groups[1]["param_names"] == ["decoder.c", "decoder.b"]


@both
def test_weights_without_names_are_told_apart_when_groups_come_and_go(cls):
    weights = [weight(4, 6, seed=i, dtype=torch.bfloat16) for i in range(4)]
    optimizer = cls([{"params": [p]} for p in weights[:3]])

    def names():
        for p in weights:
            p.grad = torch.ones_like(p)
        optimizer.step()
        buckets = [member.name for bucket in optimizer.engine.buckets() for member in bucket.members]
        assert len(buckets) == len(set(buckets)) == len(optimizer.clipped()) == len(optimizer.param_groups)
        assert set(buckets) == optimizer.clipped().keys()

    names()
    del optimizer.param_groups[0]
    optimizer.add_param_group({"params": [weights[3]]})
    names()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_weight_that_is_given_twice_is_one_weight():
    w = weight(4, 6)
    assert groups_are(PRO([("w", w), ("w", w)]), [w, w])


@both
def test_a_loaded_file_may_not_bring_two_weights_of_one_name(cls):
    source, target = (cls([("a", weight(4, 6)), ("b", weight(4, 6))]) for _ in range(2))
    state = source.state_dict()
    state["param_groups"][0]["param_names"] = ["a", "a"]
    with pytest.raises(ValueError, match="^The loaded state dict: Invalid name 'a': .* remove 'param_names' from its"):
        target.load_state_dict(state)
    assert target.param_groups[0]["param_names"] == ["a", "b"]
    del state["param_groups"][0]["param_names"]
    target.load_state_dict(state)
    assert target.param_groups[0]["param_names"] == ["a", "b"]
