"""The whole step of ``backend="triton"`` against the reference; without a GPU in Triton's interpreter."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.settings import PRECISIONS
from prokl.kernels import launch
from tests.inputs import forbid_host_reads, normal, weight
from tests.problems import (
    AVERAGES,
    VARIANTS,
    assert_runs_agree,
    gradient_stream,
    held,
    relative,
    run,
    state_tensors,
    ways,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# One shape, its transpose, a stack of it, vectors, and a wide one that is a flattened convolution.
SHAPES = [(6, 10), (10, 6), (3, 1), (2, 6, 10), (1, 3), (16, 36)]
PAIR = SHAPES[:2]
"""One bucket: for the variants that do a part of what the first one does, by the same launches."""
METHODS = [(ProKLShampoo, {"variant": v, "rank": 4}) for v in VARIANTS] + [(KLShampoo, {})]
both_precisions = pytest.mark.parametrize("precision", PRECISIONS)  # in float64, which has no pairs, they are one


@pytest.fixture(autouse=True)
def no_host_reads(monkeypatch):
    """Take from the step the knowledge that reading a CPU tensor is free, so that it goes as on a GPU."""
    forbid_host_reads(monkeypatch)


def late_and_missing(i: int, t: int) -> bool:
    return (i == 1 and t < 2) or (i == 2 and t == 2) or (i == 3 and t == 3)


def scheduled(t, parameters, optimizer):
    """Step by another lr, and decay by another factor, next time."""
    optimizer.param_groups[0] |= {"lr": 0.1 * 0.7**t, "weight_decay": 0.3 * t}


def on_device(stream):
    return [[g.to(DEVICE) for g in gradients] for gradients in stream]


METHOD_SHAPES = [SHAPES, PAIR, PAIR, PAIR, [*PAIR, SHAPES[-1]]]


@pytest.mark.slow
@pytest.mark.parametrize("cls, kwargs, shapes", [(*own, of) for own, of in zip(METHODS, METHOD_SHAPES, strict=True)])
def test_equals_the_reference_in_float64_under_a_schedule(cls, kwargs, shapes):
    settings = {"precondition_frequency": 2, "absent": late_and_missing, "observe": scheduled, **kwargs}
    if cls is ProKLShampoo:
        settings["ns_dtype"] = torch.float64
    settings["cautious_weight_decay"] = shapes != SHAPES
    if kwargs.get("variant") in (None, "smok-hop"):
        settings["adjust_lr_fn"] = "match_rms_adamw"
    stream = on_device(gradient_stream(shapes, 5))
    bounded = (0, 5)[: len(shapes) // 2]
    for i in bounded:
        stream[3][i] *= 1e4  # far too large
    stream[2][1][2, 3] = stream[4][0][2, 3] = float("nan")  # the first gradient of one, and that of a refresh
    if shapes == SHAPES:
        stream[1][3][1, 2, 3] = float("inf")  # spoils the whole stack
    stream = [[g.reshape(16, 4, 3, 3) if g.shape == (16, 36) else g for g in gradients] for gradients in stream]
    parameters, optimizer = reference = run(cls, stream, backend="reference", **settings)
    assert all(optimizer.state[parameters[i]]["clipped"] > 0 for i in bounded)
    found = run(cls, stream, backend="triton", **settings)
    assert_runs_agree(found, reference, 1e-9)  # as the PyTorch table
    assert [*found[1].skipped().values()] == [shape in (SHAPES[0], SHAPES[1], SHAPES[3]) for shape in shapes]


@pytest.mark.slow
@pytest.mark.parametrize(  # balanced ones whose state is float32 are below
    "cls, kwargs, state_dtype, precision",
    [
        (*METHODS[0], None, "faithful"),
        (*METHODS[1], torch.bfloat16, "balanced"),
        (*METHODS[4], torch.bfloat16, "faithful"),
    ],
)
def test_float32_errs_as_its_precision_may(cls, kwargs, state_dtype, precision):
    kwargs = {"precondition_frequency": 3, "state_dtype": state_dtype, "dtype": torch.float32, **kwargs}
    if cls is ProKLShampoo:
        kwargs["ns_dtype"] = torch.float32
    stream = on_device(gradient_stream([(6, 10), (16, 36)], 6, dtype=torch.float32))
    found = ways(cls, stream, backend="triton", precision=precision, **kwargs)
    assert held(found, cls, stream, precision, **kwargs) <= 1


class CountOperations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def work_of_a_step(weights, cls, kwargs, monkeypatch):
    """(launches, other operations) of an ordinary and of a refresh step for so many weights of one shape."""
    shapes = [(6, 10) if i % 2 else (10, 6) for i in range(weights)]
    counts, launches = [], []
    operations = CountOperations()
    start = launch.start

    def counted(kernel, *args, **constants):
        launches.append(kernel)
        if not counts:  # what is launched depends on no value, so after the initialising step nothing need run
            with _disable_current_modes():
                start(kernel, *args, **constants)

    def observe(t, parameters, optimizer):
        counts.append((len(launches), operations.count))
        launches.clear()
        operations.count = 0

    with monkeypatch.context() as patch, operations:
        patch.setattr(launch, "start", counted)
        stream = on_device(gradient_stream(shapes, 6, dtype=torch.float32))
        settings = {"precondition_frequency": 5, "init_eigenvalue": 0.1, **kwargs}
        run(cls, stream, dtype=torch.float32, backend="triton", observe=observe, **settings)
    return counts[4], counts[5]


@both_precisions
@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_launches_do_not_grow_with_the_number_of_weights(cls, kwargs, precision, monkeypatch):
    few, many = (work_of_a_step(n, cls, {**kwargs, "precision": precision}, monkeypatch) for n in (3, 17))
    assert few == many
    ordinary, refresh = few
    assert 3 <= ordinary[0] <= 60 and ordinary[0] < refresh[0] <= 100


# Squares are normal numbers, subnormal ones of ever fewer digits, and zero.
@pytest.mark.slow
@pytest.mark.parametrize(
    "scale, precision", [(1e-15, "faithful"), (1e-20, "balanced"), (1e-22, "faithful"), (1e-30, "balanced")]
)
def test_a_decayed_momentum_without_gradients_stays_finite(scale, precision):
    stream = on_device(gradient_stream([(8, 12)], 3, dtype=torch.float32))
    settings = {"dtype": torch.float32, "backend": "triton", "rank": 4, "ns_dtype": torch.float32}
    settings["precision"] = precision
    (p,), optimizer = run(ProKLShampoo, stream, **settings)
    optimizer.state[p]["M_Q"].mul_(scale)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert all(t.isfinite().all() for t in (p, *state_tensors(optimizer.state[p]).values()))


@pytest.mark.parametrize("shape", [(16, 48), (16, 16)])  # one for each form of Newton-Schulz
@pytest.mark.parametrize("scale", [3e17, 5e17, 1e18])
@pytest.mark.parametrize("dtype, ns_dtype", [(torch.float32, torch.float32), (torch.float64, torch.bfloat16)], ids=str)
def test_a_nearly_overflowing_square_stays_finite_unbounded(dtype, ns_dtype, scale, shape):
    """Its complement's norm float32 does not hold once it is whitened, nor that of what Newton-Schulz makes of it."""
    W = torch.nn.Parameter(torch.zeros(shape, device=DEVICE, dtype=dtype))
    settings = {"rank": 4, "clip_threshold": None, "init_eigenvalue": 0.1, "ns_dtype": ns_dtype}
    optimizer = ProKLShampoo([W], backend="triton", **settings)
    for t in range(4):
        W.grad = (normal(*shape, seed=t) * (scale if t > 1 else 1)).to(DEVICE, dtype)
        optimizer.step()
    assert W.isfinite().all()


@pytest.mark.parametrize("scale", [1e-25, 1e-30])
def test_newton_schulz_of_a_float64_complement_in_halves_works(scale):
    W = torch.nn.Parameter(torch.zeros(16, 48, device=DEVICE, dtype=torch.float64))
    optimizer = ProKLShampoo([W], rank=4, momentum=0.0, ns_dtype=torch.bfloat16, backend="triton")
    for t in range(4):
        before = W.detach().clone()
        W.grad = normal(16, 48, seed=t, dtype=torch.float64).to(DEVICE) * (scale if t > 1 else 1)
        optimizer.step()
    assert 0.5 < (W - before).norm() / (0.02 * 4) < 2  # a usual step


@pytest.mark.slow
def test_a_complement_of_rounding_makes_no_step():
    """Each multiplies by 3.4445 what a scale of zero then takes away."""
    W = torch.nn.Parameter(torch.zeros(16, 48, device=DEVICE))
    optimizer = ProKLShampoo([W], rank=4, ns_steps=100, ns_dtype=torch.float32, backend="triton")
    for t in range(3):
        left, right = normal(16, 2, seed=2 * t), normal(2, 48, seed=9)
        W.grad = (left @ right).to(DEVICE)
        optimizer.step()
    assert W.any() and W.isfinite().all()


def test_autograd_sees_that_a_kernel_wrote_a_weight():
    p = torch.nn.Parameter(torch.ones(4, 6, device=DEVICE))
    optimizer = ProKLShampoo([p], rank=2, ns_dtype=torch.float32, backend="triton")
    for call, (g,) in enumerate(gradient_stream([(4, 6)], 2, dtype=torch.float32)):  # the first one only begins
        loss, version = (p * p).sum(), p._version
        p.grad = g.to(DEVICE)
        optimizer.step()
        assert (p._version > version) == (call > 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_gradient_is_let_go_after_the_step():
    p = torch.nn.Parameter(torch.ones(4, 6, device=DEVICE))
    optimizer = ProKLShampoo([p], rank=2, ns_dtype=torch.float32, backend="triton")
    for (g,) in gradient_stream([(4, 6)], 2, dtype=torch.float32):
        p.grad = g.to(DEVICE, copy=True)
        gone = weakref.ref(p.grad.untyped_storage())
        optimizer.step()
        p.grad = g = None
        assert gone() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls, kwargs, shapes",
    [(*own, [*PAIR, SHAPES[-1]][: 3 if own in (METHODS[0], METHODS[-1]) else 2]) for own in METHODS],
)
def test_balanced_steps_are_those_of_pytorchs_halves(cls, kwargs, shapes):
    """Both multiply the same halves, where they come from the same numbers.

    Sums in another order, which is the CPU's, may round a factor to another pair, 2^-16 of it away, or an average's to
    another neighbour in bfloat16. Measured: at most 5.6e-5, 1.3e-4 and 2.4e-4 of the distance moved on three CPUs by
    the pairs, and 9.7e-4 by both. One half alone is over what a balanced step may be off by, which is held as well.
    """
    stream = on_device(gradient_stream(shapes, 4, dtype=torch.float32))
    stream[3][-1] *= 1e4
    absent = {(0, 3), (1, 0)}
    kwargs = {"precondition_frequency": 2, "weight_decay": 0.1, "dtype": torch.float32, **kwargs}
    kwargs["absent"] = lambda i, t: (i, t) in absent
    if cls is ProKLShampoo:
        kwargs["ns_dtype"] = torch.float32
    torch_, triton = (ways(cls, stream, backend=b, precision="balanced", **kwargs) for b in ("torch", "triton"))
    differing = 2**-11 + 2 * AVERAGES * (cls is ProKLShampoo)  # either may be off by it
    assert all(relative(q, p) <= differing for p, q in zip(torch_[-1], triton[-1], strict=True))
    assert held(triton, cls, stream, "balanced", **kwargs) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cls, kwargs", [METHODS[0], METHODS[-1]])
def test_weights_of_half_precision_take_balanced_products(cls, kwargs, dtype):
    stream = [[g.to(DEVICE, dtype) for g in gradients] for gradients in gradient_stream([(6, 10)], 3)]
    kwargs = {**kwargs, "dtype": dtype, "bf16_weights": "plain", "precondition_frequency": 2}
    (p,), _ = run(cls, stream, backend="triton", precision="balanced", **kwargs)
    (q,), _ = run(cls, stream, backend="torch", precision="balanced", **kwargs)
    assert p.isfinite().all() and (p - q).abs().max() <= 2 * torch.finfo(dtype).eps * q.abs().max()


@pytest.mark.parametrize(
    "cls, dtype, given",
    [
        (ProKLShampoo, torch.float64, {"state_dtype": torch.bfloat16}),
        (ProKLShampoo, torch.float64, {"ns_dtype": torch.bfloat16}),
        (ProKLShampoo, torch.bfloat16, {"state_dtype": torch.float64, "bf16_weights": "plain"}),
        (ProKLShampoo, torch.bfloat16, {"state_dtype": torch.float64, "bf16_weights": "master"}),
        (KLShampoo, torch.float64, {"state_dtype": torch.bfloat16}),
        (KLShampoo, torch.bfloat16, {"bf16_weights": "plain"}),
    ],
)
def test_bfloat16_state_is_rounded_as_pytorch_rounds_it(cls, dtype, given):
    """Triton's interpreter converts to bfloat16 from float32 alone, and cuts off instead."""
    stream = on_device(gradient_stream([(6, 10)], 3))
    (p,), _ = run(cls, stream, backend="triton", dtype=dtype, **given)
    (q,), _ = run(cls, stream, backend="torch", dtype=dtype, **given)
    assert relative(p, q) <= torch.finfo(torch.bfloat16).eps / 2  # a unit of rounding; cut off, 8e-3 is off


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rounding_alone_makes_no_step_in_bfloat16(precision):
    """The residual of a gradient in the subspace; what a GPU takes without being asked."""
    directions, _ = torch.linalg.qr(normal(10, 3, seed=9))
    W = weight(6, 10, seed=0)
    given = {"rank": 3, "variant": "complement-only", "ns_dtype": torch.bfloat16, "precision": precision}
    optimizer = ProKLShampoo([W], backend="triton", **given)
    for call in range(4):
        W.grad = normal(6, 3, seed=call) @ directions.mT
        optimizer.step()
    assert torch.equal(W, weight(6, 10, seed=0))
