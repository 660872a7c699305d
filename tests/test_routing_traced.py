"""Exported and scripted models, whose modules have lost their classes, are refused; traced ones of torch.fx are not."""

import warnings

import pytest
import torch
from torch import fx, nn

from prokl import param_groups
from tests.inputs import PRO
from tests.routing import RATES

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def model_and_batch():
    body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 12, bias=False))
    return nn.Sequential(nn.Embedding(20, 8), body, nn.Linear(12, 20)), torch.randint(0, 20, (2, 5))


def exported(model, batch):
    return torch.export.export(model, (batch,)).module()


def unflattened(model, batch):
    return torch.export.unflatten(torch.export.export(model, (batch,)))


def scripted(model, batch):
    return torch.jit.script(model)


SHARING = [exported, scripted, torch.jit.trace]


@pytest.mark.parametrize("form", [*SHARING, unflattened], ids=lambda form: form.__name__)
def test_a_model_without_classes_is_refused(form):
    model, batch = model_and_batch()
    with pytest.raises(ValueError, match=r"was exported or scripted: the module of '.*' has no class .*original"):
        param_groups(form(model, batch), **RATES)


@pytest.mark.parametrize("form", SHARING, ids=lambda form: form.__name__)
def test_the_groups_of_the_original_train_what_was_made_of_it(form):
    model, batch = model_and_batch()
    made = form(model, batch)
    before = {n: p.detach().clone() for n, p in made.named_parameters()}
    optimizer = PRO(param_groups(model, **RATES))
    for _ in range(2):
        made(batch).square().mean().backward()
        optimizer.step()
    assert [n for n, p in made.named_parameters() if torch.equal(p, before[n])] == []


def test_a_traced_model_that_has_its_modules_is_routed_as_itself():
    model, _ = model_and_batch()
    routes, wanted = (param_groups(m, **RATES).routes for m in (fx.symbolic_trace(model), model))
    assert {r.names: (r.algorithm, r.reason) for r in routes} == {r.names: (r.algorithm, r.reason) for r in wanted}


def test_a_plain_module_with_a_weight_is_no_exported_one():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (route,) = param_groups(model, **RATES).routes
    assert route.reason == "2-D, weight of Module"
