"""The compilers' report: every kernel is in it, its checks can fail, and it specialises as the JIT does."""

import json
import os
import re
from dataclasses import replace
from functools import partial
from typing import get_type_hints

import pytest
import torch

pytest.importorskip("setuptools")

from bench.compile_report import __main__ as compile_report  # noqa: E402
from bench.compile_report import csrc, trace, triton_kernels  # noqa: E402
from bench.compile_report.launches import Launch, Pointer, describe  # noqa: E402
from bench.compile_report.triton_kernels import (  # noqa: E402
    ARCHITECTURES,
    COPIES,
    STAGE_BYTES,
    Row,
    complaints,
    every_launch,
    of_ptx,
)
from bench.micro.kernels import KERNELS as CASES  # noqa: E402
from bench.shapes import SETS  # noqa: E402
from build_cuda import USUAL_ARCHITECTURES, toolkit  # noqa: E402
from prokl import KLShampoo, ProKLShampoo  # noqa: E402
from prokl.backends import extension  # noqa: E402
from prokl.kernels import launch as launch_module  # noqa: E402
from prokl.kernels.launch import Tile  # noqa: E402
from tests.commands import ROOT, read, run_python  # noqa: E402

NAMES = {
    name: path
    for path in sorted((ROOT / "kernels").glob("*.py"))
    for name in re.findall(r"@triton\.jit\ndef (\w+)_kernel\(", path.read_text())
}
RESULTS = ROOT / "bench" / "results"
with_nvcc = pytest.mark.skipif(toolkit.find_nvcc(os.environ) is None, reason="needs nvcc")


@pytest.fixture(scope="module")
def launches():
    """Every launch that is compiled, by kernel and configuration."""
    return {(launch.kernel, describe(launch)): launch for launch in every_launch()}


SM_90 = """
import json, os
from dataclasses import asdict
from bench.compile_report.triton_kernels import report

if __name__ == "__main__":
    rows, wrong = report(os.cpu_count(), (90,))
    print(json.dumps([wrong, [{k: str(v) for k, v in asdict(row).items()} for row in rows]]))
"""


@pytest.mark.slow
def test_kernels_pass_on_sm_90_and_match_the_committed_rows(tmp_path):
    """Compiling for the other architectures as well takes minutes; a kernel that changes on one changes on all."""
    script = tmp_path / "sm_90.py"  # a file, which the pool's processes can import
    script.write_text(SM_90)
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr
    wrong, rows = json.loads(done.stdout)
    assert wrong == []
    committed = [row for row in read(RESULTS / "aot.csv") if row["arch"] == "90"]
    remedy = "run python -m bench.compile_report aot --out bench/results"
    if same := [row for row in committed if row["triton"] == rows[0]["triton"]]:
        assert same == rows, remedy


ONE_STEP = {
    "product": lambda a: a["TILE_M"] * a["TILE_N"] * a["TILE_K"],
    "symmetric_product": lambda a: a["TILE"] ** 2 * a["TILE_K"],
    "momentum": lambda a: a["HAT"] * a["TILE_M"] * a["TILE_N"] * a["TILE_R"],
    "project": lambda a: 2 * a["TILE_M"] * a["TILE_R"] * a["TILE_N"],
    "apply": lambda a: a["TILE_M"] * a["TILE_N"] * a["HAS_LOW_RANK"] * a["TILE_R"],
}
"""Multiply-adds of one step of every loop of a kernel."""


@pytest.mark.slow
def test_the_committed_rows_cover_every_launch_without_complaint(launches):
    """And no warp multiplies what another does.

    Where a product takes another, as those of parts do, all warps lie along one side: more than fit repeat it.
    """
    rows = read(RESULTS / "aot.csv")
    for version in {row["triton"] for row in rows}:
        own = [(row["kernel"], row["config"], int(row["arch"])) for row in rows if row["triton"] == version]
        assert own == [(*key, arch) for key in launches for arch in ARCHITECTURES], (
            f"run python -m bench.compile_report aot --out bench/results with Triton {version}"
        )
    assert {row["kernel"] for row in rows} == set(NAMES)
    checked = set()
    for row in rows:
        launch = launches[row["kernel"], row["config"]]
        numbers = {key: int(row[key]) for key, kind in get_type_hints(Row).items() if kind is int}
        assert complaints(Row(**row | numbers), launch) == [], row
        if row["arch"] != "80" or row["kernel"] not in ONE_STEP:
            continue
        a = launch.by_name
        pairs = row["config"].split()[5:7] == ["fp32", "U:bf16"] and a.get("U_LO")  # of a bfloat16 M two products
        in_parts = pairs or a.get("PRECISION") == "tf32x3"
        if not in_parts:
            continue
        if wanted := 3 * ONE_STEP[row["kernel"]](a):
            done = numbers["multiplications"] * a["num_warps"] * 16 * 8 * (16 if pairs else 8)
            assert done == wanted, row
            checked |= {row["kernel"]}
    assert checked == set(ONE_STEP)


def test_every_file_tile_and_product_is_covered():
    modules = {case.module.__name__.rpartition(".")[2]: case.module for case in CASES}
    assert {path.stem for path in NAMES.values()} == set(modules)
    assert len({case.name for case in CASES}) == len(CASES)
    for module in modules.values():
        shipped = {tile for name, tiles in vars(module).items() if name.startswith("TILES") for tile in tiles}
        assert all(isinstance(tile, Tile) for tile in shipped)
        cases = [case for case in CASES if case.module is module]
        assert shipped <= {tile for case in cases for dtypes in case.dtypes for tile in case.tiles(dtypes)}
    assert set(STAGE_BYTES) == {
        name for name, path in NAMES.items() if re.search(r"tl\.dot|add_product\(", path.read_text())
    }


HALF = torch.bfloat16
PRODUCT = Launch(
    "prokl.kernels.product",
    "product_kernel",
    (Pointer(HALF, 0), Pointer(HALF, 0), Pointer(HALF, 0), 768, 768, 1, 0, 3 * 2**31, 1, 768),
    (
        *{"HAS_C": True, "ENERGY": False, "OPERAND": "bf16", "PRECISION": "ieee"}.items(),
        *{"TILE_M": 128, "TILE_N": 128, "TILE_K": 64, "num_warps": 8, "num_stages": 3}.items(),
    ),
    ("A_ptr", "B_ptr", "D_ptr", "M", "N", "K", "stride_x_b", "stride_A_b", "stride_A_m", "stride_A_k"),
)
STAGE = 2 * (128 + 128) * 64
GOOD = Row("product", "", 90, 128, 3 * STAGE + 64, 0, "wgmma cp.async", 4, 0, 16, 16, "")
ON_80 = {"arch": 80, "instructions": "mma cp.async"}


@pytest.mark.parametrize(
    "change, given, complaint",
    [
        ({"loop_waits": 2}, {}, "waits for its own products in 2 places"),
        ({"kernel": "stack", "load_bytes": 8}, {}, "loads 8 and stores 16 bytes"),
        ({"kernel": "split", "store_bytes": 2}, {}, "loads 16 and stores 2 bytes"),
        ({"stack": 40}, {}, "spill: 40 bytes"),
        ({"shared": 227 * 1024 + 1}, {}, "there are 232448"),
        ({"shared": 163 * 1024 + 1} | ON_80, {}, "there are 166912"),
        ({"instructions": "wgmma cp.async trap"}, {}, "traps"),
        ({"instructions": "mma cp.async"}, {}, "no wgmma"),
        ({"instructions": "cp.async", "arch": 100}, {}, "no tensor cores"),
        ({"instructions": "wgmma"}, {}, "no cp.async"),
        ({"shared": 3 * STAGE - 1}, {}, f"3 stages take {3 * STAGE}"),
        ({"shared": 2 * STAGE - 1} | ON_80, {}, f"3 stages take {2 * STAGE}"),
        ({"stack": 40}, {"M": 517}, "spill: 40 bytes"),  # also at odd sizes
        ({"instructions": "mma cp.async"}, {"OPERAND": "fp32", "PRECISION": "tf32x3"}, "no wgmma"),
    ],
    ids=str,
)
def test_each_check_can_fail(change, given, complaint):
    """The committed rows, which have no complaint, show what is no fault."""
    launch = replace(PRODUCT, constants=(*PRODUCT.constants, *given.items()))
    (found,) = complaints(replace(GOOD, **change), launch)
    assert complaint in found


def test_a_configuration_names_all_that_is_specialised():
    assert describe(PRODUCT) == "128x128x64 8 warps 3 stages bf16 has_c operand=bf16 ieee K:1 A[16L 1 16]"


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [partial(ProKLShampoo, rank=128), KLShampoo], ids=["pro", "kl"])
def test_what_a_balanced_step_launches_is_compiled(optimizer, launches):
    missing = set()
    for dtype in (torch.bfloat16, torch.float32):
        for buckets in trace.steps_of(SETS["gpt2-124m"], dtype, optimizer).values():
            its = [event.launch for events in buckets for event in events if event.launch]
            found = {(own.kernel, re.sub(r" addresses\[.*\]", "", describe(own))) for own in its}
            missing |= {key for key in found if {"a_lo", "lo", "u_lo"} & set(key[1].split()) or key[0] in COPIES}
    assert missing and missing <= launches.keys()


PTX = """
    ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
    wgmma.wait_group.sync.aligned 0;
$L__BB0_1:
    @%p1 bra $L__BB0_3;
    cp.async.cg.shared.global [ %r5 + 0 ], [ %rd2 + 0 ], 0x10, %r6;
    wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r7}, %rd3, %rd4, %p2, 1, 1, 0, 1;
    wgmma.wait_group.sync.aligned 1;
    WAIT
    @%p3 bra $L__BB0_1;
$L__BB0_3:
    wgmma.wait_group.sync.aligned 0;
    st.global.v2.b32 [ %rd5 + 0 ], { %r8, %r9 };
    st.global.L1::evict_last.b16 [ %rd5 + 0 ], { %rs1 };
"""


def test_waits_count_in_loops_and_accesses_by_their_widest():
    assert of_ptx(PTX) == (1, 0, 16, 8) and of_ptx("") == (0, 0, 0, 0)
    assert of_ptx(PTX.replace("WAIT", "wgmma.wait_group.sync.aligned 0;")) == (1, 1, 16, 8)
    assert of_ptx(PTX.replace(".v4", "").replace("0x10", "0x4")) == (1, 0, 4, 8)


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
SUMS = csrc.Row("qr.cu", "_ZN5prokl4sumsIfLi4EEEvPT_i", "80", 18, 1024, 0, 0, 0, 0, "13.0")
REVERSE = csrc.Row("qr.cu", "_ZN5prokl7reverseIdEEvPT_i", "90a", 128, 0, 0, 56, 52, 48, "13.0")
CALLED = """ptxas info    : Function properties for _ZN5prokl6helperIfEET_S1_i
    32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""


def test_every_figure_is_read_for_the_kernel_it_belongs_to():
    assert csrc.parse(LOG, "qr.cu", "13.0") == [SUMS, REVERSE]
    # What a called function spills counts for the kernel before it.
    with_called = [SUMS, replace(REVERSE, stack=88, spill_stores=56, spill_loads=56)]
    assert csrc.parse(LOG + CALLED, "qr.cu", "13.0") == with_called
    assert csrc.parse("ptxas info    : 0 bytes gmem\n" + CALLED, "qr.cu", "13.0") == []


def test_a_stack_a_spill_or_too_much_shared_memory_is_found():
    for fault, words in (
        ({"stack": 8}, "8 bytes of stack"),
        ({"spill_stores": 4}, "4 stored"),
        ({"spill_loads": 12}, "12 loaded"),
        ({"launch_shared": 163 * 1024 - 1023}, "166913 bytes of shared memory; must be at most 166912"),
    ):
        (found,) = csrc.complaints([SUMS, replace(SUMS, kernel="other", **fault)])
        assert found.startswith("other on sm_80: ") and words in found
    assert list(csrc.complaints([replace(SUMS, arch="90", **fault)])) == []


def test_a_wrong_kernel_fails_the_command_and_is_written(monkeypatch, tmp_path, capsys):
    rows = [SUMS, replace(REVERSE, arch="90")]
    monkeypatch.setattr(csrc, "report", lambda jobs: (rows, list(csrc.complaints(rows))))
    monkeypatch.setattr(launch_module, "INTERPRETED", False)
    monkeypatch.setattr(triton_kernels, "report", lambda jobs: ([GOOD], []))
    assert compile_report.main(["csrc", "--out", str(tmp_path)]) == 1
    assert compile_report.main(["aot", "--out", str(tmp_path)]) == 0
    assert [row["spill_stores"] for row in read(tmp_path / "csrc.csv")] == ["0", "52"]
    assert [row["instructions"] for row in read(tmp_path / "aot.csv")] == [GOOD.instructions]
    printed = capsys.readouterr()
    assert REVERSE.kernel in printed.err and SUMS.kernel not in printed.err
    rows.pop()
    assert compile_report.main(["csrc"]) == 0


@with_nvcc
@pytest.mark.slow
@pytest.mark.skipif(extension.load()[0] is None, reason="needs the extension")
def test_no_kernel_of_csrc_spills_or_keeps_a_stack():
    rows, wrong = csrc.report(os.cpu_count())
    assert not wrong
    committed = read(RESULTS / "csrc.csv")
    kernels = {
        name
        for path in (ROOT / "csrc").glob("*.cuh")
        for name in re.findall(r"__global__ void(?: __launch_bounds__\([^)]*\))?\s+(\w+)\(", path.read_text())
    }
    assert kernels and kernels == {row.kernel.partition("<")[0] for row in rows}
    assert {row.arch for row in rows} == set(USUAL_ARCHITECTURES)
    remedy = "run python -m bench.compile_report csrc --out bench/results"
    assert [(row["source"], row["kernel"], row["arch"]) for row in committed] == [
        (row.source, row.kernel, row.arch) for row in rows
    ], remedy
    if {row["nvcc"] for row in committed} == {row.nvcc for row in rows}:
        assert committed == [{key: str(value) for key, value in vars(row).items()} for row in rows], remedy


COMPILED = """
from itertools import chain

import torch
from bench.compile_report import trace
from bench.compile_report.launches import describe
from bench.compile_report.triton_kernels import build, record
from bench.micro.kernels import KERNELS
from bench.shapes import ParameterSet
from prokl import KLShampoo, ProKLShampoo

seen = {}
for optimizer in (ProKLShampoo, KLShampoo):
    for events in trace.steps_of(ParameterSet("one", ((1, 1, 2),), (1,)), torch.float32, optimizer)["refresh"]:
        for own in (e.launch for e in events if e.launch):
            seen.setdefault((own.kernel, describe(own)), own)
for own in seen.values():
    build(own, 90)
print(sorted({kernel for kernel, _ in seen}))
summing = [case for case in KERNELS if case.name in ("admit kernel", "residual", "residual of pairs")]
for launch in chain.from_iterable(map(record, summing)):
    if launch.by_name.get("OPERAND") == "fp64" or not {"BOUNDED", "ENERGY"} & launch.by_name.keys():
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
