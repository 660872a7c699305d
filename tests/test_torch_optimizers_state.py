"""What PyTorch's own optimizer tests ask of state dicts, copies and their hooks, asked of both optimizers.

As :mod:`tests.test_torch_optimizers_step`.
"""

import copy

import pytest
import torch

from tests.inputs import weight
from tests.torch_optimizers import COPIES, OURS, Problem, equal, of_all, of_all_settings
from tests.training import reloaded

STEPS = 4  # a refresh comes at every third of them


def primed(info, chosen, **kwargs):
    often = {"precondition_frequency": 3} if info in OURS else {}
    return Problem(info, {**often, **chosen.kwargs}, **kwargs).steps(STEPS)


def nameless(state_dict):
    groups = [{k: v for k, v in group.items() if k != "param_names"} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def loaded(travel):
    """Return a way to go on: what travelling makes of the state dict, on equal weights that are not the same ones."""

    def carry(problem):
        twin = problem.twin()
        twin.optimizer.load_state_dict(travel(problem, copy.deepcopy(problem.optimizer.state_dict())))
        return twin

    return carry


def copied(duplicate):
    """Return a way to go on: with a copy of the optimizer and of its weights."""

    def carry(problem):
        twin = copy.copy(problem)
        twin.weight, twin.bias, twin.optimizer = duplicate((problem.weight, problem.bias, problem.optimizer))
        assert vars(twin.optimizer).keys() >= {key for key in vars(problem.optimizer) if not key.startswith("_")}
        return twin

    return carry


def as_it_is(problem, state):
    return state


def through_a_file_that_runs_no_code(problem, state):
    return reloaded(state)


def with_steps_as_numbers(problem, state):
    for own in state["state"].values():
        if torch.is_tensor(own.get("step")):
            own["step"] = own["step"].tolist()
    return state


def as_an_older_release_saved_it(problem, state):
    flags = ("foreach", "fused", "maximize", "amsgrad", "decoupled_weight_decay")
    for group in state["param_groups"] if problem.info in OURS else ():
        for flag in (*problem.info.not_og_supported_flags, *flags):
            group.pop(flag, None)
    return state


WAYS = [as_it_is, through_a_file_that_runs_no_code, with_steps_as_numbers, as_an_older_release_saved_it]
WAYS = {way.__name__: loaded(way) for way in WAYS} | {name: copied(way) for name, way in COPIES.items()}


@of_all_settings
def test_a_run_that_is_carried_over_goes_on_as_it_would_have(info, chosen):
    """In whatever way; and its state dict is the same again."""
    here = primed(info, chosen)
    state = copy.deepcopy(here.optimizer.state_dict())
    others = {name: carry(here) for name, carry in WAYS.items()}
    for name, there in others.items():
        assert equal(state, here.optimizer.state_dict()) and equal(state, there.optimizer.state_dict()), name
    for _ in range(3):
        wanted = here.steps(1).contents()
        for name, there in others.items():
            assert equal(wanted, there.steps(1).contents()), name
            assert equal(here.optimizer.state_dict(), there.optimizer.state_dict()), name


@of_all
@pytest.mark.parametrize("to", [False, True], ids=["to unnamed", "to named"])
@pytest.mark.parametrize("given", [False, True], ids=["from unnamed", "from named"])
def test_names_are_kept_whichever_side_has_them_and_nothing_else_depends_on_them(info, given, to):
    here = Problem(info, {}, named=given).steps(STEPS)
    there = Problem(info, {}, named=to)
    there.optimizer.load_state_dict(copy.deepcopy(here.optimizer.state_dict()))
    with torch.no_grad():
        there.weight.copy_(here.weight)
        there.bias.copy_(here.bias)
    assert equal(here.steps(2).contents(), there.steps(2).contents())
    assert equal(nameless(here.optimizer.state_dict()), nameless(there.optimizer.state_dict()))
    names = [group.get("param_names") for group in there.optimizer.state_dict()["param_groups"]]
    assert [name for own in names for name in own or ()] == [
        str(i) for i, _ in enumerate(there.contents()) if given or to
    ]


@of_all
def test_a_group_given_twice_is_saved_as_the_same_twice(info):
    optimizer = Problem(info, {}).steps(2).optimizer
    once = optimizer.state_dict()["param_groups"]
    optimizer.param_groups.extend(optimizer.param_groups)
    assert optimizer.state_dict()["param_groups"] == once + once


@of_all
def test_every_weight_with_a_gradient_has_state_after_one_step(info):
    problem = Problem(info, {}).steps(1)
    assert all(len(state) > 0 for state in problem.optimizer.state.values())
    assert problem.weight in problem.optimizer.state


@of_all
@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "replaced by a smaller one"])
def test_a_pruned_weight_takes_its_state_along(info, replaced):
    weights = [weight(4, 6), weight(3, 4)]
    optimizer = info.optim_cls(weights)

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
def test_groups_that_do_not_match_are_refused_and_change_nothing(info, change):
    def build():
        return info.optim_cls([{"params": [weight(2, 3)]}, {"params": [weight(3, 4), weight(4, 5)], "lr": 0.25}])

    source, target = build(), build()
    for p in (p for group in source.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    source.step()
    state = source.state_dict()
    change(state["param_groups"])
    before = copy.deepcopy(target.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups|match the size of optimizer's group"):
        target.load_state_dict(state)
    assert equal(before, target.state_dict())
