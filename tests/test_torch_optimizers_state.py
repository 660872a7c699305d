"""Ask both optimizers what PyTorch's own tests ask of state dicts, copies, hooks and the profiler.

See :mod:`tests.test_torch_optimizers_step`.
"""

import copy

import pytest
import torch
from torch.optim import AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.inputs import weight
from tests.torch_optimizers import OURS, Problem, of_all
from tests.training import COPIES, contents, differences, reloaded, same

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
    with pytest.raises(KeyError, match=r"shape \(4, 6\), which is in no group.*state\.pop" if cls in OURS else ""):
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


# Hooks and the profiler


@of_all
def test_hooks_fire_in_order_and_may_replace_what_step_is_given(cls):
    problem, data = Problem(cls, {}), []

    def note(what):
        return lambda optimizer, args, kwargs: data.append(what)

    def replace(optimizer, args, kwargs):
        return (args[0], lambda: 7.0), {}

    handles = [
        register_optimizer_step_pre_hook(note("before all")),
        register_optimizer_step_post_hook(note("after all")),
        problem.optimizer.register_step_pre_hook(note("before")),
        problem.optimizer.register_step_post_hook(note("after")),
    ]
    order = ["before all", "before", "after", "after all"]
    try:
        problem.steps(2)
        assert data == 2 * order
        with_closure = problem.optimizer.register_step_pre_hook(replace)
        assert problem.optimizer.step() == 7.0
        with_closure.remove()
        AdamW([weight(3)]).step()
        assert data == 3 * order + ["before all", "after all"]
    finally:
        for handle in handles:
            handle.remove()
    problem.steps(1)
    assert len(data) == 14


@of_all
def test_the_profiler_sees_each_call_once_by_its_name(cls):
    problem = Problem(cls, {})
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        problem.steps(2)
    events = {event.key: event.count for event in profile.key_averages() if event.key.startswith("Optimizer.")}
    assert events == {f"Optimizer.step#{cls.__name__}.step": 2, f"Optimizer.zero_grad#{cls.__name__}.zero_grad": 2}


def leave_mark(optimizer):
    optimizer.state["mark"] = 1


def take_mark(optimizer, state_dict):
    state_dict["marked"] = state_dict["state"].pop("mark", None) == 1
    return state_dict


@of_all
def test_hooks_of_saving_see_the_state_before_and_the_dict_after(cls):
    problem = Problem(cls, {}).steps(2)
    before = problem.optimizer.register_state_dict_pre_hook(leave_mark)
    assert problem.optimizer.state_dict()["state"]["mark"] == 1
    problem.optimizer.register_state_dict_post_hook(take_mark)
    state = problem.optimizer.state_dict()
    assert state["marked"] and "mark" not in state["state"]
    before.remove()
    del problem.optimizer.state["mark"]
    assert not problem.optimizer.state_dict()["marked"]


@of_all
def test_a_hooks_keys_in_the_state_go_along_everywhere(cls):
    """PyTorch's hooks keep marks under names of their own, which are no dicts."""
    problem = Problem(cls, {}).steps(2)
    leave_mark(problem.optimizer)
    problem.steps(1)
    twin = problem.twin()
    twin.optimizer.load_state_dict(reloaded(problem.optimizer.state_dict()))
    for other in (*(duplicate(problem.optimizer) for duplicate in COPIES.values()), twin.optimizer):
        assert other.state["mark"] == 1
        assert same(other.state_dict(), problem.optimizer.state_dict())
    assert differences(problem.steps(2).optimizer, twin.steps(2).optimizer) == set()


def rate(value, returns=False):
    def hook(optimizer, state_dict):
        own = copy.deepcopy(state_dict) if returns else state_dict
        own["param_groups"][0]["lr"] = value
        return own if returns else None

    return hook


@of_all
@pytest.mark.parametrize("returns", [False, True], ids=["in place", "returned"])
def test_load_hooks_run_in_order_and_their_result_is_loaded(cls, returns):
    problem, seen = Problem(cls, {}).steps(2), []
    state, optimizer = copy.deepcopy(problem.optimizer.state_dict()), problem.optimizer

    def after(optimizer):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.state["ran"] = True

    optimizer.register_load_state_dict_post_hook(after)
    for value, returned, first in ((0.5, False, False), (0.25, returns, True), (0.125, returns, False)):
        optimizer.register_load_state_dict_pre_hook(rate(value, returned), prepend=first)
        optimizer.load_state_dict(copy.deepcopy(state))
    assert seen == [0.5, 0.5, 0.125] and optimizer.state["ran"] is True
    problem.steps(1).optimizer.state_dict()


def count(optimizer, args, kwargs):
    optimizer.state["count"] = optimizer.state.get("count", 0) + 1


@of_all
@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copy_has_no_hooks_and_takes_new_ones(cls, duplicate):
    problem = Problem(cls, {}).steps(1)
    problem.optimizer.register_step_post_hook(count)
    problem.optimizer.register_state_dict_pre_hook(leave_mark)
    problem.steps(1)
    other = duplicate(problem.optimizer)
    other.step()
    assert other.state["count"] == 1 and "mark" not in other.state_dict()["state"]
    other.register_step_post_hook(count)
    other.step()
    assert other.state["count"] == 2
