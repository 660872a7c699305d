"""Launches on second streams, beside the rest of a step: nothing that one writes is touched by the other.

The launches of a real step on a CPU, in Triton's interpreter and the extension's host form, are noted with the memory
that they touch; a stand-in for the second stream says which are beside which.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from prokl import ProKLShampoo
from prokl.algorithm.settings import PRECISIONS
from prokl.backends.device import SecondStream, _second
from prokl.backends.triton_ops import TritonAlgebra
from prokl.engine.bucket import Bucket
from prokl.engine.engine import Engine
from prokl.kernels import launch
from tests.inputs import normal, weight


def storages(values):
    """Tensors by the memory that they lie in."""
    return {t.untyped_storage().data_ptr(): t for t in tree_leaves(values) if isinstance(t, Tensor) and t.numel()}


class Launches(TorchDispatchMode):
    """Notes of every launch between a fork and its end what it reads and writes, and on which stream.

    Args:
        keep: whether all tensors are kept, so that no address means two of them.
    """

    def __init__(self, keep):
        super().__init__()
        self.keep, self.kept, self.windows = keep, [], []
        self.stream, self.open = "first", []

    @contextmanager
    def beside(self, t):
        """A stand-in for TritonAlgebra.second_stream, made where the streams part."""
        window = next(w for w in self.open if w.key is None)
        window.key, self.stream = t.untyped_storage().data_ptr(), "second"
        yield
        self.stream = "first"
        self.open.remove(window)
        self.windows.append(window)
        assert not [name for name, ref in window.borrowed if ref.expired()], "freed while the second stream reads it"

    def fork(self, t):
        self.open.append(SimpleNamespace(key=None, read={}, written={}, made=set(), borrowed=[]))
        return self.beside(t)

    def note(self, name, touched, written, made):
        for window in self.open:
            if self.stream == "second":
                window.made |= made
            for address, t in touched.items():
                window.read.setdefault((self.stream, address), name)
                if self.stream == "second" and address not in window.made:
                    window.borrowed.append((name, StorageWeakRef(t.untyped_storage())))
            for address in written:
                window.written.setdefault((self.stream, address), name)
        if self.keep:
            self.kept += touched.values()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = storages((args, kwargs))
        out = func(*args, **kwargs)
        after = storages(out)
        changed = [
            value
            for i, own in enumerate(func._schema.arguments)
            if own.alias_info is not None and own.alias_info.is_write
            for value in [args[i] if i < len(args) else kwargs.get(own.name)]
        ]
        made = {} if func.is_view else {at: t for at, t in after.items() if at not in before}
        self.note(func._schema.name, before | made, {*storages(changed), *made}, {*made})
        return out

    def launched(self, start):
        def noted(kernel, *given, **constants):
            touched = storages((given, constants))
            with _disable_current_modes():  # the interpreter's own tensors
                before = {at: t.untyped_storage().tolist() for at, t in touched.items()}
                start(kernel, *given, **constants)
                written = {at for at, t in touched.items() if t.untyped_storage().tolist() != before[at]}
            self.note(kernel.__name__, touched, written, set())

        return noted

    def races(self):
        """Names of what writes on one stream and of what touches the same on the other, in one window."""
        return [
            (name, window.read[other, address])
            for window in self.windows
            for (stream, address), name in window.written.items()
            for other in ("first", "second")
            if other != stream and (other, address) in window.read
        ]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False], ids=["every address once", "memory used again"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_memory_is_written_on_one_stream_and_touched_on_both(keep, precision, extension_on_cpu, monkeypatch):
    W = weight(12, 20)
    optimizer = ProKLShampoo([W], rank=4, backend="triton", precision=precision, precondition_frequency=2)
    for step in range(3):
        W.grad = normal(12, 20, seed=step)
        launches = Launches(keep)
        if step:  # after the one that begins; the last one refreshes
            with monkeypatch.context() as patch, launches:
                patch.setattr(TritonAlgebra, "second_stream", lambda ops, t, launches=launches: launches.fork(t))
                patch.setattr(launch, "start", launches.launched(launch.start))
                optimizer.step()
            assert len(launches.windows) == step
            assert all(len({stream for stream, _ in window.read}) == 2 for window in launches.windows)
            assert launches.races() == [] or not keep
        else:
            optimizer.step()


def test_the_second_stream_waits_for_the_fork_and_is_waited_for(monkeypatch):
    cuda = MagicMock()
    for name in ("current_stream", "Stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    cuda.current_stream().cuda_stream, cuda.Stream().cuda_stream = 7, 8
    event, other = cuda.current_stream().record_event(), cuda.Stream()
    cuda.reset_mock()
    second = SecondStream(torch.device("cuda:9"), priority=-1)
    cuda.more_on_first()
    with second:
        cuda.work()
    assert cuda.mock_calls == [
        call.current_stream(torch.device("cuda:9")),
        call.current_stream().record_event(),
        call.Stream(torch.device("cuda:9"), priority=-1),
        call.more_on_first(),
        call.Stream().wait_event(event),
        call.stream(other),
        call.stream().__enter__(),
        call.work(),
        call.stream().__exit__(None, None, None),
        call.current_stream().wait_stream(other),
    ]


def test_no_two_second_streams_are_the_same(monkeypatch):
    """Torch gives its 32 in turn: here one to this package, 31 to others, then the first again."""
    turn = iter([0, 1, 2])
    made = [SimpleNamespace(cuda_stream=stream) for stream in (7, 7, 9)]
    monkeypatch.setattr("torch.cuda.Stream", lambda device, priority: made[next(turn)])
    monkeypatch.setattr("prokl.backends.device._SECONDS", set())
    gpu = torch.device("cuda", 5)
    assert [_second.__wrapped__(gpu, current, -1).cuda_stream for current in (1, 2)] == [7, 9]


@pytest.mark.slow
def test_buckets_beside_each_other_touch_nothing_in_common(extension_on_cpu, monkeypatch):
    weights = [weight(12, 20), weight(16, 16), weight(8, 9)]
    optimizer = ProKLShampoo(weights, rank=4, backend="triton", precision="balanced", precondition_frequency=2)
    noted = [None, Launches(keep=True), Launches(keep=True)]  # none of the step that begins; the last one refreshes

    def fork(engine, bucket, *other):
        return launches.fork(bucket.skipped) if other else nullcontext()

    for step, launches in enumerate(noted):
        for W in weights:
            W.grad = normal(*W.shape, seed=step)
        if launches is None:
            optimizer.step()
            continue
        with monkeypatch.context() as patch, launches:
            patch.setattr(Engine, "_beside", fork)
            patch.setattr(launch, "start", launches.launched(launch.start))
            optimizer.step()
        (window,) = launches.windows  # of two of three buckets
        assert len({stream for stream, _ in window.read}) == 2
        assert launches.races() == []


@pytest.mark.parametrize(
    "devices, sizes, beside",
    [
        (["cuda:0", "cuda:0"], [50, 40], True),
        (["cuda:0", "cuda:0"], [60, 50], False),
        (["cuda:0", "cuda:0", "cuda:0"], [20, 20, 90], False),  # its graphs keep what the largest one takes
        (["cuda:0", "cuda:0", "cuda:1"], [50, 40, 90], True),
        (["cuda:0", "cuda:1"], [1, 1], False),
        (["cuda:0"], [1], False),
        (["cpu", "cpu"], [1, 1], False),
    ],
)
def test_two_buckets_share_a_gpu_if_any_two_have_room(devices, sizes, beside, monkeypatch):
    layouts = [SimpleNamespace(device=torch.device(device)) for device in devices]
    buckets = [SimpleNamespace(layout=its, workspace=size) for its, size in zip(layouts, sizes, strict=True)]
    monkeypatch.setattr("prokl.engine.engine.workspace", lambda device: 100)
    monkeypatch.setattr("prokl.engine.engine.SecondStream", lambda device, priority: "another stream")
    engine = ProKLShampoo([weight(4, 6)]).engine
    engine.buckets = buckets
    found = engine._beside(*buckets[:2])
    assert (found == "another stream") is beside


def test_a_bucket_keeps_its_stream_whoever_has_gradients(monkeypatch):
    """Only one that begins goes with the first stream, where it may take all the temporary memory that there is."""
    weights, seen, now = [weight(4, 6), weight(5, 6), weight(6, 6), weight(7, 8)], {}, ["first"]
    optimizer, execute = ProKLShampoo(weights, rank=2), Bucket.execute

    @contextmanager
    def beside(engine, bucket, *other):
        now[0] = "second" if other else "nobody's"
        yield
        now[0] = "first"

    def noted(bucket, plan):
        seen.setdefault(bucket.layout.m, []).append("begins" * bool(plan.initialising) + now[0])
        return execute(bucket, plan)

    monkeypatch.setattr(Engine, "_beside", beside)
    monkeypatch.setattr(Bucket, "execute", noted)
    for step in range(6):
        for i, W in enumerate(weights):
            W.grad = None if step and (step + i) % 3 == 0 else normal(*W.shape, seed=step)
        optimizer.step()
    for m, stream in ((4, "first"), (5, "second"), (6, "first"), (7, "second")):
        begun, *others = seen[m]
        assert begun == "beginsfirst" and {*others} == {stream}
