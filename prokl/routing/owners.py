"""One record for every name of a parameter: the module that holds it there, and the kind of layer that this is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.jit import ScriptModule

from prokl.algorithm.names import indices_without_wrappers

NORM_CLASS = re.compile(r"Norm(\dd)?$")
CONVOLUTION_CLASS = re.compile(r"Conv\w*\dd$")
GRAPHS = {f"torch.export.unflatten.{name}Module" for name in ("Interpreter", "Unflattened")}
GRAPHS |= {"torch.fx.graph_module.GraphModule"}
"""Classes of modules that run a graph, by name: nothing else here needs to import them."""
GAINS = ("weight_g", "weight_original0")
"""Names of the gains of torch's weight_norm, the former and the present one."""
GATED = (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell)


class Owner:
    """One name of a parameter.

    Attributes:
        p: the parameter.
        name: its full name.
        module: the module that holds it.
        cls, kind: the module's class, and its name.
        around: the module that holds this one, past any wrapper, then the next one outwards, up to the model.
        path: the module's path in lower case, without wrappers.
        last: the last component of that; "" of the model itself.
        written: the parameter's own name; of one that a norm of weights or a mask makes a weight of, the weight's.
        attr: the same in lower case.
        closes: how many components at the path's end are each the last with parameters in an ``nn.Sequential``.
        linear: True for the weight of a linear layer, torch's or one named so.
        conv1d: True for the weight, (in, out), of transformers' ``Conv1D`` or a copy of it: a linear layer.
        convolution: True for all of a convolution, by its type or the name of its class.
        layer: True for the weight of one of these, of at least two dimensions.
        raw: True unless it is the weight of a linear layer or a convolution; only then its name counts.
        embedding: True if an embedding holds it, torch's or one named so.
        norm: True if a norm holds it, torch's or one named so.
        in_proj: True for the three fused projections of ``nn.MultiheadAttention``.
        recurrent: True for the weight of a recurrent module.
        gated: True for such a one that maps to all gates at once (weight_hr, an LSTM's projection, does not).
        container: True if it is one of several that a module lists, whose name counts for each.
        reflections: True for what torch's orthogonal parametrization makes a weight of by Householder reflections.
    """

    def __init__(
        self,
        p: Tensor,
        name: str,
        module: nn.Module,
        around: tuple[nn.Module, ...],
        path: tuple[str, ...],
        written: str,
        closes: int,
        reflections: bool,
    ) -> None:
        cls = type(module)
        self.p, self.name, self.module, self.cls, self.kind = p, name, module, cls, cls.__name__
        self.around, self.path, self.written, self.closes = around, path, written, closes
        self.reflections = reflections
        self.attr, self.last = written.lower(), path[-1] if path else ""
        weight = self.attr == "weight"
        self.linear = weight and (issubclass(cls, nn.Linear) or "Linear" in self.kind)
        copy = weight and p.ndim == 2 and any(base.__name__ == "Conv1D" for base in cls.__mro__)
        self.conv1d = copy and p.shape[1] == read(module, "nf")
        self.convolution = issubclass(cls, nn.modules.conv._ConvNd) or CONVOLUTION_CLASS.search(self.kind) is not None
        self.raw = not (self.linear or (self.convolution and weight))
        self.layer = p.ndim >= 2 and (not self.raw or self.conv1d)
        named = self.raw and "Embedding" in self.kind and self.attr.startswith("weight")
        self.embedding = named or issubclass(cls, (nn.Embedding, nn.EmbeddingBag))
        self.norm = NORM_CLASS.search(self.kind) is not None
        self.in_proj = issubclass(cls, nn.MultiheadAttention) and self.attr == "in_proj_weight"
        self.recurrent = issubclass(cls, (nn.RNNBase, nn.RNNCellBase)) and self.attr.startswith("weight")
        self.gated = self.recurrent and issubclass(cls, GATED) and not self.attr.startswith("weight_hr")
        self.container = issubclass(cls, (nn.ParameterList, nn.ParameterDict))

    def says(self, pattern: re.Pattern[str]) -> bool:
        """Return True if a raw parameter's name has ``pattern``, or its module's name where its own says nothing."""
        parts = (self.last, self.attr) if self.container or self.attr == "weight" else (self.attr,)
        return self.raw and any(pattern.search(part) for part in parts)


def owners_of(model: nn.Module) -> dict[Tensor, list[Owner]]:
    """Return every parameter with all of its names, in the model's order."""
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
        path = tuple(parts[i].lower() for i in places)
        for attr, p in module.named_parameters(recurse=False):
            name = f"{prefix}.{attr}" if prefix else attr
            if parametrized:
                attr = parametrized if attr == "original" else f"{parametrized}_{attr}"
            written = _made_into(module, attr)
            reflections = written == parametrized and _reflects(module)
            owners.setdefault(p, []).append(Owner(p, name, way[-1], around, path, written, closes, reflections))
    return owners


def _made_into(module: nn.Module, attr: str) -> str:
    """Return the name of what torch's weight norm, former spectral norm or pruning computes from a parameter.

    It is the parameter's own where none does.
    """
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return attr.removesuffix("_original1") if type(module[0]).__name__ == "_WeightNorm" else attr
    held = module._parameters
    for suffix in ("_orig", "_v"):
        made = attr.removesuffix(suffix)
        known = made != attr and made not in held and (suffix == "_orig" or f"{made}_g" in held)
        if known and isinstance(read(module, made), Tensor):
            return made
    return attr


def _reflects(module: nn.Module) -> bool:
    """Return True if the first of a weight's parametrizations is torch's orthogonal one by reflections."""
    how = read(next(module.children(), None), "orthogonal_map")
    return read(how, "name") == "householder"


def _closes(parent: nn.Module, child: nn.Module) -> bool:
    if not isinstance(parent, nn.Sequential):
        return False
    filled = [c for c in parent.children() if next(c.parameters(), None) is not None]
    return bool(filled) and filled[-1] is child


def check_classes(model: nn.Module, owners: Mapping[Tensor, Sequence[Owner]]) -> None:
    """Raise ValueError for a layer whose class, which routes it, was lost as it was exported, traced or scripted."""
    for held in owners.values():
        for o in held:
            lost = _has_graph(o.module) or (type(o.module) is nn.Module and any(map(_has_graph, o.around)))
            if lost and o.p.requires_grad and o.p.ndim >= 2 and re.match(r"weight(_|$)", o.attr):
                raise ValueError(
                    f"{o.name!r} of model ({type(model).__name__}) was exported, traced or scripted: its module has no "
                    "class that says what it is. Make the groups of the model that it was made of, "
                    "prokl.param_groups(original, ...), whose parameters it shares. One from a file or of "
                    "torch.export.unflatten shares none: load its weights into the original, and train that."
                )


def _has_graph(module: nn.Module) -> bool:
    names = {f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__}
    return isinstance(module, ScriptModule) or not names.isdisjoint(GRAPHS)


def asked(model: nn.Module, method: str) -> Any:
    """Call a method of a model, and return its result; () where there is no such method, or it fails."""
    ask = read(model, method)
    try:
        return ask() if callable(ask) else ()
    except Exception:  # the model's own code: a base class's for those with a head, one with arguments, or a broken one
        return ()


def read(source: Any, name: str) -> Any:
    """Return what a module, or a configuration, has under a name; None where there is nothing, or it fails."""
    try:
        return source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    except Exception:  # the model's own code
        return None
