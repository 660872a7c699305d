"""The commands that watch runs: ``bench.bf16``, ``.drift``, ``.undisturbed``, ``.one_rate`` and ``.precision``."""

import pytest

from bench import bf16, drift, one_rate, precision, rows, undisturbed
from bench.experiments.scales import AUTO


@pytest.mark.slow
def test_drift_writes_every_basis_of_both_optimizers_in_every_form(tmp_path):
    out = tmp_path / "drift.csv"
    assert drift.main(["--steps", "12", "--every", "6", "--out", str(out)]) == 0
    found = rows.read(out)
    seen = {(row["optimizer"], row["dtype"], row["metric"]) for row in found}
    own = {"pro-klshampoo": ("U", "Q_L"), "kl-shampoo": ("Q_L", "Q_R")}
    for method, bases in own.items():
        for form in drift.FORMS:
            metrics = {metric for m, f, metric in seen if (m, f) == (method, form)}
            assert metrics == {f"orthogonality of {basis}" for basis in bases} | {"training loss", "bounded steps"}
    assert {row["step"] for row in found} == {"6", "12"}
    # Only a state in bfloat16 keeps bases that are rounded to it.
    worst = {
        form: max(float(r["median"]) for r in found if r["dtype"] == form and "orth" in r["metric"])
        for form in drift.FORMS
    }
    assert worst["float32"] < 1e-4 and worst["bfloat16 weights"] < 1e-4 < worst["bfloat16 state"] < 0.5


@pytest.mark.slow
def test_bf16_writes_a_row_of_every_form_with_its_difference_to_float32(tmp_path):
    out = tmp_path / "bf16.csv"
    for method in bf16.LR:  # the second one's rows join the first's
        forms = ["--forms", "master", "plain, AdamW's in float32"]
        assert bf16.main(["--steps", "2", "--seeds", "0", "3", "--optimizers", method, *forms, "--out", str(out)]) == 0
    found = {(row["optimizer"], row["value"]): row for row in rows.read(out)}
    assert {method for method, _ in found} == set(bf16.LR) and len(found) == 6
    for (method, _), row in found.items():
        usual = found[method, "float32"]["validation_loss"]
        assert float(row["difference"]) == pytest.approx(float(row["validation_loss"]) - float(usual), abs=1e-5)
        assert (row["value"] == "float32") == (float(row["difference"]) == 0)
        assert row["seeds"] == "0 3" and row["steps"] == "2"


@pytest.mark.slow
def test_undisturbed_repeats_the_recorded_settings_and_counts_by_seed(tmp_path, capsys):
    out = tmp_path / "undisturbed.csv"
    options = ["--steps", "22", "--seeds", "0", "17", "--models", "llama-tiny", "--out", str(out)]
    assert undisturbed.main(options) == 0
    found = {row["optimizer"]: row for row in rows.read(out)}
    recorded = [r for r in rows.read(rows.RESULTS / "main.csv") if r["model"] == "llama-tiny" and r["start"] == AUTO]
    assert found.keys() == set(undisturbed.METHODS)
    for method, row in found.items():
        own = [r for r in recorded if r["optimizer"] == method]
        widest = max(own, key=lambda r: int(r["rank"] or 0))
        assert [row[key] for key in ("lr", "rank", "alpha_kl")] == [widest[key] for key in ("lr", "rank", "alpha_kl")]
        assert len(row["bounded_per_seed"].split()) == 2 and row["seeds"] == "0 17"
        first = float(row["validation_loss_per_seed"].split()[0])
        before = float(widest["validation_loss_per_seed"].split()[0])
        assert float(row["difference"]) == pytest.approx(first - before, abs=1e-5)  # seed 17 was not recorded
        assert "of 56 gradients after step 20" in row["note"]  # 28 matrices, two steps


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "gpt5"], "--models gpt5 is none of gpt2-tiny, llama-tiny, byte-gpt"),
        (["--records", "/nowhere"], "/nowhere/main.csv has no runs of gpt2-tiny"),
        (["--steps", "0"], "--steps 0: must be a whole number >= 1"),
        (["--seeds", "1", "1"], "--seeds"),
    ],
)
def test_undisturbed_refuses_wrong_input_in_one_line(arguments, says, capsys):
    assert undisturbed.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error and error.count("\n") == 1


@pytest.mark.slow
def test_one_rate_trains_every_form_and_measures_its_updates(tmp_path, monkeypatch):
    out = tmp_path / "one-rate.csv"
    monkeypatch.setattr(one_rate, "ONE", (2e-3,))
    monkeypatch.setattr(one_rate, "OWN", {"pro-klshampoo": (2e-2,), "kl-shampoo": (5e-3,)})
    assert one_rate.main(["--steps", "22", "--seeds", "3", "--out", str(out)]) == 0
    found = rows.frame(out)
    of_all = found[(found["lr"] == found["adamw_lr"]) & (found["case"] == one_rate.MATCHED)]
    assert set(of_all["optimizer"]) == {*one_rate.OWN, "complement-only", "smok-hop", "muon"}
    sizes = of_all[of_all["metric"] == "update rms"].set_index(["optimizer", "shapes"])["median"]
    assert set(sizes.index.get_level_values("shapes")) == {"64x64", "256x64", "64x256"}
    assert sizes.min() > 0.1 and sizes.max() < 0.5
    assert one_rate.losses_table(found).count("**") == 2 * 5
    assert "| subspace only" in one_rate.sizes_table(found)


def test_one_rate_refuses_wrong_input_in_one_line(capsys):
    assert one_rate.main(["--steps", "0"]) == 2
    assert capsys.readouterr().err.startswith("error: --steps 0")


def test_drift_refuses_wrong_input_in_one_line(capsys):
    assert drift.main(["--every", "0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: --every 0") and error.count("\n") == 1


def test_the_upper_bound_of_a_mean_is_students_two_sided_one():
    assert precision.upper_bound([-1.0, 0.0, 1.0]) == pytest.approx(4.302653 / 3**0.5, rel=1e-6)  # t of 0.975


@pytest.mark.slow
def test_precision_trains_either_and_goes_on_where_it_was_interrupted(tmp_path, monkeypatch):
    out, trained, chosen = tmp_path / "precision.csv", [], []
    train = precision.Run

    class Watched(train):
        def advance(self):
            if not self.done:
                trained.append(self.seed)
                groups = [t.optimizers[0].param_groups for t in self.trainees]
                chosen.append([{g["precision"] for g in own if "precision" in g} for own in groups])
            super().advance()

    monkeypatch.setattr(precision, "Run", Watched)
    monkeypatch.setattr(rows, "commit", lambda: "abc")
    options = ["--models", "llama-tiny", "--steps", "2", "--out", str(out), "--seeds", "3", "5"]
    assert precision.main(options) == 0
    assert precision.main([*options, "4"]) == 0
    assert trained == [3, 5, 4] and chosen == [[{"faithful"}, {"balanced"}]] * 3
    faithful, balanced = rows.read(out)
    assert (faithful["value"], balanced["value"]) == ("faithful", "balanced") and balanced["seeds"] == "3 5 4"
    losses = [[float(x) for x in row["validation_loss_per_seed"].split()] for row in (faithful, balanced)]
    pairs = [b - f for f, b in zip(*losses, strict=True)]
    assert float(balanced["difference"]) == pytest.approx(sum(pairs) / 3, abs=1e-5)
    assert float(balanced["difference_upper"]) == pytest.approx(precision.upper_bound(pairs), abs=1e-4)


@pytest.mark.parametrize("arguments", [["--seeds", "1"], ["--models", "byte-gpt"], ["--steps", "0"]])
def test_precision_refuses_wrong_input_in_one_line(arguments, capsys):
    assert precision.main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {arguments[0]}")
