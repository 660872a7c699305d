"""Arguments that would be silent, or told without a remedy: each is told once, with where it belongs."""

import inspect
import re

import pytest
import torch
from torch import nn

import prokl
from tests.inputs import KL, PRO, both, weight
from tests.training import named, refused, reloaded, silent, told_once, train, weights_of


def groups(**options):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8))
    return prokl.param_groups(model, **({"lr": 0.05, "adamw_lr": 1e-3} | options))


@both
@pytest.mark.parametrize("lr", [99, torch.tensor(99.0), None], ids=["number", "tensor", "default"])
def test_an_lr_that_every_group_overrides_is_told(cls, lr):
    if lr is None:  # as somebody writes it, not the very default
        lr = float(repr(inspect.signature(cls).parameters["lr"].default))
    given = re.escape(repr(lr))
    says = rf"^lr={given} of the .* reaches no group, as all have their own: lr=0\.05\. Set .*param_groups"
    with told_once(says, __file__):
        optimizer = cls(groups(), lr=lr)
    assert optimizer.param_groups[0]["lr"] == 0.05


@both
def test_what_reaches_a_group_or_says_nothing_is_not_told(cls):
    with silent():
        cls(groups(), weight_decay=0.5, momentum=0.5)
        cls(groups(lr=0.5), lr=0.5)
        cls(groups(lr=torch.tensor(0.5)), lr=torch.tensor(0.5))
        cls([{"params": [weight(4, 6)], "lr": 0.5}, {"params": [weight(4, 6)]}], lr=99)
        cls([weight(4, 6)], lr=99)
        defaults = {k: p.default for k, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}
        cls(groups(), **defaults)  # as configuration systems do
        cls([{"params": [weight(6)], "algorithm": "adamw", "lr": 0.1}], lr=99)  # of matrix groups that come later


@both
def test_adjust_lr_fn_may_be_none_as_muons(cls):
    with silent():
        one, other = cls([weight(8, 4)], adjust_lr_fn=None), cls([{"params": [weight(8, 4)], "adjust_lr_fn": None}])
    assert {o.param_groups[0]["adjust_lr_fn"] for o in (one, other)} == {one.defaults["adjust_lr_fn"]} == {"original"}
    state = other.state_dict()
    state["param_groups"][0]["adjust_lr_fn"] = None
    one.load_state_dict(state)
    assert one.param_groups[0]["adjust_lr_fn"] == "original"
    bracket = prokl.diagnostics.alpha_kl_bracket
    assert bracket(8, 4, 2, adjust_lr_fn=None) == bracket(8, 4, 2)
    one.param_groups[0]["adjust_lr_fn"] = None
    assert train(one, [0]).param_groups[0]["adjust_lr_fn"] == "original"


@both
def test_a_named_group_beside_unnamed_ones_is_refused(cls):
    given, bare = cls([("a", weight(4, 6))]), cls([weight(4, 6)])
    remedy = "with/without names"  # torch's
    for optimizer, late in ((given, weight(4, 6)), (bare, ("late", weight(4, 6)))):
        with refused(optimizer, remedy):
            optimizer.add_param_group({"params": [late]})
    with pytest.raises(ValueError, match=remedy):
        cls([("a", weight(4, 6)), weight(4, 6)])
    with pytest.raises(ValueError, match=remedy):
        cls([{"params": [("a", weight(4, 6))]}, {"params": [weight(6)], "algorithm": "adamw", "lr": 0.1}])


@both
@pytest.mark.parametrize(
    "given, says",
    [
        ({"betas": (0.9, 0.95)}, r"takes no betas: .*adamw_betas of prokl\.param_groups.*momentum and beta2"),
        ({"adamw_lr": 1e-3}, r"takes no adamw_lr: .*prokl\.param_groups\(model, adamw_lr=\.\.\.\)"),
        ({"adamw": ["*.head.*"]}, r"takes no adamw: .*prokl\.param_groups\(model, adamw=\.\.\.\)"),
        ({"split": 3}, r"takes no split: .*prokl\.param_groups\(model, split=\.\.\.\)"),
        ({"fused": True}, r'takes no fused: .*"algorithm": "adamw"'),
        ({"weight_deacy": 1}, r"unexpected keyword argument 'weight_deacy': the nearest is 'weight_decay'\."),
        ({"learning_rate": 1}, r"unexpected keyword argument 'learning_rate': the nearest is 'lr'\."),
        ({"nesterov": True}, r"takes no nesterov: .* leave it out"),
        ({"foo": True}, r"unexpected keyword argument 'foo': it takes lr, weight_decay, .*, process_group\."),
        ({"process_grop": None}, r"unexpected keyword argument 'process_grop': the nearest is 'process_group'\."),
        ({"epsilon": 1e-6}, r"unexpected keyword argument 'epsilon': the nearest is 'eps'\."),
        ({"ns_step": 3, "lr": 0.1}, r"unexpected keyword argument 'ns_step': "),
    ],
)
def test_an_argument_of_others_says_where_it_belongs(cls, given, says):
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) .*{says}"):
        cls([weight(4, 6)], **given)


def test_a_setting_of_pro_klshampoo_is_none_of_klshampoo():
    form = r"leave it out\. .* form is KLShampoo\(groups, init_eigenvalue=0\.1, clip_threshold=None\)"
    for given in ({"alpha_kl": 0.01}, {"rank": 2}, {"ns_steps": 3}, {"variant": "smok-hop"}, prokl.PAPER):
        with pytest.raises(TypeError, match=rf"^KLShampoo\(\) takes no \w+: it is ProKLShampoo's, .*; {form}"):
            KL([weight(4, 6)], **given)
    KL([weight(4, 6)], init_eigenvalue=0.1, clip_threshold=None)


def test_a_subclass_is_told_of_other_than_its_own_defaults():
    class Own(PRO):
        def __init__(self, params, lr=0.5, **more):
            super().__init__(params, lr=lr, **more)

    with silent():
        Own(groups())
        Own(groups(), momentum=0.5)
    with pytest.warns(UserWarning, match=r"^lr=0\.7 of the constructor reaches no group"):
        Own(groups(), lr=0.7)


@both
def test_float16_weights_are_told_once_at_the_first_step(cls):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8)).half()
    model[0].bias.requires_grad_(False)
    model[2].weight.data = model[2].weight.data.float()
    optimizer = cls(prokl.param_groups(model, lr=0.1, adamw_lr=0.1))
    with told_once(r"^4 of 5 weights that train are float16, .* among them.*: use bfloat16 or float32", __file__):
        optimizer.step()
    with silent():
        optimizer.step()
        cls(prokl.param_groups(model.bfloat16(), lr=0.1, adamw_lr=0.1)).step()
        frozen = nn.Linear(4, 6).half().requires_grad_(False)
        cls(prokl.param_groups(nn.Sequential(frozen, nn.Linear(6, 8)), lr=0.1, adamw_lr=0.1)).step()


def made(cls, own, calls=0):
    """Train one weight of a group with settings of its own."""
    return train(cls([{"params": [("w", weight(12, 18))], **own}]), range(calls))


OTHER_STATE = {
    "rank": ({"rank": 3}, {"rank": 2}),
    "variant": ({"variant": "smok-hop"}, {"variant": "pro-klshampoo"}),
    "state_dtype": ({"state_dtype": torch.bfloat16}, {"state_dtype": None}),
    "init_eigenvalue": ({"init_eigenvalue": 0.1}, {"init_eigenvalue": "auto"}),
    "split": ({"split": 3}, {"split": None}),
    "split of each": ({"split": [3]}, {"split": [None]}),
    "transposed": ({"transposed": True}, {"transposed": False}),
}


@pytest.mark.parametrize("there, here", OTHER_STATE.values(), ids=OTHER_STATE)
def test_settings_of_a_loaded_state_are_told_once_it_is_loaded(there, here):
    """Those of a file without state made nothing."""
    ((key, value),), (own,) = there.items(), here.values()
    optimizer, saved = made(PRO, {**here, "momentum": 0.5}), reloaded(made(PRO, there, 2).state_dict())
    says = re.escape(f"has {key}={value!r} for group 0, here {own!r}. Its state")
    with told_once(rf"^The .* {says}", __file__):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0][key] == value and optimizer.param_groups[0]["momentum"] == 0.9
    with silent():
        optimizer.load_state_dict(saved)
        made(PRO, here).load_state_dict(made(PRO, there).state_dict())


@both
def test_a_file_that_lacks_some_matrices_is_told_of(cls):
    saved, optimizer, frozen = (train(cls(named((6, 10), (4, 6), (3, 5))), range(n)) for n in (3, 0, 0))
    state = {i: own for i, own in saved.state_dict()["state"].items() if i != 1}
    lacking = {**saved.state_dict(), "state": state}
    with told_once("has no state of 1 of 3 matrices, .* they begin anew", __file__):
        optimizer.load_state_dict(lacking)
    weights_of(frozen)[1].requires_grad_(False)
    with silent():
        frozen.load_state_dict(lacking)
        frozen.load_state_dict({**lacking, "state": {}})


def test_a_load_that_is_refused_says_nothing_else():
    saved = made(PRO, {}, 2).state_dict()
    del saved["state"][0]["U"]
    with silent(), pytest.raises(ValueError, match="no tensor U where ProKLShampoo needs"):
        made(PRO, {"init_eigenvalue": 0.1}).load_state_dict(saved)


def test_groups_that_were_edited_into_what_cannot_be_read_are_mended_by_a_load():
    optimizer, saved = made(PRO, {"split": 3}), made(PRO, {"split": 3}, 2).state_dict()
    optimizer.param_groups[0].update(split=0, rank="no")
    del optimizer.param_groups[0]["variant"]
    says = r"has rank='auto' for .* here 'no'; variant='pro-klshampoo' .* here None; split=3 for group 0, here 0"
    with told_once(says, __file__):
        optimizer.load_state_dict(saved)
    train(optimizer, [2])


SAME_STATE = [
    ({"rank": 2}, {"rank": "auto"}),
    ({"rank": 12}, {"rank": 99}),
    ({"state_dtype": torch.float32}, {"state_dtype": None}),
    ({"split": 3}, {"split": (4, 4, 4)}),
]


@pytest.mark.parametrize("one, other", [*SAME_STATE, *(pair[::-1] for pair in SAME_STATE)], ids=str)
def test_settings_that_come_to_the_same_are_not_told_at_a_load(one, other):
    with silent():
        made(PRO, one).load_state_dict(made(PRO, other, 2).state_dict())
