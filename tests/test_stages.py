"""Every stage, part of one and operation that a backend overrides, beside the stages as they are written in float64.

Dimension key: B matrices, m short side, n long side, r rank.
"""

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.algebra import Roots
from prokl.algorithm.klshampoo import KLShampooStages
from prokl.algorithm.stages import Sample
from prokl.backends import torch_ops, torch_pairs, triton_ops, triton_pairs
from prokl.kernels.launch import INTERPRETED
from prokl.pair import RESIDUAL, Pair
from tests.problems import largest

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
B, m, n, r = 2, 9, 21, 4
PLAIN, KL_PLAIN = torch_ops.TorchStages(host_readable=False), torch_ops.TorchKLStages(host_readable=False)
OVERRIDING = {
    "triton": (triton_ops.TritonStages(False, INTERPRETED), triton_ops.TritonStages, triton_ops.TritonAlgebra),
    "triton, pairs": (
        triton_pairs.PairedStages(False, INTERPRETED),
        triton_pairs.PairedStages,
        triton_pairs.PairedAlgebra,
    ),
    "torch, pairs": (torch_pairs.PairedStages(False), torch_pairs.PairedStages, torch_pairs.PairedAlgebra),
}
H = ProKLShampoo.method.hyper(ProKLShampoo([torch.zeros(2, 2)]).defaults)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def basis(*shape, seed):
    return torch.linalg.qr(randn(*shape, seed=seed))[0]


def factor(k, seed):
    X = randn(B, k, 2 * k, seed=seed)
    return X @ X.mT / k


def values(dtype, stored):
    """A gradient, a state and what lies between the stages, rounded to ``stored``."""
    state = {"M": randn(B, m, n, seed=1), "U": basis(B, n, r, seed=2), "L": factor(m, 3), "S": factor(r, 4)}
    state |= {"Q_L": basis(B, m, m, seed=5), "Q_S": basis(B, r, r, seed=6) + 0.1 * randn(B, r, r, seed=7)}
    sizes = (("inv_sqrt_lambda_L", (B, m)), ("inv_sqrt_lambda_S", (B, r)), ("inv_sqrt_mu", (B,)))
    state |= {key: 0.5 + randn(*shape, seed=8 + i).abs() for i, (key, shape) in enumerate(sizes)}
    state |= {key: 0.5 + 0 * state["inv_sqrt_mu"] for key in ("lambda_0", "clipped")}
    a = Roots(*(state[key] for key, _ in sizes))
    v = {
        "G": 3 * randn(B, m, n),
        "x": randn(B, m, r, seed=11),
        "y": randn(B, m, r, seed=12),
        "c": randn(B, seed=13).abs(),
    }
    v |= {"E": factor(m, 14), "X": randn(B, m, n, seed=15) / 20, "K": factor(r, 16)}
    v, state = ({key: t.to(stored).to(dtype) for key, t in own.items()} for own in (v, state))
    return v, state, Roots(*(t.to(stored).to(dtype) for t in a))


def lookahead(s, v, state):
    projected = s.project(v["G"], state, None)
    return s.momentum(v["G"].clone(), projected, v["c"], state | {"M": state["M"].clone()}, H, None)


def momentum(s, v, state, a):
    M, ahead = lookahead(s, v, state)
    rest = ahead.residual
    return M, ahead.G_par, rest.G_hat_perp, rest.size.sum(1), rest.full_size.sum(1)


def whiten(s, v, state, a):
    X, scale = s.whiten(s.spectral(state["Q_L"], a.L), lookahead(s, v, state)[1].residual, a.L.dtype)
    return X if scale is None else X * scale[:, None, None]


def admit(s, v, state, a):
    found = s.admit(v["x"], v["y"], state["inv_sqrt_lambda_L"], state, H, n)
    return found.scale, *found.used, *found.s, *found.a, found.tail, *found.changed.values()


def track(s, v, state, a):
    projected = s.project(v["G"], state, None)
    return s.track(projected.G_perp, s.whitened(Sample(v["x"], v["K"]), state), v["K"], state["U"], 1e-3)


CASES = {
    "product": lambda s, v, state, a: s.product(v["X"], state["U"], C=v["x"], alpha=v["c"], beta=0.3),
    "symmetric_product": lambda s, v, state, a: s.symmetric_product(v["X"], C=v["E"], alpha=0.7, beta=v["c"]),
    "symmetric_polynomial": lambda s, v, state, a: s.symmetric_polynomial(v["E"], v["E"] @ v["E"], C=v["E"], alpha=2.0),
    "spectral": lambda s, v, state, a: s.spectral(state["Q_L"], a.L),
    "congruence": lambda s, v, state, a: s.congruence(v["E"], state["Q_L"]),
    "diagonal": lambda s, v, state, a: s.diagonal(state["Q_L"], v["E"]),
    "tracking_qr": lambda s, v, state, a: s.tracking_qr(state["U"] @ v["K"], v["K"], state["U"]),
    "refresh_basis": lambda s, v, state, a: s.refresh_basis(state["L"], state["Q_L"]),
    "refresh_coordinates": lambda s, v, state, a: s.refresh_coordinates(state["S"], state["Q_S"]),
    "gram": lambda s, v, state, a: s.gram(v["X"], v["c"]),
    "shifted_polynomial": lambda s, v, state, a: s.shifted_polynomial(
        v["E"], v["E"], C=v["E"], alpha=0.3, beta=-0.5, shift=2.0
    ),
    "project": lambda s, v, state, a: s.project(v["G"], state, None),
    "projections": lambda s, v, state, a: s.projections(v["G"], state["M"], state["U"], None),
    "residual_energies": lambda s, v, state, a: s.residual_energies(
        s.project(v["G"], state, None), residual_gram(v, state)
    ),
    "admit": admit,
    "momentum": momentum,
    "residual": momentum,
    "combined": momentum,
    "whiten": whiten,
    "precondition": lambda s, v, state, a: s.precondition(
        s.spectral(state["Q_L"], a.L), lookahead(s, v, state)[1].G_par, state["Q_S"], a.S, 0.7
    ),
    "right_factor": lambda s, v, state, a: s.right_factor(s.project(v["G"], state, None).U, state, H),
    "cut": lambda s, v, state, a: s.cut(v["x"], 3.0, v["x"].dtype, v["c"] > 9, v["c"]),
    "samples": lambda s, v, state, a: s.samples(v["x"], v["y"], a, v["c"], 0.1),
    "factor_ema": lambda s, v, state, a: s.factor_ema(state["L"], v["x"], v["E"].clone(), v["c"], 0.9, 0.1),
    "coordinates_ema": lambda s, v, state, a: s.coordinates_ema(state["S"], v["x"].mT, 0.9, 0.1),
    "whitened": lambda s, v, state, a: s.whitened(Sample(v["x"], v["K"]), state),
    "track": track,
}


def residual_gram(v, state):
    G_perp = v["G"] - v["G"] @ state["U"] @ state["U"].mT
    return G_perp @ G_perp.mT


def flat(x):
    if isinstance(x, Pair):
        return [x.whole().double()]
    return [x.double()] if isinstance(x, torch.Tensor) else [t for own in x for t in flat(own)]


def off(name, stages, dtype):
    """By how much results are off from those of the stages as they are written, by norm."""
    found = flat(CASES[name](stages, *values(dtype, dtype)))
    wanted = flat(CASES[name](PLAIN, *values(torch.float64, dtype)))
    assert [t.shape[-1] for t in wanted] == [t.shape[-1] for t in found]
    # Parts are added up before.
    found = [x.sum(1) if x.ndim > y.ndim else x for x, y in zip(found, wanted, strict=True)]
    return largest(float((x - y).norm() / y.norm()) for x, y in zip(found, wanted, strict=True))


def overridden(name):
    found = {key for cls in OVERRIDING[name][1:] for key in vars(cls) if not key.startswith("_")}
    return found - {"name", "rounding"}


@pytest.mark.parametrize("name", sorted(overridden("triton")))
def test_what_kernels_override_is_its_default_in_float64(name):
    assert off(name, OVERRIDING["triton"][0], torch.float64) <= 1e-12


@pytest.mark.parametrize("backend, name", [(b, x) for b in OVERRIDING if b != "triton" for x in sorted(overridden(b))])
def test_what_pairs_override_is_its_default_but_for_what_pairs_lose(backend, name):
    """A pair is off by 2^-17 of an entry; U as one half, on its own, by 2^-9."""
    error = off(name, OVERRIDING[backend][0], torch.float32)
    print(f"{backend} {name} {error:.1e}")
    assert error <= (2**-8 if name == "right_factor" else 2**-14)


def test_pairs_take_a_larger_residual_for_rounding():
    for backend in ("triton, pairs", "torch, pairs"):
        assert OVERRIDING[backend][0].noise(n, torch.float32, torch.float32) == RESIDUAL**2
    assert PLAIN.noise(n, torch.float32, torch.float32) < RESIDUAL**2


@pytest.mark.parametrize("module", [triton_ops, triton_pairs, torch_pairs], ids=lambda x: x.__name__)
def test_kl_shampoos_step_over_kernels_and_pairs_is_that_of_its_stages(module):
    where = (False,) if module is torch_pairs else (False, INTERPRETED)
    own, dtype = module.STAGES["kl-shampoo"](*where), torch.float64 if module is triton_ops else torch.float32
    assert isinstance(own, KLShampooStages)
    h = KLShampoo.method.hyper(KLShampoo([torch.zeros(2, 2)]).defaults)

    def step(stages, dtype):
        v, state, _ = values(dtype, torch.float32)
        right = {"R": factor(n, 20), "Q_R": basis(B, n, n, seed=21)}
        right["inv_sqrt_lambda_R"] = 0.5 + randn(B, n, seed=22).abs()
        state |= {key: t.float().to(dtype) for key, t in right.items()}
        direction, new, _ = stages.step(v["G"], state, h, v["c"], None)
        return [direction.dense().double(), *(new[key].double() for key in sorted(new))]

    error = largest(
        float((x - y).norm() / y.norm()) for x, y in zip(step(own, dtype), step(KL_PLAIN, torch.float64), strict=True)
    )
    print(f"{module.__name__} {error:.1e}")
    assert error <= (1e-12 if dtype == torch.float64 else 2**-14)
