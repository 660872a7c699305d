"""What a weight's state was made with is held to wherever the weight is, and forgotten with the state."""

import gc
import weakref

import pytest

from tests.inputs import KL, PRO, weight
from tests.training import OTHERS, contents, differences, named, refused, train, weights_of

SHAPE = (6, 9)


def two_groups(first=(), second=(), calls=3):
    a, b = ([own] for own in named(SHAPE, SHAPE))
    groups = [{"params": a, "rank": 3, **dict(first)}, {"params": b, "rank": 3, **dict(second)}]
    return train(PRO(groups), range(calls))


def move(optimizer, start, end):
    """A weight, the last of a group, with its name."""
    for key in ("params", "param_names"):
        optimizer.param_groups[end][key].append(optimizer.param_groups[start][key].pop())


MOVES = {
    **{key: ({}, {key: OTHERS[key]}) for key in ("rank", "variant", "state_dtype", "init_eigenvalue")},
    "a number to auto": ({"init_eigenvalue": 0.1}, {}),
}


@pytest.mark.parametrize("own, others", MOVES.values(), ids=MOVES)
def test_a_weight_moved_with_its_state_to_a_group_of_other_settings_is_refused_by_name(own, others):
    optimizer = two_groups(own, others)
    a, b = weights_of(optimizer)
    move(optimizer, 0, 1)
    (name,) = own or others
    with refused(optimizer, rf"^Invalid {name}=.*the state of w0 was made with {name}="):
        train(optimizer, [4], [b, a])
    move(optimizer, 1, 0)
    before = contents(optimizer)
    train(optimizer, [4])  # set back, it goes on
    assert {i for i, _ in differences(before, optimizer)} == {0, 1}


def test_a_weight_moves_with_its_state_to_a_group_of_the_same_settings():
    optimizer = two_groups(second={"lr": 0.3})
    a, b = weights_of(optimizer)
    move(optimizer, 0, 1)
    train(optimizer, [3])
    assert optimizer.state[a]["step"] == optimizer.state[b]["step"] == 3


@pytest.mark.parametrize("key", ["rank", "variant"])
def test_a_copied_group_is_held_to_what_the_state_was_made_with(key):
    """Also after the one before it has gone."""
    optimizer = two_groups()
    optimizer.param_groups[0] = {**optimizer.param_groups[0], key: OTHERS[key]}
    with refused(optimizer, f"Invalid {key}="):
        train(optimizer, [3])
    del optimizer.param_groups[0]
    train(optimizer, [3])
    optimizer.param_groups[0][key] = OTHERS[key]
    with refused(optimizer, f"Invalid {key}="):
        train(optimizer, [4])


@pytest.mark.parametrize("cls, key", [(PRO, "rank"), (PRO, "init_eigenvalue"), (KL, "init_eigenvalue")])
def test_settings_are_free_again_once_the_state_is_gone(cls, key):
    optimizer, anew = train(cls(named(SHAPE)), [0]), cls([{"params": named(SHAPE), key: OTHERS[key]}])
    optimizer.state.pop(weights_of(optimizer)[0])
    optimizer.param_groups[0][key] = OTHERS[key]
    assert differences(train(optimizer, range(1, 4)), train(anew, range(1, 4))) == set()


def test_settings_of_a_weight_that_still_waits_are_free_again_once_its_state_is_gone():
    """A weight without a gradient has a state for checkpoints, and no place in a batch that would notice."""
    optimizer = two_groups(calls=0)
    waiting = weights_of(train(optimizer, [0], missing={(0, 1)}))[1]
    optimizer.state.pop(waiting)
    optimizer.param_groups[1]["rank"] = 2
    train(optimizer, [0])
    assert optimizer.state[waiting]["U"].shape[-1] == 2


def test_a_deleted_group_leaves_nothing_to_the_groups_that_come_after_it():
    """Python gives a new group the address of one that is gone."""
    optimizer, gone = PRO([weight(*SHAPE)]), []
    for phase in range(3):
        own = weight(*SHAPE, seed=phase)
        optimizer.add_param_group({"params": [own], "rank": 2 + phase % 2})
        train(optimizer, range(2))
        assert optimizer.state[own]["U"].shape[-1] == 2 + phase % 2
        del optimizer.param_groups[1], optimizer.state[own]
        train(optimizer, [0])
        gone.append(weakref.ref(own))
        del own
        gc.collect()
        assert gone[-1]() is None
