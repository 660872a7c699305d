"""The CUDA extension's loading: every reason for its absence is told, and where it runs follows from what was built."""

import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import prokl
from prokl.backends import extension
from prokl.backends import select as selection

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def load_from(tmp_path, monkeypatch):
    """Loads ``prokl._C`` from a folder of the test's own, past the cache."""
    monkeypatch.setattr(sys, "meta_path", [PathFinder])  # an editable install's finder looks into the checkout
    monkeypatch.setattr(prokl, "__path__", [str(tmp_path)])
    monkeypatch.setattr(extension, "PACKAGE", tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "prokl").exists()])
    monkeypatch.delitem(sys.modules, "prokl._C", raising=False)
    monkeypatch.delattr(prokl, "_C", raising=False)
    yield tmp_path, extension.load.__wrapped__
    sys.modules.pop("prokl._C", None)
    vars(prokl).pop("_C", None)


@pytest.fixture
def installed_elsewhere(load_from, monkeypatch, tmp_path_factory):
    """The folder of an installed prokl with the extension, behind the one that is imported, which has none."""
    folder = tmp_path_factory.mktemp("site-packages")
    (folder / "prokl").mkdir()
    (folder / "prokl" / f"_C{EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    return folder


def test_an_extension_shadowed_by_the_source_tree_is_told(load_from, installed_elsewhere):
    tree, load = load_from
    assert load() == (
        None,
        f"the CUDA extension belongs to the prokl installed in {installed_elsewhere}, which this source tree, "
        f"{tree.parent}, shadows: start Python in another folder, or pip install -e {tree.parent}",
    )
    (tree / "_C.py").write_text("architectures = '80'\n")
    module, reason = load()  # a tree with its own is right
    assert reason is None and module.architectures == "80"


def test_a_script_that_shadows_the_extension_warns(load_from, installed_elsewhere, monkeypatch):
    monkeypatch.setattr(extension, "load", load_from[1])
    monkeypatch.setattr(selection, "_triton_backend", lambda *chosen: chosen[:2])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.warns(UserWarning, match="^QR runs in PyTorch: the CUDA extension belongs to the prokl installed in"):
        assert selection.select(None, CUDA) == (False, False)


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("nothing", b"", ("not built", "PROKL_BUILD_CUDA=1")),
        ("_C.cpython-39-x86_64-linux-gnu.so", b"", ("another Python (_C.cpython-39-x86_64-linux-gnu.so)",)),
        ("_C.so", b"not a library", ("cannot be imported: ImportError: ", "_C.so")),
        ("_C.py", b"raise RuntimeError('wrong version')", ("cannot be imported: RuntimeError: wrong version",)),
    ],
)
def test_a_foreign_extension_is_told_and_not_raised(name, content, says, load_from):
    folder, load = load_from
    (folder / name).write_bytes(content)
    module, reason = load()
    assert module is None and all(part in reason for part in says)


def built(monkeypatch, architectures, capability=None, hip=None):
    """An extension built for these, and a GPU of this capability, if any."""
    module = SimpleNamespace(architectures=architectures)
    monkeypatch.setattr(extension, "load", lambda: (module, None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(extension, "_failure", lambda device: None)


NEITHER = "it is not there"


@pytest.mark.parametrize(
    "made, device, says",
    [
        ({"architectures": "host", "capability": (9, 0)}, CPU, None),
        ({"architectures": "host", "capability": (9, 0)}, CUDA, ".*not cuda:0"),
        ({"architectures": "80;90", "capability": (9, 0)}, CUDA, None),
        ({"architectures": "80;90", "capability": (9, 0)}, CPU, ".*runs on CUDA devices, not on cpu"),
        ({"architectures": "80"}, CUDA, "torch sees no CUDA device$"),
        ({"architectures": "80", "capability": (9, 0), "hip": "6.2"}, CUDA, ".*NVIDIA"),
        ({"architectures": "80", "capability": (7, 5)}, CUDA, ".* has compute capability 7.5; must be at least 8.0$"),
        (None, CUDA, NEITHER),
    ],
)  # fmt: skip
def test_every_obstacle_to_the_extension_is_told(made, device, says, monkeypatch):
    if made is None:
        monkeypatch.setattr(extension, "load", lambda: (None, NEITHER))
    else:
        built(monkeypatch, **made)
    found = extension.unsupported_reason(device)
    assert found is None if says is None else re.match(says, found)


@pytest.fixture
def untried():
    """Forgets what launches have been tried, before and after."""
    extension._failure.cache_clear()
    yield
    extension._failure.cache_clear()


def test_a_failed_launch_gives_pytorchs_qr_and_one_warning(extension_on_cpu, untried, monkeypatch):
    def refused(*_):
        raise RuntimeError("CUDA: the provided PTX was compiled with an unsupported toolchain.")

    monkeypatch.setattr(extension_on_cpu.float32, "factor", refused)
    with pytest.warns(
        UserWarning, match=r"^QR runs in PyTorch: a launch of the CUDA extension fails on cpu \(CUDA: the "
    ):
        backend = selection.select("triton", CPU)
    assert selection.select("triton", CPU) is backend and not backend.ops.use_cuda_qr  # told once
    assert selection.explain_qr(CPU, "triton").startswith("PyTorch: a launch of the CUDA extension fails on cpu")


def test_a_device_that_runs_a_launch_takes_qr_from_the_extension(extension_on_cpu, untried):
    assert selection.select("triton", CPU).ops.use_cuda_qr
    assert extension._failure.cache_info().misses == 1
    assert selection.explain_qr(CPU, "triton") == "CUDA extension: it runs on cpu"
    assert selection.explain_qr(CPU) == "PyTorch: the torch backend calls no kernels"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_trial_launch_ignores_the_default_dtype(dtype, monkeypatch, untried):
    """A GPU stops at the first number of four bytes that does not begin at a multiple of four, for good."""
    given = []
    module = SimpleNamespace(float32=SimpleNamespace(factor=lambda *arguments: given.append(arguments)))
    monkeypatch.setattr(extension, "load", lambda: (module, None))
    torch.set_default_dtype(dtype)
    try:
        assert extension._failure(CPU) is None
    finally:
        torch.set_default_dtype(torch.float32)
    ((_, _, ((N, _, _), _, _), _, _, (F, _, _), _, _, _, diagonal, *_),) = given
    assert (F - N, diagonal - N) == (4, 8)


def test_a_gpu_on_which_a_launch_fails_is_told_with_the_remedies(monkeypatch, untried):
    failure = extension._failure
    built(monkeypatch, "90", capability=(12, 0))  # torch has no such device here, and the module no launch
    monkeypatch.setattr(extension, "_failure", failure)
    says = r"fails on cuda:0 \(.*\); built for 90: build it with PROKL_CUDA_ARCHS=120 and an nvcc no newer than the "
    says += r"driver, or update the driver\.$"
    with pytest.warns(UserWarning, match=says):
        assert extension.unsupported_reason(CUDA) == failure(CUDA)


def test_no_launch_is_tried_while_a_graph_is_captured(monkeypatch):
    built(monkeypatch, "90", capability=(9, 0))
    monkeypatch.setattr(extension, "_failure", lambda device: pytest.fail("a launch"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert extension.unsupported_reason(CUDA) is None
