"""The experiments' commands end to end on a model that trains in a second: files, reruns, Ctrl-C, wrong input."""

import math
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from bench.optimizers import Hyper
from bench.rows import frame
from bench.study import __main__ as command
from bench.study.comparisons import draw
from bench.study.options import STILL
from bench.study.protocol import Tuning
from bench.study.scales import SCALES
from bench.study.spectra import WATCHINGS
from bench.study.study import Study
from bench.training.run import Run
from tests.commands import ROOT
from tests.experiments import MICRO

PNG = b"\x89PNG"
BRIEFER = ("--starts", "auto", "--lr", "adamw=0.003", "pro-klshampoo=0.01,0.02")
BRIEF = (*BRIEFER, "kl-shampoo=0.005", "muon=0.02")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = ["the", "optimizer", "turns", "gradient", "matrix", "into", "step", "and", "waits", "\n"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    return path


def run(text, out, name, *options):
    """The exit status of a command on the micro model."""
    training = [] if name in STILL else ["--data", text, *([] if "--jobs" in options else ["--jobs", 1])]
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
    assert run(text, out, "main", "--seeds", 0, 1, *BRIEF) == 0
    return out


@pytest.mark.slow
def test_the_main_table_has_every_method_with_its_figures(main_results):
    rows = frame(main_results / "main.csv")
    assert list(rows["optimizer"]) == ["adamw", "muon", "kl-shampoo", *["pro-klshampoo"] * 3]
    assert list(rows["rank"].dropna()) == list(MICRO.ranks)
    assert (
        (rows["start"] == "auto").all()
        and (rows["seeds"] == "0 1").all()
        and (rows["torch"] == torch.__version__).all()
    )
    assert rows["validation_loss"].between(0, math.log(256)).all() and (rows["optimizer_ms"] > 0).all()
    kl = rows[rows["optimizer"] == "kl-shampoo"].iloc[0]
    assert kl["seconds_to_kl_shampoo_loss"] <= 1.0001 * kl["training_seconds"]
    curves = frame(main_results / "main-curves.csv")
    assert len(curves) == 6 * 2 * 3  # optimizers, seeds, evaluations
    assert list(curves["step"][:3]) == [0, 2, 4] and curves["train_loss"].isna()[0]
    assert len(frame(main_results / "main-orderings.csv")) == 9


@pytest.mark.slow
def test_every_search_says_what_was_tried_and_selected(main_results):
    searches = frame(main_results / "main-sweep.csv").groupby(["optimizer", "rank"], dropna=False)
    final = frame(main_results / "main.csv")
    assert len(searches) == len(final)
    for (method, rank), tried in searches:
        (_, chosen), *rest = tried[tried["selected"] != ""].iterrows()
        own = final[(final["optimizer"] == method) & ((final["rank"] == rank) | final["rank"].isna())].iloc[0]
        assert not rest and chosen["validation_loss"] == tried["validation_loss"].min()
        assert (chosen["lr"], f"{chosen['alpha_kl']}") == (own["lr"], f"{own['alpha_kl']}")
        # The first seed is that of the sweep, so both trained alike.
        assert float(own["validation_loss_per_seed"].split()[0]) == pytest.approx(chosen["validation_loss"], abs=1e-5)


@pytest.mark.slow
def test_figures_are_drawn_from_the_files_alone(main_results):
    drawn = sorted(main_results.glob("*.png"))
    assert [path.name for path in drawn] == ["main-loss.png", "main-sweep.png"]
    for path in drawn:
        path.unlink()
    draw(main_results)
    assert all(path.read_bytes().startswith(PNG) for path in drawn)


@pytest.mark.slow
def test_a_second_command_trains_nothing_that_is_there_and_repeats_its_files(main_results, text, monkeypatch, capsys):
    before = {path.name: path.read_bytes() for path in main_results.glob("*.csv")}
    begun, start = [], Run.__init__

    def recording(run, settings, *rest):
        begun.extend(h.method for h in settings.hyper.values())
        start(run, settings, *rest)

    monkeypatch.setattr(Run, "__init__", recording)
    assert run(text, main_results, "main", "--seeds", 0, 1, *BRIEF) == 0
    assert not begun and {path.name: path.read_bytes() for path in main_results.glob("*.csv")} == before
    assert "| Pro-KLShampoo, r = 8" in capsys.readouterr().out
    # The ablation shares AdamW, KL-Shampoo and Pro-KLShampoo with the main table.
    assert run(text, main_results, "ablation", "--seeds", 0, 1, *BRIEF[:-1]) == 0
    assert set(begun) == {"smok-hop", "subspace-only", "complement-only"}
    rows, main = (frame(main_results / f"{name}.csv") for name in ("ablation", "main"))
    rows = rows.set_index("optimizer")
    assert rows["validation_loss"]["pro-klshampoo"] == main[main["rank"] == 8]["validation_loss"].item()
    for method in ("subspace-only", "complement-only"):
        assert rows["lr"][method] == pytest.approx(1.5 * rows["lr"]["pro-klshampoo"])
        assert rows["alpha_kl"][method] == rows["alpha_kl"]["pro-klshampoo"]
    # They did not train side by side, so their times are not compared.
    assert not {"model_ms", "training_seconds", "seconds_to_kl_shampoo_loss"} & set(rows.columns)
    assert "seconds" not in frame(main_results / "ablation-curves.csv")


@pytest.mark.slow
def test_cosmos_is_compared_at_matched_ranks_in_parallel_runs_too(experiment, tmp_path, capsys):
    options = ("cosmos", "--seeds", 0, *BRIEFER, "cosmos=0.001")
    assert experiment(*options) == 0
    rows = frame(tmp_path / "out/cosmos.csv")
    assert list(zip(rows["optimizer"], rows["rank"], strict=True)) == [
        (method, rank) for rank in (4, 8) for method in ("cosmos", "pro-klshampoo")
    ]
    losses = rows["validation_loss"]
    assert f"{losses[3] - losses[2]:+.4f}" in capsys.readouterr().out
    assert experiment(*options, "--jobs", 2, out="two") == 0
    assert frame(tmp_path / "two/cosmos.csv")["validation_loss"].equals(losses)


def tune_to(lr):
    """Stands in for the searches."""
    return lambda study, kinds: Tuning(
        {k: Hyper(k.method, lr, 3e-3, rank=k.rank, alpha_kl=0.01, init_eigenvalue=k.start) for k in kinds}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCHINGS)
def test_spectra_are_drawn_and_resumed_alike(experiment, name, tmp_path, monkeypatch):
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
    rows = frame(tmp_path / f"whole/{file}.csv")
    assert frame(tmp_path / f"halves/{file}.csv").equals(rows)
    assert (tmp_path / f"whole/{file}.png").read_bytes().startswith(PNG)
    assert set(rows["step"]) == {6, 12, 24} and set(rows["factor"]) == set(WATCHINGS[name].factors)
    assert (rows["largest_over_tail_mean"] >= 1).all() and rows["size"].isin([16, 64]).all()
    # Of so little text Phi_L may be singular; its tail has no geometric mean then.
    assert (rows["tail_am_gm"].dropna() >= 1).all() and (name == "phi" or rows["tail_am_gm"].notna().all())


def test_spectra_of_one_that_diverged_too_early_are_an_error(experiment, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Study, "tune", tune_to(1e40))
    assert experiment("spectra", "--steps", 24, "--starts", "auto") == 2
    error = capsys.readouterr().err
    assert re.search("KL-Shampoo on gpt2-micro diverged at step [2-6], before the first look .* after step 6", error)
    assert error.count("\n") == 1 and not list((tmp_path / "out").glob("spectra-*.*"))


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_done_and_the_same_command_goes_on(
    main_results, experiment, tmp_path, monkeypatch, capsys
):
    advance, steps = Run.advance, []

    def interrupted(run):
        steps.append(run.done)
        if len(steps) == 14:
            signal.raise_signal(signal.SIGINT)
        advance(run)

    monkeypatch.setattr(Run, "advance", interrupted)
    assert experiment("main", "--seeds", 0, 1, *BRIEF) == 130
    assert "the same command goes on" in capsys.readouterr().err
    files = {path.name.partition("-")[0] for path in (tmp_path / "out/runs/sweep").iterdir()}
    assert files == {"adamw", "muon", "kl", "unfinished"}  # three whole ones of four steps each, half of a fourth
    assert experiment("main", "--seeds", 0, 1, *BRIEF) == 0
    here, whole = (
        frame(folder / "main.csv")["validation_loss_per_seed"] for folder in (tmp_path / "out", main_results)
    )
    assert here.equals(whole)


@pytest.mark.slow
def test_ctrl_c_ends_parallel_runs_after_a_step_and_they_go_on(text, tmp_path):
    """In a session of its own, since Ctrl-C goes to all processes of a terminal's foreground."""
    arguments = [
        sys.executable,
        "-m",
        "bench.study",
        "ablation",
        "--data",
        text,
        "--model",
        "gpt2",
        "--out",
        tmp_path,
    ]
    options = "--steps 3000 --eval-windows 2 --batch 1 --jobs 2 --seeds 0 --starts auto".split()
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*arguments, *options], env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
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
    assert error.count("\n") <= 4 and "Traceback" not in error
    assert 1 <= len(list(folder.glob("unfinished-*.pt"))) <= 2


def test_alpha_and_memory_need_no_training(experiment, tmp_path, capsys):
    # Nor a GPU, nor data of one family, at any scale.
    assert experiment("alpha") == experiment("memory") == 0
    alpha = frame(tmp_path / "out/alpha-kl.csv")
    assert alpha["model"].str.match(".*(24|34|50)m").sum() == 12
    up = alpha[(alpha["model"] == "gpt2-124m") & (alpha["layer"] == "MLP up")].iloc[0]
    assert (up["k"], f"{up['low']:.2g}", f"{up['high']:.2g}") == (768, "0.0013", "0.037")
    assert "0.0014 to 0.016" in capsys.readouterr().out
    costs = frame(tmp_path / "out/memory-cost.csv")
    costs = costs[costs["model"] == "gpt2-124m"]
    kl, pro = costs[costs["optimizer"] == "kl-shampoo"].iloc[0], costs[costs["rank"] == 128].iloc[0]
    matrices = [(48, 768, 768), (24, 768, 3072)]
    assert kl["state_elements"] == sum(c * (m * n + 2 * (m * m + n * n) + m + n) for c, m, n in matrices)
    pro_elements = sum(c * (m * n + n * 128 + 2 * (m * m + 128**2) + m + 128 + 1) for c, m, n in matrices)
    assert pro["state_elements"] == pro_elements
    assert pro["gflop_factorisations"] < kl["gflop_factorisations"]
    for figure in ("alpha-kl.png", "memory-cost.png"):
        assert (tmp_path / "out" / figure).read_bytes().startswith(PNG)
    # Of those that are asked for.
    assert experiment("alpha", "--scale", "tiny") == experiment("memory", "--model", "llama") == 0
    assert set(frame(tmp_path / "out/alpha-kl.csv")["model"]) == {"gpt2-micro"}
    assert set(frame(tmp_path / "out/memory-cost.csv")["model"]) == {"llama-134m", "llama-450m"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tables", "invalid choice 'tables'"),
        ("main --scale huge", "'huge'"),
        ("main --model bert", "--model bert is the beginning of no model of --scale tiny; it has gpt2-micro"),
        ("memory --device cuda --steps 3", "memory trains nothing; leave --steps --device out"),
        ("spectra --starts auto 0.1", "spectra trains once; give one of --starts and one of --seeds"),
        ("phi --seeds 0 1", "phi trains once; give one of --starts and one of --seeds"),
        ("spectra --steps 1", "--steps 1: spectra looks at several steps; give at least 2"),
        ("memory --scale tiny", "memory has nothing on --scale tiny; give --scale paper"),
        ("main --seeds 1 1", "--seeds names one twice: 1 1; give each once"),
        ("main --seed", "--seeds has no value; give one at least, or leave it out"),
        ("main --starts 0", "--starts 0: must be a finite number > 0"),
        ("ablation --lr subspace-only=0.1,0.2", "--lr subspace-only: is not searched; give one rate"),
        ("cosmos --lr muon=0.02", "--lr muon: cosmos trains adamw, cosmos, pro-klshampoo; leave it out"),
        ("main --jobs 0", "--jobs 0: must be a whole number >= 1"),
        ("main --data nowhere", "--data nowhere does not exist"),
        ("main --scale paper --device cpu", "--scale paper has other data for each family; give --model gpt2 or llama"),
        (
            "main --scale paper --model llama --lr muon=1 --device cpu",
            "--scale paper takes the paper's rates; add --tune",
        ),
        ("main --scale paper --model llama --device cpu --data {text}", "no token shards, which llama-134m needs"),
        ("ablation --scale paper --model gpt2-350m --device cpu", "paper has no ablation on gpt2-350m; .*llama-450m"),
        ("main --out {text}", "--out .*text.txt cannot be made a folder"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(experiment, text, capsys, arguments, message):
    name, *options = arguments.format(text=text).split()
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
