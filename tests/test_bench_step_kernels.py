"""Where a step's time goes: the shares add up, and a step that is wrong gets no figures."""

import pytest
import torch

from bench import records, step_kernels
from bench.shapes import SETS, ParameterSet
from bench.steps.gate import Gate
from tests.commands import read

TINY = ParameterSet("tiny", ((2, 12, 20), (1, 12, 12)), (2, 4))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SETS, "tiny", TINY)
    here = dict.fromkeys(records.SAME, "x") | {"date": "2000-01-01"}
    monkeypatch.setattr(step_kernels.records, "environment", lambda device: here)


def test_operators_are_listed_by_their_share(tmp_path, capsys):
    out = tmp_path / "rows.csv"
    arguments = ["--device", "cpu", "--sets", "tiny", "--out", str(out)]
    assert step_kernels.main(arguments) == 0
    step, total, calls, *own = read(out)
    assert [r["metric"] for r in (step, total, calls)] == ["step", "kernel time", "kernel calls"]
    assert float(total["ratio"]) == pytest.approx(float(total["median"]) / float(step["median"]), rel=1e-3)
    medians = [float(r["median"]) for r in own]
    assert len(own) == step_kernels.TOP and medians == sorted(medians, reverse=True) and sum(medians) > 0
    assert all(float(r["ratio"]) == pytest.approx(m / float(total["median"]), rel=1e-2, abs=1e-4)
               for r, m in zip(own, medians, strict=True))  # fmt: skip
    assert sum(medians) <= float(total["median"]) * (1 + 1e-4) and float(calls["median"]) > step_kernels.TOP
    assert any("calls a step: aten::bmm" in r["note"] for r in own)
    assert {r["rank"] for r in (step, total, calls, *own)} == {"4"}
    before = read(out)
    capsys.readouterr()
    assert step_kernels.main(arguments) == 0
    assert capsys.readouterr().out.startswith("tiny: in ") and read(out) == before


def test_a_step_that_is_wrong_or_too_slow_has_no_figures(monkeypatch, tmp_path):
    monkeypatch.setattr(step_kernels, "SLOWEST", 0.0)
    (row,) = step_kernels.rows_of(TINY, torch.device("cpu"), Gate())
    assert "median" not in row and row["note"].startswith("too slow")
    monkeypatch.undo()
    monkeypatch.setattr("bench.steps.gate.complaint", lambda *_: "1 from the reference")
    (row,) = step_kernels.rows_of(TINY, torch.device("cpu"), Gate())
    assert "median" not in row and row["note"].startswith("wrong: ")
    monkeypatch.setitem(SETS, "tiny", TINY)
    assert step_kernels.main(["--device", "cpu", "--sets", "tiny"]) == 1


@pytest.mark.parametrize("arguments, message", [([], "no CUDA device"), (["--device", "cpu", "--out", "f"], "Remove")])
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("a,b\n")
    assert step_kernels.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
