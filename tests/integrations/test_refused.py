"""The frameworks' own wrappers meet the errors that docs/integrations.md shows."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import prokl
from tests.integrations.models import LanguageModel, tokens
from tests.integrations.test_recipes import DOCUMENT

SHOWN = [" ".join(block.split()) for block in re.findall(r"```text\n(.*?)```", DOCUMENT, re.DOTALL)]


@pytest.fixture
def two_processes():
    """A process group of two, in which this is the first and the other one is none."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def optimizer_of(model):
    return prokl.ProKLShampoo(prokl.param_groups(model, lr=0.02, adamw_lr=3e-3))


def refused(call, model):
    """Return the words of the ValueError that ``call`` raises, after which no weight has moved."""
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError) as error:
        call()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old)
    return str(error.value)


def test_flattened_matrices_are_refused_as_documented():
    model = LanguageModel(seed=0)
    optimizer = optimizer_of(model)
    model(tokens()).backward()
    for group in optimizer.param_groups:  # what ZeRO does to an optimizer: the first of two halves of all weights
        flat = nn.Parameter(torch.cat([p.detach().flatten() for p in group["params"]]).chunk(2)[0])
        flat.grad = torch.cat([p.grad.flatten() for p in group["params"]]).chunk(2)[0]
        group["params"] = [flat]
    assert refused(optimizer.step, model) == SHOWN[0]
    assert not optimizer.state


def test_fsdp1_with_original_parameters_is_refused_at_the_step(two_processes):
    model = LanguageModel(seed=0)
    optimizer = optimizer_of(model)
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    assert refused(optimizer.step, wrapped) == SHOWN[1]


def test_fsdp1_is_refused_as_documented(two_processes):
    wrapped = FullyShardedDataParallel(LanguageModel(seed=0), device_id=torch.device("cpu"))
    assert refused(lambda: optimizer_of(wrapped), wrapped).split("\nparameter ")[0] == SHOWN[2]
