"""A device gets the backend that runs there, an error where it cannot, and a line where kernels are compiled first."""

import logging
import re

import pytest
import torch

import prokl
from prokl.backends import extension
from prokl.backends import select as selection
from prokl.backends.select import select
from prokl.kernels import launch  # noqa: E402
from prokl.ops import explain
from tests.training import train

triton = pytest.importorskip("triton")


CPU = torch.device("cpu")


def weight():
    return torch.nn.Parameter(torch.ones(4, 6))


@pytest.mark.parametrize(
    "backend, device, surroundings, reason",
    [
        ("reference", "cpu", {}, r"reference: asked for$"),
        ("torch", "cpu", {}, r"torch: asked for$"),
        (None, "cpu", {}, r"torch: a CPU takes the PyTorch form; the kernels are for CUDA devices$"),
        (None, "cpu", {"interpret": "1"}, r"torch: a CPU .*; the kernels would be interpreted by backend='triton'$"),
        (None, "cuda", {}, r"torch: torch sees no CUDA device$"),
        (None, "cuda", {"capability": (7, 5)}, r"torch: .*compute capability 7\.5; must be at least 8\.0"),
        (None, "cuda", {"capability": (8, 0)}, r"triton: cuda runs the kernels$"),
        (None, "cuda", {"capability": (9, 0)}, r"triton: cuda runs the kernels$"),
        (None, "cuda", {"capability": (9, 0), "triton": None}, r"torch: Triton is not installed: pip install triton"),
    ],
)
def test_explain_and_the_error_give_the_same_reason(backend, device, surroundings, reason, monkeypatch):
    capability, device = surroundings.get("capability"), torch.device(device)
    monkeypatch.setenv("TRITON_INTERPRET", surroundings.get("interpret", "0"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda name: surroundings.get("triton", name))
    monkeypatch.setattr(extension, "_failure", lambda device: None)  # no GPU is there to launch on
    name, _, why = explain(backend, device).partition(": ")
    assert re.match(reason, f"{name}: {why}") and select(backend, device).name == name
    if device.type == "cuda" and name == "torch":
        with pytest.raises(ValueError, match=re.escape(why)):
            select("triton", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA the tests run in the interpreter")
def test_the_interpreter_is_taken_when_asked_for():
    table = select("triton", CPU)
    assert table.name == "triton" and not table.graphs
    assert select("triton", CPU) is table


@pytest.mark.parametrize("value", [None, "0"])
def test_triton_on_a_cpu_raises_and_leaves_no_group(value, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    if value is not None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    message = r"Invalid backend='triton': the kernels run on CUDA devices, not on cpu, unless TRITON_INTERPRET=1"
    with pytest.raises(ValueError, match=message):
        prokl.ProKLShampoo([weight()], backend="triton")
    optimizer = prokl.ProKLShampoo([weight()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight()], "backend": "triton"})
    assert len(optimizer.param_groups) == 1
    (p,) = optimizer.param_groups[0]["params"]
    for calls in (range(0), range(2)):  # before there is state, and with it
        before = train(optimizer, calls).param_groups[0]["params"][0].detach().clone()
        optimizer.param_groups[0]["backend"] = "triton"
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                train(optimizer, [2])
        assert torch.equal(p, before)
        optimizer.param_groups[0]["backend"] = None
    assert not torch.equal(train(optimizer, [2]).param_groups[0]["params"][0], before)


@pytest.mark.parametrize("old, extension, captured", [(True, False, False), (True, True, True), (False, False, True)])
def test_graphs_leave_out_refreshes_that_magma_solves(old, extension, captured, monkeypatch):
    monkeypatch.setattr(selection, "MAGMA", old)
    made = selection._triton_backend.__wrapped__(extension, False, True, True)
    assert (made.graphs, made.graphs_of_refreshes) == (True, captured)


def test_the_interpreter_switched_on_too_late_is_named(monkeypatch):
    monkeypatch.setattr("prokl.kernels.launch.INTERPRETED", False)
    with pytest.raises(ValueError, match="was set after the kernels were loaded. Set it before Python starts"):
        select("triton", CPU)


# The line that says why a first step takes long


class Kernel:
    """Compiles as it is launched, or finds what was compiled, and tells Triton's listener of it."""

    def __init__(self, name, cache_hit):
        self.__name__, self.cache_hit = name, cache_hit

    def __getitem__(self, grid):
        listener = triton.knobs.compilation.listener or dict
        return lambda: listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=self.cache_hit)


@pytest.fixture
def lines(caplog, monkeypatch):
    """Launch kernels, by name, of which this many are in the cache; return what was logged."""
    monkeypatch.setattr(launch, "_logged", False)
    monkeypatch.setattr(launch, "_begun", set())

    def launched(*kernels):
        with caplog.at_level(logging.INFO, "prokl"):
            for name, cache_hit in kernels:
                launch.start(Kernel(name, cache_hit), (1,), CPU)
        return [record.getMessage() for record in caplog.records]

    return launched


def test_the_first_kernel_that_is_compiled_says_so_and_no_other(lines):
    assert lines(("a", True)) == []
    (line,) = lines(("b", False), ("c", False), ("b", False))
    assert str(triton.knobs.cache.dir) in line


def test_a_full_cache_says_nothing(lines):
    assert lines(("a", True), ("b", True), ("a", True)) == []


def test_a_listener_of_the_users_own_hears_all_and_stays(lines):
    heard = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = own = lambda **compilation: heard.append(compilation["cache_hit"])
        lines(("a", True), ("b", False), ("a", True))
        assert triton.knobs.compilation.listener is own
    assert heard == [True, False, True]


@pytest.mark.parametrize("backend", ["cuda", "Triton", ""])
def test_an_unknown_backend_is_named_with_the_choices(backend):
    with pytest.raises(ValueError, match=rf"Invalid backend='{backend}': must be one of \(None, 'reference', 'torch'"):
        select(backend, CPU)
