"""The parts that travel to a GPU machine are made, and taken up there as far as they fit."""

import shutil
import subprocess

import pytest

from bench.compile_report import __main__ as compile_report
from bench.compile_report import pack
from tests.commands import run_python


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder in the place of build/prepared."""
    found = tmp_path / "build" / "prepared"
    monkeypatch.setattr(pack, "FOLDER", found)
    return found


@pytest.fixture
def asked(monkeypatch):
    """List the commands that would have been run, (arguments, environment), and make the files that they leave."""
    calls = []

    def fake(command, cwd=None, env=None):
        calls.append((command[1:], env))
        if "build_ext" in command:
            built = pack.Path(command[command.index("--build-lib") + 1], "prokl", pack.NAME)
            built.parent.mkdir(parents=True, exist_ok=True)
            built.write_text("machine code")
        if "ahead" in command:
            entry = pack.Path(env["TRITON_CACHE_DIR"], "KEY")
            entry.mkdir()
            (entry / "some_kernel.source").write_text("text")
            (entry / "some_kernel.cubin").write_text("binary")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", fake)
    return calls


def test_every_part_is_made_and_old_parts_are_gone(folder, asked, capsys):
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels" / "old.whl").touch()
    assert compile_report.main(["pack", "--arch", "80"]) == 0
    (pip, _), (build, built_with), (ahead, compiled_with) = asked
    assert pip[:4] == ["-m", "pip", "download", "-q"] and {"pybind11>=2.12", "ninja", "numpy", "pytest"} < set(pip)
    assert not list((folder / "wheels").iterdir())
    assert (built_with["PROKL_CUDA_ARCHS"], built_with["PROKL_BUILD_CUDA"]) == ("80", "1")
    assert (folder / "extension" / pack.NAME).read_text() == "machine code"
    assert (folder / "extension" / pack.SOURCES).read_text() == pack.fingerprint()
    assert ahead == ["-m", "bench.compile_report", "ahead", "80"] and "TRITON_INTERPRET" not in compiled_with
    assert [path.name for path in (folder / "triton" / "KEY").iterdir()] == ["some_kernel.cubin"]
    assert capsys.readouterr().out.endswith(" MiB\n")


@pytest.fixture
def checkout(tmp_path, folder, monkeypatch):
    """A checkout with csrc and a prepared extension, on a GPU that runs it."""
    monkeypatch.setattr(pack, "ROOT", tmp_path)
    monkeypatch.setattr(pack, "unsupported_reason", lambda: None)
    (tmp_path / "prokl").mkdir()
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "qr.cu").write_text("code")
    own = folder / "extension"
    own.mkdir(parents=True)
    (own / pack.NAME).write_text("machine code")
    (own / pack.SOURCES).write_text(pack.fingerprint())
    return tmp_path


def test_an_extension_that_fits_is_placed_and_marked(checkout, folder, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(checkout / "cache"))
    assert compile_report.main(["unpack"]) == 0
    assert capsys.readouterr().out == "extension: placed\n"
    assert (checkout / "prokl" / pack.NAME).read_text() == "machine code"
    assert (folder / "extension" / pack.PLACED).exists()


def other_sources(checkout, own, monkeypatch):
    (checkout / "csrc" / "qr.cu").write_text("other code")


def other_python(checkout, own, monkeypatch):
    (own / pack.NAME).rename(own / "_C.cpython-399-some.so")


def other_gpu(checkout, own, monkeypatch):
    monkeypatch.setattr(pack, "unsupported_reason", lambda: "cuda has compute capability 8.0")


@pytest.mark.parametrize(
    "change, why",
    [(other_sources, "csrc has changed"), (other_python, "_C.cpython-399"), (other_gpu, "compute capability 8.0")],
)
def test_one_that_does_not_fit_is_not_left_there_and_is_built(change, why, checkout, folder, monkeypatch):
    own = folder / "extension"
    (own / pack.PLACED).touch()  # of a run before
    change(checkout, own, monkeypatch)
    answer = pack.place_extension(own)
    assert answer.startswith("not used: ") and why in answer
    assert not (own / pack.PLACED).exists() and not list((checkout / "prokl").iterdir())


COMPILE = """
import sys
import torch
from itertools import islice
from unittest.mock import patch
import triton
from bench.compile_report import ahead, triton_kernels
from bench.micro.case import Sizes, numbers
from bench.micro.kernels import KERNELS
from bench.shapes import ParameterSet
from prokl.backends.select import _triton_backend
from prokl.kernels import launch
sizes = Sizes(2, 32, 48, 16)
cases = [case for case in KERNELS if case.name in ("split", "stack", "projections", "product B^T", "symmetric L")]
if sys.argv[1] == "ahead":
    events = [own for case in cases for own in ahead.called(case, sizes, case.dtypes[0])]
    steps = ahead.of_steps  # tracing them all takes longer than to compile
    ahead.of_steps = lambda s, entry: islice(steps(s, entry), 50)
    ahead.KERNELS = ahead.groups.KERNELS = cases
    every = ahead.launches([ParameterSet("tiny", ((2, 12, 20),), (2, 3, 4))])
    ahead.launches = lambda sets: every[::20] + events  # a few: compile_report compiles every kernel
    print(*(ahead.report(90) for _ in range(2)), len(every) > 32, sep="\\n")
else:
    triton.runtime.driver.set_active(triton_kernels.Offline(90))
    hits = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    def start(kernel, grid, device, *arguments, **constants):
        kernel.warmup(*arguments, grid=grid, **constants)
    with patch.object(launch, "start", start), patch.object(launch, "DEVICES", ("cpu",)):
        for case in cases:
            ops = _triton_backend(True, False, case.balanced, True).ops
            case.bind(case.inputs(sizes, case.dtypes[0], numbers(torch.device("cpu"))), ops)()
    print(hits.count(False), hits.count(True))
"""


@pytest.mark.slow
def test_kernels_compiled_elsewhere_are_found(tmp_path):
    pytest.importorskip("triton")
    made, there = tmp_path / "made", tmp_path / "there"
    done = run_python("-c", COMPILE, "ahead", TRITON_CACHE_DIR=str(made), TRITON_STORE_BINARY_ONLY="1")
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first.endswith(" 0 in the cache already") and " 0 kernels compiled, " in second and third == "True"
    moved = shutil.move(made, tmp_path / "travelled")
    for text in moved.rglob("*.source"):
        text.unlink()
    pack.copy_kernels(moved, there)
    shutil.rmtree(moved)
    done = run_python("-c", COMPILE, "used", TRITON_CACHE_DIR=str(there))
    assert done.returncode == 0, done.stderr
    compiled, found = map(int, done.stdout.split())
    assert compiled == 0 and found >= 5
