"""Classes of layers in models that were exported or scripted, whose modules are of one class all.

A graph says of every operation in which module of which class it was, a script the name of each module's class. Where
neither does, a weight's shape tells: a matrix is a linear layer's, four dimensions are a convolution's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.jit import ScriptModule

ATTRIBUTES = ("in_channels", "out_channels", "hidden_size", "proj_size", "sparse", "nf", "is_transposed")
"""Attributes of layers that routing reads, where a script has kept them."""
BY_SHAPE: dict[int, type[nn.Module]] = {2: nn.Linear, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}


def stand_ins_of(model: nn.Module) -> tuple[dict[str, nn.Module], str | None]:
    """Return for each module without a class of its own an empty one of the class it was, by path, and a warning.

    There is nothing to say, None, of a model whose modules have classes.
    """
    if not any(map(_has_graph, model.modules())):
        return {}, None
    of_graph, stand_ins = dict(_of_graphs(model)), {}
    guessed: list[str] = []
    for path, module in model.named_modules(remove_duplicate=False):
        if not (type(module) is nn.Module or _has_graph(module)):
            continue
        name = module.original_name if isinstance(module, ScriptModule) else of_graph.get(path)
        if name:
            stand_ins[path] = _empty(_named(name), module)
            continue
        weight = module._parameters.get("weight")
        named_table = any(part in path.rpartition(".")[2].lower() for part in ("emb", "wte", "wpe"))
        if weight is not None and weight.ndim in BY_SHAPE and not named_table:
            guessed.append(f"{path}.weight" if path else "weight")
            stand_ins[path] = _empty(BY_SHAPE[weight.ndim], module)
    if not stand_ins:
        return {}, None
    some = ", ".join(guessed[:3]) + ", ..." * (len(guessed) > 3)
    guess = f" and guessed {len(guessed)} layers by their shapes ({some})" if guessed else ""
    return stand_ins, (
        f"{type(model).__name__} was exported or scripted, and has no layers of classes of their own: param_groups "
        f"took {len(stand_ins) - len(guessed)} classes from the names that it has kept{guess}. Its methods and "
        "settings cannot be asked for output heads and attention's heads. Check print(groups), or give adamw= the "
        "names that the routes of the model itself send there."
    )


def _has_graph(module: nn.Module) -> bool:
    graphs = {"GraphModule", "InterpreterModule"}  # of torch.fx and torch.export, by name: neither need be imported
    return isinstance(module, ScriptModule) or any(cls.__name__ in graphs for cls in type(module).__mro__)


def _of_graphs(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the path and the full name of the class of every module that a graph in the model has an operation of."""
    for prefix, module in model.named_modules():
        graph: Any = getattr(module, "graph", None) if not isinstance(module, ScriptModule) else None
        for node in getattr(graph, "nodes", ()):
            stack = getattr(node, "meta", {}).get("nn_module_stack")
            for path, cls in stack.values() if isinstance(stack, Mapping) else ():
                name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
                yield (f"{prefix}.{path}" if prefix and path else prefix or path), name


def _named(name: str) -> type[nn.Module]:
    """Return torch's class of a name, or an empty one with that name."""
    module, _, last = name.rpartition(".")
    known = getattr(nn, last, None) if not module or module.startswith("torch.nn.") else None
    if isinstance(known, type) and issubclass(known, nn.Module):
        return known
    return type(last, (nn.Module,), {"__module__": module})


def _empty(cls: type[nn.Module], module: nn.Module) -> nn.Module:
    made = cls.__new__(cls)
    nn.Module.__init__(made)
    for name in ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, (bool, int)):
            made.__dict__[name] = value
    return made
