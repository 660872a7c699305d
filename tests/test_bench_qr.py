"""The QR benchmark: what it writes, that nothing wrong is reported, and that it refuses to measure nothing."""

import math
from dataclasses import replace

import pytest
import torch

from bench import qr
from bench.kernels import Ceiling
from bench.qr_cases import CONTENDERS, SETS, Contender, Problem, deviations, draw, factored
from prokl.qr import householder_qr
from tests.commands import interpreted, read, run

TINY = ["--device", "cpu", "--set", "tiny", "--seconds", "0"]
CPU = torch.device("cpu")
TOP = Ceiling(flops=6e12, bytes=1e12)


def contender(name):
    return next(c for c in CONTENDERS if c.name == name)


@pytest.mark.slow
def test_every_contender_gives_a_row_of_every_problem(tmp_path):
    done = run("bench.qr", *TINY, "--out", str(tmp_path / "rows.csv"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "no times below are measurements" in done.stdout
    rows = read(tmp_path / "rows.csv")
    assert list(rows[0]) == qr.COLUMNS
    assert [(r["problem"], r["contender"]) for r in rows] == [
        (p.kind, c.name) for p in SETS["tiny"] for c in CONTENDERS
    ]
    for r in rows:
        assert "no measurement" in r["device"] and r["torch"] == torch.__version__ and r["date"]
        if r["contender"] == "extension":
            assert r["metric"] == "left out" and r["reason"] and not r["median"]
            continue
        assert (r["metric"], r["unit"], r["rounds"], r["reason"]) == ("time", "ms", "3", "")
        assert 0 < float(r["q1"]) <= float(r["median"]) <= float(r["q3"])
        assert 0 < float(r["floor"]) and 0 < float(r["orthogonality"]) < 100 and 0 < float(r["backward_error"]) < 20
    for r in (r for r in rows if r["contender"] == "linalg batched"):
        assert float(r["speedup_over_linalg_batched"]) == 1


def rows_with(monkeypatch, *contenders, times=None, problem=SETS["tiny"][0], seconds=0.0):
    """The rows of one problem by contender; ``times`` says how many seconds each call takes."""
    monkeypatch.setattr(qr, "CONTENDERS", contenders)
    if times is not None:
        monkeypatch.setattr(qr, "clock", lambda run, device: (lambda Q, t: (Q, lambda: t))(run(), next(times)))
    return {row["contender"]: row for row in qr.measure(problem, torch.matmul, CPU, seconds, TOP)}


def test_figures_are_of_the_timed_calls_beside_the_batched_one(monkeypatch):
    # Two calls that say how often, then three rounds of both in turn.
    times = iter([9e-3, 9e-3, 1e-3, 8e-3, 3e-3, 8e-3, 2e-3, 5e-3])
    fast, slow = contender("CholeskyQR2"), contender("linalg batched")
    rows = rows_with(monkeypatch, fast, slow, times=times)
    assert [rows[fast.name][k] for k in ("median", "q1", "q3", "rounds")] == pytest.approx([2, 1.5, 2.5, 3])
    assert rows[slow.name]["median"] == pytest.approx(8)
    assert rows[fast.name]["speedup_over_linalg_batched"] == pytest.approx(4)
    assert next(times, None) is None


def test_contenders_are_timed_for_as_long_as_told_and_within_the_fewest_and_most_rounds(monkeypatch):
    for call, rounds in ((1e-3, qr.MOST), (0.1, 10), (1.0, qr.FEWEST)):
        rows = rows_with(monkeypatch, contender("linalg batched"), times=iter([call] * 100), seconds=1.0)
        assert rows["linalg batched"]["rounds"] == rounds


def test_what_takes_too_long_is_left_out(monkeypatch):
    rows = rows_with(monkeypatch, contender("linalg looped"), times=iter([2 * qr.SLOW] * 2))
    assert rows["linalg looped"]["metric"] == "left out" and "one call took" in rows["linalg looped"]["reason"]


WRONG = {
    "orthogonality": lambda Q: 1.001 * Q,
    "backward error": lambda Q: Q.flip(-1),
    "diagonal": lambda Q: -Q,
    "orthogonality nan": lambda Q: Q * math.nan,
    "backward error nan": lambda Q: Q[..., :-1],
}


@interpreted
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("reason", WRONG)
def test_a_wrong_result_is_not_timed_and_fails_where_it_is_ours(reason, ours, monkeypatch, tmp_path, capsys):
    right = contender("linalg batched")
    broken = Contender("broken", lambda *a: WRONG[reason](right.run(*a)), ours=ours)
    monkeypatch.setattr(qr, "CONTENDERS", (broken, right))
    assert qr.main([*TINY, "--out", str(tmp_path / "rows.csv")]) == (1 if ours else 0)
    for wrong, timed in zip(*[iter(read(tmp_path / "rows.csv"))] * 2, strict=True):
        assert (wrong["metric"], wrong["median"], wrong["rounds"]) == ("wrong", "", "")
        assert reason in wrong["reason"] and "k eps, may be" in wrong["reason"]
        assert timed["metric"] == "time"
    assert capsys.readouterr().err.count("broken: wrong: ") == len(SETS["tiny"])


def test_what_fails_or_cannot_run_is_left_out_with_its_reason(monkeypatch):
    def fail(kind, inputs, mm):
        raise torch.linalg.LinAlgError("did not converge\nand more")

    failing = Contender("failing", fail)
    absent = replace(contender("linalg looped"), obstacle=lambda device: f"not on {device}")
    rows = rows_with(monkeypatch, failing, absent, contender("linalg batched"))
    assert (rows["failing"]["metric"], rows["failing"]["reason"]) == ("left out", "did not converge")
    assert (rows["linalg looped"]["metric"], rows["linalg looped"]["reason"]) == ("left out", "not on cpu")
    assert rows["linalg batched"]["metric"] == "time"


@pytest.mark.parametrize("p", SETS["tiny"], ids=lambda p: p.kind)
def test_every_contender_gives_the_same_q(p):
    inputs = draw(p, CPU)
    exact = householder_qr(factored(p.kind, [t.double() for t in inputs], torch.matmul))
    for c in CONTENDERS:
        if c.obstacle(CPU) is None:
            Q = c.run(p.kind, inputs, torch.matmul)
            # Rounding times the condition, which is up to 1e4.
            assert (Q.double() - exact).abs().max() < 1e4 * 10 * torch.finfo(torch.float32).eps, c.name
            assert deviations(p, inputs, Q).reason == ""


@pytest.mark.parametrize("p", SETS["tiny"], ids=lambda p: p.kind)
def test_problems_are_of_their_kind(p):
    inputs = [t.double() for t in draw(p, CPU)]
    A = factored(p.kind, inputs, torch.matmul)
    assert A.shape == (p.B, p.n, p.k)
    basis = inputs[-1]
    lengths = torch.linalg.matrix_norm(basis.mT @ basis - torch.eye(p.k))
    assert (lengths > 0.01).all() if p.kind == "coordinates" else (lengths < 1e-5).all()
    assert not torch.equal(A[0], A[1])
    if p.kind == "tracking":
        V, K, U = inputs
        assert torch.linalg.matrix_norm(K - U.mT @ V).max() < 1e-5 * torch.linalg.matrix_norm(K).max()
    assert (torch.linalg.eigvalsh(inputs[1 if p.kind == "tracking" else 0]) > 0).all()
    assert ((100 < torch.linalg.cond(A)) & (torch.linalg.cond(A) < 1e5)).all()


def test_the_floor_is_the_longer_of_arithmetic_and_traffic():
    p = Problem("refresh", 2, 10, 10)
    assert (p.flops, p.bytes) == (2 * (2000 + 2000 + 1000 / 3), 4 * 2 * 300)
    assert qr.floor(p, Ceiling(flops=6.0, bytes=1e30)) == pytest.approx(p.flops)
    assert qr.floor(p, Ceiling(flops=1e30, bytes=2.0)) == p.bytes / 2
    tall = Problem("tracking", 1, 40, 10)
    assert (tall.flops, tall.bytes) == (8000 + 1000 / 3, 4 * (800 + 100))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--device", "cpu"], "takes --set tiny"),
        ([*TINY, "--seconds", "-1"], "must be at least 0"),
        pytest.param([], "no CUDA device here", marks=interpreted),
    ],
)
def test_what_would_measure_nothing_is_refused_in_one_line(arguments, message, capsys):
    assert qr.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
