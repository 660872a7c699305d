"""Weights that are frozen when groups are made: in their groups, without state, and trained once they are unfrozen."""

import copy

import pytest
import torch
from torch import nn

import prokl
from prokl import param_groups
from tests.inputs import KL, PRO, frozen, same_bits
from tests.routing import holding

RATES = {"lr": 0.02, "adamw_lr": 1e-3}
both = pytest.mark.parametrize("cls", [PRO, KL])


def model(frozen=("words", "layers.0")):
    torch.manual_seed(0)
    made = holding(
        words=nn.Embedding(9, 8),
        layers=nn.ModuleList(holding(up=nn.Linear(8, 12), norm=nn.LayerNorm(12)) for _ in range(2)),
        head=nn.Linear(12, 9),
    )
    for name in frozen:
        made.get_submodule(name).requires_grad_(False)
    return made


def train(optimizer, model, steps, seed=0):
    """Steps with gradients for what is not frozen; what has moved."""
    generator = torch.Generator().manual_seed(seed)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(steps):
        for p in model.parameters():
            g = torch.randn(p.shape, generator=generator)
            p.grad = g if p.requires_grad else None
        optimizer.step()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


@both
def test_what_is_unfrozen_later_trains_as_under_adamw_and_has_no_state_before(cls):
    net = model()
    names = {name for name, _ in net.named_parameters()}
    still = {name for name, p in net.named_parameters() if not p.requires_grad}
    optimizer = cls(param_groups(net, **RATES))
    assert train(optimizer, net, 3) == names - still
    assert not [p for p in net.parameters() if not p.requires_grad and optimizer.state.get(p)]
    net.requires_grad_(True)
    assert train(optimizer, net, 3, seed=1) == names
    assert {name for g in optimizer.param_groups for name in g["param_names"]} == names
    algorithms = {name: g["algorithm"] for g in optimizer.param_groups for name in g["param_names"]}
    assert algorithms["layers.0.up.weight"] == "matrix" and algorithms["words.weight"] == "adamw"


def test_the_table_says_how_many_are_frozen_now_and_where_they_will_train():
    text = str(param_groups(model(), **RATES)).splitlines()
    rows = {line.split()[0]: line for line in text[1:-2]}
    assert rows["layers.0.up.weight"].split()[2] == "matrix"
    assert rows["layers.0.up.weight"].endswith("linear layer; frozen now")
    assert rows["words.weight"].endswith("embedding (Embedding); frozen now")
    assert "frozen" not in rows["layers.1.up.weight"]
    assert text[-2] == (
        "matrix: 2 tensors, 192 elements, 1 of them frozen now; adamw: 9 tensors, 261 elements, 4 of them frozen now"
    )


def test_groups_without_names_are_for_code_that_adds_what_it_unfreezes():
    net = model()
    groups = param_groups(net, **RATES, names=False)
    assert all(p.requires_grad for g in groups for p in g["params"])
    assert {r.algorithm for r in groups.routes if r.frozen} == {"frozen"}
    assert "; in no group: 5 tensors, 204 elements\n" in str(groups)
    optimizer = PRO(groups)
    net.requires_grad_(True)
    optimizer.add_param_group({"params": [net.layers[0].up.weight]})
    assert "layers.0.up.weight" in train(optimizer, net, 3)


def untrainable(kind):
    weights = {
        "integers": torch.zeros(4, 8, dtype=torch.int64),
        "8-bit float": torch.zeros(4, 8).to(torch.float8_e4m3fn),
        "sparse": torch.zeros(4, 8).to_sparse(),
        "meta": torch.zeros(4, 8, device="meta"),
        "expanded": torch.zeros(1, 8).expand(4, 8),
    }
    if kind == "sparse gradients":
        return nn.Embedding(4, 8, sparse=True).weight
    return nn.Parameter(weights[kind], requires_grad=False)


@pytest.mark.parametrize("kind", ["integers", "8-bit float", "sparse", "meta", "expanded", "sparse gradients"])
def test_frozen_weights_that_no_method_trains_stay_outside_whatever_patterns_say(kind):
    net = model()
    net.odd = untrainable(kind) if kind != "sparse gradients" else nn.Embedding(4, 8, sparse=True)
    net.odd.requires_grad_(False)
    for options in ({}, {"matrix": ["*"], "adamw": ["*norm*", "*bias"]} if kind == "integers" else {}):
        if options:
            options = {"matrix": ["odd*"]}
        groups = param_groups(net, **RATES, **options)
        route = (
            groups.routes[0] if kind != "sparse gradients" else next(r for r in groups.routes if "odd" in r.names[0])
        )
        assert route.names[0].startswith("odd") and route.algorithm == "frozen"
        train(PRO(groups), model(), 1)


def test_patterns_and_divisions_hold_for_frozen_weights_too():
    net = holding(a=nn.Linear(8, 24, bias=False), b=nn.Linear(8, 8, bias=False), c=nn.Linear(8, 8, bias=False))
    net.a.requires_grad_(False)
    net.b.requires_grad_(False)
    groups = param_groups(net, **RATES, split={"a.*": 3}, adamw=["b.*"])
    assert [[name for name, _ in g["params"]] for g in groups] == [["a.weight", "c.weight"], ["b.weight"]]
    assert groups[0]["split"] == [3, None]


def former(net):
    """The groups of 0.4.0: what is frozen is in none, and a group without weights is left out."""
    groups = [dict(g) for g in param_groups(net, **RATES)]
    for group in groups:
        kept = [i for i, (_, p) in enumerate(group["params"]) if p.requires_grad]
        for key in ("params", "transposed", "split"):
            if isinstance(group.get(key), list):
                group[key] = [group[key][i] for i in kept]
    return [g for g in groups if g["params"]]


@both
@pytest.mark.parametrize("frozen_parts", [("words", "layers.0"), ("layers",), ("words", "head"), ("layers", "head")])
def test_a_checkpoint_whose_groups_lack_the_frozen_weights_goes_on_bit_for_bit(cls, frozen_parts):
    old, new = model(frozen_parts), model(frozen_parts)
    saver, loader = cls(former(old)), cls(param_groups(new, **RATES))
    train(saver, old, 3)
    for group in saver.param_groups:
        group["lr"] *= 0.5
    new.load_state_dict(old.state_dict())
    state = copy.deepcopy(saver.state_dict())
    loader.load_state_dict(state)
    assert state.keys() == saver.state_dict().keys()
    rates = {name: g["lr"] for g in saver.param_groups for name in g["param_names"]}
    assert all(rates.get(g["param_names"][0], g["lr"]) == g["lr"] for g in loader.param_groups)
    train(saver, old, 3, seed=1)
    train(loader, new, 3, seed=1)
    for (name, p), q in zip(old.named_parameters(), new.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach()), name
        assert bool(saver.state.get(p)) == bool(loader.state.get(q)) == p.requires_grad
        if p.requires_grad:
            kept, found = frozen(saver, p), frozen(loader, q)
            assert kept.keys() == found.keys()
    new.requires_grad_(True)
    assert train(loader, new, 3, seed=2) == {name for name, _ in new.named_parameters()}


def test_fused_weights_of_such_a_checkpoint_keep_their_divisions():
    def net():
        torch.manual_seed(0)
        return holding(a=nn.MultiheadAttention(8, 2), b=nn.Linear(8, 8), c=nn.MultiheadAttention(8, 2))

    old, new = net(), net()
    old.a.requires_grad_(False), new.a.requires_grad_(False)
    saver, loader = PRO(former(old)), PRO(param_groups(new, **RATES))
    train(saver, old, 2)
    loader.load_state_dict(saver.state_dict())
    group = loader.param_groups[0]
    assert dict(zip(group["param_names"], group["split"], strict=True)) == {
        "a.in_proj_weight": 3,
        "a.out_proj.weight": None,
        "b.weight": None,
        "c.in_proj_weight": 3,
        "c.out_proj.weight": None,
    }
    train(loader, new, 1)


def test_such_a_checkpoint_is_refused_where_what_it_lacks_is_trained_and_says_what_to_do():
    old, new = model(), model(["words"])
    saver, loader = PRO(former(old)), PRO(param_groups(new, **RATES))
    train(saver, old, 2)
    message = r"has no weight 'layers\.0\.up\.weight'.*requires grad here.*freeze what was frozen.*unfreeze it then"
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict(saver.state_dict())
    assert not loader.state
    new.layers[0].requires_grad_(False)
    loader.load_state_dict(saver.state_dict())
    new.requires_grad_(True)
    assert "layers.0.up.weight" in train(loader, new, 3)


def test_a_checkpoint_of_another_model_is_still_refused():
    other = holding(words=nn.Embedding(9, 8), other=nn.Linear(8, 12), head=nn.Linear(12, 9))
    saver, loader = PRO(param_groups(other, **RATES)), PRO(param_groups(model(), **RATES))
    with pytest.raises(ValueError, match="size of optimizer's group|different number"):
        loader.load_state_dict(saver.state_dict())


def test_a_distributed_checkpoint_of_such_groups_loads_by_name():
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    old, new = model(["layers.0"]), model(["layers.0"])
    saver, loader = PRO(former(old)), PRO(param_groups(new, **RATES))
    train(saver, old, 3)
    new.load_state_dict(old.state_dict())
    set_optimizer_state_dict(new, loader, get_optimizer_state_dict(old, saver))
    assert [g["param_names"] for g in loader.param_groups] == [
        g["param_names"] for g in PRO(param_groups(new, **RATES)).param_groups
    ]
    train(saver, old, 3, seed=1)
    train(loader, new, 3, seed=1)
    assert all(map(torch.equal, old.parameters(), new.parameters()))


def test_a_checkpoint_of_a_partly_frozen_model_loads_into_one_with_others_frozen():
    saved, resumed = model(["layers.0"]), model(["layers.1"])
    saver, loader = prokl.ProKLShampoo(param_groups(saved, **RATES)), prokl.ProKLShampoo(param_groups(resumed, **RATES))
    train(saver, saved, 3)
    loader.load_state_dict(saver.state_dict())
    resumed.requires_grad_(True)
    assert train(loader, resumed, 3) == {name for name, _ in resumed.named_parameters()}
