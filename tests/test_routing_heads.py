"""Output heads: structure says which layer is one, names where it says nothing, and a hidden layer is never one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.routing import holding

RATES = {"lr": 0.02, "adamw_lr": 1e-3}


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def mlp(*sizes):
    return nn.Sequential(*(part for pair in zip(sizes, sizes[1:], strict=False) for part in (linear(*pair), nn.ReLU())))


def blocks(width=8, count=2):
    return nn.ModuleList(holding(up=linear(width, 20), down=linear(20, width)) for _ in range(count))


def adamw(model, **options):
    """Names of the weights of at least two dimensions that go to AdamW, with the reasons."""
    found = param_groups(model, **RATES, **options).routes
    return {r.names[0]: r.reason for r in found if r.algorithm == "adamw" and len(r.shape) > 1}


class Answering(nn.Module):
    """A model with a method that returns one of its modules."""

    def __init__(self, method, answer, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        setattr(self, method, lambda: answer(self))


@pytest.mark.parametrize("vocabulary", [31, 8])  # 8: also the hidden size
def test_what_get_output_embeddings_returns_is_the_head_whatever_its_name_and_size(vocabulary):
    model = Answering("get_output_embeddings", lambda m: m.words_out, h=blocks(), words_out=linear(8, vocabulary))
    assert adamw(holding(inner=model)) == {"inner.words_out.weight": "output head, by get_output_embeddings()"}
    nothing = Answering("get_output_embeddings", lambda m: None, h=blocks(), words_out=linear(8, 8))
    assert adamw(nothing) == {}


@pytest.mark.parametrize("error", [NotImplementedError, ValueError, RuntimeError])
def test_a_method_that_a_base_class_only_declares_or_that_raises_says_nothing(error):
    def declared(model):
        raise error

    class Broken(nn.Module):
        @property
        def config(self):
            raise error

    assert adamw(holding(inner=Broken(), h=blocks(), head=linear(8, 5))) == {"head.weight": "named as output head"}
    assert adamw(Answering("get_output_embeddings", declared, h=blocks(), head=linear(8, 5))) == {
        "head.weight": "named as output head"
    }


def test_a_method_with_arguments_or_without_an_answer_says_nothing():
    class Own(nn.Module):
        def get_classifier(self, name):
            return getattr(self, name)

    model = Own()
    model.h, model.head = blocks(), linear(8, 5)
    says = {"head.weight": "named as output head"}
    assert adamw(model) == says
    assert adamw(Answering("get_classifier", lambda m: None, h=blocks(), head=linear(8, 5))) == says
    assert adamw(Answering("get_classifier", lambda m: linear(8, 5), h=blocks(), head=linear(8, 5))) == says


def test_get_classifier_says_what_the_heads_are_and_names_no_longer_count():
    parts = {"h": blocks(), "conv_head": nn.Conv2d(8, 12, 1, bias=False), "out": linear(12, 5), "out_2": linear(12, 5)}
    both = Answering("get_classifier", lambda m: (m.out, m.out_2), **parts)
    says = "output head, by get_classifier()"
    assert adamw(both) == {"out.weight": says, "out_2.weight": says}
    assert adamw(Answering("get_classifier", lambda m: m.none, none=nn.Identity(), **parts)) == {}
    assert adamw(Answering("get_classifier", lambda m: m.none, none=nn.ModuleList(), **parts)) == {}
    assert "conv_head.weight" in adamw(holding(**parts))  # by its name, where nothing else is known
    inside = Answering("get_classifier", lambda m: m.out, **parts)
    assert set(adamw(holding(backbone=inside, head=linear(5, 4)))) == {"backbone.out.weight", "head.weight"}


def configured(config, **parts):
    model = holding(**parts)
    model.config = config
    return model


@pytest.mark.parametrize("count", ["vocab_size", "num_labels", "num_classes"])
@pytest.mark.parametrize("kind", [SimpleNamespace, dict])
def test_a_layer_with_as_many_outputs_as_the_config_says_is_a_head(count, kind):
    model = configured(kind(**{count: 7, "hidden_size": 8}), h=blocks(), to_sevens=linear(8, 7), other=linear(8, 6))
    model.map = nn.Conv2d(8, 7, 1, bias=False)
    says = f"output head, config.{count} = 7"
    assert adamw(model) == {"to_sevens.weight": says, "map.weight": says}


def test_sizes_of_other_configs_and_settings_that_are_no_counts_say_nothing():
    inner = configured(SimpleNamespace(num_labels=7), h=blocks())
    assert adamw(holding(inner=inner, to_sevens=linear(8, 7), end=linear(8, 8))) == {}
    parts = {"h": blocks(), "to": linear(8, 7), "end": linear(8, 8)}
    assert adamw(configured(SimpleNamespace(num_labels="7", vocab_size=None), **parts)) == {}
    one = configured(SimpleNamespace(num_labels=True), h=blocks(), to_one=linear(8, 1))
    assert adamw(one) == {"to_one.weight": "last layer, whose outputs no other takes"}


@pytest.mark.parametrize(
    "taken_by",
    [
        linear(7, 5),
        nn.LayerNorm(7),
        nn.Conv2d(7, 5, 3),
        nn.ConvTranspose2d(7, 5, 3),
        nn.LSTM(7, 3),
        nn.MultiheadAttention(7, 1),
        nn.Embedding(3, 7),
        nn.Conv2d(14, 4, 3, groups=2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_a_hidden_layer_that_is_as_wide_as_the_labels_is_no_head(taken_by):
    size = 14 if isinstance(taken_by, nn.Conv2d) and taken_by.groups == 2 else 7
    model = configured(SimpleNamespace(num_labels=size), h=blocks(), pooler=linear(8, size), after=taken_by)
    assert "pooler.weight" not in adamw(model)
    del model.after
    assert "pooler.weight" in adamw(model)


def test_a_layer_of_a_repeated_block_is_no_head_by_its_size():
    model = configured(SimpleNamespace(num_labels=4), h=blocks())
    for block in model.h:
        block.gate = linear(8, 4)  # routes to 4 experts
    assert adamw(model) == {}


def test_as_many_outputs_as_words_make_a_head():
    model = holding(words=nn.Embedding(31, 8), rnn=nn.LSTM(8, 12, bias=False), back=linear(12, 31), up=linear(8, 12))
    assert adamw(model) == {
        "words.weight": "embedding (Embedding)",
        "back.weight": "output head, 31 outputs as the largest embedding has rows",
    }


@pytest.mark.parametrize(
    "path",
    [
        "classifier.out_proj",
        "classification_head.out_proj",
        "discriminator_predictions.dense_prediction",
        "cls.seq_relationship",
        "class_labels_classifier",
        "multiple_choice_head.summary",
        "logits_proj",
        "heads.first",
        "classifiers.0",
        "net.heads.1",
        "conv_out",
        "proj_out_2",
        "head.modules_to_save.default",
        "classifier.modules_to_save.default.out_proj",
        "score.original_module",
        "lm_head.base_layer",
    ],
)
def test_names_of_heads(path):
    module = linear(8, 6)
    for part in reversed(path.split(".")):
        module = holding(**{part: module})
    module.h = blocks()
    assert set(adamw(module)) == {f"{path}.weight"}


def test_of_the_layers_in_a_head_the_last_is_the_output():
    box = nn.Module()
    box.layers = nn.ModuleList([linear(8, 8), linear(8, 8), linear(8, 4)])
    model = holding(
        h=blocks(),
        classifier=holding(dense=linear(8, 8), out_proj=linear(8, 3)),
        bbox_predictor=box,
        heads=nn.ModuleDict({"a": mlp(8, 9, 2), "b": linear(8, 5)}),
        decode_head=holding(classifier=linear(9, 5), fuse=linear(8, 9)),
    )
    assert set(adamw(model)) == {
        "classifier.out_proj.weight",
        "bbox_predictor.layers.2.weight",
        "heads.a.2.weight",
        "heads.b.weight",
        "decode_head.classifier.weight",  # named itself, so that the last, fuse, is not
    }


def test_a_dense_alone_comes_before_a_head_that_lies_elsewhere():
    model = holding(h=blocks(), head=holding(dense=linear(8, 8)), decoder=linear(8, 31))
    assert set(adamw(model)) == {"decoder.weight"}


@pytest.mark.parametrize("path", ["mlp.router.classifier", "gate.head", "ffn.router.layer"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_router_is_no_head(path, inside):
    router = linear(8, 4)
    for part in reversed(path.split(".")):
        router = holding(**{part: router})
    model = holding(h=nn.ModuleList([router])) if inside else router
    model.up = linear(8, 8)
    assert adamw(model) == {}


@pytest.mark.parametrize("head", ["head", "classifier", "fc", "output"])
def test_whole_nets_in_a_list_have_their_heads(head):
    nets = nn.ModuleList(holding(stem=linear(5, 8), layers=blocks(), **{head: linear(8, 3)}) for _ in range(2))
    assert set(adamw(holding(nets=nets))) == {f"nets.{i}.{head}.weight" for i in range(2)}
    assert set(adamw(nets)) == {f"{i}.{head}.weight" for i in range(2)}
    vgg = nn.ModuleList([holding(stem=linear(5, 8), classifier=mlp(8, 9, 3))])
    assert set(adamw(holding(nets=vgg))) == {"nets.0.classifier.2.weight"}


@pytest.mark.parametrize("name", ["output", "proj_out", "fc", "decoder"])
def test_a_layer_of_a_block_whose_outputs_go_on_is_no_head(name):
    layers = nn.ModuleList(holding(up=linear(8, 20), **{name: linear(20, 8)}) for _ in range(2))
    assert adamw(holding(layers=layers)) == {}


def test_the_last_linear_layer_of_a_bare_sequential_is_the_head():
    says = "last layer of the Sequential"
    assert adamw(mlp(8, 9, 3)) == {"2.weight": says}
    assert adamw(nn.DataParallel(mlp(8, 9, 3))) == {"module.2.weight": says}
    assert adamw(nn.Sequential(mlp(8, 9), nn.Flatten(), mlp(9, 7, 3))) == {"2.2.weight": says}
    assert adamw(nn.Sequential(linear(8, 9), nn.LayerNorm(9))) == {}  # its output is normalised
    assert adamw(nn.Sequential(linear(8, 9))) == {}  # one layer alone is what there is to train
    assert adamw(holding(net=mlp(8, 9, 3))) == {"net.2.weight": says}  # nothing else is in the model
    model = holding(body=mlp(8, 9, 3), more=linear(3, 4))  # a part of a model, whose outputs go on
    assert adamw(model) == {"more.weight": "last layer, whose outputs no other takes"}


def test_rates_of_a_state_space_and_marked_weights_are_not_decayed():
    mixer = holding(A_log=torch.zeros(8, 4), D=torch.ones(8), filter=torch.zeros(8, 4), up=linear(8, 8))
    mixer.filter._no_weight_decay = mixer.D._no_weight_decay = True
    model = holding(layers=nn.ModuleList([mixer]))
    assert adamw(model) == {
        "layers.0.A_log": "rates of a state space, A_log of Module",
        "layers.0.filter": "marked _no_weight_decay, filter of Module",
    }
    groups = param_groups(model, **RATES, adamw_weight_decay=0.1)
    assert [(g["algorithm"], g.get("weight_decay"), len(g["params"])) for g in groups] == [
        ("matrix", None, 1),
        ("adamw", 0, 3),
    ]


@pytest.mark.parametrize("name", ["loss", "out"])
def test_every_cluster_of_an_adaptive_softmax_ends_in_a_head(name):
    softmax = nn.AdaptiveLogSoftmaxWithLoss(12, 200, cutoffs=[20, 60], div_value=2.0)
    said = "output head, cluster of AdaptiveLogSoftmaxWithLoss"
    ends = dict.fromkeys((f"{name}.head.weight", f"{name}.tail.0.1.weight", f"{name}.tail.1.1.weight"), said)
    assert adamw(holding(h=blocks(12), **{name: softmax})) == ends
    assert adamw(softmax) == {end.removeprefix(f"{name}."): said for end in ends}


class Cosine(nn.Module):
    """A layer of somebody's own that compares with a vector per class."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))


NORMED = {
    "plain": lambda layer: layer,
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "former weight_norm": nn.utils.weight_norm,
    "former spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("normed", NORMED.values(), ids=NORMED)
def test_a_normed_layer_is_a_head_where_the_layer_itself_would_be_one(normed):
    def matrices(model):
        return [r.shape for r in param_groups(model, **RATES).routes if r.algorithm == "matrix"]

    stated = Answering("get_output_embeddings", lambda m: m.proj, body=linear(8, 9), proj=normed(linear(8, 50)))
    assert matrices(stated) == [(9, 8)]
    assert matrices(nn.Sequential(linear(8, 9), nn.ReLU(), normed(linear(9, 50)))) == [(9, 8)]
    named = holding(body=linear(8, 9), lm_head=normed(linear(9, 50)))
    assert matrices(named) == [(9, 8)]
    assert matrices(holding(body=normed(linear(8, 9)), lm_head=linear(9, 50))) == [(9, 8)]
    counted = configured(SimpleNamespace(num_labels=50), body=linear(8, 9), to_fifty=normed(linear(8, 50)))
    assert matrices(counted) == [(9, 8)]


HEADS = {
    "a class of one's own": lambda: Cosine(8, 10),
    "nested in another": lambda: holding(norm=nn.LayerNorm(8), inner=Cosine(8, 10)),
    "after a hidden layer": lambda: nn.Sequential(linear(8, 8), nn.GELU(), Cosine(8, 10)),
    "after an LSTM": lambda: nn.Sequential(nn.LSTM(8, 8), Cosine(8, 10)),
    "lists of lists": lambda: nn.ModuleList([nn.ModuleList([linear(8, 10), linear(8, 5)]), linear(8, 7)]),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(linear(8, 10)),
    "a list": lambda: nn.ModuleList([linear(8, 10), linear(8, 5)]),
    "a dictionary": lambda: nn.ModuleDict({"a": linear(8, 10), "b": nn.Sequential(linear(8, 8), linear(8, 5))}),
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_whatever_get_classifier_returns_is_a_head(head):
    model = Answering("get_classifier", lambda m: m.words_out, body=linear(8, 8), words_out=head())
    routes = [r for r in param_groups(model, **RATES).routes if len(r.shape) > 1]
    hidden = {"body.weight", "words_out.b.0.weight", "words_out.0.weight_ih_l0", "words_out.0.weight_hh_l0"}
    hidden |= {"words_out.0.weight"} if isinstance(model.words_out, nn.Sequential) else set()
    assert {r.algorithm for r in routes if r.names[0] in hidden} == {"matrix"}
    said = {r.algorithm for r in routes if r.names[0] not in hidden and r.shape != (10, 1)}  # the gain of weight norm
    assert said == {"adamw"}


CLOSING = {
    "numbered": (lambda: holding(fc1=linear(12, 9), fc2=linear(9, 5)), {"fc2"}),
    "numbered layers": (lambda: holding(layer1=linear(12, 9), layer2=linear(9, 5)), {"layer2"}),
    "after convolutions": (
        lambda: holding(
            a=nn.Conv2d(1, 6, 3), b=nn.Conv2d(6, 7, 3), fc1=linear(28, 9), fc2=linear(9, 8), fc3=linear(8, 5)
        ),
        {"fc3"},
    ),
    "after a flattened convolution alone": (lambda: holding(a=nn.Conv2d(3, 6, 3), to=linear(24, 5)), {"to"}),
    "after an LSTM": (lambda: holding(rnn=nn.LSTM(3, 6, bidirectional=True), readout=linear(12, 5)), {"readout"}),
    "after blocks and a norm": (lambda: holding(h=blocks(), norm=nn.LayerNorm(8), final=linear(8, 5)), {"final"}),
    "out": (lambda: holding(up=linear(5, 8), out=linear(8, 4)), {"out"}),
    "actor and critic": (
        lambda: holding(body=linear(5, 8), policy=linear(8, 4), value=linear(8, 1)),
        {"policy", "value"},
    ),
    "a list of layers": (
        lambda: holding(layers=nn.ModuleList([linear(9, 8), linear(8, 6), linear(6, 4)])),
        {"layers.2"},
    ),
    "wrapped": (lambda: nn.DataParallel(holding(fc1=linear(12, 9), fc2=linear(9, 5))), {"module.fc2"}),
    "as a Sequential": (lambda: nn.Sequential(linear(12, 9), nn.ReLU(), linear(9, 5)), {"2"}),
    # None of these is the output for certain.
    "an autoencoder": (lambda: holding(fc1=linear(12, 5), fc2=linear(5, 12)), set()),
    "a pooler": (lambda: holding(h=blocks(), pooler=linear(8, 8)), set()),
    "one layer alone": (lambda: holding(own=linear(3, 5)), set()),
    "one that takes what no other gives": (lambda: holding(it=linear(4, 8), own=linear(3, 5)), set()),
    "attention": (lambda: holding(q=linear(8, 8), k=linear(8, 4), v=linear(8, 4), out=linear(8, 8)), set()),
    "a router": (lambda: holding(up=linear(8, 9), router=linear(8, 4)), set()),
    "deeper in": (lambda: holding(up=linear(8, 9), inner=holding(fc2=linear(9, 5))), set()),
    "not the last": (lambda: holding(up=linear(8, 9), side=linear(9, 5), back=linear(9, 8)), set()),
    "where nothing else is left": (lambda: holding(one=linear(1, 5), two=linear(5, 7)), set()),
}


@pytest.mark.parametrize("model, heads", CLOSING.values(), ids=CLOSING)
def test_layers_that_end_a_model_of_which_nothing_else_is_known_are_heads(model, heads):
    assert {name.removesuffix(".weight") for name in adamw(model())} - {"one"} == heads


def test_where_a_head_is_known_what_comes_last_is_none():
    parts = {"h": blocks(), "fc2": linear(8, 5)}
    tied = holding(words=nn.Embedding(9, 8), up=linear(8, 8), back=linear(8, 9), to=linear(8, 5))
    tied.back.weight = tied.words.weight
    assert set(adamw(tied)) == {"words.weight"}
    assert set(adamw(holding(lm_head=linear(8, 31), **parts))) == {"lm_head.weight"}
    assert adamw(Answering("get_classifier", lambda m: m.none, none=nn.Identity(), **parts)) == {}
    assert adamw(Answering("get_output_embeddings", lambda m: None, **parts)) == {}  # a model that would tell
    inside = Answering("get_output_embeddings", lambda m: None, **parts)
    assert set(adamw(holding(backbone=inside, out=linear(5, 3)))) == {"out.weight"}


def test_layers_with_one_output_or_input_go_to_adamw_with_its_weight_decay():
    model = holding(a=linear(1, 8), b=nn.Conv2d(8, 1, 3, bias=False), h=blocks(), r1=linear(8, 1), end=linear(8, 8))
    groups = param_groups(model, **RATES, adamw_weight_decay=0.1)
    decayed = [name for g in groups if g.get("weight_decay") == 0.1 for name, _ in g["params"]]
    assert decayed == ["a.weight", "b.weight", "r1.weight"] and len(groups) == 2
    told = param_groups(model, **RATES, matrix=["r1.*"])
    assert "r1.weight" in [name for name, _ in told[0]["params"]]


@pytest.mark.parametrize(
    "model, options, says",
    [
        (
            holding(fc1=linear(12, 9), fc2=linear(9, 5)),
            {},
            "head: fc2.weight (last layer, whose outputs no other takes)",
        ),
        (holding(h=blocks(), lm_head=linear(8, 31)), {}, "head: lm_head.weight (named as output head)"),
        (
            holding(body=linear(5, 8), policy=linear(8, 4), value=linear(8, 1)),
            {},
            "heads: policy.weight (last layer, whose outputs no other takes), "
            "value.weight (last layer, whose outputs no other takes)",
        ),
        (
            holding(h=blocks(), heads=nn.ModuleList(linear(8, 5) for _ in range(5))),
            {},
            "heads: "
            + ", ".join(f"heads.{i}.weight (last layer of heads, named as output head)" for i in range(3))
            + ", and 2 more",
        ),
        (
            holding(fc1=linear(12, 5), fc2=linear(5, 12)),
            {},
            'head: none found; if a layer gives the outputs, name it, as in adamw=["fc2.*"]',
        ),
        (
            holding(fc1=linear(12, 5), fc2=linear(5, 12)),
            {"adamw": ["fc2.*"]},
            'head: none found beside what adamw= names; if a layer gives the outputs, name it, as in adamw=["fc2.*"]',
        ),
        (holding(h=blocks(), head=linear(8, 31)), {"adamw": ["head.*"]}, "head: head.weight (adamw='head.*')"),
    ],
)
def test_the_tables_last_line_says_which_heads_were_found_by_what_or_what_to_write(model, options, says):
    assert str(param_groups(model, **RATES, **options)).splitlines()[-1] == f"output {says}"


def test_a_tied_head_is_told():
    model = holding(words=nn.Embedding(9, 8), h=blocks(), lm_head=linear(8, 9))
    model.lm_head.weight = model.words.weight
    said = "output head: words.weight (lm_head.weight tied to embedding words.weight)"
    assert str(param_groups(model, **RATES)).splitlines()[-1] == said
