"""The rules of :func:`prokl.param_groups`: where a parameter goes, by patterns, by its module or by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from prokl.algorithm.names import unwrapped_name
from prokl.algorithm.settings import ADAMW_BOUNDS, check, plain
from prokl.algorithm.shapes import PARAMETER_DTYPES, MatrixShape
from prokl.routing.owners import GAINS, Owner, asked, read
from prokl.routing.routes import Algorithm, Route

TABLE = re.compile(r"embed|pos_?emb|(^|_)(positional|position|pos|token|tok|emb|wpe|wte)s?(_|\d|$)")
BIAS = re.compile(r"(^|_)bias(es)?(_|$)")
ELEMENTWISE = re.compile(
    r"(^|_)logs?(_|$)|(^|_)(a|lambda)s?_(re|im|real|imag)$|(^|_)(decay|scale|gain|gamma|temperature|mask)s?$"
    r"|^time_(first|faaaa|mix_\w+|maa_[a-z])$"
)
"""Names of parameters that act element by element: Mamba's A_log, S4D's log_A_real and A_imag, RWKV's time_decay and
time_faaaa, scales of heads."""
ONE_IN_3D = {"XLNetRelativeAttention", "FunnelRelMultiheadAttention"}
"""Classes of transformers with matrices in three dimensions, (in, heads, rows of a head), which are no stacks."""
Own = tuple[tuple[str, Any], ...]
"""Settings of a parameter's own, by name."""


def quoted(argument: str, patterns: str | Iterable[str], names: Sequence[str]) -> dict[str, str]:
    """Check that every pattern matches a name, and return each under the words that quote it.

    Raises:
        TypeError: a pattern is no string.
        ValueError: a pattern matches no name.
    """
    if not isinstance(patterns, Iterable):
        raise TypeError(f'Invalid {argument}={patterns!r}: must be patterns of names, as in {argument}=["*.router.*"].')
    by_quote = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not isinstance(pattern, str):
            got = f"a {type(pattern).__name__}" if isinstance(pattern, (Tensor, nn.Module)) else repr(pattern)
            raise TypeError(f"{argument} must hold patterns of names, got {got}; pass names, which are strings.")
        if not any(_matches(pattern, name) for name in names):
            raise ValueError(f"{argument}={pattern!r} matches no parameter; {_hint(pattern, names)}.")
        by_quote[f"{argument}={pattern!r}"] = pattern
    return by_quote


def first_match(patterns: Mapping[str, str], owners: Sequence[Owner]) -> str | None:
    """Return the first pattern that matches one of a parameter's names, as messages quote it; None if none does."""
    return next((q for q, pattern in patterns.items() if any(_matches(pattern, o.name) for o in owners)), None)


def _matches(pattern: str, name: str) -> bool:
    bare = unwrapped_name(name)
    return pattern in (name, bare) or fnmatchcase(name, pattern) or fnmatchcase(bare, pattern)


def _hint(pattern: str, names: Sequence[str]) -> str:
    """Return the pattern that was meant: a regular expression's, an index's, or that of a part of names."""
    plain = re.sub(r"\[(\d+)\]", r".\1", pattern.strip("^$").replace(".*", "*").replace("\\.", "."))
    forms = [form for text in (plain, unwrapped_name(plain)) for form in (text, f"*.{text}", f"{text}.*")]
    for form in (*forms, f"*.{plain}.*", f"*{plain}", f"*{plain}*"):
        count = sum(_matches(form, name) for name in names)
        if count and form.strip("*."):
            why = "patterns are fnmatch's, of names as PyTorch has them"
            why = "patterns match whole names" if pattern in form else why
            return f"{why}, and {form!r} matches {count}"
    lower = {name.lower(): name for name in names}
    nearest = get_close_matches(plain.lower(), lower, n=1, cutoff=0.8)
    return f"the nearest name is {lower[nearest[0]]!r}" if nearest else "model.named_parameters() has the names"


def overruled(
    ruled: Route, owners: Sequence[Owner], matrix: Mapping[str, str], adamw: Mapping[str, str], names: bool
) -> Route:
    """Return the route of a parameter by rules 1 and 2, or else as the others have ruled."""
    p, name, why = owners[0].p, owners[0].name, untrainable(owners)
    if not p.requires_grad:
        if not names or why or p.is_meta or 0 in (p.stride(i) for i, size in enumerate(p.shape) if size > 1):
            reason = "requires_grad is False" + ("" if names else "; add it once it trains")
            return replace(ruled, algorithm="frozen", reason=reason, decays=True, head=False)
    if why:
        raise ValueError(f"Parameter {name!r} can go to neither the matrix method nor AdamW: {why}.")
    to_matrix, to_adamw = (first_match(patterns, owners) for patterns in (matrix, adamw))
    if to_matrix is not None and to_adamw is not None:
        raise ValueError(f"Parameter {name!r} matches {to_matrix} and {to_adamw}; narrow one of the two patterns.")
    if to_adamw is not None:  # norms, gains and marked ones have no weight decay, whoever sends them there
        return replace(ruled, algorithm="adamw", reason=to_adamw)
    if to_matrix is None:
        return ruled
    if why := unfit(p):
        raise ValueError(
            f"{to_matrix} matches {name!r} of shape {tuple(p.shape)}, which the matrix method cannot take "
            f"({why}); narrow the pattern and leave this parameter to AdamW."
        )
    if own := own_settings(p, name):
        raise ValueError(
            f"{to_matrix} matches {name!r}, whose _optim={dict(own)!r} has settings of AdamW's, which the matrix "
            "method does not take: narrow the pattern, or remove them before making the groups, del parameter._optim."
        )
    return replace(ruled, algorithm="matrix", reason=to_matrix, decays=True, head=False)


def untrainable(owners: Sequence[Owner]) -> str | None:
    """Return why neither method can train a parameter, and the remedy; None where one can."""
    p = owners[0].p
    if p.layout != torch.strided:
        return f"its layout is {p.layout}; store it dense, or freeze it"
    if not p.is_complex() and p.dtype not in PARAMETER_DTYPES:
        return f"its dtype is {p.dtype}; store it as float16, bfloat16, float32 or float64, or freeze it"
    if any(o.embedding and read(o.module, "sparse") for o in owners):
        return "its embedding makes sparse gradients; build it with sparse=False, or freeze it"
    return None


def unfit(p: Tensor) -> str | None:
    """Return why the matrix method cannot take ``p``; None when it can."""
    if p.is_complex():
        return "complex"
    if p.ndim < 2:
        return f"{p.ndim}-D"
    if p.numel() == 0:
        return "no elements"
    return "1x1 matrices only" if MatrixShape.of(p).n == 1 else None


def choose(owners: Sequence[Owner], head: str | None) -> Route:
    """Return the route where no pattern decides: rules 3 to 14 of :func:`prokl.param_groups`.

    ``head`` says why it is an output head, None where it is none.
    """
    p = owners[0].p

    def to(algorithm: Algorithm, reason: str, decays: bool = True, head: bool = False) -> Route:
        names = tuple(o.name for o in owners)
        frozen = not p.requires_grad
        return Route(names, tuple(p.shape), algorithm, None, reason, frozen=frozen, head=head, decays=decays)

    def first(test: Callable[[Owner], bool]) -> Owner | None:
        return next((o for o in owners if test(o)), None)

    what = f"{owners[0].written} of {owners[0].kind}"
    if why := unfit(p):
        return to("adamw", f"{why}, {what}", decays=p.is_complex() and p.ndim >= 2)
    if getattr(p, "_no_weight_decay", False):
        return to("adamw", f"marked _no_weight_decay, {what}", decays=False)
    if p.__dict__.get("_optim"):
        return to("adamw", f"has settings of its own, {what}")
    if first(lambda o: o.attr != "weight" and o.says(ELEMENTWISE)):
        return to("adamw", f"acts element by element by its name, {what}", decays=False)
    if first(lambda o: o.attr in GAINS) and MatrixShape.of(p).m == 1:
        return to("adamw", f"gain of weight norm, {what}", decays=False)
    if first(lambda o: o.reflections):
        return to("adamw", f"Householder vectors, with signs that must not move, {what}", decays=False)
    if o := first(lambda o: o.embedding):
        tied = ", ".join(other.name for other in owners if not other.embedding)
        reason = f"{tied} tied to embedding {o.name}" if tied else f"embedding ({o.kind})"
        return to("adamw", reason, head=any(other.linear for other in owners))
    if o := first(lambda o: o.norm):
        return to("adamw", f"norm ({o.kind})", decays=False)
    if first(lambda o: o.says(TABLE)):
        return to("adamw", "named as embedding, position or token")
    if first(lambda o: o.says(BIAS)):
        return to("adamw", "named as bias", decays=False)
    if head is not None:
        return to("adamw", head, head=True)
    shape, convolution = MatrixShape.of(p), first(lambda o: o.convolution)
    if shape.m == 1 and all(o.raw for o in owners):
        return to("adamw", f"one row or column, {what}", decays=False)
    if p.ndim == 3 and (o := convolution or first(lambda o: o.kind in ONE_IN_3D)):
        return to("adamw", f"3-D weight of {o.kind}, which would be read as a stack of {shape.count}")
    if shape.m == 1:
        return to("adamw", f"one row or column, {what}")
    if p.ndim == 2 and (o := first(lambda o: o.linear)):
        return to("matrix", "linear layer" if issubclass(o.cls, nn.Linear) else f"linear layer ({o.kind})")
    if p.ndim > 3:
        flattened = f"convolution, flattened to {shape.rows}x{shape.cols}"
        return to("matrix", flattened) if convolution else to("adamw", f"{p.ndim}-D, {what}, which is no convolution")
    if first(lambda o: o.in_proj):
        return to("matrix", "q, k and v of MultiheadAttention, fused")
    if o := first(lambda o: o.recurrent):
        return to("matrix", f"{o.written} of {o.kind}" + (", gates fused" if o.gated else ""))
    if p.ndim == 3:
        return to("matrix", f"stack of {shape.count}, {what}")
    own = all(o.container or not (o.conv1d or o.cls.__module__.startswith("torch.nn.")) for o in owners)
    guess = ", taken for a factor of products (adamw= if it acts element by element)" if own else ""
    return to("matrix", f"2-D, {what}{guess}")


def own_settings(p: Tensor, name: str) -> Own:
    """Return the settings of AdamW that a parameter has in ``_optim``, as S4's layers do, but for those of None.

    Raises:
        ValueError: one is out of bounds or none of AdamW's.
    """
    marked = p.__dict__.get("_optim")
    if not isinstance(marked, Mapping):
        return ()
    own = {key: plain(value) for key, value in marked.items() if value is not None}
    for key, value in own.items():
        if key not in ADAMW_BOUNDS:
            raise ValueError(
                f"Invalid _optim={dict(marked)!r} of {name!r}: {key!r} is none of {', '.join(ADAMW_BOUNDS)}; remove it."
            )
        check(f"_optim[{key!r}] of {name!r}", value, ADAMW_BOUNDS[key])
    return tuple(sorted(own.items()))


def undecayed(model: nn.Module) -> dict[str, str]:
    """Return the parameters that a mark or a module around them says not to decay, by name, with the mark or method."""
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        answers = [asked(module, method) for method in ("no_weight_decay", "no_weight_decay_keywords")]
        names, words = ([n for n in a if isinstance(n, str)] if isinstance(a, Iterable) else [] for a in answers)
        held = nn.Module.named_parameters(module, remove_duplicate=False)  # a model's own form may take less
        for full, p in held if not prefix or names or words else ():
            name, bare = f"{prefix}.{full}" if prefix else full, unwrapped_name(full)
            if getattr(p, "_no_weight_decay", False):
                found[name] = "_no_weight_decay"
            elif bare in names:
                found.setdefault(name, "no_weight_decay()")
            elif any(word in bare for word in words):
                found.setdefault(name, "no_weight_decay_keywords()")
    return found
