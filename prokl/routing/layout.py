"""Tell how weights are stored: (in, out) or (out, in), and which are several matrices on top of each other.

The module says so for certain: by its class, by its own settings, or by a name that stands for one layout wherever it
is used. Interleaved pieces (Falcon's query_key_value by head, GPT-OSS's gate_up_proj by column) stay one matrix.

Queries and keys divide by attention's heads where a module states their number. Nothing follows from a number that
merely divides the rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor, nn

from prokl.algorithm.settings import FLAG, check, plain
from prokl.algorithm.shapes import MatrixShape, Rank, Split, effective_rank
from prokl.routing.owners import Owner, read
from prokl.routing.routes import Route
from prokl.routing.rules import first_match, quoted

EXPERTS_IN_OUT = {"GptOssExperts", "Llama4TextExperts"}
"""Classes of transformers whose stacks are (expert, in, out)."""
GATE_THEN_UP = {"Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts"}
"""Those that do not say that gate and up lie one after another in ``gate_up_proj``."""
FUSED: dict[tuple[str, str], int | Literal["grouped"]] = {
    ("ModernBertAttention", "wqkv"): 3,
    ("ModernBertMLP", "wi"): 2,
    ("ModernBertDecoderMLP", "wi"): 2,
    ("MptAttention", "wqkv"): 3,
    ("DbrxAttention", "wqkv"): "grouped",
    ("Phi3Attention", "qkv_proj"): "grouped",
    ("Phi4MultimodalAttention", "qkv_proj"): "grouped",
    ("HieraMaskUnitAttention", "qkv"): 3,
    ("Sam2MultiScaleAttention", "qkv"): 3,
    ("Exaone4_5_VisionAttention", "qkv"): "grouped",
    ("CodeGenAttention", "qkv_proj"): 1,
    ("EfficientFormerSelfAttention", "qkv"): 1,
    ("GPTBigCodeAttention", "c_attn"): 1,
    ("MiniMaxLightningAttention", "qkv_proj"): 1,
    ("BarkSelfAttention", "att_proj"): 3,
    ("BarkSelfFlashAttention2", "att_proj"): 3,
    ("ClvpGatedLinearUnit", "proj"): 2,
    ("GraniteMoeHybridMLP", "input_linear"): 2,
    ("GraniteMoeSharedMLP", "input_linear"): 2,
    ("MoonshineDecoderMLP", "fc1"): 2,
    ("MoonshineStreamingDecoderMLP", "fc1"): 2,
    ("diffusers.models.activations.GEGLU", "proj"): 2,
    ("diffusers.models.activations.SwiGLU", "proj"): 2,
    ("timm.layers.attention.Attention", "qkv"): 3,
    ("timm.models.swin_transformer.WindowAttention", "qkv"): 3,
}
"""(class of the module, its linear layer) -> into how many pieces the layer's outputs divide, or "grouped": q, k and v,
of fewer heads of keys. It is 1 where they take turns. With the file of a common class name. In transformers all other
layers ``qkv`` with three times as many outputs as inputs have 3."""
NAMED_AS_FUSED = re.compile(
    r"((\w+_)?(w?qkv|w?kv|qkv_mlp|c_attn|gate_up|up_gate|w12|w13)(_proj)?|query_key_value)(_w|_weight)?"
)
"""Modules and parameters whose outputs are several matrices as a rule, mostly one after another."""
PROJECTION = re.compile(
    r"(?:(?:to|add|linear|c)_|w_?)?(q|k|query|key|queries|keys)s?(?:_b)?(?:_(?:proj|projection|lin|linear|attn|layer|global))?(?:_weight)?"
)
"""Names of modules and parameters that make queries or keys."""
QKV = re.compile(r"((\w+_)?w?qkv(_proj)?|c_attn|att_proj)(_w|_weight)?")
KV = re.compile(r"((\w+_)?w?kv(_proj)?|c_attn)(_w|_weight)?")
"""Names of what makes queries, keys and values one after another, or keys and values, if it makes so many."""
SIDE_BY_SIDE = {
    "BloomAttention": "query_key_value",
    "DisentangledSelfAttention": "in_proj",
    "GPTNeoXAttention": "query_key_value",
    "GPTNeoXJapaneseAttention": "query_key_value",
    "PersimmonAttention": "query_key_value",
}
"""Layers that make q, k and v of the first head, then of the next, by classes of transformers."""

HEADS = ("n_local_heads", "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
KEY_HEADS = ("n_local_kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "key_value_proj_dim")
"""Attributes of modules, and of their ``config``, with the number of heads, that of keys' heads, and a head's rows."""


def stored_transposed(o: Owner) -> bool:
    """Return True if the weight is known to be stored (in, out).

    These are transformers' ``Conv1D`` (GPT-2), its stacks of experts that say ``is_transposed`` (GPT-OSS, Llama-4,
    Aria), and transposed convolutions, which are flattened to (in, out times kernel).
    """
    if o.attr == "weight" and issubclass(o.cls, nn.modules.conv._ConvTransposeNd):
        return o.p.ndim >= 4
    if o.p.ndim == 3:
        return read(o.module, "is_transposed") is True or o.kind in EXPERTS_IN_OUT
    return o.conv1d


def fused(o: Owner, rows: int) -> Split:
    """Return the number of equal pieces, or the sizes of pieces, into which ``rows`` outputs divide.

    It is 1 where a layer's outputs are known to take turns, and None where nothing is known.
    """
    p = o.p
    if o.in_proj:
        return 3
    if o.gated:
        return 4 if issubclass(o.cls, (nn.LSTM, nn.LSTMCell)) else 3
    if p.ndim == 3 and o.attr == "gate_up_proj":
        apart = read(o.module, "is_concatenated") is True and read(o.module, "has_gate") is True
        return 2 if apart or o.kind in GATE_THEN_UP else None
    if not o.around or p.ndim != 2 or o.attr != "weight":
        return None
    if o.conv1d and o.last == "c_attn" and p.shape[1] in (2 * p.shape[0], 3 * p.shape[0]):
        return p.shape[1] // p.shape[0]
    if not o.linear:
        return None
    if o.kind == "DeepseekV4GroupedLinear":  # block diagonal: each group of rows has inputs of its own
        return _first([o.module], ["n_groups"])
    holder, cls = o.around[0], type(o.around[0])
    if o.last == "gate_up_proj":
        return 2 if read(read(holder, "down_proj"), "in_features") == rows // 2 else None
    names = (cls.__name__, f"{cls.__module__}.{cls.__name__}")
    of_all = o.last == "qkv" and rows == 3 * p.shape[1] and cls.__module__.startswith("transformers.models.")
    rule = next((FUSED[name, o.last] for name in names if (name, o.last) in FUSED), 3 if of_all else None)
    if rule != "grouped":
        return rule
    head, shared = read(holder, "head_dim"), read(holder, "num_key_value_heads")
    if not (isinstance(head, int) and isinstance(shared, int)):
        return None
    sizes = (rows - 2 * head * shared, head * shared, head * shared)
    return 3 if len(set(sizes)) == 1 else sizes


class Layouts:
    """The layout of the matrix method's weights: from their modules, and from patterns that a user gave."""

    def __init__(
        self,
        split_fused: bool,
        transposed: Sequence[str],
        split: Mapping[str, int | Sequence[int]],
        heads: bool | Mapping[str, int],
        names: Sequence[str],
    ) -> None:
        check("split_fused", split_fused, FLAG)
        if not isinstance(split, Mapping):
            raise TypeError(f'Invalid split={split!r}: must be pieces by pattern of names, as {{"*.qkv.weight": 3}}.')
        if not isinstance(heads, (bool, Mapping)):
            raise TypeError(
                f'Invalid heads={heads!r}: must be True, False or numbers by pattern of names, as {{"*.q.weight": 12}}.'
            )
        told = heads if isinstance(heads, Mapping) else {}
        self._split_fused, self._by_heads = split_fused, heads is not False
        self._transposed = quoted("transposed", transposed, names)
        self._split = quoted("split", split, names)
        self._heads = quoted("heads", told, names)
        self._pieces = {quote: _pieces(pattern, split[pattern]) for quote, pattern in self._split.items()}
        self._counts: dict[str | None, int] = {q: _number(pattern, told[pattern]) for q, pattern in self._heads.items()}
        self._unused = {*self._transposed, *self._split, *self._heads}
        self._suspects: list[tuple[str, str]] = []
        """Weights that stay whole, though they look like q, k and v in one, and the part of the name that says so."""

    def of(self, owners: Sequence[Owner], route: Route, rank: Rank) -> Route:
        """Return the route of a matrix weight with its layout, its rank, and the reason that says so.

        Raises:
            ValueError: a pattern splits the weight, or divides it by heads, as its output dimension does not divide.
        """
        p = owners[0].p
        told_by = (self._transposed, self._split, self._heads)
        in_out, by_hand, counted = (first_match(patterns, owners) for patterns in told_by)
        self._unused -= {in_out, by_hand, counted}
        transposed = in_out is not None or any(map(stored_transposed, owners))
        shape = MatrixShape.of(p, transposed)
        rows, cols = shape.rows, shape.cols
        known = None
        if by_hand is None and (self._split_fused or self._counts.get(counted, 1) > 1):
            known = next((found for o in owners if (found := fused(o, rows))), None)
        split = self._pieces[by_hand] if by_hand is not None else None if known == 1 else known
        sizes = [piece.rows for piece in shape.pieces(split)]
        why = "a piece would be 1x1" if cols == 1 and min(sizes) == 1 else None
        if sum(sizes) != rows or min(sizes) < 1:
            why = f"its output dimension is {rows}"
        if split is not None and p.ndim > 3:
            why = "it is a convolution, which stays whole"
        if why:
            if by_hand is not None:
                raise ValueError(
                    f"{by_hand}: {split!r} does not fit {route.names[0]!r} of shape {route.shape}: {why}; give a "
                    "number that divides it, or sizes that add up to it."
                )
            split, sizes = None, [rows]
        note = "; stored (in, out)" if transposed else ""
        if split is not None:
            note += "; split into " + ("+".join(map(str, split)) if isinstance(split, tuple) else str(split))
        tall = p.ndim == 2 and rows == 3 * cols
        called = [_called(o) for o in owners if o.linear or o.conv1d or (tall and o.attr != "weight")]
        unsplit = split is None and by_hand is None and any(map(NAMED_AS_FUSED.fullmatch, called))
        divided: list[int] = []
        words, told = "", self._counts.get(counted)
        try:
            if told != 1 and (told or self._by_heads):
                if told and known == 1:
                    raise NotByHeads("its q, k and v take turns, so it stays whole")
                divided, words = by_heads(owners, transposed, sizes, told, unsplit)
        except NotByHeads as why:
            words = f"; not by heads: {why}"
            if told:
                raise ValueError(
                    f"{counted}: {told} heads do not fit {route.names[0]!r} of shape {route.shape}: {why}. Give a "
                    "number that divides them, or 1 for a weight that stays as it is."
                ) from None
        if divided:
            split = tuple(divided) if len({*divided}) > 1 else None if len(divided) == 1 else len(divided)
        elif unsplit and self._split_fused:
            note += "; whole, though named as fused (split= takes consecutive pieces)"
            suspect = next(filter(QKV.fullmatch, called), None)
            if suspect is not None and tall and known is None and not route.frozen:
                self._suspects.append((route.names[0], suspect))
        note += words
        told_so = (issubclass(o.cls, nn.Bilinear) or read(o.module, "is_transposed") is False for o in owners)
        if p.ndim == 3 and not transposed and not any(told_so):
            note += "; each read as (out, in) (transposed= reads it as (in, out))"
        ranks = tuple(effective_rank(rank, piece.m, piece.n) for piece in shape.pieces(split))
        one = ranks[0] if len(set(ranks)) == 1 else ranks
        return replace(route, rank=one, reason=route.reason + note, transposed=transposed, split=split)

    def finish(self) -> str | None:
        """Return a warning of weights that look like q, k and v in one, or None.

        Raises:
            ValueError: a pattern of transposed, split or heads matched no weight of the matrix method.
        """
        if self._unused:
            raise ValueError(
                f"{min(self._unused)} matches no weight that goes to the matrix method; drop it, or name the weights "
                "with matrix=[...] too."
            )
        if not self._suspects:
            return None
        name, part = self._suspects[0]
        place = f"{name.lower()}.".rfind(f".{part}.")
        pattern = name if place < 0 else f"*{name[place:]}"  # of all blocks
        return (
            f"{name!r}{' and others look' if len(self._suspects) > 1 else ' looks'} like q, k and v in one weight, "
            "which is stepped as one matrix and ends higher (docs/findings.md, fused weights). If the rows are those "
            f"of q, then k, then v, give split={{{pattern!r}: 3}}, and heads={{{pattern!r}: number of heads}} unless "
            f"the module states it; else split={{{pattern!r}: 1}}."
        )


def _number(pattern: str, value: int) -> int:
    number = plain(value)
    if type(number) is not int or number < 1:
        raise ValueError(f"Invalid heads[{pattern!r}]={value!r}: must be a number of heads, at least 1.")
    return number


def _pieces(pattern: str, value: int | Sequence[int]) -> Split:
    """Return the split that a pattern gives, None for 1; ValueError for what is none."""
    split = plain(value)
    sizes = split if isinstance(split, tuple) else (split,)
    if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        raise ValueError(
            f"Invalid split[{pattern!r}]={value!r}: must be a number of equal pieces, at least 1, or their sizes."
        )
    return None if split == 1 else split


class NotByHeads(Exception):
    """Says why a weight is not divided by heads."""


def by_heads(
    owners: Sequence[Owner], transposed: bool, sizes: Sequence[int], told: int | None, unsplit: bool
) -> tuple[list[int], str]:
    """Divide the queries and keys of a weight, stored (in, out) if ``transposed``, by heads.

    ``sizes`` are the rows of its pieces, and ``told`` is the number of heads of the first one, None if modules state
    it. A weight is ``unsplit`` if its name is that of several matrices and it is read as one. Returns the rows of all
    pieces and a note for the table, or none and "" if no piece makes queries or keys. Raises NotByHeads if no number
    fits.
    """
    o, letters = next(((o, roles) for o in owners if (roles := _roles(o, len(sizes)))), (owners[0], ""))
    if told is None and not letters:
        return [], ""
    if o.p.ndim > 3:
        raise NotByHeads("it is a convolution, which stays whole")
    if not letters and len(sizes) > 1:
        raise NotByHeads(
            f"its name does not say which of its {len(sizes)} pieces are queries and keys, so give split= the rows of "
            "every head, and of the values, in place of heads="
        )
    if not letters and unsplit:
        raise NotByHeads(
            "which of its rows are queries and keys is not known, so give split=: 3 for q, k and v one after another, "
            "2 for k and v, or all sizes"
        )
    of_which = {"*": "q, k and v ", "qkv": "q and k ", "kv": "k "}.get(letters, "")
    pieces = [*zip(letters or "q", sizes, strict=True)]
    if letters == "*":
        third, rest = divmod(sizes[0], 3)
        pieces = [("q", third), ("k", third), ("v", third + rest)]
    rows = {role: size for role, size in pieces if role != "v" or letters == "*"}
    first = pieces[0][0]
    if told:
        width, rest = divmod(rows[first], told)
        if rest:
            raise NotByHeads(f"{told} heads do not divide the {rows[first]} rows{f' of {first}' * (len(rows) > 1)}")
        counts = {role: size // width for role, size in rows.items()}
    else:
        counts, width = _stated(o, transposed, rows)
    for role, size in rows.items():
        if counts[role] * width != size:
            heads = f"{counts[role]} × {width}" if counts[role] else f"heads of {width} rows"
            raise NotByHeads(f"{heads} are not the {size} rows{f' of {role}' * (len(rows) > 1)}")
    if width < 2:
        raise NotByHeads(f"each of {counts[first]} would be one row")
    divided: list[int] = []
    for role, size in pieces:
        divided += [width] * counts[role] if role in rows else [size]
    numbers = dict.fromkeys(str(counts[role]) for role in rows)  # of keys there may be fewer
    return divided, f"; {of_which}by heads: {' and '.join(numbers)} × {width}"


def _roles(o: Owner, count: int) -> str:
    """Return a letter for each of ``count`` pieces of a weight, as "qkv"; "" where none makes queries or keys.

    "*" is one that makes all three, head by head.
    """
    layer, name = o.attr == "weight" and o.last, _called(o)
    if count == 1 and name == SIDE_BY_SIDE.get(type(_holders(o)[0]).__name__):
        return "*"
    if count == 1:
        named = PROJECTION.fullmatch(name)
        if named is None or o.p.ndim > 3 or (not layer and name == named[1]):  # a parameter q may be a table of queries
            return ""
        role = named[1][0]
        return role if role == "q" or _rows_beside(o, "q", False) else ""  # RWKV's key is no attention's
    fused = {2: (KV, "kv"), 3: (QKV, "qkv")}.get(count)
    return fused[1] if fused and (o.in_proj or fused[0].fullmatch(name)) else ""


def _called(o: Owner) -> str:
    """Return the name of a layer, or of a parameter that its module multiplies itself."""
    return o.last if o.attr == "weight" and o.last else o.attr


def _stated(o: Owner, transposed: bool, rows: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the numbers of heads and a head's rows as modules state them."""
    queries, keys, width = (_first(_holders(o), names) for names in (HEADS, KEY_HEADS, WIDTHS))
    of_both = [_first(_holders(o), [name]) for name in ("n_head", "n_local_heads")]
    if keys is None and None not in of_both:
        queries, keys = of_both  # gpt-fast's: in Llama's own code, which has no n_head, both are of queries
    if queries is None:
        raise NotByHeads("their number is not known (heads= tells it)")
    counts = {"q": queries, "k": keys or queries, "v": queries}
    if width is None:
        known = {role: rows.get(role) or _rows_beside(o, role, transposed) for role in "qk"}
        if known["q"] is None or not (o.in_proj or o.linear or transposed) or o.p.ndim != 2:
            raise NotByHeads("a head's rows are not known (heads= tells the number of heads)")
        if known["q"] % queries or (known["k"] is not None and known["k"] * queries != known["q"] * counts["k"]):
            of_keys = "" if known["k"] is None else f", and {counts['k']} of {known['k']} rows of k, of one size"
            raise NotByHeads(f"there are no {queries} of {known['q']} rows of q{of_keys}")
        width = known["q"] // queries
    return counts, width


def _holders(o: Owner) -> Sequence[nn.Module]:
    """Return the module that holds a projection, and the one that holds that."""
    return (o.around if o.attr == "weight" and o.around else (o.module, *o.around))[:2]


def _first(modules: Sequence[nn.Module], names: Sequence[str]) -> int | None:
    """Return the first positive integer that a module, or its ``config``, has under one of these names."""
    for source in (source for module in modules for source in (module, read(module, "config"))):
        for name in names:
            value = plain(read(source, name))
            if type(value) is int and value > 0:
                return value
    return None


def _rows_beside(o: Owner, role: str, transposed: bool) -> int | None:
    """Return the rows of the first projection of this role that lies beside this one, itself among them."""
    holder = _holders(o)[0]
    for name in (*holder._modules, *holder._parameters):
        named = PROJECTION.fullmatch(name.lower())
        if named is not None and named[1][0] == role:
            weight = read(read(holder, name), "weight") if name in holder._modules else read(holder, name)
            if isinstance(weight, Tensor) and weight.ndim > 1:
                return weight.shape[-1 if transposed else -2]
    return None
