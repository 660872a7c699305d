"""Runs of an experiment: resumed bit for bit, told apart, in processes of their own; the commands of bench.study."""

import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from pandas import DataFrame, concat

from bench import rows, workers
from bench.models import gpt2
from bench.rows import frame
from bench.study import __main__ as command
from bench.study import comparisons, lengths, runs, tables
from bench.study.scales import PAPER, TINY
from bench.training import loop
from bench.training.run import Record, Run
from bench.training.shards import write_shard
from bench.training.sources import open_source
from bench.workers import GOES_ON, one_run_each
from tests.commands import ROOT
from tests.experiments import HYPERS, MICRO, text_in

LONGER = replace(MICRO, steps=14)


@pytest.fixture
def text(tmp_path):
    return text_in(tmp_path)


def begun(text, *keys, **changes):
    """Runs side by side, before their first step."""
    return [Run(replace(LONGER, **changes), HYPERS[key], 0, open_source(text, 16)) for key in keys]


def losses(run):
    return run.record.losses, run.record.validation


@pytest.mark.parametrize("between", [60.0, 0.0])
def test_runs_ended_by_ctrl_c_go_on_bit_for_bit(tmp_path, text, between, monkeypatch):
    whole, path, turns, advance = begun(text, "pro", "muon"), tmp_path / "folder" / "halves.pt", [], Run.advance
    loop.train(whole, tmp_path / "whole.pt", shown=False)

    def interrupted(run):
        turns.append(run.name)
        if len(turns) == 21:  # the first of two in the eleventh step, beyond the refresh of the eigenbases
            signal.raise_signal(signal.SIGINT)
        advance(run)

    monkeypatch.setattr(Run, "advance", interrupted)
    monkeypatch.setattr(loop, "BETWEEN", between)
    with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        loop.train(begun(text, "pro", "muon"), path, shown=False)
    assert len(turns) == 22 and [own["done"] for own in torch.load(path)] == [11, 11]
    for _ in range(2):  # runs that have ended are not trained again
        resumed = begun(text, "pro", "muon")
        loop.train(resumed, path, shown=False)
        assert len(turns) == 2 * 14 and list(map(losses, resumed)) == list(map(losses, whole))


def test_a_crash_leaves_the_last_checkpoint(tmp_path, text, monkeypatch):
    own, path = begun(text, "muon"), tmp_path / "a.pt"
    loop.save(own, path)
    before = path.read_bytes()

    def crash(content, file):
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        loop.save(own, path)
    assert path.read_bytes() == before


def test_what_decides_the_losses_decides_the_checkpoint(tmp_path, text):
    source, own = open_source(text, 16), runs.Task(LONGER, text, "pro", HYPERS["pro"], 0, tmp_path)
    others = [
        replace(own, seed=1),
        replace(own, hyper=replace(own.hyper, lr=0.03)),
        replace(own, hyper=replace(own.hyper, beta2=0.8)),
        replace(own, scale=replace(LONGER, batch=8)),
        replace(own, scale=replace(LONGER, autocast=True)),
    ]
    paths = [task.checkpoint(source) for task in (own, *others)] + [own.checkpoint(replace(source, sha256="other"))]
    assert len(set(paths)) == len(paths)
    assert replace(own, device="cuda:0").checkpoint(source) == replace(own, device="cuda:1").checkpoint(source)


# Largest relative difference of two losses in 14 steps, from the same sums in another order. Measured on 4 sequences in
# parts of 1, 2 and 3: 2e-7, and 9e-4 where Newton-Schulz rounds to bfloat16.
ROUNDING = {"adamw": 1e-6, "kl": 1e-6, "pro": 4e-3}


def test_parts_of_a_batch_give_what_the_whole_gives(tmp_path, text):
    whole, parts = (begun(text, *ROUNDING, micro_batch=size) for size in (None, 3))
    for own in (whole, parts):
        loop.train(own, tmp_path / f"{own[0].scale.micro_batch}.pt", shown=False)
    for key, of, expected in zip(ROUNDING, parts, whole, strict=True):
        assert losses(of) != losses(expected)  # they are not the same sums
        found, wanted = (
            torch.tensor([*of, *(loss for _, loss in at)]).double() for of, at in map(losses, (of, expected))
        )
        assert found.shape == wanted.shape and ((found - wanted).abs() / wanted).max() <= ROUNDING[key]


@pytest.mark.gpu
def test_a_run_on_a_gpu_knows_its_peak_of_memory(tmp_path, text):
    here = runs.Task(LONGER, text, "pro", HYPERS["pro"], 0, tmp_path)
    record, where, _ = replace(here, scale=replace(LONGER, autocast=True), device="cuda:0")()
    assert where["peak_gib"] * 2**30 > record.state_bytes
    # bfloat16's 2^-8 on either side.
    assert record.final_loss == pytest.approx(here()[0].final_loss, rel=0.05)


# From runs to rows and tables


def test_figures_leave_out_an_optimizers_first_step():
    record = Record([5.0, 3.0, 2.0], [9.0, 1.0, 2.0], [8.0, 3.0, 5.0], [(0, 9.0), (3, 2.0)], state_bytes=5_000_000)
    own = {"validation_loss": 2.0, "model_ms": 4000.0, "optimizer_ms": 4000.0, "state_mb": 5.0, "diverged_at": None}
    assert runs.figures(record) == own
    along = [{"step": 0, "validation_loss": 9.0, "seconds": 0}, {"step": 3, "validation_loss": 2.0, "seconds": 28.0}]
    assert runs.curve(record) == along


def test_a_table_has_means_errors_and_dashes():
    def row(optimizer, rank, seed, loss, **more):
        own = {"model": "m", "optimizer": optimizer, "rank": rank, "seed": seed, "validation_loss": loss, "lr": 0.1}
        return own | {"model_ms": 1.0, "optimizer_ms": 2.0, "state_mb": 3.0, "diverged_at": ""} | more

    found = [row("kl-shampoo", None, seed, 2.0) for seed in (0, 1)]
    found += [row("pro-klshampoo", 8, 0, 1.0), row("pro-klshampoo", 8, 1, 2.5, optimizer_ms=math.nan)]
    found += [row("muon", None, 0, math.nan, diverged_at="7"), row("muon", None, 1, 2.25)]
    found = DataFrame(found).astype({"rank": "Int64"})
    ends = found.assign(seconds=8.0)
    starts = ends.assign(validation_loss=3.0, seconds=0.0)
    curves = concat([starts, ends.dropna(subset="validation_loss")])
    head, _, *lines = tables.table_of(found, curves).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, *lines)]
    assert cells == [
        ["model", "optimizer", "lr", "validation loss", "model ms/step", "optimizer ms/step", "state MB",
         "s to KL-Shampoo's loss"],
        ["m", "KL-Shampoo", "0.1", "2.0000 ± 0.0000", "1.0", "2.0", "3.00", "8.0"],
        ["m", "Pro-KLShampoo, r = 8", "0.1", "1.7500 ± 0.7500", "1.0", "-", "3.00", "-"],
        ["m", "Muon", "0.1", "diverged at step 7", "1.0", "2.0", "3.00", "-"],
    ]  # fmt: skip


# Every run has a process of its own, which Ctrl-C ends after its step and leaves nothing behind


COMMAND = """
import sys, time
from functools import partial
from pathlib import Path

from bench.command import command
from bench.workers import asked_to_stop, work_off


def run(path):
    with asked_to_stop() as stop:
        path.write_text("begun")
        while not stop():
            time.sleep(0.01)
        path.write_text("whole")


@command
def main(argv):
    work_off(lambda: "abc", lambda name: partial(run, Path(argv[0], name)), print, 2)


if __name__ == "__main__":
    sys.exit(main())
"""


def test_every_run_has_a_process_of_its_own():
    with one_run_each(1) as pool:
        assert len({pool.submit(os.getpid).result() for _ in range(2)}) == 2


def test_ctrl_c_ends_runs_after_their_step(tmp_path):
    """The command has a session of its own, since Ctrl-C goes to all processes of a terminal's foreground."""
    script, folder = tmp_path / "script.py", tmp_path / "runs"
    script.write_text(COMMAND)
    folder.mkdir()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        process = subprocess.Popen(
            [sys.executable, script, folder], env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    deadline = time.monotonic() + 120
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, error = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 130 and error == f"{GOES_ON}\n"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a": "whole", "b": "whole"}


# The commands end to end on models that train in a second


MINI = {"config": gpt2(1, 16, 2, context=16), "steps": 4, "evaluations": 2, "eval_windows": 4, "batch": 4}
"""The paper's GPT-2 124M, so small that it trains in a second."""


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    path = tmp_path_factory.mktemp("shard") / "tokens.bin"
    write_shard(path, np.random.default_rng(0).integers(0, 256, 4000))
    return path


def run(shard, out, name, *options_):
    """The exit status of a command whose first model is small."""
    small = (replace(PAPER[0], **MINI), *PAPER[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparisons, "PAPER", small)
        given = ["--device", "cpu", "--data", shard, "--out", out, "--folder", out / "unfinished", *options_]
        return command.main([name, *map(str, given)])


@pytest.fixture
def threads(monkeypatch):
    """The pool's processes as threads, so that what a test has changed is there, too."""
    monkeypatch.setattr(workers, "one_run_each", ThreadPoolExecutor)
    monkeypatch.setattr(loop, "asked_to_stop", lambda: nullcontext(lambda: False))  # signals are the main thread's
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_a_comparison_has_all_runs_and_repeats_none(shard, tmp_path, monkeypatch, capsys):
    begun, start = [], Run.__init__

    def recording(run, scale, hyper, *rest):
        begun.append(hyper.method)
        start(run, scale, hyper, *rest)

    monkeypatch.setattr(Run, "__init__", recording)
    given = ("--model", "gpt2-124m", "--seeds", 0, 1)
    assert run(shard, tmp_path, "main", *given) == 0
    final = frame(tmp_path / "runs.csv")
    methods = ["adamw", "muon", "kl-shampoo", *["pro-klshampoo"] * 3]
    assert list(final["optimizer"]) == begun == methods * 2 and list(final["seed"]) == [0] * 6 + [1] * 6
    assert list(final["rank"].dropna()) == [32, 64, 128] * 2 and list(final["lr"][:4]) == [2e-3, 2e-2, 2e-3, 2e-2]
    assert final["validation_loss"].between(0, 2 * math.log(256)).all() and (final["optimizer_ms"] > 0).all()
    assert (final["data_sha256"].str.len() == 64).all() and (final["width"] == 16).all()
    curves = frame(tmp_path / "curves.csv")
    assert len(curves) == 6 * 2 * 3 and list(curves["step"][:3]) == [0, 2, 4]  # methods, seeds, evaluations
    assert (tmp_path / "main-loss.png").read_bytes().startswith(b"\x89PNG") and not list(tmp_path.rglob("*.pt"))
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gpt2-124m")]
    assert [line.split("|")[2].strip() for line in table[2:4]] == ["KL-Shampoo", "Pro-KLShampoo, r = 32"]

    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    begun.clear()
    assert run(shard, tmp_path, "main", *given) == 0
    assert not begun and {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")} == before
    with monkeypatch.context() as patch:
        patch.setattr("prokl.__version__", "0.0.0")  # rows are of a release
        assert run(shard, tmp_path, "main", *given) == 0 and begun == methods * 2
    begun.clear()
    capsys.readouterr()
    # The ablation shares KL-Shampoo and Pro-KLShampoo with the main table.
    assert run(shard, tmp_path, "ablation", *given) == 0
    assert set(begun) == {"smok-hop", "subspace-only", "complement-only"}
    again = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| gpt2-124m")]
    assert [line.split("|")[5] for line in again if "r = 128" in line and "Pro" in line] == [table[5].split("|")[5]]


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_finished_runs_are_written_and_not_trained_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TINY, "gpt2-tiny", MICRO)
    options = ["--models", "gpt2-tiny", "--lengths", "1", "--forms", "adamw", "--seeds", "0"]
    arguments = ["lengths", *options, f"--out={tmp_path}", f"--folder={tmp_path}", "--jobs", "1"]
    assert command.main(arguments) == 0
    found = frame(tmp_path / "lengths.csv")
    assert found["validation_loss"].between(1, 6).all() and found["data_sha256"].str.len().eq(64).all()
    assert {unit.steps for unit in lengths.units(found)} == {1} and (found["state_mb"] > 0).all()
    assert set(frame(tmp_path / "lengths-curves.csv")["step"]) == {0, 1}
    before = (tmp_path / "lengths.csv").read_bytes()
    monkeypatch.setattr(Run, "advance", lambda run: pytest.fail("trained again"))
    assert "has the row of every run" not in capsys.readouterr().out
    assert command.main(arguments) == 0 and (tmp_path / "lengths.csv").read_bytes() == before
    said = f"{tmp_path / 'lengths.csv'} has the row of every run: nothing is trained. --out takes another folder.\n"
    assert capsys.readouterr().out == said


@pytest.mark.usefixtures("threads")
def test_a_run_that_is_killed_between_its_files_is_trained_again(tmp_path, monkeypatch):
    written = []

    def killed(path, rows, key):
        if written:
            raise KeyboardInterrupt
        written.append(path.name)

    monkeypatch.setitem(TINY, "gpt2-tiny", MICRO)
    monkeypatch.setattr(rows, "upsert", killed)
    arguments = ["lengths", f"--out={tmp_path}", f"--folder={tmp_path}", "--models", "gpt2-tiny", "--lengths", "1"]
    assert command.main([*arguments, "--forms", "adamw", "--seeds", "0", "--jobs", "1"]) == 130
    assert written == ["lengths-curves.csv"]  # lengths.csv says what is done
    assert list(tmp_path.glob("adamw-*.pt"))
