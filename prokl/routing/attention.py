"""Attention's heads: how many of them the rows of a query or key projection are, where its modules say so.

A number is taken where the module that holds the projection, or the one that holds that, states it, and its rows are
just so many heads. Nothing follows from a number that merely divides them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from prokl.algorithm.settings import plain
from prokl.routing.owners import Owner

PROJECTION = re.compile(
    r"(?:(?:to|add|linear|c)_|w_?)?(q|k|query|key|queries|keys)s?(?:_b)?(?:_(?:proj|projection|lin|linear|attn|layer|global))?(?:_weight)?"
)
"""Names of modules and parameters that make queries or keys."""
QKV, KV = re.compile(r"(\w+_)?w?qkv(_proj)?|c_attn"), re.compile(r"(\w+_)?w?kv(_proj)?|c_attn")
"""Names of layers that make queries, keys and values one after another, or keys and values, if they make so many."""
SIDE_BY_SIDE = {"BloomAttention", "GPTNeoXAttention", "GPTNeoXJapaneseAttention", "PersimmonAttention"}
"""Classes of transformers whose ``query_key_value`` makes q, k and v of the first head, then of the next."""

HEADS = ("n_local_heads", "num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
KEY_HEADS = ("n_local_kv_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
WIDTHS = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "d_head", "dim_head", "key_value_proj_dim")
"""Attributes of modules, and of their ``config``, with the number of heads, that of keys' heads, and a head's rows."""


class NotByHeads(Exception):
    """Says why a weight is not divided by heads."""


def by_heads(
    owners: Sequence[Owner], transposed: bool, sizes: Sequence[int], told: int | None, unsplit: bool
) -> tuple[list[int] | None, str]:
    """Divide the queries and keys of a weight, stored (in, out) if ``transposed``, by heads.

    ``sizes`` are the rows of its pieces, and ``told`` how many heads the first one has, None for what modules say; it
    is ``unsplit`` if its name is that of several matrices and it is one. Returns the rows of all pieces and what the
    table says: None and "" where none makes queries or keys. Raises NotByHeads where no number fits.
    """
    o, letters = next(((o, roles) for o in owners if (roles := _roles(o, len(sizes)))), (owners[0], ""))
    if told is None and not letters:
        return None, ""
    if o.p.ndim > 3:
        raise NotByHeads("it is a convolution, which stays whole")
    if not letters and (unsplit or len(sizes) > 1):
        raise NotByHeads(
            "which of its rows are queries and keys is not known, so give split=: 3 for q, k and v one after another, "
            "2 for k and v, or all sizes"
        )
    of_which = {"*": "q, k and v ", "qkv": "q and k ", "kv": "k "}.get(letters, "")
    rows = {role: size for role, size in zip(letters or "q", sizes, strict=True) if role != "v"}
    if letters == "*":
        rows = {role: sizes[0] // 3 + sizes[0] % 3 * (role == "v") for role in "qkv"}
    first = next(iter(rows))
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
    divided: list[int] = [width] * (3 * counts["q"]) if letters == "*" else []
    for role, size in zip(letters or "q", sizes, strict=True) if letters != "*" else ():
        divided += [width] * counts[role] if role in rows else [size]
    numbers = dict.fromkeys(str(counts[role]) for role in rows)  # of keys there may be fewer
    return divided, f"; {of_which}by heads: {' and '.join(numbers)} × {width}"


def _roles(o: Owner, count: int) -> str:
    """Return a letter for each of ``count`` pieces of a weight, as "qkv"; "" where none makes queries or keys.

    "*" is one that makes all three, head by head.
    """
    layer = o.attr == "weight" and o.last
    name = o.last if layer else o.attr
    if count == 1 and name == "query_key_value" and type(_holders(o)[0]).__name__ in SIDE_BY_SIDE:
        return "*"
    if count == 1:
        named = PROJECTION.fullmatch(name)
        if named is None or o.p.ndim > 3 or (not layer and name == named[1]):  # a parameter q may be a table of queries
            return ""
        role = named[1][0]
        return role if role == "q" or _rows_beside(o, "q", False) else ""  # RWKV's key is no attention's
    fused = {2: (KV, "kv"), 3: (QKV, "qkv")}.get(count)
    return fused[1] if fused and (o.in_proj or fused[0].fullmatch(name)) else ""


def _stated(o: Owner, transposed: bool, rows: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Return the numbers of heads and a head's rows as modules state them."""
    queries, keys, width = (_first(_holders(o), names) for names in (HEADS, KEY_HEADS, WIDTHS))
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
    for source in (source for module in modules for source in (module, _read(module, "config"))):
        for name in names:
            value = plain(_read(source, name))
            if type(value) is int and value > 0:
                return value
    return None


def _read(source: Any, name: str) -> Any:
    try:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    except Exception:  # the model's own code
        return None


def _rows_beside(o: Owner, role: str, transposed: bool) -> int | None:
    """Return the rows of the first projection of this role that lies beside this one, itself among them."""
    holder = _holders(o)[0]
    for name in (*holder._modules, *holder._parameters):
        named = PROJECTION.fullmatch(name.lower())
        if named is not None and named[1][0] == role:
            weight = _read(_read(holder, name), "weight") if name in holder._modules else _read(holder, name)
            if isinstance(weight, Tensor) and weight.ndim > 1:
                return weight.shape[-1 if transposed else -2]
    return None
