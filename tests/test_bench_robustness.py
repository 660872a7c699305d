"""``bench.robustness``: one thing is changed at a time, and it is changed."""

import pytest
import torch

from bench import robustness
from bench.disturbances import experts
from bench.experiments.scales import Scale
from bench.rows import frame, read, write
from bench.training.run import Run
from bench.training.sources import open_source

CHANGED = {  # what of a run each case changes, beside the usual one
    "lr × 1/2": {"lr": 0.5},
    "lr × 2": {"lr": 2.0},
    "batch × 1/4": {"batch": 0.25},
    "batch × 4": {"batch": 4.0},
    "loss × 1e-3": {"gradients": 1e-3},
    "loss × 1e3": {"gradients": 1e3},
    "width 192": {"width": 2.0},
    "width 384": {"width": 4.0},
    "projections start at zero": {"zero": {"o_proj", "down_proj"}},
    "rank 4": {"rank": 4},
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text"
    path.write_bytes(bytes(range(32, 127)) * 400)
    return open_source(path, robustness.SCALE.config.context)


def observed(monkeypatch, text, name):
    """What a case trains, without training it."""
    seen = {}
    monkeypatch.setattr(Scale, "open", lambda scale, data: text)

    def stop(run):
        (trainee,) = run.trainees
        loss = trainee.loss(trainee.model, *run.validation[0])
        loss.backward()
        weights = dict(trainee.model.named_parameters())
        group = trainee.optimizers[0].param_groups[0]
        seen.update(lr=group["lr"], rank=group["rank"], batch=run.settings.batch, width=run.settings.model.width)
        zero = {
            name.split(".")[2] for name, weight in weights.items() if name.startswith("blocks.") and not weight.any()
        }
        seen.update(zero=zero, loss=float(loss.detach()))
        seen.update(gradients=float(weights["blocks.0.q_proj.weight"].grad.norm()))
        raise StopIteration

    monkeypatch.setattr(Run, "advance", stop)
    threads = torch.get_num_threads()
    with pytest.raises(StopIteration):
        robustness.trained("pro-klshampoo", name)
    torch.set_num_threads(threads)
    return seen


@pytest.mark.parametrize("name", CHANGED)
def test_a_case_changes_what_it_says_and_nothing_else(monkeypatch, text, name):
    usual, own = observed(monkeypatch, text, robustness.USUAL), observed(monkeypatch, text, name)
    assert not usual["zero"]
    changed = dict(CHANGED[name])
    for key in ("lr", "batch", "width"):
        assert own[key] == usual[key] * changed.pop(key, 1.0)
    assert own["zero"] == changed.pop("zero", set()) and own["rank"] == changed.pop("rank", usual["rank"])
    if "batch" not in CHANGED[name] and "width" not in CHANGED[name] and not own["zero"]:
        assert own["loss"] == usual["loss"]  # the model and its data are the same
        assert own["gradients"] == pytest.approx(usual["gradients"] * changed.pop("gradients", 1.0), rel=1e-5)
    assert not changed


def test_every_case_is_trained_by_both_but_ranks(tmp_path, monkeypatch):
    assert {case.methods for name, case in robustness.CASES.items() if name.startswith("rank")} == {("pro-klshampoo",)}
    others = [case.methods for name, case in robustness.CASES.items() if not name.startswith("rank")]
    assert set(others) == {robustness.METHODS}


@pytest.mark.slow
def test_experts_see_fewer_tokens_than_the_rank_and_stay_finite():
    assert robustness.EXPERT_TOKENS < experts.RANK
    threads = torch.get_num_threads()
    losses = [robustness.trained(method, robustness.EXPERTS, 40) for method in robustness.METHODS]
    torch.set_num_threads(threads)
    assert all(0 < loss < 10 for loss in losses)


def test_the_table_has_changes_beside_losses(tmp_path):
    found = [
        robustness.row("muon", robustness.USUAL, 2.0),
        robustness.row("muon", "lr × 2", 2.25),
        robustness.row("pro-klshampoo", robustness.USUAL, 1.5),
        robustness.row("pro-klshampoo", "lr × 2", 1.4),
        robustness.row("pro-klshampoo", "rank 4", float("inf")),
    ]
    write(tmp_path / "rows.csv", found)
    assert read(tmp_path / "rows.csv")[1]["lr"] == "0.04"
    lines = robustness.losses_table(frame(tmp_path / "rows.csv")).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert robustness.row("muon", robustness.EXPERTS, 1.0)["lr"] == 0.02
    assert ["lr × 2", "1.400", "2.250", "-0.100", "+0.250"] in cells
    assert ["rank 4", "inf", "-", "+inf", "-"] in cells


def test_wrong_input_is_refused_in_one_line(capsys):
    assert robustness.main(["--cases", "width 95"]) == 2
    assert "--cases: unknown width 95; choose from as it is" in capsys.readouterr().err
