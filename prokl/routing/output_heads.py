"""Find a model's output heads: by its structure, and where that says nothing, by the names of its modules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from prokl.algorithm.names import unwrapped_name
from prokl.routing.layout import NAMED_AS_FUSED
from prokl.routing.owners import GAINS, Owner, asked, read
from prokl.routing.routes import COPY
from prokl.routing.rules import choose

Path = tuple[str, ...]

ANYWHERE = re.compile(r"(\w+_)?lm_?heads?|output_heads?|unembed(ding)?|embed_out|to_logits")
# Modules whose last layer is the output: RoBERTa's classifier.out_proj, DETR's bbox_predictor.layers.2.
WHOLE = re.compile(
    r"(\w+_)?(heads?|classifiers?|predictions?|predictors?|logits)|scores?|qa_outputs|logits_\w+"
    r"|(\w+_)?(class|bbox|score|mask)_embed"  # DETR's; SAM's, of convolutions, is none
)
# Named so, and none: DistilBERT's layer before the classifier, and DETR-like models' of positions.
HIDDEN = re.compile(r"pre_classifier|(\w+_)?(query_pos|ref_points?|reference_points?)_head")
LAYER = re.compile(
    r"outputs?|output_(layer|proj|projection)|fc|fc_out|decoder|seq_relationship|proj_out(_\d+)?|conv_out|last_linear"
)
# Attention, where it holds keys: sa_heads.heads.0.value and cross_attn.fc are hidden.
ATTENTION = re.compile(r"(\w+_)?(sa|attn|attention|mha)(_heads|_?\d+)?")
KEYS = re.compile(r"(to_)?(k|key|keys|qkv|kv)(_proj|_linear)?")
ROUTER = re.compile(r"(\w+_)?(router|gate)")
ASKED = ("get_output_embeddings", "get_classifier")
COUNTS = ("vocab_size", "num_labels", "num_classes")
"""Settings in a model's ``config`` that say how many outputs its head has."""


class OutputHeads:
    """The output heads of a model."""

    def __init__(self, model: nn.Module, owners: Mapping[Tensor, Sequence[Owner]]) -> None:
        held = [o for of_p in owners.values() for o in of_p]
        named = [(unwrapped_name(name).lower(), m) for name, m in model.named_modules(remove_duplicate=False)]
        modules = [(tuple(name.split(".")) if name else (), module) for name, module in named]
        matrices = [o for o in held if o.p.ndim >= 2 and not (o.norm or o.embedding)]
        self._layers = dict.fromkeys(o.path for o in held if o.layer)
        keys = [path for path in self._layers if path and KEYS.fullmatch(path[-1])]
        self._holding_keys = {path[:end] for path in keys for end in range(1, len(path))}
        self._inputs = {size for o in held for size in _inputs(o)}
        # Linear layers named fc, output or decoder whose outputs the next one takes, which lies beside them, or below.
        self._hidden = {
            o.path
            for o, after in pairwise(matrices)
            if o.linear and after.linear and LAYER.fullmatch(o.last)
            if after.path[: len(o.path) - 1] == o.path[:-1] and _outputs(o) in _inputs(after)
        }
        self._hidden |= {o.path for o in matrices if o.linear and o.last == "conv_out"}  # behind a stem's convolutions
        self._keys = [o.path for o in matrices if o.in_proj or (o.layer and KEYS.fullmatch(o.last))]
        self._several = sum(p.ndim >= 2 for p in owners) > 1
        self._shared = len(os.path.commonprefix([o.path for o in held]))
        self._lists = {path: m for path, m in modules if isinstance(m, (nn.ModuleList, nn.ModuleDict))}
        self._stated: dict[Path, str] = {}
        self._sure: list[Path] = []  # models that tell: a layer only named as a head (conv_head) is none in them
        self._ask(modules, dict.fromkeys(o.path for o in matrices if not o.recurrent))
        self._counts = {path: counts for path, module in modules if (counts := _counts(module))}
        rows = max((o.p.shape[0] for o in held if o.embedding and o.p.ndim == 2), default=0)
        self._counts[()] = {rows: f"{rows} outputs as the largest embedding has rows"} | self._counts.get((), {})
        self._closing: dict[Path, str] = {}
        tied = any(any(o.embedding for o in of_p) and any(o.linear for o in of_p) for of_p in owners.values())
        tells = any(read(module, method) for path, module in modules if not path for method in ASKED)
        if not (tells or self._sure or tied or any(o.layer and self._reason(o) for o in held)):
            self._closing = self._closing_layers(owners, matrices)

    def reason(self, owners: Sequence[Owner]) -> str | None:
        """Return why a matrix is an output head under one of its names, or None where it is none, or no matrix."""
        return next((reason for o in owners if o.p.ndim >= 2 and (reason := self._reason(o))), None)

    def _reason(self, o: Owner) -> str | None:
        if o.path in self._stated:
            return self._stated[o.path]
        if reason := self._counted(o):
            return reason
        if any(o.path[: len(path)] == path for path in self._sure):
            return None
        if o.linear and o.closes == len(o.path) - self._shared > 0 and self._several:
            return "last layer of the Sequential"
        return self._named(o) or (self._closing.get(o.path) if o.layer else None)

    def _ask(self, modules: Sequence[tuple[Path, nn.Module]], matrices: Iterable[Path]) -> None:
        """Ask the model, and models inside it, by their own methods which layers are the output.

        The output of such a layer's module is given by itself, or by the last of ``matrices`` in it.
        """
        paths = {module: path for path, module in modules}

        def state(head: nn.Module, why: str) -> None:
            if isinstance(head, (nn.ModuleList, nn.ModuleDict)):  # each of them is one
                for member in head.children():
                    state(member, why)
            else:
                inside = [path for path in matrices if path[: len(paths[head])] == paths[head]]
                for end in [paths[head]] if paths[head] in inside else inside[-1:]:
                    self._stated[end] = f"output head, {why}"

        for module, path in paths.items():
            for method in ASKED:
                answer = asked(module, method)
                named = answer if isinstance(answer, (tuple, list)) else [answer]
                heads = [head for head in named if isinstance(head, nn.Module) and head in paths]
                for head in heads:
                    state(head, f"by {method}()")
                if heads and method == "get_classifier":
                    self._sure.append(path)
            if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
                for cluster in (module.head, *module.tail):
                    state(cluster, "cluster of AdaptiveLogSoftmaxWithLoss")

    def _counted(self, o: Owner) -> str | None:
        """Return why this layer has an output per word or label for certain; None if it has not.

        That is certain outside repeated blocks if nothing in the model takes so many inputs: then the number is no
        hidden size.
        """
        if o.path not in self._layers or _in_copy(_without_index(o.path)):
            return None
        if NAMED_AS_FUSED.fullmatch(o.last) or self._in_attention(o.path):  # 3 x 64 rows of q, k and v beside 192 words
            return None
        size = _outputs(o)
        if size in self._inputs:
            return None
        counted = (c[size] for path, c in self._counts.items() if size in c and o.path[: len(path)] == path)
        return next((f"output head, {what}" for what in counted), None)

    def _closing_layers(self, owners: Mapping[Tensor, Sequence[Owner]], matrices: Sequence[Owner]) -> dict[Path, str]:
        """Return the linear layers that end a model in which no other sign of a head was found: fc2, policy and value.

        They lie directly in it and come after all other weights. Their inputs are another layer's outputs, and their
        outputs are no layer's inputs, unlike those of a projection or an autoencoder. A model that has a method to tell
        its head and tells none, as transformers' CLIP, is taken at its word.
        """
        closing: dict[Path, str] = {}
        held = [o for of_p in owners.values() for o in of_p]
        for o in reversed(matrices):
            taken, given = o.p.shape[-1], {size for other in held if other.path != o.path for size in _given(other)}
            maps = {_outputs(other) for other in held if other.path != o.path and other.layer and other.convolution}
            takes = taken in given or any(taken % size == 0 for size in maps)  # flattened maps
            direct = o.linear and len(o.path) - self._shared == 1 and not ROUTER.fullmatch(o.last)
            if not direct or o.p.shape[0] in self._inputs or not takes:
                break
            closing[o.path] = "last layer, whose outputs no other takes"
        others = (of_p for of_p in owners.values() if not any(o.path in closing for o in of_p))
        return closing if any(choose(of_p, None).algorithm == "matrix" for of_p in others) else {}

    def _named(self, o: Owner) -> str | None:
        if o.recurrent or o.in_proj or any(map(ROUTER.fullmatch, o.path)) or self._in_attention(o.path):
            return None
        if any(ANYWHERE.fullmatch(part) for part in (*_without_index(o.path)[-1:], o.attr)):
            return "named as output head"
        if self._outside(o.path, o) and _says_head(o.attr):
            return "named as output head"
        for end in range(len(o.path), 0, -1):
            head = o.path[:end]
            if not _says_head(head[-1]) or head in self._hidden or not self._outside(head, o):
                continue
            if head[-1].endswith("_embed") and (
                o.convolution or (o.layer and max(_inputs(o)) <= _outputs(o) in self._inputs)
            ):
                continue
            if len(o.path) - end <= o.closes:  # classifier.6 of a Sequential goes by the name of the whole
                return "named as output head"
            if WHOLE.fullmatch(head[-1]) and self._ends(o, head):
                return f"last layer of {unwrapped_name(o.name).split('.')[end - 1]}, named as output head"
        return None

    def _in_attention(self, path: Path) -> bool:
        around = (path[:end] for end in range(1, len(path)) if ATTENTION.fullmatch(path[end - 1]))
        return any(module in self._holding_keys for module in around)

    def _outside(self, path: Path, o: Owner) -> bool:
        """Return True if a module lies outside repeated blocks, or gives the output of a whole net in a list."""
        if not _in_copy(path):
            return True
        in_list = len(path) > 1 and path[-2].isdigit() and isinstance(self._lists.get(path[:-2]), nn.ModuleList)
        return in_list and o.path in self._layers and _outputs(o) not in self._inputs

    def _ends(self, o: Owner, head: Path) -> bool:
        """Return True if a weight is that of the last layer of ``head``, or of one of the heads that ``head`` lists."""
        path = o.path
        if head in self._lists and head[-1].endswith(("s", "_embed")):
            head = path[: len(head) + 1]
        pools = any(keys[: len(head)] == head and not _in_copy(keys) for keys in self._keys)
        if pools and _outputs(o) in self._inputs:
            return False  # SigLIP's head, which pools by attention
        inside = [layer for layer in self._layers if layer[: len(head)] == head]
        others = {*inside} - {path, head} - self._hidden
        if any(_says_head(other[-1]) for other in others):
            return False  # decode_head.linear_fuse beside decode_head.classifier
        alone = len(inside) == 1 and path != head  # a dense alone comes before a head that lies elsewhere
        return inside[-1:] == [path] and not (alone and path[-1] == "dense")


def _in_copy(path: Path) -> bool:
    return COPY.search(".".join(path)) is not None


def _without_index(path: Path) -> Path:
    while path and path[-1].isdigit():  # lm_heads.0
        path = path[:-1]
    return path


def _says_head(part: str) -> bool:
    return not HIDDEN.fullmatch(part) and (WHOLE.fullmatch(part) or LAYER.fullmatch(part)) is not None


def _outputs(o: Owner) -> int:
    """Return how many outputs a layer has."""
    if issubclass(o.cls, nn.modules.conv._ConvTransposeNd):
        return int(read(o.module, "out_channels") or o.p.shape[min(1, o.p.ndim - 1)])
    return o.p.shape[1] if o.conv1d else o.p.shape[0]


def _inputs(o: Owner) -> Sequence[int]:
    """Return the numbers of inputs that a parameter stands for; all of its sizes where its module says nothing."""
    shape = o.p.shape
    if o.norm or o.embedding:
        return shape[-1:]
    if o.p.ndim < 2 or o.attr in GAINS:
        return ()
    if o.conv1d:
        return shape[:1]
    if o.convolution:
        return (read(o.module, "in_channels") or shape[1],)
    return shape[-1:] if o.linear or o.recurrent or o.in_proj else [size for size in shape if size > 1]


def _given(o: Owner) -> Sequence[int]:
    """Return the sizes that a weight may give to another layer."""
    if o.recurrent:
        size: Any = read(o.module, "proj_size") or read(o.module, "hidden_size") or o.p.shape[-1]
        return (size, 2 * size)  # in both directions
    return (_outputs(o),) if o.layer else o.p.shape


def _counts(module: nn.Module) -> dict[int, str]:
    """Return the numbers of outputs that a module's ``config`` states, and how to say each."""
    config = read(module, "config")
    values = {name: read(config, name) for name in COUNTS}
    return {v: f"config.{name} = {v}" for name, v in values.items() if type(v) is int and v > 0}
