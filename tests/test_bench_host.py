"""The time of the host's part of a step: the rows, and that nothing but the host's part is in it."""

from bench import rows
from bench.timing import __main__ as timing
from bench.timing import host


def test_every_case_has_a_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "LAYERS", 1)
    file = tmp_path / "host.csv"
    assert timing.main(["host", "--steps", "3", "--out", str(file)]) == 0
    found = rows.read(file)
    assert {(row["optimizer"], row["case"]) for row in found} == {(o, c) for o in host.OPTIMIZERS for c in host.CASES}
    assert all(float(row["median"]) > 0 and row["commit"] for row in found)
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_no_kernel_is_launched(monkeypatch):
    monkeypatch.setattr("prokl.kernels.launch.start", None)  # which a call would show
    monkeypatch.setattr(host, "LAYERS", 1)
    assert len(host.step_ms("pro-klshampoo", False, True, 3)) == 3


def test_too_few_steps_are_refused(capsys):
    assert timing.main(["host", "--steps", "1"]) == 2
    assert "--steps 1: must be a whole number >= 2" in capsys.readouterr().err
