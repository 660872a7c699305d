"""The stages of a step over a backend, each beside the specification weight by weight and KL-Shampoo's own stage.

Dimension key: B matrices, m short side, n long side, r rank, k columns.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bench import counts
from bench.costs import NS_STEPS
from bench.counts import Term
from bench.micro.case import FP32, Case, Draw, Dtypes, Inputs, Sizes, beside, flat
from prokl.algorithm import klshampoo, reference, reference_kl
from prokl.algorithm.admission import damped, damping, inverse_roots
from prokl.algorithm.algebra import Admitted, Roots, State
from prokl.algorithm.evidence import Verdict
from prokl.algorithm.settings import Hyper, ProHyper
from prokl.algorithm.stages import Energies, Projected, ProKLShampooStages
from prokl.backends.qr import householder_qr

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
COMMON = (1e-3, 0.1, 0.95, 0.95, 1e-8, 5.0, False, "original")
H, KL_H = ProHyper(*COMMON, 0.01, NS_STEPS, NS_COEFFICIENTS, None, "pro-klshampoo"), Hyper(*COMMON)
CONDITION = 1e4
"""Of L, S and R."""
DRIFT = 0.1
"""Of the bases from the eigenvectors; condition and drift are roughly those of tests/data/captured_factors.npz."""


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


def pro_inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    """Draw gradients of a usual size to Pro-KLShampoo's state; Q_S is no orthonormal basis, as between refreshes."""
    (L, Q_L), (S, Q_S) = factor(s.m, s.B, draw), factor(s.r, s.B, draw)
    Q_S = Q_S + DRIFT * draw(s.B, s.r, s.r, dtype=Q_S.dtype) / s.r**0.5
    state = {"M": draw(s.B, s.m, s.n, dtype=d.momentum), "U": basis(s.n, s.r, s.B, draw)[1]}
    state |= {"L": L, "Q_L": Q_L, "S": S, "Q_S": Q_S}
    for name, shape in (("lambda_L", (s.B, s.m)), ("lambda_S", (s.B, s.r)), ("mu", (s.B,))):
        state[f"inv_sqrt_{name}"] = draw(*shape, dtype=d.arithmetic).abs()
    return _inputs(s, d, draw, state) | {"ns_dtype": d.polar}


def kl_inputs(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
    """Draw gradients of a usual size to KL-Shampoo's state."""
    (L, Q_L), (R, Q_R) = factor(s.m, s.B, draw), factor(s.n, s.B, draw)
    state = {"M": draw(s.B, s.m, s.n, dtype=d.momentum), "L": L, "Q_L": Q_L, "R": R, "Q_R": Q_R}
    for name, k in (("lambda_L", s.m), ("lambda_R", s.n)):
        state[f"inv_sqrt_{name}"] = draw(s.B, k, dtype=d.arithmetic).abs()
    return _inputs(s, d, draw, state)


def surprising(inputs: Callable[[Sizes, Dtypes, Draw], Inputs]) -> Callable[[Sizes, Dtypes, Draw], Inputs]:
    """Return what draws gradients that are bounded, each otherwise: of usual ones a decision is the same for all."""

    def drawn(s: Sizes, d: Dtypes, draw: Draw) -> Inputs:
        i = inputs(s, d, draw)
        return i | {"G": 10 * i["G"]}

    return drawn


def _inputs(s: Sizes, d: Dtypes, draw: Draw, state: State) -> Inputs:
    state["clipped"] = torch.zeros_like(state["L"][:, 0, 0])
    stored = {name: t if name == "M" else t.to(d.arithmetic).contiguous() for name, t in state.items()}
    return {"G": draw(s.B, s.m, s.n, dtype=d.weights).to(d.arithmetic), "state": stored}


class Run:
    """Pro-KLShampoo's step over a backend, stage by stage: each returns the call of one, after those before it."""

    def __init__(self, i: Inputs, ops: ProKLShampooStages) -> None:
        self.G, self.state, self.h, self.ops = i["G"], i["state"], replace(H, ns_dtype=i["ns_dtype"]), ops

    def project(self) -> Callable[[], Any]:
        return lambda: self.ops.project(self.G, self.state, None)[:3]  # without U and Q_L

    def energies(self) -> Callable[[], Any]:
        projected = self.projected
        return lambda: self.ops.energies(projected, self.state)

    def admit(self) -> Callable[[], Any]:
        found, n = self.found, self.G.shape[-1]

        return lambda: self.ops.admit(found.A, found.QtG, found.e_res, self.state, self.h, n).scale

    @cached_property
    def projected(self) -> Projected:
        return self.ops.project(self.G, self.state, None)

    @cached_property
    def found(self) -> Energies:
        found: Energies = self.energies()()
        return found

    @cached_property
    def admitted(self) -> Admitted:
        found = self.found
        return self.ops.admit(found.A, found.QtG, found.e_res, self.state, self.h, self.G.shape[-1])

    def momentum(self) -> Callable[[], Any]:
        projected, admitted = self.projected, self.admitted

        def run() -> tuple[Any, ...]:
            M, ahead = self.ops.momentum(self.G, projected, admitted.scale, self.state, self.h, None)
            assert ahead.residual is not None
            return M, ahead.G_par, ahead.residual.G_hat_perp

        return run

    def direction(self) -> Callable[[], Any]:
        # The stage before may overwrite G and M, which others still read.
        own, scale = self.state | {"M": self.state["M"].clone()}, torch.ones_like(self.G[:, 0, 0])
        _, ahead = self.ops.momentum(self.G.clone(), self.projected, self.admitted.scale, own, self.h, None)
        before = damped(inverse_roots(self.state), damping(self.state, self.h))
        roots, bounded = Roots(*(t.to(self.G.dtype) for t in before)), self.admitted.bounded
        return lambda: self.ops.direction(ahead, self.state, roots, bounded, self.h, scale)[0]

    def statistics(self) -> Callable[[], Any]:
        found, admitted, n = self.found, self.admitted, self.G.shape[-1]

        def run() -> State:
            fresh = found._replace(E=found.E.clone())  # which may be overwritten
            return self.ops.statistics(fresh, admitted, self.state, self.h, n)[0]

        return run

    def track_subspace(self) -> Callable[[], Any]:
        G_perp, c = self.projected.G_perp, self.admitted.scale
        fresh = self.found._replace(E=self.found.E.clone())
        moments, sample = self.ops.statistics(fresh, self.admitted, self.state, self.h, self.G.shape[-1])
        state = self.state | moments
        return lambda: self.ops.track_subspace(G_perp, c, sample, state)

    def refresh_eigenbases(self) -> Callable[[], Any]:
        return lambda: self.ops.refresh_eigenbases(self.state, None)


def _decided(verdict: Verdict | None) -> Tensor:
    assert verdict is not None
    return verdict.scale


def _project(G: Tensor, state: State, h: ProHyper) -> tuple[Tensor, ...]:
    G_tilde = G @ state["U"]
    return G_tilde, state["M"] @ state["U"], G - G_tilde @ state["U"].mT


def _energies(G: Tensor, state: State, h: ProHyper) -> tuple[Tensor, ...]:
    G_tilde, _, G_perp = _project(G, state, h)
    QtG, GQ = state["Q_L"].mT @ G_tilde, G_tilde @ state["Q_S"]
    return G_perp @ G_perp.mT, (state["Q_L"].mT @ G_perp).square().sum(dim=1), GQ, QtG, QtG @ state["Q_S"]


def _admitted(G: Tensor, size: float, state: State, h: Hyper) -> Tensor:
    return G.new_tensor(reference.admit(size, reference.rms(G), state, h)[0])


def _direction(G: Tensor, state: State, h: ProHyper) -> Tensor:
    return reference.direction(*reference.momentum_and_projection(G, state, h)[1:], state, h, 1.0)[0]


def each(f: Callable[[Tensor, State, Any], Any]) -> Callable[[Inputs], Any]:
    """Return what does ``f`` for one matrix after another and stacks the results."""

    def plain(i: Inputs) -> list[Tensor]:
        h = replace(H, ns_dtype=i["ns_dtype"]) if "ns_dtype" in i else KL_H
        found = [
            flat(f(G, {name: t[b].to(G.dtype) for name, t in i["state"].items()}, h)) for b, G in enumerate(i["G"])
        ]
        return [torch.stack(own) for own in zip(*found, strict=True)]

    return plain


def _work(terms: Callable[[Sizes], list[Term]], stage: str, polar: bool | None = None) -> Callable[[Sizes], float]:
    def flops(s: Sizes) -> float:
        own = [t for t in terms(s) if t.stage == stage and polar in (None, t.newton_schulz)]
        return sum(t.least for t in own)

    return flops


def _kl(stage: str, bind: Any, plain: Callable[[Tensor, State, Hyper], Any]) -> Case:
    flops = _work(lambda s: counts.klshampoo(s.m, s.n), stage)
    return Case(f"KL-Shampoo's {stage}", kl_inputs, bind, flops, plain=each(plain))


def _pro(stage: str, plain: Callable[[Tensor, State, ProHyper], Any], other: Case | None = None) -> Case:
    def terms(s: Sizes) -> list[Term]:
        return counts.pro_klshampoo(s.m, s.n, s.r, NS_STEPS)

    def bind(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
        call: Callable[[], Any] = getattr(Run(i, ops), stage)()
        return call

    polar, name = _work(terms, stage, polar=True), stage.replace("_", " ")
    return Case(name, pro_inputs, bind, _work(terms, stage), polar, each(plain), other, timed=(FP32,))


def _kl_stages(ops: ProKLShampooStages) -> klshampoo.KLShampooStages:
    found: klshampoo.KLShampooStages = beside(ops, "kl-shampoo")
    return found


def _whitening(i: Inputs, ops: ProKLShampooStages) -> tuple[klshampoo.Operands, klshampoo.Whitening]:
    own = _kl_stages(ops)
    given = own.operands(i["G"], i["state"])
    return given, own.whitening(given)


def _kl_whitening(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
    return lambda: _whitening(i, ops)[1]


def _kl_decide(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
    A = _whitening(i, ops)[1].A
    return lambda: _decided(klshampoo.decide(A, i["state"], KL_H)[0])


def _kl_verdict(i: Inputs, ops: ProKLShampooStages) -> Verdict | None:
    return klshampoo.decide(_whitening(i, ops)[1].A, i["state"], KL_H)[0]


def _kl_momentum(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
    own, verdict = _kl_stages(ops), _kl_verdict(i, ops)
    return lambda: own.momentum(i["G"], verdict, i["state"], KL_H)


def _kl_direction(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
    own, M = _kl_stages(ops), _kl_momentum(i, ops)()
    given = own.operands(i["G"], i["state"])
    return lambda: own.direction(M, given, i["state"], KL_H)[0]


def _kl_statistics(i: Inputs, ops: ProKLShampooStages) -> Callable[[], Any]:
    own, (given, whitening), verdict = _kl_stages(ops), _whitening(i, ops), _kl_verdict(i, ops)
    return lambda: own.statistics(given, whitening, verdict, i["state"], KL_H)


def _kl_whitened(G: Tensor, state: State, h: Hyper) -> tuple[Tensor, Tensor]:
    QtG = state["Q_L"].mT @ G
    return QtG, QtG @ state["Q_R"]


STAGES = (
    _pro("project", _project),
    _pro("energies", _energies, _kl("whitening", _kl_whitening, _kl_whitened)),
    replace(
        _pro(
            "admit",
            lambda G, state, h: _admitted(G, reference.whitened_sizes(G, state, h).overall, state, h),
            replace(
                _kl(
                    "decide",
                    _kl_decide,
                    lambda G, state, h: _admitted(G, reference_kl.whitened_sizes(G, state).overall, state, h),
                ),
                inputs=surprising(kl_inputs),
            ),
        ),
        inputs=surprising(pro_inputs),
        flops=lambda s: 4 * s.m * s.r,  # elementwise, of which counts has nothing
    ),
    _pro("momentum", reference.momentum_and_projection, _kl("momentum", _kl_momentum, reference_kl.momentum)),
    _pro(
        "direction",
        _direction,
        _kl(
            "direction",
            _kl_direction,
            lambda G, state, h: reference_kl.direction(
                reference_kl.momentum(G, state, h), state, h, 1.0, reference.Sizes(G[:, 0] * 0, G[0] * 0, 0.0)
            )[0],
        ),
    ),
    _pro(
        "statistics",
        reference.statistics,
        _kl("statistics", _kl_statistics, lambda G, state, h: reference_kl.statistics(G, state, h.beta2)),
    ),
    _pro(
        "track_subspace",
        lambda G, state, h: reference.track_subspace(G, state | reference.statistics(G, state, h), h),
    ),
    _pro(
        "refresh_eigenbases",
        lambda G, state, h: reference.refresh_eigenbases(state),
        _kl(
            "refresh_eigenbases",
            lambda i, ops: lambda: _kl_stages(ops).refresh_eigenbases(i["state"], None),
            lambda G, state, h: reference_kl.refresh_eigenbases(state),
        ),
    ),
)
"""In the order of a step; KL-Shampoo tracks no subspace. Its refresh, as ours, takes place once in tau steps."""
