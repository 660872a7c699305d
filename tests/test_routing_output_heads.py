"""Output heads: structure says which layer is one, names where it says nothing, and a hidden layer is never one."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from prokl import param_groups
from tests.routing import RATES, Conv1D, adamw, at, blocks, holding, linear, mlp, net, of_class, routes


def answering(method, answer, layers, **parts):
    """A model with a method that returns one of its modules."""
    model = net(layers, **parts)
    setattr(model, method, lambda: answer(model))
    return model


def configured(config, layers, kind=SimpleNamespace, **parts):
    model = net(layers, **parts)
    model.config = kind(**config)
    return model


def failing(_):
    raise ValueError


class Broken(nn.Module):
    @property
    def config(self):
        raise RuntimeError


def tied():
    model = net("words:words up:8>8 back:8>9 to:8>5")
    model.back.weight = model.words.weight
    return model


embeddings = partial(answering, "get_output_embeddings")
classifier = partial(answering, "get_classifier")


EMBEDDINGS, CLASSIFIER, NAMED = (
    "output head, by get_output_embeddings()",
    "output head, by get_classifier()",
    "named as output head",
)
PARTS, END, HEADED = "h:blocks conv_head:8>12@1 out:12>5 out_2:12>5", "h:blocks fc2:8>5", "h:blocks head:8>5"
LAST = "last layer, whose outputs no other takes"
SEQUENTIAL = "last layer of the Sequential"
BOX = holding(layers=nn.ModuleList([linear(8, 8), linear(8, 8), linear(8, 4)]))
SOFTMAX = dict.fromkeys(
    ("head.weight", "tail.0.1.weight", "tail.1.1.weight"), "output head, cluster of AdaptiveLogSoftmaxWithLoss"
)
# Weights that go to AdamW beside vectors, with the reason where it matters.
HEADS = {
    # Heads that a model names itself.
    "of its embeddings": (
        holding(inner=embeddings(lambda m: m.out, "h:blocks out:8>31")),
        {"inner.out": EMBEDDINGS},
    ),
    "no embeddings": (embeddings(lambda m: None, "h:blocks out:8>8"), {}),
    "of an error": (embeddings(failing, HEADED), {"head": NAMED}),
    "a config of an error": (net(HEADED, inner=Broken()), {"head": NAMED}),
    "a method with arguments": (classifier(lambda m, name: None, HEADED), {"head": NAMED}),
    "another's classifier": (classifier(lambda m: linear(8, 5), HEADED), {"head": NAMED}),
    "two classifiers": (classifier(lambda m: (m.out, m.out_2), PARTS), {"out": CLASSIFIER, "out_2": CLASSIFIER}),
    "an identity": (classifier(lambda m: m.none, PARTS, none=nn.Identity()), {}),
    "an empty list": (classifier(lambda m: m.none, PARTS, none=nn.ModuleList()), {}),
    "its name, if nothing else is known": (net(PARTS), {"conv_head": NAMED}),
    "of a part, beside another's": (
        holding(backbone=classifier(lambda m: m.out, PARTS), head=linear(5, 4)),
        {"backbone.out", "head"},
    ),
    # Sizes.
    **{
        f"config.{count}": (
            configured({count: 7, "hidden_size": 8}, "h:blocks to:8>7 other:8>6 map:8>7@1", kind),
            dict.fromkeys(("to", "map"), f"output head, config.{count} = 7"),
        )
        for count, kind in (("vocab_size", SimpleNamespace), ("num_labels", dict), ("num_classes", SimpleNamespace))
    },
    "another's config": (
        holding(inner=configured({"num_labels": 7}, "h:blocks"), to=linear(8, 7), end=linear(8, 8)),
        {},
    ),
    "a transposed map": (
        configured({"num_labels": 14}, "h:blocks", map=nn.ConvTranspose2d(8, 14, 3, groups=2, bias=False)),
        {"map": "output head, config.num_labels = 14"},
    ),
    "a Conv1D": (
        configured({"num_labels": 7}, "h:blocks", to=Conv1D(7, 8)),
        {"to": "output head, config.num_labels = 7"},
    ),
    "as many labels as a token has rows": (
        configured(
            {"num_labels": 1}, "h:blocks to:8>1 end:8>8", marker=of_class("Own", cls_token=torch.zeros(1, 1, 8))
        ),
        {"to": "output head, config.num_labels = 1", "marker.cls_token": None},
    ),
    "bare parameters": (
        net(
            "h:blocks end:8>8",
            own=of_class("Own", classifier=torch.zeros(5, 8)),
            mtp=nn.ModuleList([of_class("Own", lm_head=torch.zeros(5, 8))]),
        ),
        {"own.classifier": NAMED, "mtp.0.lm_head": NAMED},
    ),
    "no counts": (configured({"num_labels": "7", "vocab_size": None}, "h:blocks to:8>7 end:8>8"), {}),
    "True is no count": (configured({"num_labels": True}, "h:blocks to_one:8>1"), {"to_one": LAST}),
    "as many as words": (
        holding(words=nn.Embedding(31, 8), rnn=nn.LSTM(8, 12, bias=False), back=linear(12, 31), up=linear(8, 12)),
        {"words": "embedding (Embedding)", "back": "output head, 31 outputs as the largest embedding has rows"},
    ),
    # The last of several.
    "in a named module": (
        net(
            "h:blocks classifier.dense:8>8 classifier.out_proj:8>3 decode_head.classifier:9>5 decode_head.fuse:8>9",
            bbox_predictor=BOX,
            heads=nn.ModuleDict({"a": mlp(8, 9, 2), "b": linear(8, 5)}),
        ),
        {"classifier.out_proj", "bbox_predictor.layers.2", "heads.a.2", "heads.b", "decode_head.classifier"},
    ),  # named itself, so that the last, fuse, is not
    "before one elsewhere": (net("h:blocks head.dense:8>8 decoder:8>31"), {"decoder"}),
    "a Sequential": (mlp(8, 9, 3), {"2": SEQUENTIAL}),
    "a wrapped Sequential": (nn.DataParallel(mlp(8, 9, 3)), {"module.2": SEQUENTIAL}),
    "Sequentials in one": (nn.Sequential(mlp(8, 9), nn.Flatten(), mlp(9, 7, 3)), {"2.2": SEQUENTIAL}),
    "its output is normalised": (nn.Sequential(linear(8, 9), nn.LayerNorm(9)), {}),
    "one layer alone is what there is to train": (nn.Sequential(linear(8, 9)), {}),
    "nothing else is in the model": (net("net:8>9>3"), {"net.2": SEQUENTIAL}),
    "outputs go on": (net("body:8>9>3 more:3>4"), {"more": LAST}),
    "a classifier of features": (
        holding(
            features=nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)),
            classifier=nn.Sequential(linear(8, 16), nn.ReLU(), linear(16, 10), nn.Identity()),
            layers=nn.ModuleList([holding(output=nn.Sequential(linear(8, 8)))]),
        ),
        {"classifier.2"},
    ),
    "an adaptive softmax": (nn.AdaptiveLogSoftmaxWithLoss(12, 200, cutoffs=[20, 60], div_value=2.0), SOFTMAX),
    "an adaptive softmax inside": (
        holding(h=blocks(12), out=nn.AdaptiveLogSoftmaxWithLoss(12, 200, cutoffs=[20, 60], div_value=2.0)),
        {f"out.{name}": reason for name, reason in SOFTMAX.items()},
    ),
    # Layers that end a model of which nothing else is known.
    "numbered": (net("fc1:12>9 fc2:9>5"), {"fc2": LAST}),
    "after a flattened convolution": (net("a:3>6@3 to:24>5"), {"to"}),
    "after an LSTM": (holding(rnn=nn.LSTM(3, 6, bidirectional=True), readout=linear(12, 5)), {"readout"}),
    "after blocks and a norm": (holding(h=blocks(), norm=nn.LayerNorm(8), final=linear(8, 5)), {"final"}),
    "actor and critic": (net("body:5>8 policy:8>4 value:8>1"), {"policy", "value"}),
    "a list of layers": (holding(layers=nn.ModuleList([linear(9, 8), linear(8, 6), linear(6, 4)])), {"layers.2"}),
    "hidden layers named as heads": (net("fc:12>9 decoder:9>7 out:7>5"), {"out": LAST}),
    "a hidden layer in a head": (
        net("h:blocks head.fc:8>6 head.proj:6>3 more:3>6@3"),
        {"head.proj": "last layer of head, named as output head"},
    ),
    "as many labels as a later map has channels": (net("a:6>8 fc:8>3 b:3>6@3"), {"fc"}),
    "as many labels as channels": (net("a:3>8@3 b:8>8@3 fc:8>8"), {"fc": NAMED}),
    "a net whose outputs another takes": (
        net("one.up:5>8 one.fc:8>12 two.up:12>9 two.head:9>1"),
        {"one.fc": NAMED, "two.head": NAMED},
    ),
    "wrapped": (nn.DataParallel(net("fc1:12>9 fc2:9>5")), {"module.fc2"}),
    # None of these is the output for certain.
    "an autoencoder": (net("fc1:12>5 fc2:5>12"), {}),
    "a pooler": (net("h:blocks pooler:8>8"), {}),
    "one layer": (net("own:3>5"), {}),
    "one that takes what no other gives": (net("it:4>8 own:3>5"), {}),
    "attention": (net("q:8>8 k:8>4 v:8>4 out:8>8"), {}),
    "a recurrent decoder": (
        holding(words=nn.Embedding(9, 8), decoder=nn.GRUCell(8, 8), generator=linear(8, 7)),
        {"words": "embedding (Embedding)", "generator": LAST},
    ),
    "an attention as decoder": (net("decoder:attention generator:8>7"), {"generator": LAST}),
    "heads of attention": (
        net(
            "words:words cross_attn.to_k:8>8 cross_attn.fc:8>8 lm_head:8>9",
            sa_heads=net("proj:8>8", heads=nn.ModuleList(net("k:8>4 v:8>4") for _ in "ab")),
        ),
        {"words", "lm_head"},
    ),
    "heads named as attention is": (
        net("h:blocks attention.up:8>8 attention.fc:8>2", heads=nn.ModuleDict({"sa": linear(8, 3)})),
        {"heads.sa", "attention.fc"},
    ),
    "DETR's": (
        net(
            "h:blocks class_embed:8>6 enc_score_embed:8>5>3",
            bbox_embed=nn.ModuleList([copy.deepcopy(BOX), copy.deepcopy(BOX)]),
        ),
        {"class_embed", "bbox_embed.0.layers.2", "bbox_embed.1.layers.2", "enc_score_embed.2"},
    ),
    "SAM's masks": (
        holding(mask_embed=nn.Sequential(nn.Conv2d(1, 4, 2), nn.Conv2d(4, 8, 1)), lm_head=linear(8, 5)),
        {"lm_head"},
    ),
    "no classifier yet, and positions": (
        net(
            "h:blocks pre_classifier:8>8 ref_point_head:16>9>8 reference_points_head:16>9>8 classifier:8>3",
            query_pos_head=holding(layers=nn.ModuleList([linear(4, 9), linear(9, 8)])),
        ),
        {"classifier"},
    ),
    "a head that pools": (
        net(
            "vision.h:blocks vision.head.attention:attention vision.head.mlp.fc1:8>9 vision.head.mlp.fc2:9>8 "
            "other.h:blocks other.head.k_proj:8>8 other.head.o_proj:8>8 score:8>3"
        ),
        {"score"},
    ),
    "a classifier that pools": (
        net("h:blocks classifier.attn:attention classifier.to_classes:8>5"),
        {"classifier.to_classes"},
    ),
    "inputs named as DETR's heads": (net("class_embed:5>8 mask_embed:8>8>8 h:blocks out:8>6"), {"out"}),
    "a head of several blocks": (
        holding(h=blocks(), predictor=holding(h=nn.ModuleList([net("key:8>8")]), proj=linear(8, 7))),
        {"predictor.proj"},
    ),
    "numbered attention": (
        net("mid.attn_1.k:8>8@1 mid.attn_1.proj_out:8>8@1 conv_out:8>3@3"),
        {"conv_out"},
    ),
    "behind a stem": (net("stem.convs:3>8@3 stem.conv_out:24>8 h:blocks fc:8>3"), {"fc"}),
    "a router": (net("up:8>9 router:8>4"), {}),
    "deeper in": (net("up:8>9 inner.fc2:9>5"), {}),
    "not the last": (net("up:8>9 side:9>5 back:9>8"), {}),
    "where nothing else is left": (net("one:1>5 two:5>7"), {"one"}),  # has one input
    # Where a head is known what comes last is none.
    "tied": (tied(), {"words"}),
    "named": (net(f"lm_head:8>31 {END}"), {"lm_head"}),
    "said to be none": (classifier(lambda m: m.none, END, none=nn.Identity()), {}),
    "a model that would tell": (embeddings(lambda m: None, END), {}),
    "after one that tells": (holding(backbone=embeddings(lambda m: None, END), out=linear(5, 3)), {"out"}),
}


@pytest.mark.parametrize("model, heads", HEADS.values(), ids=HEADS)
def test_heads_of_models(model, heads):
    found = {name.removesuffix(".weight"): reason for name, reason in adamw(model).items()}
    wanted = heads if isinstance(heads, dict) else dict.fromkeys(heads)
    wanted = {name.removesuffix(".weight"): reason for name, reason in wanted.items()}
    assert found.keys() == wanted.keys()
    assert all(reason in (None, found[name]) for name, reason in wanted.items())


TAKERS = [linear(7, 5), nn.LayerNorm(7), nn.Conv2d(7, 5, 3), nn.ConvTranspose2d(7, 5, 3), nn.LSTM(7, 3)]
TAKERS += [nn.MultiheadAttention(7, 1), nn.Embedding(3, 7), nn.Conv2d(14, 4, 3, groups=2)]
TAKERS += [of_class("OwnConv1d", weight=torch.zeros(5, 7, 3)), of_class("Experts", up=torch.zeros(4, 7, 5))]


@pytest.mark.parametrize("taken_by", TAKERS, ids=lambda module: type(module).__name__)
def test_a_hidden_layer_that_is_as_wide_as_the_labels_is_no_head(taken_by):
    size = 14 if getattr(taken_by, "groups", 1) == 2 else 7
    model = configured({"num_labels": size}, f"h:blocks pooler:8>{size}", after=taken_by)
    assert "pooler.weight" not in adamw(model)
    del model.after
    assert "pooler.weight" in adamw(model)


def test_a_layer_of_a_repeated_block_is_no_head():
    for name, outputs in (("gate", 4), ("output", 8), ("proj_out", 8), ("fc", 8), ("decoder", 8)):
        model = configured({"num_labels": 4}, "h:blocks")
        for block in model.h:
            setattr(block, name, linear(8, outputs))  # as one that routes to 4 experts
        assert adamw(model) == {}


PATHS = """
    lm_head model.LM_Head mtp.0.lm_head lm_heads.2 unembed embed_out head heads.head value_head cls.predictions.decoder
    classifier module.head _orig_mod.score module._orig_mod.lm_head head._orig_mod head.module classifier.out_proj
    classification_head.out_proj discriminator_predictions.dense_prediction cls.seq_relationship class_labels_classifier
    multiple_choice_head.summary logits_proj heads.first classifiers.0 net.heads.1 proj_out_2
    head.modules_to_save.default classifier.modules_to_save.default.out_proj score.original_module lm_head.base_layer
""".split()
OTHER_PATHS = """
    layers.3.attention.output layers.3.output.dense encoder_layer_0.proj_out layers._orig_mod.3.attention.output
    lm_head.dense overhead embed token_mixer mlp.router.classifier gate.head ffn.router.layer
""".split()


@pytest.mark.parametrize("path", [*PATHS, *OTHER_PATHS])
def test_a_linear_layer_is_a_head_by_its_path(path):
    """Among routers, which are none, and in blocks."""
    model = at(path, linear(8, 6))
    model.h = blocks()
    assert set(adamw(model)) == ({f"{path}.weight"} if path in PATHS else set())
    if "router" in path or path.startswith("gate"):
        assert adamw(holding(h=nn.ModuleList([at(path, linear(8, 6))]), up=linear(8, 8))) == {}


@pytest.mark.parametrize("head", ["head", "classifier", "fc", "output"])
def test_whole_nets_in_a_list_have_their_heads(head):
    nets = nn.ModuleList(holding(stem=linear(5, 8), layers=blocks(), **{head: linear(8, 3)}) for _ in range(2))
    assert set(adamw(holding(nets=nets))) == {f"nets.{i}.{head}.weight" for i in range(2)}
    assert set(adamw(nets)) == {f"{i}.{head}.weight" for i in range(2)}
    vgg = nn.ModuleList([holding(stem=linear(5, 8), classifier=mlp(8, 9, 3))])
    assert set(adamw(holding(nets=vgg))) == {"nets.0.classifier.2.weight"}


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
    "former weight_norm, of one norm": lambda layer: nn.utils.weight_norm(layer, dim=None),  # a gain without dimensions
    "former spectral_norm": nn.utils.spectral_norm,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("normed", NORMED.values(), ids=NORMED)
def test_a_normed_layer_is_a_head_where_its_layer_would_be(normed):
    for model in (
        embeddings(lambda m: m.proj, "body:8>9", proj=normed(linear(8, 50))),
        nn.Sequential(linear(8, 9), nn.ReLU(), normed(linear(9, 50))),
        holding(body=linear(8, 9), lm_head=normed(linear(9, 50))),
        holding(body=normed(linear(8, 9)), lm_head=linear(9, 50)),
        configured({"num_labels": 50}, "body:8>9", to_fifty=normed(linear(8, 50))),
    ):
        assert [r.shape for r in param_groups(model, **RATES).routes if r.algorithm == "matrix"] == [(9, 8)]


def test_a_layer_with_its_adapter_alone_is_a_model():
    """The path of base_layer has no components, as it is a wrapper's name."""
    found = param_groups(holding(base_layer=linear(8, 9), lora_A=linear(8, 2)), **RATES).routes
    assert [route.algorithm for route in found] == ["matrix", "matrix"]


ANSWERS = {  # of get_classifier(), with what in it is hidden
    "nested in another": (lambda: holding(norm=nn.LayerNorm(8), inner=Cosine(8, 10)), ()),
    "after a hidden layer": (lambda: nn.Sequential(linear(8, 8), nn.GELU(), Cosine(8, 10)), ("0.weight",)),
    "after an LSTM": (lambda: nn.Sequential(nn.LSTM(8, 8), Cosine(8, 10)), ("0.weight_ih_l0", "0.weight_hh_l0")),
    "lists of lists": (lambda: nn.ModuleList([nn.ModuleList([linear(8, 10), linear(8, 5)]), linear(8, 7)]), ()),
    "a dictionary": (
        lambda: nn.ModuleDict({"a": linear(8, 10), "b": nn.Sequential(linear(8, 8), linear(8, 5))}),
        ("b.0.weight",),
    ),
}


@pytest.mark.parametrize("answer, hidden", ANSWERS.values(), ids=ANSWERS)
def test_whatever_get_classifier_returns_is_a_head(answer, hidden):
    model = classifier(lambda m: m.out, "body:8>8", out=answer())
    every = {name for name, p in model.named_parameters() if p.ndim > 1}
    assert every - adamw(model).keys() == {"body.weight", *(f"out.{name}" for name in hidden)}


TOLD = 'if a layer gives the outputs, name it: adamw=["NAME.*"]'


@pytest.mark.parametrize(
    "model, options, says",
    [
        (net("fc1:12>9 fc2:9>5"), {}, f"head: fc2.weight ({LAST})"),
        (net("h:blocks lm_head:8>31"), {}, "head: lm_head.weight (named as output head)"),
        (
            holding(h=blocks(), heads=nn.ModuleList(linear(8, 5) for _ in range(5))),
            {},
            "heads: "
            + ", ".join(f"heads.{i}.weight (last layer of heads, named as output head)" for i in range(3))
            + ", and 2 more",
        ),
        (net("fc1:12>5 fc2:5>12"), {}, f"head: none found; {TOLD}"),
        (net("fc1:12>5 fc2:5>12"), {"adamw": ["fc2.*"]}, f"head: none found beside what adamw= names; {TOLD}"),
        (net("h:blocks head:8>31"), {"adamw": ["head.*"]}, "head: head.weight (adamw='head.*')"),
        (tied(), {}, "head: words.weight (back.weight tied to embedding words.weight)"),
    ],
)
def test_the_tables_last_line_says_how_heads_were_found(model, options, says):
    assert str(param_groups(model, **RATES, **options)).splitlines()[-1] == f"output {says}"


@pytest.mark.parametrize("name, rows", [("qkv", 48), ("c_attn", 48), ("gate_up_proj", 40), ("query_key_value", 48)])
def test_attention_with_a_row_a_word_is_no_head(name, rows):
    """One attention module directly in the model, as in tutorials."""
    attn = holding(**{name: linear(16, rows), "v_proj": linear(16, 12), "proj": linear(12, 24)})
    model = holding(embed=nn.Embedding(rows, 16), attn=attn, last=linear(24, rows))
    found = routes(model)
    assert found[f"attn.{name}.weight"].algorithm == "matrix" and not found[f"attn.{name}.weight"].head
    assert found["last.weight"].reason == f"output head, {rows} outputs as the largest embedding has rows"
