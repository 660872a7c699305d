"""Which backend runs where, and what is said when the one asked for cannot."""

import pytest
import torch

import prokl
from prokl.backends import select as selection
from prokl.backends.select import select
from prokl.ops import explain
from tests.training import train

CPU = torch.device("cpu")


def weight():
    return torch.nn.Parameter(torch.ones(4, 6))


def test_a_cpu_gets_the_pytorch_table_unless_told_otherwise():
    assert select(None, CPU) is select("torch", CPU) and select("torch", CPU).name == "torch"
    assert select("reference", CPU).name == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="without CUDA the tests run in the interpreter")
def test_the_interpreter_is_taken_when_asked_for():
    table = select("triton", CPU)
    assert table.name == "triton" and not table.graphs
    assert select("triton", CPU) is table


@pytest.mark.parametrize("value", [None, "0"])
def test_triton_on_a_cpu_raises_without_the_interpreter_and_leaves_no_group_behind(value, monkeypatch):
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


def test_without_triton_cuda_gets_pytorch_and_asking_raises(monkeypatch):
    monkeypatch.setattr(selection.importlib.util, "find_spec", lambda name: None)
    assert select(None, torch.device("cuda")).name == "torch"
    assert explain(None, "cuda").startswith("torch: Triton is not installed")
    with pytest.raises(ValueError, match="Triton is not installed"):
        select("triton", torch.device("cuda"))


@pytest.mark.parametrize("capability, name", [((7, 5), "torch"), ((8, 0), "triton"), ((9, 0), "triton")])
def test_cuda_chooses_by_compute_capability(capability, name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert select(None, device).name == name
    assert explain(None, device).startswith(f"{name}: ")
    if name == "torch":
        with pytest.raises(ValueError, match=r"compute capability 7\.5; must be at least 8\.0"):
            select("triton", device)


@pytest.mark.parametrize("old, extension, captured", [(True, False, False), (True, True, True), (False, False, True)])
def test_graphs_leave_out_refreshes_in_pytorch_where_torch_solves_by_magma(old, extension, captured, monkeypatch):
    monkeypatch.setattr(selection, "MAGMA", old)
    made = selection._triton_backend.__wrapped__(extension, False, True, True)
    assert (made.graphs, made.graphs_of_refreshes) == (True, captured)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_explain_names_a_missing_gpu():
    assert explain(None, "cuda") == "torch: torch sees no CUDA device"
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        explain("triton", "cuda")


@pytest.mark.parametrize("backend", ["cuda", "Triton", ""])
def test_an_unknown_backend_is_named_with_the_choices(backend):
    with pytest.raises(ValueError, match=rf"Invalid backend='{backend}': must be one of \(None, 'reference', 'torch'"):
        select(backend, CPU)


def test_the_interpreter_switched_on_too_late_is_named(monkeypatch):
    monkeypatch.setattr(selection, "_interpreted", lambda: False)
    with pytest.raises(ValueError, match="was set after the kernels were loaded. Set it before Python starts"):
        select("triton", CPU)


def test_explain_says_what_was_asked_for():
    assert explain("reference", "cpu") == "reference: asked for"
    assert explain("torch", "cpu") == "torch: asked for"


@pytest.mark.parametrize(
    "interpret, kernels", [("0", "are for CUDA devices"), ("1", "would be interpreted by backend='triton'")]
)
def test_explain_says_of_a_cpu_what_it_takes_and_not_what_it_lacks(interpret, kernels, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    assert explain(None, "cpu") == f"torch: a CPU takes the PyTorch form; the kernels {kernels}"
