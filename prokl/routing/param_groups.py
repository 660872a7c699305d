"""Parameter groups for a whole model: what goes to the matrix method, what to AdamW, and why.

The matrix method is for weights that map hidden vectors to hidden vectors. Embeddings and output heads are
tables over a vocabulary, norms and biases are vectors: as in the paper's experiments, AdamW trains those.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from prokl.algorithm.settings import check_betas, check_integer, check_learning_rate, check_nonnegative
from prokl.algorithm.shapes import MatrixShape, effective_rank
from prokl.routing.rules import (
    Algorithm,
    Choice,
    Owner,
    check_trainable,
    choose,
    owners_of,
    unfit,
    without_wrappers,
)


@dataclass(frozen=True)
class Route:
    """The destination of one parameter.

    Attributes:
        names: every name that the parameter has, in the model's order; more than one when it is tied.
        shape: its shape.
        algorithm: ``"matrix"``, ``"adamw"``, or ``"frozen"`` when it is in no group.
        rank: rank after clamping to min(rank, m, n - 1); None outside the matrix method or without a rank.
        reason: why.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    algorithm: Algorithm
    rank: int | None
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; ``str`` and ``repr`` are the routing table.

    Attributes:
        routes: one :class:`Route` per parameter of the model, in the model's order.
    """

    def __init__(self, groups: Iterable[dict[str, Any]] = (), routes: Iterable[Route] = ()) -> None:
        super().__init__(groups)
        self.routes = tuple(routes)

    def __repr__(self) -> str:
        return _table(self.routes)

    __str__ = __repr__


def param_groups(
    model: nn.Module,
    *,
    lr: float | Tensor,
    adamw_lr: float | Tensor,
    weight_decay: float = 0.0,
    adamw_weight_decay: float = 0.0,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    rank: int | None = 128,
    matrix: Sequence[str] = (),
    adamw: Sequence[str] = (),
) -> ParamGroups:
    """Split a model's trainable parameters into a matrix group and AdamW groups.

    Print the result to see what went where and why. A parameter that has several names (a tied or shared one)
    is routed once, by the first of these rules that holds for it under any of its names:

    1. Frozen (``requires_grad`` is False): in no group.
    2. Its name matches a pattern in ``adamw`` or ``matrix``: as told.
    3. Complex, below 2-D, without elements, or nothing but 1x1 matrices: AdamW.
    4. It belongs to an embedding (``nn.Embedding``, ``nn.EmbeddingBag``, or a class named so): AdamW, as is
       the head that is tied to it.
    5. It belongs to a norm (torch's own, or a class whose name ends in Norm): AdamW.
    6. It is not the weight of a linear layer or a convolution, and its name says embedding, position or token
       (``pos_emb``, ``wpe``, ``cls_token``) or bias (``experts.down_bias``): AdamW.
    7. It belongs to a module named as an output head: ``lm_head``, ``output_head``, ``unembed``,
       ``embed_out`` and the like anywhere; ``head``, ``output``, ``classifier``, ``score``, ``decoder`` and
       the like only outside repeated blocks, so ``layers.3.attention.output`` is none. The last layer of an
       ``nn.Sequential`` goes by the name of the whole (``classifier.6``): AdamW.
    8. 2-D weight of ``nn.Linear`` or of a class named so: matrix.
    9. One row or one column per matrix, and not the weight of a layer (a gain or a bias stored as a matrix):
       AdamW.
    10. Weight of a convolution: matrix, flattened to (out, rest). A 1-D convolution's 3-D weight goes to
        AdamW, because it would be read as a stack of matrices.
    11. ``in_proj_weight`` of ``nn.MultiheadAttention``, weights of recurrent modules: matrix. Each is several
        linear maps of one input on top of each other, which share one preconditioner.
    12. 3-D: matrix, as a stack of experts, each with a state of its own.
    13. 2-D: matrix.
    14. Anything left has four dimensions or more and is no convolution: AdamW.

    What ``torch.compile``, DDP, FSDP or activation checkpointing put into a name does not count in any rule.

    Args:
        model: the model whose parameters to route.
        lr: learning rate of the matrix method.
        adamw_lr: learning rate of AdamW.
        weight_decay: decoupled weight decay of the matrix method.
        adamw_weight_decay: decoupled weight decay of AdamW; norms, biases, gains and all below 2-D get none.
        adamw_betas: AdamW's betas.
        adamw_eps: AdamW's eps.
        rank: rank of the tracked subspace, clamped per weight to min(rank, m, n - 1) for short side m and
            long side n; None for a method that has none (KLShampoo).
        matrix: :mod:`fnmatch` patterns, case-sensitive, of full names that go to the matrix method.
        adamw: likewise for AdamW.

    Returns:
        The groups, each with ``params`` as (name, parameter) pairs: matrix, AdamW with its weight decay,
        AdamW without. Empty ones are left out.

    Raises:
        TypeError: ``model`` is no module, or a pattern is no string.
        ValueError: a hyper-parameter is out of bounds; a pattern matches nothing, clashes with another one,
            or asks the matrix method for what it cannot take; a parameter can be trained by neither method or
            has no shape yet; or none goes to the matrix method.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself.")
    check_learning_rate("lr", lr)
    check_learning_rate("adamw_lr", adamw_lr)
    check_nonnegative("weight_decay", weight_decay)
    check_nonnegative("adamw_weight_decay", adamw_weight_decay)
    check_nonnegative("adamw_eps", adamw_eps)
    check_betas("adamw_betas", adamw_betas)
    if rank is not None:
        check_integer("rank", rank, "an integer of at least 1, or None for a method without a rank")

    owners = owners_of(model)
    names = [o.name for found in owners.values() for o in found]
    told = _patterns("matrix", matrix, names), _patterns("adamw", adamw, names)
    routes: list[Route] = []
    members: dict[tuple[Algorithm, bool], list[tuple[str, Tensor]]] = {}
    for p, found in owners.items():
        aliases = tuple(o.name for o in found)
        if is_lazy(p):
            raise ValueError(
                f"Parameter {aliases[0]!r} has no shape yet; run one forward pass through its lazy module."
            )
        choice = _route(p, found, *told)
        clamped = None
        if choice.algorithm == "matrix" and rank is not None:
            clamped = effective_rank(rank, MatrixShape.of(p).m, MatrixShape.of(p).n)
        routes.append(Route(aliases, tuple(p.shape), choice.algorithm, clamped, choice.reason))
        members.setdefault((choice.algorithm, choice.decays), []).append((aliases[0], p))

    if ("matrix", True) not in members:
        raise ValueError(
            f"No parameter of model ({type(model).__name__}) goes to the matrix method. Use AdamW, "
            f"name weights with matrix=[...], or route before a wrapper flattens them.\n{_table(routes)}"
        )
    group: dict[str, Any] = {"params": members["matrix", True], "algorithm": "matrix", "lr": lr}
    groups = [group | {"weight_decay": weight_decay} | ({} if rank is None else {"rank": rank})]
    for decays, decay in ((True, adamw_weight_decay), (False, 0.0)):
        if ("adamw", decays) in members:
            group = {"params": members["adamw", decays], "algorithm": "adamw", "lr": adamw_lr}
            groups.append(group | {"betas": adamw_betas, "eps": adamw_eps, "weight_decay": decay})
    return ParamGroups(groups, routes)


def _route(p: Tensor, owners: Sequence[Owner], matrix: dict[str, str], adamw: dict[str, str]) -> Choice:
    """Apply rules 1 and 2, then the others."""
    if not p.requires_grad:
        return Choice("frozen", "requires_grad is False")
    check_trainable(p, owners)
    name = owners[0].name
    to_matrix, to_adamw = (_first_match(patterns, owners) for patterns in (matrix, adamw))
    if to_matrix is not None and to_adamw is not None:
        raise ValueError(f"Parameter {name!r} matches {to_matrix} and {to_adamw}; narrow one of the two patterns.")
    if to_adamw is not None:
        return Choice("adamw", to_adamw, decays=p.ndim >= 2 and not any(o.norm for o in owners))
    if to_matrix is None:
        return choose(p, owners)
    if why := unfit(p):
        raise ValueError(
            f"{to_matrix} matches {name!r} of shape {tuple(p.shape)}, which the matrix method cannot take "
            f"({why}); narrow the pattern and leave this parameter to AdamW."
        )
    return Choice("matrix", to_matrix)


def _matches(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(".".join(without_wrappers(name.split("."))), pattern)


def _patterns(argument: str, patterns: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """Check that every pattern matches a name, and return each under the words that quote it."""
    quoted = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must hold patterns of names, got {pattern!r}; pass strings.")
        if not any(_matches(pattern, name) for name in names):
            raise ValueError(f"{argument}={pattern!r} matches no parameter; model.named_parameters() has the names.")
        quoted[f"{argument}={pattern!r}"] = pattern
    return quoted


def _first_match(patterns: dict[str, str], owners: Sequence[Owner]) -> str | None:
    return next((q for q, pattern in patterns.items() if any(_matches(pattern, o.name) for o in owners)), None)


def _table(routes: Sequence[Route]) -> str:
    """Format one line a name, in columns; the names of a tied parameter follow its first one. Counts at the end."""
    with_rank = any(route.rank is not None for route in routes)
    rows = [("parameter", "shape", "algorithm", *(["rank"] if with_rank else []), "reason")]
    for route in routes:
        shape = "x".join(map(str, route.shape)) or "scalar"
        rank = [] if not with_rank else ["-" if route.rank is None else str(route.rank)]
        rows.append((route.names[0], shape, route.algorithm, *rank, route.reason))
        blank = [""] * (len(rows[0]) - 1)
        rows.extend((f"  = {alias}", *blank) for alias in route.names[1:])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    counts = []
    for algorithm in get_args(Algorithm):
        sizes = [math.prod(route.shape) for route in routes if route.algorithm == algorithm]
        counts.append(f"{algorithm}: {len(sizes)} tensors, {sum(sizes):,} elements")
    return "\n".join([*lines, "; ".join(counts)])
