"""The experiments' commands end to end on a model that trains in a second: files, reruns, Ctrl-C, wrong input."""

import csv
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time

import pytest
import torch

from bench.errors import UsageError
from bench.experiments import __main__ as command
from bench.experiments import pool
from bench.experiments.comparisons import draw
from bench.experiments.protocol import Tuning
from bench.experiments.scales import SCALES
from bench.experiments.spectra import WATCHINGS
from bench.experiments.study import Study
from bench.training.loop import Interrupt
from bench.training.run import Run
from bench.training.settings import Hyper
from tests.commands import ROOT
from tests.experiments import MICRO

PNG = b"\x89PNG"


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """Runs a command on the micro model, with extra options; returns the exit status."""
    monkeypatch.setitem(SCALES, "tiny", (MICRO,))
    words = ["the", "optimizer", "turns", "gradient", "matrix", "into", "step", "and", "waits", "\n"]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(words, k=2000)))

    def run(name, *options, out="out"):
        training = [] if name in command.STILL else ["--data", text, "--jobs", 1]
        return command.main([name, "--out", str(tmp_path / out), *map(str, [*training, *options])])

    run.folder, run.text = tmp_path, text
    return run


def _rows(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _loss(row):
    return float(row["validation_loss"])


@pytest.mark.slow
def test_the_main_table_has_every_contender_under_both_starts(experiment, capsys):
    assert experiment("main") == 0
    out, printed = experiment.folder / "out", capsys.readouterr().out
    rows = _rows(out / "main.csv")
    pro = [("pro-klshampoo", str(rank)) for rank in MICRO.ranks]
    wanted = [("adamw", ""), ("muon", ""), ("kl-shampoo", ""), *pro]
    for start in ("auto", "0.1"):
        assert [(r["optimizer"], r["rank"]) for r in rows if r["start"] == start] == wanted
    for row in rows:
        losses = [float(loss) for loss in row["validation_loss_per_seed"].split()]
        assert row["seeds"] == "0 1 2" and len(losses) == 3
        # The single losses are written with five decimals.
        assert _loss(row) == pytest.approx(statistics.fmean(losses), abs=1e-5)
        assert float(row["validation_loss_se"]) == pytest.approx(statistics.stdev(losses) / math.sqrt(3), abs=1e-5)
        assert 0 < _loss(row) < math.log(256)
        assert float(row["model_ms"]) > 0 < float(row["optimizer_ms"]) and row["torch"] == torch.__version__
        if row["optimizer"] in ("kl-shampoo", "muon"):
            target = row["optimizer"].replace("-", "_")
            assert float(row[f"seconds_to_{target}_loss"]) <= 1.0001 * float(row["training_seconds"])
    assert {r["start"] for r in _rows(out / "main-sweep.csv") if r["optimizer"] == "kl-shampoo"} == {"auto", "0.1"}
    curves = _rows(out / "main-curves.csv")
    assert len(curves) == (2 + 4 * 2) * 3 * 3  # contenders, seeds, evaluations
    assert [r["step"] for r in curves[:3]] == ["0", "2", "4"] and curves[0]["train_loss"] == ""
    for figure in ("main-loss.png", "main-sweep.png"):
        assert (out / figure).read_bytes().startswith(PNG)
    assert "| Pro-KLShampoo, r = 8" in printed
    assert "s to KL-Shampoo's loss" in printed and "s to Muon's loss" in printed
    for figure in ("main-loss.png", "main-sweep.png"):
        (out / figure).unlink()
    draw(out)
    assert sorted(path.name for path in out.glob("*.png")) == ["main-loss.png", "main-sweep.png"]


@pytest.mark.slow
def test_every_search_says_what_was_tried_and_selected(experiment):
    assert experiment("main", "--seeds", 0, "--starts", "auto") == 0
    rows = _rows(experiment.folder / "out/main-sweep.csv")
    final = {(r["optimizer"], r["rank"]): r for r in _rows(experiment.folder / "out/main.csv")}
    searches = {}
    for row in rows:
        searches.setdefault((row["optimizer"], row["rank"]), []).append(row)
    assert searches.keys() == final.keys()
    for name, tried in searches.items():
        (chosen,) = [row for row in tried if row["selected"]]
        losses = [_loss(row) for row in tried if row["validation_loss"]]
        assert _loss(chosen) == min(losses)
        assert (chosen["lr"], chosen["alpha_kl"]) == (final[name]["lr"], final[name]["alpha_kl"])
        # The one final seed is that of the sweep, so both trained alike.
        assert _loss(chosen) == pytest.approx(_loss(final[name]), abs=1e-6)


@pytest.mark.slow
def test_a_second_command_trains_nothing_that_is_there_and_repeats_its_files(experiment, monkeypatch):
    assert experiment("main", "--starts", "auto", "--seeds", 0, 1) == 0
    out = experiment.folder / "out"
    before = {path.name: path.read_bytes() for path in out.glob("*.csv")}
    begun, start = [], Run.__init__

    def recording(run, settings, *rest):
        begun.append([h.method for h in settings.hyper.values()])
        start(run, settings, *rest)

    monkeypatch.setattr(Run, "__init__", recording)
    assert experiment("main", "--starts", "auto", "--seeds", 0, 1) == 0
    assert not begun
    assert {path.name: path.read_bytes() for path in out.glob("*.csv")} == before
    # The ablation shares AdamW, KL-Shampoo and Pro-KLShampoo with the main table.
    assert experiment("ablation", "--starts", "auto", "--seeds", 0, 1) == 0
    assert {method for methods in begun for method in methods} == {"smok-hop", "subspace-only", "complement-only"}
    rows = {r["optimizer"]: r for r in _rows(out / "ablation.csv")}
    main = {(r["optimizer"], r["rank"]): r for r in _rows(out / "main.csv")}
    assert rows["pro-klshampoo"]["validation_loss"] == main["pro-klshampoo", "8"]["validation_loss"]
    for method in ("subspace-only", "complement-only"):
        assert float(rows[method]["lr"]) == pytest.approx(1.5 * float(rows["pro-klshampoo"]["lr"]))
        assert rows[method]["alpha_kl"] == rows["pro-klshampoo"]["alpha_kl"]
    # Its contenders did not train side by side, so their times are not compared.
    timing = {"model_ms", "optimizer_ms", "training_seconds", "seconds_to_kl_shampoo_loss"}
    assert timing <= main["muon", ""].keys() and not timing & rows["smok-hop"].keys()
    assert "seconds" not in _rows(out / "ablation-curves.csv")[0]


@pytest.mark.slow
def test_orderings_are_differences_paired_by_seed(experiment):
    assert experiment("ablation", "--starts", "auto") == 0
    out = experiment.folder / "out"
    losses = {
        r["optimizer"]: [float(x) for x in r["validation_loss_per_seed"].split()] for r in _rows(out / "ablation.csv")
    }
    first = _rows(out / "ablation-orderings.csv")[0]
    assert first["lower"].startswith("complement only") and first["higher"].startswith("subspace only")
    pairs = zip(losses["subspace-only"], losses["complement-only"], strict=True)
    differences = [high - low for high, low in pairs]
    assert float(first["difference"]) == pytest.approx(statistics.fmean(differences), abs=2e-5)
    error = statistics.stdev(differences) / math.sqrt(3)
    assert float(first["difference_se"]) == pytest.approx(error, abs=2e-5)


@pytest.mark.slow
def test_cosmos_is_compared_at_matched_ranks(experiment, capsys):
    assert experiment("cosmos", "--starts", 0.1, "--seeds", 0, 1) == 0
    rows = _rows(experiment.folder / "out/cosmos.csv")
    ranked = [(r["optimizer"], r["rank"]) for r in rows if r["rank"]]
    assert ranked == [(method, rank) for rank in ("4", "8") for method in ("cosmos", "pro-klshampoo")]
    by_name = {(r["optimizer"], r["rank"]): r for r in rows}
    difference = _loss(by_name["pro-klshampoo", "8"]) - _loss(by_name["cosmos", "8"])
    assert f"{difference:+.4f}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHINGS)
def test_spectra_are_drawn_and_resumed_alike(experiment, name, monkeypatch):
    options = ("--steps", 24, "--starts", "auto")
    file = {"spectra": "spectra-gpt2-micro", "phi": "spectra-phi-gpt2-micro"}[name]
    assert experiment(name, *options, out="whole") == 0
    advance = Run.advance

    def interrupted(run):
        if run.done == 20 and len(run.settings.hyper) == 1 and run.observed:  # in the last window
            monkeypatch.setattr(Run, "advance", advance)
            signal.raise_signal(signal.SIGINT)
        advance(run)

    monkeypatch.setattr(Run, "advance", interrupted)
    assert experiment(name, *options, out="halves") == 130
    assert not (experiment.folder / f"halves/{file}.csv").exists()
    assert experiment(name, *options, out="halves") == 0
    rows = _rows(experiment.folder / f"whole/{file}.csv")
    assert _rows(experiment.folder / f"halves/{file}.csv") == rows
    assert (experiment.folder / f"whole/{file}.png").read_bytes().startswith(PNG)
    assert {r["step"] for r in rows} == {"6", "12", "24"}
    assert {r["factor"] for r in rows} == ({"L", "R"} if name == "spectra" else {"Phi_L"})
    for row in rows:
        assert float(row["largest_over_tail_mean"]) >= 1
        # Of so little text Phi_L may be singular; its tail has no geometric mean then.
        assert float(row["tail_am_gm"] or "1") >= 1 and (row["tail_am_gm"] or name == "phi")
        assert int(row["size"]) in (16, 64)


def test_spectra_of_one_that_diverged_too_early_are_an_error(experiment, monkeypatch, capsys):
    def tune(study, kinds):
        return Tuning({k: Hyper(k.method, 1e40, 3e-3, rank=k.rank, init_eigenvalue=k.start) for k in kinds})

    monkeypatch.setattr(Study, "tune", tune)
    assert experiment("spectra", "--steps", 24, "--starts", "auto") == 2
    error = capsys.readouterr().err
    assert re.search("KL-Shampoo on gpt2-micro diverged at step [2-6], before the first look .* after step 6", error)
    assert error.count("\n") == 1 and not list((experiment.folder / "out").glob("spectra-*.*"))


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(experiment, monkeypatch, capsys):
    assert experiment("main", "--seeds", 0, "--starts", "auto", out="whole") == 0
    advance, steps = Run.advance, []

    def interrupted(run):
        steps.append(run.done)
        if len(steps) == 30:
            signal.raise_signal(signal.SIGINT)
        advance(run)

    monkeypatch.setattr(Run, "advance", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    assert experiment("main", "--seeds", 0, "--starts", "auto", out="halves") == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "the same command goes on" in capsys.readouterr().err
    assert len(list((experiment.folder / "halves/runs/sweep").glob("*.json"))) == 7  # of four steps each
    assert experiment("main", "--seeds", 0, "--starts", "auto", out="halves") == 0
    files = [_rows(experiment.folder / f"{out}/main.csv") for out in ("whole", "halves")]
    for a, b in zip(*files, strict=True):
        assert a["validation_loss_per_seed"] == b["validation_loss_per_seed"]


@pytest.mark.slow
def test_ctrl_c_ends_parallel_runs_after_a_step_and_they_go_on(experiment):
    """In a session of its own, since Ctrl-C goes to all processes of a terminal's foreground."""
    command = [sys.executable, "-m", "bench.experiments", "ablation", "--data", experiment.text, "--model", "gpt2"]
    options = "--steps 3000 --eval-windows 2 --batch 1 --jobs 2 --seeds 0 --starts auto --out".split()
    out = experiment.folder / "parallel"
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *options, out], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    folder = out / "runs/sweep"
    deadline = time.monotonic() + 120
    try:
        # A worker that has made its folder is training.
        while not folder.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 130
    assert error.count("\n") <= 4 and "Traceback" not in error
    assert 1 <= len(list(folder.glob("unfinished-*.pt"))) <= 2


@pytest.mark.slow
def test_parallel_runs_give_what_runs_one_after_another_give(experiment):
    options = ("--seeds", 0, "--starts", "auto")
    assert experiment("ablation", *options, out="one") == 0
    assert experiment("ablation", *options, "--jobs", 2, out="two") == 0
    one, two = (_rows(experiment.folder / f"{out}/ablation.csv") for out in ("one", "two"))
    assert [r["validation_loss"] for r in one] == [r["validation_loss"] for r in two]


def test_an_error_stops_the_other_processes_before_it_waits_for_them(experiment, monkeypatch):
    told = []

    class Workers:
        def __init__(self, jobs, context, initializer, arguments):
            self.stopped = arguments[-1]

        def shutdown(self, cancel_futures):
            told.append(self.stopped.is_set())

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Workers)
    with pytest.raises(UsageError), pool.runner(MICRO, experiment.text, 2, Interrupt(), 60.0):
        raise UsageError("one of them found a damaged file")
    assert told == [True]


def test_alpha_and_memory_need_no_training(experiment, capsys):
    # Nor a GPU, nor data of one family, at any scale.
    assert experiment("alpha") == experiment("memory") == 0
    out, printed = experiment.folder / "out", capsys.readouterr().out
    paper = [r for r in _rows(out / "alpha-kl.csv") if r["model"].endswith(("24m", "34m", "50m"))]
    assert len(paper) == 12
    (up,) = [r for r in paper if (r["model"], r["layer"]) == ("gpt2-124m", "MLP up")]
    assert (up["k"], f"{float(up['low']):.2g}", f"{float(up['high']):.2g}") == ("768", "0.0013", "0.037")
    assert "0.0014 to 0.016" in printed
    rows = {(r["model"], r["optimizer"], r["rank"]): r for r in _rows(out / "memory-cost.csv")}
    kl, pro = rows["gpt2-124m", "kl-shampoo", ""], rows["gpt2-124m", "pro-klshampoo", "128"]
    matrices = [(48, 768, 768), (24, 768, 3072)]
    assert int(kl["state_elements"]) == sum(c * (m * n + 2 * (m * m + n * n) + m + n) for c, m, n in matrices)
    pro_elements = sum(c * (m * n + n * 128 + 2 * (m * m + 128**2) + m + 128 + 1) for c, m, n in matrices)
    assert int(pro["state_elements"]) == pro_elements
    assert float(pro["gflop_factorisations"]) < float(kl["gflop_factorisations"])
    for figure in ("alpha-kl.png", "memory-cost.png"):
        assert (out / figure).read_bytes().startswith(PNG)
    # Of those that are asked for.
    assert experiment("alpha", "--scale", "tiny") == experiment("memory", "--model", "llama") == 0
    assert {r["model"] for r in _rows(out / "alpha-kl.csv")} == {"gpt2-micro"}
    assert {r["model"] for r in _rows(out / "memory-cost.csv")} == {"llama-134m", "llama-450m"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tables", "invalid choice: 'tables'"),
        ("main --scale huge", "invalid choice: 'huge'"),
        ("main --model bert", "--model bert is the beginning of no model of --scale tiny; it has gpt2-micro"),
        ("memory --device cuda --steps 3", "memory trains nothing; leave --device --steps out"),
        ("spectra --starts auto 0.1", "spectra trains once; give one of --starts and one of --seeds"),
        ("phi --seeds 0 1", "phi trains once; give one of --starts and one of --seeds"),
        ("spectra --steps 1", "--steps 1: spectra looks at several steps; give at least 2"),
        ("memory --scale tiny", "memory has nothing on --scale tiny; give --scale paper"),
        ("main --vary lr", "main varies nothing; leave --vary out"),
        ("sensitivity --vary width", "invalid choice: 'width'"),
        ("sensitivity --starts auto", "sensitivity varies the start itself; leave --starts out"),
        ("main --seeds 1 1", "--seeds names one twice: 1 1; give each once"),
        ("main --seeds -1", "'-1' is not a whole number >= 0"),
        ("main --starts 0", "'0' is not a finite number > 0"),
        ("main --steps 0", "'0' is not a whole number >= 1"),
        ("main --data nowhere", "--data nowhere does not exist"),
        ("main --scale paper --device cpu", "--scale paper has other data for each family; give --model gpt2 or llama"),
        ("main --scale paper --model llama --device cpu --data {text}", "no token shards, which llama-134m needs"),
        (
            "ablation --scale paper --model gpt2-350m --device cpu",
            "the paper has no ablation on gpt2-350m; .*llama-450m",
        ),
        ("main --out {text}", "--out .*text.txt cannot be made a folder"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(experiment, capsys, arguments, message):
    name, *options = arguments.format(text=experiment.text).split()
    assert experiment(name, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert re.search(message, printed.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_scale_for_a_gpu_asks_for_one(experiment, capsys):
    assert experiment("main", "--scale", "small") == 2
    assert "no GPU is visible to torch for --scale small; give --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(("processes", "remedy"), [(3, "--batch 3 or 6"), (8, "--batch 8")])
def test_a_batch_that_the_processes_cannot_share_is_refused(experiment, monkeypatch, capsys, processes, remedy):
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert experiment("main") == 2
    error = capsys.readouterr().err
    assert f"a batch of 4 sequences, as gpt2-micro has, is no multiple of WORLD_SIZE = {processes}" in error
    assert f"give {remedy}," in error and error.count("\n") == 1
