"""Routing: every parameter lands once, where its module, its name or a pattern says."""

import copy
import pickle

import pytest
import torch
from torch import nn

import prokl
from prokl import param_groups
from tests.inputs import KL, PRO, normal
from tests.routing import GPT, GUESS, HINT, RATES, Block, blocks, by_name, experts, holding, linear, of_class, routes
from tests.training import train

MODELS = {
    "gpt": GPT,
    "tied gpt": lambda: GPT(tied=True),
    "experts": lambda: holding(layers=nn.ModuleList([holding(norm=nn.LayerNorm(16), experts=experts())])),
    "convolutions": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv1d(8, 8, 3), nn.Conv3d(8, 4, 2)
    ),
    "transformer": lambda: nn.TransformerDecoderLayer(16, 2, 32),
    "recurrent": lambda: holding(embed=nn.Embedding(9, 8), lstm=nn.LSTM(8, 12, 2, proj_size=5), fc=nn.Linear(5, 9)),
}


def destination(part, name="part", **options):
    """(algorithm, reason) of the only parameter, or of the weight, of ``part`` under ``name``."""
    found = routes(holding(**{name: part}), **options)
    route = found.get(name) or found[f"{name}.weight"]
    return route.algorithm, route.reason


@pytest.mark.parametrize("cls", [PRO, KL])
@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_lands_exactly_once_and_moves(name, cls):
    torch.manual_seed(0)
    model = MODELS[name]()
    next(model.parameters()).requires_grad_(False)
    groups = param_groups(model, **RATES, rank=4 if cls is PRO else None)
    placed, expected = [pair for group in groups for pair in group["params"]], dict(model.named_parameters())
    assert sorted(n for n, _ in placed) == sorted(expected) and all(expected[n] is p for n, p in placed)
    assert [route.names[0] for route in groups.routes] == [*expected]
    model.requires_grad_(True)
    before = {n: p.detach().clone() for n, p in expected.items()}
    optimizer = train(cls(groups), range(2))  # a matrix weight moves from its second gradient on
    assert [n for n, p in expected.items() if torch.equal(p, before[n])] == []
    assert sorted(n for g in optimizer.param_groups for n in g["param_names"]) == sorted(before)


def test_groups_have_the_hyper_parameters_and_matrices_a_rank():
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
    optimizer = torch.optim.AdamW(param_groups(GPT(tied=True), **RATES, adamw_weight_decay=0.3))  # takes them, too
    assert [g["lr"] for g in optimizer.param_groups] == [0.02, 1e-3, 1e-3]
    assert optimizer.param_groups[1]["param_names"] == ["pos_emb", "wte.weight"]
    assert optimizer.param_groups[1]["weight_decay"] == 0.3


@pytest.mark.parametrize("names", [True, False])
def test_what_is_not_given_to_the_groups_is_the_optimizers(names):
    told = PRO(param_groups(GPT(), **RATES, names=names), rank=3, weight_decay=0.2)
    assert [(g["rank"], g["weight_decay"]) for g in told.param_groups[:1]] == [(3, 0.2)]
    assert [g["weight_decay"] for g in told.param_groups if g["algorithm"] == "adamw"] == [0.0, 0.0]
    told = PRO(param_groups(GPT(), **RATES, names=names, rank=2, weight_decay=0.0), rank=3, weight_decay=0.2)
    assert (told.param_groups[0]["rank"], told.param_groups[0]["weight_decay"]) == (2, 0.0)
    told = PRO(param_groups(GPT(), **RATES, names=names, rank="auto"), rank=3)
    assert told.param_groups[0]["rank"] == "auto"


AUTO = [((1, 9), 1), ((5, 9), 1), ((11, 12), 1), ((12, 12), 2), ((96, 384), 16), ((384, 96), 16), ((192, 192), 32)]
AUTO += [((768, 768), 128), ((768, 3072), 128), ((1024, 1024), 128), ((4096, 4096), 128), ((2, 2), 1)]
CLAMPED = [((16, 64), 16), ((64, 16), 16), ((16, 16), 15), ((1, 9), 1), ((40, 50), 32)]


def test_the_rank_is_clamped_and_defaults_to_a_sixth():
    optimizer = PRO([nn.Parameter(torch.zeros(2, 3))])
    assert optimizer.param_groups[0]["rank"] == "auto"
    for given, cases in ({}, AUTO), ({"rank": 32}, CLAMPED):
        for shape, rank in cases:
            with torch.device("meta"):
                model = holding(w=torch.zeros(shape))
            assert routes(model, matrix=["it.w"], **given)["w"].rank == rank
            group = {**optimizer.param_groups[0], **given}
            assert optimizer.method.rank(group, min(shape), max(shape)) == rank


@pytest.mark.parametrize("head_first", [False, True])
def test_a_head_tied_to_an_embedding_follows_it(head_first):
    parts = {"body_map": linear(16, 48), "words": nn.Embedding(48, 16)}
    model = holding(**dict(sorted(parts.items(), reverse=not head_first)))
    model.body_map.weight = model.words.weight
    found = routes(model)
    assert found["body_map.weight"] is found["words.weight"] and found["words.weight"].algorithm == "adamw"
    assert found["words.weight"].reason == "it.body_map.weight tied to embedding it.words.weight"


def test_a_shared_block_is_routed_once_under_all_of_its_names():
    block = Block(16)
    groups = param_groups(holding(layers=nn.ModuleList([block, block])), **RATES)
    assert len(groups.routes) == len(list(block.parameters()))
    assert groups.routes[0].names == ("layers.0.norm.weight", "layers.1.norm.weight")


TABLES = ("pos_emb", "pos_embed", "wpe", "cls_token", "relative_position_bias_table", "rel_pos_h", "class_embedding")


def test_raw_tables_go_to_adamw_and_lookalikes_are_matrices():
    for name in TABLES:
        assert destination(torch.zeros(5, 16), name) == ("adamw", "named as embedding, position or token")
        assert routes(holding(**{name: nn.ParameterList([torch.zeros(5, 16)])}))[f"{name}.0"].algorithm == "adamw"
    for name in ("decomposition", "post", "tokamak", "weights", "compose"):
        assert destination(torch.zeros(5, 16), name) == ("matrix", f"2-D, {name} of Module{GUESS}")
    words = routes(of_class("VocabParallelEmbedding", weight=torch.zeros(6, 8), up=torch.zeros(4, 8)))
    assert (words["weight"].algorithm, words["up"].algorithm) == ("adamw", "matrix")
    for name in ("pos_attn", "token_mixer", "attn"):  # of what is in it, nothing is said
        qkv = holding(**{f"weight_{key}": torch.zeros(8, 8) for key in "qkv"})
        found = param_groups(holding(**{name: qkv}), **RATES).routes
        assert [r.algorithm for r in found] == ["matrix"] * 3


KINDS = [
    (linear(4, 8), "matrix", "linear layer"),
    (linear(8, 1), "adamw", "one row or column, weight of Linear"),
    (linear(1, 8), "adamw", "one row or column, weight of Linear"),
    (linear(1, 1), "adamw", "1x1 matrices only, weight of Linear"),
    (of_class("ColumnParallelLinear", weight=torch.zeros(6, 8)), "matrix", "linear layer (ColumnParallelLinear)"),
    (of_class("Conv1D", weight=torch.zeros(6, 8)), "matrix", "2-D, weight of Conv1D" + GUESS),
    (nn.Conv2d(4, 8, 3, bias=False), "matrix", "convolution, flattened to 8x36"),
    (nn.Conv2d(1, 8, 1, bias=False), "adamw", "one row or column, weight of Conv2d"),
    (nn.Conv2d(4, 1, 3, bias=False), "adamw", "one row or column, weight of Conv2d"),
    (nn.Conv2d(8, 8, 3, groups=8, bias=False), "matrix", "convolution, flattened to 8x9"),
    (nn.ConvTranspose2d(4, 8, 3, bias=False), "matrix", "convolution, flattened to 4x72; stored (in, out)"),
    (nn.Conv3d(4, 8, (1, 2, 3), bias=False), "matrix", "convolution, flattened to 8x24"),
    (nn.Conv1d(4, 8, 3, bias=False), "adamw", "3-D weight of Conv1d, which would be read as a stack of 8"),
    (
        of_class("XLNetRelativeAttention", weight=torch.zeros(8, 2, 4)),
        "adamw",
        "3-D weight of XLNetRelativeAttention, which would be read as a stack of 8",
    ),
    (nn.Bilinear(3, 4, 5, bias=False), "matrix", "stack of 5, weight of Bilinear"),
    (nn.Embedding(8, 4), "adamw", "embedding (Embedding)"),
    (nn.EmbeddingBag(8, 4), "adamw", "embedding (EmbeddingBag)"),
    (type("Words", (nn.Embedding,), {})(8, 4), "adamw", "embedding (Words)"),
    (of_class("VocabParallelEmbedding", weight=torch.zeros(6, 8)), "adamw", "embedding (VocabParallelEmbedding)"),
    (nn.LayerNorm((4, 8), bias=False), "adamw", "norm (LayerNorm)"),
    (of_class("T5LayerNorm", weight=torch.zeros(6, 8)), "adamw", "norm (T5LayerNorm)"),
    (torch.zeros(4, 8), "matrix", f"2-D, part of Module{GUESS}"),
    (torch.zeros(3, 4, 8), "matrix", f"stack of 3, part of Module{HINT}"),
    (torch.zeros(2, 3, 4, 8), "adamw", "4-D, part of Module, which is no convolution"),
    (torch.zeros(4, 8, dtype=torch.complex64), "adamw", "complex, part of Module"),
    (torch.zeros(0, 8), "adamw", "no elements, part of Module"),
    (torch.zeros(8, 1, 1), "adamw", "1x1 matrices only, part of Module"),
    (torch.zeros(1, 8), "adamw", "one row or column, part of Module"),
    (torch.zeros(4, 1, 8), "adamw", "one row or column, part of Module"),
    (torch.zeros(1, 8, 1, 1), "adamw", "one row or column, part of Module"),
]


@pytest.mark.parametrize("part, algorithm, reason", KINDS, ids=lambda v: v[:40] if isinstance(v, str) else "")
def test_each_kind_of_parameter_goes_where_its_module_says(part, algorithm, reason):
    assert destination(part) == (algorithm, reason)


def test_parametrized_modules_are_read_through():
    spectral_norm, weight_norm = nn.utils.parametrizations.spectral_norm, nn.utils.parametrizations.weight_norm
    model = holding(
        embed=spectral_norm(nn.Embedding(9, 4)),
        lm_head=spectral_norm(linear(4, 9)),
        body=nn.utils.parametrizations.orthogonal(linear(8, 8)),
        normed=weight_norm(linear(4, 8)),
        conv=weight_norm(nn.Conv2d(4, 8, 3, bias=False)),
        words=weight_norm(nn.Embedding(9, 4)),
    )
    found = by_name(model)
    matrices = {name.replace(".parametrizations.weight", "") for name, r in found.items() if r.algorithm == "matrix"}
    assert len(found) == 9 and matrices == {"body.original", "normed.original1", "conv.original1"}


class Former(nn.Linear):
    """A layer with the signature that torch's method had before it could repeat what is tied."""

    def named_parameters(self, prefix="", recurse=True):
        return super().named_parameters(prefix, recurse)


def test_a_model_with_its_own_named_parameters_is_routed():
    assert by_name(Former(4, 8))["weight"].algorithm == "matrix"


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
def test_gains_of_weight_norm_have_no_decay_and_are_no_head(norm):
    found = by_name(holding(words=norm(nn.Embedding(9, 4)), body=norm(linear(4, 8)), lm_head=norm(linear(8, 9))))
    gains = {name: r for name, r in found.items() if name.endswith(("weight_g", "original0"))}
    assert len(gains) == 3 and len(found) == 6
    assert all((r.algorithm, r.decays, r.head) == ("adamw", False, False) for r in gains.values())
    assert [r.head for name, r in found.items() if name not in gains] == [False, False, True]


def test_an_orthogonal_layer_stays_orthogonal():
    """The diagonal of Householder vectors holds signs: where it moves, columns of the weight become zero."""
    orthogonal = nn.utils.parametrizations.orthogonal
    parts = {"tall": linear(8, 12), "wide": linear(12, 8), "square": linear(8, 8), "words": nn.Embedding(12, 8)}
    model = holding(**{name: orthogonal(part) for name, part in parts.items()})
    groups = param_groups(model, **RATES, adamw_weight_decay=0.1)
    assert {r.names[0].split(".")[0]: r.algorithm for r in groups.routes} == {
        "tall": "adamw", "wide": "adamw", "square": "matrix", "words": "adamw"
    }  # fmt: skip
    before = {name: part.weight.detach().clone() for name, part in model.named_children()}
    optimizer = PRO(groups)
    for call in range(3):
        optimizer.zero_grad()
        sum((part.weight * normal(*part.weight.shape, seed=call)).sum() for part in model.children()).backward()
        optimizer.step()
    for name, part in model.named_children():
        Q = part.weight.detach() if name != "wide" else part.weight.detach().mT
        assert not torch.equal(part.weight, before[name])
        torch.testing.assert_close(Q.mT @ Q, torch.eye(8), atol=1e-5, rtol=0, msg=name)


class Product(nn.Module):
    """A parametrization by two factors, as LoRA's are."""

    def forward(self, A, B):
        return A @ B

    def right_inverse(self, W):
        return W[:, :6].clone(), W[:6].clone()


def test_a_module_whose_attributes_raise_is_routed_without_them():
    """As a property weight does whose parts are gathered first."""
    parts = {
        "Raw": {"raw": torch.zeros(8, 6), "weight_orig": torch.zeros(4, 6)},
        "Conv1D": {"weight": torch.zeros(8, 6)},
        "OwnConv2d": {"weight": torch.zeros(4, 8, 3, 3)},
        "OwnEmbedding": {"weight": torch.zeros(9, 8)},
        "OwnExperts": {"gate_up_proj": torch.zeros(3, 8, 4)},
        "OwnMLP": {"up": linear(8, 16), "gate_up_proj": linear(8, 6)},
        "Phi3Attention": {"qkv_proj": linear(8, 20), "o_proj": linear(8, 8)},
        "OwnAttention": {"q_proj": linear(8, 8), "k_proj": linear(8, 8)},
    }
    model = holding(**{name.lower(): of_class(name, "own", **held) for name, held in parts.items()})
    without = by_name(model)

    def raising(module, name):
        if name in module._parameters or name in module._modules:
            return nn.Module.__getattr__(module, name)
        raise RuntimeError("gather me first")

    for module in (model, *model.children()):
        type(module).__getattr__ = raising
    assert by_name(model) == without


def test_a_parametrizations_factors_are_not_the_weight():
    layer = nn.utils.parametrize.register_parametrization(linear(8, 24), "weight", Product())
    found = param_groups(holding(attn=of_class("MptAttention", Wqkv=layer)), **RATES).routes
    assert all("split into" not in r.reason for r in found) and {r.split for r in found} == {None}
    own = by_name(holding(attn=holding(weight_original1=torch.zeros(8, 6))))["attn.weight_original1"]
    assert (own.algorithm, own.split) == ("matrix", None)  # a name of one's own


MIXER = holding(A_log=torch.zeros(8, 4), D=torch.ones(8), filter=torch.zeros(8, 4), up=linear(8, 8))
MIXER.filter._no_weight_decay = MIXER.D._no_weight_decay = True
DECAYED = {  # a model, options, what AdamW decays, and what it does not
    "experts, norms and tables": (
        holding(experts=experts(), norm=nn.LayerNorm((3, 4)), table=nn.Embedding(6, 4)),
        {},
        ["table.weight"],
        ["experts.up_bias", "experts.b2", "norm.weight", "norm.bias"],
    ),
    "a pattern makes no norm or vector decay": (
        holding(norm=nn.LayerNorm((3, 4), bias=False), a=nn.Linear(4, 6), b=nn.Linear(4, 6)),
        {"adamw": ["norm.*", "b.*"]},
        ["b.weight"],
        ["norm.weight", "a.bias", "b.bias"],
    ),
    "rates of a state space, and what is marked": (
        holding(layers=nn.ModuleList([MIXER])),
        {},
        [],
        ["layers.0.A_log", "layers.0.D", "layers.0.filter"],
    ),
    "a pattern leaves marks, names and gains without decay": (
        holding(up=linear(8, 8), layers=nn.ModuleList([MIXER]), gain=torch.zeros(1, 8), b=torch.zeros(4, 8)),
        {"adamw": ["layers.*", "gain", "b"]},
        ["b", "layers.0.up.weight"],
        ["gain", "layers.0.A_log", "layers.0.D", "layers.0.filter"],
    ),
    "layers of one row or column": (
        holding(a=linear(1, 8), b=nn.Conv2d(8, 1, 3, bias=False), h=blocks(), r1=linear(8, 1), end=linear(8, 8)),
        {"matrix": ["r1.*"]},
        ["a.weight", "b.weight"],
        None,
    ),
}


@pytest.mark.parametrize("model, options, decayed, plain", DECAYED.values(), ids=DECAYED)
def test_norms_biases_gains_and_what_is_marked_are_not_decayed(model, options, decayed, plain):
    groups = [g for g in param_groups(model, **RATES, adamw_weight_decay=0.1, **options) if g["algorithm"] == "adamw"]
    found = {rate: [name for g in groups if g["weight_decay"] == rate for name, _ in g["params"]] for rate in (0.1, 0)}
    assert found[0.1] == decayed and plain in (None, found[0])


def test_wrappers_change_neither_routes_nor_patterns():
    plain = param_groups(GPT(), **RATES, adamw=["layers.0.*"]).routes
    compiled = param_groups(torch.compile(GPT()), **RATES, adamw=["layers.0.*"]).routes
    assert [r.names[0] for r in compiled] == [f"_orig_mod.{r.names[0]}" for r in plain]
    assert [(r.algorithm, r.reason) for r in compiled] == [(r.algorithm, r.reason) for r in plain]
    for wrapped, adamw in ((torch.compile(GPT()), "_orig_mod.layers.0.*"), (nn.DataParallel(GPT()), "layers.0.*")):
        found = param_groups(wrapped, **RATES, adamw=[adamw]).routes
        assert [r.algorithm for r in found] == [r.algorithm for r in plain]


def test_patterns_overrule_the_rules():
    model = GPT()
    model.pos_emb.requires_grad_(False)
    found = by_name(model, matrix=["lm_head.*", "pos_*"], adamw="*.qkv.weight")
    chosen = {name: (r.algorithm, r.reason) for name, r in found.items()}
    assert chosen["lm_head.weight"] == ("matrix", "matrix='lm_head.*'")
    assert chosen["pos_emb"] == ("matrix", "matrix='pos_*'; frozen now")
    assert chosen["layers.1.attention.qkv.weight"] == ("adamw", "adamw='*.qkv.weight'")
    assert chosen["layers.1.attention.output.weight"] == ("matrix", "linear layer")
    assert by_name(GPT(tied=True), matrix=["lm_head.weight"])["wte.weight"].algorithm == "matrix"
    net = holding(a=linear(8, 24), b=linear(8, 8), c=linear(8, 8)).requires_grad_(False)
    net.c.requires_grad_(True)
    groups = param_groups(net, **RATES, split={"a.*": 3}, adamw=["b.*"])
    assert [[name for name, _ in g["params"]] for g in groups] == [["a.weight", "c.weight"], ["b.weight"]]
    assert groups[0]["split"] == [3, None]


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"adamw": ["LM_HEAD*"]}, ValueError, r"adamw='LM_HEAD\*' matches no parameter"),
        ({"matrix": ["lm_*"], "adamw": ["*head*"]}, ValueError, r"'lm_head.weight' matches matrix='lm_\*' and adamw="),
        ({"matrix": ["norm.*"]}, ValueError, r"matrix='norm\.\*' matches 'norm.weight' of shape \(16,\).*1-D.*narrow"),
        ({"matrix": [3]}, TypeError, r"matrix must hold patterns of names, got 3"),
        ({"adamw": ["*"]}, ValueError, r"No parameter of model \(GPT\) goes to the matrix method.*AdamW(?s:.*)lm_head"),
        *(
            ({"names": names}, ValueError, r"Invalid names=.*: must be one of \(True, False\)")
            for names in ("yes", None, 2)
        ),
    ],
)
def test_bad_arguments_raise_with_name_value_and_remedy(options, error, message):
    with pytest.raises(error, match=message):
        param_groups(GPT(), **RATES, **options)


NO_MODULE = r"model must be a torch\.nn\.Module, got"
NOTHING = r"^There is no parameter in model \({}\) that requires grad, .*: unfreeze .* before making the groups\.$"
BAD_MODELS = [
    *((bad, TypeError, NO_MODULE) for bad in (list(nn.Linear(2, 3).parameters()), GPT, None)),
    (holding(part=nn.LazyLinear(8, bias=False)), ValueError, "'part.weight' has no shape yet; run one forward pass"),
    (GPT().requires_grad_(False), ValueError, NOTHING.format("GPT")),
    (nn.LayerNorm(4).requires_grad_(False), ValueError, NOTHING.format("LayerNorm")),
    (nn.Sequential(), ValueError, r"^There is no parameter in model \(Sequential\) that requires grad, "),
]


@pytest.mark.parametrize("model, error, message", BAD_MODELS)
def test_what_is_no_model_or_has_nothing_to_train_is_told_so(model, error, message):
    with pytest.raises(error, match=message):
        param_groups(model, **RATES)


UNTRAINABLE = {  # with what is said of it unless it is frozen; None where that is no error
    "integers": (torch.zeros(4, 8, dtype=torch.int64), None),
    "meta": (torch.zeros(4, 8, device="meta"), None),
    "expanded": (torch.zeros(1, 8).expand(2, 8), None),
    "sparse": (torch.zeros(4, 8).to_sparse(), r"'it.part' can go to neither.*torch.sparse_coo; store it dense"),
    "8-bit": (
        torch.zeros(4, 8).to(torch.float8_e4m3fn),
        r"'it.part' can go to neither.*float8_e4m3fn; store it as",
    ),
    "sparse gradients": (
        nn.Embedding(8, 4, sparse=True),
        r"'it.part.weight' can go to neither.*sparse=False",
    ),
}


@pytest.mark.parametrize("odd, message", UNTRAINABLE.values(), ids=UNTRAINABLE)
def test_an_untrainable_weight_is_refused_or_stays_frozen(odd, message):
    if message:
        with pytest.raises(ValueError, match=message):
            destination(copy.deepcopy(odd))
    model = holding(body=linear(8, 8))
    model.odd = odd.requires_grad_(False) if isinstance(odd, nn.Module) else nn.Parameter(odd, requires_grad=False)
    for options in ({}, {"matrix": ["odd*"]}):
        groups = param_groups(model, **RATES, **options)
        (route,) = [r for r in groups.routes if r.names[0].startswith("odd")]
        assert route.algorithm == "frozen"
        train(PRO(groups), [0], [model.body.weight])


def test_a_model_whose_head_alone_trains_is_no_error():
    model = GPT().requires_grad_(False)
    model.lm_head.requires_grad_(True)
    groups = param_groups(model, **RATES, names=False)
    assert [g["algorithm"] for g in groups] == ["adamw"]
    train(prokl.ProKLShampoo(groups), [0])
    lone = nn.Sequential(nn.Embedding(4, 3), nn.LayerNorm(3))
    lone[0].requires_grad_(False)
    with pytest.raises(ValueError, match="No parameter of model"):
        param_groups(lone, **RATES, names=False)


def test_groups_and_table_survive_copying_and_pickling():
    groups = param_groups(GPT(), **RATES)
    for twin in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert str(twin) == str(groups)
        assert [len(g["params"]) for g in twin] == [len(g["params"]) for g in groups]


def told(groups):
    return {route.names[0]: route for route in groups.routes}


ELEMENTWISE = """
    A_log A_logs log_A_real A_imag inv_A_real log_dt nu_log time_decay time_faaaa Lambda_re
    time_first time_mix_k time_maa_x q_scale gamma log_sigma decay attn_mask
""".split()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_acts_element_by_element_goes_to_adamw_undecayed(name):
    model = holding(up=linear(8, 8), **{name: torch.ones(8, 4)})
    groups = param_groups(model, **RATES, adamw_weight_decay=0.1)
    (group,) = (g for g in groups if g["algorithm"] == "adamw")
    assert [n for n, _ in group["params"]] == [name] and group["weight_decay"] == 0.0
    assert told(groups)[name].reason == f"acts element by element by its name, {name} of Module"
    assert destination(linear(8, 4), name) == ("matrix", "linear layer")  # a layer of that name does not
    several = holding(**{name: nn.ParameterList([torch.ones(8, 4)])})
    assert routes(several)[f"{name}.0"].reason == "acts element by element by its name, 0 of ParameterList"


@pytest.mark.parametrize("name", ["W_u", "time_maa_w1", "time_decay_w2", "catalog", "mixed", "B", "weights_real"])
def test_a_modules_own_parameters_are_matrices_by_a_guess(name):
    assert destination(torch.ones(8, 4), name) == ("matrix", f"2-D, {name} of Module{GUESS}")
    several = holding(**{name: nn.ParameterDict({"x": torch.ones(8, 4)})})
    assert routes(several)[f"{name}.x"].reason == f"2-D, x of ParameterDict{GUESS}"
    known = holding(attn=nn.MultiheadAttention(8, 2, kdim=4), up=of_class("Linear1bit", weight=torch.ones(8, 8)))
    assert "taken for" not in str(param_groups(known, **RATES))


def marked(shape, **own):
    p = nn.Parameter(torch.ones(*shape))
    p._optim = own
    return p


def test_optim_of_a_parameter_is_honoured_and_told():
    model = holding(up=nn.Linear(8, 8))
    model.B, model.C, model.log_dt = marked((8, 4), lr=1e-4, weight_decay=0.0), marked((8, 4), lr=1e-4), marked((8,))
    model.dt = marked((8,), lr=1e-4, weight_decay=0.0)
    model.D = marked((8,), lr=None, betas=[0.8, 0.9])
    groups = param_groups(model, **RATES, adamw_weight_decay=0.1)
    of = {name: g for g in groups for name, _ in g["params"]}
    assert (of["B"]["lr"], of["B"]["weight_decay"], of["dt"]["lr"], of["dt"]["weight_decay"]) == (1e-4, 0.0, 1e-4, 0.0)
    assert (of["C"]["lr"], of["C"]["weight_decay"]) == (1e-4, 0.1)
    assert (of["D"]["lr"], of["D"]["betas"], of["log_dt"]["lr"]) == (1e-3, (0.8, 0.9), 1e-3)
    assert told(groups)["B"].reason == "has settings of its own, B of Module; _optim has lr=0.0001, weight_decay=0.0"
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    train(PRO(groups), range(2))
    assert [n for n, p in model.named_parameters() if torch.equal(p, before[n])] == []


def test_optim_of_a_parameter_that_is_told_to_be_a_matrix_is_refused():
    model = holding(up=nn.Linear(8, 8))
    model.B, model.C = marked((8, 4), lr=1e-4), marked((8, 4), lr=None)
    says = (
        r"^matrix='\[BC\]' matches 'B', whose _optim=\{'lr': 0\.0001\} .*narrow the pattern, or .*del parameter\._optim"
    )
    with pytest.raises(ValueError, match=says):
        param_groups(model, **RATES, matrix=["[BC]"])
    del model.B._optim
    groups = param_groups(model, **RATES, matrix=["[BC]"])
    assert {n for n, _ in groups[0]["params"]} >= {"B", "C"}


@pytest.mark.parametrize(
    "own, says", [({"lr": -1}, r"Invalid _optim\['lr'\] of 'B'=-1"), ({"momentum": 1}, "is none of lr")]
)
def test_a_bad_optim_of_a_parameter_is_refused(own, says):
    model = holding(up=linear(8, 8))
    model.B = marked((8, 4), **own)
    with pytest.raises(ValueError, match=says):
        param_groups(model, **RATES)


class Vision(nn.Module):
    """A model as timm's: a table and a bias table whose names say so, and two maps."""

    def __init__(self):
        super().__init__()
        self.pos_embed, self.dist_token = nn.Parameter(torch.ones(1, 9, 8)), nn.Parameter(torch.ones(1, 2, 8))
        self.first, self.bias_map, self.up = linear(8, 8), linear(8, 8), nn.Linear(8, 8)
        self.relative = nn.Parameter(torch.ones(2, 9, 8))

    def no_weight_decay(self):
        return {"pos_embed", "first.weight"}

    def no_weight_decay_keywords(self):
        return {"relat"}


@pytest.mark.parametrize("wrapped", [False, True])
def test_no_weight_decay_of_a_model_is_asked_as_timm_does(wrapped):
    model = holding(module=Vision()) if wrapped else Vision()
    groups = param_groups(model, **RATES, weight_decay=0.1, adamw_weight_decay=0.2)
    decay = {name.removeprefix("module."): g["weight_decay"] for g in groups for name, _ in g["params"]}
    assert decay == {
        **{"pos_embed": 0.0, "dist_token": 0.2, "first.weight": 0.0, "bias_map.weight": 0.1},
        **{"up.weight": 0.1, "up.bias": 0.0, "relative": 0.0},
    }
    reasons = {n.removeprefix("module."): r.reason for n, r in told(groups).items()}
    assert reasons["first.weight"] == "linear layer; no weight decay, by no_weight_decay()"
    assert reasons["relative"].endswith("; no weight decay, by no_weight_decay_keywords()")


def test_a_pattern_leaves_a_marked_matrix_without_decay():
    model = holding(filter=torch.zeros(8, 4), up=linear(8, 8))
    model.filter._no_weight_decay = True
    groups = param_groups(model, **RATES, weight_decay=0.1, matrix=["filter"])
    assert {name: g["weight_decay"] for g in groups for name, _ in g["params"]} == {"filter": 0.0, "up.weight": 0.1}
    assert told(groups)["filter"].reason == "matrix='filter'; no weight decay, by _no_weight_decay"


def test_no_weight_decay_of_a_part_holds_inside_it():
    model = holding(backbone=Vision(), first=linear(8, 8))
    model.no_weight_decay = lambda skip: skip
    groups = param_groups(model, **RATES, weight_decay=0.1, adamw_weight_decay=0.2)
    decay = {name: g["weight_decay"] for g in groups for name, _ in g["params"]}
    assert (decay["backbone.first.weight"], decay["first.weight"], decay["backbone.pos_embed"]) == (0.0, 0.1, 0.0)


def test_a_tied_weights_second_name_asks_for_no_decay_too():
    model = holding(first=linear(8, 8), second=linear(8, 8), other=linear(8, 8))
    model.second.weight = model.first.weight
    model.no_weight_decay = lambda: {"second.weight"}
    found = {route.names: route.reason for route in param_groups(model, **RATES, weight_decay=0.1).routes}
    assert found["first.weight", "second.weight"].endswith("; no weight decay, by no_weight_decay()")
    assert "decay" not in found["other.weight",]
