"""The main job end to end, on models that train in a second: files, fairness, interrupts, going on, bad input."""

import contextlib
import io
import math
import random
import re

import pytest
import torch

import prokl
from bench import optimizers, pretrain
from bench.optimizers import OPTIMIZERS
from bench.rows import frame
from bench.training import checkpoint
from bench.training.run import Trainee

FOUR = ["adamw", "muon", "kl-shampoo", "pro-klshampoo"]
SIZE = "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --rank 8 --threads 1"
PLAN = "--steps 14 --evaluations 2 --eval-windows 4"


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = ["the", "optimizer", "turns", "gradient", "matrix", "into", "step", "and", "waits", "\n"]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(random.Random(0).choices(words, k=2000)))
    return path


def run(text, out, *options):
    given = ["--data", str(text), "--out", str(out), *map(str, options)]
    return pretrain.main([*SIZE.split(), *PLAN.split(), *given])


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """The results of one default job on two seeds; what it printed is in a file beside them."""
    out = tmp_path_factory.mktemp("trained")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run(text, out, "--seeds", 0, 1) == 0
    (out / "printed").write_text(printed.getvalue())
    return out


@pytest.fixture
def job(text, tmp_path, monkeypatch):
    """Runs the job without figures, with extra options; returns the exit status."""
    monkeypatch.setattr(pretrain.figures, "loss", lambda *a: None)
    return lambda *options, out="out": run(text, tmp_path / out, *options)


def curves(folder):
    """What a run computed, without what a clock measured."""
    return frame(folder / "curves.csv").drop(columns="seconds")


def summary(folder):
    return frame(folder / "summary.csv").set_index("optimizer")


@pytest.mark.slow
def test_every_result_is_written(trained):
    first, second, *_, picture, _ = (trained / "printed").read_text().strip().splitlines()
    assert first.startswith(
        "Trains a GPT of 0.0M parameters for 14 steps with AdamW, Muon, KL-Shampoo, Pro-KLShampoo, "
    )
    assert f"Results go to {trained}." in second and picture == f"Picture: {trained / 'loss.png'}"
    table = (trained / "table.md").read_text(encoding="utf-8")
    labels = [line.split("|")[2].strip() for line in table.splitlines()[4:]]
    assert labels == ["AdamW", "Muon", "KL-Shampoo", "Pro-KLShampoo, r = 8"] and "±" in table
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = summary(trained)
    assert list(rows.index) == FOUR
    assert rows["validation_loss"].between(0, math.log(256)).all()  # better than knowing nothing
    assert (rows["model_ms"] > 0).all() and (rows["optimizer_ms"] > 0).all()
    assert (rows["torch"] == torch.__version__).all() and (rows["data_sha256"].str.len() == 64).all()
    assert (rows["width"] == 32).all() and (rows["cpu"] != "").all() and (rows["seeds"] == "0 1").all()
    assert rows.loc["kl-shampoo", "seconds_to_kl_shampoo_loss"] > 0
    for _, row in rows.iterrows():
        losses = torch.tensor([float(x) for x in row["validation_loss_per_seed"].split()], dtype=torch.float64)
        assert row["validation_loss"] == pytest.approx(losses.mean().item(), abs=1e-5)  # five decimals are written
        assert row["validation_loss_se"] == pytest.approx(losses.std().item() / math.sqrt(2), abs=1e-5)
    for _, its in curves(trained).groupby(["optimizer", "seed"]):
        assert list(its["step"]) == [0, 7, 14]


def test_all_start_alike_see_the_same_batches_and_have_adamws_rate_outside_the_matrices(job, tmp_path, monkeypatch):
    seen, initial, rates = {}, {}, {}
    step = Trainee.step

    def recording(trainee, number, scale, inputs, targets):
        key, names = trainee.key, dict(trainee.model.named_parameters())
        seen.setdefault(key, []).append((inputs.clone(), scale))
        initial.setdefault(key, {name: p.detach().clone() for name, p in names.items()})
        step(trainee, number, scale, inputs, targets)
        of = {id(p): g["lr"] / scale for o in trainee.optimizers for g in o.param_groups for p in g["params"]}
        rates[key] = {name: of[id(p)] for name, p in names.items()}

    monkeypatch.setattr(Trainee, "step", recording)
    # the others' packages need not be installed: tests/test_bench_rivals.py looks at their rates
    ours = [key for key in OPTIMIZERS if key not in ("soap", "normuon", "muon-polar-express", "adamw-cautious")]
    assert job("--steps", 3, "--optimizers", *ours, "--adamw-lr", 0.007, "--lr", "muon=0.03") == 0
    for key in ours:
        assert all(torch.equal(p, initial["adamw"][n]) for n, p in initial[key].items())
        pairs = zip(seen[key], seen["adamw"], strict=True)
        assert all(torch.equal(a, b) and scale == other for (a, scale), (b, other) in pairs)
        for name in ("embedding.weight", "lm_head.weight", "final_norm.weight", "blocks.1.mlp_norm.weight"):
            assert rates[key][name] == pytest.approx(0.007)
        own = {"adamw": 0.007, "muon": 0.03}.get(key, OPTIMIZERS[key].lr)
        assert rates[key]["blocks.0.up_proj.weight"] == pytest.approx(own)
    losses = summary(tmp_path / "out")["validation_loss_per_seed"]
    assert losses.nunique() == len(ours)  # none is another in disguise


def test_one_that_diverges_is_recorded_and_sinks_nobody(trained, job, tmp_path):
    assert job("--lr", "muon=1e30", "--seeds", 0, 1) == 0
    assert "diverged at step" in (tmp_path / "out/table.md").read_text(encoding="utf-8")
    assert all(1 < int(step) < 5 for step in summary(tmp_path / "out").loc["muon", "diverged_at"].split())
    here, there = (c[c["optimizer"] != "muon"].reset_index(drop=True) for c in map(curves, (tmp_path / "out", trained)))
    assert here.equals(there)


def test_a_checkpoint_of_other_settings_or_damaged_is_named_and_a_crash_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    checkpoint.save(path, {"a": 1, "b": 2}, {"done": 1})

    def crash(content, stream):
        stream.write(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
        patch.setattr(checkpoint.torch, "save", crash)
        checkpoint.save(path, {"a": 1, "b": 2}, {"done": 2})
    assert checkpoint.load(path, {"a": 1, "b": 2}) == {"done": 1}
    with pytest.raises(pretrain.UsageError, match=r"other settings: b \(there 2, now 3\); remove it"):
        checkpoint.load(path, {"a": 1, "b": 3})
    for content in (b"", b"not a checkpoint"):
        path.write_bytes(content)
        with pytest.raises(pretrain.UsageError, match="a.pt is not readable .*remove it"):
            checkpoint.load(path, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--optimizers adamw sophia", "invalid choice 'sophia'.*'adamw', 'muon'"),
        ("--width 100 --heads 8", "width 100 does not split into 8 heads of even width"),
        ("--lr muon", "--lr muon: '' is no learning rate; write it as in muon=0.02"),
        ("--lr sophia=0.1", "unknown optimizer 'sophia'; choose from adamw, muon"),
        ("--lr smok-hop=0.1", "smok-hop does not run; add it to --optimizers"),
    ],
)
def test_wrong_input_is_one_line_with_the_remedy(job, text, monkeypatch, capsys, options, message):
    monkeypatch.chdir(text.parent)
    assert job(*options.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert re.search(message, printed.err)


def test_pro_klshampoo_is_trained_with_the_packages_defaults():
    (h,) = pretrain.Options(optimizers=("pro-klshampoo",)).selected.values()
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4))
    (optimizer,) = optimizers.build(model, h, None)
    groups = prokl.param_groups(model, lr=h.lr, adamw_lr=h.adamw_lr, adamw_betas=optimizers.ADAMW_BETAS, rank=h.rank)
    settings, expected = (
        [{k: v for k, v in group.items() if k != "params"} for group in its.param_groups]
        for its in (optimizer, prokl.ProKLShampoo(groups))
    )
    assert settings == expected and settings[0]["algorithm"] == "matrix"


def test_who_won_and_by_how_much_is_said_first(trained, capsys):
    rows = frame(trained / "summary.csv")
    first, second, third = pretrain.verdict(rows).split("\n")
    ended = rows.sort_values("validation_loss")
    lowest, next_one = (OPTIMIZERS[name].label for name in ended["optimizer"][:2])
    apart = ended["validation_loss"].iloc[1] - ended["validation_loss"].iloc[0]
    assert (
        first == f"{lowest} ended lowest, at a validation loss of {ended['validation_loss'].iloc[0]:.4f} nats a byte."
    )
    assert second.startswith(f"{next_one} came next, {apart:.4f} above; ")
    times = ended["model_ms"] + ended["optimizer_ms"]
    assert f"took {times.iloc[0] / times.min():.2f} times as long" in third
    alone = rows[:1].assign(validation_loss_per_seed="1.5")
    assert pretrain.verdict(alone).endswith("may be chance.") and "\n" not in pretrain.verdict(alone)
    assert pretrain.verdict(rows.assign(validation_loss=math.nan)).startswith("Every run diverged")
