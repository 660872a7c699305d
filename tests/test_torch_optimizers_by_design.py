"""The two optimizers differ from PyTorch's by design, each difference beside what AdamW does.

docs/torch-optim.md has the list with the reasons. Tests of refused inputs are in
``test_bad_settings.py`` and ``test_checkpoint.py``.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW, lr_scheduler

from tests.inputs import both, normal, step, weight
from tests.training import contents, differences, train

ROOT = Path(__file__).parent.parent


def trained(cls, calls=4, dtype=torch.float32, **settings):
    p = weight(3, 4, dtype=dtype)
    return p, train(cls([p], **settings), range(calls))


def changed(cls, gradient, calls=4, **settings):
    """Return the parts of weight and state that one more step with this gradient changes."""
    p, optimizer = trained(cls, calls, **settings)
    before = contents(optimizer)
    step(optimizer, [p], [gradient])
    return {key for _, key in differences(before, optimizer)}


@both
def test_the_first_gradient_only_initialises(cls):
    assert "W" in changed(AdamW, normal(3, 4), calls=0)
    assert "W" not in changed(cls, normal(3, 4), calls=0)
    assert "W" in changed(cls, normal(3, 4), calls=1)


@both
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_gradient_that_says_nothing_leaves_weight_and_state(cls, value):
    gradient = torch.full((3, 4), value)
    assert "W" in changed(AdamW, gradient, weight_decay=0.1)
    assert changed(cls, gradient, calls=12, weight_decay=0.1) <= {"step", "skipped"}  # no refresh is due


@both
@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable"])
def test_the_constructor_offers_no_implementation_of_pytorchs(cls, flag):
    AdamW([weight(3, 4)], **{flag: False})
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{flag}'|takes no {flag}: "):
        cls([weight(3, 4)], **{flag: False})


@both
def test_a_group_that_was_given_stays_the_callers(cls):
    """Two optimizers can take the same groups: neither sees what the other, or the caller, makes of them."""
    for optimizer, theirs in ((AdamW, True), (cls, False)):
        given = {"params": [weight(3, 4)], "lr": torch.tensor(0.1)}
        (group,) = optimizer([given]).param_groups
        assert (group is given, group["lr"] is given["lr"]) == (theirs, theirs)
        assert (given.keys() == {"params", "lr"}) != theirs


@both
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
def test_no_step_is_differentiable(cls, algorithm):
    group = {"params": [weight(3, 4)], "algorithm": algorithm, "lr": 0.1}
    with pytest.raises(ValueError, match="Invalid differentiable=True: must be False or left out"):
        cls([{**group, "differentiable": True}])
    optimizer = cls([{**group, "differentiable": False}])
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(ValueError, match="Invalid differentiable=True"):
        optimizer.step()


@both
def test_an_adamw_group_has_settings_of_its_own_but_for_maximize(cls):
    groups = [{"params": [weight(3, 4)]}, {"params": [weight(4)], "algorithm": "adamw", "lr": 1e-3}]
    ours = cls(groups, lr=0.5, weight_decay=0.25, eps=0.125, maximize=True).param_groups[1]
    assert [ours[k] for k in ("lr", "betas", "eps", "weight_decay", "maximize")] == [1e-3, (0.9, 0.95), 1e-8, 0.0, True]


@both
def test_momentum_is_cycled_and_the_betas_of_adamw_groups_stay(cls):
    groups = [{"params": [weight(3, 4)]}, {"params": [weight(4)], "algorithm": "adamw", "lr": 1e-3}]
    ours, theirs = cls(copy.deepcopy(groups)), AdamW([weight(4)])
    for optimizer in (ours, theirs):
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9, base_momentum=0.5, max_momentum=0.75)
    assert ours.param_groups[0]["momentum"] == 0.75 and ours.param_groups[1]["betas"] == (0.9, 0.95)
    assert theirs.param_groups[0]["betas"][0] == 0.75


@both
def test_the_clock_is_kept_on_the_host_and_starts_below_zero(cls):
    p, optimizer = trained(cls, calls=4)
    assert type(optimizer.state[p]["step"]) is int and optimizer.state[p]["step"] == 3
    p, optimizer = trained(AdamW, calls=4)
    assert optimizer.state[p]["step"].item() == 4
    p, optimizer = trained(cls, calls=0)
    step(optimizer, [p], [torch.zeros(3, 4)])
    assert optimizer.state[p]["step"] < 0


@both
def test_the_dtype_of_a_loaded_state_does_not_become_the_weights(cls):
    kept = {}
    for make, key in ((cls, "M_Q"), (AdamW, "exp_avg")):
        _, source = trained(make)
        p, target = trained(make, calls=0, dtype=torch.bfloat16)
        target.load_state_dict(source.state_dict())
        kept[make] = target.state[p][key].dtype
    assert kept == {cls: torch.float32, AdamW: torch.bfloat16}


def test_every_listed_difference_has_a_test_and_conversely():
    table = (ROOT / "docs" / "torch-optim.md").read_text(encoding="utf-8")
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    listed = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert all(listed)
    tests = {path: set(re.findall(r"^def (test_\w+)", path.read_text(), re.M)) for path in ROOT.glob("tests/test_*.py")}
    named = {name for names in listed for name in names}
    assert named <= set.union(*tests.values())
    own = tests[ROOT / "tests" / Path(__file__).name]
    assert own - named == {test_every_listed_difference_has_a_test_and_conversely.__name__}
