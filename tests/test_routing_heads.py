"""Attention's heads: queries and keys divide by them where modules state how many, or as told; else they stay whole."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from prokl import ProKLShampoo, param_groups
from tests.routing import RATES, Conv1D, at, holding, linear, of_class
from tests.routing import routes as every_route
from tests.training import refused, train

UNKNOWN = "; not by heads: their number is not known (heads= tells it)"


def with_settings(module, **settings):
    for name, value in settings.items():
        setattr(module, name, value)
    return module


def attention(q=12, k=None, width=10, names="{}_proj", **settings):
    """Projections of these numbers of rows, and one of values as large as the keys, in a module with these settings."""
    rows = {"q": q, "k": q if k is None else k, "v": q if k is None else k}
    return with_settings(holding(**{names.format(role): linear(width, n) for role, n in rows.items()}), **settings)


def routes(model, **options):
    found = every_route(model, **options)
    return {name: route for name, route in found.items() if route.algorithm == "matrix"}


def read(model, **options):
    """Return how weights divide, by name without the end."""
    return {name.removesuffix(".weight"): route.split for name, route in routes(model, **options).items()}


def fused(cls, name, rows, width=10, **settings):
    return with_settings(of_class(cls, **{name: linear(width, rows)}), **settings)


# A module, and how its weights divide, in order.
STATED = {
    "num_heads": (attention(num_heads=3), [3, 3, None]),
    "n_head": (attention(n_head=3), [3, 3, None]),
    "n_heads": (attention(n_heads=3), [3, 3, None]),
    "num_attention_heads": (attention(num_attention_heads=3), [3, 3, None]),
    "heads, as diffusers": (attention(names="to_{}", heads=3), [3, 3, None]),
    "a config": (attention(config=holding()), [None] * 3),
    "a config with the number": (attention(config={"num_attention_heads": 3}), [3, 3, None]),
    "the module around": (with_settings(holding(attn=attention()), num_heads=3), [3, 3, None]),
    "grouped": (attention(12, 8, num_heads=3, num_key_value_heads=2), [3, 2, None]),
    "grouped, with the size of a head": (attention(12, 8, head_dim=4, n_heads=3, n_kv_heads=2), [3, 2, None]),
    "queries that do not fit": (attention(24, 12, num_heads=3, num_key_value_heads=3, head_dim=4), [None, 3, None]),
    "one head of keys": (attention(12, 4, num_heads=3, num_key_value_heads=1), [3, None, None]),
    "the module's own before its config's": (attention(num_heads=3, config={"num_heads": 4}), [3, 3, None]),
    "names of Llama's own code": (attention(names="w{}", n_local_heads=3, n_heads=6), [3, 3, None]),
    "names of gpt-fast": (attention(12, 8, names="w{}", n_head=3, n_local_heads=2), [3, 2, None]),
    "DeepSeek's queries": (with_settings(holding(q_b_proj=linear(8, 18)), num_heads=3, qk_head_dim=6), [3]),
    "names of other code": (attention(names="c_{}", num_heads=3), [3, 3, None]),
    "plural names": (with_settings(holding(queries=linear(8, 12), keys=linear(8, 12)), num_heads=3), [3, 3]),
    "names of the first code": (with_settings(holding(w_qs=linear(8, 12), w_ks=linear(8, 12)), n_head=3), [3, 3]),
    "upper case": (attention(names="W_{}", num_heads=3), [3, 3, None]),
    "MultiheadAttention": (nn.MultiheadAttention(16, 2), [(8, 8, 8, 8, 16), None]),
    "MultiheadAttention of one head": (nn.MultiheadAttention(16, 1), [3, None]),
    "MultiheadAttention of other inputs": (nn.MultiheadAttention(16, 2, kdim=8, vdim=4), [2, 2, None, None]),
    "GPT-2, to an encoder": (with_settings(holding(c_attn=Conv1D(16, 8)), num_heads=2, head_dim=4), [(4, 4, 8)]),
    "Phi-3": (fused("Phi3Attention", "qkv_proj", 20, head_dim=3, num_key_value_heads=1), [(14, 3, 3)]),
    "a stack": (
        with_settings(holding(wq=torch.zeros(2, 12, 8), wk=torch.zeros(2, 8, 8)), n_heads=3, n_kv_heads=2, head_dim=4),
        [3, 2],
    ),
    "wrapped": (
        with_settings(holding(q_proj=checkpoint_wrapper(linear(8, 12)), k_proj=linear(8, 12)), num_heads=3),
        [3, 3],
    ),
}


@pytest.mark.parametrize("model, expected", STATED.values(), ids=STATED)
def test_queries_and_keys_divide_by_heads_that_modules_state(model, expected):
    assert list(read(model).values()) == expected
    off = routes(model, heads=False)
    assert not any("heads" in route.reason for route in off.values())


# A module, and what is said of its first weight.
WHOLE = {
    "no number": (attention(), UNKNOWN),
    "a list of numbers": (attention(num_heads=[3, 3]), UNKNOWN),
    "a bool": (attention(num_heads=True), UNKNOWN),
    "heads that are modules": (attention(heads=nn.ModuleList([nn.Identity()])), UNKNOWN),
    "a number further out": (with_settings(at("a.b", attention()), num_heads=3), UNKNOWN),
    "a number that does not divide": (attention(num_heads=5), "; not by heads: there are no 5 of 12 rows of q, and"),
    "a size that does not fit": (
        attention(num_heads=3, head_dim=8),
        "; not by heads: 3 × 8 are not the 12 rows",
    ),
    "fewer keys, of which nothing is said": (
        attention(12, 6, num_heads=3),
        "; not by heads: there are no 3 of 12 rows of q, and 3 of 6 rows of k, of one size",
    ),
    "heads of one row": (attention(3, num_heads=3), "; not by heads: each of 3 would be one row"),
    "a stack without the size of a head": (
        with_settings(holding(wq=torch.zeros(2, 12, 8)), n_heads=3),
        "; not by heads: a head's rows are not known (heads= tells the number of heads)",
    ),
    "GPT-NeoX with other rows": (
        fused("GPTNeoXAttention", "query_key_value", 25, num_heads=2, head_size=4),
        "; whole, though named as fused (split= takes consecutive pieces); not by heads: 2 × 4 are not the 9 rows of v",
    ),
    "a table of queries": (with_settings(holding(query=torch.zeros(12, 8)), num_heads=3, head_dim=4), ""),
    "XLNet": (
        with_settings(holding(q=torch.zeros(8, 3, 4)), n_head=3, d_head=4),
        "; each read as (out, in) (transposed= reads it as (in, out))",
    ),
    "RWKV's key": (with_settings(holding(key=linear(8, 12), receptance=linear(8, 8)), num_heads=3), ""),
    "an adapter": (with_settings(holding(q_proj=holding(lora_A=holding(default=linear(8, 4)))), num_heads=2), ""),
    "a convolution": (with_settings(holding(q=nn.Conv2d(4, 12, 1, bias=False)), num_heads=3), ""),
    "values alone": (with_settings(holding(v_proj=linear(8, 12)), num_heads=3), ""),
}


@pytest.mark.parametrize("model, expected", WHOLE.values(), ids=WHOLE)
def test_without_a_number_that_fits_a_weight_stays_whole(model, expected):
    route = next(iter(routes(model).values()))
    assert route.split is None
    reason = route.reason.split("; ", 1)
    assert f"; {reason[1]}".startswith(expected) if expected else len(reason) == 1


def test_reasons_say_how_many_heads_of_how_many_rows():
    found = routes(attention(12, 8, num_heads=3, num_key_value_heads=2))
    assert [r.reason for r in found.values()] == [
        "linear layer; by heads: 3 × 4",
        "linear layer; by heads: 2 × 4",
        "linear layer",
    ]
    (in_proj, *_) = routes(nn.MultiheadAttention(16, 2)).values()
    assert in_proj.reason == "q, k and v of MultiheadAttention, fused; split into 3; q and k by heads: 2 × 8"
    (c_attn,) = routes(with_settings(holding(c_attn=Conv1D(16, 8)), num_heads=2, head_dim=4)).values()
    assert c_attn.reason.endswith("; stored (in, out); split into 2; k by heads: 2 × 4")
    (neox,) = routes(fused("GPTNeoXAttention", "query_key_value", 24, num_heads=2, head_size=4)).values()
    assert neox.reason == "linear layer; q, k and v by heads: 2 × 4"
    assert neox.rank == 1 and routes(attention(num_heads=3), rank=128)["q_proj.weight"].rank == 4


def test_numbers_by_hand_compose_with_other_patterns():
    model = holding(
        attn=attention(num_heads=2),
        own=holding(qkv=linear(10, 24), q=linear(10, 12)),
        stored=holding(wq=torch.zeros(10, 12)),
        router=attention(num_heads=2),
    )
    options = {"split": {"*.qkv.weight": 3}, "transposed": ["*.wq"], "adamw": ["*.router.*"]}
    told = {"*.attn.q_*": 3, "*.v_proj.*": 6, "*.qkv.*": 4, "*.own.q.*": 1, "*.wq": 2}
    assert read(model, heads=told, **options) == {
        "attn.q_proj": 3,
        "attn.k_proj": 2,
        "attn.v_proj": 6,
        "own.qkv": (2, 2, 2, 2, 2, 2, 2, 2, 8),
        "own.q": None,
        "stored.wq": 2,
    }
    routed = routes(model, heads=told, **options)
    assert routed["own.qkv.weight"].reason == "linear layer; split into 3; q and k by heads: 4 × 2"
    assert routed["own.q.weight"].reason == "linear layer" and routed["stored.wq"].transposed
    sizes = {"*.qkv.weight": (16, 4, 4)}  # grouped
    assert read(model, heads={"*.qkv.*": 8}, split=sizes)["own.qkv"] == (2,) * 10 + (4,)
    known = with_settings(of_class("MptAttention", Wqkv=linear(8, 24)), n_heads=2)
    assert read(known, heads={"*.Wqkv.weight": 4}, split_fused=False) == {"Wqkv": (2,) * 8 + (8,)}
    assert read(known, split_fused=False) == {"Wqkv": None} and read(known, heads={"*.Wqkv.*": 1}) == {"Wqkv": 3}
    assert read(known, heads={}) == read(known) == {"Wqkv": (4, 4, 4, 4, 8)}


def test_a_weight_split_by_hand_divides_by_stated_heads():
    model = with_settings(holding(qkv=linear(10, 24), kv=linear(10, 16)), n_head=2, head_dim=4)
    assert read(model, split={"*.qkv.weight": 3, "*.kv.weight": 2}) == {"qkv": (4, 4, 4, 4, 8), "kv": (4, 4, 8)}
    assert read(model, split={"*.qkv.weight": (8, 8, 4, 4)})["qkv"] == (8, 8, 4, 4)


@pytest.mark.parametrize("name", ["qkv_w", "qkv_weight", "Wqkv"])
def test_a_parameter_split_by_hand_divides_by_heads(name):
    """As a layer of that name, by heads that its module states or that are told."""
    bare = holding(**{name: torch.zeros(24, 10)})
    stated = with_settings(holding(**{name: torch.zeros(24, 10)}), n_head=2, head_dim=4)
    assert read(bare, split={f"*.{name}": 3}, heads={f"*.{name}": 4})[name] == (2,) * 8 + (8,)
    assert read(stated, split={f"*.{name}": 3})[name] == (4, 4, 4, 4, 8)


BAD = {
    "that does not divide": (
        {"*.a.weight": 5},
        r"heads='\*\.a\.weight': 5 heads do not fit 'it\.a\.weight' of shape \(12, 8\): 5 heads do not divide the 12 "
        "rows. Give a number that divides them, or 1 ",
    ),
    "of one row each": ({"*.a.weight": 12}, r"12 heads do not fit 'it\.a\.weight' .*each of 12 would be one row"),
    "of a fused weight": ({"*.in_proj_weight": 3}, "'it.attn.in_proj_weight' .*3 heads do not divide the 16 rows of q"),
    "of fewer keys": (
        {"*.qkv.weight": 2},
        r"2 heads do not fit 'it\.qkv\.weight' .*heads of 8 rows are not the 4 rows of k",
    ),
    "of pieces without names": (
        {"*.own.weight": 2},
        "2 heads .*: its name does not say which of its 3 pieces are queries and keys, so give split= the rows of",
    ),
    "of what is named as fused": (
        {"*.kv.weight": 2},
        r"2 heads do not fit 'it\.kv\.weight' .*is not known, so give split=: 3 .*, 2 for k and v, or all sizes",
    ),
    "of a convolution": ({"*.conv.weight": 2}, "2 heads .*it is a convolution"),
    "of an AdamW weight": ({"*.head.weight": 2}, "heads=.* matches no weight that goes to the matrix method"),
    "zero": ({"*.a.weight": 0}, r"Invalid heads\['\*\.a\.weight'\]=0: must be a number of heads, at least 1"),
    "a bool": ({"*.a.weight": True}, "Invalid heads.*=True"),
    "a fraction": ({"*.a.weight": 2.0}, r"Invalid heads.*=2\.0"),
}


@pytest.mark.parametrize("heads, message", BAD.values(), ids=BAD)
def test_a_wrong_number_is_refused_by_weight_rows_and_heads(heads, message):
    model = holding(a=linear(8, 12), qkv=linear(8, 24), own=linear(8, 24), kv=linear(8, 8), head=linear(8, 4))
    model.conv, model.attn = nn.Conv2d(2, 4, 2), nn.MultiheadAttention(16, 2)
    with pytest.raises(ValueError, match=message):
        every_route(model, heads=heads, split={"*.qkv.weight": (16, 4, 4), "*.own.weight": 3})


@pytest.mark.parametrize("heads", [3, None, ["*.q"], "yes"])
def test_heads_of_another_type_are_refused(heads):
    with pytest.raises(TypeError, match=r"Invalid heads=.*: must be True, False or numbers by pattern"):
        param_groups(attention(), **RATES, heads=heads)


def test_without_names_there_is_a_group_for_each_division():
    groups = param_groups(attention(12, 8, num_heads=3, num_kv_heads=2), **RATES, names=False)
    assert [g.get("split") for g in groups] == [3, 2, None]


def test_whole_state_under_heads_is_refused_with_the_remedy():
    optimizers = [ProKLShampoo(param_groups(attention(num_heads=3), **RATES, heads=heads)) for heads in (False, True)]
    state = copy.deepcopy(train(optimizers[0], range(2)).state_dict())
    state["param_groups"] = optimizers[1].state_dict()["param_groups"]
    with refused(
        optimizers[1],
        r"q_proj.weight.0 .* no tensor M_Q.0 .*heads=False of prokl.param_groups keeps queries and keys whole",
    ):
        optimizers[1].load_state_dict(state)
