"""The stages of a step over a backend, each beside the specification weight by weight and KL-Shampoo's own stage.

A stage is called with what a step of the backend gives it.

Dimension key: B matrices, m short side, n long side, r rank,
k columns.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from bench.micro.case import FP32, Case, Draw, Dtypes, Inputs, Sizes, beside, flat
from prokl.algorithm import klshampoo, reference, reference_kl
from prokl.algorithm.algebra import State
from prokl.algorithm.settings import Hyper, ProHyper
from prokl.algorithm.stages import ProKLShampooStages
from prokl.backends.qr import householder_qr

NS_STEPS = 5
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
COMMON = (1e-3, 0.1, 0.95, 0.95, 1e-8, 5.0, False, "original")
H, KL_H = ProHyper(*COMMON, 0.01, NS_STEPS, NS_COEFFICIENTS, None, "pro-klshampoo"), Hyper(*COMMON)
CONDITION = 1e4
"""Of L, S and R."""
DRIFT = 0.1
"""Of the bases from the eigenvectors; condition and drift are roughly those of a training run."""
SURPRISING = 10.0
"""Times a usual gradient, so that each is bounded, and otherwise than the next."""


def basis(n: int, k: int, B: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return orthonormal X (B,n,k) and an orthonormal basis that has drifted from it, both in float64.

    The matrices of a batch are one, its rows in other orders.
    """
    X = torch.linalg.qr(draw(n, k, dtype=torch.float64))[0]
    drifted = householder_qr(X + DRIFT * draw(n, k, dtype=torch.float64) / n**0.5)
    order = draw(B, n, dtype=torch.float64).argsort(dim=-1)
    return X[order], drifted[order]


def factor(k: int, B: int, draw: Draw) -> tuple[Tensor, Tensor]:
    """Return a symmetric factor (B,k,k), its eigenvalues evenly spread in logarithms, and its basis of before."""
    X, Q = basis(k, k, B, draw)
    L = (X * CONDITION ** -torch.linspace(0, 1, k, dtype=X.dtype, device=X.device)) @ X.mT
    return (L + L.mT) / 2, Q


def pro_inputs(s: Sizes, d: Dtypes, draw: Draw, times: float = 1.0) -> Inputs:
    """Draw gradients of a usual size to Pro-KLShampoo's state; Q_S is no orthonormal basis, as between refreshes."""
    (L, Q_L), (S, Q_S) = factor(s.m, s.B, draw), factor(s.r, s.B, draw)
    Q_S = Q_S + DRIFT * draw(s.B, s.r, s.r, dtype=Q_S.dtype) / s.r**0.5
    state = {"M": draw(s.B, s.m, s.n, dtype=d.momentum), "U": basis(s.n, s.r, s.B, draw)[1]}
    state |= {"L": L, "Q_L": Q_L, "S": S, "Q_S": Q_S}
    roots = {"lambda_L": (s.B, s.m), "lambda_S": (s.B, s.r), "mu": (s.B,)}
    return _inputs(s, d, draw, state, roots, times) | {"ns_dtype": d.polar}


def kl_inputs(s: Sizes, d: Dtypes, draw: Draw, times: float = 1.0) -> Inputs:
    """Draw gradients of a usual size to KL-Shampoo's state."""
    (L, Q_L), (R, Q_R) = factor(s.m, s.B, draw), factor(s.n, s.B, draw)
    state = {"M": draw(s.B, s.m, s.n, dtype=d.momentum), "L": L, "Q_L": Q_L, "R": R, "Q_R": Q_R}
    return _inputs(s, d, draw, state, {"lambda_L": (s.B, s.m), "lambda_R": (s.B, s.n)}, times)


def _inputs(s: Sizes, d: Dtypes, draw: Draw, state: State, roots: dict[str, tuple[int, ...]], times: float) -> Inputs:
    state |= {f"inv_sqrt_{name}": draw(*shape, dtype=d.arithmetic).abs() for name, shape in roots.items()}
    state["clipped"] = torch.zeros_like(state["L"][:, 0, 0])
    stored = {name: t if name == "M" else t.to(d.arithmetic).contiguous() for name, t in state.items()}
    return {"G": times * draw(s.B, s.m, s.n, dtype=d.weights).to(d.arithmetic), "state": stored}


def hyper(i: Inputs) -> Any:
    """Return the settings of the method whose inputs these are."""
    return replace(H, ns_dtype=i["ns_dtype"]) if "ns_dtype" in i else KL_H


def copied(given: Any) -> Any:
    """Return arguments with tensors of their own, those without memory too, which deepcopy cannot copy."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, given)


def noted(own: Any, names: Iterable[str], i: Inputs, owner: Any = None) -> list[tuple[str, Any, Any]]:
    """Return (name, arguments, result) of every call of these operations in a step and the refresh after it.

    They are those of the stages ``own``, or of another ``owner``.
    """
    owner, calls = owner or own, []

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            given = copied((args, kwargs))  # the operation itself or a later one may overwrite it
            found = function(*args, **kwargs)
            calls.append((name, given, copied(found)))
            return found

        return called

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(owner, name, noting(name, getattr(owner, name))))
        G, state = copied((i["G"], i["state"]))
        own.step(G, state, hyper(i), torch.ones_like(G[:, 0, 0]), None)
        own.refresh_eigenbases(i["state"], None)
    return calls


def as_a_step_does(stage: str, i: Inputs, ops: Any) -> Callable[[], Any]:
    """Return the call of a stage that a step of these stages makes, or a refresh after it."""
    own = copy(ops)
    owner: Any = klshampoo if stage == "decide" else own
    (_, (args, kwargs), _), *_ = noted(own, [stage], i, owner)
    return partial(getattr(owner, stage), *args, **kwargs)


def _bind(stage: str, method: str, kept: Callable[[Any], Any]) -> Any:
    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        run = as_a_step_does(stage, i, beside(ops, method))
        return lambda: kept(run())

    return bind


def each(f: Callable[[Tensor, State, Any], Any]) -> Callable[[Inputs], Any]:
    """Return what does ``f`` for one matrix after another and stacks the results."""

    def plain(i: Inputs) -> list[Tensor]:
        found = [
            flat(f(G, {name: t[b].to(G.dtype) for name, t in i["state"].items()}, hyper(i)))
            for b, G in enumerate(i["G"])
        ]
        return [torch.stack(own) for own in zip(*found, strict=True)]

    return plain


def _project(G: Tensor, state: State, h: ProHyper) -> tuple[Tensor, ...]:
    G_tilde = G @ state["U"]
    return G_tilde, state["M"] @ state["U"], G - G_tilde @ state["U"].mT


def _energies(G: Tensor, state: State, h: ProHyper) -> tuple[Tensor, ...]:
    G_tilde, _, G_perp = _project(G, state, h)
    QtG, GQ = state["Q_L"].mT @ G_tilde, G_tilde @ state["Q_S"]
    return G_perp @ G_perp.mT, (state["Q_L"].mT @ G_perp).square().sum(dim=1), GQ, QtG, QtG @ state["Q_S"]


def _scale(G: Tensor, sizes: reference.Sizes, state: State, h: Hyper) -> Tensor:
    return G.new_tensor(reference.admit(sizes.overall, reference.rms(G), state, h)[0])


def _direction(G: Tensor, state: State, h: ProHyper) -> Tensor:
    sizes = reference.whitened_sizes(G, state, h)  # single directions of a gradient of a usual size may be large
    c = reference.admit(sizes.overall, reference.rms(G), state, h)[0]
    return reference.direction(*reference.momentum_and_projection(c * G, state, h)[1:], state, h, 1.0, c, sizes)[0]


def _kl_whitening(G: Tensor, state: State, h: Hyper) -> tuple[Tensor, Tensor]:
    QtG = state["Q_L"].mT @ G
    return QtG, QtG @ state["Q_R"]


def _kl_direction(G: Tensor, state: State, h: Hyper) -> Tensor:
    sizes = reference_kl.whitened_sizes(G, state)
    c = reference.admit(sizes.overall, reference.rms(G), state, h)[0]
    return reference_kl.direction(reference_kl.momentum(c * G, state, h), state, h, c, sizes)[0]


def _all(x: Any) -> Any:
    return x


def _case(method: str, stage: str, plain: Any, kept: Callable[[Any], Any] = _all, **fields: Any) -> Case:
    """Return a stage, of whose results ``kept`` are those that ``plain`` gives of one matrix."""
    own = method == "pro-klshampoo"
    drawn = pro_inputs if own else kl_inputs
    inputs = partial(drawn, times=SURPRISING) if stage in ("admit", "decide") else drawn
    name = stage.replace("_", " ") if own else f"KL-Shampoo's {stage}"
    polar = own and stage == "direction"
    return Case(name, inputs, _bind(stage, method, kept), polar=polar, plain=each(plain), **fields)


_pro, _kl = partial(_case, "pro-klshampoo", timed=(FP32,)), partial(_case, "kl-shampoo")
STAGES = (
    _pro("project", _project, lambda found: found[:3]),  # without U and Q_L
    _pro("energies", _energies, counterpart=_kl("whitening", _kl_whitening)),
    _pro(
        "admit",
        lambda G, state, h: _scale(G, reference.whitened_sizes(G, state, h), state, h),
        lambda admitted: admitted.scale,
        counterpart=_kl(
            "decide",
            lambda G, state, h: _scale(G, reference_kl.whitened_sizes(G, state), state, h),
            lambda found: found[0].scale,
        ),
    ),
    _pro(
        "momentum",
        reference.momentum_and_projection,
        lambda found: (found[0], found[1].G_par, found[1].residual.G_hat_perp),
        counterpart=_kl("momentum", reference_kl.momentum),
    ),
    _pro(
        "direction",
        _direction,
        lambda found: found[0],
        counterpart=_kl("direction", _kl_direction, lambda found: found[0]),
    ),
    _pro(
        "statistics",
        reference.statistics,
        lambda found: found[0],
        counterpart=_kl("statistics", lambda G, state, h: reference_kl.statistics(G, state, h.beta2)),
    ),
    _pro(
        "track_subspace",
        lambda G, state, h: reference.track_subspace(G, state | reference.statistics(G, state, h), h),
    ),
    _pro(
        "refresh_eigenbases",
        lambda G, state, h: reference.refresh_eigenbases(state),
        counterpart=_kl("refresh_eigenbases", lambda G, state, h: reference_kl.refresh_eigenbases(state)),
    ),
)
"""In the order of a step; KL-Shampoo tracks no subspace. Its refresh, as ours, takes place once in tau steps."""
