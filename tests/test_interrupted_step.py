"""A first step that Ctrl-C or a lack of memory ends, wherever that comes, is counted or not: training goes on."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.inputs import KL, PRO
from tests.training import contents, differences, named, train, weights_of


class Interrupted(TorchDispatchMode):
    """Raise in place of PyTorch's operation of this number, from 0."""

    def __init__(self, number, error):
        super().__init__()
        self.left, self.error = number, error

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return func(*args, **(kwargs or {}))


def made(cls):
    """An optimizer of two matrices, one that is divided, and a stack, in two buckets."""
    one, two, divided, stack = named((4, 6), (6, 10), (12, 6), (2, 4, 6))
    groups = [{"params": [one, two]}, {"params": [divided], "split": 3}, {"params": [stack]}]
    return cls(groups, precondition_frequency=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls, error, missing",
    [(PRO, KeyboardInterrupt(), set()), (KL, torch.OutOfMemoryError("no memory"), {(0, 1), (0, 2)})],
    ids=["Ctrl-C", "some gradients, no memory"],
)
def test_an_interrupted_first_step_is_counted_or_not(cls, error, missing):
    """After it everything of a weight is as if that step had been, or as if it had not."""
    with_it, without = contents(train(made(cls), range(3), missing=missing)), contents(train(made(cls), [1, 2]))
    number, ended, interrupted = 0, [], True
    while interrupted:
        optimizer = made(cls)
        try:
            with Interrupted(number, error):
                train(optimizer, [0], weights_of(optimizer), missing=missing)
            interrupted = False
        except type(error):
            now = contents(train(optimizer, [1, 2]))
            other_than = [{i for i, _ in differences(now, other)} for other in (with_it, without)]
            assert other_than[0] & other_than[1] == set(), number
            ended.append(other_than)
        number += 1
    changed = {i for i, _ in differences(with_it, without)}
    assert changed == ({0, 3} if missing else {0, 1, 2, 3})
    assert ended[0] == [changed, set()] and ended[-1][0] < changed and number > 300


class Listed(TorchDispatchMode):
    """List the names of PyTorch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def in_coordinates_of_weights(optimizer):
    """Momentum and the short side's factor of each weight, whichever bases they are kept in."""
    found = []
    for state in optimizer.state.values():
        M, L = state["Q_L"] @ state["M_Q"], state["Q_L"] @ state["L_Q"] @ state["Q_L"].mT
        found += [M @ state["Q_R"].mT if "Q_R" in state else M, L]
    return found


@pytest.mark.parametrize("cls", [PRO, KL])
def test_an_interrupted_refresh_leaves_state_and_bases_of_one_step(cls):
    def begun():
        optimizer = cls(named((4, 6), (6, 10), dtype=torch.float64), precondition_frequency=2)
        train(optimizer, range(4))
        return optimizer

    optimizer = begun()
    states = [in_coordinates_of_weights(optimizer)]
    with Listed() as listed:
        train(optimizer, [4], weights_of(optimizer))
    states.append(in_coordinates_of_weights(optimizer))
    writes = [number for number, name in enumerate(listed.names) if name in ("copy_", "_foreach_copy_")]
    assert len(writes) > 4
    for number in writes:
        optimizer = begun()
        with pytest.raises(KeyboardInterrupt), Interrupted(number, KeyboardInterrupt()):
            train(optimizer, [4], weights_of(optimizer))
        for now, *either in zip(in_coordinates_of_weights(optimizer), *states, strict=True):
            assert min(float((now - of).norm() / of.norm()) for of in either) < 1e-10, number
