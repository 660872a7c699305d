"""The rules of :func:`prokl.param_groups`: who holds a parameter, what its names say, where it goes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from prokl.algorithm.names import indices_without_wrappers
from prokl.algorithm.shapes import PARAMETER_DTYPES, MatrixShape
from prokl.routing.routes import Algorithm, Route

TABLE = re.compile(r"embed|pos_?emb|(^|_)(positional|position|pos|token|tok|emb|wpe|wte)s?(_|\d|$)")
BIAS = re.compile(r"(^|_)bias(es)?(_|$)")
NORM_CLASS = re.compile(r"Norm(\dd)?$")
CONVOLUTION_CLASS = re.compile(r"Conv\w*\dd$")
ELEMENTWISE = re.compile(
    r"(^|_)logs?(_|$)|(^|_)(a|lambda)s?_(re|im|real|imag)$|(^|_)(decay|scale|gain|gamma|temperature|mask)s?$"
    r"|^time_(first|faaaa|mix_\w+|maa_[a-z])$"
)
"""Names of what acts element by element: Mamba's A_log, S4D's log_A_real and A_imag, RWKV's time_decay and time_faaaa,
scales of heads."""


@dataclass(frozen=True)
class Owner:
    """One name of a parameter, and the module that holds it there.

    Attributes:
        name: the parameter's full name.
        module: the module.
        around: the module that holds this one, whatever wraps it, then what holds that, up to the model.
        path: the module's path in lower case, without wrappers.
        attr: the parameter's own name, in lower case; "weight" of the one that a norm of weights makes a weight of.
        written: the same in its own case.
        closes: how many components at the path's end are each the last with parameters in an ``nn.Sequential``.
    """

    name: str
    module: nn.Module
    around: tuple[nn.Module, ...]
    path: tuple[str, ...]
    attr: str
    written: str
    closes: int

    @property
    def kind(self) -> str:
        """Name of the module's class."""
        return type(self.module).__name__

    @property
    def linear(self) -> bool:
        """Weight of a linear layer, torch's or one named so."""
        return self.attr == "weight" and (isinstance(self.module, nn.Linear) or "Linear" in self.kind)

    @property
    def convolution(self) -> bool:
        """Return True if a convolution holds it, by its type or the name of its class."""
        return isinstance(self.module, nn.modules.conv._ConvNd) or CONVOLUTION_CLASS.search(self.kind) is not None

    @property
    def raw(self) -> bool:
        """Return True unless it is the weight of a layer, which says what it is for; else its name is asked."""
        return not (self.linear or (self.convolution and self.attr == "weight"))

    @property
    def embedding(self) -> bool:
        """Held by an embedding, torch's or one named so."""
        if isinstance(self.module, (nn.Embedding, nn.EmbeddingBag)):
            return True
        return self.raw and "Embedding" in self.kind and self.attr.startswith("weight")

    @property
    def norm(self) -> bool:
        """Held by a norm, torch's or one named so."""
        return NORM_CLASS.search(self.kind) is not None

    @property
    def in_proj(self) -> bool:
        """The three fused projections of ``nn.MultiheadAttention``."""
        return isinstance(self.module, nn.MultiheadAttention) and self.attr == "in_proj_weight"

    @property
    def recurrent(self) -> bool:
        """Weight of a recurrent module."""
        return isinstance(self.module, (nn.RNNBase, nn.RNNCellBase)) and self.attr.startswith("weight")

    @property
    def gated(self) -> bool:
        """Recurrent weight that maps to all gates at once (weight_hr, an LSTM's projection, does not)."""
        gated = isinstance(self.module, (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell))
        return self.recurrent and gated and not self.attr.startswith("weight_hr")

    def says(self, pattern: re.Pattern[str]) -> bool:
        """Return True if a raw parameter's name has ``pattern``, or its module's name where its own says nothing."""
        container = isinstance(self.module, (nn.ParameterList, nn.ParameterDict))
        parts = (*self.path[-1:], self.attr) if container or self.attr == "weight" else (self.attr,)
        return self.raw and any(pattern.search(part) for part in parts)


def owners_of(model: nn.Module, stand_ins: Mapping[str, nn.Module]) -> dict[Tensor, list[Owner]]:
    """Return every parameter with all of its names, in the model's order.

    Args:
        model: whose. stand_ins: what is taken for modules that have lost their classes, by path.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    owners: dict[Tensor, list[Owner]] = {}
    for prefix, module in modules.items():
        parts = prefix.split(".") if prefix else []
        # torch.nn.utils.parametrize keeps fc.weight as fc.parametrizations.weight.original.
        parametrized = parts[-1] if parts[-2:-1] == ["parametrizations"] else None
        if parametrized:
            parts = parts[:-2]
        way = [modules[".".join(parts[:i])] for i in range(len(parts) + 1)]
        places = indices_without_wrappers(parts)
        around = tuple(way[place] for place in reversed(places))
        closes = 0
        while closes < len(parts) and _closes(way[-2 - closes], way[-1 - closes]):
            closes += 1
        path, stands = tuple(parts[i].lower() for i in places), stand_ins.get(".".join(parts), way[-1])
        for attr, p in module.named_parameters(recurse=False):
            name = f"{prefix}.{attr}" if prefix else attr
            if parametrized:
                attr = parametrized if attr == "original" else f"{parametrized}_{attr}"
            written = "weight" if _normed(module, attr) else attr
            owners.setdefault(p, []).append(Owner(name, stands, around, path, written.lower(), written, closes))
    return owners


def _normed(module: nn.Module, attr: str) -> bool:
    """Return True for what torch's weight norm, former spectral norm or pruning makes the layer's weight of."""
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return attr == "weight_original1" and type(module[0]).__name__ == "_WeightNorm"
    held = module._parameters
    computed = "weight" not in held and isinstance(getattr(module, "weight", None), Tensor)
    return computed and (attr == "weight_orig" or (attr == "weight_v" and "weight_g" in held))


def _closes(parent: nn.Module, child: nn.Module) -> bool:
    if not isinstance(parent, nn.Sequential) and getattr(parent, "original_name", "") != "Sequential":
        return False
    filled = [c for c in parent.children() if next(c.parameters(), None) is not None]
    return bool(filled) and filled[-1] is child


def stays_frozen(p: Tensor, owners: Sequence[Owner]) -> bool:
    """Return True for what could not be trained as it is stored, so that only its being frozen lets it be."""
    try:
        check_trainable(p, owners)
    except ValueError:
        return True
    return p.is_meta or any(stride == 0 and size > 1 for stride, size in zip(p.stride(), p.shape, strict=True))


def check_trainable(p: Tensor, owners: Sequence[Owner]) -> None:
    """Raise ValueError where neither method can train ``p``."""
    why = None
    if p.layout != torch.strided:
        why = f"its layout is {p.layout}; store it dense, or freeze it"
    elif not p.is_complex() and p.dtype not in PARAMETER_DTYPES:
        why = f"its dtype is {p.dtype}; store it as float16, bfloat16, float32 or float64, or freeze it"
    elif any(o.embedding and getattr(o.module, "sparse", False) for o in owners):
        why = "its embedding makes sparse gradients; build it with sparse=False, or freeze it"
    if why:
        raise ValueError(f"Parameter {owners[0].name!r} can go to neither the matrix method nor AdamW: {why}.")


def unfit(p: Tensor) -> str | None:
    """Return why the matrix method cannot take ``p``; None when it can."""
    if p.is_complex():
        return "complex"
    if p.ndim < 2:
        return f"{p.ndim}-D"
    if p.numel() == 0:
        return "no elements"
    return "1x1 matrices only" if MatrixShape.of(p).n == 1 else None


def route_to(
    algorithm: Algorithm,
    reason: str,
    p: Tensor,
    owners: Sequence[Owner],
    decays: bool = True,
    head: bool = False,
) -> Route:
    """Return the route of a weight, of which nothing is known yet but where it goes and why."""
    names = tuple(o.name for o in owners)
    frozen = not p.requires_grad
    return Route(names, tuple(p.shape), algorithm, None, reason, frozen=frozen, head=head, decays=decays)


def choose(p: Tensor, owners: Sequence[Owner], head: str | None) -> Route:
    """Return the route where no pattern decides: rules 3 to 15 of :func:`prokl.param_groups`.

    Args:
        p: the parameter.
        owners: its names and modules.
        head: why it is an output head, or None where it is none.
    """

    def any_owner(test: Callable[[Owner], bool]) -> Owner | None:
        return next((o for o in owners if test(o)), None)

    to = partial(route_to, p=p, owners=owners)
    what = f"{owners[0].written} of {owners[0].kind}"
    if why := unfit(p):
        return to("adamw", f"{why}, {what}", decays=p.is_complex() and p.ndim >= 2)
    if getattr(p, "_no_weight_decay", False):
        return to("adamw", f"marked _no_weight_decay, {what}", decays=False)
    if p.__dict__.get("_optim"):
        return to("adamw", f"has settings of its own, {what}")
    if any_owner(lambda o: o.raw and o.attr != "weight" and ELEMENTWISE.search(o.attr) is not None):
        return to("adamw", f"acts element by element by its name, {what}", decays=False)
    if o := any_owner(lambda o: o.embedding):
        tied = ", ".join(other.name for other in owners if not other.embedding)
        reason = f"{tied} tied to embedding {o.name}" if tied else f"embedding ({o.kind})"
        return to("adamw", reason, head=any(other.linear for other in owners))
    if o := any_owner(lambda o: o.norm):
        return to("adamw", f"norm ({o.kind})", decays=False)
    if any_owner(lambda o: o.says(TABLE)):
        return to("adamw", "named as embedding, position or token")
    if any_owner(lambda o: o.says(BIAS)):
        return to("adamw", "named as bias", decays=False)
    if head is not None:
        return to("adamw", head, head=True)
    shape, convolution = MatrixShape.of(p), any_owner(lambda o: o.convolution)
    if shape.m == 1 and all(o.raw for o in owners):
        return to("adamw", f"one row or column, {what}", decays=False)
    if p.ndim == 3 and convolution:
        return to("adamw", f"3-D weight of {convolution.kind}, which would be read as a stack of {shape.count}")
    if shape.m == 1:
        return to("adamw", f"one row or column, {what}")
    if p.ndim == 2 and (o := any_owner(lambda o: o.linear)):
        return to("matrix", "linear layer" if isinstance(o.module, nn.Linear) else f"linear layer ({o.kind})")
    if p.ndim > 3 and convolution:
        return to("matrix", f"convolution, flattened to {shape.rows}x{shape.cols}")
    if any_owner(lambda o: o.in_proj):
        return to("matrix", "q, k and v of MultiheadAttention, fused")
    if o := any_owner(lambda o: o.recurrent):
        return to("matrix", f"{o.written} of {o.kind}" + (", gates fused" if o.gated else ""))
    if p.ndim == 3:
        return to("matrix", f"stack of {shape.count}, {what}")
    if p.ndim == 2:
        own = all(o.attr != "weight" and not type(o.module).__module__.startswith("torch.nn.") for o in owners)
        guess = ", taken for a factor of products (adamw= if it acts element by element)" if own else ""
        return to("matrix", f"2-D, {what}{guess}")
    return to("adamw", f"{p.ndim}-D, {what}, which is no convolution")
