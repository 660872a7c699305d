"""Ask both optimizers what PyTorch's own tests ask of state dicts, copies and their hooks.

See :mod:`tests.test_torch_optimizers_step`.
"""

import copy

import pytest
import torch

from tests.inputs import weight
from tests.torch_optimizers import Problem, of_all
from tests.training import contents, differences, same

STEPS = 4  # a refresh comes at every third of them


def nameless(state_dict):
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


@of_all
@pytest.mark.parametrize("to", [False, True], ids=["to unnamed", "to named"])
@pytest.mark.parametrize("given", [False, True], ids=["from unnamed", "from named"])
def test_names_are_kept_from_either_side(cls, given, to):
    here = Problem(cls, {}, named=given).steps(STEPS)
    there = Problem(cls, {}, named=to)
    there.optimizer.load_state_dict(copy.deepcopy(here.optimizer.state_dict()))
    with torch.no_grad():
        there.weight.copy_(here.weight)
        there.bias.copy_(here.bias)
    assert differences(here.steps(2).optimizer, there.steps(2).optimizer) == set()
    assert same(nameless(here.optimizer.state_dict()), nameless(there.optimizer.state_dict()))
    names = [group.get("param_names") for group in there.optimizer.state_dict()["param_groups"]]
    assert [name for own in names for name in own or ()] == [
        str(i) for i, _ in enumerate(contents(there.optimizer)) if given or to
    ]


@of_all
def test_a_group_given_twice_is_saved_as_the_same_twice(cls):
    optimizer = Problem(cls, {}).steps(2).optimizer
    once = optimizer.state_dict()["param_groups"]
    optimizer.param_groups.extend(optimizer.param_groups)
    assert optimizer.state_dict()["param_groups"] == once + once


@of_all
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced by a smaller one"])
def test_a_pruned_weight_takes_its_state_along(cls, replaced):
    weights = [weight(4, 6), weight(3, 4)]
    optimizer = cls(weights)

    def steps():
        for p in weights:
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.step()

    steps()
    pruned, now = weights[0], [weight(3, 6)] if replaced else []
    weights[:1] = optimizer.param_groups[0]["params"][:1] = now
    with pytest.raises(KeyError):  # not only here
        optimizer.state_dict()
    del optimizer.state[pruned]
    before = pruned.detach().clone()
    for state in (optimizer.state_dict(), steps() or optimizer.state_dict()):
        optimizer.load_state_dict(state)
        steps()
    assert pruned not in optimizer.state and torch.equal(pruned, before)
    assert set(optimizer.state_dict()["state"]) == set(range(len(weights)))


MISMATCHES = {
    "a group less": lambda groups: groups.pop(),
    "a weight less": lambda groups: groups[0]["params"].pop(),
    "a weight more": lambda groups: groups[0]["params"].append(99),
    "groups in another order": lambda groups: groups.reverse(),
}


@of_all
@pytest.mark.parametrize("change", MISMATCHES.values(), ids=MISMATCHES)
def test_groups_that_do_not_match_are_refused_and_change_nothing(cls, change):
    def build():
        return cls([{"params": [weight(2, 3)]}, {"params": [weight(3, 4), weight(4, 5)], "lr": 0.25}])

    source, target = build(), build()
    for p in (p for group in source.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    source.step()
    state = source.state_dict()
    change(state["param_groups"])
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups|match the size of optimizer's group"):
        target.load_state_dict(state)
    assert same(before, target.state_dict())
