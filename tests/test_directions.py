"""Singular directions of gradients: orthonormal, descending, in a null space a function of the gradient as well."""

import pytest
import torch

from prokl.algorithm import directions
from prokl.algorithm.directions import completed, preferred, singular_directions
from prokl.algorithm.qr import cholesky_qr, householder_qr, signed_qr
from tests.inputs import ForbidHostReads, normal

FORMS = {"householder": householder_qr, "cholesky": cholesky_qr}
SHAPES = [(1, 1), (1, 7), (3, 4), (8, 8), (24, 40)]


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    """Both forms of the completion, that of other devices in the place of a CPU's."""
    monkeypatch.setattr(directions, "householder_qr", FORMS[request.param])


def orthogonal(size, columns, seed):
    return torch.linalg.qr(normal(size, columns, seed=seed, dtype=torch.float64))[0]


def of_spectrum(m, n, sigma, seed=0, aligned=False):
    """X diag(sigma) Y^T (m,n); ``aligned``: with the rows beyond the spectrum zero."""
    k = len(sigma)
    X = torch.zeros(m, k, dtype=torch.float64)
    if aligned:
        X[-k:] = orthogonal(k, k, seed)
    else:
        X = orthogonal(m, k, seed)
    return (X * torch.tensor(sigma, dtype=torch.float64)) @ orthogonal(n, k, seed + 1).mT


def deviation(Q):
    return float((Q.mT @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype)).abs().max())


# Products and factorisations of 40 columns, some eps each. Measured: 1.4e-15 and 4e-7, the largest singular value 1.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 5e-6}


@pytest.mark.parametrize("aligned", [False, True], ids=["any span", "idle rows"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_rank_gives_bases_that_decompose_the_gradient(shape, dtype, aligned, form):
    m, n = shape
    E = preferred(m, m, torch.device("cpu"))
    for rank in range(1, m + 1):
        sigma = [2.0**-i if i < 8 else 2.0**-8 * 0.99 ** (i - 8) for i in range(rank)]
        G = of_spectrum(m, n, sigma, seed=rank, aligned=aligned).to(dtype)
        exact = torch.zeros(m, n, dtype=torch.float64)
        exact.diagonal()[:rank] = torch.tensor(sigma, dtype=torch.float64)
        for columns in {1, rank, m, n}:
            X, Y = singular_directions(G[None], columns)
            assert X.shape == (1, m, m) and Y.shape == (1, n, columns) and X.dtype == Y.dtype == dtype
            assert deviation(X[0]) < TOLERANCES[dtype] and deviation(Y[0]) < TOLERANCES[dtype]
            found = X[0].double().mT @ G.double() @ Y[0].double()
            assert (found - exact[:, :columns]).abs().max() < TOLERANCES[dtype]
        assert ((X[0].double() * E).sum(dim=0)[:rank] > 0).all()  # the sign rule


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("m, n", [(3, 4), (6, 9)])
def test_bases_stay_orthonormal_down_to_the_bound(m, n, dtype, form):
    """A small matrix's Gram form has few digits left there."""
    bound = n * torch.finfo(dtype).eps
    sigma = [(2 * bound) ** (i / (m - 1)) for i in range(m)]
    for seed in range(20):
        for Q in singular_directions(of_spectrum(m, n, sigma, seed=seed).to(dtype)[None], n):
            assert deviation(Q[0]) < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_what_is_below_the_bound_takes_no_part(dtype):
    m, n = 6, 40
    bound = n * torch.finfo(dtype).eps
    left, right = orthogonal(m, 2, seed=1), orthogonal(n, 2, seed=2)

    def start(sigma):
        G = left[:, :1] @ right[:, :1].mT + sigma * left[:, 1:] @ right[:, 1:].mT
        return singular_directions(G.to(dtype)[None], n)

    none, below, above = start(0.0), start(bound / 4), start(bound * 4)
    for a, b in zip(none, below, strict=True):
        assert (a - b).abs().max() < 20 * bound  # the first direction turns by the rounding of G
    second = [above[0][0, :, 1].double() @ left[:, 1], above[1][0, :, 1].double() @ right[:, 1]]
    assert all(abs(float(x)) > 0.9 for x in second)  # determined, by four times the bound over G's rounding
    assert abs(float(below[0][0, :, 1].double() @ left[:, 1])) < 0.9


def test_both_forms_of_the_completion_agree_whatever_the_span():
    """Over every rank of spans of all kinds; a square completion of size c has a condition of c, now and then 100 c."""
    worst = 0.0
    for m in (4, 16, 48):
        E = preferred(m, m, torch.device("cpu"))
        for k in range(1, m):
            rows = torch.randperm(m, generator=torch.Generator().manual_seed(k))[:k]
            aligned = torch.zeros(m, k, dtype=torch.float64)
            aligned[rows] = orthogonal(k, k, seed=k)
            for X in (orthogonal(m, k, seed=k), aligned, torch.eye(m, dtype=torch.float64)[:, :k]):
                A = torch.cat([X, E[:, k:]], dim=1)
                one, two = householder_qr(A), cholesky_qr(A)
                assert deviation(one) < 1e-13 and deviation(two) < 1e-13
                assert (two[:, :k] - X).abs().max() < 1e-13  # what is determined stays
                worst = max(worst, float((one - two).abs().max()))
    assert worst < 1e-9  # measured: 2e-12; the condition times eps


@pytest.mark.parametrize("condition", [1e3, 1e6, 1e9])
def test_the_shifted_cholesky_form_stands_any_condition(condition):
    A = orthogonal(30, 20, seed=0)
    A[:, -1] = A[:, 0] + A[:, -1] / condition
    A = A / torch.linalg.vector_norm(A, dim=0)
    assert deviation(cholesky_qr(A)) < 1e-13
    assert (cholesky_qr(A) - householder_qr(A)).abs().max() < 1e-14 * condition


def test_nothing_is_read_on_the_host(form):
    """No value decides what a meta tensor does."""
    left, right = singular_directions(torch.empty(3, 6, 10, device="meta"), 10)
    assert left.shape == (3, 6, 6) and right.shape == (3, 10, 10)
    with ForbidHostReads():
        singular_directions(normal(3, 6, 10), 4)


def grams(*sigmas):
    return torch.stack([G @ G.mT for G in (of_spectrum(24, 40, sigma, seed=i) for i, sigma in enumerate(sigmas))])


GRAMS = {
    "falling": [0.5 * 2.0**-i for i in range(24)],
    "equal": [24**-0.5] * 24,
    "rank one": [1.0],
    "one and little": [1.0, *[1e-9] * 23],
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_eigenvectors_pass_their_check_by_far(device):
    A = grams(*GRAMS.values()).to(device)
    found = torch.linalg.eigh(A)
    assert directions._decomposes(A, *found)
    assert directions._decomposes(A / 25, *(t / c for t, c in zip(found, (25, 1), strict=True)))
    # Measured: 1e-15, where 2.7e-13 is allowed; 0.02 eps m at m = 64, 0.001 at 768.
    assert not directions._decomposes(A + 1e-12 * torch.eye(24, dtype=A.dtype, device=device), *found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda values, X: (values, X.flip(0)),  # of another matrix
        lambda values, X: (values, X[..., [*range(23), 22]]),  # not orthogonal
        lambda values, X: (values, torch.zeros_like(X)),
        lambda values, X: (values, torch.full_like(X, torch.nan)),
        lambda values, X: (values.flip(-1), X),
    ],
)
def test_wrong_eigenvectors_of_a_device_are_replaced_by_lapacks(spoil, monkeypatch):
    A, eigh, called = grams(GRAMS["falling"], GRAMS["one and little"]), torch.linalg.eigh, []

    def wrong_at_first(given):
        called.append(given)
        return spoil(*eigh(given)) if len(called) == 1 else eigh(given)

    monkeypatch.setattr(torch.linalg, "eigh", wrong_at_first)
    found = directions._eigenvectors(A, trusted=False)
    assert len(called) == 2 and all(map(torch.equal, found, eigh(A)))
    assert directions._eigenvectors(A, trusted=True) and len(called) == 3


def test_undetermined_columns_may_hold_anything():
    A = orthogonal(8, 4, seed=3)[None]
    known, none = torch.tensor([[True, True, False, False]]), torch.zeros(1, 8, dtype=torch.bool)
    spoiled = torch.where(known[:, None], A, torch.nan)
    assert torch.equal(completed(spoiled, known, none), completed(A, known, none))


def test_idle_coordinates_have_columns_of_their_own(form):
    G = normal(2, 6, 3, dtype=torch.float64) @ normal(2, 3, 9, seed=1, dtype=torch.float64)
    G[0, 1] = G[0, 4] = G[1, :, :7] = 0
    for columns in (2, 9):
        X, Y = directions.singular_directions(G, columns)
        for Q in (X, Y):
            assert (Q.mT @ Q - torch.eye(Q.shape[-1], dtype=Q.dtype)).norm() < 1e-12
        assert torch.equal(X[0, :, 4:], torch.eye(6, dtype=X.dtype)[:, [1, 4]])
        assert not X[0, [1, 4], :4].any() and not Y[1, :7, :2].any()
    assert torch.equal(Y[1, :, 2:], torch.eye(9, dtype=Y.dtype)[:, :7])


@pytest.mark.parametrize("shape", [(8, 3), (5, 5)])
def test_rows_of_zeros_stay_zeros_in_a_qr(shape):
    A = normal(*shape)
    A[[0, 3]] = 0
    Q, R = signed_qr(A)
    assert not Q[[0, 3], :3].any() and (Q @ R - A).norm() < 1e-5
    assert (Q.mT @ Q - torch.eye(shape[1])).norm() < 1e-5 and (R.diagonal() >= 0).all()


def test_the_preferred_directions_are_the_same_everywhere():
    before = torch.random.get_rng_state()
    E = preferred(9, 7, torch.device("cpu"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(E[:, :3], preferred(9, 3, torch.device("cpu")))
    with torch.device("meta"):
        assert torch.equal(E, preferred(9, 7, torch.device("cpu")))
    # Those of torch 2.13: another generator's would be another start.
    expected = torch.tensor([0.569731647436754, 0.251889793830742, -0.049230241349577], dtype=torch.float64)
    torch.testing.assert_close(E[:3, 0], expected)
