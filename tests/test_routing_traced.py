"""Layers that have lost their classes, as they were exported, traced or scripted, are refused, and no others."""

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


def recurrent():
    return nn.LSTM(8, 16), torch.ones(2, 3, 8)


def normed():
    return nn.Sequential(*(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)) for _ in range(2))), torch.ones(2, 8)


class Norm(nn.Module):
    def __init__(self, frozen=None):
        super().__init__()
        self.weight, self.inner, self.frozen = nn.Parameter(torch.ones(8)), nn.Linear(8, 8), frozen

    def forward(self, x):
        return self.inner(self.weight * x)


def exported(model, batch):
    return torch.export.export(model, (batch,)).module()


def unflattened(model, batch):
    return torch.export.unflatten(torch.export.export(model, (batch,)))


def scripted(model, batch):
    return torch.jit.script(model)


SHARING = [exported, scripted, torch.jit.trace]


REFUSED = [(form, make) for form in (*SHARING, unflattened) for make in (model_and_batch, recurrent)]


@pytest.mark.parametrize("form, make", [*REFUSED, (exported, normed)], ids=lambda x: x.__name__)
def test_a_model_without_classes_is_refused(form, make):
    model, batch = make()
    with pytest.raises(ValueError, match=r"was exported, traced or scripted: its module has no class .*original"):
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


def test_what_needs_no_class_is_routed_in_a_traced_model():
    """A norm of one's own, of which fx keeps a plain module; what was frozen as it was made; a graph that is none."""
    teacher = torch.jit.script(nn.Linear(4, 4).requires_grad_(False))
    box = nn.Module()
    box.weight, box.activation = nn.Parameter(torch.ones(8, 8)), torch.jit.script(nn.GELU())
    graph = type("GraphModule", (Norm,), {})
    for model in (fx.symbolic_trace(nn.Sequential(Norm())), Norm(teacher), box, graph()):
        routes = {route.names[0]: route for route in param_groups(model, **RATES).routes}
        assert [r.algorithm for name, r in routes.items() if "inner" in name or model is box][0] == "matrix"
        assert all(route.frozen for name, route in routes.items() if "frozen" in name)
