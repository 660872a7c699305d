"""State that waits elsewhere between steps: nothing keeps the memory that it had, and the next step finds it."""

import copy
import weakref

import pytest
import torch

import prokl
from tests.integrations.models import LanguageModel, tokens
from tests.training import differences

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def trained(device, make, steps, between=lambda optimizer: None):
    """Train a small model, with ``between`` after every step; return the optimizer."""
    model = LanguageModel(seed=0).to(device)
    optimizer = make(prokl.param_groups(model, lr=0.02, adamw_lr=3e-3))
    for step in range(steps):
        model(tokens()[4 * step : 4 * step + 4].to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        between(optimizer)
    return optimizer


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [prokl.ProKLShampoo, prokl.KLShampoo])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_an_offload_after_every_step_changes_no_bit(device, make, dtype):
    def built(groups):
        return make(groups, state_dtype=dtype)

    plain = trained(device, built, 4)
    plain.offload()
    assert differences(plain, trained(device, built, 4, lambda optimizer: optimizer.offload())) == set()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "done",
    [
        lambda optimizer: optimizer.offload(),
        lambda optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda optimizer: (optimizer.engine.release(), optimizer.step()),
    ],
    ids=["offload", "load", "step"],
)
def test_a_rollout_in_inference_mode_leaves_a_usable_state(device, done):
    def roll_out(optimizer):
        with torch.inference_mode():
            done(optimizer)

    assert differences(*(trained(device, prokl.ProKLShampoo, 4, between) for between in (done, roll_out))) == set()


def test_weights_made_in_inference_mode_are_stepped_there():
    with torch.inference_mode():
        weights = [torch.zeros(4, 6) for _ in range(2)]
        optimizer = prokl.ProKLShampoo(weights, rank=2)
        for _ in range(3):
            for W in weights:
                W.grad = torch.randn(4, 6)
            optimizer.step()
    assert all(W.any() for W in weights)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_holds_the_memory_that_the_state_had(device):
    optimizer = trained(device, prokl.ProKLShampoo, 3)
    views = [
        v for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor) and v._is_view()
    ]
    bases = [weakref.ref(v._base) for v in views]  # a tensor's object lives as long as anything has the tensor
    del views
    assert bases and all(base() is not None for base in bases)
    optimizer.offload()
    assert not any(base() is not None for base in bases)
    for own in optimizer.state.values():
        assert all(v.device.type == "cpu" and v._base is None for v in own.values() if isinstance(v, torch.Tensor))


@pytest.mark.gpu
def test_an_offload_frees_the_device():
    optimizer = trained("cuda", prokl.ProKLShampoo, 3)
    tensors = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, torch.Tensor)]
    held = sum(v.nbytes for v in tensors if v.is_cuda)
    del tensors
    before = torch.cuda.memory_allocated()
    optimizer.offload()
    assert before - torch.cuda.memory_allocated() >= held
