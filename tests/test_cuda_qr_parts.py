"""The parts of the CUDA extension's QR, how far two passes of Cholesky QR go, and state in bfloat16."""

from collections import Counter
from itertools import product

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.algebra import Algebra
from prokl.backends import cuda_qr
from prokl.backends.io import TorchIO
from prokl.backends.select import Backend
from prokl.backends.torch_pairs import PairedAlgebra
from prokl.cuda_qr import QRStatus
from prokl.pair import Pair
from tests.inputs import same_bits
from tests.qr_bounds import assert_is_qr
from tests.qr_forms import pieces, products_on, refresh, track
from tests.qr_problems import CLASSES, draw
from tests.tensor_cores import TensorCores
from tests.test_cuda_qr import DTYPES


def test_the_host_allocates_for_the_columns_of_a_launch(extension_on_cpu):
    found = {dtype: getattr(extension_on_cpu, name).block for dtype, name in cuda_qr.DTYPES.items()}
    assert found == cuda_qr.BLOCK


@pytest.mark.parametrize("k", [12, 150])
def test_only_matrices_beyond_the_bound_are_factored_anew(extension_on_cpu, k):
    (A,) = draw("qr", "random", (3, 150, k))
    Q = torch.linalg.qr(A)[0].contiguous()
    bound = 100 * k * torch.finfo(torch.float32).eps
    # ||Q^T Q - I||_F is the change of the first column's squared length.
    scaled = Q.clone()
    scaled[..., 0] *= (1 + bound * torch.tensor([0.0, 0.97, 1.03])).sqrt()[:, None]
    found = scaled.clone()
    status = torch.ops.prokl.finish(A, found, scaled.mT @ scaled, None, torch.tensor([0, 4, 4], dtype=torch.int32))
    assert [QRStatus(u) for u in status.tolist()] == [
        QRStatus(0),
        QRStatus.RAISED,
        QRStatus.RAISED | QRStatus.HOUSEHOLDER,
    ]
    assert same_bits(found[:2], scaled[:2])
    assert_is_qr("qr", (A[2:],), found[2:])


def test_a_gram_matrix_in_parts_is_their_sum(extension_on_cpu):
    (W,) = draw("qr", "random", (2, 60, 20))
    parts = torch.stack([part.mT @ part for part in W.split(20, dim=1)], dim=1)
    whole = parts.sum(dim=1)
    eps = torch.finfo(torch.float32).eps
    for kind in (cuda_qr.Kind.PASS, cuda_qr.Kind.SETTLE):
        found, wanted = (torch.ops.prokl.factor(N.contiguous(), kind, None)[0] for N in (parts, whole))
        assert (found - wanted).abs().max() <= 20 * eps * wanted.abs().max()
    orthonormal = torch.linalg.qr(W)[0].contiguous()
    parts = torch.stack([part.mT @ part for part in orthonormal.split(20, dim=1)], dim=1)
    Q = orthonormal.clone()
    assert (torch.ops.prokl.finish(W, Q, parts, None, None) == 0).all() and same_bits(Q, orthonormal)


@pytest.mark.parametrize(
    "n, k, parts",
    [(1024, 4, 1), (1026, 4, 2), (2048, 4, 2), (1035, 4, 3), (1031, 4, 1), (2048, 129, 1)],
    ids=["short", "two rows more", "two whole ones", "not by two", "prime", "wide"],
)
def test_the_gram_matrix_of_many_rows_comes_in_parts(n, k, parts):
    W = torch.randn(2, n, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64).float()
    N = cuda_qr._gram(Algebra(host_readable=False), W)
    whole = N if parts == 1 else N.sum(dim=1)
    assert N.shape == ((2, k, k) if parts == 1 else (2, parts, k, k))
    # Each sum of n products rounds by at most n / 2 of its terms' eps, in whatever order.
    close = n * torch.finfo(W.dtype).eps * W.abs().mT.double() @ W.abs().double()
    assert ((whole.double() - W.mT.double() @ W.double()).abs() <= close).all()


@pytest.mark.parametrize("m", [40, 160])  # in one block of columns, and in several
@pytest.mark.parametrize("low", ["rank m/4", "condition 1e+04", "condition 1e+06"])
def test_an_indefinite_bfloat16_factor_is_refreshed_as_any_other(extension_on_cpu, low, m):
    values = torch.arange(m) < m // 4 if low == "rank m/4" else torch.logspace(0, -float(low[-2:]), m)
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        X = torch.linalg.qr(torch.randn(1, m, m, generator=g, dtype=torch.float64))[0]
        L = ((X * values.double()) @ X.mT).bfloat16().float()
        L = (L + L.mT) / 2
        assert torch.linalg.eigvalsh(L.double()).min() < -1e-5
        found = refresh(L)
        assert_is_qr("refresh", (L,), found.Q)
        assert not (found.status & int(QRStatus.NONFINITE)).any()


@pytest.mark.parametrize("k", [12, 140])
def test_a_root_of_an_indefinite_matrix_is_marked_and_rejected(extension_on_cpu, k):
    (A,) = draw("qr", "random", (3, k, k))
    X = torch.linalg.qr(A)[0]
    values = torch.stack([torch.ones(k), torch.linspace(1, 0, k).round(), torch.linspace(1, -0.5, k)])  # 1; rank k/2
    H = (X * values[:, None]) @ X.mT
    status = torch.ops.prokl.semidefinite_root(((H + H.mT) / 2).contiguous())[1]
    assert [QRStatus(u) for u in status.tolist()] == [QRStatus(0), QRStatus.SHIFTED, QRStatus.SHIFTED | QRStatus.LOST]
    for of_root, rejected in ((True, QRStatus.HOUSEHOLDER), (False, QRStatus(0))):
        found = X.contiguous().clone()
        then = torch.ops.prokl.finish(A.contiguous(), found, X.mT @ X, None, status, of_root)
        assert [QRStatus(u) & QRStatus.HOUSEHOLDER for u in then.tolist()] == [QRStatus(0), QRStatus(0), rejected]
        assert same_bits(found[:2], X[:2].contiguous())


@pytest.mark.parametrize("k", [12, 140])
@pytest.mark.parametrize("size", [2.0**-110, 2.0**100])
def test_a_scaled_singular_factor_is_shifted_in_proportion(extension_on_cpu, size, k):
    """The factored matrix is the shifted one: scale (K + shift I) = C C^T, of which C^-T is given."""
    S = draw("refresh", "rank-deficient, fresh", (3, k, k))[0] * size
    F, shifted, scale, status = torch.ops.prokl.semidefinite_inverse(S.contiguous())
    assert all(QRStatus(u) & QRStatus.SHIFTED for u in status.tolist()) and (scale != 1).all()
    unit = F.double().mT @ (shifted.double() * scale.double()[:, None, None]) @ F.double()
    # The condition is 1 / (4 k^1/2 eps), and the inverse is off by k eps of it.
    assert torch.linalg.matrix_norm(unit - torch.eye(k, dtype=torch.float64)).max() <= k**0.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_bases_do_not_lose_orthogonality_from_refresh_to_refresh(extension_on_cpu, dtype):
    (L,), ops = draw("refresh", "condition 1e+04, moving", (2, 30, 30), dtype), products_on(torch.device("cpu"))
    ops.semidefinite_qr = lambda L: ((Q := refresh(L).Q), Q.mT @ L)
    eye = torch.eye(30, dtype=torch.float64)
    Q = eye.to(dtype).expand_as(L)
    for _ in range(30):
        _, Q, L = ops.refreshed(L, Q)
        off = torch.linalg.matrix_norm(Q.double().mT @ Q.double() - eye)
        assert (off <= 30 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("name", ["condition 1e+06, moving", "rank-deficient, fresh", "dominated, fresh", "mixed"])
def test_products_of_tensor_cores_are_exact_enough(extension_on_cpu, name):
    # Largest of all classes: orthogonality 0.03 of its bound, backward error 0.07.
    products, size = TensorCores(host_readable=False), (2, 150, 70)
    tracked, refreshed = draw("tracking", name, size), draw("refresh", name, size)
    for operation, inputs, (Q, status) in (
        ("tracking", tracked, cuda_qr.track(products, *pieces(*tracked))),
        ("refresh", refreshed, cuda_qr.semidefinite_qr(products, *refreshed)),
    ):
        assert_is_qr(operation, inputs, Q)
        assert not (status & QRStatus.HOUSEHOLDER).any()


@pytest.mark.parametrize("operation, function", [("tracking", track), ("refresh", refresh)])
@pytest.mark.parametrize(
    "size, dtype",
    [((3, 60, 12), DTYPES[0]), ((3, 60, 12), DTYPES[1]), ((2, 150, 70), DTYPES[0]), ((1, 300, 130), DTYPES[0])],
)
def test_two_passes_do_for_whatever_comes_with_a_cholesky_factor(extension_on_cpu, operation, function, size, dtype):
    for name in CLASSES[operation]:
        status = function(*draw(operation, name, size, dtype)).status
        assert not (status & QRStatus.HOUSEHOLDER).any(), name


@pytest.mark.parametrize("d, idle, settled", [(12, 4, True), (12, 4, False), (150, 20, True), (150, 20, False)])
def test_a_refresh_leaves_rows_of_zeros_apart_whoever_factors(extension_on_cpu, d, idle, settled):
    """They are the last ones, where Householder's pivots leave no rounding; among the first ones it was 1e-7."""
    live = d - idle
    (L,) = draw("refresh", "random", (2, live, live))
    if not settled:
        L = L - 0.3 * torch.diag_embed(L.diagonal(dim1=-2, dim2=-1))
    found = cuda_qr.semidefinite_qr(products_on(L.device), torch.nn.functional.pad(L, (0, idle, 0, idle)))
    assert all(bool(QRStatus(u) & QRStatus.HOUSEHOLDER) is not settled for u in found.status.tolist())
    assert not found.Q[:, :live, live:].any() and not found.Q[:, live:, :live].any()
    rest = found.Q[:, live:, live:]
    assert torch.equal(rest, torch.diag_embed(rest.diagonal(dim1=-2, dim2=-1)))


@pytest.mark.parametrize("n, r, idle", [(40, 12, 6), (40, 12, 33), (300, 140, 50), (300, 140, 200)])
def test_tracking_leaves_rows_of_zeros_anywhere_alone(extension_on_cpu, n, r, idle):
    """If fewer than r columns are left, the others are idle rows' unit vectors. No column went to Householder."""
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(n, generator=g)
    dead, live, k = order[:idle], order[idle:], min(r, n - idle)
    U = torch.zeros(2, n, r)
    U[:, live, :k] = torch.linalg.qr(torch.randn(2, n - idle, k, generator=g)).Q
    U[:, dead[: r - k], k + torch.arange(r - k)] = 1
    for rows in (n, 3):
        X = torch.randn(2, rows, n, generator=g) * torch.logspace(0, -3, n)
        X[..., dead] = 0
        V = X.mT @ (X @ U)
        found = track(V, U.mT @ V, U)
        assert not any(QRStatus(u) & QRStatus.HOUSEHOLDER for u in found.status.tolist())
        assert torch.equal(found.Q[:, dead] != 0, U[:, dead] != 0) and not found.Q[:, live, k:].any()


# State stored in bfloat16


class WithExtension(PairedAlgebra):
    """PyTorch's products, the extension's QRs, and what these did to every factor that was refreshed."""

    def __init__(self):
        super().__init__(host_readable=False)
        self.done, self.given_up = Counter(), False

    def track(self, *given):
        return cuda_qr.track(self, *given).Q

    def coordinates_qr(self, S, Q):
        return cuda_qr.coordinates_qr(self, S, Q).Q

    def semidefinite_qr(self, L):
        Q, status = cuda_qr.semidefinite_qr(self, L)
        self.done.update(status.tolist())
        self.given_up |= torch.equal(super().semidefinite_qr(L)[0].whole(), torch.eye(L.shape[-1])[None])
        Q = self.operand(Q)
        return Q, self.operand(self.product(Q.mT, L))


def drawn(kind, m, g):
    """A gradient m x m."""
    G = torch.randn(m, m, generator=g)
    if kind == "half of the rows idle":
        G[m // 2 :] = 0
    if kind == "graded in a random basis":
        basis = torch.linalg.qr(torch.randn(m, m, generator=g))[0]
        G = basis * torch.logspace(0, -3, m) @ G
    return G


KINDS = ("normal", "half of the rows idle", "graded in a random basis")


SIZES = ((ProKLShampoo, 64, 61), (KLShampoo, 64, 61), (ProKLShampoo, 256, 51))
LARGEST = (ProKLShampoo, 1024, 11, KINDS[0], True)
CASES = [*((*size, kind, again) for size, kind, again in product(SIZES, KINDS, (True, False))), LARGEST]


@pytest.mark.parametrize(
    "cls, m, steps, kind, again",
    [pytest.param(*case, marks=[pytest.mark.slow] if case[1] > 64 else []) for case in CASES],
)
def test_rounding_sends_no_factor_to_householder(cls, m, steps, kind, again, extension_on_cpu, monkeypatch):
    """With ``again`` every gradient is the first one."""
    ops, g = WithExtension(), torch.Generator().manual_seed(0)
    backend = Backend("torch", ops, TorchIO, graphs=False)
    monkeypatch.setattr("prokl.backends.select.select", lambda *_: backend)
    W = torch.nn.Parameter(torch.zeros(m, m))
    optimizer = cls([W], state_dtype=torch.bfloat16, precondition_frequency=5)
    G = drawn(kind, m, g)
    for t in range(steps):
        W.grad = (G if again or t == 0 else drawn(kind, m, g)).clone()
        optimizer.step()
        if t == 2:  # L is not yet nearly diagonal: rounding to bfloat16 may have left it indefinite
            early = Counter(ops.done)
    due = (steps - 1) // 5  # the first one starts
    assert ops.done.total() == (due + 2 if cls is ProKLShampoo else 2 * due)  # steps 2 and 4 refresh, too
    assert not any(
        QRStatus(status) & (QRStatus.HOUSEHOLDER | QRStatus.LOST | QRStatus.NONFINITE) for status in ops.done - early
    )
    assert W.isfinite().all() and not ops.given_up
    for Q in (optimizer.state[W][key].double() for key in ("Q_L", "Q_R") if key in optimizer.state[W]):
        assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(m, dtype=Q.dtype), ord=2) <= 1e-5


class Noted(PairedAlgebra):
    """Notes which Gram matrices a QR takes of pairs."""

    def __init__(self):
        super().__init__(host_readable=False)
        self.of_pairs = []

    def symmetric_product(self, A, /, **more):
        self.of_pairs.append(isinstance(A, Pair))
        return super().symmetric_product(A, **more)


@pytest.mark.parametrize("k, pairs", [(64, False), (140, True)])
def test_passes_of_a_large_l_alone_take_pairs(k, pairs, extension_on_cpu):
    """Q_L is made orthonormal after them; U and Q_S stay as they are left: 5e-7 off in float32, 1e-5 by pairs."""
    ops, g = Noted(), torch.Generator().manual_seed(0)
    X = torch.randn(1, k, 4 * k, generator=g)
    cuda_qr.semidefinite_qr(ops, X @ X.mT / (4 * k))
    assert ops.of_pairs == [pairs] * 3
    ops.of_pairs.clear()
    U = torch.linalg.qr(torch.randn(1, 2 * k, k, generator=g))[0]
    G = torch.randn(1, 8, 2 * k, generator=g)
    G_tilde, K = G @ U, 0.5 * torch.eye(k)[None]
    G_perp, K = G - G_tilde @ U.mT, K + 0.1 * G_tilde.mT @ G_tilde
    U = cuda_qr.track(ops, ops.operand(G_perp), ops.operand(G_tilde), K, U, 0.1).Q
    Q_S = cuda_qr.coordinates_qr(ops, K, torch.eye(k)[None]).Q
    assert not any(ops.of_pairs) and len(ops.of_pairs) >= 3
    for Q in (U.double(), Q_S.double()):
        assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(k, dtype=Q.dtype), ord=2) <= 2e-6
