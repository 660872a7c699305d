"""Weights that are frozen when groups are made: in their groups, without state, and trained once they are unfrozen."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from prokl import param_groups
from tests.inputs import BACKENDS, PRO, both
from tests.problems import relative
from tests.routing import RATES, holding
from tests.training import differences, give, named, refused, train, weights_of


def model(frozen=("words", "layers.0")):
    torch.manual_seed(0)
    made = holding(
        words=nn.Embedding(9, 8),
        layers=nn.ModuleList(holding(up=nn.Linear(8, 12), norm=nn.LayerNorm(12)) for _ in range(2)),
        attention=nn.MultiheadAttention(12, 2),
        head=nn.Linear(12, 9),
    )
    for name in frozen:
        made.get_submodule(name).requires_grad_(False)
    return made


def trained(optimizer, model, calls=range(3)):
    """Step with gradients for what is not frozen; return the names of what has moved."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for call in calls:
        still = {(call, i) for i, p in enumerate(model.parameters()) if not p.requires_grad}
        give([*model.parameters()], call, still)
        optimizer.step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@both
def test_a_weight_unfrozen_later_trains_as_under_adamw(cls):
    net = model()
    names = {name for name, _ in net.named_parameters()}
    still = {name for name, p in net.named_parameters() if not p.requires_grad}
    optimizer = cls(param_groups(net, **RATES))
    assert trained(optimizer, net) == names - still
    assert not [p for p in net.parameters() if not p.requires_grad and optimizer.state.get(p)]
    net.requires_grad_(True)
    assert trained(optimizer, net) == names
    algorithms = {name: g["algorithm"] for g in optimizer.param_groups for name in g["param_names"]}
    assert algorithms.keys() == names
    assert algorithms["layers.0.up.weight"] == "matrix" and algorithms["words.weight"] == "adamw"


def test_groups_without_names_admit_unfrozen_weights():
    net = model()
    groups = param_groups(net, **RATES, names=False)
    assert all(p.requires_grad for g in groups for p in g["params"])
    assert {r.algorithm for r in groups.routes if r.frozen} == {"frozen"}
    assert "; in no group: 5 tensors, 204 elements\n" in str(groups)
    optimizer = PRO(groups)
    net.requires_grad_(True)
    optimizer.add_param_group({"params": [net.layers[0].up.weight]})
    assert "layers.0.up.weight" in trained(optimizer, net)


def test_a_checkpoint_loads_where_others_are_frozen():
    saved, resumed = model(["layers.0"]), model(["layers.1"])
    saver, loader = PRO(param_groups(saved, **RATES)), PRO(param_groups(resumed, **RATES))
    trained(saver, saved)
    loader.load_state_dict(saver.state_dict())
    resumed.requires_grad_(True)
    assert trained(loader, resumed) == {name for name, _ in resumed.named_parameters()}


@both
def test_state_put_onto_a_frozen_weight_is_looked_at_once_it_is_unfrozen(cls):
    """Nothing reads it before. A look at every step would cost as many as there are frozen weights."""
    optimizer = cls(named((6, 9), (6, 9)))
    frozen, other = weights_of(optimizer)
    frozen.requires_grad_(False)
    train(optimizer, range(2), missing={(0, 0), (1, 0)})
    optimizer.state[frozen].update(step=3, M_Q=torch.zeros(2, 2))
    train(optimizer, [2], missing={(2, 0)})
    frozen.requires_grad_(True)
    with refused(optimizer, r"^The state of w0 .* has M_Q of shape \(2, 2\) where .* Set it back, or remove the state"):
        train(optimizer, [3])
    optimizer.state.pop(frozen)
    train(optimizer, [3])
    assert optimizer.state[frozen]["step"] == 0 and optimizer.state[other]["step"] == 3


@both
def test_weights_frozen_one_by_one_cost_nothing_and_go_on(cls, monkeypatch):
    """But for the one look at state that comes into another batch."""
    monkeypatch.setattr("prokl.engine.bucket.Bucket._begin_what_was_zeroed", lambda self: None)

    def operations(optimizer, call, still):
        with FlopCounterMode(display=False) as counter:
            train(optimizer, [call], missing={(call, i) for i in still})
        return counter.get_total_flops()

    frozen, twin, alone = (train(cls(named(*[(9, 5)] * count)), range(3)) for count in (5, 5, 2))
    for p in weights_of(frozen)[2:]:
        p.requires_grad_(False)
    for call in range(3, 6):
        assert operations(frozen, call, range(2, 5)) == operations(alone, call, ()) > 0
        train(twin, [call], missing={(call, i) for i in range(2, 5)})
    for p in weights_of(frozen)[2:]:
        p.requires_grad_(True)
    assert operations(frozen, 6, ()) == operations(twin, 6, ())
    for (name, p), q in zip(zip("abcde", weights_of(frozen), strict=True), weights_of(twin), strict=True):
        assert relative(p, q) < 1e-5, name  # batches of other sizes may round in another way
    p = weights_of(frozen)[3].requires_grad_(False)
    before = p.detach().clone()
    assert not torch.equal(weights_of(train(frozen, [7]))[3], before)  # with a gradient it moves all the same


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, "plain"), (torch.bfloat16, "master")])
@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_tall_weight_without_memory_waits_in_its_batch(backend, dtype, rounding):
    """Such is the stand-in of a frozen weight on other ranks, where a load or offload() makes batches anew."""
    settings = {"backend": backend, "bf16_weights": rounding}
    one, twin = (train(PRO(named((9, 5), (9, 5), dtype=dtype), **settings), range(3)) for _ in range(2))
    waiting = weights_of(one)[1]
    kept = waiting.detach().clone()
    waiting.untyped_storage().resize_(0)
    still = {(call, 1) for call in range(3, 6)}
    for optimizer in (one, twin):
        weights_of(optimizer)[1].requires_grad_(False)
        optimizer.offload()
        train(optimizer, range(3, 6), missing=still)
    waiting.untyped_storage().resize_(kept.nbytes)
    waiting.data.copy_(kept)
    assert differences(one, twin) == set()
    for optimizer in (one, twin):
        weights_of(optimizer)[1].requires_grad_(True)
    assert differences(train(one, range(6, 9)), train(twin, range(6, 9))) == set()
