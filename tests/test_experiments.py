"""The commands of ``bench.study`` end to end on a model that trains in a second: rows, Ctrl-C, wrong input."""

import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bench import rows, workers
from bench.optimizers import Hyper
from bench.rows import frame
from bench.study import __main__ as command
from bench.study import lengths, size
from bench.study.comparisons import draw
from bench.study.protocol import Tuning
from bench.study.scales import SCALES
from bench.study.spectra import WATCHINGS
from bench.study.study import Study
from bench.training.run import Run
from tests.commands import ROOT
from tests.experiments import MICRO

PNG = b"\x89PNG"
BRIEF = ("--starts", "auto", "--lr", "adamw=0.003", "pro-klshampoo=0.01,0.02", "kl-shampoo=0.005")
MUON = ("muon=0.02",)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = ["the", "optimizer", "turns", "gradient", "matrix", "into", "step", "and", "waits", "\n"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    return path


def run(text, out, name, *options):
    """The exit status of a command on the micro model."""
    training = ["--data", text, *([] if "--jobs" in options else ["--jobs", 1])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "tiny", (MICRO,))
        return command.main([name, "--out", str(out), *map(str, [*training, *options])])


@pytest.fixture
def experiment(text, tmp_path):
    return lambda name, *options, out="out": run(text, tmp_path / out, name, *options)


@pytest.fixture(scope="module")
def main_results(text, tmp_path_factory):
    """Of the main table on two seeds."""
    out = tmp_path_factory.mktemp("main")
    assert run(text, out, "main", "--seeds", 0, 1, *BRIEF, *MUON) == 0
    return out


@pytest.mark.slow
def test_the_main_table_has_every_method_with_its_figures_and_every_search_what_it_selected(main_results):
    final = frame(main_results / "main.csv")
    assert list(final["optimizer"]) == ["adamw", "muon", "kl-shampoo", *["pro-klshampoo"] * 3]
    assert list(final["rank"].dropna()) == list(MICRO.ranks) and (final["seeds"] == "0 1").all()
    assert final["validation_loss"].between(0, math.log(256)).all() and (final["optimizer_ms"] > 0).all()
    curves = frame(main_results / "main-curves.csv")
    assert len(curves) == 6 * 2 * 3 and list(curves["step"][:3]) == [0, 2, 4]  # optimizers, seeds, evaluations
    assert len(frame(main_results / "main-orderings.csv")) == 9
    searches = frame(main_results / "main-sweep.csv").groupby(["optimizer", "rank"], dropna=False)
    assert len(searches) == len(final)
    for (method, rank), tried in searches:
        (_, chosen), *rest = tried[tried["selected"] != ""].iterrows()
        own = final[(final["optimizer"] == method) & ((final["rank"] == rank) | final["rank"].isna())].iloc[0]
        assert not rest and chosen["validation_loss"] == tried["validation_loss"].min()
        assert (chosen["lr"], f"{chosen['alpha_kl']}") == (own["lr"], f"{own['alpha_kl']}")
        # The first seed is that of the sweep, so both trained alike.
        assert float(own["validation_loss_per_seed"].split()[0]) == pytest.approx(chosen["validation_loss"], abs=1e-5)


@pytest.mark.slow
def test_a_second_command_trains_nothing_that_is_there_and_repeats_its_files(main_results, text, monkeypatch):
    before = {path.name: path.read_bytes() for path in main_results.glob("*.csv")}
    begun, start = [], Run.__init__

    def recording(run, settings, *rest):
        begun.extend(h.method for h in settings.hyper.values())
        start(run, settings, *rest)

    monkeypatch.setattr(Run, "__init__", recording)
    assert run(text, main_results, "main", "--seeds", 0, 1, *BRIEF, *MUON) == 0
    assert not begun and {path.name: path.read_bytes() for path in main_results.glob("*.csv")} == before
    for path in (figures := sorted(main_results.glob("*.png"))):
        path.unlink()
    draw(main_results)  # from the files alone
    assert len(figures) == 2 and all(path.read_bytes().startswith(PNG) for path in figures)
    # The ablation shares AdamW, KL-Shampoo and Pro-KLShampoo with the main table; their times are not compared.
    assert run(text, main_results, "ablation", "--seeds", 0, 1, *BRIEF) == 0
    assert set(begun) == {"smok-hop", "subspace-only", "complement-only"}
    ablation, main = (frame(main_results / f"{name}.csv") for name in ("ablation", "main"))
    ablation = ablation.set_index("optimizer")
    assert ablation["validation_loss"]["pro-klshampoo"] == main[main["rank"] == 8]["validation_loss"].item()
    assert ablation["lr"]["subspace-only"] == pytest.approx(1.5 * ablation["lr"]["pro-klshampoo"])
    assert not {"model_ms", "training_seconds", "seconds_to_kl_shampoo_loss"} & set(ablation.columns)


@pytest.mark.slow
def test_cosmos_is_compared_at_matched_ranks_in_parallel_runs_too(experiment, tmp_path):
    options = ("cosmos", "--seeds", 0, *BRIEF[:3], "adamw=0.003", "pro-klshampoo=0.01", "cosmos=0.001")
    assert experiment(*options) == 0
    # The second command finds the sweep but for one unit; this and the final runs train in processes of their own.
    swept = shutil.copytree(tmp_path / "out/runs/sweep", tmp_path / "two/runs/sweep")
    min(swept.glob("pro-klshampoo-*.pt")).unlink()
    assert experiment(*options, "--jobs", 2, out="two") == 0
    every = [(method, rank) for rank in (4, 8) for method in ("cosmos", "pro-klshampoo")]
    for name in ("cosmos", "cosmos-sweep"):
        one, two = (frame(tmp_path / out / f"{name}.csv") for out in ("out", "two"))
        assert one["validation_loss"].equals(two["validation_loss"])
        assert name != "cosmos" or list(zip(one["optimizer"], one["rank"], strict=True)) == every


def tune_to(lr):
    """Stands in for the searches."""
    return lambda study, kinds: Tuning(
        {k: Hyper(k.method, lr, 3e-3, rank=k.rank, alpha_kl=0.01, init_eigenvalue=k.start) for k in kinds}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHINGS)
def test_spectra_are_drawn_and_resumed_alike_after_ctrl_c(experiment, name, tmp_path, monkeypatch):
    monkeypatch.setattr(Study, "tune", tune_to(0.01))
    options = ("--steps", 24, "--starts", "auto")
    file = f"{WATCHINGS[name].file}-gpt2-micro"
    assert experiment(name, *options, out="whole") == 0
    advance = Run.advance

    def interrupted(run):
        if run.done == 20 and any(trainee.record.observed for trainee in run.trainees):  # in the last window
            monkeypatch.setattr(Run, "advance", advance)
            signal.raise_signal(signal.SIGINT)
        advance(run)

    monkeypatch.setattr(Run, "advance", interrupted)
    assert experiment(name, *options, out="halves") == 130
    assert not (tmp_path / f"halves/{file}.csv").exists()
    assert experiment(name, *options, out="halves") == 0
    found = frame(tmp_path / f"whole/{file}.csv")
    assert frame(tmp_path / f"halves/{file}.csv").equals(found)
    assert (tmp_path / f"whole/{file}.png").read_bytes().startswith(PNG)
    assert set(found["step"]) == {6, 12, 24} and set(found["factor"]) == set(WATCHINGS[name].factors)
    assert (found["largest_over_tail_mean"] >= 1).all() and found["size"].isin([16, 64]).all()


def test_spectra_of_one_that_diverged_too_early_are_an_error(experiment, monkeypatch, capsys):
    monkeypatch.setattr(Study, "tune", tune_to(1e40))
    assert experiment("spectra", "--steps", 24, "--starts", "auto") == 2
    error = capsys.readouterr().err
    assert re.search("KL-Shampoo on gpt2-micro diverged at step [2-6], before the first look .* after step 6", error)


@pytest.mark.slow
def test_ctrl_c_ends_parallel_runs_after_a_step_and_they_go_on(text, tmp_path):
    """In a session of its own, since Ctrl-C goes to all processes of a terminal's foreground."""
    options = "--model gpt2 --steps 3000 --eval-windows 2 --batch 1 --jobs 2 --seeds 0 --starts auto".split()
    arguments = ["-m", "bench.study", "ablation", "--data", text, "--out", tmp_path, *options]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
    try:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGINT, before)
    folder = tmp_path / "runs/sweep"
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
    assert error.count("\n") <= 4 and "Traceback" not in error and workers.GOES_ON in error
    assert 1 <= len(list(folder.glob("unfinished-*.pt"))) <= 2


@pytest.fixture
def threads(monkeypatch):
    """The pool's processes as threads, so that what a test has changed is there, too."""
    monkeypatch.setattr(workers, "one_run_each", ThreadPoolExecutor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lengths", "size"])
def test_runs_that_are_worked_off_are_written_as_they_end_and_not_trained_again(name, threads, tmp_path, monkeypatch):
    wide = size.Trial("a change", "base", size.FORMS["pro-klshampoo"].default)
    monkeypatch.setattr(size, "LARGER", MICRO)
    monkeypatch.setattr(size, "size", lambda known: iter([wide]))
    monkeypatch.setitem(lengths.MODELS, "gpt2-tiny", MICRO)
    options = ["--models", "gpt2-tiny", "--lengths", "1", "--forms", "adamw", "--seeds", "0"]
    arguments = [name, *(options if name == "lengths" else []), "--out", tmp_path, "--folder", tmp_path, "--jobs", "1"]
    monkeypatch.setattr("bench.study.units.train", in_a_thread)
    assert command.main(list(map(str, arguments))) == 0
    found = frame(tmp_path / f"{name}.csv")
    assert found["validation_loss"].between(1, 6).all() and found["data_sha256"].str.len().eq(64).all()
    if name == "lengths":
        assert {unit.steps for unit in lengths.units(found)} == {1} and (found["state_mb"] > 0).all()
        assert set(frame(tmp_path / "lengths-curves.csv")["step"]) == {0, 1}
    else:
        assert list(found["case"]) == ["a change"] and list(found["base"]) == ["base"] and list(found["steps"]) == [4]
    before = (tmp_path / f"{name}.csv").read_bytes()
    monkeypatch.setattr("bench.study.units.train", lambda *given: pytest.fail("trained again"))
    assert command.main(list(map(str, arguments))) == 0 and (tmp_path / f"{name}.csv").read_bytes() == before


def in_a_thread(run, path, *given):
    """Trains where no signal can be asked for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while not run.finished:
        run.advance()


def test_a_run_that_is_killed_between_its_files_is_trained_again(threads, tmp_path, monkeypatch):
    written = []

    def killed(path, rows, key):
        if written:
            raise KeyboardInterrupt
        written.append(path.name)

    monkeypatch.setitem(lengths.MODELS, "gpt2-tiny", MICRO)
    monkeypatch.setattr("bench.study.units.train", in_a_thread)
    monkeypatch.setattr(rows, "upsert", killed)
    arguments = ["lengths", f"--out={tmp_path}", f"--folder={tmp_path}", "--models", "gpt2-tiny", "--lengths", "1"]
    assert command.main([*arguments, "--forms", "adamw", "--seeds", "0", "--jobs", "1"]) == 130
    assert written == ["lengths-curves.csv"]  # lengths.csv says what is done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("main --model bert", "--model bert is the beginning of no model; there are gpt2-micro"),
        ("ablation --lr subspace-only=0.1,0.2", "--lr subspace-only: is not searched; give one rate"),
        ("cosmos --lr muon=0.02", "--lr muon: cosmos trains adamw, cosmos, pro-klshampoo; leave it out"),
        ("main --scale paper --device cpu", "--scale paper has other data for each family; give --model gpt2 or llama"),
        ("main --scale paper --model llama --lr muon=1 --device cpu", "takes the paper's rates; add --tune"),
        ("main --scale paper --model llama --device cpu --data {text}", "no token shards, which llama-134m needs"),
        ("ablation --scale paper --model gpt2-350m --device cpu", "paper has no ablation on gpt2-350m; .*llama-450m"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(experiment, text, capsys, arguments, message):
    name, *options = arguments.format(text=text).split()
    assert experiment(name, *options) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and re.search(message, printed.err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_a_scale_for_a_gpu_asks_for_one_and_processes_for_a_batch_that_they_can_share(experiment, capsys, monkeypatch):
    assert command.main(["main", "--scale", "small"]) == 2
    assert "no GPU is visible to torch for --scale small; give --device cpu" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert experiment("main") == 2
    assert "4 sequences, as gpt2-micro has, is no multiple of WORLD_SIZE = 3" in capsys.readouterr().err
