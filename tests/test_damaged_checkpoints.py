"""A state dict with one bad value in it is refused when it is loaded, whichever value it is, and nothing changes."""

import copy
import math
from functools import lru_cache

import pytest
import torch

from tests.inputs import KL, PRO, assert_nothing_moved, everything, normal, step, weight

KEYS = {
    cls: [("M", False), ("L", False), ("Q_L", False), ("inv_sqrt_lambda_L", True), ("lambda_0", True), *own]
    for cls, own in {
        PRO: [(k, False) for k in ("U", "S", "Q_S")] + [(k, True) for k in ("inv_sqrt_lambda_S", "inv_sqrt_mu")],
        KL: [("R", False), ("Q_R", False), ("inv_sqrt_lambda_R", True)],
    }.items()
}
CASES = [
    (cls, key, value)
    for cls, keys in KEYS.items()
    for key, positive in keys
    for value in (math.nan, math.inf, *((-1.0, 0.0) if positive else ()))
]


def trained(cls, shape, calls=3):
    weights = [weight(3, 4), weight(*shape, seed=1), weight(3)]
    groups = [{"params": [("fine", weights[0]), ("odd", weights[1])]}]
    groups.append({"params": [("bias", weights[2])], "algorithm": "adamw", "lr": 0.1})
    optimizer = cls(groups)
    for call in range(calls):
        step(optimizer, weights, [normal(*p.shape, seed=10 * call + i) for i, p in enumerate(weights)])
    return optimizer


@lru_cache
def saved(cls, shape):
    return trained(cls, shape).state_dict()


def assert_refused(cls, shape, state, message):
    optimizer = trained(cls, shape, calls=2)
    before, groups = everything(optimizer), repr(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state)
    assert_nothing_moved(before, optimizer)
    assert repr(optimizer) == groups


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6)], ids=["matrix", "stack"])
@pytest.mark.parametrize("cls, key, value", CASES)
def test_one_bad_element_of_the_state_is_refused_by_key_and_weight(cls, key, value, shape):
    state = copy.deepcopy(saved(cls, shape))
    state["state"][1][key].view(-1)[-1] = value
    assert_refused(cls, shape, state, rf"The loaded state of odd has {key} with values that are not (positive|finite)")


RATES = [-1.0, math.nan, math.inf, "0.1", None, True, torch.tensor(-1.0), torch.ones(2)]


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("group", [0, 1], ids=["matrix", "adamw"])
@pytest.mark.parametrize("lr", RATES, ids=str)
def test_a_rate_out_of_bounds_is_refused_by_its_group(cls, group, lr):
    state = copy.deepcopy(saved(cls, (4, 6)))
    state["param_groups"][group]["lr"] = lr
    assert_refused(cls, (4, 6), state, rf"Group {group} of the loaded state dict: Invalid lr=")


CLOCKS = [True, -2, 2.0, 2.5, math.nan, "2", None, [2]]
CLOCKS_OF_A_STACK = [3, True, (2, True), (2, -2), (2, 2.5), (2, 2, 2), ("2", "2"), None]
CLOCKS_OF_A_STACK += [torch.tensor(steps) for steps in ([2.0, 2.0], [True, True], [2, -2], [2, 2, 2], [[2], [2]], 2)]


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize(
    "shape, clock, bound",
    [*(((4, 6), clock, "an integer") for clock in CLOCKS), *(((2, 4, 6), c, "2 integers") for c in CLOCKS_OF_A_STACK)],
    ids=str,
)
def test_a_clock_that_is_none_is_refused(cls, shape, clock, bound):
    state = copy.deepcopy(saved(cls, shape))
    state["state"][1]["step"] = clock
    says = rf"^The loaded state of odd has step=.*: must be {bound} of at least -1, .*: load an earlier one\.$"
    assert_refused(cls, shape, state, f"(?s){says}")


@pytest.mark.parametrize("clock", [True, -1, 2.5, math.nan, math.inf, "2", None, *map(torch.tensor, (True, -1.0, 2.5))])
def test_an_adamw_clock_that_is_none_is_refused(clock):
    state = copy.deepcopy(saved(PRO, (4, 6)))
    state["state"][2]["step"] = clock
    says = r"^The loaded AdamW state of bias has step=.*: must be a whole number of at least 0\. .* load an earlier one"
    assert_refused(PRO, (4, 6), state, says)
