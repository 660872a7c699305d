"""Routing: every trainable parameter lands once, where its module and name say, and the table says why."""

import copy
import pickle

import pytest
import torch
from torch import nn

import prokl
from prokl import param_groups
from tests.routing import holding

HINT = "; each read as (out, in) (transposed= reads it as (in, out))"
RATES = {"lr": 0.02, "adamw_lr": 1e-3}


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width))


class GPT(nn.Module):
    def __init__(self, width=16, layers=2, vocabulary=48, tied=False):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.pos_emb = nn.Parameter(torch.zeros(8, width))
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class Experts(nn.Module):
    """Two stacks of 4 experts, with biases in the two layouts that libraries use."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.zeros(4, 16, 32))
        self.up_bias = nn.Parameter(torch.zeros(4, 32))
        self.down = nn.Parameter(torch.zeros(4, 32, 16))
        self.b2 = nn.Parameter(torch.zeros(4, 1, 16))


def routes(model, **options):
    """Route of every name of ``model``, with a linear layer added so that the matrix method has something."""
    found = param_groups(holding(it=model, own=nn.Linear(3, 5)), **RATES, **options).routes
    return {name.removeprefix("it."): route for route in found for name in route.names}


def destination(part, name="part", **options):
    """(algorithm, reason) of the only parameter, or of the weight, of ``part`` under ``name``."""
    found = routes(holding(**{name: part}), **options)
    route = found.get(name) or found[f"{name}.weight"]
    return route.algorithm, route.reason


MODELS = {
    "gpt": GPT,
    "tied gpt": lambda: GPT(tied=True),
    "experts": lambda: holding(layers=nn.ModuleList([holding(norm=nn.LayerNorm(16), experts=Experts())])),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(8, 8, 3), nn.Conv3d(8, 4, 2)
    ),
    "transformer": lambda: nn.TransformerDecoderLayer(16, 2, 32),
    "recurrent": lambda: holding(embed=nn.Embedding(9, 8), lstm=nn.LSTM(8, 12, 2, proj_size=5), fc=nn.Linear(5, 9)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rank", [None, 4])
def test_every_parameter_lands_exactly_once(name, rank):
    model = MODELS[name]()
    next(model.parameters()).requires_grad_(False)
    groups = param_groups(model, **RATES, rank=rank)
    placed = [pair for group in groups for pair in group["params"]]
    expected = dict(model.named_parameters())
    assert sorted(n for n, _ in placed) == sorted(expected)
    assert all(expected[n] is p for n, p in placed)
    assert [route.names[0] for route in groups.routes] == [n for n, _ in model.named_parameters()]


def test_groups_carry_the_hyper_parameters_and_only_matrices_a_rank():
    model = GPT()
    options = {"weight_decay": 0.1, "adamw_weight_decay": 0.2, "adamw_betas": (0.8, 0.9), "adamw_eps": 1e-6}
    groups = [dict(group) for group in param_groups(model, **RATES, **options, rank=8)]
    names = [[name for name, _ in group.pop("params")] for group in groups]
    adamw = {"algorithm": "adamw", "lr": 1e-3, "betas": (0.8, 0.9), "eps": 1e-6}
    assert groups == [
        {"algorithm": "matrix", "lr": 0.02, "weight_decay": 0.1, "rank": 8},
        adamw | {"weight_decay": 0.2},
        adamw | {"weight_decay": 0.0},
    ]
    weights = ("attention.qkv.weight", "attention.output.weight", "mlp.0.weight", "mlp.2.weight")
    assert names[0] == [f"layers.{i}.{weight}" for i in range(2) for weight in weights]
    assert names[1] == ["pos_emb", "wte.weight", "lm_head.weight"]
    assert all(p.ndim == 1 for name, p in model.named_parameters() if name in names[2])
    assert param_groups(model, **RATES)[0].keys() == {"params", "algorithm", "lr"}


@pytest.mark.parametrize("names", [True, False])
def test_what_is_not_given_to_the_groups_is_the_optimizers(names):
    told = prokl.ProKLShampoo(param_groups(GPT(), **RATES, names=names), rank=3, weight_decay=0.2)
    assert [(g["rank"], g["weight_decay"]) for g in told.param_groups[:1]] == [(3, 0.2)]
    assert [g["weight_decay"] for g in told.param_groups if g["algorithm"] == "adamw"] == [0.0, 0.0]
    groups = param_groups(GPT(), **RATES, names=names, rank=2, weight_decay=0.0)
    told = prokl.ProKLShampoo(groups, rank=3, weight_decay=0.2)
    assert (told.param_groups[0]["rank"], told.param_groups[0]["weight_decay"]) == (2, 0.0)
    told = prokl.ProKLShampoo(param_groups(GPT(), **RATES, names=names, rank="auto"), rank=3)
    assert told.param_groups[0]["rank"] == "auto"


def test_empty_groups_are_left_out():
    assert [g["algorithm"] for g in param_groups(nn.Linear(4, 6, bias=False), **RATES)] == ["matrix"]
    groups = param_groups(nn.Linear(4, 6), **RATES, adamw_weight_decay=0.3)
    assert [(g["algorithm"], g.get("weight_decay")) for g in groups] == [("matrix", None), ("adamw", 0.0)]


def test_the_table_shows_every_parameter_its_destination_and_the_reason():
    model = holding(
        tok=nn.Embedding(48, 16),
        norm=nn.LayerNorm(16, bias=False),
        conv=nn.Conv2d(3, 8, 3, bias=False),
        old=nn.Linear(16, 16, bias=False),
        experts=torch.zeros(4, 16, 32),
        square=nn.Linear(16, 16, bias=False),
        scale=torch.tensor(1.0),
        lm_head=nn.Linear(16, 48, bias=False),
    )
    model.lm_head.weight = model.tok.weight
    model.old.weight.requires_grad_(False)
    groups = param_groups(model, **RATES, rank=128)
    expected = f"""\
parameter           shape    algorithm  rank  reason
experts             4x16x32  matrix     16    stack of 4, experts of Module{HINT}
scale               scalar   adamw      -     0-D, scale of Module
tok.weight          48x16    adamw      -     lm_head.weight tied to embedding tok.weight
  = lm_head.weight
norm.weight         16       adamw      -     1-D, weight of LayerNorm
conv.weight         8x3x3x3  matrix     8     convolution, flattened to 8x27
old.weight          16x16    matrix     15    linear layer; frozen now
square.weight       16x16    matrix     15    linear layer
matrix: 4 tensors, 2,776 elements, 1 of them frozen now; adamw: 3 tensors, 785 elements
output head: tok.weight (lm_head.weight tied to embedding tok.weight)"""
    assert str(groups) == repr(groups) == expected
    assert "  rank if auto  " in str(param_groups(model, **RATES)).splitlines()[0]  # the optimizer may be told another
    assert "  rank  " in str(param_groups(model, **RATES, rank="auto")).splitlines()[0]


def test_groups_and_table_survive_copying_and_pickling():
    groups = param_groups(GPT(), **RATES)
    for twin in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert str(twin) == str(groups)
        assert [len(g["params"]) for g in twin] == [len(g["params"]) for g in groups]


@pytest.mark.parametrize(
    "shape, rank",
    [((1, 9), 1), ((5, 9), 1), ((11, 12), 1), ((12, 12), 2), ((96, 384), 16), ((384, 96), 16), ((192, 192), 32)]
    + [((768, 768), 128), ((768, 3072), 128), ((1024, 1024), 128), ((4096, 4096), 128), ((2, 2), 1)],
)
def test_an_automatic_rank_is_a_sixth_of_the_short_side_and_the_papers_at_its_widths(shape, rank):
    with torch.device("meta"):
        model = holding(w=torch.zeros(shape))
    assert routes(model, matrix=["it.w"])["w"].rank == rank
    optimizer = prokl.ProKLShampoo([torch.nn.Parameter(torch.zeros(2, 3))])
    assert optimizer.param_groups[0]["rank"] == "auto"
    assert optimizer.method.rank(optimizer.param_groups[0], min(shape), max(shape)) == rank


@pytest.mark.parametrize("shape, rank", [((16, 64), 16), ((64, 16), 16), ((16, 16), 15), ((1, 9), 1), ((40, 50), 32)])
def test_rank_is_clamped_to_what_the_weight_allows(shape, rank):
    assert routes(holding(w=torch.zeros(shape)), rank=32, matrix=["it.w"])["w"].rank == rank


@pytest.mark.parametrize("head_first", [False, True])
def test_a_head_tied_to_an_embedding_follows_it_whatever_its_name_and_order(head_first):
    parts = {"body_map": nn.Linear(16, 48, bias=False), "words": nn.Embedding(48, 16)}
    model = holding(**dict(sorted(parts.items(), reverse=not head_first)))
    model.body_map.weight = model.words.weight
    found = routes(model)
    assert found["body_map.weight"] is found["words.weight"]
    assert found["words.weight"].algorithm == "adamw"
    assert found["words.weight"].reason == "it.body_map.weight tied to embedding it.words.weight"


def test_a_shared_block_is_routed_once_under_all_of_its_names():
    block = Block(16)
    groups = param_groups(holding(layers=nn.ModuleList([block, block])), **RATES)
    assert len(groups.routes) == len(list(block.parameters()))
    assert groups.routes[0].names == ("layers.0.norm.weight", "layers.1.norm.weight")


@pytest.mark.parametrize(
    "path, algorithm",
    [
        ("lm_head", "adamw"),
        ("model.LM_Head", "adamw"),
        ("mtp.0.lm_head", "adamw"),
        ("lm_heads.2", "adamw"),
        ("unembed", "adamw"),
        ("embed_out", "adamw"),
        ("head", "adamw"),
        ("heads.head", "adamw"),
        ("value_head", "adamw"),
        ("cls.predictions.decoder", "adamw"),
        ("classifier", "adamw"),
        ("module.head", "adamw"),
        ("_orig_mod.score", "adamw"),
        ("module._orig_mod.lm_head", "adamw"),
        ("head._orig_mod", "adamw"),
        ("head.module", "adamw"),
        ("layers.3.attention.output", "matrix"),
        ("layers.3.output.dense", "matrix"),
        ("encoder_layer_0.proj_out", "matrix"),
        ("layers._orig_mod.3.attention.output", "matrix"),
        ("lm_head.dense", "matrix"),
        ("overhead", "matrix"),
        ("embed", "matrix"),
        ("token_mixer", "matrix"),
    ],
)
def test_a_linear_layer_is_a_head_by_the_last_part_of_its_path(path, algorithm):
    model = nn.Linear(16, 48, bias=False)
    for part in reversed(path.split(".")):
        model = holding(**{part: model})
    model.body = nn.Linear(3, 5)
    by_name = {route.names[0]: route.algorithm for route in param_groups(model, **RATES).routes}
    assert by_name[f"{path}.weight"] == algorithm


def test_the_last_layer_of_a_sequential_head_is_the_head():
    vgg = holding(
        features=nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)),
        classifier=nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 10, bias=False), nn.Identity()),
        layers=nn.ModuleList([holding(output=nn.Sequential(nn.Linear(8, 8, bias=False)))]),
    )
    found = {r.names[0]: r.algorithm for r in param_groups(vgg, **RATES).routes}
    assert found == {
        "features.0.weight": "matrix",
        "classifier.0.weight": "matrix",
        "classifier.2.weight": "adamw",
        "layers.0.output.0.weight": "matrix",
    }


@pytest.mark.parametrize(
    "name",
    [
        "pos_emb",
        "pos_embed",
        "wpe",
        "cls_token",
        "relative_position_bias_table",
        "rel_pos_h",
        "class_embedding",
    ],
)
def test_raw_tables_by_name_go_to_adamw(name):
    assert destination(torch.zeros(5, 16), name) == ("adamw", "named as embedding, position or token")
    listed = routes(holding(**{name: nn.ParameterList([torch.zeros(5, 16)])}))
    assert listed[f"{name}.0"].algorithm == "adamw"


@pytest.mark.parametrize("name", ["decomposition", "post", "tokamak", "weights", "compose"])
def test_names_that_only_look_like_tables_are_matrices(name):
    assert destination(torch.zeros(5, 16), name) == ("matrix", f"2-D, {name} of Module")


class Conv1D(nn.Module):
    """A linear layer that stores its weight as (in, out), as some GPT-2 code does under this name."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 48))


class ColumnParallelLinear(Conv1D):
    pass


class VocabParallelEmbedding(Conv1D):
    pass


class T5LayerNorm(Conv1D):
    pass


class Words(nn.Embedding):
    pass


@pytest.mark.parametrize(
    "part, expected",
    [
        (nn.Linear(4, 8, bias=False), ("matrix", "linear layer")),
        (nn.Linear(8, 1, bias=False), ("adamw", "one row or column, weight of Linear")),
        (nn.Linear(1, 8, bias=False), ("adamw", "one row or column, weight of Linear")),
        (nn.Linear(1, 1, bias=False), ("adamw", "1x1 matrices only, weight of Linear")),
        (ColumnParallelLinear(), ("matrix", "linear layer (ColumnParallelLinear)")),
        (Conv1D(), ("matrix", "2-D, weight of Conv1D")),
        (nn.Conv2d(4, 8, 3, bias=False), ("matrix", "convolution, flattened to 8x36")),
        (nn.Conv2d(1, 8, 1, bias=False), ("adamw", "one row or column, weight of Conv2d")),
        (nn.Conv2d(4, 1, 3, bias=False), ("adamw", "one row or column, weight of Conv2d")),
        (nn.Conv2d(8, 8, 3, groups=8, bias=False), ("matrix", "convolution, flattened to 8x9")),
        (nn.ConvTranspose2d(4, 8, 3, bias=False), ("matrix", "convolution, flattened to 4x72; stored (in, out)")),
        (nn.Conv3d(4, 8, (1, 2, 3), bias=False), ("matrix", "convolution, flattened to 8x24")),
        (
            nn.Conv1d(4, 8, 3, bias=False),
            ("adamw", "3-D weight of Conv1d, which would be read as a stack of 8"),
        ),
        (nn.Bilinear(3, 4, 5, bias=False), ("matrix", "stack of 5, weight of Bilinear")),
        (nn.Embedding(8, 4), ("adamw", "embedding (Embedding)")),
        (nn.EmbeddingBag(8, 4), ("adamw", "embedding (EmbeddingBag)")),
        (Words(8, 4), ("adamw", "embedding (Words)")),
        (VocabParallelEmbedding(), ("adamw", "embedding (VocabParallelEmbedding)")),
        (nn.LayerNorm((4, 8), bias=False), ("adamw", "norm (LayerNorm)")),
        (T5LayerNorm(), ("adamw", "norm (T5LayerNorm)")),
        (torch.zeros(4, 8), ("matrix", "2-D, part of Module")),
        (torch.zeros(3, 4, 8), ("matrix", f"stack of 3, part of Module{HINT}")),
        (torch.zeros(2, 3, 4, 8), ("adamw", "4-D, part of Module, which is no convolution")),
        (torch.zeros(4, 8, dtype=torch.complex64), ("adamw", "complex, part of Module")),
        (torch.zeros(0, 8), ("adamw", "no elements, part of Module")),
        (torch.zeros(8, 1, 1), ("adamw", "1x1 matrices only, part of Module")),
        (torch.zeros(1, 8), ("adamw", "one row or column, part of Module")),
        (torch.zeros(4, 1, 8), ("adamw", "one row or column, part of Module")),
        (torch.zeros(1, 8, 1, 1), ("adamw", "one row or column, part of Module")),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else type(value).__name__,
)
def test_each_kind_of_parameter_goes_where_its_module_says(part, expected):
    assert destination(part) == expected


def test_fused_projections_are_matrices_and_the_table_says_so():
    found = routes(nn.MultiheadAttention(16, 2, add_bias_kv=True), split_fused=False)
    assert (found["in_proj_weight"].algorithm, found["in_proj_weight"].reason) == (
        "matrix",
        "q, k and v of MultiheadAttention, fused",
    )
    assert found["out_proj.weight"].algorithm == "matrix"
    assert found["bias_k"].algorithm == found["in_proj_bias"].algorithm == "adamw"
    apart = routes(nn.MultiheadAttention(16, 2, kdim=8, vdim=4))
    assert apart["k_proj_weight"].reason == "2-D, k_proj_weight of MultiheadAttention"
    lstm = routes(nn.LSTM(8, 12, proj_size=5), split_fused=False)
    assert lstm["weight_ih_l0"].reason == "weight_ih_l0 of LSTM, gates fused"
    assert lstm["weight_hr_l0"].reason == "weight_hr_l0 of LSTM"
    assert {lstm[name].algorithm for name in ("weight_ih_l0", "weight_hh_l0", "weight_hr_l0")} == {"matrix"}
    assert routes(nn.RNNCell(8, 12))["weight_hh"].algorithm == "matrix"


def test_expert_stacks_are_matrices_and_their_biases_are_not():
    found = routes(holding(layers=nn.ModuleList([holding(experts=Experts(), gate=nn.Linear(16, 4))])))
    assert {name.removeprefix("layers.0."): (r.algorithm, r.rank) for name, r in found.items()} == {
        "experts.up": ("matrix", 2),
        "experts.up_bias": ("adamw", None),
        "experts.down": ("matrix", 2),
        "experts.b2": ("adamw", None),
        "gate.weight": ("matrix", 1),
        "gate.bias": ("adamw", None),
        "own.weight": ("matrix", 1),
        "own.bias": ("adamw", None),
    }


def test_biases_and_gains_of_two_dimensions_are_not_decayed():
    model = holding(experts=Experts(), norm=nn.LayerNorm((3, 4)), table=nn.Embedding(6, 4))
    decayed, plain = param_groups(model, **RATES, adamw_weight_decay=0.1)[1:]
    assert [name for name, _ in decayed["params"]] == ["table.weight"]
    assert [name for name, _ in plain["params"]] == [
        "experts.up_bias",
        "experts.b2",
        "norm.weight",
        "norm.bias",
    ]


def test_a_pattern_for_adamw_does_not_make_norms_and_vectors_decay():
    model = holding(norm=nn.LayerNorm((3, 4), bias=False), a=nn.Linear(4, 6), b=nn.Linear(4, 6))
    decayed, plain = param_groups(model, **RATES, adamw_weight_decay=0.1, adamw=["norm.*", "b.*"])[1:]
    assert [name for name, _ in decayed["params"]] == ["b.weight"]
    assert [name for name, _ in plain["params"]] == ["norm.weight", "a.bias", "b.bias"]


def test_only_the_weight_of_a_class_named_embedding_is_a_table():
    part = VocabParallelEmbedding()
    part.up = nn.Parameter(torch.zeros(4, 8))
    found = routes(part)
    assert (found["weight"].algorithm, found["up"].algorithm) == ("adamw", "matrix")


def test_parametrized_modules_are_read_through():
    model = holding(
        embed=nn.utils.parametrizations.spectral_norm(nn.Embedding(9, 4)),
        lm_head=nn.utils.parametrizations.spectral_norm(nn.Linear(4, 9, bias=False)),
        body=nn.utils.parametrizations.orthogonal(nn.Linear(4, 8, bias=False)),
        normed=nn.utils.parametrizations.weight_norm(nn.Linear(4, 8, bias=False)),
        conv=nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 8, 3, bias=False)),
        words=nn.utils.parametrizations.weight_norm(nn.Embedding(9, 4)),
    )
    found = param_groups(model, **RATES).routes
    assert {r.names[0].replace(".parametrizations.weight", ""): r.algorithm for r in found} == {
        "embed.original": "adamw",
        "lm_head.original": "adamw",
        "body.original": "matrix",
        "normed.original0": "adamw",  # the gain, (8, 1)
        "normed.original1": "matrix",
        "conv.original0": "adamw",
        "conv.original1": "matrix",
        "words.original0": "adamw",
        "words.original1": "adamw",
    }


def test_wrappers_change_names_but_not_routes():
    plain = param_groups(GPT(), **RATES, adamw=["layers.0.*"])
    compiled = param_groups(torch.compile(GPT()), **RATES, adamw=["layers.0.*"])
    assert [r.names[0] for r in compiled.routes] == [f"_orig_mod.{r.names[0]}" for r in plain.routes]
    assert [(r.algorithm, r.reason) for r in compiled.routes] == [(r.algorithm, r.reason) for r in plain.routes]
    full = param_groups(torch.compile(GPT()), **RATES, adamw=["_orig_mod.layers.0.*"])
    assert [r.algorithm for r in full.routes] == [r.algorithm for r in plain.routes]


def test_a_parallel_wrapper_hides_neither_the_head_nor_what_patterns_name():
    found = param_groups(nn.DataParallel(GPT()), **RATES, adamw=["layers.0.attention.qkv.weight"]).routes
    by_name = {r.names[0]: r.algorithm for r in found}
    assert by_name["module.lm_head.weight"] == by_name["module.layers.0.attention.qkv.weight"] == "adamw"


def test_patterns_overrule_the_rules():
    groups = param_groups(GPT(), **RATES, matrix=["lm_head.*", "pos_*"], adamw="*.qkv.weight")
    found = {r.names[0]: (r.algorithm, r.reason) for r in groups.routes}
    assert found["lm_head.weight"] == ("matrix", "matrix='lm_head.*'")
    assert found["pos_emb"] == ("matrix", "matrix='pos_*'")
    assert found["layers.1.attention.qkv.weight"] == ("adamw", "adamw='*.qkv.weight'")
    assert found["layers.1.attention.output.weight"] == ("matrix", "linear layer")


def test_a_pattern_may_use_any_name_of_a_tied_parameter():
    found = param_groups(GPT(tied=True), **RATES, matrix=["lm_head.weight"]).routes
    assert {r.names: r.algorithm for r in found}["wte.weight", "lm_head.weight"] == "matrix"


def test_frozen_parameters_go_where_patterns_say():
    model = GPT().requires_grad_(False)
    model.layers.requires_grad_(True)
    groups = param_groups(model, **RATES, matrix=["lm_head.weight"], adamw=["wte.*"])
    found = {r.names[0]: (r.algorithm, r.reason) for r in groups.routes}
    assert found["lm_head.weight"] == ("matrix", "matrix='lm_head.weight'; frozen now")
    assert found["wte.weight"] == ("adamw", "adamw='wte.*'; frozen now")


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"matrix": ["layers.*.nothing"]}, ValueError, r"matrix='layers\.\*\.nothing' matches no parameter"),
        ({"adamw": ["LM_HEAD*"]}, ValueError, r"adamw='LM_HEAD\*' matches no parameter"),
        (
            {"matrix": ["lm_*"], "adamw": ["*head*"]},
            ValueError,
            r"'lm_head.weight' matches matrix='lm_\*' and adamw=",
        ),
        (
            {"matrix": ["norm.*"]},
            ValueError,
            r"matrix='norm\.\*' matches 'norm.weight' of shape \(16,\).*1-D.*narrow",
        ),
        ({"matrix": [3]}, TypeError, r"matrix must hold patterns of names, got 3"),
        (
            {"adamw": ["*"]},
            ValueError,
            r"No parameter of model \(GPT\) goes to the matrix method.*AdamW(?s:.*)lm_head",
        ),
        ({"lr": -0.1}, ValueError, r"Invalid lr=-0.1: must be a finite number of at least 0"),
        ({"lr": torch.tensor(float("nan"))}, ValueError, r"Invalid lr=tensor\(nan\)"),
        ({"lr": "0.1"}, ValueError, r"Invalid lr='0.1'"),
        ({"lr": torch.ones(2)}, ValueError, r"Invalid lr=tensor.* a tensor with one such element"),
        ({"adamw_lr": float("nan")}, ValueError, r"Invalid adamw_lr=nan"),
        ({"adamw_lr": float("inf")}, ValueError, r"Invalid adamw_lr=inf"),
        ({"weight_decay": -1}, ValueError, r"Invalid weight_decay=-1"),
        ({"adamw_weight_decay": -1}, ValueError, r"Invalid adamw_weight_decay=-1"),
        ({"adamw_eps": -1e-9}, ValueError, r"Invalid adamw_eps=-1e-09"),
        (
            {"adamw_betas": (0.9, 1.0)},
            ValueError,
            r"Invalid adamw_betas=\(0.9, 1.0\): must be two numbers in \[0, 1\)",
        ),
        ({"adamw_betas": 0.9}, ValueError, r"Invalid adamw_betas=0.9: must be two numbers"),
        ({"rank": 0}, ValueError, r"Invalid rank=0: must be \"auto\" or an integer of at least 1, or None"),
        ({"rank": "full"}, ValueError, r"Invalid rank='full'"),
        ({"rank": 8.0}, ValueError, r"Invalid rank=8.0"),
    ],
)
def test_bad_arguments_raise_with_name_value_and_remedy(options, error, message):
    with pytest.raises(error, match=message):
        param_groups(GPT(), **(RATES | options))


@pytest.mark.parametrize("bad", [list(nn.Linear(2, 3).parameters()), GPT, None])
def test_what_is_no_module_raises(bad):
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got"):
        param_groups(bad, **RATES)


@pytest.mark.parametrize(
    "part, message",
    [
        (nn.Embedding(8, 4, sparse=True), r"'it.part.weight' can go to neither.*sparse=False"),
        (torch.zeros(4, 8).to_sparse(), r"'it.part' can go to neither.*torch.sparse_coo; store it dense"),
        (
            torch.zeros(4, 8).to(torch.float8_e4m3fn),
            r"'it.part' can go to neither.*float8_e4m3fn; store it as",
        ),
        (nn.LazyLinear(8, bias=False), r"'it.part.weight' has no shape yet; run one forward pass"),
    ],
    ids=["sparse gradients", "sparse", "float8", "lazy"],
)
def test_what_neither_method_can_train_raises(part, message):
    with pytest.raises(ValueError, match=message):
        destination(part)
    if isinstance(part, nn.Embedding):  # frozen, it needs no optimizer
        assert destination(part.requires_grad_(False))[0] == "frozen"


def test_integer_parameters_are_frozen_and_left_out():
    counts = nn.Parameter(torch.zeros(4, 8, dtype=torch.int64), requires_grad=False)
    assert routes(nn.ParameterList([counts]))["0"].algorithm == "frozen"


def test_a_named_group_optimizer_of_torch_takes_the_groups():
    groups = param_groups(GPT(tied=True), **RATES, adamw_weight_decay=0.3)
    optimizer = torch.optim.AdamW(groups)
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 1e-3, 1e-3]
    assert optimizer.param_groups[1]["param_names"] == ["pos_emb", "wte.weight"]
    assert optimizer.param_groups[1]["weight_decay"] == 0.3


@pytest.mark.parametrize("kind", ["ProKLShampoo", "KLShampoo"])
@pytest.mark.parametrize("name", MODELS)
def test_the_matrix_optimizers_take_the_groups_and_move_every_weight(kind, name):
    torch.manual_seed(0)
    model = MODELS[name]()
    groups = param_groups(model, **RATES, rank=4 if kind == "ProKLShampoo" else None)
    optimizer = getattr(prokl, kind)(groups)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for _ in range(2):  # a matrix weight moves from its second gradient on
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []
    assert sorted(n for g in optimizer.param_groups for n in g["param_names"]) == sorted(before)


class QKV(nn.Module):
    """Attention whose projections are parameters of its own."""

    def __init__(self):
        super().__init__()
        for name in ("weight_q", "weight_k", "weight_v"):
            setattr(self, name, nn.Parameter(torch.zeros(8, 8)))


@pytest.mark.parametrize("name", ["pos_attn", "token_mixer", "attn"])
def test_a_parameter_that_is_only_named_as_a_norms_goes_where_its_like_go(name):
    model = nn.Sequential(nn.Linear(8, 8), QKV())
    assert {r.algorithm for r in param_groups(model, **RATES).routes if r.shape == (8, 8)} == {"matrix"}
    routes = param_groups(holding(**{name: QKV()}), **RATES).routes
    assert [r.algorithm for r in routes] == ["matrix"] * 3


class Product(nn.Module):
    """A parametrization by two factors, as LoRA's are."""

    def forward(self, A, B):
        return A @ B

    def right_inverse(self, W):
        return W[:, :6].clone(), W[:6].clone()


def test_the_factors_of_a_parametrization_are_not_taken_for_the_weight():
    layer = nn.utils.parametrize.register_parametrization(nn.Linear(8, 24, bias=False), "weight", Product())
    attention = type("MptAttention", (nn.Module,), {})()
    attention.Wqkv = layer
    routes = param_groups(holding(attn=attention), **RATES).routes
    assert all("split into" not in r.reason for r in routes) and {r.split for r in routes} == {None}


def test_a_parameter_of_ones_own_may_be_called_as_a_parametrizations():
    (route,) = param_groups(holding(attn=holding(weight_original1=nn.Parameter(torch.zeros(8, 6)))), **RATES).routes
    assert (route.algorithm, route.split) == ("matrix", None)
