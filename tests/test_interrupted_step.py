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
