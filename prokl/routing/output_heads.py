"""Output heads: what a model's structure says about them, and where it says nothing, the names of its modules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from prokl.algorithm.names import unwrapped_name
from prokl.routing.layout import NAMED_AS_FUSED, is_conv1d
from prokl.routing.marks import asked
from prokl.routing.rules import Owner, choose

Path = tuple[str, ...]

# A component that counts copies of a block: the 3 of layers.3, encoder_layer_0.
COPY = re.compile(r"\d+|.*(layer|block|stage)_?\d+")
ANYWHERE = re.compile(r"(\w+_)?lm_?heads?|output_heads?|unembed(ding)?|embed_out|to_logits")
# Modules whose last layer is the output: RoBERTa's classifier.out_proj, DETR's bbox_predictor.layers.2.
WHOLE = re.compile(r"(\w+_)?(heads?|classifiers?|predictions?|predictors?|logits)|scores?|qa_outputs|logits_\w+")
LAYER = re.compile(
    r"outputs?|output_(layer|proj|projection)|fc|fc_out|decoder|seq_relationship|proj_out(_\d+)?|conv_out|last_linear"
)
# Attention, where it holds keys: sa_heads.heads.0.value and cross_attn.fc are hidden.
ATTENTION = re.compile(r"(\w+_)?(sa|attn|attention|mha)(_heads)?")
KEYS = re.compile(r"(to_)?(k|key|keys|qkv|kv)(_proj|_linear)?")
ROUTER = re.compile(r"(\w+_)?(router|gate)")
ASKED = ("get_output_embeddings", "get_classifier")
COUNTS = ("vocab_size", "num_labels", "num_classes")
"""Settings in a model's ``config`` that say how many outputs its head has."""


class OutputHeads:
    """The output heads of a model."""

    def __init__(self, model: nn.Module, owners: Mapping[Tensor, Sequence[Owner]]) -> None:
        held = [(p, o) for p, of_p in owners.items() for o in of_p]
        modules = [(_path(name), module) for name, module in model.named_modules(remove_duplicate=False)]
        self._layers = dict.fromkeys(o.path for p, o in held if _is_layer(p, o))
        self._matrices = dict.fromkeys(
            o.path for p, o in held if p.ndim >= 2 and not (o.norm or o.embedding or o.recurrent)
        )
        self._inputs = {size for p, o in held for size in _inputs(p, o)}
        self._hidden = _named_and_hidden(held)
        self._several = sum(p.ndim >= 2 for p in owners) > 1
        self._shared = len(os.path.commonprefix([o.path for _, o in held]))
        self._lists = {path: m for path, m in modules if isinstance(m, (nn.ModuleList, nn.ModuleDict))}
        self._stated: dict[Path, str] = {}
        self._sure: list[Path] = []
        self._ask(modules)
        rows = max((p.shape[0] for p, o in held if o.embedding and p.ndim == 2), default=0)
        self._counts = {path: counts for path, module in modules if (counts := _counts(module))}
        self._counts[()] = {rows: f"{rows} outputs as the largest embedding has rows"} | self._counts.get((), {})
        self._closing: dict[Path, str] = {}
        tied = any(any(o.embedding for o in of_p) and any(o.linear for o in of_p) for of_p in owners.values())
        tells = any(hasattr(module, method) for path, module in modules if not path for method in ASKED)
        if not (tells or self._sure or tied or any(_is_layer(p, o) and self._reason(p, o) for p, o in held)):
            self._closing = self._closing_layers(owners)

    def reason(self, p: Tensor, owners: Sequence[Owner]) -> str | None:
        """Return why ``p`` is an output head under one of its names, or None where it is none."""
        return next((reason for o in owners if (reason := self._reason(p, o))), None)

    def _reason(self, p: Tensor, o: Owner) -> str | None:
        if o.path in self._stated:
            return self._stated[o.path]
        if reason := self._counted(p, o):
            return reason
        if any(o.path[: len(path)] == path for path in self._sure):
            return None
        if o.linear and o.closes == len(o.path) - self._shared > 0 and self._several:
            return "last layer of the Sequential"
        return self._named(p, o) or (self._closing.get(o.path) if _is_layer(p, o) else None)

    def _ask(self, modules: Sequence[tuple[Path, nn.Module]]) -> None:
        """Ask the model, and models inside it, by their own methods which layers are the output."""
        paths = {module: path for path, module in modules}
        for module, path in paths.items():
            for method in ASKED:
                answer = asked(module, method)
                named = answer if isinstance(answer, (tuple, list)) else [answer]
                heads = [head for head in named if isinstance(head, nn.Module) and head in paths]
                ends = [end for head in _members(heads) for end in self._end_of(paths[head])]
                self._stated.update(dict.fromkeys(ends, f"output head, by {method}()"))
                if heads and method == "get_classifier":
                    self._sure.append(path)  # a layer that is only named as a head (conv_head) is none in this model
            if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
                clusters = [(*path, "head"), *((*path, "tail", str(i)) for i in range(module.n_clusters))]
                ends = [layers[-1] for cluster in clusters if (layers := self._inside(cluster))]
                self._stated.update(dict.fromkeys(ends, "output head, cluster of AdaptiveLogSoftmaxWithLoss"))

    def _end_of(self, head: Path) -> list[Path]:
        """Return what gives the output in a head, if anything does: itself, or the last module in it with matrices."""
        inside = [path for path in self._matrices if path[: len(head)] == head]
        return [head] if head in inside else inside[-1:]

    def _counted(self, p: Tensor, o: Owner) -> str | None:
        """Return what says that this layer has an output per word or label, if that is certain.

        It is certain for a layer outside repeated blocks where nothing in the model takes that many inputs, so that a
        hidden size which happens to be the same says nothing.
        """
        if o.path not in self._layers or _in_copy(_without_index(o.path)):
            return None
        fused = bool(o.path) and NAMED_AS_FUSED.fullmatch(o.path[-1]) is not None
        if fused or self._in_attention(o.path):  # 3 x 64 rows of q, k and v beside 192 words
            return None
        size = _outputs(p, o)
        if size in self._inputs:
            return None
        counted = (c[size] for path, c in self._counts.items() if size in c and o.path[: len(path)] == path)
        return next((f"output head, {what}" for what in counted), None)

    def _closing_layers(self, owners: Mapping[Tensor, Sequence[Owner]]) -> dict[Path, str]:
        """Return the linear layers that end a model of which nothing else says what its head is: fc2, policy and value.

        They lie directly in it and come after all other weights, take what another layer gives, and give what none
        takes. What gives sizes that the model works with (a projection, the output of an autoencoder) is none, and a
        model that has a method to tell its head and tells none, as transformers' CLIP, is taken at its word.
        """
        closing: dict[Path, str] = {}
        held = [(p, o) for p, of_p in owners.items() for o in of_p]
        for p, o in reversed([(p, o) for p, o in held if p.ndim >= 2 and not (o.norm or o.embedding)]):
            sizes = {size for q, other in held if other.path != o.path for size in _output_sizes(q, other, p.shape[-1])}
            direct = o.linear and len(o.path) - self._shared == 1 and not ROUTER.fullmatch(o.path[-1])
            if not direct or p.shape[0] in self._inputs or p.shape[-1] not in sizes:
                break
            closing[o.path] = "last layer, whose outputs no other takes"
        others = ((p, of_p) for p, of_p in owners.items() if not any(o.path in closing for o in of_p))
        return closing if any(choose(p, of_p, None).algorithm == "matrix" for p, of_p in others) else {}

    def _named(self, p: Tensor, o: Owner) -> str | None:
        if o.recurrent or o.in_proj or any(map(ROUTER.fullmatch, o.path)) or self._in_attention(o.path):
            return None
        if any(ANYWHERE.fullmatch(part) for part in (*_without_index(o.path)[-1:], o.attr)):
            return "named as output head"
        if self._outside(o.path, p, o) and _says_head(o.attr):
            return "named as output head"
        for end in range(len(o.path), 0, -1):
            head = o.path[:end]
            if not _says_head(head[-1]) or head in self._hidden or not self._outside(head, p, o):
                continue
            if len(o.path) - end <= o.closes:  # classifier.6 of a Sequential goes by the name of the whole
                return "named as output head"
            if WHOLE.fullmatch(head[-1]) and self._ends(o.path, head):
                written = unwrapped_name(o.name).split(".")[end - 1]
                return f"last layer of {written}, named as output head"
        return None

    def _in_attention(self, path: Path) -> bool:
        inside = (self._inside(path[:end]) for end in range(1, len(path)) if ATTENTION.fullmatch(path[end - 1]))
        return any(KEYS.fullmatch(layer[-1]) for layers in inside for layer in layers)

    def _outside(self, path: Path, p: Tensor, o: Owner) -> bool:
        """Return True if a module lies outside repeated blocks, or gives the output of a whole net in a list."""
        if not _in_copy(path):
            return True
        in_list = len(path) > 1 and path[-2].isdigit() and isinstance(self._lists.get(path[:-2]), nn.ModuleList)
        return in_list and o.path in self._layers and _outputs(p, o) not in self._inputs

    def _ends(self, path: Path, head: Path) -> bool:
        """Return True if ``path`` is the last layer of ``whole``, or of one of the heads that ``whole`` lists."""
        if head in self._lists and head[-1].endswith("s"):
            head = path[: len(head) + 1]
        inside = self._inside(head)
        others = {*inside} - {path, head} - self._hidden
        if path not in inside or any(_says_head(other[-1]) for other in others):
            return False  # decode_head.linear_fuse beside decode_head.classifier
        alone = len(inside) == 1 and path != head  # a dense alone is what comes before a head that lies elsewhere
        return path == inside[-1] and not (alone and path[-1] == "dense")

    def _inside(self, container: Path) -> list[Path]:
        return [path for path in self._layers if path[: len(container)] == container]


def _path(name: str) -> Path:
    bare = unwrapped_name(name).lower()
    return tuple(bare.split(".")) if bare else ()


def _in_copy(path: Path) -> bool:
    return any(COPY.fullmatch(part) for part in path)


def _without_index(path: Path) -> Path:
    while path and path[-1].isdigit():  # lm_heads.0
        path = path[:-1]
    return path


def _named_and_hidden(held: Sequence[tuple[Tensor, Owner]]) -> set[Path]:
    """Return the linear layers named fc, output or decoder whose outputs the next matrix takes, a linear layer as well.

    The next one lies beside them, or below.
    """
    matrices = [(p, o) for p, o in held if p.ndim >= 2 and not (o.norm or o.embedding)]
    return {
        o.path
        for (p, o), (q, after) in pairwise(matrices)
        if o.linear and after.linear and o.path and LAYER.fullmatch(o.path[-1])
        if after.path[: len(o.path) - 1] == o.path[:-1] and _outputs(p, o) in _inputs(q, after)
    }


def _says_head(part: str) -> bool:
    return WHOLE.fullmatch(part) is not None or LAYER.fullmatch(part) is not None


def _is_layer(p: Tensor, o: Owner) -> bool:
    return p.ndim >= 2 and (o.linear or (o.convolution and o.attr == "weight") or is_conv1d(p, o))


def _outputs(p: Tensor, o: Owner) -> int:
    """Return how many outputs a layer has."""
    if isinstance(o.module, nn.modules.conv._ConvTransposeNd):
        return int(getattr(o.module, "out_channels", p.shape[min(1, p.ndim - 1)]))
    return p.shape[1] if is_conv1d(p, o) else p.shape[0]


def _inputs(p: Tensor, o: Owner) -> Sequence[int]:
    """Return the numbers of inputs that a parameter stands for; all of its sizes where its module says nothing."""
    if o.norm or o.embedding:
        return p.shape[-1:]
    if p.ndim < 2 or o.attr in ("weight_g", "weight_original0"):  # gains of weight norm
        return ()
    if is_conv1d(p, o):
        return p.shape[:1]
    if o.convolution:
        return (getattr(o.module, "in_channels", p.shape[1]),)
    return p.shape[-1:] if o.linear or o.recurrent or o.in_proj else [size for size in p.shape if size > 1]


def _output_sizes(p: Tensor, o: Owner, wanted: int) -> Sequence[int]:
    """Return the sizes that a weight may give to a layer with ``wanted`` inputs, flattened maps among them."""
    if o.recurrent:
        size: Any = getattr(o.module, "proj_size", 0) or getattr(o.module, "hidden_size", p.shape[-1])
        return (size, 2 * size)  # in both directions
    if not _is_layer(p, o):
        return p.shape
    outputs = _outputs(p, o)
    return (outputs, wanted) if o.convolution and wanted % outputs == 0 else (outputs,)


def _members(heads: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """Return the heads, those that are listed each by itself."""
    lists = [_members(list(m.children())) if isinstance(m, (nn.ModuleList, nn.ModuleDict)) else [m] for m in heads]
    return [m for several in lists for m in several]


def _counts(module: nn.Module) -> dict[int, str]:
    """Return the numbers of outputs that a module's ``config`` states, and how to say each."""
    try:
        config = getattr(module, "config", None)
        read = dict(config) if isinstance(config, Mapping) else {name: getattr(config, name, None) for name in COUNTS}
    except Exception:  # the model's own code
        return {}
    values = {name: read.get(name) for name in COUNTS}
    return {v: f"config.{name} = {v}" for name, v in values.items() if type(v) is int and v > 0}
