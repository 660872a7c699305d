"""The model that stays on its device: what it trains, that no step waits for the device, and times of a device."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from bench import clock
from bench.training import compiled, run
from bench.training.compiled import Compiled
from bench.training.run import Run
from bench.training.schedules import linear
from bench.training.sources import open_source
from tests.experiments import HYPERS, MICRO, text_in
from tests.inputs import HOST_READS

CPU = torch.device("cpu")
SCALE = replace(MICRO, steps=20, evaluations=4)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return open_source(text_in(tmp_path_factory.mktemp("text")), 16)


@pytest.fixture(scope="module")
def model(source):
    return Compiled(SCALE, source, CPU, eager=True)


def last(model, hyper, seed=0, steps=20, **more):
    *_, record = model.run(hyper, seed, steps, **more)
    return record


@pytest.mark.parametrize("key", HYPERS)
def test_its_loop_trains_as_the_other_studies_bit_for_bit(key, source, model, monkeypatch):
    monkeypatch.setitem(run.SCHEDULE, "gpt2", partial(linear, warmups=compiled.WARMUPS))
    other = Run(replace(SCALE, evaluations=20), HYPERS[key], 1, source)
    while not other.finished:
        other.advance()
    record = last(model, HYPERS[key], seed=1)
    assert record.losses == other.record.losses and record.state_bytes == other.record.state_bytes
    along = dict(other.record.validation)
    found = dict(record.validation)
    assert [*found] == [2, 5, 10, 15, 20]
    assert [*found.values()] == pytest.approx([along[step] for step in found], rel=1e-6)  # sums in another order


def test_a_run_leaves_nothing_for_the_next_one(model):
    whole = last(model, HYPERS["pro"])
    next(model.run(HYPERS["muon"], 1, 20))
    again = last(model, HYPERS["pro"])
    assert (again.losses, again.validation) == (whole.losses, whole.validation)
    assert last(model, HYPERS["pro"], seed=1).losses != whole.losses
    half = last(model, HYPERS["pro"], state_dtype="bfloat16")
    assert half.state_bytes < 0.85 * whole.state_bytes  # AdamW's and eigenbases stay in float32; 0.82 here
    assert half.losses != whole.losses


class Reads(TorchDispatchMode):
    """Counts what the host reads of the device but for what optimizers read, which other tests count."""

    def __init__(self):
        super().__init__()
        self.count, self.stepping = 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in HOST_READS and not self.stepping
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("key", HYPERS)
def test_the_host_reads_at_validations_alone(key, model, monkeypatch):
    batch = model.source.training_batch(0, 0, 4, 16)  # which reads numbers of windows, on the host
    monkeypatch.setattr(model, "source", SimpleNamespace(vocabulary=256, training_batch=lambda *of: batch))
    counts = []
    for steps in (20, 40):  # of five validations each
        reads = Reads()
        hooks = [
            register(lambda *of, reads=reads, begins=begins: setattr(reads, "stepping", begins))
            for register, begins in (
                (register_optimizer_step_pre_hook, True),
                (register_optimizer_step_post_hook, False),
            )
        ]
        with reads:
            list(model.run(HYPERS[key], 0, steps))
        for hook in hooks:
            hook.remove()
        counts.append(reads.count)
    assert counts[0] == counts[1] > 0


def test_a_diverging_run_ends_at_a_validation_with_its_step(model, monkeypatch):
    original, passed = Compiled._pass, []

    def broken(model, seed, step):
        passed.append(step)
        return original(model, seed, step) * (math.nan if step >= 6 else 1.0)

    monkeypatch.setattr(Compiled, "_pass", broken)
    records = [(record.diverged_at, len(record.losses)) for record in model.run(HYPERS["adamw"], 0, 20)]
    assert records == [(None, 2), (None, 5), (7, 10)] and passed == list(range(10))
    assert [step for step, _ in last(model, HYPERS["adamw"], steps=4).validation] == [1, 2, 3, 4]
    record = last(model, replace(HYPERS["adamw"], lr=1e30))
    assert record.diverged_at == 2 and record.validation == [] and math.isnan(record.final_loss)


def test_parts_of_a_batch_give_what_the_whole_gives(source, model):
    parts = Compiled(replace(SCALE, micro_batch=2), source, CPU, eager=True)
    whole, record = (last(own, HYPERS["adamw"]).losses for own in (model, parts))
    assert whole != record and whole == pytest.approx(record, rel=1e-5)  # measured: 3e-7


def test_data_without_a_batch_to_validate_with_is_refused(source):
    with pytest.raises(Exception, match="holds out .* windows of 16 tokens, and one forward pass takes 4000; give"):
        Compiled(replace(SCALE, micro_batch=4000), source, CPU, eager=True)


@pytest.mark.slow
def test_the_compiled_model_is_the_same_model(source, model):
    # Measured: 2e-7 and 2e-4.
    for autocast, rounding in ((False, 2e-6), (True, 2e-3)):
        own = Compiled(replace(SCALE, autocast=autocast), source, CPU, eager=False)
        compilations = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found = last(own, HYPERS["adamw"])
        assert found.losses == pytest.approx(last(model, HYPERS["adamw"]).losses, rel=rounding)
        assert last(own, HYPERS["adamw"]).losses == found.losses
        # Neither a validation, nor another seed, nor another optimizer compiles anything.
        last(own, HYPERS["muon"], seed=1)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compilations


# Times


class Event:
    """torch.cuda.Event: says nothing before the device was waited for."""

    now, waited = 0.0, 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        Event.now += 1.0
        self.at = Event.now

    def elapsed_time(self, end):
        assert max(self.at, end.at) <= Event.waited
        return 1e3 * (end.at - self.at)


def test_on_a_gpu_times_are_events_and_batches_are_pinned(source, monkeypatch):
    """A stand-in for the device has events that count themselves."""
    gpu, pinned, calls = SimpleNamespace(type="cuda"), [], []
    own, to = Compiled(SCALE, source, CPU, eager=True), torch.Tensor.to
    monkeypatch.setattr(own, "device", gpu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor) or tensor)
    monkeypatch.setattr(torch.Tensor, "to", lambda t, *to_what, **how: t if gpu in to_what else to(t, *to_what, **how))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: setattr(Event, "waited", Event.now))
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device, name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 123)
    record = last(own, HYPERS["pro"])
    assert record.model_seconds == record.optimizer_seconds == [1.0] * 20 and len(pinned) == 2 * 20
    assert record.seconds(20) == 40.0 and record.peak_bytes == 123
    assert calls == ["empty_cache", "reset_peak_memory_stats"]


@pytest.mark.gpu
@pytest.mark.parametrize("key", HYPERS)
def test_no_step_waits_for_the_gpu(key, source, monkeypatch):
    own = Compiled(replace(SCALE, autocast=True), source, torch.device("cuda"), eager=True)
    runs, wait = own.run(HYPERS[key], 0, 60), clock.wait
    monkeypatch.setattr(clock, "wait", lambda device: torch.cuda.set_sync_debug_mode("default") or wait(device))
    next(runs)  # the first steps begin the state and record graphs
    for _ in range(4):
        torch.cuda.set_sync_debug_mode("error")
        record = next(runs)
    assert min(record.model_seconds) > 0 and record.peak_bytes > record.state_bytes
    assert record.losses[-1] < record.losses[0]
