"""Steps replayed from graphs against plain ones, with a stand-in for CUDA graphs.

The stand-in fixes what a CUDA graph fixes: it records every PyTorch operation and every kernel launch with the very
tensors and numbers of the recording, and repeats them, results going into the tensors of the recording. A value that
the host decides and that no tensor carries is therefore stale in a replay, as on a GPU.
"""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import prokl.engine.graphs
from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.algebra import Algebra
from prokl.algorithm.pro_klshampoo import ProKLShampooMethod
from prokl.backends.select import select
from prokl.engine.bucket import Bucket
from prokl.engine.engine import Engine
from prokl.kernels import launch
from tests.inputs import HOST_READS, ForbidCalls, forbid_host_reads
from tests.problems import gradient_stream
from tests.training import differences, silent

SHAPES = [(6, 10), (10, 6), (4, 4)]
STACK = (2, 6, 10)
# The other variants do a part of what the first one does, and no host decision is any one's own.
PRO, KL = (ProKLShampoo, {"rank": 4, "ns_dtype": torch.float32}), (KLShampoo, {})
COPIES = ("aten::lift_fresh",)  # of what torch.tensor makes of the host's values
STEPS = 10
BUCKETS = 2  # that SHAPES make
ONE = {"shapes": SHAPES[:1]}
STREAM = {"current": ""}


def copied(old, new):
    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
        old.copy_(new)


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in HOST_READS + COPIES, func
        out = func(*args, **(kwargs or {}))

        def again():
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **(kwargs or {}))), strict=True):
                copied(old, new)

        self.calls.append(again)
        return out


@pytest.fixture
def recorded(monkeypatch):
    """Replaces CUDA graphs by the stand-in; the list holds one entry per recording."""
    if not launch.INTERPRETED:
        pytest.skip("the stand-in for a graph needs Triton's interpreter")
    recordings = []
    start = launch.start

    def record(run, device, capture):
        every = [bucket for bucket in gc.get_objects() if type(bucket) is Bucket]
        buckets = [bucket for bucket in every if hasattr(bucket, "skipped")]  # an error may hold an unfinished one
        known = [t for b in buckets for t in (*b.stacks.values(), b.skipped, *(member.p.data for member in b.members))]
        before = [t.clone() for t in known]
        recording = Recording()

        def recorded_start(*args, **constants):
            def call():
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    start(*args, **constants)

            recording.calls.append(call)
            call()

        with monkeypatch.context() as patch, ForbidCalls(), recording:
            patch.setattr(launch, "start", recorded_start)
            run()
        for t, value in zip(known, before, strict=True):  # recording does not execute
            t.copy_(value)
        recordings.append(len(recording.calls))

        def replay():
            for call in recording.calls:
                call()

        return replay

    monkeypatch.setattr("prokl.backends.select.select", lambda *asked: replace(select(*asked), graphs=True))
    monkeypatch.setattr(prokl.engine.graphs, "record", record)
    monkeypatch.setattr(prokl.engine.graphs.Capture, "on", lambda device, before=None: object())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: STREAM["current"])
    monkeypatch.setitem(STREAM, "current", "the caller's")
    forbid_host_reads(monkeypatch)
    return recordings


class OfKernelsGradients(Algebra):
    """PyTorch's operations on gradients as kernels gather them, in bfloat16 beside state in float32."""

    def product(self, left, right, /, **more):
        return super().product(left, right.to(left.dtype), **more)


@pytest.fixture
def few_kernels(monkeypatch):
    """Kernels only where the step reaches through tables on the device; the rest in PyTorch, which is quicker here."""
    if not launch.INTERPRETED:
        pytest.skip("kernels run on a CPU in Triton's interpreter alone")
    triton = select("triton", torch.device("cpu"))
    backend = replace(triton, name="few kernels", ops=OfKernelsGradients(False), graphs=True)
    monkeypatch.setattr("prokl.backends.select.select", lambda *asked: backend)


def train(
    method,
    graphs=True,
    change=None,
    steps=STEPS,
    dtype=torch.float32,
    shapes=SHAPES,
    device="cpu",
    split=None,
    **settings,
):
    """Return an optimizer that stepped, with ``change`` before each step; ``split`` is of all weights."""
    cls, own = method
    g = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s, generator=g).to(device, dtype)) for s in shapes]
    fixed = {"backend": "triton", "precondition_frequency": 3, "weight_decay": 0.1, "init_eigenvalue": 0.1}
    groups = [{"params": parameters, "split": split}]
    optimizer = cls(groups, cuda_graphs=graphs, **{**fixed, **own, **settings})
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for t, gradients in enumerate(gradient_stream(shapes, steps, dtype=dtype)):
        gradients = [x.to(device, copy=True) for x in gradients]
        if change is not None:
            change(t, optimizer, gradients)
        for p, x in zip(parameters, gradients, strict=True):
            p.grad = x  # at another address every step
        optimizer.step()
        schedule.step()
    return optimizer


def replayed(method, change=None, **settings):
    """Return an optimizer that trained with graphs, last, and has the weights and state of one that has none."""
    plain, optimizer = (train(method, graphs, change, **settings) for graphs in (False, True))
    assert differences(plain, optimizer) == set()
    return optimizer


@pytest.mark.slow
def test_replayed_steps_of_all_kernels_equal_plain_ones(recorded):
    # Other orientations make a difference to tables alone, which the tests below have too.
    replayed(PRO, steps=7, precondition_frequency=2, precision="balanced", **ONE)  # the third refresh replays
    assert len(recorded) == 2


def outgrow(t, optimizer, gradients):
    for x in gradients:
        x.mul_(1e4 if t else 1)


def resize(t, optimizer, gradients):
    for x in gradients:
        x.mul_({6: 1e-5, 7: 1e5, 8: 0.0}.get(t, 1.0))


def spoil(t, optimizer, gradients):
    if t in (7, 9):  # an ordinary step and a refresh that are replayed
        gradients[0][2, 3] = float("nan")


def begin_one_by_one(t, optimizer, gradients):
    for i, x in enumerate(gradients):
        x.mul_(t >= i)


def begin_an_expert_late(t, optimizer, gradients):
    gradients[0][1].mul_(t >= 22 and t % 3 == 0)  # zero in the tenth steps, where it begins


def withhold_one(t, optimizer, gradients):
    if t == 5:
        gradients[1] = None


def withhold_the_only_one_of_its_shape(t, optimizer, gradients):
    gradients[2] = gradients[2] if t < 3 else None


def reload(t, optimizer, gradients):
    if t == 7:
        optimizer.load_state_dict(optimizer.state_dict())


def go_elsewhere(t, optimizer, gradients):
    STREAM["current"] = "the caller's" if t < 7 else "another"


def setting(**values):
    """Set what is given of every step: functions of it."""

    def change(t, optimizer, gradients):
        optimizer.param_groups[0].update({key: value(t) for key, value in values.items()})

    return change


SELDOM = {"precondition_frequency": 100}
SIZED = {**SELDOM, "clip_threshold": 20.0}
CHANGES = {
    # name: method, what changes, settings, recordings: of every bucket's ordinary and refresh steps one each time anew
    "gradients alone change": (PRO, None, {"shapes": [*SHAPES, STACK]}, 2 * BUCKETS),
    "gradients of weights by heads do": (PRO, None, {"shapes": [(18, 10), (30, 6)], "split": 3}, 2),  # one bucket
    "KL-Shampoo's do": (KL, None, {"shapes": [*SHAPES, STACK]}, 2 * BUCKETS),
    "an auto start is outgrown": (PRO, outgrow, {"init_eigenvalue": "auto", "steps": 8}, 2 * BUCKETS),
    "a gradient is tiny, another bounded, another zero": (PRO, resize, {**SIZED, **ONE}, 1),
    "those of KL-Shampoo are": (KL, resize, {**SIZED, **ONE}, 1),
    # The other one's PyTorch form takes no gradients in bfloat16.
    "bfloat16 is rounded at random": (
        KL, None, {"dtype": torch.bfloat16, "bf16_weights": "stochastic", "steps": 8}, range(1, 9)
    ),
    "bfloat16 has masters": (KL, None, {"dtype": torch.bfloat16, "bf16_weights": "master", "steps": 8}, range(1, 9)),
    "the rate is a tensor": (PRO, None, {"lr": torch.tensor(0.02)}, range(1, 9)),  # of which each optimizer has its own
    "a bad gradient is skipped": (PRO, spoil, {}, 2 * BUCKETS),
    "weights began one by one and refresh in turn": (
        KL, begin_one_by_one, {"shapes": SHAPES[2:] * 10, "precondition_frequency": 10, "steps": 32}, 10
    ),
    "an idle expert begins": (PRO, begin_an_expert_late, {"shapes": [STACK], "steps": 40}, 2 + 3),
    "a missing gradient runs plainly and then is recorded anew": (
        PRO, withhold_one, {"steps": 14}, range(2 * BUCKETS + 1, 99)
    ),
    "another shape is replayed beside one that cannot be": (PRO, withhold_the_only_one_of_its_shape, {}, 3),
    "weight decay is followed and another beta2 recorded anew": (
        PRO,
        setting(weight_decay=lambda t: 0.1 if t < 5 else 0.3, beta2=lambda t: 0.95 if t < 7 else 0.8),
        {"steps": 13},
        4 * BUCKETS,
    ),
    "other units of lr or another decay are recorded anew": (
        PRO,
        setting(
            adjust_lr_fn=lambda t: "original" if t < 4 else "match_rms_adamw", cautious_weight_decay=lambda t: t >= 7
        ),
        {"weight_decay": 0.5, **SELDOM},
        3 * BUCKETS,
    ),
    "maximizing is recorded anew": (KL, setting(maximize=lambda t: t >= 5), {**SELDOM, **ONE}, 2),
    "a state dict is loaded": (PRO, reload, {"steps": 13}, 4 * BUCKETS),
    "another stream has graphs and memory of its own": (PRO, go_elsewhere, {"steps": 15}, 4 * BUCKETS),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method, change, own, recordings", CHANGES.values(), ids=CHANGES)
def test_replayed_steps_equal_plain_ones_where(method, change, own, recordings, recorded, few_kernels):
    optimizer = replayed(method, change, **own)
    assert len(recorded) in (recordings if isinstance(recordings, range) else [recordings])
    if change is spoil:
        assert optimizer.skipped()["parameter 0 of group 0"] == 2
    if change is go_elsewhere:
        assert {*optimizer.engine.graphs.captures} == {"the caller's", "another"}
    if change is resize:
        assert [*optimizer.clipped().values()] == [2]  # one of them before there is a graph
    if change is outgrow:
        assert min(optimizer.clipped().values()) > 2  # not only the two that ran plainly


@pytest.mark.slow
def test_a_bounded_number_of_graphs_keeps_those_in_use(recorded, few_kernels, monkeypatch):
    monkeypatch.setattr(prokl.engine.graphs, "KEPT", 2)
    optimizer = replayed(PRO, setting(momentum=lambda t: 0.9 if t % 2 else 0.9 + 0.001 * t), **SELDOM, **ONE)
    assert len(recorded) == 1  # that of 0.9, once
    assert [len(replays) for replays in optimizer.engine.graphs.replays.values()] == [2]


@pytest.mark.slow
def test_another_backend_leaves_no_graph_of_old_tables(recorded, few_kernels, monkeypatch):
    others = [replace(prokl.backends.select.select("triton", None)) for _ in range(2)]
    monkeypatch.setattr("prokl.backends.select.select", lambda name, *asked: others[name is None])
    replayed(PRO, setting(backend=lambda t: "triton" if t < 7 or t > 9 else None), steps=13, **ONE)
    assert len(recorded) > 2


def test_a_step_inside_a_capture_raises(monkeypatch):
    p = torch.nn.Parameter(torch.ones(4, 6))
    p.grad = torch.ones_like(p)
    optimizer = ProKLShampoo([p])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="while a CUDA graph is captured.*replays graphs of its own"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.slow
@pytest.mark.parametrize("what", ["recording", "third replay"])
def test_a_failed_capture_is_noted_once_and_steps_run_plainly(what, recorded, few_kernels, monkeypatch):
    tried, record = [], prokl.engine.graphs.record

    def fail():
        tried.append(what)
        if len(tried) == (1 if what == "recording" else 3):
            raise RuntimeError("no memory to launch it")

    def failing(run, device, capture):
        if what == "recording":
            fail()
        replay = record(run, device, capture)
        return lambda: (fail(), replay())

    monkeypatch.setattr(prokl.engine.graphs, "record", failing)
    count = 1 if what == "recording" else 3
    with pytest.warns(UserWarning, match="without CUDA graphs, .* failed: no memory to launch it") as told:
        optimizer = replayed(PRO, **ONE)
    assert len(tried) == count and len([w for w in told if "CUDA graphs" in str(w.message)]) == 1
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    optimizer.step()
    assert len(tried) == count


@pytest.mark.slow
def test_refreshes_that_no_graph_can_capture_run_plainly(recorded, few_kernels, monkeypatch):
    backend = replace(prokl.backends.select.select("triton", None), graphs_of_refreshes=False)
    monkeypatch.setattr("prokl.backends.select.select", lambda *asked: backend)
    replayed(PRO, **ONE)
    assert len(recorded) == 1


class Device:
    """A stand-in for what a capture changes of torch: streams, pools, the default generator; as torch 2.9 to 2.11 do.

    ``capture_end`` raises before it leaves the pool and lets the generator go. ``fails`` says where: at the "begin", in
    what "runs" (Python's error, or one that makes the capture invalid besides), or when it is "invalid" at the end.
    """

    def __init__(self, monkeypatch, fails=(), free=10):
        self.fails, self.stream, self.waits, self.recording, self.calls = set(fails), "caller's", [], [], []
        self.generator_captures = False
        device = self

        class Stream:
            def __init__(self, on="cuda:3"):
                assert str(on) == "cuda:3"

            def wait_stream(self, other):
                device.waits.append((self, other))

        class CUDAGraph:
            def capture_begin(self, pool, capture_error_mode):
                assert isinstance(device.stream, Stream) and capture_error_mode == "thread_local"
                assert (device.stream, "caller's") in device.waits
                device.generator_captures = True
                assert pool not in device.recording, "already recording to mempool_id"
                device.recording.append(pool)
                self.pool, self.open = pool, "begin" not in device.fails
                if not self.open:
                    raise RuntimeError("cannot begin")

            def capture_end(self):
                assert self.open, "illegal state"
                self.open = False
                if "invalid" in device.fails:
                    raise RuntimeError("capture invalidated")
                device.recording.remove(self.pool)
                device.generator_captures = False

            def replay(self):
                device.calls.append("replay")

            def reset(self):
                device.calls.append("reset")

        @contextmanager
        def stream(wanted):
            before, self.stream = self.stream, wanted
            try:
                yield
            finally:
                self.stream = before

        def end(index, pool):
            if pool not in self.recording:
                raise RuntimeError("not currently recording to mempool_id")
            self.recording.remove(pool)
            self.calls.append("end")

        self.Stream = Stream
        fakes = {"device": lambda d: nullcontext(), "stream": stream, "CUDAGraph": CUDAGraph, "Stream": Stream}
        fakes |= {"current_stream": lambda: self.stream, "current_device": lambda: 3}
        fakes |= {"empty_cache": lambda: self.calls.append("empty"), "graph_pool_handle": lambda: (0, len(self.waits))}
        fakes["mem_get_info"] = lambda device: (free, 100)
        for name in ("graph", "synchronize"):
            fakes[name] = lambda *_, **__: pytest.fail("waits for the device")
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        released = lambda index, pool: self.calls.append("release")  # noqa: E731
        monkeypatch.setattr(torch._C, "_cuda_releasePool", released, raising=False)
        monkeypatch.setattr(prokl.engine.graphs, "FAILED", [])
        monkeypatch.setattr(torch, "zeros", lambda *size, device: torch.ones(*size))

    def record(self, run):
        capture = SimpleNamespace(pool=(0, 7), stream=self.Stream())
        return prokl.engine.graphs.record(run, torch.device("cuda", 3), capture)


@pytest.mark.parametrize("free, emptied", [(10, []), (9, ["empty"])])
def test_a_recording_waits_for_nothing_and_frees_memory(free, emptied, monkeypatch):
    device, seen = Device(monkeypatch, free=free), []
    replay = device.record(lambda: seen.append((device.stream, list(device.recording))))
    [(stream, pools)] = seen
    assert isinstance(stream, device.Stream) and pools == [(0, 7)]
    assert (device.stream, device.recording, device.generator_captures) == ("caller's", [], False)
    replay()
    assert device.calls == [*emptied, "replay"] and not prokl.engine.graphs.FAILED


@pytest.mark.parametrize(
    "fails, told",
    [
        (["begin"], "cannot begin"),
        (["run"], "the step's own"),
        (["invalid"], "capture invalidated"),
        (["run", "invalid"], "the step's own"),
    ],
)
def test_a_failed_capture_leaves_torch_as_it_was(fails, told, monkeypatch):
    device = Device(monkeypatch, fails)

    def run():
        device.fails.discard("begin")
        if "run" in fails:
            raise RuntimeError("the step's own")

    monkeypatch.setattr(torch, "zeros", lambda *size, **_: device.fails.clear() or torch.ones(*size))  # of the repair
    with pytest.raises(RuntimeError, match=told):
        device.record(run)
    assert (device.stream, device.recording, device.generator_captures) == ("caller's", [], False)
    assert device.calls.count("release") == (fails != ["run"])  # of a pool that no graph has come to own
    assert len(prokl.engine.graphs.FAILED) == 1  # torch may ask it later


def test_a_repair_that_fails_too_hides_nothing(monkeypatch):
    device = Device(monkeypatch, ["invalid"])
    with pytest.raises(RuntimeError, match="the step's own"):
        device.record(lambda: (_ for _ in ()).throw(RuntimeError("the step's own")))
    assert (device.stream, device.recording) == ("caller's", [])
    assert len(prokl.engine.graphs.FAILED) == 2


@pytest.mark.slow
def test_a_failed_recording_frees_its_memory_before_the_step(recorded, few_kernels, monkeypatch):
    held, alive, record, execute = [], [], prokl.engine.graphs.record, Bucket.execute

    def fail(run, device, capture):
        if len(held) < BUCKETS:  # the ordinary steps; the first refresh fails
            replay, memory = record(run, device, capture), torch.ones(1)
            held.append(weakref.ref(memory))
            return lambda: (replay(), memory)
        memory = torch.ones(1)
        held.append(weakref.ref(memory))
        raise RuntimeError("out of memory")

    def executed(self, plan):
        alive.append((len(held), sum(ref() is not None for ref in held)))
        return execute(self, plan)

    monkeypatch.setattr(prokl.engine.graphs, "record", fail)
    monkeypatch.setattr(Bucket, "execute", executed)
    gc.disable()  # what only a collection frees is not free
    try:
        with pytest.warns(UserWarning, match="without CUDA graphs, .* failed: out of memory"):
            train(PRO)
    finally:
        gc.enable()
    assert (BUCKETS, BUCKETS) in alive  # the ordinary steps' had been kept
    after = [count for recordings, count in alive if recordings == BUCKETS + 1]
    assert after and not any(after)


@pytest.mark.slow
def test_graphs_turned_off_and_on_are_recorded_anew(recorded, few_kernels):
    kept = []

    def change(t, optimizer, gradients):
        kept.append(len(optimizer.engine.graphs.replays))
        optimizer.param_groups[0]["cuda_graphs"] = not 4 <= t < 7

    plain, optimizer = train(PRO, False, **SELDOM, **ONE), train(PRO, True, change, **SELDOM, **ONE)
    assert differences(plain, optimizer) == set()
    assert kept[4:8] == [1, 0, 0, 0]
    assert len(recorded) == 2


def test_an_error_of_the_step_is_raised_from_a_recording(recorded, few_kernels, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("the step's own")

    def change(t, optimizer, gradients):
        if t == 2:  # the second ordinary step, which is recorded
            monkeypatch.setattr(ProKLShampooMethod, "step", fail)

    with pytest.raises(ZeroDivisionError, match="the step's own"):
        train(PRO, change=change)


def test_on_a_cpu_nothing_is_recorded(monkeypatch):
    forbid_host_reads(monkeypatch)
    monkeypatch.setattr(prokl.engine.graphs, "record", None)  # which a call would show
    train(PRO, backend="torch")


def test_no_pool_is_taken_again_that_no_graph_uses(monkeypatch, few_kernels):
    """As torch takes none: the second stream's bucket is made anew, and the first one keeps its graphs."""
    users = {}

    def record(run, device, capture):
        if capture in users and not any(graph() for graph in users[capture]):
            raise RuntimeError("INTERNAL ASSERT FAILED: use_count > 0")
        graph = lambda: run()  # noqa: E731  (an object of its own)
        users.setdefault(capture, []).append(weakref.ref(graph))
        return graph

    @contextmanager
    def beside(engine, bucket, *other):
        STREAM["current"] = "second"
        yield
        STREAM["current"] = "first"

    monkeypatch.setitem(STREAM, "current", "first")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: STREAM["current"])
    monkeypatch.setattr(prokl.engine.graphs, "record", record)
    monkeypatch.setattr(prokl.engine.graphs.Capture, "on", lambda device, before=None: object())
    monkeypatch.setattr(Engine, "_beside", beside)
    g = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((8, 12), (6, 9), (6, 9))]
    optimizer = ProKLShampoo(weights, rank=2)
    for step in range(13):
        weights[2].requires_grad_(step < 5)
        for W in weights:
            W.grad = torch.randn(W.shape, generator=g) if W.requires_grad else None
        with silent():
            optimizer.step()
        gc.collect()
    assert not optimizer.engine.graphs.refused and len(users) == 3  # one pool of the first, two of the second
