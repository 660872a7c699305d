"""The report on csrc/: what it reads off the compiler, what it finds fault with, and that the sources pass."""

import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("setuptools")

from bench import csrc_report  # noqa: E402
from bench.csrc_report import Row, complaints, demangled, parse, short  # noqa: E402
from build_cuda import USUAL_ARCHITECTURES, toolkit  # noqa: E402
from prokl import extension  # noqa: E402
from tests.building import ROOT  # noqa: E402
from tests.commands import read, run  # noqa: E402

with_nvcc = pytest.mark.skipif(toolkit.find_nvcc(os.environ) is None, reason="needs nvcc")

LOG = """
ptxas info    : 0 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function '_ZN5prokl4sumsIfLi4EEEvPT_i' for 'sm_80'
ptxas info    : Function properties for _ZN5prokl4sumsIfLi4EEEvPT_i
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 18 registers, used 1 barriers, 1024 bytes smem, 364 bytes cmem[0]
ptxas info    : Compile time = 5.038 ms
ptxas info    : Compiling entry function '_ZN5prokl7reverseIdEEvPT_i' for 'sm_80'
ptxas info    : Function properties for _ZN5prokl7reverseIdEEvPT_i
    56 bytes stack frame, 52 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 56 bytes cumulative stack size, 364 bytes cmem[0]
ptxas info    : Compile time = 1.511 ms
"""
SUMS = Row("qr.cu", "_ZN5prokl4sumsIfLi4EEEvPT_i", "80", 18, 1024, 0, 0, 0, 0, "13.0")
REVERSE = Row("qr.cu", "_ZN5prokl7reverseIdEEvPT_i", "80", 128, 0, 0, 56, 52, 48, "13.0")
CALLED = """ptxas info    : Function properties for _ZN5prokl6helperIfEET_S1_i
    32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
"""


def test_every_figure_is_read_for_the_kernel_it_belongs_to():
    assert parse(LOG, "qr.cu", "13.0") == [SUMS, REVERSE]
    assert parse(LOG.replace("sm_80", "sm_90a"), "qr.cu", "13.0")[0] == replace(SUMS, arch="90a")


def test_what_a_called_function_spills_counts_for_its_kernel():
    assert parse(LOG + CALLED, "qr.cu", "13.0") == [SUMS, replace(REVERSE, stack=88, spill_stores=56, spill_loads=56)]


def test_output_without_kernels_gives_no_rows():
    assert parse("ptxas info    : 0 bytes gmem\n" + CALLED, "qr.cu", "13.0") == []


def test_a_kernel_that_neither_spills_nor_keeps_a_stack_is_fine():
    assert list(complaints([SUMS])) == []


@pytest.mark.parametrize("fault", [{"stack": 8}, {"spill_stores": 4}, {"spill_loads": 12}])
def test_a_stack_or_a_spill_is_found(fault):
    (found,) = complaints([SUMS, replace(SUMS, kernel="other", **fault)])
    assert found.startswith("other on sm_80: ") and f"{next(iter(fault.values()))} " in found


def test_more_shared_memory_than_an_architecture_has_is_found():
    much = replace(SUMS, launch_shared=163 * 1024 - 1023)
    (found,) = complaints([SUMS, much, replace(much, arch="90")])
    assert found.startswith(f"{SUMS.kernel} on sm_80: 166913 bytes") and found.endswith("at most 166912")


def test_launches_are_asked_of_the_extension_by_kernel_and_type(monkeypatch):
    module = SimpleNamespace(
        float32=SimpleNamespace(shared_memory=lambda: [("sums", 10), ("leaf<true>", 20)]),
        float64=SimpleNamespace(shared_memory=lambda: [("sums", 30)]),
    )
    monkeypatch.setattr(csrc_report.extension, "load", lambda: (module, None))
    kernels = [
        ("qr_float.cu", "sums<float, 4>"),
        ("qr_float.cu", "leaf<float, true>"),
        ("qr_double.cu", "sums<double>"),
    ]
    rows = [replace(SUMS, source=source, kernel=kernel) for source, kernel in kernels]
    assert [row.launch_shared for row in csrc_report.with_launches(rows)] == [10, 20, 30]
    with pytest.raises(csrc_report.UsageError, match="leaves out leaf<float, false>"):
        csrc_report.with_launches([replace(SUMS, source="qr_float.cu", kernel="leaf<float, false>")])
    monkeypatch.setattr(csrc_report.extension, "load", lambda: (None, "it was left out"))
    with pytest.raises(csrc_report.UsageError, match="not known: it was left out"):
        csrc_report.with_launches(rows)


def test_a_spill_that_is_excused_by_name_passes(monkeypatch):
    monkeypatch.setattr(csrc_report, "EXCUSED", {REVERSE.kernel: "runs once"})
    assert list(complaints([REVERSE, replace(REVERSE, kernel="other")]))[0].startswith("other on")


@pytest.mark.parametrize(
    "full, name",
    [
        ("void prokl::sums<float, 4>(float*, int)", "sums<float, 4>"),
        ("void prokl::apply<float, true>(prokl::Batch<float const>, void (*)(int), int)", "apply<float, true>"),
        ("void prokl::(anonymous namespace)::lone<(prokl::Kind)2>(double const*)", "lone<(Kind)2>"),
        ("plain_kernel(float*)", "plain_kernel"),
        ("_ZN5prokl", "_ZN5prokl"),
    ],
)
def test_a_name_is_shortened_to_what_tells_kernels_apart(full, name):
    assert short(full) == name


def test_names_stay_as_they_are_where_nothing_demangles_them(monkeypatch):
    monkeypatch.setattr(csrc_report.shutil, "which", lambda tool: None)
    assert demangled([SUMS]) == [SUMS]


def test_without_nvcc_it_says_so_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(toolkit, "find_nvcc", lambda environ: None)
    assert csrc_report.main([]) == 2
    assert "nvcc was not found: put it on PATH" in capsys.readouterr().err


def test_a_spilling_kernel_fails_the_command_and_is_still_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(csrc_report, "report", lambda: [SUMS, REVERSE])
    assert csrc_report.main(["--out", str(tmp_path / "csrc.csv")]) == 1
    assert [row["spill_stores"] for row in read(tmp_path / "csrc.csv")] == ["0", "52"]
    printed = capsys.readouterr()
    assert REVERSE.kernel in printed.err and SUMS.kernel not in printed.err
    monkeypatch.setattr(csrc_report, "report", lambda: [SUMS])
    assert csrc_report.main([]) == 0


@with_nvcc
def test_a_source_that_does_not_compile_is_told_with_the_compiler_s_words(monkeypatch, tmp_path, capsys):
    (tmp_path / "wrong.cu").write_text("__global__ void kernel() { undeclared = 1; }\n")
    monkeypatch.setattr(csrc_report.build_cuda, "sources", lambda: [tmp_path / "wrong.cu"])
    assert csrc_report.main([]) == 2
    error = capsys.readouterr().err
    assert "wrong.cu does not compile for sm_80" in error and '"undeclared" is undefined' in error


@with_nvcc
@pytest.mark.slow
@pytest.mark.skipif(extension.load()[0] is None, reason="needs the extension")
def test_no_kernel_spills_or_keeps_a_stack(tmp_path):
    done = run("bench.csrc_report", "--out", str(tmp_path / "csrc.csv"))
    assert done.returncode == 0, done.stderr
    rows, committed = read(tmp_path / "csrc.csv"), read(ROOT / "bench" / "results" / "csrc.csv")
    kernels = {
        name
        for path in (ROOT / "csrc").glob("*.cuh")
        for name in re.findall(r"__global__ void(?: __launch_bounds__\([^)]*\))?\s+(\w+)\(", path.read_text())
    }
    assert kernels and kernels == {row["kernel"].partition("<")[0] for row in rows}
    assert {row["arch"] for row in rows} == set(USUAL_ARCHITECTURES)

    def compiled(table):
        return [(row["source"], row["kernel"], row["arch"]) for row in table]

    remedy = "run python -m bench.csrc_report --out bench/results/csrc.csv"
    assert compiled(committed) == compiled(rows), remedy
    if {row["nvcc"] for row in committed} == {row["nvcc"] for row in rows}:
        assert committed == rows, remedy
