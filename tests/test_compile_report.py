"""The compilers' report, and the parts that travel to a GPU machine, where they are taken up as far as they fit."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("setuptools")

from bench.compile_report import __main__ as compile_report  # noqa: E402
from bench.compile_report import csrc, pack, trace, triton_kernels  # noqa: E402
from bench.compile_report.launches import Launch, Pointer, called  # noqa: E402
from bench.compile_report.triton_kernels import ODD, Row, complaints, every_launch  # noqa: E402
from bench.micro.kernels import KERNELS as CASES  # noqa: E402
from bench.shapes import SETS, ParameterSet  # noqa: E402
from build_cuda import USUAL_ARCHITECTURES, toolkit  # noqa: E402
from prokl import KLShampoo, ProKLShampoo  # noqa: E402
from prokl.algorithm.settings import PRECISIONS  # noqa: E402
from prokl.kernels import launch as launch_module  # noqa: E402
from prokl.kernels.launch import Tile  # noqa: E402
from tests.commands import ROOT, run_python  # noqa: E402

NAMES = {
    name
    for path in sorted((ROOT / "kernels").glob("*.py"))
    for name in re.findall(r"@triton\.jit\ndef (\w+)_kernel\(", path.read_text())
}
SM_90 = """
import os
from bench.compile_report.triton_kernels import report

if __name__ == "__main__":
    rows, wrong = report(os.cpu_count(), (90,))
    print(*wrong, len(rows) > 200, sep="\\n")
"""


@pytest.mark.slow
def test_kernels_compile_for_sm_90_and_do_not_spill(tmp_path):
    """Compiling for the other architectures as well takes minutes."""
    script = tmp_path / "sm_90.py"  # a file, which the pool's processes can import
    script.write_text(SM_90)
    done = run_python(str(script))
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_every_file_kernel_and_tile_is_covered():
    launched = {own.kernel for case in CASES for own in called(case, ODD, case.dtypes[0])}
    assert launched == set(NAMES)
    assert len({case.name for case in CASES}) == len(CASES)
    for module in {case.module for case in CASES}:
        shipped = {tile for name, tiles in vars(module).items() if name.startswith("TILES") for tile in tiles}
        assert all(isinstance(tile, Tile) for tile in shipped)
        cases = [case for case in CASES if case.module is module]
        assert shipped <= {tile for case in cases for dtypes in case.dtypes for tile in case.tiles(dtypes)}


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"stack": 40}, "spill: 40 bytes"),
        ({"shared": 227 * 1024 + 1}, "there are 232448"),
        ({"shared": 99 * 1024 + 1, "arch": 80}, "there are 101376"),
        ({"error": "the code traps"}, "does not compile: the code traps"),
    ],
    ids=str,
)
def test_each_check_can_fail(change, complaint):
    good = Row("product", 90, 128, 227 * 1024, 0)
    (found,) = complaints(replace(good, **change))
    assert complaint in found and complaints(good) == []


def test_launches_are_told_apart_by_what_the_jit_specialises_on():
    def launch(pointer=0, m=768, k=1, stride=0, lr=0.5, tile=64):
        half = Pointer(torch.bfloat16, pointer)
        names = ("A_ptr", "sizes", "K", "stride_A", "lr")
        constants = (("TILE_M", tile), ("HAS_C", True), ("ENERGY", False))
        return Launch("prokl.kernels.product", "product_kernel", (half, (m, 16), k, stride, lr), constants, names)

    alike = launch(m=32, lr=2.0), launch(stride=16), launch(stride=160)
    others = launch(pointer=8), launch(m=517), launch(k=16), launch(k=3), launch(stride=2**31), launch(tile=32)
    assert {its.key for its in alike} == {launch().key} and len({its.key for its in others} | {launch().key}) == 7
    assert str(launch()) == "product bfloat16 TILE_M=64 HAS_C=True" and str(launch(m=517)).endswith(" odd sizes")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [partial(ProKLShampoo, rank=128), KLShampoo], ids=["pro", "kl"])
def test_what_a_balanced_step_launches_is_compiled(optimizer):
    compiled, launched = {launch.key for launch in every_launch()}, {}
    for dtype in (torch.bfloat16, torch.float32):
        for buckets in trace.steps_of(SETS["gpt2-124m"], dtype, optimizer).values():
            for own in (event.launch for events in buckets for event in events if event.launch):
                launched.setdefault(own.key, str(own))
    missing = [name for its, name in launched.items() if its not in compiled]
    assert launched and missing == []


@pytest.mark.parametrize("shape", [(64, 128), (36, 52)], ids=str)
@pytest.mark.parametrize(
    "optimizer",
    [*(partial(ProKLShampoo, rank=16, precision=precision) for precision in PRECISIONS), KLShampoo],
    ids=[*PRECISIONS, "kl"],
)
def test_no_number_of_matrices_compiles_a_kernel_anew(optimizer, shape):
    """But for that of their elements where 16 does not divide a matrix's, on which loads of pairs depend.

    It chooses tiles, too; of so small matrices the same ones.
    """

    def keys(count):
        found = trace.steps_of(ParameterSet("", ((count, *shape),), ()), torch.float32, optimizer)
        return {e.launch.key for buckets in found.values() for events in buckets for e in events if e.launch}

    assert keys(1) == keys(12) == keys(16) == keys(17)


LOG = """
ptxas info    : 0 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN5prokl4sumsIfLi4EEEvPT_i' for 'sm_80'
ptxas info    : Function properties for _ZN5prokl4sumsIfLi4EEEvPT_i
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 1 barriers, 1024 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 5.038 ms
ptxas info    : Compiling entry function '_ZN5prokl7reverseIdEEvPT_i' for 'sm_90a'
ptxas info    : Function properties for _ZN5prokl7reverseIdEEvPT_i
    56 bytes stack frame, 52 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 56 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compile time = 1.511 ms
"""
SUMS = csrc.Row("_ZN5prokl4sumsIfLi4EEEvPT_i", "80", 18, 1024, 0)
REVERSE = csrc.Row("_ZN5prokl7reverseIdEEvPT_i", "90a", 128, 0, 156)
CALLED = """ptxas info    : Function properties for _ZN5prokl6helperIfEET_S1_i
    32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""


def test_every_figure_is_read_for_the_kernel_it_belongs_to():
    assert csrc.parse(LOG) == [SUMS, REVERSE]
    # A called function's spills count for the kernel before it.
    assert csrc.parse(LOG + CALLED) == [SUMS, replace(REVERSE, spilled=200)]
    assert csrc.parse("ptxas info    : 0 bytes gmem\n" + CALLED) == []


def test_a_wrong_kernel_fails_the_command(monkeypatch, capsys):
    rows = [SUMS, replace(REVERSE, arch="90")]
    monkeypatch.setattr(csrc, "report", lambda: (rows, csrc.complaints(rows)))
    monkeypatch.setattr(launch_module, "INTERPRETED", False)
    monkeypatch.setattr(triton_kernels, "report", lambda jobs: ([Row("split", 90, 18, 0, 0)], []))
    assert compile_report.main(["csrc"]) == 1 and compile_report.main(["aot"]) == 0
    printed = capsys.readouterr()
    assert "156 bytes of stack and spills" in printed.err and SUMS.kernel not in printed.err
    assert REVERSE.kernel in printed.out and "split" in printed.out
    rows.pop()
    assert compile_report.main(["csrc"]) == 0


@pytest.mark.skipif(toolkit.find_nvcc(os.environ) is None, reason="needs nvcc")
@pytest.mark.slow
def test_no_kernel_of_csrc_spills_or_keeps_a_stack():
    rows, wrong = csrc.report()
    assert not wrong
    kernels = {
        name
        for path in (ROOT / "csrc").glob("*.cuh")
        for name in re.findall(r"__global__ void(?: __launch_bounds__\([^)]*\))?\s+(\w+)\(", path.read_text())
    }
    assert kernels and kernels == {row.kernel.partition("<")[0] for row in rows}
    assert {row.arch for row in rows} == set(USUAL_ARCHITECTURES)


COMPILED = """
from itertools import chain

import torch
from bench.compile_report import trace
from bench.compile_report.triton_kernels import build, record
from bench.micro.kernels import KERNELS
from bench.shapes import ParameterSet
from prokl import KLShampoo, ProKLShampoo

seen = {}
for optimizer in (ProKLShampoo, KLShampoo):
    for events in trace.steps_of(ParameterSet("one", ((1, 1, 2),), (1,)), torch.float32, optimizer)["refresh"]:
        for own in (e.launch for e in events if e.launch):
            seen.setdefault(own.key, own)
for own in seen.values():
    build(own, 90)
print(sorted({key[0] for key in seen}))
summing = [case for case in KERNELS if case.name in ("admit kernel", "residual", "residual of pairs")]
for launch in chain.from_iterable(map(record, summing)):
    constants = dict(launch.constants)
    if constants.get("OPERAND") == "fp64" or not {"BOUNDED", "ENERGY"} & constants.keys():
        continue  # products of float64 are contracted ones
    print(launch.kernel, *[line for line in build(launch, 90).asm["ptx"].splitlines() if "fma." in line])
"""


@pytest.mark.slow
def test_a_weight_of_one_row_compiles_and_its_lanes_agree():
    """Sizes of one are constants to the compiler, and numbers to the interpreter.

    A product of the decision, or a square of an energy, that is contracted into a sum across lanes is rounded in one
    lane and not in the other.
    """
    done = run_python("-c", COMPILED)
    assert done.returncode == 0, done.stderr
    compiled, contracted = done.stdout.split("\n", 1)
    assert "'admit'" in compiled and "'split'" in compiled
    assert set(contracted.split()) == {"admit", "product"}


LOADS = """
import re

from bench.compile_report.launches import called
from bench.compile_report.triton_kernels import SIZES, build
from bench.micro.kernels import KERNELS

for case in KERNELS:
    if case.name in ("polynomial", "symmetric L in bfloat16"):
        launch = called(case, SIZES, (case.timed or case.dtypes)[0])[0]
        print(launch.kernel, len(re.findall(r"ld\\.global\\.b\\d+ ", build(launch, 90).asm["ptx"])))
"""


@pytest.mark.slow
def test_symmetric_addends_are_read_by_16_bytes():
    """What is mirrored on the diagonal, too; beside them one scale is read."""
    done = run_python("-c", LOADS)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["symmetric_product 0", "two_products 1"]


# Parts that travel


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


@pytest.mark.parametrize("why", [None, "csrc has changed", "_C.cpython-399", "compute capability 8.0"])
def test_an_extension_is_placed_where_it_fits_and_else_taken_away(why, checkout, folder, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(checkout / "cache"))
    own = folder / "extension"
    (own / pack.PLACED).touch()  # of a run before
    if why == "csrc has changed":
        (checkout / "csrc" / "qr.cu").write_text("other code")
    elif why == "_C.cpython-399":
        (own / pack.NAME).rename(own / "_C.cpython-399-some.so")
    elif why:
        monkeypatch.setattr(pack, "unsupported_reason", lambda: "cuda has compute capability 8.0")
    assert compile_report.main(["unpack"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("extension: not used: ") and why in said if why else said == "extension: placed\n"
    assert (own / pack.PLACED).exists() == (why is None)
    assert [path.read_text() for path in (checkout / "prokl").iterdir()] == ([] if why else ["machine code"])


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
