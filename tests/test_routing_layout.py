"""Weights as their modules store them: (in, out) or (out, in), one matrix or several; known, or told by hand."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from prokl import param_groups
from tests.routing import HINT, RATES, Conv1D, holding, linear, of_class
from tests.routing import routes as every_route
from tests.training import silent


def routes(model, **options):
    """Routes of the weights of the matrix method by name, by no heads; fused ones divide unless told otherwise."""
    found = every_route(model, **({"split_fused": True, "heads": False} | options))
    return {name: route for name, route in found.items() if route.algorithm == "matrix"}


def readings(model, **options):
    return {name: (r.transposed, r.split) for name, r in routes(model, **options).items()}


def experts(kind="Experts", in_out=False, **settings):
    """4 experts with hidden size 8 and intermediate size 6."""
    up, down = ((8, 12), (6, 8)) if in_out else ((12, 8), (8, 6))
    found = of_class(kind, gate_up_proj=torch.zeros(4, *up), down_proj=torch.zeros(4, *down))
    for name, value in settings.items():
        setattr(found, name, value)
    return found


def without_nf():
    """Somebody else's class of this name."""
    found = Conv1D(20, 8)
    del found.nf
    return found


WHOLE, TURNED = (False, None), (True, None)
HEAD_SIZES = {"head_dim": 2, "num_key_value_heads": 2}
# A module, and how its matrices are read: (transposed, split).
READ = {
    "a convolution": (nn.Conv2d(4, 6, 2, bias=False), [WHOLE]),
    "a transposed convolution": (nn.ConvTranspose2d(4, 6, 2, bias=False), [TURNED]),
    "a transposed convolution in 3-D": (nn.ConvTranspose3d(4, 6, 2, bias=False), [TURNED]),
    "transformers' Conv1D": (holding(c_fc=Conv1D(20, 8)), [TURNED]),
    "a subclass": (type("Adapted", (Conv1D,), {})(20, 8), [TURNED]),
    "another Conv1D": (without_nf(), [WHOLE]),
    "c_attn": (holding(c_attn=Conv1D(24, 8)), [(True, 3)]),
    "c_attn to an encoder": (holding(c_attn=Conv1D(16, 8)), [(True, 2)]),
    "c_attn of other sizes": (holding(c_attn=Conv1D(20, 8), c_proj=Conv1D(24, 8)), [TURNED, TURNED]),
    "c_attn by heads": (holding(c_attn=linear(8, 24)), [WHOLE]),  # GPT-BigCode's
    "gpt-oss": (experts("GptOssExperts", True), [TURNED, TURNED]),  # gate and up take turns
    "mixtral": (experts(is_transposed=False, is_concatenated=True, has_gate=True), [(False, 2), WHOLE]),
    "LongCat": (experts("LongcatFlashExperts"), [(False, 2), WHOLE]),
    "Step 3.7": (experts("Step3p7Experts"), [(False, 2), WHOLE]),
    "unknown experts": (experts(), [WHOLE, WHOLE]),
    "attention": (nn.MultiheadAttention(16, 2), [(False, 3), WHOLE]),
    "attention of other sizes": (nn.MultiheadAttention(16, 2, kdim=8, vdim=4), [WHOLE] * 4),
    "LSTM": (nn.LSTM(8, 12), [(False, 4)] * 2),
    "LSTM with a projection": (nn.LSTM(8, 12, proj_size=5), [(False, 4)] * 2 + [WHOLE]),
    "GRU": (nn.GRU(8, 12), [(False, 3)] * 2),
    "RNN": (nn.RNN(8, 12), [WHOLE] * 2),
    "LSTMCell": (nn.LSTMCell(8, 12), [(False, 4)] * 2),
    "GRUCell": (nn.GRUCell(8, 12), [(False, 3)] * 2),
    "RNNCell": (nn.RNNCell(8, 12), [WHOLE] * 2),
    "MPT": (of_class("MptAttention", Wqkv=linear(8, 24)), [(False, 3)]),
    "Phi-3, as many heads": (
        of_class("Phi3Attention", qkv_proj=linear(8, 24), head_dim=2, num_key_value_heads=4),
        [(False, 3)],
    ),
    "Phi-3, with fewer outputs": (
        of_class("Phi3Attention", qkv_proj=linear(8, 16), head_dim=2, num_key_value_heads=4),
        [WHOLE],
    ),
    "Phi-3, without the sizes": (of_class("Phi3Attention", qkv_proj=linear(8, 16)), [WHOLE]),
    "timm": (of_class("Attention", "timm.layers.attention", qkv=linear(8, 24)), [(False, 3)]),
    "an attention elsewhere": (of_class("Attention", "elsewhere", qkv=linear(8, 24)), [WHOLE]),
    "q, k and v of a head side by side": (of_class("GPTNeoXAttention", query_key_value=linear(8, 24)), [WHOLE]),
    "CLVP's gated unit": (of_class("ClvpGatedLinearUnit", proj=linear(8, 24)), [(False, 2)]),
    "GEGLU of diffusers": (of_class("GEGLU", "diffusers.models.activations", proj=linear(8, 24)), [(False, 2)]),
    "a GEGLU elsewhere": (of_class("GEGLU", "elsewhere", proj=linear(8, 24)), [WHOLE]),
    "groups with inputs of their own": (
        holding(o_a_proj=of_class("DeepseekV4GroupedLinear", weight=torch.zeros(12, 8), n_groups=3)),
        [(False, 3)],
    ),
    "qkv of transformers": (of_class("BlipAttention", "transformers.models.blip", qkv=linear(8, 24)), [(False, 3)]),
    "qkv of transformers, other sizes": (
        of_class("OtherAttention", "transformers.models.other", qkv=linear(8, 36)),
        [WHOLE],
    ),
    "Hiera, with more outputs": (of_class("HieraMaskUnitAttention", qkv=linear(8, 48)), [(False, 3)]),
    "EXAONE 4.5": (of_class("Exaone4_5_VisionAttention", qkv=linear(8, 16), **HEAD_SIZES), [(False, (8, 4, 4))]),
    "gate and up": (holding(gate_up_proj=linear(8, 24), down_proj=linear(12, 8)), [(False, 2), WHOLE]),
    "gate and up, not half as large": (holding(gate_up_proj=linear(8, 24), down_proj=linear(24, 8)), [WHOLE] * 2),
    **{
        f"wrapped as {wrapper}": (of_class("MptAttention", Wqkv=holding(**{wrapper: linear(8, 24)})), [(False, 3)])
        for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "base_layer")
    },
    **{
        f"all of it wrapped as {wrapper}": (
            holding(**{wrapper: of_class("MptAttention", Wqkv=linear(8, 24))}),
            [(False, 3)],
        )
        for wrapper in ("_orig_mod", "_checkpoint_wrapped_module", "base_layer")
    },
}


@pytest.mark.parametrize("model, expected", READ.values(), ids=READ)
def test_weights_are_read_and_divided_as_modules_store_them(model, expected):
    assert list(readings(model).values()) == expected
    assert {split for _, split in readings(model, split_fused=False).values()} == {None}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_a_normed_weight_is_read_as_its_layer_stores_it(norm):
    for layer in (nn.ConvTranspose2d(4, 16, 3, bias=False), nn.ConvTranspose3d(4, 16, 3, bias=False)):
        found = [r for r in routes(norm(layer)).values() if r.shape[:2] == (4, 16)]
        assert [r.transposed for r in found] == [True]
    assert [r.transposed for r in routes(norm(Conv1D(20, 8))).values() if r.shape == (8, 20)] == [True]
    assert not any(r.transposed for r in routes(norm(nn.Conv2d(4, 16, 3, bias=False))).values())


WRAPPERS_OF_A_WEIGHT = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "former weight_norm": nn.utils.weight_norm,
    "former spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda module, name: prune.random_unstructured(module, name, 0.5),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("wrap", WRAPPERS_OF_A_WEIGHT.values(), ids=WRAPPERS_OF_A_WEIGHT)
def test_a_fused_weight_divides_under_a_norm_or_a_mask(wrap):
    for layer, name in ((nn.MultiheadAttention(16, 2), "in_proj_weight"), (nn.LSTM(8, 12), "weight_hh_l0")):
        plain = routes(layer)[name]
        wrapped = wrap(layer, name)
        (route,) = (r for r in routes(wrapped).values() if r.shape == plain.shape and name in r.names[0])
        assert (route.split, route.reason.replace("Parametrized", "")) == (plain.split, plain.reason)


def test_reasons_say_how_a_weight_is_read():
    attention, lstm = nn.MultiheadAttention(16, 2, add_bias_kv=True), nn.LSTM(8, 12, proj_size=5)
    reasons = {name: r.reason for part in (attention, lstm) for name, r in routes(part, split_fused=False).items()}
    assert reasons == {
        "in_proj_weight": "q, k and v of MultiheadAttention, fused",
        "out_proj.weight": "linear layer",
        "weight_ih_l0": "weight_ih_l0 of LSTM, gates fused",
        "weight_hh_l0": "weight_hh_l0 of LSTM, gates fused",
        "weight_hr_l0": "weight_hr_l0 of LSTM",
    }
    hint = "linear layer; whole, though named as fused (split= takes consecutive pieces)"
    fused = ("c_attn", "qkv", "Wqkv", "qkv_proj", "to_kv", "gate_up_proj", "w12", "query_key_value", "to_qkv_mlp_proj")
    whole = ("c_proj", "q", "v_proj", "up_proj", "gate", "in_proj", "kvasir", "w1")
    model = holding(**{name: linear(8, 24) for name in (*fused, *whole)})
    reasons = {name.removesuffix(".weight"): r.reason for name, r in routes(model).items()}
    assert reasons == dict.fromkeys(fused, hint) | dict.fromkeys(whole, "linear layer")
    told = {"*.qkv.weight": 3, "*.c_attn.weight": 1}
    reasons = {name.removesuffix(".weight"): r.reason for name, r in routes(model, split=told).items()}
    assert (reasons["qkv"], reasons["c_attn"], reasons["w12"]) == ("linear layer; split into 3", "linear layer", hint)
    assert {r.reason for r in routes(model, split_fused=False).values()} == {"linear layer"}
    assert routes(Conv1D(20, 8))["weight"].reason == "2-D, weight of Conv1D; stored (in, out)"
    assert routes(holding(c_attn=Conv1D(20, 8)))["c_attn.weight"].reason.endswith("consecutive pieces)")
    stacks = holding(known=experts(is_transposed=False), own=experts())  # whose layout is open, but where it is told
    found = routes(stacks, transposed=["*.own.gate_up_proj"])
    assert [name for name, r in found.items() if r.reason.endswith(HINT)] == ["own.down_proj"]


def test_pieces_that_would_be_single_numbers_stay_together():
    model = of_class("MptAttention", Wqkv=linear(1, 3))
    assert readings(model, matrix=["*Wqkv*"]) == {"Wqkv.weight": WHOLE}


def test_ranks_are_those_of_the_pieces():
    model = of_class("Phi3Attention", qkv_proj=linear(8, 16), **HEAD_SIZES)
    found = param_groups(model, **RATES, heads=False, rank=128)
    assert found.routes[0].rank == (7, 4, 4)
    assert str(found).splitlines()[:2] == [
        "parameter        shape  algorithm  rank   reason",
        "qkv_proj.weight  16x8   matrix     7,4,4  linear layer; split into 8+4+4",
    ]
    assert [routes(model, rank=rank)["qkv_proj.weight"].rank for rank in (4, None)] == [4, 1]  # 1 of "auto"
    assert routes(nn.ConvTranspose2d(4, 6, 2, bias=False), rank=128)["weight"].rank == 4
    assert routes(nn.MultiheadAttention(16, 2), rank=128)["in_proj_weight"].rank == 15


def test_patterns_say_by_hand_what_modules_do_not():
    model = holding(qkv=linear(8, 24), kv=linear(8, 16), w1=torch.zeros(6, 20), attn=nn.MultiheadAttention(8, 1))
    options = {"split": {"*.qkv.weight": 3, "*.kv.*": (12, 4), "*.in_proj_weight": 1, "*.w1": [15, 5]}}
    assert readings(model, **options, transposed=["*.w1"]) == {
        "w1": (True, (15, 5)),
        "qkv.weight": (False, 3),
        "kv.weight": (False, (12, 4)),
        "attn.in_proj_weight": WHOLE,
        "attn.out_proj.weight": WHOLE,
    }
    assert readings(nn.DataParallel(model), **options, transposed=["it.w1"])["module.w1"] == (True, (15, 5))


A = r"it\.a\.weight"
BAD = [
    ({"split_fused": "no"}, r"Invalid split_fused='no': must be one of \(True, False\)"),
    ({"transposed": [3]}, r"transposed must hold patterns of names, got 3"),
    ({"split": {"it.a.weight": 0}}, rf"Invalid split\['{A}'\]=0: must be a number of equal"),
    ({"split": {"it.a.weight": ()}}, rf"Invalid split\['{A}'\]=\(\)"),
    ({"split": {"it.a.weight": 2.0}}, rf"Invalid split\['{A}'\]=2\.0"),
    (
        {"split": {"it.a.weight": 5}},
        rf"split='{A}': 5 does not fit '{A}' of .*: its output dimension is 12; give",
    ),
    ({"split": {"it.a.weight": (8, 8)}}, r"\(8, 8\) does not fit .*output dimension is 12"),
    ({"split": {"it.thin": 4}}, r"split='it\.thin': 4 does not fit 'it\.thin' .* a piece would be 1x1"),
    ({"split": {"it.conv.weight": 2}}, r"2 does not fit 'it\.conv\.weight'.* convolution"),
    ({"split": {"it.head.weight": 2}}, r"split='it\.head\.weight' matches no weight that goes to the ma"),
    ({"transposed": ["it.head.weight"]}, r"transposed='it\.head\.weight' matches no weight that goes"),
    ({"split": ["*.weight"]}, "Invalid split=.*as "),
    ({"split": 3}, "Invalid split=.*as "),
    ({"transposed": 5}, "Invalid transposed=.*as "),
    ({"adamw": None}, "Invalid adamw=.*as "),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_readings_raise_with_name_value_and_remedy(options, message):
    model = holding(a=linear(8, 12), thin=torch.zeros(4, 1), head=linear(8, 4), conv=nn.Conv2d(2, 4, 2))
    kind = TypeError if "got 3" in message or message.endswith("as ") else ValueError
    with pytest.raises(kind, match=message):
        routes(model, matrix=["it.thin"], **options)


def test_a_group_has_the_two_keys_only_where_a_weight_needs_them():
    """Without names there is a group per value, and nothing that goes by position."""
    plain = param_groups(holding(a=linear(8, 12), b=linear(8, 8)), **RATES)[0]
    assert not {"transposed", "split"} & plain.keys()
    model = holding(a=linear(8, 12), attn=nn.MultiheadAttention(8, 1), c_fc=Conv1D(20, 8), c_attn=Conv1D(24, 8))
    options = {"heads": False, "weight_decay": 0.1, "rank": 4}
    matrix, *_ = given = param_groups(model, **RATES, **options)
    order = ["a.weight", "attn.in_proj_weight", "attn.out_proj.weight", "c_fc.weight", "c_attn.weight"]
    assert [name for name, _ in matrix["params"]] == order
    assert matrix["transposed"] == [False, False, False, True, True]
    assert matrix["split"] == [None, 3, None, None, 3]
    assert "transposed" not in param_groups(nn.MultiheadAttention(8, 1), **RATES)[0]

    groups = param_groups(model, **RATES, **options, names=False)
    assert groups.routes == given.routes and str(groups) == str(given)
    names = {p: name for name, p in model.named_parameters()}
    assert all(isinstance(p, nn.Parameter) for g in groups for p in g["params"])
    found = [([names[p] for p in g["params"]], {k: v for k, v in g.items() if k != "params"}) for g in groups]
    common = {"algorithm": "matrix", "lr": 0.02, "weight_decay": 0.1, "rank": 4}
    assert found[:-1] == [
        (["a.weight", "attn.out_proj.weight"], common),
        (["attn.in_proj_weight"], common | {"split": 3}),
        (["c_fc.weight"], common | {"transposed": True}),
        (["c_attn.weight"], common | {"transposed": True, "split": 3}),
    ]
    assert found[-1][1]["algorithm"] == "adamw"


def test_q_k_and_v_in_a_weight_of_ones_own_are_warned_of():
    normed = nn.ModuleDict({"0": holding(qkv=nn.utils.parametrizations.weight_norm(linear(8, 24)))})
    upper, model = (
        nn.ModuleDict({str(i): holding(**{name: linear(8, 24)}) for i in range(2)}) for name in ("Wqkv", "qkv")
    )
    bare = nn.ModuleDict({str(i): holding(qkv_weight=torch.zeros(24, 8)) for i in range(2)})
    for own, says in (
        (bare, r"'0.qkv_weight' and others look like q, k and v.*split={'\*\.qkv_weight': 3}"),
        (holding(Wqkv=torch.zeros(24, 8)), "'Wqkv' looks like q, k and v.*split={'Wqkv': 3}"),
        (normed, r"split={'\*\.qkv\.parametrizations\.weight\.original1': 3}"),  # of one module's weights
        (upper, r"split={'\*\.Wqkv\.weight': 3}"),
        (model, r"'0.qkv.weight' and others look like q, k and v.*split={'\*.qkv.weight': 3}"),
    ):
        with pytest.warns(UserWarning, match=says):
            param_groups(own, **RATES)
    theirs = of_class("Model", "transformers.models.own", attn=of_class("Own", "", qkv=linear(8, 24)))
    with pytest.warns(UserWarning, match="'attn.qkv.weight' looks like q, k and v"):
        param_groups(theirs, **RATES)
    told = ({"split": {"*.qkv.weight": 3}}, {"split": {"*.qkv.weight": 1}}, {"split_fused": False})
    with silent():
        for own in told:
            param_groups(model, **RATES, **own)
        param_groups(bare, **RATES, split={"*.qkv_weight": 3})
        param_groups(holding(qkv_w=torch.zeros(16, 8)), **RATES)
        param_groups(holding(qkv=linear(8, 12)), **RATES)  # one key and value for all heads, or something else
        model["0"].qkv.requires_grad_(False), model["1"].qkv.requires_grad_(False)
        param_groups(nn.ModuleDict({**model, "head": linear(8, 8)}), **RATES)


@pytest.mark.parametrize(
    "cls, layer",
    [
        ("CodeGenAttention", "qkv_proj"),
        ("EfficientFormerSelfAttention", "qkv"),
        ("GPTBigCodeAttention", "c_attn"),
        ("MiniMaxLightningAttention", "qkv_proj"),
    ],
)
def test_q_k_and_v_in_another_order_stay_whole_without_a_warning(cls, layer):
    model = of_class(cls, **{layer: linear(8, 24)})
    with silent():
        route = routes(model)[f"{layer}.weight"]
        param_groups(model, **RATES)
    assert route.split is None
    assert route.reason == "linear layer; whole, though named as fused (split= takes consecutive pieces)"
    with pytest.raises(ValueError, match="2 heads do not fit .*: its q, k and v take turns, so it stays whole"):
        param_groups(model, **RATES, heads={f"{layer}.weight": 2})
    assert param_groups(model, **RATES, heads={f"{layer}.weight": 1}).routes[0].split is None
