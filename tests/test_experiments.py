"""The commands of ``bench.study`` end to end on models that train in a second: their rows."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bench import rows
from bench.models import gpt2
from bench.rows import frame
from bench.study import __main__ as command
from bench.study import comparisons, lengths
from bench.study.scales import PAPER, TINY
from bench.training.run import Run
from bench.training.shards import write_shard
from tests.experiments import MICRO, processes_as_threads

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


@pytest.fixture(autouse=True)
def threads():
    with processes_as_threads():
        yield


@pytest.mark.slow
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
def test_finished_runs_are_written_and_not_trained_again(tmp_path, monkeypatch):
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
    assert command.main(arguments) == 0 and (tmp_path / "lengths.csv").read_bytes() == before


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
