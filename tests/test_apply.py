"""The apply kernel, which writes straight into weights, against its equation in float64."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from prokl.backends.pointers import PointerTable
from prokl.kernels import launch
from prokl.kernels.apply import TILES_FP32, TILES_FP64, TILES_HALF, apply, choose_tile
from tests.test_stack import COUNT, DEVICE, FEW, GUARD, Bucket

SIZES = [(1, 1, 1), (5, 3, 2), (70, 130, 11), (32, 96, 16)]  # m, n, r
PARTS = {
    "all": ("X", "Q", "scale", "left", "right"),
    "without scale": ("X", "Q", "left", "right"),
    "without Q": ("X", "scale", "left", "right"),
    "X alone": ("X",),
    "scale Q X": ("X", "Q", "scale"),
    "left right^T": ("left", "right"),
}


def factors(count, m, n, r, *, X=torch.float32, B=torch.float32, rate=torch.float64, seed=1):
    """Arguments of a direction whose entries are of order one, with large steps."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype):
        return torch.randn(shape, generator=g, dtype=torch.float64).to(DEVICE, dtype)

    return {
        "X": normal(count, m, n, dtype=X),
        "Q": (normal(count, m, m, dtype=torch.float64) / m**0.5).to(X),
        "scale": normal(count, dtype=B),
        "left": (normal(count, m, r, dtype=torch.float64) / r**0.5).to(B),
        "right": normal(count, n, r, dtype=B),
        "lr": torch.full((), 0.1, dtype=rate, device=DEVICE),
        "weight_decay": torch.full((1,), 0.3, dtype=rate, device=DEVICE),
    }


def call(bucket, a, **options):
    a = {"X": None} | a
    apply(bucket.table, a.pop("X"), dtype=bucket.dtype, **a, **options)


def expected(W, a):
    """The new W in float64, and the sum of the absolute values of all that is added up in it."""
    a = {k: v.double() for k, v in a.items() if v is not None and k != "active"}
    keep = 1 - a["lr"] * a["weight_decay"]
    D, size = torch.zeros_like(W, dtype=torch.float64), torch.zeros_like(W, dtype=torch.float64)
    if "X" in a:
        scale = a["scale"][:, None, None] if "scale" in a else 1.0
        D = D + scale * (a["Q"] @ a["X"] if "Q" in a else a["X"])
        size = size + abs(scale) * (a["Q"].abs() @ a["X"].abs() if "Q" in a else a["X"].abs())
    if "left" in a:
        D = D + a["left"] @ a["right"].mT
        size = size + a["left"].abs() @ a["right"].abs().mT
    return keep * W.double() - a["lr"] * D, keep.abs() * W.double().abs() + a["lr"].abs() * size


def assert_applied(bucket, before, a):
    """Elementwise within rounding to count, u being the unit roundoff of the arithmetic, first order.

    m + r products of 1 u and as many additions, 12 u more for a product of split TF32 parts on the GPU and 8 for
    scale, lr, decay and the last sum, of what is added up; then half a unit of W's dtype, once. The interpreter cuts
    bfloat16 off where a GPU rounds, twice that. In float64 the truth carries as much error.
    Measured over SIZES: at most 0.06 of the part before the rounding; all of the half unit.
    """
    given = bucket.given()
    new, (truth, size) = bucket.dense()[given], (t[given] for t in expected(before, a))
    wide = torch.float64 in {bucket.dtype, *(v.dtype for k, v in a.items() if k not in ("lr", "weight_decay"))}
    u = torch.finfo(torch.float64 if wide else torch.float32).eps / 2
    m, r = before.shape[1], a["left"].shape[2] if "left" in a else 0
    bound = (2 * (m + r) + 20) * u * (2 if wide else 1) * size
    if torch.finfo(bucket.dtype).eps / 2 > u:
        cut = 2 if bucket.dtype == torch.bfloat16 and DEVICE == "cpu" else 1
        smallest = torch.finfo(bucket.dtype).smallest_normal
        bound = bound + cut * torch.finfo(bucket.dtype).eps / 2 * (truth.abs() + bound).clamp(min=smallest)
    error = (new.double() - truth).abs()
    assert (error <= bound).all(), f"{(error / bound).max().item():.3g} times the bound"
    assert (bucket.outside() == GUARD).all()


@pytest.mark.parametrize(
    "dtypes",
    [
        "float32 float32",
        "float16 float16",
        pytest.param("float32 float16", marks=pytest.mark.slow),
        pytest.param("float64 float64", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_layout_and_nothing_beside_it(size, dtypes):
    weights, X = (getattr(torch, name) for name in dtypes.split())
    bucket = Bucket(*size[:2], weights)
    before = bucket.dense()
    a = factors(len(before), *size, X=X, B=torch.float64 if X == torch.float64 else torch.float32)
    call(bucket, a)
    assert_applied(bucket, before, a)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_every_part_of_the_direction_is_optional(parts):
    bucket = Bucket(70, 130, torch.float64, FEW)
    before = bucket.dense()
    a = factors(len(before), 70, 130, 11, X=torch.float64, B=torch.float64)
    a = {k: a[k] for k in (*parts, "lr", "weight_decay")}
    call(bucket, a)
    assert_applied(bucket, before, a)


@pytest.mark.parametrize("tile", [*TILES_HALF, TILES_FP32[1], *TILES_FP64], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_every_tile_and_sizes_that_cross_it(tile, dtype):
    bucket = Bucket(134, 67, dtype, FEW)
    before = bucket.dense()
    a = factors(len(before), 134, 67, 37, X=dtype)
    call(bucket, a, tile=tile)
    assert_applied(bucket, before, a)


@pytest.mark.parametrize(
    "dtypes",
    [
        "bfloat16 float32 float32",
        "float64 float16 float32",
        "float16 float64 float32",
        "float32 float32 float64",
        "float32 float16 float16",
        "float64 float32 bfloat16",
    ],
)
def test_dtypes_mix(dtypes):
    weights, X, B = (getattr(torch, name) for name in dtypes.split())
    bucket = Bucket(20, 35, weights)
    before = bucket.dense()
    a = factors(len(before), 20, 35, 6, X=X, B=B)
    call(bucket, a)
    assert_applied(bucket, before, a)


def test_two_half_factors_of_unlike_dtypes():
    bucket = Bucket(20, 35, torch.float32)
    before = bucket.dense()
    a = factors(len(before), 20, 35, 6, X=torch.float16)
    a |= {"Q": a["Q"].bfloat16(), "right": a["right"].half()}
    call(bucket, a)
    assert_applied(bucket, before, a)


@pytest.mark.parametrize("size", [(37, 70, 5), (80, 64, 16)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_weight_that_is_not_live_keeps_its_bits(dtype, size):
    bucket = Bucket(*size[:2], dtype)
    before = bucket.dense()
    a = factors(len(before), *size)
    active = torch.tensor([b % 3 != 1 for b in range(len(before))], device=DEVICE)
    for k in ("X", "Q", "scale", "left", "right"):
        a[k][~active] = torch.nan
    call(bucket, a, active=torch.stack((active, ~active), dim=1)[:, 0])
    after = bucket.dense()
    assert torch.equal(after[~active], before[~active])
    assert after.isfinite().all() and not (after[1:-2] == before[1:-2])[active[1:-2]].all(dim=(1, 2)).any()
    assert (bucket.outside() == GUARD).all()


def test_lr_and_weight_decay_are_read_when_the_kernel_runs_and_in_float64():
    bucket = Bucket(9, 20, torch.float64)
    a = factors(COUNT, 9, 20, 3, X=torch.float64, B=torch.float64)
    for lr, weight_decay, dtype in ((0.1, 0.0, torch.float64), (0.0, 0.7, torch.float64), (1e-3, 0.1, torch.float32)):
        a |= {"lr": a["lr"].to(dtype).fill_(lr), "weight_decay": a["weight_decay"].to(dtype).fill_(weight_decay)}
        before = bucket.dense()
        call(bucket, a)
        assert_applied(bucket, before, a)  # 0.1 in float32 is off by 1e-8
    before = bucket.dense()
    call(bucket, a | {"lr": torch.zeros(1, device=DEVICE)})
    assert torch.equal(bucket.dense(), before)


def test_each_weight_has_its_own_lr_and_weight_decay():
    bucket = Bucket(9, 20, torch.float64)
    a = factors(COUNT, 9, 20, 3, X=torch.float64, B=torch.float64)
    wide = torch.linspace(0, 1, 2 * COUNT, dtype=torch.float64, device=DEVICE)
    for lr, weight_decay in ((wide[::2], a["weight_decay"]), (a["lr"], wide[1::2]), (wide[:COUNT], wide[1::2])):
        before = bucket.dense()
        call(bucket, a | {"lr": lr, "weight_decay": weight_decay})
        assert_applied(bucket, before, a | {"lr": of_each(lr), "weight_decay": of_each(weight_decay)})


def of_each(rate):
    return rate[:, None, None] if rate.shape == (COUNT,) else rate


def strided(t):
    wide = torch.full((2 * t.shape[0], *(3 * k for k in t.shape[1:])), torch.nan, dtype=t.dtype, device=DEVICE)
    return wide[1::2][(slice(None), *(slice(2, None, 3) for _ in t.shape[1:]))].copy_(t)


@pytest.mark.parametrize("size", [(70, 66, 11), (16, 32, 16)], ids=str)
def test_strides_of_the_factors_do_not_matter(size):
    variants = {
        "gaps": lambda t: strided(t) if t.ndim > 1 else t.repeat_interleave(2)[::2],
        "transposed": lambda t: t.mT.contiguous().mT if t.ndim == 3 else t,
        "expanded": lambda t: t[:1].expand_as(t),
    }
    for name, change in variants.items():
        bucket = Bucket(*size[:2], torch.float32, FEW)
        before = bucket.dense()
        a = factors(len(before), *size)
        a |= {k: change(a[k]) for k in ("X", "Q", "scale", "left", "right")}
        assert not a["X"].is_contiguous(), name
        unchanged = {k: v.clone() for k, v in a.items()}
        call(bucket, a)
        assert_applied(bucket, before, a)
        assert all(torch.equal(a[k], unchanged[k]) for k in a), name


def test_offsets_beyond_32_bits():
    stride = 2**30 + 8  # the third row starts at element 2^31 + 16
    for wide in ("W", "X", "right"):
        a = factors(1, 3, 5, 3, X=torch.float16, B=torch.float16)
        W = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float16)
        base = torch.empty(2 * stride + 16, dtype=torch.float16, device=DEVICE)  # virtual memory: few pages touched
        W_new = base.as_strided((1, 3, 5), (0, stride, 1)).copy_(W) if wide == "W" else W.clone()
        if wide != "W":
            a[wide] = base.as_strided(a[wide].shape, (0, stride, 1) if wide == "X" else (0, 1, stride)).copy_(a[wide])
        addresses = PointerTable(1, DEVICE)
        addresses.update([W_new], [1])
        apply(addresses.table, dtype=torch.float16, **a)
        truth, _ = expected(W, a)
        torch.testing.assert_close(W_new.double(), truth, rtol=2**-11, atol=1e-5)  # half a unit of float16


def test_no_weights_start_no_kernel(monkeypatch):
    monkeypatch.setattr(launch, "start", None)
    apply(PointerTable(0, DEVICE).table, dtype=torch.float32, **factors(0, 5, 9, 2))


@pytest.mark.parametrize("name", ["X", "Q", "left", "right", "scale", "active", "lr", "weight_decay"])
def test_a_wrong_tensor_raises_with_its_name(name):
    bucket = Bucket(5, 9, torch.float32)
    a = factors(COUNT, 5, 9, 2) | {"active": torch.ones(COUNT, dtype=torch.bool, device=DEVICE)}
    before = bucket.dense()
    wrong = {"shape": a[name][None, None], "dtype": a[name].to(torch.int32), "is on": a[name].to("meta")}
    for what, t in wrong.items():
        with pytest.raises(ValueError, match=rf"^{name} (has )?{what}"):
            call(bucket, a | {name: t})
    assert torch.equal(bucket.dense(), before)


KEYS, MASTER = torch.ones(COUNT, dtype=torch.int64), torch.ones(COUNT, 5, 9)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"right": None}, r"^Only one of left and right was given"),
        (
            {"X": None, "Q": None, "scale": None, "left": None, "right": None},
            r"^Neither X nor left and right were given",
        ),
        ({"X": None, "scale": None}, r"^Q was given without X"),
        ({"X": None, "Q": None}, r"^scale was given without X"),
        ({"X": torch.ones(COUNT, 0, 9)}, r"^X has shape \(17, 0, 9\); must be \(B, m, n\) with m, n >= 1"),
        ({"X": torch.ones(15, 5, 9)}, r"^addresses has shape \(3, 17\); must be \(3, 15\)"),
        ({"left": torch.ones(COUNT, 5, 0)}, r"^left has shape \(17, 5, 0\); must be \(B, m, r\) with r >= 1"),
        ({"X": None, "Q": None, "scale": None, "right": torch.ones(COUNT, 0, 2)}, r"^right has shape \(17, 0, 2\)"),
        ({"lr": torch.ones(2)}, r"^lr has shape \(2,\)"),
        ({"precision": "tf16"}, r"^Invalid precision='tf16'"),
        ({"dtype": torch.int8}, r"^Invalid dtype=torch.int8"),
        ({"keys": torch.ones(COUNT)}, r"^keys has dtype torch.float32; must be one of \(torch.int64,\)"),
        ({"keys": KEYS}, r"^keys was given for weights of torch.float32; must be torch.bfloat16"),
        ({"master": MASTER.double()}, r"^master has dtype torch.float64"),
        ({"master": MASTER}, r"^master was given for weights of torch.float32; must be torch.bfloat16"),
        ({"dtype": torch.bfloat16, "keys": KEYS, "master": MASTER}, r"^Both keys and master were given"),
        ({"dtype": torch.bfloat16, "master": MASTER.mT.contiguous().mT}, r"^master has strides .*must be contiguous"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    bucket = Bucket(5, 9, torch.float32)
    change = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        apply(bucket.table, **({"dtype": torch.float32} | factors(COUNT, 5, 9, 2) | change))


def test_every_tile_is_chosen_for_some_size():
    sizes = [(768, 3072, 128), (32, 48, 16), (50, 70, 0)]
    chosen = {choose_tile(*size, dtype) for size in sizes for dtype in (torch.bfloat16, torch.float32, torch.float64)}
    assert chosen == {*TILES_HALF, *TILES_FP32, *TILES_FP64}


@pytest.mark.gpu
@pytest.mark.parametrize("precision", launch.PRECISIONS)
@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [(144, 272, 48), (150, 131, 37)], ids=str)
def test_at_most_twice_the_error_of_pytorch_in_the_same_dtypes(size, weights, precision, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", precision == "tf32")
    bucket = Bucket(*size[:2], weights)
    before = bucket.dense()
    a = factors(len(before), *size, X=torch.bfloat16, rate=torch.float32)
    truth, _ = expected(before, a)
    D = (a["Q"] @ a["X"]).float() * a["scale"][:, None, None] + a["left"] @ a["right"].mT
    plain = (before.float() * (1 - a["lr"] * a["weight_decay"]) - a["lr"] * D).to(weights)
    call(bucket, a, precision=precision)
    given = bucket.given()
    ours, theirs = ((t.double() - truth)[given].abs() for t in (bucket.dense(), plain))
    assert ours.max() <= 2 * theirs.max() and ours.norm() <= 2 * theirs.norm()


@pytest.mark.gpu
def test_a_captured_graph_follows_lr_and_weights_that_move():
    bucket = Bucket(64, 96, torch.float32)
    a = factors(COUNT, 64, 96, 16)
    call(bucket, a)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(bucket, a)
    bucket.matrices = [None if t is None else t.clone() for t in bucket.matrices]
    bucket.addresses.update(bucket.matrices, bucket.counts)
    a["lr"].fill_(0.7)
    before = bucket.dense()
    graph.replay()
    new, (truth, size) = bucket.dense(), expected(before, a)
    given = bucket.given()
    assert ((new.double() - truth).abs() <= 1e-5 * size)[given].all()  # 180 unit roundoffs: m + r and more
