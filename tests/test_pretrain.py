"""The main job end to end, on models that train in a second: files, fairness, interrupts, resuming, bad input."""

import csv
import math
import random
import re
import signal

import pytest
import torch

from bench import pretrain
from bench.models import build, byte_gpt
from bench.training import checkpoint, report
from bench.training.contenders import CONTENDERS
from bench.training.run import Lane, Record, Run
from bench.training.spectrum_figure import normalised

ALL = list(CONTENDERS)
FOUR = ["adamw", "muon", "kl-shampoo", "pro-klshampoo"]


@pytest.fixture
def job(tmp_path):
    """Runs the main job on a tiny model and text, with extra options; returns the exit code."""
    words = ["the", "optimizer", "turns", "gradient", "matrix", "into", "step", "and", "waits", "\n"]
    text = tmp_path / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(words, k=2000)))

    def run(*options, out="out"):
        size = "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --rank 8 --threads 1"
        plan = "--steps 14 --eval-every 5 --eval-windows 4"
        given = ["--data", str(text), "--out", str(tmp_path / out), *map(str, options)]
        return pretrain.main([*size.split(), *plan.split(), *given])

    run.folder = tmp_path
    return run


@pytest.fixture
def no_plots(monkeypatch):
    monkeypatch.setattr(pretrain.plots, "loss_curves", lambda *a: None)
    monkeypatch.setattr(pretrain.plots, "spectra", lambda *a: None)


@pytest.fixture
def interrupt_at(monkeypatch):
    """Sends Ctrl-C in the middle of one step, or twice."""

    def arm(step, times=1):
        advance, spent = Run.advance, []

        def interrupted(run):
            if run.done == step and not spent:
                spent.append(True)
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            advance(run)

        monkeypatch.setattr(Run, "advance", interrupted)

    return arm


def _rows(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _curves(folder):
    """What a run computed, without what a clock measured."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in _rows(folder / "curves.csv")]


def _weights(folder, seed=0):
    return checkpoint.read(folder / f"seed-{seed}.pt")["state"]["models"]


def _assert_same_run(a, b):
    assert _curves(a) == _curves(b)
    left, right = _weights(a), _weights(b)
    for key, model in left.items():
        for name, weight in model.items():
            assert torch.equal(weight, right[key][name]), f"{name} of {key} differs"


def test_default_contenders_train_and_every_result_is_written(job, capsys):
    assert job() == 0
    out = job.folder / "out"
    printed = capsys.readouterr().out
    table = (out / "table.md").read_text(encoding="utf-8")
    assert table in printed
    assert [line.split("|")[1].strip() for line in table.splitlines()[4:]] == [CONTENDERS[key].label for key in FOUR]
    for figure in ("loss.png", "spectrum.png"):
        assert (out / figure).read_bytes().startswith(b"\x89PNG")

    rows = {row["optimizer"]: row for row in _rows(out / "summary.csv")}
    assert list(rows) == FOUR
    for row in rows.values():
        assert 0 < float(row["validation_loss"]) < math.log(256)  # better than knowing nothing
        assert float(row["model_ms"]) > 0 < float(row["optimizer_ms"])
        assert row["torch"] == torch.__version__
        assert len(row["corpus_sha256"]) == 64
        assert row["cpu"] and row["lr"] and row["width"] == "32"
    assert float(rows["kl-shampoo"]["seconds_to_kl_shampoo_loss"]) > 0

    curves = _rows(out / "curves.csv")
    assert len(curves) == 4 * 15
    evaluated = [int(row["step"]) for row in curves if row["optimizer"] == "muon" and row["validation_loss"]]
    assert evaluated == [0, 5, 10, 14]


def test_all_contenders_start_alike_and_see_the_same_batches(job, monkeypatch, no_plots):
    seen, initial = {}, {}
    step = Lane.step

    def recording(lane, number, scale, inputs, targets):
        seen.setdefault(lane.key, []).append((inputs.clone(), scale))
        initial.setdefault(lane.key, {n: p.detach().clone() for n, p in lane.model.named_parameters()})
        step(lane, number, scale, inputs, targets)

    monkeypatch.setattr(Lane, "step", recording)
    assert job("--optimizers", *ALL) == 0
    for key in ALL:
        assert all(torch.equal(p, initial["adamw"][n]) for n, p in initial[key].items())
        assert all(
            torch.equal(a, b) and scale == other
            for (a, scale), (b, other) in zip(seen[key], seen["adamw"], strict=True)
        )
    final = _weights(job.folder / "out")
    for key in ALL[1:]:
        assert not torch.equal(final[key]["blocks.0.q_proj.weight"], final["adamw"]["blocks.0.q_proj.weight"]), (
            f"{key} is AdamW in disguise"
        )


def test_interrupted_and_resumed_equals_uninterrupted_bit_for_bit(job, interrupt_at, no_plots, capsys):
    everyone = ("--optimizers", *ALL)
    assert job(*everyone, out="whole") == 0
    interrupt_at(8)  # resuming then crosses the refresh of the eigenbases at step 10
    assert job(*everyone, out="halves") == pretrain.INTERRUPTED
    assert "with --resume" in capsys.readouterr().err
    assert "9 of 14 steps" in (job.folder / "halves/table.md").read_text(encoding="utf-8")
    assert job(*everyone, "--resume", out="halves") == 0
    _assert_same_run(job.folder / "whole", job.folder / "halves")


def test_resume_across_seeds_equals_uninterrupted(job, interrupt_at, no_plots):
    plan = ("--optimizers", "muon", "pro-klshampoo", "--seeds", 0, 1, 2)
    assert job(*plan, out="whole") == 0
    step_of_second_seed = []
    advance = Run.advance

    def in_second_seed(run):
        if run.seed == 1 and run.done == 6 and not step_of_second_seed:
            step_of_second_seed.append(run.done)
            signal.raise_signal(signal.SIGINT)
        advance(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "advance", in_second_seed)
        assert job(*plan, out="halves") == pretrain.INTERRUPTED
    # The half-done seed is kept for resuming but must not be averaged with a whole one.
    assert _rows(job.folder / "halves/summary.csv")[0]["seeds"] == "0"
    assert job(*plan, "--resume", out="halves") == 0
    for seed in range(3):
        assert all(
            torch.equal(w, _weights(job.folder / "halves", seed)["muon"][name])
            for name, w in _weights(job.folder / "whole", seed)["muon"].items()
        )
    _assert_same_run(job.folder / "whole", job.folder / "halves")


def test_resuming_a_finished_run_repeats_its_results(job):
    assert job() == 0
    out = job.folder / "out"
    before = _rows(out / "curves.csv"), (out / "table.md").read_text(encoding="utf-8")
    spectrum = (out / "spectrum.png").read_bytes()
    assert job("--resume") == 0
    assert (_rows(out / "curves.csv"), (out / "table.md").read_text(encoding="utf-8")) == before
    assert (out / "spectrum.png").read_bytes() == spectrum


def test_second_ctrl_c_keeps_results_and_the_last_checkpoint(job, interrupt_at, no_plots):
    interrupt_at(7, times=2)
    assert job("--checkpoint-seconds", "1e-9") == pretrain.INTERRUPTED
    out = job.folder / "out"
    assert checkpoint.read(out / "seed-0.pt")["state"]["done"] == 7
    assert len(_rows(out / "summary.csv")) == 4
    assert job("--resume") == 0
    assert job(out="whole") == 0
    _assert_same_run(job.folder / "whole", out)


def test_ctrl_c_handler_is_put_back(job, no_plots):
    before = signal.getsignal(signal.SIGINT)
    job("--optimizers", "adamw")
    assert signal.getsignal(signal.SIGINT) is before


def test_thread_count_is_put_back(job, no_plots):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        job("--optimizers", "adamw")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_resume_with_other_settings_names_what_differs(job, interrupt_at, no_plots, capsys):
    interrupt_at(2)
    assert job() == pretrain.INTERRUPTED
    assert job("--resume", "--lr", "muon=0.01", "--batch", 3) == 2
    error = capsys.readouterr().err
    assert f"lr muon (checkpoint {CONTENDERS['muon'].lr:g}, now 0.01)" in error
    assert "batch (checkpoint 2, now 3)" in error
    assert "adamw_lr" not in error


def test_resume_with_other_text_is_refused(job, interrupt_at, no_plots, capsys):
    interrupt_at(2)
    assert job() == pretrain.INTERRUPTED
    with (job.folder / "text.txt").open("a") as stream:
        stream.write("more")
    assert job("--resume") == 2
    assert "corpus (checkpoint" in capsys.readouterr().err


def test_finished_run_with_other_settings_is_not_overwritten_unasked(job, no_plots, capsys):
    assert job() == 0
    kept = (job.folder / "out/table.md").read_bytes()
    assert job("--batch", 3) == 2
    assert "finished run with other settings" in capsys.readouterr().err
    assert (job.folder / "out/table.md").read_bytes() == kept
    assert job() == 0 and job("--batch", 3, "--overwrite") == 0


def test_unfinished_run_is_not_overwritten_unasked(job, interrupt_at, no_plots, capsys):
    interrupt_at(2)
    assert job() == pretrain.INTERRUPTED
    kept = (job.folder / "out/seed-0.pt").read_bytes()
    assert job() == 2
    assert "--resume to go on, or --overwrite" in capsys.readouterr().err
    assert (job.folder / "out/seed-0.pt").read_bytes() == kept
    assert job("--overwrite") == 0


@pytest.mark.parametrize("content", [b"", b"not a checkpoint"])
def test_damaged_checkpoint_is_named(job, no_plots, capsys, content):
    (job.folder / "out").mkdir()
    (job.folder / "out/seed-0.pt").write_bytes(content)
    assert job("--resume") == 2
    assert "seed-0.pt is not a readable checkpoint" in capsys.readouterr().err


def test_crash_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "seed-0.pt"
    checkpoint.save(path, {"a": 1}, {"done": 1})

    def crash(content, stream):
        stream.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint.torch, "save", crash)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(path, {"a": 1}, {"done": 2})
    assert checkpoint.load(path, {"a": 1}) == {"done": 1}
    monkeypatch.undo()
    checkpoint.save(path, {"a": 1}, {"done": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["seed-0.pt"]


def test_diverged_contender_is_recorded_and_sinks_nobody(job, capsys):
    assert job("--lr", "muon=1e30", out="diverged") == 0
    assert job("--optimizers", "adamw", "kl-shampoo", "pro-klshampoo", out="without") == 0
    rows = {row["optimizer"]: row for row in _rows(job.folder / "diverged/summary.csv")}
    assert 1 < int(rows["muon"]["diverged_at"]) < 5
    assert "diverged at step" in (job.folder / "diverged/table.md").read_text(encoding="utf-8")
    others = [row for row in _curves(job.folder / "diverged") if row["optimizer"] != "muon"]
    assert others == _curves(job.folder / "without")


def test_everybody_diverged_still_ends_with_a_table(job):
    assert job("--optimizers", "adamw", "--lr", "adamw=1e30") == 0
    assert "diverged at step" in (job.folder / "out/table.md").read_text(encoding="utf-8")


def test_seeds_are_summarised_by_mean_and_standard_error(job, no_plots):
    assert job("--optimizers", "muon", "--seeds", 3, 4, 5) == 0
    row = _rows(job.folder / "out/summary.csv")[0]
    losses = torch.tensor([float(x) for x in row["validation_loss_per_seed"].split()], dtype=torch.float64)
    assert len(losses.unique()) == 3
    # The single losses are written with five decimals.
    assert float(row["validation_loss"]) == pytest.approx(losses.mean().item(), abs=1e-5)
    assert float(row["validation_loss_se"]) == pytest.approx(losses.std().item() / math.sqrt(3), abs=1e-5)
    assert "±" in (job.folder / "out/table.md").read_text(encoding="utf-8")


def test_sweep_runs_one_optimizer_per_rate_and_says_when_the_best_is_at_the_edge(job, capsys):
    assert job("--sweep", "muon=1e-6,1e-5,0.02", out="sweep") == 0
    rows = _rows(job.folder / "sweep/sweep.csv")
    assert [(row["optimizer"], float(row["lr"])) for row in rows] == [
        ("muon", 1e-6), ("muon", 1e-5), ("muon", 0.02),
    ]  # fmt: skip
    assert "Best: Muon, lr 0.02; it lies at the edge of the sweep" in capsys.readouterr().out
    assert job("--optimizers", "muon", "--lr", "muon=0.02", out="alone") == 0
    alone = _rows(job.folder / "alone/summary.csv")[0]
    assert rows[2]["validation_loss"] == alone["validation_loss"]


def test_adamw_rate_reaches_embedding_and_head_of_every_contender(job, monkeypatch, no_plots):
    rates = {}
    step = Lane.step

    def recording(lane, number, scale, inputs, targets):
        step(lane, number, scale, inputs, targets)
        for optimizer in lane.optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    names = [n for n, q in lane.model.named_parameters() if q is p]
                    rates[lane.key, names[0]] = group["lr"] / scale

    monkeypatch.setattr(Lane, "step", recording)
    assert job("--optimizers", *ALL, "--adamw-lr", "0.007", "--lr", "muon=0.03") == 0
    for key in ALL:
        for name in ("embedding.weight", "lm_head.weight", "final_norm.weight", "blocks.1.mlp_norm.weight"):
            assert rates[key, name] == pytest.approx(0.007)
    assert rates["muon", "blocks.0.up_proj.weight"] == pytest.approx(0.03)
    assert rates["adamw", "blocks.0.up_proj.weight"] == pytest.approx(0.007)
    assert rates["pro-klshampoo", "blocks.0.up_proj.weight"] == pytest.approx(CONTENDERS["pro-klshampoo"].lr)


def test_state_size_counts_what_each_optimizer_keeps(job, no_plots):
    assert job() == 0
    size = {row["optimizer"]: float(row["state_mb"]) * 1e6 for row in _rows(job.folder / "out/summary.csv")}
    everything = sum(p.numel() for p in build(byte_gpt(2, 32, 2, 16)).parameters())
    matrices = 2 * 12 * 32 * 32
    rest = everything - matrices
    counters = 4 * 2 * 8 + 4 * 3  # AdamW keeps a float32 step for each parameter
    assert size["adamw"] == 4 * 2 * everything + counters
    assert size["muon"] == 4 * (matrices + 2 * rest) + 4 * (2 * 2 + 3)
    # KL-Shampoo: M, and L, R, Q_L, Q_R and their eigenvalues for eight square and four oblong matrices.
    square, oblong = 4 * 32**2 + 2 * 32, 2 * 32**2 + 2 * 128**2 + 32 + 128
    kl = 4 * (matrices + 2 * rest + 8 * square + 4 * oblong)
    assert kl <= size["kl-shampoo"] < kl + 1000  # beside them only scalars


def test_spectrum_has_both_factors_of_every_matrix(job, no_plots):
    assert job("--optimizers", "kl-shampoo", "pro-klshampoo", "adamw") == 0
    records = checkpoint.read(job.folder / "out/seed-0.pt")["state"]["records"]
    assert records["adamw"]["spectra"] == {}
    kl, pro = records["kl-shampoo"]["spectra"], records["pro-klshampoo"]["spectra"]
    assert len(kl) == len(pro) == 2 * 6
    assert {k: len(v) for k, v in kl["blocks.1.up_proj.weight"].items()} == {"L": 32, "R": 128}
    assert {k: len(v) for k, v in pro["blocks.1.up_proj.weight"].items()} == {"L": 32, "S": 8, "mu": 1}
    for factors in (*kl.values(), *pro.values()):
        for values in factors.values():
            assert values.min() > 0
            assert torch.equal(values, values.sort(descending=True).values)


def test_spectrum_is_drawn_from_pro_klshampoo_alone(job):
    assert job("--optimizers", "pro-klshampoo") == 0
    assert (job.folder / "out/spectrum.png").exists()


def test_no_spectrum_is_drawn_without_a_preconditioner(job):
    assert job("--optimizers", "adamw") == 0
    assert not (job.folder / "out/spectrum.png").exists()


def test_spectrum_is_normalised_by_the_mean_beyond_the_rank():
    values = torch.tensor([50.0, 20.0, 3.0, 1.0])
    assert normalised({"R": values}, rank=2)["R"].tolist() == [25.0, 10.0, 1.5, 0.5]
    found = normalised({"S": values, "mu": torch.tensor([10.0])}, rank=4)
    assert {k: v.tolist() for k, v in found.items()} == {"S": pytest.approx([5.0, 2.0, 0.3, 0.1])}


def test_seconds_to_a_loss_are_interpolated():
    record = Record(
        losses=[0.0] * 4,
        model_seconds=[1.0] * 4,
        optimizer_seconds=[0.5] * 4,
        validation=[(0, 5.0), (2, 3.0), (4, 2.0)],
    )
    assert report.seconds_to(record, 3.0) == 3.0
    assert report.seconds_to(record, 2.5) == 4.5
    assert report.seconds_to(record, 5.0) == 0.0
    assert math.isnan(report.seconds_to(record, 1.9))
    assert math.isnan(report.seconds_to(record, math.nan))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizers adamw sophia", "unknown optimizer 'sophia'; choose from adamw, muon"),
        ("--optimizers muon muon", "names one twice"),
        ("--steps -3", "--steps: '-3' is not a whole number >= 1"),
        ("--steps ten", "'ten' is not a whole number"),
        ("--width 100 --heads 8", "--width 100 is not a multiple of 2 \\* --heads = 16.*try --width 96"),
        ("--rank 0", "--rank: '0' is not a whole number >= 1"),
        ("--lr muon", "has no learning rate; write it as in muon=0.02"),
        ("--lr muon=-1", "'-1' is not a finite number > 0"),
        ("--lr muon=nan", "'nan' is not a finite number > 0"),
        ("--lr smok-hop=0.1", "smok-hop does not run; add it to --optimizers"),
        ("--lr muon=0.1,0.2", "--sweep muon="),
        ("--sweep muon=0.1 --lr muon=0.1", "leave --lr out"),
        ("--sweep muon=0.1 --sweep adamw=0.1", "one optimizer at a time"),
        ("--init-eigenvalue large", "'large' is not a finite number > 0"),
        ("--seeds 1 1", "names one twice"),
        ("--resume", "--resume found no checkpoint"),
        ("--resume --overwrite", "exclude each other"),
        ("--data nowhere.txt", "nowhere.txt does not exist"),
        ("--context 4000", "smaller --context"),
        ("--colour blue", "unrecognized arguments: --colour"),
        ("--out text.txt/inside", "cannot be made a folder"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(job, monkeypatch, capsys, options, message):
    monkeypatch.chdir(job.folder)
    assert job(*options.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert re.search(message, printed.err)
