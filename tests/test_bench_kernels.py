"""The kernel benchmark: what it writes, that nothing wrong is reported, and that it refuses to measure nothing."""

from dataclasses import replace

import pytest
import torch

from bench import kernels
from bench.case import FP32, FP32_POLAR, FP64, Sizes
from bench.kernel_cases import CASES
from prokl.kernels.launch import INTERPRETED
from tests.commands import interpreted, read, run

TINY = ["--device", "cpu", "--sets", "tiny", "--rank", "8", "--rounds", "2"]
TIMES = [f"{name}_{what}" for name in ("kernel", "torch") for what in ("ms", "q1", "q3")]
ORIGIN = ["device", "torch", "triton", "cuda", "prokl", "commit", "date"]


@pytest.mark.slow
def test_every_case_gives_a_row(tmp_path):
    done = run("bench.kernels", *TINY, "--out", str(tmp_path / "rows.csv"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "no times below are measurements" in done.stdout
    rows = read(tmp_path / "rows.csv")
    assert [row["case"] for row in rows] == [case.name for case in CASES if case.timed]
    for row in rows:
        assert [row[k] for k in ("matrices", "m", "n", "r", "sets")] == ["2", "24", "40", "8", "tiny"]
        assert all(float(row[k]) > 0 for k in (*TIMES, "torch_over_kernel", "rate", "share"))
        assert float(row["kernel_q1"]) <= float(row["kernel_ms"]) <= float(row["kernel_q3"])
        assert row["unit"] in ("TFLOP/s", "GB/s") and "no measurement" in row["device"]
        assert list(row)[-len(ORIGIN) :] == ORIGIN
        assert (row["torch"], row["rounds"]) == (torch.__version__, "2")


@interpreted
@pytest.mark.parametrize("wrong", [lambda x: 1.001 * x, lambda x: x * float("nan"), lambda x: x.roll(1, 0)])
def test_a_wrong_result_is_not_reported(wrong, monkeypatch, tmp_path, capsys):
    right = next(case for case in CASES if case.name == "product")
    broken = replace(right, call=lambda i, tile: wrong(right.call(i, tile)))
    monkeypatch.setattr(kernels, "CASES", (broken, next(case for case in CASES if case.name == "symmetric P")))
    assert kernels.main([*TINY, "--out", str(tmp_path / "rows.csv")]) == 1
    assert [row["case"] for row in read(tmp_path / "rows.csv")] == ["symmetric P"]
    assert "product, fp32 throughout, 2 of 24x40, r=8: wrong, so not reported" in capsys.readouterr().err


@interpreted
def test_nothing_is_written_unless_told(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kernels, "CASES", [case for case in CASES if case.name == "eigenvalue_ema"])
    assert kernels.main(TINY) == 0
    assert list(tmp_path.iterdir()) == []


@interpreted
@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no CUDA device here"),
        (["--device", "cpu"], "takes --sets tiny"),
        ([*TINY, "--rounds", "1"], "must be at least"),
    ],
)
def test_what_would_measure_nothing_is_refused_in_one_line(arguments, message, capsys):
    assert kernels.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_cpu_without_the_interpreter_is_refused():
    done = run("bench.kernels", *TINY)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "TRITON_INTERPRET=1" in done.stderr


def dtypes_of(case):
    """Those to check in: the interpreter gets half precision wrong."""
    return (FP32_POLAR, *(d for d in case.dtypes if d == FP64)) if INTERPRETED else case.dtypes


PAIRS = [(case, dtypes) for case in CASES for dtypes in dtypes_of(case)]


@pytest.mark.parametrize("case, dtypes", PAIRS, ids=[f"{case.name}, {dtypes.name}" for case, dtypes in PAIRS])
def test_every_case_agrees_with_its_torch_form(case, dtypes):
    device = torch.device("cpu" if INTERPRETED else "cuda")
    size = Sizes(2, 24, 40, 8) if INTERPRETED else Sizes(4, 200, 328, 40)
    error, _, allowed = kernels.errors(case, lambda: case.inputs(size, dtypes, kernels.Numbers(device)))
    assert error <= allowed


def test_the_sets_are_the_linear_layers_of_the_models():
    # Parameters of 12 or 24 layers of width d: 12 d^2 each; LLaMA: 4 d^2 + 3 d w.
    sizes = {name: sum(count * m * n for count, m, n in buckets) for name, buckets in kernels.SETS.items()}
    assert sizes["gpt2-124m"] == 12 * 12 * 768**2
    assert sizes["gpt2-350m"] == 24 * 12 * 1024**2
    assert sizes["llama-134m"] == 12 * (4 * 768**2 + 3 * 768 * 2048)
    assert sizes["llama-450m"] == 30 * (4 * 1024**2 + 3 * 1024 * 2816)


def test_a_bucket_of_two_sets_is_measured_once():
    found = kernels.buckets(["gpt2-124m", "llama-134m"], 128)
    assert found[Sizes(48, 768, 768, 128)] == ["gpt2-124m", "llama-134m"]
    assert len(found) == 3


@pytest.mark.parametrize("case", [case for case in CASES if case.timed], ids=lambda case: case.name)
def test_work_is_counted_per_matrix(case):
    one, two = Sizes(1, 64, 96, 16), Sizes(2, 64, 96, 16)
    assert case.flops(two) == 2 * case.flops(one) > 0
    assert case.bytes(two, FP32) == 2 * case.bytes(one, FP32) > 0
