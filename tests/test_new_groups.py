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
