"""Weights as their modules store them: (in, out) or (out, in), one matrix or several; known, or told by hand."""

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.routing import holding

RATES = {"lr": 0.02, "adamw_lr": 1e-3, "split_fused": True}


class Conv1D(nn.Module):
    """As transformers' own: a linear layer with its weight (in, out)."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.zeros(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))


class Experts(nn.Module):
    """4 experts with hidden size 8 and intermediate size 6."""

    in_out = False

    def __init__(self, **settings):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(4, *((8, 12) if self.in_out else (12, 8))))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 12))
        self.down_proj = nn.Parameter(torch.zeros(4, *((6, 8) if self.in_out else (8, 6))))
        for name, value in settings.items():
            setattr(self, name, value)


class GptOssExperts(Experts):
    in_out = True


class Llama4TextExperts(Experts):
    in_out = True


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def of_class(name, module="", **parts):
    """A module of a class of this name, from a file of that name, with these parts."""
    built = type(name, (nn.Module,), {"__module__": module})()
    for attribute, part in parts.items():
        setattr(built, attribute, part)
    return built


def routes(model, **options):
    """Routes of the weights of the matrix method by name, the model being ``it`` of another."""
    found = param_groups(holding(it=model, own=nn.Linear(3, 5)), **(RATES | options)).routes
    return {r.names[0].removeprefix("it."): r for r in found if r.algorithm == "matrix" and r.names[0] != "own.weight"}


def readings(model, **options):
    return {name: (r.transposed, r.split) for name, r in routes(model, **options).items()}


def test_a_layer_that_stores_in_out_is_read_so_and_the_table_says_it():
    found = routes(holding(c_fc=Conv1D(20, 8)))["c_fc.weight"]
    assert (found.transposed, found.split, found.reason) == (True, None, "2-D, weight of Conv1D; stored (in, out)")
    subclass = type("Adapted", (Conv1D,), {})(20, 8)
    assert routes(subclass)["weight"].transposed
    other = Conv1D(20, 8)
    del other.nf  # somebody else's class of this name
    assert not routes(other)["weight"].transposed


@pytest.mark.parametrize("kind", [nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_a_transposed_convolution_is_stored_in_out(kind):
    found = routes(kind(4, 6, 2, bias=False), rank=128)["weight"]
    assert found.transposed and found.split is None
    assert found.rank == 4 and found.reason.endswith("stored (in, out)")
    assert not routes(nn.Conv2d(4, 6, 2, bias=False))["weight"].transposed


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_normed_weight_is_read_as_its_layer_stores_it(norm):
    for layer in (nn.ConvTranspose2d(4, 16, 3, bias=False), nn.ConvTranspose3d(4, 16, 3, bias=False)):
        found = [r for r in routes(norm(layer)).values() if r.shape[:2] == (4, 16)]
        assert [r.transposed for r in found] == [True]
    assert [r.transposed for r in routes(norm(Conv1D(20, 8))).values() if r.shape == (8, 20)] == [True]
    assert not any(r.transposed for r in routes(norm(nn.Conv2d(4, 16, 3, bias=False))).values())


@pytest.mark.parametrize(
    "experts, expected",
    [
        (GptOssExperts(), {"gate_up_proj": (True, None), "down_proj": (True, None)}),  # gate and up take turns
        (Llama4TextExperts(), {"gate_up_proj": (True, 2), "down_proj": (True, None)}),
        (Experts(), {"gate_up_proj": (False, None), "down_proj": (False, None)}),
        (
            Experts(is_transposed=False, is_concatenated=True, has_gate=True),
            {"gate_up_proj": (False, 2), "down_proj": (False, None)},
        ),
        (
            GptOssExperts(is_transposed=True, is_concatenated=False, has_gate=True),
            {"gate_up_proj": (True, None), "down_proj": (True, None)},
        ),
    ],
    ids=["gpt-oss", "llama-4", "unknown", "mixtral", "gpt-oss, as of transformers 5"],
)
def test_stacks_of_experts_are_read_as_their_class_says(experts, expected):
    assert readings(experts) == expected


def test_projections_of_multihead_attention_are_three_matrices():
    found = routes(nn.MultiheadAttention(16, 2), rank=128)
    assert found["in_proj_weight"].split == 3 and found["in_proj_weight"].rank == 15
    assert found["out_proj.weight"].split is None
    assert {r.split for r in routes(nn.MultiheadAttention(16, 2, kdim=8, vdim=4)).values()} == {None}


@pytest.mark.parametrize(
    "module, split",
    [(nn.LSTM(8, 12), 4), (nn.GRU(8, 12), 3), (nn.RNN(8, 12), None)]
    + [(nn.LSTMCell(8, 12), 4), (nn.GRUCell(8, 12), 3), (nn.RNNCell(8, 12), None)],
    ids=lambda value: type(value).__name__,
)
def test_gates_are_matrices_of_their_own(module, split):
    assert set(readings(module).values()) == {(False, split)}


def test_the_projection_of_an_lstm_is_one_matrix():
    found = readings(nn.LSTM(8, 12, proj_size=5))
    assert found.pop("weight_hr_l0") == (False, None)
    assert set(found.values()) == {(False, 4)}


def test_c_attn_of_gpt_2_is_three_matrices_and_two_where_it_attends_to_an_encoder():
    assert readings(holding(c_attn=Conv1D(24, 8))) == {"c_attn.weight": (True, 3)}
    assert readings(holding(c_attn=Conv1D(16, 8))) == {"c_attn.weight": (True, 2)}
    assert readings(holding(c_attn=Conv1D(20, 8), c_proj=Conv1D(24, 8))) == {
        "c_attn.weight": (True, None),
        "c_proj.weight": (True, None),
    }
    assert readings(holding(c_attn=linear(8, 24))) == {"c_attn.weight": (False, None)}  # GPT-BigCode's is by heads


@pytest.mark.parametrize(
    "module, split",
    [
        (of_class("ModernBertAttention", Wqkv=linear(8, 24)), 3),
        (of_class("ModernBertMLP", Wi=linear(8, 24)), 2),
        (of_class("MptAttention", Wqkv=linear(8, 24)), 3),
        (of_class("DbrxAttention", Wqkv=linear(8, 16), head_dim=2, num_key_value_heads=2), (8, 4, 4)),
        (of_class("Phi3Attention", qkv_proj=linear(8, 16), head_dim=2, num_key_value_heads=2), (8, 4, 4)),
        (of_class("Phi3Attention", qkv_proj=linear(8, 24), head_dim=2, num_key_value_heads=4), 3),
        (of_class("Phi3Attention", qkv_proj=linear(8, 16)), None),  # without the sizes
        (of_class("Attention", "timm.layers.attention", qkv=linear(8, 24)), 3),
        (of_class("Attention", "elsewhere", qkv=linear(8, 24)), None),
        (of_class("GPTNeoXAttention", query_key_value=linear(8, 24)), None),  # q, k and v of a head side by side
        (of_class("CodeGenAttention", qkv_proj=linear(8, 24)), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_fused_layers_divide_where_the_module_is_certain(module, split):
    assert list(readings(module).values()) == [(False, split)]


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module", "base_layer"])
def test_wrappers_around_a_layer_hide_nothing_of_where_it_is(wrapper):
    attention = of_class("MptAttention", Wqkv=holding(**{wrapper: linear(8, 24)}))
    assert list(readings(attention).values()) == [(False, 3)]
    assert list(readings(holding(**{wrapper: of_class("MptAttention", Wqkv=linear(8, 24))})).values()) == [(False, 3)]


def test_gate_and_up_divide_beside_a_down_projection_of_half_their_size():
    mlp = holding(gate_up_proj=linear(8, 24), down_proj=linear(12, 8))
    assert readings(mlp)["gate_up_proj.weight"] == (False, 2)
    mlp.down_proj = linear(24, 8)
    assert readings(mlp)["gate_up_proj.weight"] == (False, None)


def test_nothing_divides_when_told_so():
    model = holding(attention=nn.MultiheadAttention(16, 2), c_attn=Conv1D(24, 8))
    assert set(readings(model, split_fused=False).values()) == {(False, None), (True, None)}
    with pytest.raises(ValueError, match=r"Invalid split_fused='no': must be one of \(True, False\)"):
        readings(model, split_fused="no")


def test_the_table_says_which_layers_are_whole_though_their_names_say_fused():
    hint = "linear layer; whole, though named as fused (split= takes consecutive pieces)"
    fused = ("c_attn", "qkv", "Wqkv", "qkv_proj", "to_kv", "gate_up_proj", "w12")
    whole = ("c_proj", "q", "v_proj", "up_proj", "gate", "in_proj", "kvasir", "w1", "query_key_value")
    model = holding(**{name: linear(8, 24) for name in (*fused, *whole)})
    said = {name.removesuffix(".weight"): r.reason for name, r in routes(model).items()}
    assert said == dict.fromkeys(fused, hint) | dict.fromkeys(whole, "linear layer")
    told = {"*.qkv.weight": 3, "*.c_attn.weight": 1}
    said = {name.removesuffix(".weight"): r.reason for name, r in routes(model, split=told).items()}
    assert (said["qkv"], said["c_attn"], said["w12"]) == ("linear layer; split into 3", "linear layer", hint)
    assert {r.reason for r in routes(model, split_fused=False).values()} == {"linear layer"}
    assert routes(Conv1D(20, 8)).popitem()[1].reason == "2-D, weight of Conv1D; stored (in, out)"
    assert routes(holding(c_attn=Conv1D(20, 8))).popitem()[1].reason.endswith("consecutive pieces)")


def test_pieces_that_would_be_single_numbers_stay_together():
    model = of_class("MptAttention", Wqkv=linear(1, 3))
    assert readings(model, matrix=["*Wqkv*"]) == {"Wqkv.weight": (False, None)}


def test_ranks_are_those_of_the_pieces():
    model = of_class("Phi3Attention", qkv_proj=linear(8, 16), head_dim=2, num_key_value_heads=2)
    found = param_groups(model, **RATES, rank=128)
    assert found.routes[0].rank == (7, 4, 4)
    assert str(found).splitlines()[:2] == [
        "parameter        shape  algorithm  rank   reason",
        "qkv_proj.weight  16x8   matrix     7,4,4  linear layer; split into 8+4+4",
    ]
    assert param_groups(model, **RATES, rank=4).routes[0].rank == 4
    assert param_groups(model, **RATES).routes[0].rank == 1  # of "auto"


def test_patterns_say_by_hand_what_modules_do_not():
    model = holding(qkv=linear(8, 24), kv=linear(8, 16), w1=torch.zeros(6, 20), attn=nn.MultiheadAttention(8, 1))
    options = {"split": {"*.qkv.weight": 3, "*.kv.*": (12, 4), "*.in_proj_weight": 1, "*.w1": [15, 5]}}
    found = readings(model, **options, transposed=["*.w1"])
    assert found == {
        "qkv.weight": (False, 3),
        "kv.weight": (False, (12, 4)),
        "w1": (True, (15, 5)),
        "attn.in_proj_weight": (False, None),
        "attn.out_proj.weight": (False, None),
    }
    assert readings(nn.DataParallel(model), **options, transposed=["it.w1"])["module.w1"] == (True, (15, 5))


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"split": {"*.none": 2}}, ValueError, r"split='\*\.none' matches no parameter"),
        ({"transposed": ["none"]}, ValueError, r"transposed='none' matches no parameter"),
        ({"transposed": [3]}, TypeError, r"transposed must hold patterns of names, got 3"),
        ({"split": {"it.a.weight": 0}}, ValueError, r"Invalid split\['it\.a\.weight'\]=0: must be a number of equal"),
        ({"split": {"it.a.weight": ()}}, ValueError, r"Invalid split\['it\.a\.weight'\]=\(\)"),
        ({"split": {"it.a.weight": 2.0}}, ValueError, r"Invalid split\['it\.a\.weight'\]=2\.0"),
        (
            {"split": {"it.a.weight": 5}},
            ValueError,
            r"split='it\.a\.weight': 5 does not fit 'it\.a\.weight' of shape .*: its output dimension is 12; give",
        ),
        ({"split": {"it.a.weight": (8, 8)}}, ValueError, r"\(8, 8\) does not fit .*output dimension is 12"),
        ({"split": {"it.thin": 4}}, ValueError, r"split='it\.thin': 4 does not fit 'it\.thin' .* a piece would be 1x1"),
        ({"split": {"it.conv.weight": 2}}, ValueError, r"2 does not fit 'it\.conv\.weight'.* convolution"),
        (
            {"split": {"it.head.weight": 2}},
            ValueError,
            r"split='it\.head\.weight' matches no weight that goes to the ma",
        ),
        ({"transposed": ["it.head.weight"]}, ValueError, r"transposed='it\.head\.weight' matches no weight that goes"),
    ],
)
def test_bad_readings_raise_with_name_value_and_remedy(options, error, message):
    model = holding(a=linear(8, 12), thin=torch.zeros(4, 1), head=linear(8, 4), conv=nn.Conv2d(2, 4, 2))
    with pytest.raises(error, match=message):
        routes(model, matrix=["it.thin"], **options)


def test_a_group_has_the_two_keys_only_where_a_weight_needs_them():
    plain = param_groups(holding(a=linear(8, 12), b=linear(8, 8)), **RATES)[0]
    assert not {"transposed", "split"} & plain.keys()
    model = holding(a=linear(8, 12), attn=nn.MultiheadAttention(8, 1), c_fc=Conv1D(20, 8))
    (matrix, *_) = param_groups(model, **RATES)
    assert [name for name, _ in matrix["params"]] == [
        "a.weight",
        "attn.in_proj_weight",
        "attn.out_proj.weight",
        "c_fc.weight",
    ]
    assert matrix["transposed"] == [False, False, False, True]
    assert matrix["split"] == [None, 3, None, None]
    assert "transposed" not in param_groups(nn.MultiheadAttention(8, 1), **RATES)[0]


def test_without_names_there_is_a_group_per_value_and_nothing_that_goes_by_position():
    model = holding(a=linear(8, 12), attn=nn.MultiheadAttention(8, 1), c_fc=Conv1D(20, 8), c_attn=Conv1D(24, 8))
    named = param_groups(model, **RATES, weight_decay=0.1, rank=4)
    groups = param_groups(model, **RATES, weight_decay=0.1, rank=4, names=False)
    assert groups.routes == named.routes and str(groups) == str(named)
    names = {p: name for name, p in model.named_parameters()}
    assert all(isinstance(p, nn.Parameter) for g in groups for p in g["params"])
    found = [([names[p] for p in g["params"]], {k: v for k, v in g.items() if k != "params"}) for g in groups]
    matrix = {"algorithm": "matrix", "lr": 0.02, "weight_decay": 0.1, "rank": 4}
    assert found[:-1] == [
        (["a.weight", "attn.out_proj.weight"], matrix),
        (["attn.in_proj_weight"], matrix | {"split": 3}),
        (["c_fc.weight"], matrix | {"transposed": True}),
        (["c_attn.weight"], matrix | {"transposed": True, "split": 3}),
    ]
    assert found[-1][1]["algorithm"] == "adamw"


@pytest.mark.parametrize("wrong", [{"split": ["*.weight"]}, {"split": 3}, {"transposed": 5}, {"matrix": None}])
def test_patterns_of_another_kind_are_refused_with_an_example(wrong):
    with pytest.raises(TypeError, match=rf"Invalid {next(iter(wrong))}=.*as "):
        param_groups(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), lr=0.1, adamw_lr=0.1, **wrong)
