"""bf16_weights: what a step writes into bfloat16 weights, rounded at random, beside a float32 master, or to nearest."""

import copy
import math

import pytest
import torch

from prokl.algorithm.algebra import Direction
from prokl.algorithm.settings import BF16_WEIGHTS
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.io import Layout, Member, Rates, TorchIO
from prokl.backends.rounding import Rounding, noise, stochastic
from prokl.backends.triton_ops import TritonIO
from tests.inputs import BACKENDS, KL, PRO, normal, same_bits, step, weight
from tests.training import contents, differences, fresh, named, refused, train, weights_of

BF16 = torch.bfloat16
LARGEST = torch.finfo(BF16).max
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = {"pro": (PRO, {"rank": 3, "ns_dtype": torch.float32}), "kl": (KL, {})}


def random_keys(count, seed=0):
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=torch.Generator().manual_seed(seed))


def neighbours(x):
    """The bfloat16 below and above in magnitude, as float32."""
    below = (x.view(torch.int32) & -0x10000).view(torch.float32)
    return below, torch.where(below == x, below, (below.view(torch.int32) + 0x10000).view(torch.float32))


def test_rounding_at_random_is_unbiased():
    """Up with probability f in N throws: the mean is off by sqrt(f (1 - f) / N) of the gap, at most 1 / sqrt(4 N).

    The 16 bits of a random number make no other error, for f is a multiple of 2^-16. Of 400 elements none is six
    standard deviations off; the mean of all of them, 1 / sqrt(400) of that, is none either.
    """
    N = 4096
    x = normal(20, 20) * torch.logspace(-40, 37, 20)  # the first are below the smallest normal number
    rounded = stochastic(x.expand(N, 20, 20), random_keys(N)).float()
    below, above = neighbours(x)
    assert ((rounded == below) | (rounded == above)).all() and (below != above).all()
    error = ((rounded.double() - x) / (above.double() - below)).mean(dim=0)
    assert error.abs().max() <= 6 / math.sqrt(4 * N)
    assert error.mean().abs() <= 6 / math.sqrt(4 * N * 400)


def test_rounding_keeps_bfloat16_numbers_and_makes_no_infinity():
    held = torch.tensor([0.0, -0.0, 1.0, -3.140625, LARGEST, -LARGEST, math.inf, -math.inf, 2.0**-133, -(2.0**-126)])
    beyond = torch.tensor([3.3961e38, -3.3961e38, 3.4028e38])  # next below infinity's half way, and above it
    nan = torch.tensor([0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    for x in (held, beyond):
        found = stochastic(x.expand(64, 1, -1), random_keys(64))
        assert same_bits(found, x.to(BF16).expand(64, 1, -1))
    assert stochastic(nan.expand(64, 1, -1), random_keys(64)).isnan().all()


def test_random_numbers_differ_by_step_weight_and_element():
    """Correlations of M independent numbers of variance 1/12: products have a standard deviation of 1/12 / sqrt(M)."""
    rounding, steps, seen = Rounding("stochastic", ["a 0", "b 0"], [torch.zeros(1, 40, 60, dtype=BF16)] * 2), 50, []
    keys = rounding.keys
    for t in range(steps):
        rounding.locate([t, t])
        assert rounding.keys is keys  # where a CUDA graph reads them
        seen.append(noise(rounding.keys, 40, 60).double() / 2**16 - 0.5)
    x = torch.stack(seen)
    assert abs(x.mean()) <= 6 * (12 * x.numel()) ** -0.5
    pairs = [
        (x[1:], x[:-1]),
        (x[7:], x[:-7]),
        (x[:, 0], x[:, 1]),
        (x[..., 1:], x[..., :-1]),
        (x[..., 1:, :], x[..., :-1, :]),
    ]
    for a, b in pairs:
        assert abs((a * b).mean()) <= 6 / 12 / a.numel() ** 0.5


@pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("mode", BF16_WEIGHTS)
def test_a_split_bucket_and_the_reference_write_the_same_bits(cls, kwargs, mode, monkeypatch):
    """The random numbers do; where steps differ in rounding, one of 20,000 elements may be rounded otherwise."""
    shapes = [(40, 60), (60, 40), (2, 40, 60)]

    def trained(backend):
        weights = named(*shapes, dtype=BF16)
        optimizer = cls(weights, lr=0.02, bf16_weights=mode, backend=backend, **kwargs)
        train(optimizer, range(4), missing={(0, 0)})  # the first begins later
        return torch.cat([p.detach().flatten() for _, p in weights])

    one, reference = trained("torch"), trained("reference")
    monkeypatch.setattr("prokl.backends.device.WORKSPACE", 1)
    for other in (reference, trained("torch")):
        assert (other != one).sum() <= 2  # measured: at most 1 of 9,600; rounding at random by other numbers: 3,000


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)
def test_steps_below_half_a_unit_add_up(cls, kwargs, backend):
    """A few steps of less than half a unit each, as of weights in float32 that start alike.

    At random each of the steps adds an independent error of at most half a unit's standard deviation.
    """
    moved, steps, longest = {}, 12, 0.0
    for mode in (*BF16_WEIGHTS, "float32"):
        half = mode != "float32"
        p = torch.nn.Parameter(weight(30, 40, dtype=BF16).data.clamp(1.125, 1.875).to(BF16 if half else torch.float32))
        start = p.detach().double().clone()
        optimizer = cls([p], lr=1e-3, backend=backend, bf16_weights=mode if half else "plain", **kwargs)
        for t in range(1 + steps):
            before = p.detach().double()
            step(optimizer, [p], [normal(30, 40, seed=t % 2, dtype=BF16).to(p.dtype)])
            longest = longest if half else max(longest, float((p.detach() - before).abs().max()))
        moved[mode] = p.detach().double() - start
        if mode == "master":
            master = optimizer.state[p]["master"]
            assert same_bits(master.to(BF16), p.data) and master.dtype == torch.float32
            moved["its master"] = master.double() - start
    truth, unit = moved["float32"], 2.0**-7
    assert truth.abs().max() > unit / 2 and longest < unit / 4
    assert not moved["plain"].any()
    assert (moved["its master"] - truth).norm() <= 1e-3 * truth.norm()  # measured: 1e-6
    assert (moved["master"] - moved["its master"]).abs().max() <= unit / 2
    error = moved["stochastic"] - truth
    assert error.abs().max() <= 6 * math.sqrt(steps) * unit / 2
    assert error.mean().abs() <= 6 * math.sqrt(steps) * unit / 2 / math.sqrt(error.numel())


def applied(io, mode, seed=0):
    """Weights, as they lie and oriented alike, and the rounding of three steps of an I/O."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(37, 70), (70, 37), (2, 37, 70)]
    weights = [torch.nn.Parameter(torch.randn(s, generator=g).to(DEVICE, BF16)) for s in shapes]
    weights[0].data[0, :6] = torch.tensor([LARGEST, -LARGEST, math.inf, -math.inf, math.nan, 0.0])
    members = [Member(p, "", MatrixShape.of(p), rows) for p, rows in zip(weights, map(range, [0, 1, 2], [1, 2, 4]))]  # noqa: B905
    rounding = Rounding(mode, list("abcd"), [member.weight() for member in members])
    own = io(members, Layout(4, 37, 70, torch.float32, BF16, torch.device(DEVICE)), rounding)
    X = torch.randn(4, 37, 70, generator=g).to(DEVICE) * 0.1
    X[0, 0, :2] = torch.tensor([1e36, -1e36])
    for t in range(3):
        if rounding.keys is not None:
            rounding.locate([t] * 4)
        # 1 - lr weight_decay has 9 bits and a bfloat16 weight 8: products are exact, and to fuse them changes no bit.
        own.locate([Rates(2**-6, 2**-3, range(3))])
        own.apply(Direction(X), range(4), torch.tensor([True, True, True, False], device=DEVICE))
        if t == 1:
            weights[1].data[3] = 7.0  # by hand
    return weights, [member.weight() for member in members], rounding.master


def test_the_kernel_rounds_at_random_as_pytorch_does():
    for ours, theirs in zip(applied(TritonIO, "stochastic")[0], applied(TorchIO, "stochastic")[0], strict=True):
        torch.testing.assert_close(ours.data, theirs.data, rtol=0, atol=0, equal_nan=True)  # NaN has any bits


def test_the_kernel_keeps_masters_as_pytorch_does():
    (_, ours, master), (_, theirs, other) = (applied(io, "master") for io in (TritonIO, TorchIO))
    # Three steps, each of a product and a difference that round once together or twice, on numbers below 8.
    torch.testing.assert_close(master, other, rtol=6 * 2**-24, atol=6 * 4 * 2**-24, equal_nan=True)
    assert same_bits(torch.cat(theirs)[:3], other.to(BF16)[:3])
    assert same_bits(torch.cat(ours)[:3], master.to(BF16)[:3])
    assert 6.9 < master[1, :, 3].min() and master[1, :, 3].max() < 7.0  # its weight is (70, 37), handled turned


@pytest.mark.parametrize("saved", BF16_WEIGHTS)
def test_a_checkpoint_of_any_mode_goes_on_in_any_other(saved):
    for wanted in BF16_WEIGHTS:
        optimizer = train(PRO(named((12, 20), dtype=BF16), rank=3, bf16_weights=saved), range(3))
        twin = fresh(optimizer)
        for each in (optimizer, twin):
            each.param_groups[0]["bf16_weights"] = wanted
            train(each, (3, 4))
        assert differences(optimizer, twin) == set()
        assert ("master" in contents(twin)[0]) == (wanted == "master")


@pytest.mark.parametrize("damage", [lambda t: t[:3], lambda t: t * math.nan], ids=["shape", "not finite"])
def test_a_master_that_cannot_be_one_is_refused(damage):
    optimizer = train(PRO([weight(12, 20, dtype=BF16)], rank=3, bf16_weights="master"), [0])
    loaded = copy.deepcopy(optimizer.state_dict())
    loaded["state"][0]["master"] = damage(loaded["state"][0]["master"])
    with refused(optimizer, r"parameter 0 of group 0.*master"):
        optimizer.load_state_dict(loaded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_dtypes_are_rounded_to_nearest_in_every_mode(dtype, backend):
    optimizers = [PRO(named((12, 20), dtype=dtype), rank=3, backend=backend, bf16_weights=m) for m in BF16_WEIGHTS]
    *others, plain = (train(optimizer, range(3)) for optimizer in optimizers)
    assert "master" not in contents(plain)[0]
    assert all(differences(plain, other) == set() for other in others)


@pytest.mark.parametrize("dtype, reload", [(torch.float32, True), (torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize("shape, own", [((12, 20), {}), ((20, 12), {"split": 2}), ((2, 20, 12), {})], ids=str)
@pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)
def test_a_widened_weight_keeps_its_bits_and_loses_its_master(cls, kwargs, shape, own, dtype, reload):
    p = weight(*shape, dtype=BF16)
    optimizer = train(cls([{"params": [p], **own}], bf16_weights="master", lr=1e-3, **kwargs), range(3))
    assert [key for key in optimizer.state[p] if key.startswith("master")]
    p.grad, p.data = None, p.data.to(dtype)
    expected = p.data.clone()
    if reload:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer, [p], [torch.zeros(shape, dtype=dtype)])  # which moves nothing
    assert same_bits(p.data, expected)
    assert not [key for key in optimizer.state[p] if key.startswith("master")]


@pytest.mark.parametrize("mode", BF16_WEIGHTS)
@pytest.mark.parametrize("cls, kwargs", METHODS.values(), ids=METHODS)
def test_a_wrappers_own_master_stays_with_its_weight(cls, kwargs, mode):
    p = weight(20, 12)
    optimizer = cls([p], bf16_weights=mode, **kwargs)
    theirs = optimizer.state[p]["master"] = p.detach().double()
    train(optimizer, range(3))
    assert same_bits(contents(train(fresh(optimizer), [3]))[0]["master"], theirs)
    late = weight(20, 12)
    optimizer.add_param_group({"params": [late]})
    train(optimizer, [3])
    assert optimizer.state[p]["master"] is theirs and "master" not in optimizer.state[late]


def test_a_master_goes_with_its_mode():
    """Also one that waits for its first gradient."""
    optimizer = train(PRO(named((12, 20), (12, 20), dtype=BF16), rank=3, bf16_weights="master"), [0], missing={(0, 1)})
    early, late = weights_of(optimizer)
    assert not optimizer.state[late]["master"].any()
    optimizer.param_groups[0]["bf16_weights"] = "plain"
    start = late.detach().clone()
    train(optimizer, [1, 2], missing={(1, 1)})
    assert "master" not in optimizer.state[early].keys() | optimizer.state[late].keys()
    assert same_bits(late.data, start)
