"""What a weight's state was made with is held to wherever the weight is, and forgotten with the state."""

import gc
import weakref

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from tests.inputs import changed, frozen, normal, weight

SHAPE = (6, 9)


def step(optimizer, *weights, t=0):
    for i, p in enumerate(weights):
        p.grad = normal(*p.shape, seed=100 * t + i)
    optimizer.step()


def two_groups(**second):
    a, b = weight(*SHAPE), weight(*SHAPE, seed=1)
    optimizer = ProKLShampoo([{"params": [a], "rank": 3}, {"params": [b], "rank": 3, **second}])
    for t in range(3):
        step(optimizer, a, b, t=t)
    return optimizer, a, b


MOVES = {
    "rank": ({"rank": 2}, {}),
    "variant": ({"variant": "smok-hop"}, {}),
    "auto to a number": ({"init_eigenvalue": 0.1}, {}),
    "a number to auto": ({}, {"init_eigenvalue": 0.1}),
    "state_dtype": ({"state_dtype": torch.bfloat16}, {}),
}


@pytest.mark.parametrize("case", MOVES)
def test_a_weight_moved_with_its_state_to_a_group_of_other_settings_is_refused_by_name(case):
    target, source = MOVES[case]
    optimizer, a, b = two_groups(**target)
    optimizer.param_groups[0].update(source)  # before ...
    if source:
        optimizer.state.clear()  # ... there is state
        step(optimizer, a, b, t=3)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    before = [frozen(optimizer, p) for p in (a, b)]
    (name,) = target or source
    with pytest.raises(
        ValueError, match=rf"^Invalid {name}=.*the state of parameter 1 of group 1 was made with {name}="
    ):
        step(optimizer, a, b, t=4)
    assert not any(changed(old, frozen(optimizer, p)) for old, p in zip(before, (a, b), strict=True))
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    step(optimizer, a, b, t=4)  # set back, it goes on
    assert all(changed(old, frozen(optimizer, p)) for old, p in zip(before, (a, b), strict=True))


def test_a_weight_moves_with_its_state_to_a_group_of_the_same_settings():
    optimizer, a, b = two_groups(lr=0.3)
    optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop())
    step(optimizer, a, b, t=3)
    assert optimizer.state[a]["step"] == optimizer.state[b]["step"] == 3


@pytest.mark.parametrize("other", [{"rank": 2}, {"variant": "smok-hop"}])
def test_a_copied_group_is_held_to_what_the_state_was_made_with(other):
    optimizer, a, b = two_groups()
    optimizer.param_groups[0] = dict(optimizer.param_groups[0], **other)
    with pytest.raises(ValueError, match=f"Invalid {next(iter(other))}="):
        step(optimizer, a, b, t=3)


@pytest.mark.parametrize(
    "cls, other",
    [(ProKLShampoo, {"rank": 2}), (ProKLShampoo, {"init_eigenvalue": 0.1}), (KLShampoo, {"init_eigenvalue": 0.1})],
)
def test_settings_are_free_again_once_the_state_is_gone(cls, other):
    ours, twin = weight(*SHAPE), weight(*SHAPE)
    optimizer, fresh = cls([ours]), cls([twin], **other)
    step(optimizer, ours)
    optimizer.state.pop(ours)
    optimizer.param_groups[0].update(other)
    for t in range(1, 4):
        step(optimizer, ours, t=t)
        step(fresh, twin, t=t)
    assert torch.equal(ours, twin)


def test_settings_of_a_weight_that_still_waits_are_free_again_once_its_state_is_gone():
    """A weight without a gradient has a state for checkpoints, and no place in a batch that would notice."""
    begun, waiting = weight(*SHAPE), weight(*SHAPE, seed=1)
    optimizer = ProKLShampoo([{"params": [begun]}, {"params": [waiting], "rank": 3}])
    step(optimizer, begun)
    optimizer.state.pop(waiting)
    optimizer.param_groups[1]["rank"] = 2
    step(optimizer, begun, waiting)
    assert optimizer.state[waiting]["U"].shape[-1] == 2


def test_a_deleted_group_leaves_nothing_to_the_groups_that_come_after_it():
    """Python gives a new group the address of one that is gone."""
    kept, gone = weight(*SHAPE), []
    optimizer = ProKLShampoo([{"params": [kept]}])
    for phase in range(60):
        own = weight(*SHAPE, seed=phase)
        optimizer.add_param_group({"params": [own], "rank": 2 + phase % 2})
        for _ in range(2):
            step(optimizer, kept, own)
        assert optimizer.state[own]["U"].shape[-1] == 2 + phase % 2
        del optimizer.param_groups[1], optimizer.state[own]
        step(optimizer, kept)
        gone.append(weakref.ref(own))
        del own
        gc.collect()
        assert gone[-1]() is None
