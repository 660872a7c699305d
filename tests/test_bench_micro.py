"""The microbenchmarks: who stands beside whom, that nothing wrong is reported, what is written and what is skipped."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("pytest_benchmark")

from bench import records, summary  # noqa: E402
from bench.micro import bench_primitives, ledger
from bench.micro import groups as micro
from bench.micro import report as micro_report
from bench.micro.case import FP32  # noqa: E402
from bench.micro.kernel_cases import CASES  # noqa: E402
from bench.micro.ledger import KL, OURS, PLAIN, Ledger, with_ratios  # noqa: E402
from bench.micro.primitive_cases import PRIMITIVES  # noqa: E402
from bench.rates import Rates  # noqa: E402
from bench.shapes import PAPER, SETS, SMALL, ParameterSet  # noqa: E402
from prokl import ops  # noqa: E402
from tests.commands import ROOT, read  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY = ParameterSet("tiny", ((2, 12, 20), (1, 20, 12), (2, 12, 12)), (2, 4))
RATES = Rates(2e12, 1e12, 1e11)


def bench(*arguments):
    """``pytest bench`` on a tiny set in a process of its own, without a GPU."""
    ours = ("TRITON_INTERPRET", "PYTEST_")  # as one of several test processes it would time nothing
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "tests.tiny_sets", "-p", "no:cacheprovider"]
    options = ["--device", "cpu", "--sets", "tiny", "--seconds", "0.001"]
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *options, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_every_primitive_gives_its_rows_and_they_are_not_measured_again(tmp_path):
    out = tmp_path / "rows.csv"
    done = bench("--benchmark-only", "--rows", str(out))
    assert done.returncode == 0, done.stdout
    rows = read(out)
    assert list(rows[0]) == records.COLUMNS
    assert {r["metric"] for r in rows if r["set"] == "machine"} >= {"copy bandwidth", "product rate float32"}
    times = [r for r in rows if r["metric"] == "time"]
    buckets = [("3x12x20", "4"), ("2x12x12", "4")]
    assert [(r["set"].partition(",")[0], r["shapes"], r["rank"], r["contender"]) for r in times] == [
        (case.name, *bucket, name) for case in PRIMITIVES for bucket in buckets for name in (PLAIN, OURS, KL)
    ]
    for r in times:
        assert 0 < float(r["q1"]) <= float(r["median"]) <= float(r["q3"]) and 3 <= int(r["rounds"]) <= 50
        assert float(r["floor"]) > 0 and r["unit"] == "ms" and r["dtype"].startswith("float32")
        plain = next(p for p in times if p["set"] == r["set"] and p["contender"] == PLAIN)
        assert float(r["ratio"]) == pytest.approx(float(r["median"]) / float(plain["median"]), rel=1e-3)
        assert r["device"] and r["torch"] == torch.__version__ and r["date"] and r["commit"]
        assert ("Newton-Schulz" in r["dtype"]) <= (r["set"].startswith("Newton") and r["contender"] != KL)
    if not times[0]["commit"].endswith("-dirty"):  # rows of a changed tree are measured again
        again = bench("--benchmark-only", "--rows", str(out))
        assert again.returncode == 0 and "in the file of --rows already" in again.stdout and read(out) == rows


@pytest.mark.slow
def test_without_timing_the_results_are_checked_and_nothing_is_written(tmp_path):
    done = bench("--benchmark-disable", "--rows", str(tmp_path / "rows.csv"))
    assert done.returncode == 0 and "42 passed" in done.stdout, done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seconds", "0"], "--seconds 0: must be more than 0"),
        (["--device", "cuda"], "no CUDA device here"),
        (["--sets", "nonsense"], "invalid choice: 'nonsense'"),
        (["--rows", "README.md"], "Remove or convert the file"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message):
    done = bench(*arguments)
    assert done.returncode == 4 and message in done.stderr and "Traceback" not in done.stderr


def groups(device, s=TINY):
    return {g.name: g for g in micro.groups([s], device)}


def test_on_a_cpu_every_primitive_has_ours_the_plain_form_and_kl_shampoos():
    found = groups(CPU)
    assert len(found) == 2 * len(PRIMITIVES)
    for g in found.values():
        assert [(c.name, c.backend) for c in g.contenders(CPU)] == [(PLAIN, "torch"), (OURS, "torch"), (KL, "torch")]


def test_on_a_gpu_there_are_the_kernels_too(monkeypatch):
    monkeypatch.setattr(micro, "best", lambda device: replace(ops.TORCH, name="triton"))
    found = groups(CUDA)
    timed = sum(len(case.timed) for case in (*PRIMITIVES, *CASES))
    assert len(found) == 2 * timed > 2 * len(PRIMITIVES)

    def who(name):
        g = next(g for key, g in found.items() if key.startswith(f"{name}, "))
        return [(c.name, c.backend) for c in g.contenders(CUDA)]

    assert who("Newton-Schulz") == [(PLAIN, "torch"), (OURS, "triton"), (OURS, "torch"), (KL, "triton")]
    assert who("refresh") == [(PLAIN, "torch"), (OURS, "extension"), (OURS, "torch"), (KL, "triton")]
    assert who("residuals") == [(PLAIN, "torch"), (OURS, "triton")]
    extension = next(c for c in found["tracking QR, 3 of 12x20, r=4"].contenders(CUDA) if c.backend == "extension")
    assert extension.obstacle is not None or torch.cuda.is_available()


def test_on_a_cpu_the_rows_of_qr_say_that_ours_is_the_plain_form():
    said = "the plain form itself on a CPU"
    for g in groups(CPU).values():
        same = g.name.startswith(("tracking QR", "refresh"))
        notes = {c.name: micro.head(c, g, FP32)["note"] for c in g.contenders(CPU)}
        assert [name for name, note in notes.items() if said in note] == [OURS] * same
    assert all(not c.note for g in groups(CUDA).values() for c in g.contenders(CUDA))


def test_a_counterpart_with_a_kernel_runs_it_where_triton_does(monkeypatch):
    g = groups(CPU)["apply, 3 of 12x20, r=4"]
    assert g.case.counterpart.call is not None
    for name, on_gpu in (("torch", False), ("triton", True)):
        monkeypatch.setattr(micro, "best", lambda device, name=name: replace(ops.TORCH, name=name))
        (theirs,) = (c for c in g.contenders(CPU) if c.name == KL)
        assert (theirs.run is not g.case.counterpart.torch) == on_gpu


def test_a_bucket_of_two_sets_is_measured_once_and_at_the_largest_rank():
    found = micro.buckets([SETS[name] for name in SMALL])
    assert found[micro.Sizes(12, 192, 192, 32)] == ["gpt2-124m/4", "llama-134m/4"] and len(found) == 7
    assert len(micro.buckets([SETS[name] for name in PAPER])) == 7
    assert list(micro.buckets([ParameterSet("s", ((1, 8, 8),), (128,))])) == [micro.Sizes(1, 8, 8, 7)]


@pytest.mark.parametrize(
    "device, rates, polar",
    [
        (CPU, Rates(1e10, 1e11, 1e10), torch.float32),
        (CPU, Rates(2e11, 1e11, 1e10), torch.bfloat16),
        (CPU, None, torch.float32),
        (CUDA, None, torch.bfloat16),
    ],
)
def test_newton_schulz_runs_in_the_dtype_that_is_faster_here(device, rates, polar):
    assert micro.fitted(FP32, device, rates) == replace(FP32, polar=polar)


def test_a_row_has_the_floor_of_its_own_operations_and_of_the_dtype():
    g = groups(CPU)["Newton-Schulz, 3 of 12x20, r=4"]
    fast = replace(RATES, bandwidth=1e30)
    rows = {c.name: micro.measured_row(c, g, FP32, [1e-3, 2e-3, 4e-3], fast) for c in g.contenders(CPU)}
    ours, theirs = rows[OURS], rows[KL]
    assert [ours[k] for k in ("median", "q1", "q3", "rounds")] == pytest.approx([2, 1.5, 3, 3])
    # Five steps on Gram matrices in bfloat16, and four products in float32.
    assert ours["floor"] == pytest.approx(1e3 * 3 * 12**2 * (11 * 12 + 9 * 20) / RATES.half)
    assert theirs["floor"] == pytest.approx(1e3 * 3 * 4 * (12**2 * 20 + 12 * 20**2) / RATES.single)
    assert (ours["dtype"], theirs["dtype"]) == ("float32, Newton-Schulz bfloat16", "float32")
    assert (ours["note"], theirs["note"]) == ("of tiny", "two-sided preconditioning; of tiny")
    slow = replace(RATES, bandwidth=1.0)
    assert micro.measured_row(g.contenders(CPU)[1], g, FP32, [1.0], slow)["floor"] == 1e3 * 3 * 2 * 12 * 20 * 2


def test_ratios_are_to_the_plain_form_and_absent_where_one_is_not_timed():
    rows = [{"median": 4.0}, {"median": 2.0}, {"note": "left out"}]
    assert [row.get("ratio") for row in with_ratios(rows)] == [1, 0.5, None]
    assert [row.get("ratio") for row in with_ratios([{"note": "left out"}, {"median": 2.0}])] == [None, None]


@pytest.fixture
def written(monkeypatch, tmp_path):
    """A ledger on a file, of a clean commit, and the function that says which contenders the file has."""
    here = dict.fromkeys(records.SAME, "x") | {"date": "2000-01-01"}
    monkeypatch.setattr(ledger.records, "environment", lambda device: here)
    monkeypatch.setattr(ledger, "measure_rates", lambda device, threads: RATES)
    out = tmp_path / "rows.csv"

    def make(again=False):
        return Ledger(CPU, 0.001, out, again)

    return make, lambda: [(r["contender"], r["ratio"]) for r in read(out) if r["metric"] == "time"]


def test_a_second_run_keeps_the_ceilings_of_the_file(written, monkeypatch):
    make, _ = written
    make().rates  # noqa: B018
    monkeypatch.setattr(ledger, "measure_rates", lambda device, threads: pytest.fail("measured anew"))
    assert make(again=True).rates == RATES


def row(contender, median):
    return {"set": "g", "contender": contender, "metric": "time", "median": median}


def test_a_group_is_written_whole_or_not_at_all(written):
    make, rows = written
    book = make()
    assert book.rates is RATES and rows() == []
    book.add("g", 1, 2, row(OURS, 1.0))
    assert rows() == [] and not book.has("g")
    book.add("g", 0, 2, row(PLAIN, 2.0))
    assert rows() == [(PLAIN, "1"), (OURS, "0.5")]
    assert not book.has("g")  # its own rows are no reason to skip the rest of a group
    assert make().has("g") and not make().has("other") and not make(again=True).has("g")


class Clock:
    """In place of pytest-benchmark's fixture: takes note of what it is asked to time."""

    enabled = True

    def __init__(self):
        self.rounds = 0
        self.stats = self

    @property
    def data(self):
        return [1e-3] * self.rounds

    def pedantic(self, run, args, setup, rounds):
        self.rounds = rounds
        self.stats.stats = self
        run(*args)


def primitive(g, contenders, place, book):
    clock = Clock()
    bench_primitives.test_primitive(g, contenders, place, clock, book)
    return clock.rounds


def test_a_wrong_form_fails_and_its_group_is_not_reported(written):
    make, rows = written
    g = groups(CPU)["Newton-Schulz, 3 of 12x20, r=4"]
    plain, ours, theirs = g.contenders(CPU)
    broken = replace(ours, run=lambda i: 1.1 * ours.run(i))
    primitive(g, [plain, ours, theirs], 0, right := make())
    primitive(g, [plain, ours, theirs], 1, right)
    primitive(g, [plain, ours, theirs], 2, right)
    assert len(rows()) == 3  # of a run before
    book, contenders = make(again=True), [plain, broken, theirs]
    assert primitive(g, contenders, 0, book) >= 3
    with pytest.raises(AssertionError, match="Newton-Schulz, 3 of 12x20, r=4, pro-klshampoo torch: error "):
        primitive(g, contenders, 1, book)
    primitive(g, contenders, 2, book)
    assert rows() == []
    primitive(g, [plain, ours, theirs], 1, book)
    assert [name for name, _ in rows()] == [PLAIN, OURS, KL]


def test_what_cannot_run_or_takes_too_long_is_left_out_with_its_reason(written, monkeypatch):
    make, rows = written
    g = groups(CPU)["eigenvalue EMA, 3 of 12x20, r=4"]
    plain, ours, theirs = g.contenders(CPU)
    book, contenders = make(), [plain, replace(ours, obstacle="no such device"), theirs]
    primitive(g, contenders, 0, book)
    with pytest.raises(pytest.skip.Exception, match="no such device"):
        primitive(g, contenders, 1, book)
    monkeypatch.setattr(bench_primitives, "once", lambda c, i, device: 60.0)
    with pytest.raises(pytest.skip.Exception, match="a call took 60.0 s, may take 5"):
        primitive(g, contenders, 2, book)
    found = records.read(book._path)[-2:]
    assert [(r["median"], r["ratio"], r["note"].partition(";")[0]) for r in found] == [
        ("", "", "left out: no such device"),
        ("", "", "left out: a call took 60.0 s, may take 5"),
    ]


@pytest.mark.parametrize("took, rounds", [(1e-6, 50), (1e-4, 10), (1.0, 3)])
def test_rounds_fill_the_time_within_their_bounds(took, rounds, written, monkeypatch):
    monkeypatch.setattr(bench_primitives, "once", lambda c, i, device: took)
    g = groups(CPU)["eigenvalue EMA, 3 of 12x20, r=4"]
    assert primitive(g, g.contenders(CPU), 0, written[0]()) == rounds


def test_a_gpus_clock_counts_from_event_to_event(monkeypatch):
    class Event:
        now = 0.0

        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            Event.now += 5.0
            self.at = Event.now

        def synchronize(self):
            self.done = True

        def elapsed_time(self, later):
            assert later.done
            return later.at - self.at  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = micro.timer(CUDA)
    start = clock()
    assert clock() - start == pytest.approx(5e-3)


def test_the_summary_shows_times_and_ratios(tmp_path, capsys):
    rows = [row(PLAIN, 4.0), row(OURS, 2.0) | {"backend": "torch"}, row(KL, 40.0) | {"backend": "torch"}]
    rows += [row(PLAIN, 4.0) | {"set": "h"}, row(OURS, None) | {"set": "h", "backend": "torch"}]
    records.write(tmp_path / micro_report.RECORD, [r | {"shapes": "2x3x4"} for r in rows])
    assert summary.main([str(tmp_path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()[2:4]] == [
        "| g | 4.00 | 2.00 (0.50) | 40.00 (10.00) |".split(),
        "| h | 4.00 | - | - |".split(),
    ]
    assert len(micro_report.table(records.read(tmp_path / micro_report.RECORD), ["9x9x9"]).splitlines()) == 2
    (tmp_path / micro_report.RECORD).unlink()
    values = {"set": "tiny/4", "contender": "muon", "metric": "state", "unit": "bytes", "dtype": "float32"}
    records.write(tmp_path / "memory.csv", [values | {"median": 3_000_000}])
    assert summary.main([str(tmp_path)]) == 0
    assert ["|", "Muon", "|", "3", "|"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert summary.main([str(tmp_path / "empty")]) == 2
    assert capsys.readouterr().err.startswith("error: ") and not (tmp_path / "empty").exists()
