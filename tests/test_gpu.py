"""What only a GPU shows: runs at the paper's sizes, kernels launched, host reads, CUDA graphs, memory, precision.

Every body also runs at toy sizes in Triton's interpreter ("cpu"), where stand-ins take the place of CUDA's own
counters, so that it is known to run before a GPU is at hand.
"""

import copy
import statistics
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.settings import PRECISIONS
from prokl.engine.graphs import Capture, record
from prokl.kernels import launch
from tests.inputs import forbid_host_reads
from tests.problems import allowed, gradient_stream, held, made, precision_of, relative, run, ways
from tests.test_accelerator_path import ForbidHostReads
from tests.test_graphs import assert_same, recorded  # noqa: F401  (a fixture)

PAPER = [(768, 768), (768, 2048), (768, 3072), (1024, 1024), (1024, 2816), (1024, 4096)]
GPU = pytest.mark.gpu
INTERPRETED = pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")
DEVICES = [pytest.param("cuda", marks=GPU), pytest.param("cpu", marks=INTERPRETED)]
both_methods = pytest.mark.parametrize(  # of the two KLShampoo has the fewer launches to interpret
    "cls, device",
    [
        pytest.param(ProKLShampoo, "cuda", marks=GPU),
        pytest.param(KLShampoo, "cuda", marks=GPU),
        pytest.param(KLShampoo, "cpu", marks=INTERPRETED),
    ],
    indirect=["device"],
)
PERIOD = 3 if launch.INTERPRETED else 5
"""Steps from one refresh to the next. The first of them compile kernels and create the libraries' workspaces."""
EXACT = {"ns_dtype": torch.float32}  # Newton-Schulz too: bfloat16 would hide what the other products lose


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cpu":  # take the path of a device that the host may not read
        forbid_host_reads(monkeypatch)
    return torch.device(request.param)


def is_gpu(device):
    return device.type == "cuda"


def shapes_on(device):
    """Two orientations; on a GPU a stack, a second bucket and one large enough for other paths of torch.linalg, too."""
    if is_gpu(device):
        return [(96, 160), (160, 96), (3, 96, 160), (128, 128), (9, 520, 528)]
    return [(6, 10), (10, 6)]


def rank_on(device):
    return 64 if is_gpu(device) else 4


def default_precision(device):
    """What a GPU takes for None; in the interpreter what it has to be told to."""
    return precision_of("triton", device) if is_gpu(device) else "balanced"


def settings_of(cls, device, backend="triton", **kwargs):
    """What a GPU has by default, in the interpreter as well, but for Newton-Schulz: there is no bfloat16 there.

    Those of ProKLShampoo only where they are taken.
    """
    own = {"rank": rank_on(device)} if cls is ProKLShampoo else {}
    if not is_gpu(device):
        own |= EXACT if cls is ProKLShampoo else {}
        own |= {"precision": default_precision(device)} if backend == "triton" else {}
    return {"precondition_frequency": PERIOD, "backend": backend, **own, **kwargs}


def stream_on(device, shapes, steps, dtype=torch.float32, seed=0):
    return [[g.to(device) for g in gradients] for gradients in gradient_stream(shapes, steps, seed=seed, dtype=dtype)]


# Training


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, device, precision",
    [
        *(pytest.param(shape, "cuda", p, marks=GPU) for shape in PAPER for p in (None, "faithful")),
        *(pytest.param((6, 10), "cpu", p, marks=INTERPRETED) for p in PRECISIONS),
    ],
    indirect=["device"],
)
def test_steps_at_the_papers_sizes_err_as_their_precision_may(shape, device, precision):
    stream = stream_on(device, [shape, shape[::-1]], PERIOD + 2)
    settings = {"precondition_frequency": PERIOD, "rank": 128 if is_gpu(device) else 4, **EXACT}
    meant = precision_of("triton", device, precision)
    found = ways(ProKLShampoo, stream, backend="triton", precision=precision, **settings)
    assert held(found, ProKLShampoo, stream, meant, **settings) <= 1


# Launches


def kernels_in(work, device):
    """Kernels that ``work()`` launches; on a CPU those of this package alone, which need not run: none asks a value."""
    if not is_gpu(device):
        launched = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "start", lambda kernel, *args, **constants: launched.append(kernel))
            work()
        return len(launched)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as p:
        work()
        torch.cuda.synchronize()
    ran = [e for e in p.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    # Copies and fills by the copy engine are no kernels; the optimizer's own annotation is repeated on the device.
    no_kernel = ("Memcpy", "Memset", "Optimizer.", "ProfilerStep")
    return sum(not e.name.startswith(no_kernel) and not getattr(e, "is_user_annotation", False) for e in ran)


def kernels_per_step(cls, weights, device):
    """Of an ordinary and of a refresh step of the second period."""
    k = 16 if is_gpu(device) else 1
    shapes = [(8 * k, 16 * k) if i % 2 else (16 * k, 8 * k) for i in range(weights)]
    stream = stream_on(device, shapes, 2 * PERIOD + 1)
    parameters, optimizer = run(cls, stream[: PERIOD + 1], dtype=torch.float32, **settings_of(cls, device))
    counts = []
    for gradients in stream[PERIOD + 1 :]:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        counts.append(kernels_in(optimizer.step, device))
    return counts[1], counts[-1]  # the last is a refresh; the first one profiled warms the profiler up


@pytest.mark.slow
@both_methods
def test_kernels_per_step_do_not_grow_with_the_number_of_weights(cls, device):
    # More than eight: up to that torch.linalg.solve_triangular goes matrix by matrix from 64 rows on.
    few, many = (12, 24) if is_gpu(device) else (1, 3)
    ordinary, refresh = zip(*(kernels_per_step(cls, n, device) for n in (few, many)), strict=True)
    print(f"kernels of an ordinary step {ordinary}, of a refresh step {refresh}, for {few} and {many} weights")
    assert 0 < ordinary[1] <= ordinary[0] <= 500  # by count about 150 operations, and a Cholesky is several kernels
    assert ordinary[1] < refresh[1] <= refresh[0] <= 1500


# Host reads


@contextmanager
def no_host_read(device):
    """Raises where the host would wait for the device."""
    if not is_gpu(device):
        with ForbidHostReads():
            yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_host_read_would_be_seen(device):
    value = torch.ones(1, device=device)
    with pytest.raises((RuntimeError, AssertionError)), no_host_read(device):
        value.item()


@pytest.mark.slow
@both_methods
def test_no_step_after_the_first_waits_for_the_device(cls, device):
    stream = stream_on(device, shapes_on(device), 2 * PERIOD + 2)
    parameters, optimizer = run(cls, stream[:1], dtype=torch.float32, **settings_of(cls, device))
    for t, gradients in enumerate(stream[1:], 1):
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        # In the first period and after, in an ordinary step and in a refresh.
        if t in (2, PERIOD, PERIOD + 2, 2 * PERIOD):
            parameters[1].grad = None
        if t in (PERIOD - 2, PERIOD, 2 * PERIOD - 2, 2 * PERIOD):
            gradients[0][2, 3] = float("nan")
        with no_host_read(device):
            optimizer.step()
    assert all(p.isfinite().all() for p in parameters)
    assert optimizer.skipped()["parameter 0 of group 0"] == 4


# Graphs


def train(cls, device, graphs, start=None):
    """Steps with a schedule, gradients at changing addresses, and a NaN in two steps that graphs replay.

    Returns:
        The parameters, the optimizer, and its state after the initialising step, or ``start`` if that was given:
        two SVDs on a GPU need not agree in every bit.
    """
    g = torch.Generator().manual_seed(0)
    shapes = shapes_on(device)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s in shapes]
    settings = {**settings_of(cls, device), "weight_decay": 0.1, "cuda_graphs": graphs}
    optimizer = made(cls, parameters, **settings)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    held, addresses = [], set()
    for t, gradients in enumerate(stream_on(device, shapes, 5 * PERIOD if is_gpu(device) else 3 * PERIOD + 1)):
        gradients = [x.clone() for x in gradients]
        if t in (3 * PERIOD - 2, 3 * PERIOD):
            gradients[0][2, 3] = float("nan")
        for p, x in zip(parameters, gradients, strict=True):
            p.grad = x
        held = [*held, *gradients][-2 * len(gradients) :]  # so that the allocator cannot give the same memory again
        addresses.add(gradients[0].data_ptr())
        optimizer.step()
        if t == 0:
            start = start or copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(start)
        schedule.step()
    assert len(addresses) > 1
    return parameters, optimizer, start


@pytest.mark.slow
@both_methods
def test_graphs_change_no_bit(cls, device, request):
    if not is_gpu(device):
        request.getfixturevalue("recorded")
    *plain, start = train(cls, device, False)
    *replayed, _ = train(cls, device, True, start)
    assert_same(plain, replayed)
    # Of every shape one of ordinary and one of refresh steps, each recorded when it came up for the second time.
    for replays in replayed[1].engine.graphs.replays.values():
        assert sum(replay is not None for replay in replays.values()) == 2
    assert replayed[1].skipped()["parameter 0 of group 0"] == 2


@GPU
def test_a_capture_that_is_invalidated_leaves_stream_allocator_and_random_numbers_as_they_were():
    device = torch.device("cuda", torch.cuda.current_device())
    x, before = torch.ones(64, device=device), torch.cuda.current_stream(device)
    with pytest.raises(RuntimeError):
        record((x * 2).sum().item, device, Capture.on(device))
    assert torch.cuda.current_stream(device) == before
    torch.cuda.empty_cache()
    torch.nn.functional.dropout(x)  # which torch up to 2.11 refuses after a capture that could not be ended
    W = torch.nn.Parameter(torch.zeros(96, 160, device=device))
    optimizer = made(KLShampoo, [W], backend="triton", cuda_graphs=False)
    for _ in range(2):
        W.grad = torch.randn(96, 160).to(device)
        optimizer.step()
    assert W.any() and W.isfinite().all()


# Memory


def requested(device, what):
    """Bytes asked of the allocator, without what it rounds up: blocks may be 1 MiB larger than what they hold."""
    return torch.cuda.memory_stats(device)[f"requested_bytes.all.{what}"] if is_gpu(device) else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "cls, shape, device",
    [
        *(
            pytest.param(cls, shape, "cuda", marks=GPU)
            for cls in (ProKLShampoo, KLShampoo)
            for shape in ((768, 3072), (1024, 1024))
        ),
        pytest.param(KLShampoo, (6, 10), "cpu", marks=INTERPRETED),
    ],
    indirect=["device"],
)
def test_a_step_takes_no_more_memory_than_the_workspace_says(cls, shape, device):
    pro, count = cls is ProKLShampoo, 3 if is_gpu(device) else 1
    rank = 128 if is_gpu(device) else 4
    signal = [torch.randn(*shape, device=device) for _ in range(count)]
    parameters = [torch.nn.Parameter(torch.zeros(*shape, device=device)) for _ in signal]
    optimizer = made(cls, parameters, **settings_of(cls, device, **({"rank": rank} if pro else {})))
    taken = []
    for _ in range(2 * PERIOD + 2):
        for p, g in zip(parameters, signal, strict=True):
            p.grad = g + 0.3 * torch.randn_like(g)
        if is_gpu(device):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = requested(device, "current")
        optimizer.step()
        taken.append(requested(device, "peak") - before)
    most = max(taken[PERIOD + 1 :])  # with a refresh among them
    allowed = count * cls.method.workspace(*shape, rank) * 4
    print(f"{shape}: {most / allowed:.2f} of the workspace")
    assert most <= allowed + 2**20  # slack: the libraries' lists of pointers
    if is_gpu(device):
        assert most >= allowed / 4  # and the bound is no arbitrary one


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


def moved(device, backend, how=None, dtype=torch.float32, given=torch.float32, seed=0, **kwargs):
    """Distances moved by weights of ``dtype``, in float64; the gradients are rounded to ``given``."""
    steps = 12 if is_gpu(device) else PERIOD + 1  # with a refresh
    stream = stream_on(device, shapes_on(device), steps, dtype=given, seed=seed)
    kwargs = {"dtype": dtype, **settings_of(ProKLShampoo, device, backend, **kwargs)}
    start = []

    def observe(t, parameters, optimizer):
        if t == 0:  # initialising moves nothing
            start.extend(p.detach().double().clone() for p in parameters)

    with tf32(how):
        end, _ = run(ProKLShampoo, stream, observe=observe, **kwargs)
    return [p.detach().double() - w for p, w in zip(end, start, strict=True)]


def difference(one, two):
    return sum(relative(a, b) for a, b in zip(one, two, strict=True)) / len(two)


@pytest.mark.slow
@pytest.mark.parametrize(
    "device, precision",
    [pytest.param("cuda", p, marks=GPU) for p in PRECISIONS] + [pytest.param("cpu", "balanced", marks=INTERPRETED)],
    indirect=["device"],
)
def test_torchs_tf32_switches_change_no_more_than_rounding(device, precision):
    def run_in(backend, how=None, dtype=torch.float32):
        own = {"precision": precision} if backend == "triton" else {}
        return moved(device, backend, how, dtype, ns_dtype=dtype, **own)

    rounding = difference(run_in("reference"), run_in("reference", dtype=torch.float64))
    plain = {backend: run_in(backend) for backend in ("triton", "torch")}
    for how in ("allow_tf32", "high", "medium") if is_gpu(device) else ("high",):
        triton, torchs = (difference(run_in(backend, how), plain[backend]) for backend in ("triton", "torch"))
        print(f"{how}: moved elsewhere by {triton:.1e}, backend torch by {torchs:.1e}; rounding {rounding:.1e}")
        assert triton <= allowed(precision, rounding, rounding, both_parts=True)
        if is_gpu(device):
            assert torchs > 10 * rounding  # so the switch does act


@pytest.mark.slow
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_half_precision_errs_as_the_references_and_as_the_default_precision_may(state, device):
    # No bfloat16 in the interpreter. lr=1: a small step would vanish in the rounding of the weights.
    half = torch.bfloat16 if is_gpu(device) else torch.float16
    state_dtype = torch.bfloat16 if state == "bfloat16" else None  # storage, which the interpreter reads rightly
    ratios, precision = [], default_precision(device)
    for seed in range(3 if is_gpu(device) else 1):
        common = {"given": half, "lr": 1.0, "seed": seed}
        exact = moved(device, "reference", dtype=torch.float64, ns_dtype=torch.float64, **common)
        found, own = (
            difference(moved(device, backend, dtype=half, state_dtype=state_dtype, **common), exact)
            for backend in ("triton", "reference")
        )
        single = difference(moved(device, "reference", ns_dtype=torch.float32, **common), exact)
        print(f"error of triton {found:.1e}, of the reference {own:.1e}, in float32 {single:.1e}")
        ratios.append(found / allowed(precision, own, single, both_parts=True))
    assert statistics.median(ratios) <= 1, ratios
