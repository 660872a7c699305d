"""What is asked of torch in the same words, and what would be silent or told without a remedy."""

import subprocess
import sys
import warnings

import pytest
import torch.distributed as dist
from torch import nn

import prokl
from tests.inputs import KL, PRO, normal, weight

both = pytest.mark.parametrize("cls", [PRO, KL])


@pytest.mark.parametrize(
    "what", ["ops.explain(None, 'cpu')", "ops.explain_qr('cpu')", "cuda_qr.qr", "diagnostics.scalars"]
)
def test_importing_the_package_is_enough(what):
    code = f"import prokl, sys; prokl.{what}; assert 'triton' not in sys.modules and 'matplotlib' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@both
def test_adjust_lr_fn_may_be_none_as_muons(cls):
    weights = [weight(8, 4), weight(8, 4)]
    one, other = cls(weights[:1], adjust_lr_fn=None), cls([{"params": weights[1:], "adjust_lr_fn": None}])
    assert {o.param_groups[0]["adjust_lr_fn"] for o in (one, other)} == {one.defaults["adjust_lr_fn"]} == {"original"}
    state = other.state_dict()
    state["param_groups"][0]["adjust_lr_fn"] = None
    one.load_state_dict(state)
    assert one.param_groups[0]["adjust_lr_fn"] == "original"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([{"params": [weight(8, 4)], "adjust_lr_fn": None}], adjust_lr_fn=None)
    bracket = prokl.diagnostics.alpha_kl_bracket
    assert bracket(8, 4, 2, adjust_lr_fn=None) == bracket(8, 4, 2)
    for p in weights:
        p.grad = normal(8, 4)
    one.step()


@both
def test_world_before_init_process_group_is_told(cls, monkeypatch):
    """It is None then, as the default."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    said = r"^process_group=None was given: .*WORLD is None until init_process_group\(\).*WORLD_SIZE=4 every rank"
    with pytest.warns(UserWarning, match=said) as caught:
        cls([weight(4, 6)], process_group=dist.group.WORLD)
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls([weight(4, 6)])  # nothing was asked for
        for alone in ("1", "many"):
            monkeypatch.setenv("WORLD_SIZE", alone)
            cls([weight(4, 6)], process_group=None)
        monkeypatch.delenv("WORLD_SIZE")
        cls([weight(4, 6)], process_group=None)
        monkeypatch.setenv("WORLD_SIZE", "4")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            cls([weight(4, 6)], process_group=None)  # meant, now that there is another
        finally:
            dist.destroy_process_group()


@both
def test_a_group_with_names_beside_others_without_is_refused_with_the_remedy(cls):
    named, bare = cls([("a", weight(4, 6))]), cls([weight(4, 6)])
    remedy = r"with/without names.*\(name, parameter\) pairs.*names=False"
    for optimizer, late in ((named, weight(4, 6)), (bare, ("late", weight(4, 6)))):
        with pytest.raises(ValueError, match=remedy):
            optimizer.add_param_group({"params": [late]})
        assert len(optimizer.param_groups) == 1
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
        ({"nesterov": True}, r"unexpected keyword argument 'nesterov': it takes lr, weight_decay, "),
    ],
)
def test_an_argument_of_others_says_where_it_belongs(cls, given, says):
    with pytest.raises(TypeError, match=says):
        cls([weight(4, 6)], **given)


@pytest.mark.parametrize("names", ["yes", None, 2, ["a"]])
def test_names_of_param_groups_is_true_or_false(names):
    with pytest.raises(ValueError, match=r"Invalid names=.*: must be one of \(True, False\)"):
        prokl.param_groups(nn.Linear(4, 6), lr=0.1, adamw_lr=0.1, names=names)


@both
def test_float16_weights_are_told_once_at_construction(cls):
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8)).half()
    model[0].bias.requires_grad_(False)
    model[2].weight.data = model[2].weight.data.float()
    said = r"^4 of 5 weights that train are float16, .* among them.*: use bfloat16 or float32"
    with pytest.warns(UserWarning, match=said) as caught:
        cls(prokl.param_groups(model, lr=0.1, adamw_lr=0.1))
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(prokl.param_groups(model.bfloat16(), lr=0.1, adamw_lr=0.1))
        frozen = nn.Linear(4, 6).half().requires_grad_(False)
        cls(prokl.param_groups(nn.Sequential(frozen, nn.Linear(6, 8)), lr=0.1, adamw_lr=0.1))
