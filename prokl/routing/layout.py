"""Tell how weights are stored: (in, out) or (out, in), and which are several matrices on top of each other.

Only what is certain from the module: its class, its own settings, or a name that stands for one layout wherever it is
used. Interleaved pieces (Falcon's query_key_value by head, GPT-OSS's gate_up_proj by column) stay one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor, nn

from prokl.algorithm.settings import FLAG, check, plain
from prokl.algorithm.shapes import MatrixShape, Rank, Split, effective_rank
from prokl.routing.attention import KV, QKV, NotByHeads, divided, roles
from prokl.routing.patterns import first_match, quoted
from prokl.routing.routes import Route
from prokl.routing.rules import Owner

BY_HEADS = True
"""True if query and key projections divide by heads where nothing else is told."""
EXPERTS_IN_OUT = {"GptOssExperts", "Llama4TextExperts"}
"""Classes of transformers whose stacks are (expert, in, out)."""


def _query_key_value(attention: nn.Module, rows: int) -> Split:
    """Return the sizes of q, k and v where queries have heads of their own (grouped-query attention)."""
    head, shared = getattr(attention, "head_dim", None), getattr(attention, "num_key_value_heads", None)
    if not (isinstance(head, int) and isinstance(shared, int)) or not 0 < 2 * head * shared < rows:
        return None
    sizes = (rows - 2 * head * shared, head * shared, head * shared)
    return 3 if len(set(sizes)) == 1 else sizes


def _thirds(_: nn.Module, rows: int) -> Split:
    return 3


def _halves(_: nn.Module, rows: int) -> Split:
    return 2


def _halves_beside_down(mlp: nn.Module, rows: int) -> Split:
    return 2 if getattr(getattr(mlp, "down_proj", None), "in_features", None) == rows // 2 else None


FUSED: dict[tuple[str, str], Callable[[nn.Module, int], Split]] = {
    ("ModernBertAttention", "wqkv"): _thirds,
    ("ModernBertMLP", "wi"): _halves,
    ("ModernBertDecoderMLP", "wi"): _halves,
    ("MptAttention", "wqkv"): _thirds,
    ("DbrxAttention", "wqkv"): _query_key_value,
    ("Phi3Attention", "qkv_proj"): _query_key_value,
    ("Phi4MultimodalAttention", "qkv_proj"): _query_key_value,
    ("timm.layers.attention.Attention", "qkv"): _thirds,
    ("timm.models.swin_transformer.WindowAttention", "qkv"): _thirds,
}
"""(class of the module, its linear layer) -> how the layer's outputs divide; with the file of a common class name."""
NAMED_AS_FUSED = re.compile(r"(\w+_)?(w?qkv|w?kv|c_attn|gate_up|up_gate|w12|w13)(_proj)?|query_key_value")
"""Modules whose outputs are several matrices as a rule, mostly one after another."""


def stored_transposed(p: Tensor, o: Owner) -> bool:
    """Return True if the weight is known to be stored (in, out).

    These are transformers' ``Conv1D`` (GPT-2), its stacks of experts that say ``is_transposed`` (GPT-OSS, Llama-4,
    Aria), and transposed convolutions, which are flattened to (in, out times kernel).
    """
    if o.attr == "weight" and isinstance(o.module, nn.modules.conv._ConvTransposeNd):
        return p.ndim >= 4
    if p.ndim == 3:
        return getattr(o.module, "is_transposed", None) is True or o.kind in EXPERTS_IN_OUT
    return is_conv1d(p, o)


def is_conv1d(p: Tensor, o: Owner) -> bool:
    """Return True for the weight, (in, out), of transformers' ``Conv1D`` or a copy of it: a linear layer."""
    named = any(cls.__name__ == "Conv1D" for cls in type(o.module).__mro__)
    return named and o.attr == "weight" and p.ndim == 2 and p.shape[1] == getattr(o.module, "nf", None)


def fused(p: Tensor, o: Owner, transposed: bool) -> Split:
    """Return into how many equal pieces, or into pieces of what sizes, the output dimension divides; None for one."""
    rows = p.shape[-1] if transposed else p.shape[-2]
    if o.in_proj:
        return 3
    if o.gated:
        return 4 if isinstance(o.module, (nn.LSTM, nn.LSTMCell)) else 3
    if p.ndim == 3 and o.attr == "gate_up_proj":
        apart = getattr(o.module, "is_concatenated", None) is True and getattr(o.module, "has_gate", None) is True
        return 2 if apart or o.kind == "Llama4TextExperts" else None
    if not o.around or p.ndim != 2 or o.attr != "weight":
        return None
    if is_conv1d(p, o) and o.path[-1] == "c_attn" and p.shape[1] in (2 * p.shape[0], 3 * p.shape[0]):
        return p.shape[1] // p.shape[0]
    if not o.linear:
        return None
    if o.path[-1] == "gate_up_proj":
        return _halves_beside_down(o.around[0], rows)
    cls = type(o.around[0])
    names = (cls.__name__, f"{cls.__module__}.{cls.__name__}")
    rule = next((FUSED[name, o.path[-1]] for name in names if (name, o.path[-1]) in FUSED), None)
    return rule(o.around[0], rows) if rule else None


def pieces(p: Tensor, transposed: bool, split: Split) -> tuple[MatrixShape, ...]:
    """Return the matrices that a weight is read as, each (out, in).

    Raises:
        ValueError: the output dimension does not divide so.
    """
    if split is not None and p.ndim > 3:
        raise ValueError("it is a convolution, which stays whole")
    unsplit = MatrixShape.of(p, transposed)
    shapes = unsplit.pieces(split)
    if sum(shape.rows for shape in shapes) != unsplit.rows or min(shape.rows for shape in shapes) < 1:
        raise ValueError(f"its output dimension is {unsplit.rows}")
    return shapes


class Readings:
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
        self._split_fused, self._by_heads = split_fused, BY_HEADS if isinstance(heads, Mapping) else heads
        self._transposed = quoted("transposed", transposed, names)
        self._split = quoted("split", split, names)
        self._heads = quoted("heads", told, names)
        self._by_hand = {f"split={pattern!r}": _checked(pattern, value) for pattern, value in split.items()}
        self._told: dict[str | None, int] = {
            f"heads={pattern!r}": _number(pattern, value) for pattern, value in told.items()
        }
        self._unused = {*self._transposed, *self._split, *self._heads}
        self.fused: list[tuple[str, str]] = []
        """Weights, and their modules' last names, that stay whole, though both look like q, k and v in one."""

    def of(self, p: Tensor, owners: Sequence[Owner], route: Route, rank: Rank) -> Route:
        """Return the route of a matrix weight with its reading, its rank, and the reason that says so.

        Raises:
            ValueError: a pattern splits the weight, or divides it by heads, as its output dimension does not divide.
        """
        told_by = (self._transposed, self._split, self._heads)
        in_out, by_hand, counted = (first_match(patterns, owners) for patterns in told_by)
        self._unused -= {in_out, by_hand, counted}
        transposed = in_out is not None or any(stored_transposed(p, o) for o in owners)
        split: Split = None
        if by_hand is not None:
            split = self._by_hand[by_hand]
        elif self._split_fused or self._told.get(counted, 1) > 1:
            split = next((fused_split for o in owners if (fused_split := fused(p, o, transposed))), None)
        try:
            shapes = pieces(p, transposed, split)
            if any(shape.n == 1 for shape in shapes):
                raise ValueError("a piece would be 1x1")
        except ValueError as error:
            if by_hand is not None:
                raise ValueError(
                    f"{by_hand}: {self._by_hand[by_hand]!r} does not fit {route.names[0]!r} of shape {route.shape}: "
                    f"{error}; give a number that divides it, or sizes that add up to it."
                ) from None
            split, shapes = None, pieces(p, transposed, None)
        note = "; stored (in, out)" if transposed else ""
        unsplit = split is None and by_hand is None and any(_named_as_fused(p, o) for o in owners)
        if split is not None:
            note += "; split into " + ("+".join(map(str, split)) if isinstance(split, tuple) else str(split))
        rows = [shape.rows for shape in shapes]
        sizes, of_heads = self._heads_of(p, owners, transposed, rows, counted, unsplit)
        if sizes is not None:
            split = tuple(sizes) if len({*sizes}) > 1 else None if len(sizes) == 1 else len(sizes)
            shapes = pieces(p, transposed, split)
        elif unsplit and self._split_fused:
            note += "; whole, though named as fused (split= takes consecutive pieces)"
            module = next((o.path[-1] for o in owners if o.path and QKV.fullmatch(o.path[-1])), None)
            if module is not None and shapes[0].rows == 3 * shapes[0].cols and not route.frozen:
                self.fused.append((route.names[0], module))
        note += of_heads
        if p.ndim == 3 and not transposed and not any(_says_how_stored(o) for o in owners):
            note += "; each read as (out, in) (transposed= reads it as (in, out))"
        ranks = tuple(effective_rank(rank, shape.m, shape.n) for shape in shapes)
        return replace(
            route,
            rank=ranks[0] if len(set(ranks)) == 1 else ranks,
            reason=route.reason + note,
            transposed=transposed,
            split=split,
        )

    def _heads_of(
        self,
        p: Tensor,
        owners: Sequence[Owner],
        transposed: bool,
        sizes: Sequence[int],
        counted: str | None,
        unsplit: bool,
    ) -> tuple[list[int] | None, str]:
        """Return the rows of all pieces where queries or keys divide by heads, and what the table says of them.

        Raises:
            ValueError: a number that was told does not fit.
        """
        told = self._told.get(counted)
        if told == 1 or (told is None and not self._by_heads):
            return None, ""
        o, letters = next(((o, found) for o in owners if (found := roles(p, o, len(sizes)))), (owners[0], ""))
        if told is None and not letters:
            return None, ""
        try:
            if p.ndim > 3:
                raise NotByHeads("it is a convolution, which stays whole")
            if not letters and unsplit and counted is not None:
                pattern, name = counted.removeprefix("heads="), owners[0].name
                count = 2 if KV.fullmatch(owners[0].path[-1]) and not QKV.fullmatch(owners[0].path[-1]) else 3
                holds = "q, k and v" if count == 3 else "k and v"
                raise ValueError(
                    f"{counted}: {name!r} of shape {tuple(p.shape)} is read as one matrix, whose {told} heads "
                    f"cannot be told from the rest. If it holds {holds} one after another, add "
                    f"split={{{pattern}: {count}}}; if they have other sizes, give these."
                )
            if not letters and (unsplit or len(sizes) > 1):
                raise NotByHeads("which of its pieces are queries and keys is not known, so give all sizes in split=")
            rows, words = divided(p, o, transposed, letters, sizes, told)
        except NotByHeads as why:
            if counted is None:
                return None, f"; not by heads: {why}"
            raise ValueError(
                f"{counted}: {told} heads do not fit {owners[0].name!r} of shape {tuple(p.shape)}: {why}; give a "
                "number that divides them, or 1 for a weight that stays as it is."
            ) from None
        of_which = {"*": "q, k and v ", "qkv": "q and k ", "kv": "k "}.get(letters, "")
        return rows, f"; {of_which}by heads: {words}"

    def check_used(self) -> None:
        """Raise ValueError for a pattern of transposed, split or heads that matched no weight of the matrix method."""
        if self._unused:
            raise ValueError(
                f"{min(self._unused)} matches no weight that goes to the matrix method; drop it, or name the weights "
                "with matrix=[...] too."
            )


def _number(pattern: str, value: int) -> int:
    number = plain(value)
    if type(number) is not int or number < 1:
        raise ValueError(f"Invalid heads[{pattern!r}]={value!r}: must be a number of heads, at least 1.")
    return number


def _says_how_stored(o: Owner) -> bool:
    return isinstance(o.module, nn.Bilinear) or getattr(o.module, "is_transposed", None) is False


def _named_as_fused(p: Tensor, o: Owner) -> bool:
    linear = o.linear or is_conv1d(p, o)
    return linear and bool(o.path) and NAMED_AS_FUSED.fullmatch(o.path[-1]) is not None


def _checked(pattern: str, value: int | Sequence[int]) -> Split:
    """Return a division as told by hand, 1 as None."""
    split = plain(value)
    sizes = (split,) if isinstance(split, int) else split if isinstance(split, tuple) else ()
    if not sizes or not all(type(size) is int and size >= 1 for size in sizes):
        raise ValueError(
            f"Invalid split[{pattern!r}]={value!r}: must be a number of equal pieces, at least 1, or their sizes."
        )
    return sizes if not isinstance(split, int) else None if split == 1 else split
