"""Settings that a state was made with bind its weight wherever it is, until the state goes."""

import gc
import weakref

import pytest
import torch

from tests.inputs import KL, PRO, weight
from tests.training import COPIES, OTHERS, contents, differences, fresh, kept, moved, named, refused, train, weights_of

SHAPE = (6, 9)
# Settings, and other ones.
CHANGES = [(PRO, {}, {key: OTHERS[key]}) for key in ("rank", "variant", "state_dtype", "init_eigenvalue")]
CHANGES += [(KL, {}, {key: OTHERS[key]}) for key in ("state_dtype", "init_eigenvalue")]
CHANGES += [(PRO, {"init_eigenvalue": 0.1}, {"init_eigenvalue": "auto"})]
CHANGES += [(PRO, {"split": 3}, change) for change in ({"split": None}, {"split": 2}, {"transposed": True})]
of_changes = pytest.mark.parametrize("cls, own, change", CHANGES, ids=str)


def two_groups(cls=PRO, first=(), second=(), calls=3, missing=()):
    a, b = ([own] for own in named(SHAPE, SHAPE))
    groups = [{"params": a, **dict(first)}, {"params": b, **dict(second)}]
    return train(cls(groups), range(calls), missing=missing)


def refuses(optimizer, change):
    (name,) = change
    return refused(optimizer, rf"^Invalid .*\b{name}=.* of w0.* made with .*\b{name}=")


def in_a_copied_group(optimizer):
    optimizer.param_groups[0] = {**optimizer.param_groups[0]}
    return optimizer


LIVES = {
    "steps": lambda optimizer: optimizer,
    "load_state_dict": fresh,
    **COPIES,
    "a copied group": in_a_copied_group,
}


@pytest.mark.parametrize("life", LIVES.values(), ids=LIVES)
@of_changes
def test_changing_a_setting_of_the_state_raises(cls, own, change, life):
    optimizer = life(two_groups(cls, own))
    before, group = contents(optimizer), optimizer.param_groups[0]
    former = {**group}
    group.update(change)
    with refuses(optimizer, change):
        train(optimizer, [3])
    group.update(former)
    assert moved(before, train(optimizer, [3])) == {0, 1}


def move(optimizer, start, end):
    """A weight, the last of a group, with its name."""
    for key in ("params", "param_names"):
        optimizer.param_groups[end][key].append(optimizer.param_groups[start][key].pop())


@of_changes
def test_a_move_to_a_group_of_other_settings_is_refused(cls, own, change):
    optimizer = two_groups(cls, own, {**own, **change})
    a, b = weights_of(optimizer)
    move(optimizer, 0, 1)
    with refuses(optimizer, change):
        train(optimizer, [3], [b, a])
    move(optimizer, 1, 0)
    before = contents(optimizer)
    assert moved(before, train(optimizer, [3])) == {0, 1}


def test_a_weight_moves_with_its_state_to_a_like_group():
    optimizer = two_groups(second={"lr": 0.3})
    a, b = weights_of(optimizer)
    move(optimizer, 0, 1)
    train(optimizer, [3])
    assert optimizer.state[a]["step"] == optimizer.state[b]["step"] == 3


@pytest.mark.parametrize("calls", [0, 6], ids=["before there is state", "once it is gone"])
@of_changes
def test_without_state_a_weight_begins_anew_with_any_setting(cls, own, change, calls):
    """One that waits for its first gradient has a state for checkpoints, and no place in a batch that would notice."""
    optimizer = two_groups(cls, own, own, calls, missing={(call, 1) for call in range(calls)})
    optimizer.state.clear()
    groups = [{"params": [(f"w{i}", torch.nn.Parameter(kept(p)))]} for i, p in enumerate(weights_of(optimizer))]
    anew = cls([{**group, **own, **change} for group in groups])
    for group in optimizer.param_groups:
        group.update(change)
    assert differences(train(optimizer, range(6, 9)), train(anew, range(6, 9))) == set()


def test_what_a_wrapper_keeps_is_made_with_no_setting():
    optimizer = PRO(named(SHAPE), rank=2)
    optimizer.state[weights_of(optimizer)[0]]["slow"] = torch.ones(2)
    loaded = fresh(optimizer)
    loaded.param_groups[0]["rank"] = 3
    train(loaded, [0])
    assert loaded.state[weights_of(loaded)[0]]["U"].shape[-1] == 3


def test_a_deleted_group_leaves_nothing_to_later_groups():
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
