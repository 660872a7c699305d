"""A GPU at the paper's sizes: kernels launched, host reads, CUDA graphs, memory, precision.

The same is checked without one by other means: whole steps in Triton's interpreter in
tests/test_triton_step.py, launches there, host reads in tests/test_accelerator_path.py, graphs in tests/test_graphs.py.
"""

import copy
import statistics
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.algebra import Algebra
from prokl.algorithm.settings import PRECISIONS
from prokl.backends.triton_ops import TritonAlgebra
from prokl.engine.engine import Engine
from prokl.engine.graphs import Capture, record
from tests.problems import allowed, gradient_stream, held, precision_of, relative, rounding, run, ways
from tests.test_graphs import replayed

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
CUDA = torch.device("cuda")
PAPER = [(768, 768), (768, 2048), (768, 3072), (1024, 1024), (1024, 2816), (1024, 4096)]
# Two orientations, a stack, a second bucket and one large enough for other paths of torch.linalg.
SHAPES = [(96, 160), (160, 96), (3, 96, 160), (128, 128), (9, 520, 528)]
PERIOD = 5
"""Steps from one refresh to the next. The first of them compile kernels and create the libraries' workspaces."""
METHODS = [
    (ProKLShampoo, {"rank": 64, "precondition_frequency": PERIOD}),
    (KLShampoo, {"precondition_frequency": PERIOD}),
]
both_methods = pytest.mark.parametrize("cls, kwargs", METHODS)


def stream_on_gpu(shapes, steps, dtype=torch.float32, seed=0):
    return [[g.to(CUDA) for g in gradients] for gradients in gradient_stream(shapes, steps, seed=seed, dtype=dtype)]


def begun(cls, kwargs, stream, steps):
    """Weights and optimizer after the first steps of a stream, and the rest of it."""
    parameters, optimizer = run(cls, stream[:steps], dtype=torch.float32, backend="triton", **kwargs)
    return parameters, optimizer, stream[steps:]


def give(parameters, gradients):
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g


# Training


@pytest.mark.parametrize("shape", PAPER)
@pytest.mark.parametrize("precision", [None, "faithful"])
def test_steps_at_the_papers_sizes_err_as_their_precision_may(shape, precision):
    stream = stream_on_gpu([shape, shape[::-1]], PERIOD + 2)
    # Newton-Schulz in bfloat16 would hide what the other products lose.
    settings = {"precondition_frequency": PERIOD, "rank": 128, "ns_dtype": torch.float32}
    found = ways(ProKLShampoo, stream, backend="triton", precision=precision, **settings)
    assert held(found, ProKLShampoo, stream, precision_of("triton", CUDA, precision), **settings) <= 1


# Launches


def kernels_in(work):
    """Kernels that ``work()`` launches."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        work()
        torch.cuda.synchronize()
    ran = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # Copies and fills by the copy engine are no kernels; the optimizer's own annotation is repeated on the device.
    no_kernel = ("Memcpy", "Memset", "Optimizer.", "ProfilerStep")
    return sum(not e.name.startswith(no_kernel) and not getattr(e, "is_user_annotation", False) for e in ran)


def kernels_per_step(cls, kwargs, weights):
    """Return the kernels of an ordinary and of a refresh step of the second period."""
    shapes = [(128, 256) if i % 2 else (256, 128) for i in range(weights)]
    parameters, optimizer, rest = begun(cls, kwargs, stream_on_gpu(shapes, 2 * PERIOD + 1), PERIOD + 1)
    counts = []
    for gradients in rest:
        give(parameters, gradients)
        counts.append(kernels_in(optimizer.step))
    return counts[1], counts[-1]  # the last is a refresh; the first one profiled warms the profiler up


@both_methods
def test_kernels_per_step_do_not_grow_with_the_number_of_weights(cls, kwargs):
    # More than eight: up to that torch.linalg.solve_triangular goes matrix by matrix from 64 rows on.
    few, many = 12, 24
    ordinary, refresh = zip(*(kernels_per_step(cls, kwargs, n) for n in (few, many)), strict=True)
    print(f"kernels of an ordinary step {ordinary}, of a refresh step {refresh}, for {few} and {many} weights")
    assert 0 < ordinary[1] <= ordinary[0] <= 500  # by count about 150 operations, and a Cholesky is several kernels
    assert ordinary[1] < refresh[1] <= refresh[0] <= 1500


# Host reads


@contextmanager
def no_host_read():
    """Raises where the host would wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@both_methods
def test_no_step_after_the_first_waits_for_the_device(cls, kwargs):
    parameters, optimizer, rest = begun(cls, kwargs, stream_on_gpu(SHAPES, 2 * PERIOD + 2), 1)
    for t, gradients in enumerate(rest, 1):
        give(parameters, gradients)
        # In the first period and after, in an ordinary step and in a refresh.
        if t in (2, PERIOD, PERIOD + 2, 2 * PERIOD):
            parameters[1].grad = None
        if t in (PERIOD - 2, PERIOD, 2 * PERIOD - 2, 2 * PERIOD):
            gradients[0][2, 3] = float("nan")
        with no_host_read():
            optimizer.step()
    assert all(p.isfinite().all() for p in parameters)
    assert optimizer.skipped()["parameter 0 of group 0"] == 4


def test_fused_adamw_stays_at_a_bad_gradient_without_a_wait():
    bad, good = (torch.nn.Parameter(torch.ones(n, device=CUDA)) for n in (5, 3000))
    matrix = torch.nn.Parameter(torch.ones(4, 6, device=CUDA))
    own = {"params": [("bad", bad), ("good", good)], "algorithm": "adamw", "lr": 0.1, "fused": True}
    optimizer = ProKLShampoo([{"params": [("matrix", matrix)]}, own], rank=2)
    for value in (1.0, float("nan"), float("inf"), 1.0):
        before = good.detach().clone()
        bad.grad, good.grad = torch.ones_like(bad), torch.ones_like(good)
        bad.grad[2:3].mul_(value)
        with no_host_read() if optimizer.state else nullcontext():
            optimizer.step()
        assert torch.equal(before, good) == (value != 1.0)
    assert bad.isfinite().all() and optimizer.skipped()["bad"] == 2
    assert [float(optimizer.state[p]["step"]) for p in (bad, good)] == [2.0, 2.0]


# Graphs


@both_methods
def test_graphs_change_no_bit(cls, kwargs):
    """Steps have a schedule, gradients at changing addresses, and a NaN in two steps that graphs replay."""
    start, given = [], []

    def change(t, optimizer, gradients):
        if t == 1:  # all begin alike: two SVDs on a GPU need not agree in every bit
            start.append(copy.deepcopy(optimizer.state_dict()))
            optimizer.load_state_dict(start[0])
        if t in (3 * PERIOD - 2, 3 * PERIOD):
            gradients[0][2, 3] = float("nan")
        given.append(gradients)  # so that the allocator cannot give the same memory again

    own = {"init_eigenvalue": "auto", "shapes": SHAPES, "device": CUDA}
    optimizer = replayed((cls, kwargs), change, steps=5 * PERIOD, **own)
    # Every shape has one of ordinary and one of refresh steps, each recorded when it came up for the second time.
    for replays in optimizer.engine.graphs.replays.values():
        assert sum(replay is not None for replay in replays.values()) == 2
    assert optimizer.skipped()["parameter 0 of group 0"] == 2


def test_graphs_beside_an_idle_expert_change_no_bit():
    start = []

    def change(t, optimizer, gradients):
        gradients[0][1] = 0.0
        if t == 1:
            start.append(copy.deepcopy(optimizer.state_dict()))
            optimizer.load_state_dict(start[0])

    optimizer = replayed((ProKLShampoo, {"rank": 16}), change, steps=30, shapes=[(2, 128, 256)], device=CUDA)
    (replays,) = optimizer.engine.graphs.replays.values()
    assert sum(replay is not None for replay in replays.values()) == 2
    assert next(iter(optimizer.state.values()))["step"].tolist() == [29, -31]


@pytest.mark.parametrize("graphs", [False, True])
def test_second_streams_change_no_bit(graphs, monkeypatch):
    """Large enough that all streams have work at the same time; what is used too early would differ."""
    stream = stream_on_gpu([(768, 3072)] * 8 + [(768, 768)] * 8, 4 * PERIOD)
    ends = []
    for apart in (False, True):
        if not apart:
            monkeypatch.setattr(TritonAlgebra, "second_stream", Algebra.second_stream)
            monkeypatch.setattr(Engine, "_beside", lambda engine, *buckets: nullcontext())
        else:
            monkeypatch.undo()
        own = {"rank": 128, "precondition_frequency": PERIOD, "cuda_graphs": graphs, "backend": "triton"}
        parameters, optimizer = run(ProKLShampoo, stream[:1], dtype=torch.float32, **own)
        if ends:  # all begin alike
            optimizer.load_state_dict(ends[0][0])
        start = copy.deepcopy(optimizer.state_dict())
        for gradients in stream[1:]:
            give(parameters, gradients)
            optimizer.step()
        ends.append((start, [p.detach().clone() for p in parameters]))
    assert all(map(torch.equal, ends[0][1], ends[1][1]))


def test_an_invalidated_capture_leaves_torch_as_it_was():
    device = torch.device("cuda", torch.cuda.current_device())
    x, before = torch.ones(64, device=device), torch.cuda.current_stream(device)
    with pytest.raises(RuntimeError):
        record((x * 2).sum().item, device, Capture.on(device))
    assert torch.cuda.current_stream(device) == before
    torch.cuda.empty_cache()
    torch.nn.functional.dropout(x)  # which torch up to 2.11 refuses after a capture that could not be ended
    W = torch.nn.Parameter(torch.zeros(96, 160, device=device))
    optimizer = KLShampoo([W], backend="triton", cuda_graphs=False)
    for _ in range(2):
        W.grad = torch.randn(96, 160).to(device)
        optimizer.step()
    assert W.any() and W.isfinite().all()


# Memory


def requested(what):
    """Bytes asked of the allocator, without what it rounds up: blocks may be 1 MiB larger than what they hold."""
    return torch.cuda.memory_stats(CUDA)[f"requested_bytes.all.{what}"]


@pytest.mark.parametrize("shape", [(768, 3072), (1024, 1024)])
@both_methods
def test_a_step_takes_no_more_memory_than_the_workspace_says(cls, kwargs, shape):
    kwargs, rank = (kwargs | {"rank": 128}, 128) if "rank" in kwargs else (kwargs, 0)
    signal = [torch.randn(*shape, device=CUDA) for _ in range(3)]
    parameters = [torch.nn.Parameter(torch.zeros(*shape, device=CUDA)) for _ in signal]
    optimizer = cls(parameters, backend="triton", **kwargs)
    taken = []
    for _ in range(2 * PERIOD + 2):
        give(parameters, [g + 0.3 * torch.randn_like(g) for g in signal])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        optimizer.step()
        taken.append(requested("peak") - before)
    most = max(taken[PERIOD + 1 :])  # with a refresh among them
    workspace = len(signal) * cls.method.workspace(*shape, rank) * 4
    print(f"{shape}: {most / workspace:.2f} of the workspace")
    # Slack: the libraries' lists of pointers; and the bound is no arbitrary one.
    assert workspace / 4 <= most <= workspace + 2**20


# Precision


@contextmanager
def tf32(how):
    """Switch torch's TF32 on in one of its two ways, or off (None)."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        if how == "allow_tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
        elif how is not None:
            torch.set_float32_matmul_precision(how)
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def moved(backend, how=None, dtype=torch.float32, given=torch.float32, seed=0, **kwargs):
    """Distances moved by weights of ``dtype``, in float64; the gradients are rounded to ``given``."""
    stream = stream_on_gpu(SHAPES, 12, dtype=given, seed=seed)
    start = []

    def observe(t, parameters, optimizer):
        if t == 0:  # initialising moves nothing
            start.extend(p.detach().double().clone() for p in parameters)

    cls, own = METHODS[0]
    with tf32(how):
        end, _ = run(cls, stream, observe=observe, dtype=dtype, backend=backend, **own, **kwargs)
    return [p.detach().double() - w for p, w in zip(end, start, strict=True)]


def difference(one, two):
    return sum(relative(a, b) for a, b in zip(one, two, strict=True)) / len(two)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_torchs_tf32_switches_change_no_more_than_rounding(precision):
    def run_in(backend, how=None, dtype=torch.float32):
        own = {"precision": precision} if backend == "triton" else {}
        return moved(backend, how, dtype, ns_dtype=dtype, **own)

    of_float32 = difference(run_in("reference"), run_in("reference", dtype=torch.float64))
    plain = {backend: run_in(backend) for backend in ("triton", "torch")}
    for how in ("allow_tf32", "high", "medium"):
        triton, torchs = (difference(run_in(backend, how), plain[backend]) for backend in ("triton", "torch"))
        print(f"{how}: moved elsewhere by {triton:.1e}, backend torch by {torchs:.1e}; rounding {of_float32:.1e}")
        assert triton <= allowed(precision, of_float32, of_float32, rounding(ProKLShampoo))
        assert torchs > 10 * of_float32  # so the switch does act


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_half_precision_errs_as_the_reference_may(state_dtype):
    ratios, precision = [], precision_of("triton", CUDA)
    for seed in range(3):
        # A small step would vanish in the weights' rounding.
        common = {"given": torch.bfloat16, "lr": 1.0, "seed": seed}
        exact = moved("reference", dtype=torch.float64, ns_dtype=torch.float64, **common)
        found, own = (
            difference(moved(backend, dtype=torch.bfloat16, state_dtype=state_dtype, **common), exact)
            for backend in ("triton", "reference")
        )
        single = difference(moved("reference", ns_dtype=torch.float32, **common), exact)
        print(f"error of triton {found:.1e}, of the reference {own:.1e}, in float32 {single:.1e}")
        ratios.append(found / allowed(precision, own, single, rounding(ProKLShampoo)))
    assert statistics.median(ratios) <= 1, ratios
