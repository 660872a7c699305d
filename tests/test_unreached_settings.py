"""What is given to the constructor and reaches no group is told, once, with where to set it."""

import inspect
import warnings

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import KL, PRO, weight

both = pytest.mark.parametrize("cls", [PRO, KL])


def model():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 8))


def groups(**options):
    return param_groups(model(), **({"lr": 0.05, "adamw_lr": 1e-3} | options))


@both
@pytest.mark.parametrize("lr", [99, torch.tensor(99.0)], ids=["number", "tensor"])
def test_an_lr_that_every_group_overrides_is_told(cls, lr):
    said = (
        r"^lr=(99|tensor\(99\.\)) of the constructor reaches no group, as all have their own: lr=0\.05\. Set it there, "
    )
    with pytest.warns(UserWarning, match=said) as caught:
        optimizer = cls(groups(), lr=lr)
    assert len(caught) == 1 and caught[0].filename == __file__ and "param_groups" in str(caught[0].message)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_all_of_them_are_told_at_once():
    said = r"^lr=99, weight_decay=0\.5, rank=3 of .* reach no group, .*: lr=0\.05, weight_decay=0\.1, rank=2\."
    with pytest.warns(UserWarning, match=said) as caught:
        PRO(groups(weight_decay=0.1, rank=2), 99, 0.5, rank=3)
    assert len(caught) == 1
    two = [{"params": [weight(4, 6)], "momentum": 0.5}, {"params": [weight(4, 6)], "momentum": 0.6}]
    with pytest.warns(UserWarning, match=r"^momentum=0\.7 .*: momentum=0\.5, 0\.6\."):
        PRO(two, momentum=0.7)


@both
def test_what_reaches_a_group_or_says_nothing_is_not_told(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cls(groups(), weight_decay=0.5, momentum=0.5)
        cls(groups(lr=0.5), lr=0.5)
        cls(groups(lr=torch.tensor(0.5)), lr=torch.tensor(0.5))
        cls([{"params": [weight(4, 6)], "lr": 0.5}, {"params": [weight(4, 6)]}], lr=99)
        cls([weight(4, 6)], lr=99)
        defaults = {k: p.default for k, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}
        cls(groups(), **defaults)  # as configuration systems do
        cls([{"params": [weight(6)], "algorithm": "adamw", "lr": 0.1}], lr=99)  # of matrix groups that come later
        cls(groups(), preset="paper")


def test_the_warning_turned_into_an_error_is_raised_by_the_constructor():
    with warnings.catch_warnings(), pytest.raises(UserWarning, match="reaches no group"):
        warnings.simplefilter("error")
        PRO(groups(), lr=99)
