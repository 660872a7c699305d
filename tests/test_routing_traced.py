"""Exported and scripted models, whose layers have no classes of their own, are routed as the model itself."""

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.inputs import PRO
from tests.routing import RATES
from tests.training import silent, train

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def text():
    body = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 12, bias=False))
    return nn.Sequential(nn.Embedding(20, 8), body, nn.Linear(12, 20)), torch.randint(0, 20, (2, 5))


def image():
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Flatten(2), nn.Conv1d(6, 5, 3))
    return nn.Sequential(*layers, nn.Flatten(1), nn.Linear(70, 4)), torch.ones(2, 3, 8, 8)


def exported(model, example, tmp_path):
    return torch.export.export(model, (example,)).module()


def from_file(model, example, tmp_path):
    torch.export.save(torch.export.export(model, (example,)), tmp_path / "model.pt2")
    return torch.export.load(tmp_path / "model.pt2").module()


def scripted(model, example, tmp_path):
    return torch.jit.script(model)


def traced(model, example, tmp_path):
    return torch.jit.trace(model, example)


def script_file(model, example, tmp_path):
    torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
    return torch.jit.load(tmp_path / "model.pt")


FORMS = [exported, from_file, scripted, traced, script_file]


@pytest.mark.parametrize("make", [text, image])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_weights_go_where_those_of_the_model_itself_go(make, form, tmp_path):
    torch.manual_seed(0)
    model, example = make()
    wanted = {route.names[0]: route.algorithm for route in param_groups(model, **RATES).routes}
    other = form(model, example, tmp_path)
    with pytest.warns(UserWarning, match=r"was exported or scripted, .*took \d+ classes from the names") as warned:
        groups = param_groups(other, **RATES)
    assert len([w for w in warned if "exported or scripted" in str(w.message)]) == 1 and warned[0].filename == __file__
    assert {route.names[0]: route.algorithm for route in groups.routes} == wanted
    assert {"linear layer"} <= {r.reason for r in groups.routes if r.algorithm == "matrix"} or make is image
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    train(PRO(groups), range(2))
    assert [n for n, p in other.named_parameters() if torch.equal(p, before[n])] == []


def test_a_graph_without_classes_is_read_by_shapes_and_names():
    model, example = text()
    other = torch.export.export(model, (example,)).module()
    for node in other.graph.nodes:
        node.meta.pop("nn_module_stack", None)
    other.add_module("wte", other._modules.pop("0"))
    with pytest.warns(UserWarning, match=r"guessed 3 layers by their shapes \(1.0.weight, 1.2.weight, 2.weight\)"):
        routes = {route.names[0]: route for route in param_groups(other, **RATES).routes}
    assert routes["wte.weight"].reason == "named as embedding, position or token"
    assert routes["1.0.weight"].reason == "linear layer"


def test_a_plain_module_with_a_weight_is_no_exported_one():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(8, 8))
    with silent():
        (route,) = param_groups(model, **RATES).routes
    assert route.reason == "2-D, weight of Module"
