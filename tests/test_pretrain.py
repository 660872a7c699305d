"""The main job end to end, on models that train in a second: files, fairness, defaults."""

import contextlib
import io
import math
from dataclasses import replace

import pytest
import torch

import prokl
from bench import optimizers, pretrain
from bench.models import byte_gpt
from bench.optimizers import OPTIMIZERS
from bench.rows import frame
from bench.training.run import Run
from tests.experiments import text_in

FOUR = ["adamw", "muon", "kl-shampoo", "pro-klshampoo"]
SMALL = replace(pretrain.DEMO, config=byte_gpt(2, 32, 2, 16), batch=2, evaluations=2, eval_windows=4)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return text_in(tmp_path_factory.mktemp("text"))


def run(text, out, *options):
    given = ["--steps", 14, "--rank", 8, "--threads", 1, "--data", text, "--out", out, *options]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "DEMO", SMALL)
        return pretrain.main(list(map(str, given)))


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
    """Return what a run computed, without what a clock measured."""
    return frame(folder / "curves.csv").drop(columns="seconds")


@pytest.mark.slow
def test_every_result_is_written(trained):
    first, *_, picture, _ = (trained / "printed").read_text().strip().splitlines()
    assert first.startswith("Trains on file text.txt, ") and first.endswith(f"; results go to {trained}")
    assert picture == f"Picture: {trained / 'loss.png'}"
    table = (trained / "printed").read_text().splitlines()[2:-3]
    labels = [line.split("|")[2].strip() for line in table[2:]]
    assert labels == ["AdamW", "Muon", "KL-Shampoo", "Pro-KLShampoo, r = 8"] and "±" in table[-1]
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    rows = frame(trained / "runs.csv")
    assert list(rows["optimizer"]) == FOUR * 2 and list(rows["seed"]) == [0] * 4 + [1] * 4
    assert rows["validation_loss"].between(0, math.log(256)).all()  # better than knowing nothing
    assert (rows["model_ms"] > 0).all() and (rows["optimizer_ms"] > 0).all()
    assert (rows["torch"] == torch.__version__).all() and (rows["data_sha256"].str.len() == 64).all()
    assert (rows["width"] == 32).all() and (rows["cpu"] != "").all()
    for _, its in curves(trained).groupby(["optimizer", "seed"]):
        assert list(its["step"]) == [0, 7, 14]
    assert not list((trained / "checkpoints").iterdir())


def test_all_methods_start_alike_and_see_the_same_batches(job, tmp_path, monkeypatch):
    seen, initial, rates, built = {}, {}, {}, {}
    step, build = Run.step, optimizers.build

    def named(model, h, state_dtype):
        built[id(model)] = h.method
        return build(model, h, state_dtype)

    def recording(run, scale, inputs, targets):
        key, names = built[id(run.model)], dict(run.model.named_parameters())
        seen.setdefault(key, []).append((inputs.clone(), scale))
        initial.setdefault(key, {name: p.detach().clone() for name, p in names.items()})
        step(run, scale, inputs, targets)
        of = {id(p): g["lr"] / scale for o in run.optimizers for g in o.param_groups for p in g["params"]}
        rates[key] = {name: of[id(p)] for name, p in names.items()}

    monkeypatch.setattr(Run, "step", recording)
    monkeypatch.setattr(optimizers, "build", named)
    # the others' packages need not be installed: tests/test_bench_rivals.py looks at their rates
    ours = [key for key in OPTIMIZERS if key not in ("soap", "normuon", "muon-polar-express", "adamw-cautious")]
    assert job("--steps", 3, "--optimizers", *ours, "--adamw-lr", 0.007, "--lr", "muon", 0.03) == 0
    for key in ours:
        assert all(torch.equal(p, initial["adamw"][n]) for n, p in initial[key].items())
        pairs = zip(seen[key], seen["adamw"], strict=True)
        assert all(torch.equal(a, b) and scale == other for (a, scale), (b, other) in pairs)
        for name in ("embedding.weight", "lm_head.weight", "final_norm.weight", "blocks.1.mlp_norm.weight"):
            assert rates[key][name] == pytest.approx(0.007)
        own = {"adamw": 0.007, "muon": 0.03}.get(key, OPTIMIZERS[key].lr)
        assert rates[key]["blocks.0.up_proj.weight"] == pytest.approx(own)
    losses = frame(tmp_path / "out" / "runs.csv")["validation_loss"]
    assert losses.nunique() == len(ours)  # none is another in disguise


def test_one_that_diverges_is_recorded_and_sinks_nobody(trained, job, tmp_path, capsys):
    assert job("--lr", "muon", 1e30, "--seeds", 0, 1) == 0
    assert "diverged at step" in capsys.readouterr().out
    rows = frame(tmp_path / "out" / "runs.csv").set_index("optimizer")
    assert all(1 < int(step) < 5 for step in rows.loc["muon", "diverged_at"])
    here, there = (c[c["optimizer"] != "muon"].reset_index(drop=True) for c in map(curves, (tmp_path / "out", trained)))
    assert here.equals(there)


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
