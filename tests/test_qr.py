"""QR without Householder against Householder in float64, on the problems that break plain Cholesky QR.

Bounds as usual for a QR of n columns: orthogonality 100 n eps; where the condition allows it, the same Q.
"""

import pytest
import torch

from prokl.backends.qr import cholesky_refresh, householder_qr, shift_of
from prokl.backends.torch_ops import TorchStages

DTYPES = [torch.float32, torch.float64]


def orthogonality(Q):
    eye = torch.eye(Q.shape[-1], dtype=torch.float64)
    return (Q.double().mT @ Q.double() - eye).abs().amax(dim=(-2, -1))


def random_basis(B, n, r, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(B, n, r, generator=g, dtype=torch.float64))[0]


def spectrum(r, cond):
    return torch.logspace(0, -torch.log10(torch.tensor(cond)).item(), r, dtype=torch.float64)


def tracking_problem(cond, drift, n=60, r=12, B=3):
    """V = Phi U and K = U^T V for a PSD Phi whose leading eigenspace is ``drift`` away from U."""
    Q = random_basis(B, n, n)
    lam = torch.cat([spectrum(r, cond), torch.full((n - r,), 0.3 / cond, dtype=torch.float64)])
    Phi = (Q * lam) @ Q.mT
    g = torch.Generator().manual_seed(1)
    U = torch.linalg.qr(Q[..., :r] + drift * torch.randn(B, n, r, generator=g, dtype=torch.float64))[0]
    V = Phi @ U
    return V, U.mT @ V, U


def symmetric_problem(cond, drift, m=40, B=3):
    Q = random_basis(B, m, m)
    L = (Q * spectrum(m, cond)) @ Q.mT
    g = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(Q + drift * torch.randn(B, m, m, generator=g, dtype=torch.float64))[0]
    return L, basis


@pytest.fixture(params=[True, False], ids=["on-a-host", "on-a-device"])
def ops(request):
    return TorchStages(host_readable=request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drift", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("cond", [1e2, 1e4, 1e6])
def test_tracking_is_orthonormal_and_equals_householder(cond, drift, dtype, ops):
    V, K, U = (t.to(dtype) for t in tracking_problem(cond, drift))
    Q = ops.tracking_qr(V, K, U)
    n, eps = V.shape[-1], torch.finfo(dtype).eps
    assert (orthogonality(Q) <= 100 * n * eps).all()
    if cond * eps <= 1e-5:  # the trailing columns of Q move by about cond * eps under rounding of V
        exact = householder_qr(V.double())
        assert (Q.double() - exact).abs().max() <= 100 * cond * eps


@pytest.mark.parametrize("dtype", DTYPES)
def test_tracking_survives_rank_deficiency_in_one_matrix_of_a_batch(dtype, ops):
    V, K, U = (t.to(dtype) for t in tracking_problem(1e2, 0.1))
    good = ops.tracking_qr(V, K, U)
    V[1] = V[1, :, :2] @ V[1, :2, :]
    V[1] = U[1] @ (g := (V[1].mT @ V[1]))  # V = Phi U with a Phi of rank 2
    K[1] = g
    Q = ops.tracking_qr(V, K, U)
    assert (orthogonality(Q) <= 100 * V.shape[-1] * torch.finfo(dtype).eps).all()
    assert torch.equal(Q[0], good[0]) and torch.equal(Q[2], good[2])


def outside(X, Q):
    """How much of X's range, relative to its size, the columns of Q miss."""
    return float(torch.linalg.norm(X - Q @ (Q.mT @ X)) / torch.linalg.norm(X))


def test_tracking_takes_up_the_range_of_a_rank_deficient_matrix(ops):
    g = torch.Generator().manual_seed(0)
    U, X = random_basis(2, 30, 6), torch.randn(2, 30, 2, generator=g, dtype=torch.float64)
    V = X @ (X.mT @ U)
    assert outside(X, U) > 0.5  # keeping U would not do
    Q = ops.tracking_qr(V, U.mT @ V, U)
    assert outside(X, Q[..., :2]) <= 1e-8  # the shift is about 1e-14 of K
    if not ops.host_readable:  # the other columns come from U, not from rounding noise as Householder's do
        kept, _ = torch.linalg.qr(torch.cat([X, U], dim=-1))
        assert outside(Q, kept) <= 0.05  # measured: 0.006 with the shift of V, 0.75 without


def test_refresh_takes_up_the_range_of_a_rank_deficient_factor():
    g = torch.Generator().manual_seed(0)
    X = torch.randn(2, 20, 5, generator=g, dtype=torch.float64)
    basis = random_basis(2, 20, 20)
    assert outside(X, basis[..., :5]) > 0.5
    assert outside(X, cholesky_refresh(X @ X.mT, basis)[..., :5]) <= 1e-8


def test_tracking_of_a_zero_matrix_is_orthonormal(ops):
    U = random_basis(2, 20, 5)
    Q = ops.tracking_qr(torch.zeros_like(U), torch.zeros(2, 5, 5, dtype=U.dtype), U)
    assert (orthogonality(Q) <= 1e-12).all()


def test_nan_in_one_matrix_leaves_the_others_alone():
    ops = TorchStages(host_readable=False)
    V, K, U = tracking_problem(1e2, 0.1)
    good = ops.tracking_qr(V, K, U)
    V[1, 3, 2] = K[1, 1, 1] = float("nan")
    Q = ops.tracking_qr(V, K, U)
    assert torch.equal(Q[0], good[0]) and torch.equal(Q[2], good[2])
    assert torch.equal(Q[1], U[1])  # nothing better is known: the old basis


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("drift", [1e-3, 0.1, 10.0])
@pytest.mark.parametrize("cond", [1e2, 1e4, 1e6])
def test_refresh_is_orthonormal_and_equals_householder(cond, drift, dtype):
    L, basis = (t.to(dtype) for t in symmetric_problem(cond, drift))
    Q = cholesky_refresh(L, basis)
    m, eps = L.shape[-1], torch.finfo(dtype).eps
    assert (orthogonality(Q) <= 100 * m * eps).all()
    if cond * eps <= 1e-5:
        assert (Q.double() - householder_qr(L.double() @ basis.double())).abs().max() <= 100 * cond * eps


def test_refresh_takes_a_basis_rounded_to_bfloat16():
    L, basis = symmetric_problem(1e3, 0.01)
    rounded = basis.bfloat16().double()
    assert (cholesky_refresh(L, rounded) - householder_qr(L @ rounded)).abs().max() <= 1e-10


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_refresh_of_a_rank_deficient_factor_is_orthonormal(rank):
    g = torch.Generator().manual_seed(0)
    X = torch.randn(2, 20, rank, generator=g, dtype=torch.float64)
    Q = cholesky_refresh(X @ X.mT, random_basis(2, 20, 20))
    assert (orthogonality(Q) <= 100 * 20 * torch.finfo(torch.float64).eps).all()


def test_refresh_basis_on_a_cpu_is_householder():
    L, basis = symmetric_problem(1e2, 0.1)
    assert torch.equal(TorchStages(host_readable=True).refresh_basis(L, basis), householder_qr(L @ basis))


def coordinates_problem(cond, skew, r=12, B=3):
    """S and a Q that is no orthogonal basis: columns of lengths down to 1e-2, singular values from 1 to ``skew``."""
    S, basis = symmetric_problem(cond, 0.1, m=r, B=B)
    turned = (random_basis(B, r, r, seed=5) * spectrum(r, skew)) @ random_basis(B, r, r, seed=6)
    return S, basis @ turned @ torch.diag_embed(spectrum(r, 1e2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skew", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("cond", [1e2, 1e6])
def test_coordinates_are_orthonormal_and_equal_householder(cond, skew, dtype, ops):
    S, Q = (t.to(dtype) for t in coordinates_problem(cond, skew))
    fresh = ops.refresh_coordinates(S, Q)
    r, eps = S.shape[-1], torch.finfo(dtype).eps
    assert (orthogonality(fresh) <= 100 * r * eps).all()
    if cond * skew * eps <= 1e-5:
        exact = householder_qr(S.double() @ Q.double())
        assert (fresh.double() - exact).abs().max() <= 100 * cond * skew * eps


@pytest.mark.parametrize("columns", [0, 1, 5])
def test_coordinates_of_a_singular_matrix_are_orthonormal(columns, ops):
    S, Q = coordinates_problem(1e2, 1.0)
    good = ops.refresh_coordinates(S, Q)
    Q[1] = Q[1, :, :columns] @ random_basis(1, 12, 12)[0, :columns]
    fresh = ops.refresh_coordinates(S, Q)
    assert (orthogonality(fresh) <= 1e-12).all()
    assert torch.equal(fresh[0], good[0]) and torch.equal(fresh[2], good[2])


def test_householder_has_a_positive_diagonal():
    A = torch.randn(4, 9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    R = householder_qr(A).mT @ A
    assert (R.diagonal(dim1=-2, dim2=-1) > 0).all()
    assert R.tril(-1).abs().max() <= 1e-14


def test_shift_is_relative_to_the_matrix():
    K = torch.eye(4, dtype=torch.float64).expand(2, 4, 4)
    assert torch.allclose(shift_of(1e-20 * K), 1e-20 * shift_of(K), rtol=1e-12, atol=0)
