"""The CUDA extension's QR beyond what tests/test_qr_problems.py asks of every form: its sources run on the CPU here."""

from pathlib import Path

import pytest
import torch

from prokl import ProKLShampoo
from prokl.algorithm.algebra import Algebra
from prokl.backends import cuda_qr, extension
from prokl.cuda_qr import QRStatus
from tests import sanitize_qr
from tests.host_extension import shared_limit, shuffled
from tests.inputs import same_bits
from tests.problems import assert_runs_agree, gradient_stream, held, run, ways
from tests.qr_bounds import assert_is_qr
from tests.qr_forms import coordinates, pieces, refresh, track
from tests.qr_problems import draw

DTYPES = [torch.float32, torch.float64]


def test_the_sources_compile_without_warnings(host_module):
    assert host_module.architectures == "host"
    assert (Path(host_module.__file__).parent / "warnings.txt").read_text() == ""


# Sizes on either side of what a kernel handles at once: a tile, a block of columns (128; 64 in float64), what is small
# (128 x 128), rows of a Gram matrix that are summed as one (1024) and the number of such sums.
EDGES = [(1, 1), (2, 1), (9, 8), (128, 128), (129, 128), (129, 129), (257, 3), (300, 130), (1100, 100), (17000, 1)]


AT_EDGES = ["random", "rank-deficient", "zero", "late rows", "row scales", "condition 1e+08", "dominated"]


@pytest.mark.parametrize(  # every edge in both dtypes, and every class in turn
    "n, k, dtype, name",
    [
        (*edge, dtype, AT_EDGES[(3 * i + 2 * j + d) % len(AT_EDGES)])
        for i, edge in enumerate(EDGES) for d, dtype in enumerate(DTYPES) for j in range(2)
    ],
)  # fmt: skip
def test_every_edge_of_the_blocking_is_a_qr(extension_on_cpu, name, dtype, n, k):
    inputs = draw("qr", name, (2, n, k), dtype)
    assert_is_qr("qr", inputs, cuda_qr.qr(*inputs).Q)


@pytest.mark.parametrize("k", [1, 65, 128, 129, 200, 300])
@pytest.mark.parametrize("name", ["condition 1e+04, settled", "rank-deficient, fresh"])
def test_the_structured_ones_are_a_qr_when_blocked(extension_on_cpu, name, k):
    for of, function, size in (("tracking", track, (2, k + 100, k)), ("refresh", refresh, (2, k, k))):
        inputs = draw(of, name, size)
        Q, status = function(*inputs)
        assert_is_qr(of, inputs, Q)
        # A wrong block of the Cholesky factor would send all of these to Householder, which hides it.
        assert k == 1 or not (status & QRStatus.HOUSEHOLDER).any()


def test_householder_ignores_squares_that_lost_their_digits(extension_on_cpu):
    # Residuals near 1e-20: their squares are subnormal in float32, and reflections from them are not orthogonal.
    inputs = draw("coordinates", "row scales, skewed 1e4", (3, 60, 12))
    Q, status = coordinates(*inputs)
    assert (status & QRStatus.HOUSEHOLDER).all()
    assert_is_qr("coordinates", inputs, Q)


MIXTURE = ["random", "condition 1e+06", "rank-deficient", "zero", "zero column"]


def mixture(dtype=torch.float32, n=140, k=131):
    A = torch.cat([draw("qr", name, (1, n, k), dtype)[0] for name in MIXTURE])
    A = torch.cat([A, A[:1], torch.linalg.qr(A[:1])[0]])
    A[5, 3, 2] = float("nan")
    return A


def of_every_kernel(dtype):
    return [
        *cuda_qr.qr(mixture(dtype)),
        *cuda_qr.qr(*draw("qr", "zero column", (2, 600, 9), dtype)),
        *track(*draw("tracking", "mixed", (4, 140, 131), dtype)),
        *refresh(*draw("refresh", "mixed", (4, 70, 70), dtype)),
        *refresh(*draw("refresh", "mixed", (4, 131, 131), dtype)),
    ]


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_result_depends_on_the_order_of_threads_or_blocks(extension_on_cpu, dtype, seed):
    expected = of_every_kernel(dtype)
    with shuffled(extension_on_cpu, seed):
        assert all(map(same_bits, of_every_kernel(dtype), expected))


@pytest.mark.parametrize("filling", [0.0, float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_new_memory_is_not_read_before_it_is_written(extension_on_cpu, dtype, filling, monkeypatch):
    expected = of_every_kernel(dtype)

    def filled(empty):
        return lambda *args, **kwargs: (t := empty(*args, **kwargs)).fill_(filling if t.is_floating_point() else 7)

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))
    assert all(map(same_bits, of_every_kernel(dtype), expected))


def test_the_verdict_says_what_was_done_to_each_matrix(extension_on_cpu):
    Q, status = cuda_qr.qr(mixture())
    plain, ill, singular, zero, column, nan, orthonormal = map(QRStatus, status.tolist())
    assert plain == orthonormal == 0
    assert ill == singular == QRStatus.RAISED
    assert zero == column == QRStatus.RAISED | QRStatus.HOUSEHOLDER
    assert nan == QRStatus.NONFINITE and Q[5].isnan().all()


def test_the_status_tells_shifted_and_non_finite_matrices_apart(extension_on_cpu):
    V, K, U = draw("tracking", "condition 1e+04, settled", (6, 60, 12))
    V[1] = K[1] = 0
    V[2, 0, 0] = float("inf")
    G_perp, Y, *_ = pieces(V, K, U)
    K[3, 0, 0], K[4, 2, 2] = float("nan"), float("inf")
    K[5, 3, 1] = K[5, 1, 3] = float("nan")
    Q, status = cuda_qr.track(Algebra(host_readable=False), G_perp, Y, K, U, 1.0)
    assert [QRStatus(u) for u in status.tolist()] == [QRStatus(0), QRStatus.SHIFTED, *[QRStatus.NONFINITE] * 4]
    assert same_bits(Q[2:], U[2:])
    assert (Q[1] - U[1]).abs().max() <= 12 * torch.finfo(torch.float32).eps


def test_rows_and_matrices_may_lie_apart(extension_on_cpu):
    (A,) = draw("qr", "random", (3, 40, 10))
    wide = torch.full((3, 50, 17), float("nan"))
    wide[:, 5:45, 3:13] = A
    assert same_bits(cuda_qr.qr(wide[:, 5:45, 3:13]).Q, cuda_qr.qr(A).Q)
    once = A[:1].expand(3, -1, -1)
    assert same_bits(cuda_qr.qr(once).Q, cuda_qr.qr(once.contiguous()).Q)


def test_an_empty_batch_is_empty(extension_on_cpu):
    Q, status = cuda_qr.qr(torch.zeros(0, 5, 3))
    assert Q.shape == (0, 5, 3) and status.shape == (0,)
    assert cuda_qr.qr(torch.zeros(0, 500, 130)).Q.shape == (0, 500, 130)


def test_a_single_column_of_any_stride_is_taken(extension_on_cpu):
    column = draw("tracking", "random", (2, 20, 3))[0][..., 1:2]
    assert column.stride(-2) == 3
    Q = cuda_qr.qr(column.mT.contiguous().mT[:, ::2]).Q
    assert torch.allclose(Q, column[:, ::2] / column[:, ::2].norm(dim=1, keepdim=True))


A = torch.zeros(2, 6, 3)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: cuda_qr.qr(A.half()), TypeError, r"A\.dtype=torch\.float16: must be one of .*float32.*A\.float"),
        (lambda: cuda_qr.qr(A[0]), ValueError, r"A\.shape=\(6, 3\): must be \(B,n,k\) with"),
        (
            lambda: cuda_qr.qr(A.mT.contiguous()),
            ValueError,
            r"A\.shape=\(2, 3, 6\): must be \(B,n,k\) with n >= k >= 1",
        ),
        (lambda: cuda_qr.qr(A[..., :0]), ValueError, r"n >= k >= 1"),
        (lambda: cuda_qr.qr(A.mT.contiguous().mT), ValueError, r"A\.stride\(\)=.*must end in 1.*A\.contiguous"),
        (lambda: cuda_qr.qr(A[:1].expand(70000, -1, -1)), ValueError, r"at most 65535 matrices"),
    ],
)
def test_arguments_are_checked_before_anything_is_read(extension_on_cpu, call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_without_the_extension_the_reason_is_told(monkeypatch):
    monkeypatch.setattr(extension, "load", lambda: (None, "it was left out"))
    with pytest.raises(ValueError, match=r"device=cpu: it was left out\. prokl\.algorithm\.qr has the same methods"):
        cuda_qr.qr(A)


@pytest.mark.slow
@pytest.mark.parametrize("k", [4, 130])
def test_the_operators_keep_what_torch_asks_of_them(extension_on_cpu, k):
    (V, K, _), (L,) = draw("tracking", "random", (2, 150, k)), draw("refresh", "random", (2, k, k))
    N, status, operators = V.mT @ V, torch.zeros(2, dtype=torch.int32), torch.ops.prokl
    for operator, inputs in (
        (operators.qr, (V,)),
        (operators.factor, (N, int(cuda_qr.Kind.PASS), None)),
        (operators.factor, (N, int(cuda_qr.Kind.SETTLE), status)),
        (operators.semidefinite_inverse, (K,)),
        (operators.semidefinite_root, (L,)),
        (operators.finish, (V, V.clone(), N, V, status)),
        (operators.finish, (V, V.clone(), None, None, None)),
    ):
        torch.library.opcheck(operator.default, inputs)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels; a GPU has tests/test_gpu.py")
def test_whole_steps_with_the_extension_equal_the_references(takes_the_extension):
    stream = gradient_stream([(6, 10), (10, 6)], 5, dtype=torch.float64)
    settings = {"rank": 4, "precondition_frequency": 2, "dtype": torch.float64, "ns_dtype": torch.float64}
    reference = run(ProKLShampoo, stream, backend="reference", **settings)
    with takes_the_extension():
        triton = run(ProKLShampoo, stream, backend="triton", **settings)
    assert_runs_agree(triton, reference, 1e-9)  # as the PyTorch table


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels; a GPU has tests/test_cuda_qr_on_gpu.py")
def test_whole_steps_of_pairs_with_the_extension_err_as_they_may(extension_on_cpu):
    """Steps are those of a GPU by default, except for Newton-Schulz in bfloat16, which would hide much."""
    stream = gradient_stream([(6, 10), (10, 6)], 4, dtype=torch.float32)
    settings = {"rank": 4, "precondition_frequency": 2, "ns_dtype": torch.float32}
    found = ways(ProKLShampoo, stream, backend="triton", precision="balanced", **settings)
    assert held(found, ProKLShampoo, stream, "balanced", **settings) <= 1


def test_the_calls_for_the_sanitizer_are_right_themselves(extension_on_cpu, capsys):
    sanitize_qr.main("cpu")
    assert capsys.readouterr().out.count("is a QR") == 2 * len(sanitize_qr.CALLS)


@pytest.mark.parametrize(
    "n, k, dtype", [(128, 128, DTYPES[1]), (600, 110, DTYPES[1]), (1100, 60, DTYPES[0]), (300, 9, DTYPES[1]),
                    (150, 131, DTYPES[0]), (128, 128, DTYPES[0])]
)  # fmt: skip
def test_devices_with_little_shared_memory_fall_back_as_well(extension_on_cpu, n, k, dtype):
    inputs = draw("qr", "zero column", (2, n, k), dtype)
    wanted = cuda_qr.qr(*inputs)
    assert (wanted.status & QRStatus.HOUSEHOLDER).all()
    with shared_limit(extension_on_cpu, 99 * 1024):  # compute capability 8.6, 8.9 and 12.0
        found = cuda_qr.qr(*inputs)
    assert_is_qr("qr", inputs, found.Q)
    assert (found.status == wanted.status).all()


def test_as_many_columns_as_memory_holds_need_no_more_shared_memory(extension_on_cpu):
    A = torch.full((1, 1, 12_200), torch.nan)  # of which the kernel reads one row; two elements a column are 95 KB
    Q = torch.zeros_like(A)
    with shared_limit(extension_on_cpu, 99 * 1024):
        status = torch.ops.prokl.finish(A, Q, None, None, None)
    assert (status == QRStatus.NONFINITE).all() and Q.isnan().all()


def test_squares_that_overflow_are_factored_all_the_same(extension_on_cpu):
    V, K, U = draw("tracking", "condition 1e+04, settled", (1, 60, 12))
    assert_is_qr("tracking", (3e37 * V, 3e37 * K, U), track(3e37 * V, 3e37 * K, U).Q)
    (A,) = draw("qr", "random", (1, 200, 100))
    assert_is_qr("qr", (1e37 * A,), cuda_qr.qr(1e37 * A).Q)
