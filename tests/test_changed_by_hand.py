"""Groups, weights and state edited between steps: the optimizer goes on from what they are now, or says no."""

import warnings

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from tests.problems import relative

METHODS = [(ProKLShampoo, {"rank": 3}), (KLShampoo, {})]


def stepped(cls, kwargs, steps, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(6, 9, generator=g).to(dtype)) for _ in range(2)]
    optimizer = cls(parameters, **kwargs)
    step(parameters, optimizer, range(steps))
    return parameters, optimizer


def step(parameters, optimizer, times):
    for t in times:
        g = torch.Generator().manual_seed(100 + t)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
        optimizer.step()


def test_deleting_a_group_leaves_the_others_their_own_settings():
    first, second = (torch.nn.Parameter(torch.randn(6, 9)) for _ in range(2))
    optimizer = ProKLShampoo([{"params": [first], "rank": 2}, {"params": [second], "rank": 3}])
    step([first, second], optimizer, range(3))
    del optimizer.param_groups[0]
    kept = first.detach().clone()
    step([first, second], optimizer, range(3, 5))
    assert torch.equal(first, kept) and optimizer.state[second]["U"].shape[-1] == 3
    optimizer.param_groups[0]["rank"] = 4
    with pytest.raises(ValueError, match="rank=4.*rank=3"):
        step([second], optimizer, [5])


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_weights_converted_to_another_dtype_step_in_it(cls, kwargs):
    parameters, optimizer = stepped(cls, kwargs, 3)
    for p in parameters:
        p.data = p.data.double()
    step(parameters, optimizer, range(3, 6))
    assert optimizer.state[parameters[0]]["M"].dtype == torch.float64
    assert not torch.equal(parameters[0], parameters[0].float().double())


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_replaced_state_tensors_are_what_the_next_step_uses(cls, kwargs):
    plain, one = stepped(cls, kwargs, 12)
    moved, two = stepped(cls, kwargs, 6)
    for state in two.state.values():
        for key, value in state.items():
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value
    step(moved, two, range(6, 12))
    for p, q in zip(plain, moved, strict=True):
        assert torch.equal(p, q)
        assert two.state[q]["M"].equal(one.state[p]["M"])


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_cleared_state_starts_anew(cls, kwargs):
    parameters, optimizer = stepped(cls, kwargs, 6)
    optimizer.state.clear()
    before = parameters[0].detach().clone()
    step(parameters, optimizer, [6])
    assert torch.equal(parameters[0], before) and optimizer.state[parameters[0]]["step"] == 0
    fresh = cls([torch.nn.Parameter(p.detach().clone()) for p in parameters], **kwargs)
    twins = fresh.param_groups[0]["params"]
    step(twins, fresh, [6, 7])
    step(parameters, optimizer, [7])
    assert relative(parameters[0], twins[0]) == 0


def test_a_warning_made_an_error_comes_after_a_whole_step():
    dead, alive = (torch.nn.Parameter(torch.randn(6, 9)) for _ in range(2))
    optimizer = ProKLShampoo([dead, alive])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(99):
            dead.grad, alive.grad = torch.zeros(6, 9), torch.randn(6, 9)
            optimizer.step()
        before = alive.detach().clone()
        with pytest.raises(UserWarning, match="has not moved in 100 steps"):
            optimizer.step()
    assert not torch.equal(alive, before)
    assert optimizer.state[alive]["step"] == 99
