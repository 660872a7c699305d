"""Newton-Schulz in Gram form against the standard form and the reference."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import prokl
from prokl.algorithm import settings
from prokl.algorithm.newton_schulz import gram_factor, newton_schulz_factors, use_gram
from prokl.algorithm.reference import newton_schulz, polar
from prokl.backends.torch_ops import TorchStages

OPS = TorchStages(host_readable=True)
MUON = (3.4445, -4.7750, 2.0315)
CUBIC = (1.5, -0.5, 0.0)


def matrices(B, m, n, dtype=torch.float64, smallest=1e-4):
    """Singular values from 1 down to ``smallest``, scaled to unit Frobenius norm."""
    g = torch.Generator().manual_seed(0)
    U, _ = torch.linalg.qr(torch.randn(B, m, m, generator=g, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(B, n, m, generator=g, dtype=torch.float64))
    sigma = torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), m, dtype=torch.float64)
    X = (U * sigma) @ V.mT
    return (X / torch.linalg.matrix_norm(X)[:, None, None]).to(dtype)


def result(X, steps, coefficients, gram):
    Q, Y, _ = newton_schulz_factors(X, None, steps, coefficients, OPS, gram=gram)
    return Y if Q is None else Q @ Y


@pytest.mark.parametrize("gram", [False, True])
@pytest.mark.parametrize("coefficients", [MUON, CUBIC], ids=["muon", "cubic"])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (5, 9), (12, 12), (16, 64)])
def test_both_forms_equal_the_reference(shape, steps, coefficients, gram):
    X = matrices(3, *shape)
    wanted = torch.stack([newton_schulz(x, steps, coefficients) for x in X])
    # float64 rounding, multiplied by at most a = 3.4445 an iteration: 3.4445^7 * 1e-16 * sqrt(m n) < 1e-10
    assert (result(X, steps, coefficients, gram) - wanted).abs().max() <= 1e-10


@pytest.mark.parametrize("smallest", [1e-2, 1e-4])
@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 1.6), (torch.float16, 1.6), (torch.float32, 4.0)])
def test_gram_form_is_about_as_accurate_as_the_standard_form(dtype, bound, smallest):
    X = matrices(4, 64, 256, smallest=smallest)
    exact = result(X, 5, MUON, False)
    gram, standard = (
        torch.linalg.matrix_norm(result(X.to(dtype), 5, MUON, form).double() - exact).mean() for form in (True, False)
    )
    # Measured gram / standard for smallest = 1e-2 and 1e-4: half precisions 1.3 and 0.85, float32 2.7 and 1.4.
    assert gram <= bound * standard


def nearly_rank_one(B, m, n, rows):
    """Rank one in the first ``rows`` rows plus noise from 3e-4 to 0.1 of it everywhere."""
    g = torch.Generator().manual_seed(1)
    X = torch.zeros(B, m, n, dtype=torch.float64)
    X[:, :rows] = torch.randn(B, rows, 1, generator=g) @ torch.randn(B, 1, n, generator=g)
    X += torch.logspace(-3.5, -1, B)[:, None, None] * torch.randn(B, m, n, generator=g)
    return X / torch.linalg.matrix_norm(X)[:, None, None]


@pytest.mark.parametrize(
    "dtype, m, rows",
    [
        *((torch.bfloat16, m, rows) for m, rows in ((2, 2), (3, 3), (8, 8), (24, 24), (64, 3), (64, 6))),
        *((torch.float16, m, rows) for m, rows in ((3, 3), (24, 24))),
    ],
)
def test_gram_form_never_does_much_worse_than_the_standard_form_on_nearly_rank_one_matrices(dtype, m, rows):
    X = nearly_rank_one(300, m, 2 * m, rows)
    exact = result(X, 5, MUON, False)
    gram, standard = (
        torch.linalg.matrix_norm(result(X.to(dtype), 5, MUON, form).double() - exact).max() for form in (True, False)
    )
    # Measured: 0.96 to 1.05; with a restart after three iterations up to 1e5 times it in bfloat16.
    assert gram <= 2 * standard


def test_without_the_restart_half_precision_fails():
    X = matrices(4, 64, 256)
    exact = result(X, 5, MUON, False)
    low = X.bfloat16()
    no_restart = (gram_factor(low @ low.mT, 5, MUON, OPS) @ low).double()
    restarted = result(low, 5, MUON, True).double()
    assert torch.linalg.matrix_norm(no_restart - exact).mean() >= 4 * torch.linalg.matrix_norm(restarted - exact).mean()


def test_whitening_the_gram_matrix_in_half_precision_fails_where_whitening_the_gradient_does_not():
    """Why the step forms X = P G before Newton-Schulz instead of starting from P (G G^T) P."""
    g = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64))
    scales = torch.logspace(0, -2, 64, dtype=torch.float64)  # cond(P) = 100
    G, P = (basis * scales) @ torch.randn(64, 256, generator=g, dtype=torch.float64), (basis / scales) @ basis.mT
    X = (P @ G)[None]
    X /= torch.linalg.matrix_norm(X)
    exact = result(X, 5, MUON, False)
    H = (G.bfloat16() @ G.bfloat16().mT).float()
    R = P.float() @ H @ P.float()
    factor = gram_factor((R / R.trace()).bfloat16()[None], 3, MUON, OPS).float() / R.trace().sqrt()
    Y = ((factor @ P.float()).bfloat16() @ G.bfloat16()).bfloat16()
    from_gram = result(Y, 2, MUON, True).double()
    from_gradient = result(X.bfloat16(), 5, MUON, True).double()
    size = torch.linalg.matrix_norm(exact)
    assert torch.linalg.matrix_norm(from_gradient - exact) <= 0.05 * size  # measured: 0.018
    assert not torch.linalg.matrix_norm(from_gram - exact) <= size  # measured: it overflows to NaN


def test_enough_cubic_steps_reach_the_polar_factor():
    X = matrices(1, 8, 20, smallest=0.1)
    assert (result(X, 20, CUBIC, True)[0] - polar(X[0])).abs().max() <= 1e-10


def test_form_is_chosen_by_aspect():
    assert not use_gram(256, 256) and use_gram(256, 1024)
    X = matrices(1, 8, 8)
    assert newton_schulz_factors(X, None, 5, MUON, OPS)[0] is None
    assert newton_schulz_factors(matrices(1, 8, 32), None, 5, MUON, OPS)[0] is not None


@pytest.mark.parametrize("capable", [True, False])
def test_newton_schulz_is_in_float32_where_a_cpu_would_emulate_bfloat16(capable, monkeypatch):
    found = {"avx2": True, "avx512_bf16": capable, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found, raising=False)
    settings.cpu_has_bfloat16.cache_clear()
    try:
        like = torch.empty(2, 3)
        optimizer = prokl.ProKLShampoo([torch.nn.Parameter(torch.ones(2, 3))])
        h = settings.ProHyper.of(optimizer.param_groups[0])
        assert h.polar_dtype(like) == (torch.bfloat16 if capable else torch.float32)
        assert h.polar_dtype(like.to("meta")) == torch.bfloat16
        assert h.polar_dtype(like.double()) == torch.float64
        assert replace(h, ns_dtype=torch.bfloat16).polar_dtype(like) == torch.bfloat16
    finally:
        settings.cpu_has_bfloat16.cache_clear()


@pytest.mark.parametrize("capability, dtype", [((7, 5), torch.float32), ((8, 0), torch.bfloat16)])
def test_newton_schulz_is_in_float32_where_a_gpu_would_emulate_bfloat16(capability, dtype, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    h = settings.ProHyper.of(prokl.ProKLShampoo([torch.nn.Parameter(torch.ones(2, 3))]).param_groups[0])
    assert h.polar_dtype(SimpleNamespace(dtype=torch.float32, device=torch.device("cuda", 0))) == dtype
