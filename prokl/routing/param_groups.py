"""Parameter groups for a whole model: which weights go to the matrix method, which to AdamW, and why.

The matrix method is for weights that map hidden vectors to hidden vectors. Embeddings and output heads are
tables over a vocabulary, norms and biases are vectors: as in the paper's experiments, AdamW trains those.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from prokl.algorithm.settings import (
    ADAMW_BOUNDS,
    COMMON_BOUNDS,
    FLAG,
    PRO_BOUNDS,
    check,
    check_known,
    clone_if_tensor,
    plain,
)
from prokl.algorithm.shapes import Rank
from prokl.routing.layout import Layouts
from prokl.routing.output_heads import OutputHeads
from prokl.routing.owners import check_classes, owners_of
from prokl.routing.routes import ParamGroups, Route, table
from prokl.routing.rules import choose, overruled, own_settings, quoted, undecayed

P = ParamSpec("P")
R = TypeVar("R")


def with_own_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Say of a call of ``param_groups`` that Python would refuse what to write."""
    known = inspect.signature(function).parameters
    needed = [name for name, p in known.items() if p.default is p.empty]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        title = f"{function.__name__}()"
        check_known(function.__name__, kwargs, known)
        if len(args) > 1:
            raise TypeError(f"{title} takes the model by its place and all else by name, as lr=0.02; got {len(args)}.")
        missing = [name for name in needed[len(args) :] if name not in kwargs]
        if missing:
            raise TypeError(
                f"{title} lacks {' and '.join(missing)}: write {function.__name__}(model, lr=0.02, adamw_lr=...) with "
                "AdamW's own rate, usually around 1e-3."
            )
        return function(*args, **kwargs)

    return checked


@with_own_errors
def param_groups(
    model: nn.Module,
    *,
    lr: float | Tensor,
    adamw_lr: float | Tensor,
    weight_decay: float | None = None,
    adamw_weight_decay: float = 0.0,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    rank: Rank | None = None,
    matrix: Sequence[str] = (),
    adamw: Sequence[str] = (),
    split_fused: bool = True,
    split: Mapping[str, int | Sequence[int]] | None = None,
    transposed: Sequence[str] = (),
    heads: bool | Mapping[str, int] = True,
    names: bool = True,
) -> ParamGroups:
    """Split a model's parameters into a matrix group and AdamW groups.

    Print the result to see where each weight went and why, and which output heads were found. A parameter with several
    names (a tied or shared one) is routed once, by the first of these rules that holds for it under any of its names:

    1. Frozen (``requires_grad`` is False), and of a kind that could not be trained (integers, 8-bit floats, on the
       meta device): in no group. With ``names=False`` all that is frozen. Other frozen parameters have no state, and
       train from the first gradient on that they have once they are unfrozen.
    2. Its name matches a pattern in ``adamw`` or ``matrix``: as told.
    3. Complex, below 2-D, without elements, or nothing but 1x1 matrices: AdamW.
    4. It is marked ``_no_weight_decay``, acts element by element by its name (``A_log``, ``time_decay``, ``scale``),
       is the gain of torch's ``weight_norm``, or holds the Householder vectors of torch's ``orthogonal`` layers that
       are not square, whose diagonal must not move: AdamW without weight decay. It has ``_optim``, settings of its own,
       as S4's layers do: AdamW with these.
    5. It belongs to an embedding, torch's or a class named so, as does the head that is tied to it: AdamW.
    6. It belongs to a norm (torch's own, or a class whose name ends in Norm): AdamW.
    7. It is not the weight of a linear layer or a convolution, and its name says embedding, position or token
       (``pos_emb``, ``wpe``, ``cls_token``) or bias (``experts.down_bias``): AdamW.
    8. It is an output head: AdamW. Structure comes first: the results of ``get_output_embeddings()`` and
       ``get_classifier()`` of a model, the clusters of an ``nn.AdaptiveLogSoftmaxWithLoss``, a layer outside repeated
       blocks with ``config.vocab_size``, ``config.num_labels`` or ``config.num_classes`` outputs, or as many as the
       largest embedding has rows, if nothing in the model takes that many inputs, and the last linear layer of a model
       that is an ``nn.Sequential``. Then names, unless ``get_classifier()`` has spoken: ``lm_head``, ``unembed`` and
       the like anywhere, ``head``, ``classifier``, ``output`` and the like outside repeated blocks, and of several
       layers in such a module the last. A router is none, nor a head that pools by attention, nor a layer whose outputs
       the next one takes. Last, where none of this finds any head: the linear layers that come after all other weights,
       directly in the model, each taking another's outputs and giving what none takes (``fc2``, ``policy`` and
       ``value``).
    9. One row or one column per matrix, as of a layer with one output: AdamW, without weight decay where it is not the
       weight of a layer (a gain or a bias stored as a matrix).
    10. Weights of linear layers, ``in_proj_weight`` of ``nn.MultiheadAttention``, weights of recurrent modules: matrix.
    11. Weight of a convolution: matrix, flattened to (out, rest). A 1-D convolution's 3-D weight, and those of XLNet's
        and Funnel's attention, go to AdamW, because they would be read as stacks of matrices.
    12. 3-D: matrix, as a stack of experts, each with a state of its own.
    13. 2-D: matrix. That a module multiplies its own parameter as a matrix is a guess, which the table says.
    14. Anything left has four dimensions or more and is no convolution: AdamW.

    Parameters that a model, or a module in it, names in ``no_weight_decay()`` or ``no_weight_decay_keywords()``, as
    timm's do, and those that are marked ``_no_weight_decay`` have no weight decay in either method. Components of names
    that ``torch.compile``, DDP, FSDP, activation checkpointing or peft add count in no rule.

    A weight that its module is known to store (in, out) is read so, and one whose outputs are several maps of one
    input as several matrices: ``in_proj_weight``, the gates of ``nn.LSTM`` and ``nn.GRU``, fused q, k and v or gate
    and up of models of transformers and timm. Queries and keys divide further, into attention's heads, where the module
    that holds them, the one around it, or the ``config`` of one of these states how many there are (``num_heads``,
    ``n_head``, and beside it ``num_key_value_heads``, ``head_dim`` and the like) and the rows are just so many heads.
    These are the keys ``transposed`` and ``split`` of the matrix group.

    Args:
        model: the model whose parameters to route.
        lr: learning rate of the matrix method.
        adamw_lr: learning rate of AdamW.
        weight_decay: decoupled weight decay of the matrix method; None is the optimizer's, 0 unless it is told.
        adamw_weight_decay: decoupled weight decay of AdamW; norms, biases, gains and all below 2-D get none.
        adamw_betas: AdamW's betas.
        adamw_eps: AdamW's eps.
        rank: rank of the tracked subspace, clamped per matrix to min(rank, m, n - 1) for short side m and
            long side n; "auto" is m / 6, at most 128; None is the optimizer's, "auto" unless it is told (KLShampoo
            has none).
        matrix: :mod:`fnmatch` patterns, case-sensitive, of full names that go to the matrix method; or names.
        adamw: likewise for AdamW.
        split_fused: False to keep weights whole that are known to be several matrices.
        split: how the outputs of weights divide, by patterns: a number of equal pieces (1 for a weight that stays
            whole) or their sizes, as in ``{"*.qkv.weight": 3, "*.kv.weight": (64, 32)}``.
        transposed: patterns of weights that are stored (in, out).
        heads: whether queries and keys divide by heads where their modules say how many there are; or numbers of heads
            by patterns, as in ``{"*.query.weight": 12}``, beside those that modules state. A fused weight has so many
            heads of queries (of keys, where it makes none), any other weight so many pieces; 1 leaves a weight as it
            is.
        names: False for groups of bare parameters, for code that adds groups without names or divides them
            (``add_param_group({"params": [...]})``, ``ZeroRedundancyOptimizer``).
            Frozen parameters are left out of them, as such code adds those that it unfreezes.

    Returns:
        The groups: matrix, AdamW with its weight decay, AdamW without, and one for every other ``_optim`` or decay that
        weights ask for. Empty ones are left out. ``params`` are (name, parameter) pairs, and where a weight needs
        ``transposed`` or ``split``, that key is a list with an entry per weight. With ``names=False`` they are
        parameters, and there is a matrix group per value of these keys.

    Raises:
        TypeError: ``model`` is no module, ``heads`` neither a bool nor numbers, a pattern is no string, or an argument
            is not known or missing.
        ValueError: a hyper-parameter, or one in ``_optim``, is out of bounds; a pattern matches nothing, clashes with
            another one, or gives the matrix method a weight that it cannot take, or one with ``_optim``; a number of
            heads does not divide the rows; a layer has lost its class, as it was exported, traced or scripted; a
            parameter can be trained by neither method or has no shape yet; none requires grad; or none goes to the
            matrix method, now or once it is no longer frozen.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the model itself.")
    check("names", names, FLAG)
    of_matrix: dict[str, Any] = {"lr": plain(lr)}
    left_open = {"weight_decay": plain(weight_decay), "rank": plain(rank)}  # None is the optimizer's
    of_matrix |= {name: value for name, value in left_open.items() if value is not None}
    for name, value in of_matrix.items():
        check(name, value, (COMMON_BOUNDS | PRO_BOUNDS)[name])
    of_adamw: dict[str, Any] = {"lr": plain(adamw_lr), "betas": plain(adamw_betas), "eps": plain(adamw_eps)}
    of_adamw["weight_decay"] = plain(adamw_weight_decay)
    for name, value in of_adamw.items():
        check(f"adamw_{name}", value, ADAMW_BOUNDS[name])

    owners = owners_of(model)
    check_classes(model, owners)
    if not any(p.requires_grad for p in owners):
        raise ValueError(
            f"There is no parameter in model ({type(model).__name__}) that requires grad, so nothing trains: unfreeze "
            "what is to, by requires_grad_(True), before making the groups."
        )
    if lazy := [of_p[0].name for p, of_p in owners.items() if is_lazy(p)]:
        raise ValueError(f"Parameter {lazy[0]!r} has no shape yet; run one forward pass through its lazy module.")
    heads_of_model = OutputHeads(model, owners)
    all_names = [o.name for of_p in owners.values() for o in of_p]
    told = quoted("matrix", matrix, all_names), quoted("adamw", adamw, all_names)
    layouts = Layouts(split_fused, transposed, split or {}, heads, all_names)
    by_mark = undecayed(model)
    routes: list[Route] = []
    members: dict[tuple[Any, ...], list[tuple[Route, Tensor]]] = {}
    later = False  # whether the matrix method takes a frozen weight once it trains
    for p, of_p in owners.items():
        ruled = choose(of_p, heads_of_model.reason(of_p))
        route = overruled(ruled, of_p, *told, names)
        later |= ruled.algorithm == "matrix" and p.is_floating_point() and not p.requires_grad
        if route.algorithm == "frozen":
            routes.append(route)
            continue
        if route.algorithm == "matrix":
            route = layouts.of(of_p, route, of_matrix.get("rank", "auto"))
        own = own_settings(p, of_p[0].name)
        notes = ["_optim has " + ", ".join(f"{key}={value!r}" for key, value in own)] if own else []
        if route.decays and (by := next((by_mark[name] for name in route.names if name in by_mark), None)):
            route = replace(route, decays=False)
            notes.append(f"no weight decay, by {by}")
        if route.frozen:
            notes.append("frozen now")
        route = replace(route, reason="; ".join([route.reason, *notes]))
        routes.append(route)
        # Without names there is a matrix group for each way of reading a weight.
        layout = () if names else (route.transposed, route.split)
        members.setdefault((route.algorithm, route.decays, own, layout), []).append((route, p))
    if suspicion := layouts.finish():
        warnings.warn(suspicion, stacklevel=3)  # past the check of arguments
    if not later and not any(route.algorithm == "matrix" for route in routes):
        raise ValueError(
            f"No parameter of model ({type(model).__name__}) goes to the matrix method. Use AdamW, "
            "name weights with matrix=[...], or, where a wrapper has flattened them (FSDP1, DeepSpeed), use FSDP2's "
            f"fully_shard.\n{table(routes)}"
        )
    groups: list[dict[str, Any]] = []
    for key in sorted(members, key=lambda key: (key[0] != "matrix", key[2] != (), not key[1])):
        (algorithm, decays, own, _), of_group = key, [route for route, _ in members[key]]
        params = [(route.names[0], p) if names else p for route, p in members[key]]
        group: dict[str, Any] = {"params": params, "algorithm": algorithm}
        group |= of_matrix if algorithm == "matrix" else of_adamw
        group["lr"] = clone_if_tensor(group["lr"])
        group |= {} if decays else {"weight_decay": 0.0}
        group |= own
        for setting in ("transposed", "split"):  # of matrices alone
            values = [getattr(route, setting) for route in of_group]
            group |= {setting: values if names else values[0]} if any(values) else {}
        groups.append(group)
    return ParamGroups(groups, routes, rank is not None)
