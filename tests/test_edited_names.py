"""Names stand beside weights: a list that is edited alone is told before a weight is taken for its neighbour."""

import pytest
import torch

import prokl
from tests.inputs import KL, PRO, assert_nothing_moved, everything, normal, step, weight

both = pytest.mark.parametrize("cls", [PRO, KL])


@both
@pytest.mark.parametrize("algorithm", ["matrix", "adamw"])
@pytest.mark.parametrize("edited", ["params", "param_names"])
@pytest.mark.parametrize("edit", ["removed", "added"])
def test_names_that_no_longer_fit_the_weights_are_told_and_nothing_moves(cls, algorithm, edited, edit):
    weights = [weight(4, 6, seed=i) for i in range(3)]
    group = {"params": list(zip("abc", weights, strict=True)), "algorithm": algorithm, "lr": 0.01}
    optimizer = cls([{"params": [("first", weight(4, 6))]}, group])
    gradients = [normal(4, 6, seed=i) for i in range(3)]
    for _ in range(2):
        step(optimizer, weights, gradients)
    group = optimizer.param_groups[1]
    before, kept = everything(optimizer), list(group[edited])
    new = weight(4, 6, seed=3) if edited == "params" else "d"
    group[edited][:] = [kept[0], kept[2]] if edit == "removed" else [*kept, new]
    counts = f"{len(group['params'])} weights and {len(group['param_names'])} param_names"
    said = rf"^Group 1 has {counts} \('a', .*\): .* in both lists at the same place"
    for call in (optimizer.step, optimizer.clipped, optimizer.state_dict):
        with pytest.raises(ValueError, match=said):
            call()
    group[edited][:] = kept
    assert_nothing_moved(before, optimizer)
    step(optimizer, weights, gradients)


@both
def test_a_weight_removed_with_its_name_is_let_go_and_the_others_keep_theirs(cls):
    weights = [weight(4, 6, seed=i) for i in range(3)]
    optimizer = cls(list(zip("abc", weights, strict=True)))
    step(optimizer, weights, [normal(4, 6, seed=i) for i in range(3)])
    del optimizer.param_groups[0]["params"][1], optimizer.param_groups[0]["param_names"][1]
    step(optimizer, weights, [normal(4, 6, seed=i) for i in range(3)])
    assert optimizer.clipped().keys() == {"a", "c"}


def test_figures_are_refused_as_steps_are():
    optimizer = PRO([("a", weight(4, 6)), ("b", weight(4, 6))])
    step(optimizer, optimizer.param_groups[0]["params"], [normal(4, 6), normal(4, 6)])
    del optimizer.param_groups[0]["params"][0]
    with pytest.raises(ValueError, match="1 weights and 2 param_names"):
        prokl.diagnostics.scalars(optimizer)


def test_names_taken_off_every_group_are_no_longer_asked_for():
    weights = [weight(4, 6, seed=i) for i in range(2)]
    optimizer = PRO([("a", weights[0]), ("b", weights[1])])
    del optimizer.param_groups[0]["param_names"], optimizer.param_groups[0]["params"][1]
    step(optimizer, weights, [torch.ones(4, 6)] * 2)
    assert optimizer.clipped().keys() == {"parameter 0 of group 0"}
