"""The apply kernel on buckets of weights of every layout, beyond what tests/test_kernels.py asks of every kernel."""

import pytest
import torch

from bench.micro.case import Sizes
from prokl.kernels.apply import apply
from tests.inputs import normal
from tests.kernel_cases import APPLY, assert_close
from tests.test_stack import COUNT, DEVICE, FEW, GUARD, Bucket


def arguments(bucket, r, dtypes=()):
    """Return what a bucket is stepped by; entries of absent weights are drawn as well."""
    return APPLY.make(Sizes(len(bucket.dense()), bucket.m, bucket.n, r), dtypes, seed=1)


def assert_applied(bucket, a, **options):
    """Step the bucket by ``a`` and hold it to the form; nothing beside the weights is written."""
    given, W = bucket.given(), bucket.dense()
    count = len(W)
    wanted = {k: t.expand(count) if t.ndim == 0 or len(t) == 1 else t for k, t in (a | {"W": W}).items()}
    X, rest = a["X"], {k: t for k, t in a.items() if k not in ("W", "X")}
    apply(bucket.table, X, dtype=bucket.dtype, **rest, **options)
    assert_close(APPLY, [bucket.dense()[given]], {k: t[given] for k, t in wanted.items()})
    assert (bucket.outside() == GUARD).all()


@pytest.mark.parametrize(
    "m, n, r, dtype",
    [
        (20, 35, 6, torch.bfloat16),
        (1, 1, 1, torch.float32),
        (5, 3, 2, torch.float16),
        (70, 130, 11, torch.float32),
        (32, 96, 16, torch.float16),
        (20, 35, 6, torch.float64),
    ],
)
def test_every_layout_and_nothing_beside_it(m, n, r, dtype):
    bucket = Bucket(m, n, dtype)
    assert_applied(bucket, arguments(bucket, r, (dtype, *[torch.float32] * 5)))


def test_lr_and_weight_decay_are_read_in_float64():
    bucket = Bucket(9, 20, torch.float64, FEW)
    a = arguments(bucket, 3, (torch.float64,) * 8)
    wide = torch.linspace(0, 1, 2 * len(a["X"]), dtype=torch.float64, device=DEVICE)
    one = torch.full((), 0.1, dtype=torch.float64, device=DEVICE)  # in float32 off by 1e-8
    for lr, weight_decay in (
        (one, 0 * one[None]), (one[None], 7 * one), (one.float() / 100, one.float()), (wide[::2], one),
        (one, wide[1::2]), (wide[: len(wide) // 2], wide[1::2]),
    ):  # fmt: skip
        assert_applied(bucket, a | {"lr": lr, "weight_decay": weight_decay})
    before = bucket.dense()
    assert_applied(bucket, a | {"lr": torch.zeros(1, device=DEVICE)})
    assert torch.equal(bucket.dense(), before)


@pytest.mark.gpu
def test_a_captured_graph_follows_lr_and_weights_that_move():
    bucket = Bucket(64, 96, torch.float32)
    a = arguments(bucket, 16) | {"lr": torch.full((COUNT,), 0.1, device=DEVICE)}
    assert_applied(bucket, a)  # compiled before the capture
    X, rest = a["X"], {k: t for k, t in a.items() if k not in ("W", "X")}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply(bucket.table, X, dtype=bucket.dtype, **rest)
    bucket.matrices = [None if t is None else t.clone() for t in bucket.matrices]
    bucket.addresses.update(bucket.matrices, bucket.counts)
    a["lr"].fill_(0.7)
    given = bucket.given()
    i = {k: t[given] for k, t in (a | {"W": bucket.dense()}).items()}
    graph.replay()
    assert_close(APPLY, [bucket.dense()[given]], i)


def test_a_zero_scale_hides_whatever_x_holds():
    ends = []
    for X in (0.0, float("inf")):
        bucket = Bucket(9, 20, torch.float32)
        a = arguments(bucket, 3)
        a["scale"][1], a["X"][1] = 0.0, X
        rest = {k: t for k, t in a.items() if k not in ("W", "X")}
        apply(bucket.table, a["X"], dtype=bucket.dtype, **rest)
        ends.append(bucket.dense())
    assert torch.equal(*ends) and ends[0].isfinite().all()


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_weights_decay_before_or_after_a_step_or_cautiously(dtype, after, cautious):
    """Cautiously: only elements that the step does not grow, arXiv:2510.12402."""
    bucket = Bucket(37, 70, dtype, FEW)
    W = bucket.dense().double()
    D = normal(*W.shape, seed=3, dtype=dtype).to(DEVICE)
    D[:, ::5] = 0  # neither sign: decays
    live = torch.arange(len(W), device=DEVICE) != 1
    D[~live] = torch.nan
    lr, decay = (torch.full((1,), value, dtype=torch.float64, device=DEVICE) for value in (0.25, 0.5))
    options = {"decay_after": after, "cautious_decay": cautious, "active": live}
    apply(bucket.table, D, dtype=dtype, lr=lr, weight_decay=decay, **options)
    D, keep = D.double(), 1 - 0.25 * 0.5
    on = W - 0.25 * D if after else W
    expected = torch.where(D * on >= 0, keep * on, on) if cautious else keep * on
    expected = expected if after else expected - 0.25 * D
    expected[~live], D[~live] = W[~live], 0.0
    # A step to about zero may come out on either side of it, where the decay is as small. Then one rounding.
    given, u = bucket.given(), torch.finfo(dtype).eps
    bound = u * expected.abs() + 4 * max(torch.finfo(torch.float64).eps, min(u, 2**-23)) * (W.abs() + D.abs())
    assert ((bucket.dense().double() - expected).abs() <= bound)[given].all()
    assert torch.equal(bucket.dense()[~live].double(), W[~live])
    assert (bucket.outside() == GUARD).all()
