"""The CUDA extension on a device: the problems of tests/test_qr_problems.py, and larger ones."""

import pytest
import torch

from prokl import ops
from prokl.backends import cuda_qr, extension
from prokl.backends.select import select
from prokl.cuda_qr import QRStatus
from tests import test_qr_problems
from tests.inputs import same_bits
from tests.qr_bounds import assert_is_qr
from tests.qr_forms import FORMS, pieces, products_on, refresh, track, words
from tests.qr_problems import CLASSES, draw, poisoned
from tests.test_cuda_qr import mixture

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CASES = [(operation, *rest) for operation, form, *rest in test_qr_problems.CASES if form == "extension"]
TALL = [(300, 768, 128), (6, 3072, 128), (4, 4096, 128), (2, 16384, 128), (2, 4096, 300)]
SQUARE = [(72, 768, 768), (2, 1024, 1024), (1, 4096, 4096), (144, 128, 128)]
TALL_CLASSES = {"qr": ["random", "condition 1e+06"], "tracking": ["condition 1e+04, moving", "rank-deficient, fresh"]}
SQUARE_CLASSES = {
    "refresh": ["condition 1e+06, settled", "rank-deficient, fresh"],
    "coordinates": ["random, skewed 1e2"],
}
LARGE = [
    *((o, n, size) for o, names in TALL_CLASSES.items() for n in names for size in TALL),
    *((o, n, size) for o, names in SQUARE_CLASSES.items() for n in names for size in SQUARE),
]


@pytest.fixture(autouse=True)
def extension_here():
    obstacle = extension.unsupported_reason(CUDA)
    assert obstacle is None, f"{obstacle}: build it with PROKL_BUILD_CUDA=1"


def on_gpu(inputs):
    return tuple(t.to(CUDA) for t in inputs)


@pytest.mark.parametrize("operation, name, size, dtype", CASES, ids=words)
def test_the_extension_is_a_qr_of_every_class_on_the_device(operation, name, size, dtype):
    inputs = draw(operation, name, size, dtype)
    assert_is_qr(operation, inputs, FORMS[operation]["extension"](*on_gpu(inputs)).cpu())


@pytest.mark.parametrize("operation, name, size", LARGE, ids=words)
def test_it_is_a_qr_at_the_papers_sizes(operation, name, size):
    inputs = tuple(t[:3] for t in draw(operation, name, (min(size[0], 3), *size[1:])))
    repeated = tuple(t.repeat(-(-size[0] // len(t)), 1, 1)[: size[0]] for t in on_gpu(inputs))
    Q = FORMS[operation]["extension"](*repeated)
    composed = {"tracking": track, "refresh": refresh}.get(operation)
    if composed is not None:  # else a product that is less exact than it should be would only be slow
        assert not (composed(*repeated).status & int(cuda_qr.QRStatus.HOUSEHOLDER)).any()
    for b in range(0, size[0], 3):  # float64 on the CPU is for the first only
        assert same_bits(Q[b : b + 3], Q[: len(Q[b : b + 3])])
    assert_is_qr(operation, inputs, Q[: len(inputs[0])].cpu())


@pytest.mark.parametrize("operation", CLASSES)
def test_what_is_not_finite_stays_in_its_matrix_on_the_device(operation):
    inputs = draw(operation, "mixed", (3, 60, 12))
    function = FORMS[operation]["extension"]
    apart, Q = function(*on_gpu(inputs)), function(*on_gpu(poisoned(operation, 1, float("nan"), inputs)))
    assert same_bits(Q[0], apart[0]) and same_bits(Q[2], apart[2])


def test_runs_give_the_same_bits_and_the_host_builds_verdicts(extension_on_cpu, monkeypatch):
    A = mixture()
    here = cuda_qr.qr(A)
    monkeypatch.undo()
    first = cuda_qr.qr(A.to(CUDA))
    for _ in range(5):
        for found, wanted in zip(cuda_qr.qr(A.to(CUDA)), first, strict=True):
            assert same_bits(found, wanted)
    kinds = QRStatus.HOUSEHOLDER | QRStatus.NONFINITE  # RAISED may turn on a rounding
    assert ((first.status.cpu() & int(kinds)) == (here.status & int(kinds))).all()


def test_a_graph_captures_it_and_so_nothing_is_read_on_the_host():
    inputs = pieces(*on_gpu(draw("tracking", "mixed", (3, 300, 40))))
    products = products_on(CUDA)
    wanted = cuda_qr.track(products, *inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cuda_qr.track(products, *inputs)
    found.Q.zero_()
    graph.replay()
    for a, b in zip(found, wanted, strict=True):
        assert same_bits(a, b)


def test_it_runs_on_the_current_stream():
    (A,) = on_gpu(draw("qr", "random", (8, 2000, 100)))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        B = A * 2  # still to come when the next call is made
        Q = cuda_qr.qr(B).Q
    torch.cuda.current_stream().wait_stream(stream)
    assert same_bits(Q, cuda_qr.qr(A * 2).Q)


def test_steps_on_the_device_take_the_extension():
    """Their bounds with it are in tests/test_triton_step.py, test_defaults.py and test_gpu.py."""
    assert select(None, CUDA).ops.use_cuda_qr
    assert ops.explain_qr(CUDA).startswith("CUDA extension: ")
