"""The command that varies one thing at a time: what it varies, differences paired by seed, how a start is forgotten."""

import random
import statistics
from dataclasses import replace

import pytest

from bench.errors import UsageError
from bench.experiments import __main__ as command
from bench.experiments import sensitivity
from bench.experiments.protocol import ABLATIONS, PRO, Tuning
from bench.experiments.scales import SCALES
from bench.experiments.study import Study
from bench.experiments.tables import sensitivity_table
from bench.training.settings import Hyper
from prokl import diagnostics
from tests.experiments import MICRO
from tests.inputs import PRO as OPTIMIZER
from tests.problems import gradient_stream, run
from tests.test_experiments import PNG, _rows


def _tuning():
    """As if selected: a learning rate of its own for every contender."""
    wanted = sensitivity.kinds(MICRO)
    return Tuning(
        {
            k: Hyper(k.method, 0.01 * (i + 1), 3e-3, rank=k.rank, alpha_kl=0.02, init_eigenvalue=k.start)
            for i, k in enumerate(wanted)
        }
    )


def test_one_thing_is_varied_and_all_others_stay_as_selected():
    tuning = _tuning()
    selected = {(k.method, k.start): hyper for k, hyper in tuning.selected.items()}
    found = sensitivity.points(MICRO, tuning)
    changed = {
        "start": lambda own, value: replace(own, init_eigenvalue=value),
        "steps": lambda own, value: own,
        "lr": lambda own, value: replace(own, lr=value * selected[PRO, "auto"].lr),
        "rank": lambda own, value: replace(own, rank=value),
    }
    for point in found:
        for training in (point.training, point.minus):
            start = 0.1 if point.varied == "start" and training is point.training else training.hyper.init_eigenvalue
            own = selected[training.hyper.method, start]
            if training is point.training or point.varied == "lr":
                own = changed[point.varied](own, point.value)
            assert training.hyper == own
            assert training.scale == replace(MICRO, steps=point.value if point.varied == "steps" else MICRO.steps)
    values = {varied: [p.value for p in found if p.varied == varied] for varied in changed}
    assert values == {
        "start": [0.1, 0.01, 0.001, 0.0001, "auto"] * 2,
        "steps": [4, 16] * 2,
        "lr": [0.5, 1.0, 1.5, 2.0],
        "rank": [2, 4, 8],  # beyond which there is no tail in weights of width 16
    }
    pairs = {(p.varied, p.training.hyper.method, p.minus.hyper.method) for p in found}
    assert pairs == {
        ("start", PRO, "muon"),
        ("start", "kl-shampoo", "muon"),
        ("steps", PRO, "muon"),
        ("lr", "complement-only", "subspace-only"),
        ("rank", "smok-hop", "kl-shampoo"),
    }
    assert set(ABLATIONS) <= {k.method for k in tuning.selected}


def test_models_that_cannot_be_tuned_are_left_out_before_anything_trains():
    paper = SCALES["paper"]
    names = [[scale.name for scale in sensitivity.possible(paper, search)] for search in (False, True)]
    assert names == [["gpt2-124m", "llama-134m"], ["gpt2-124m", "llama-134m", "llama-450m"]]
    with pytest.raises(UsageError, match="smok-hop.*gpt2-350m"):
        sensitivity.possible([scale for scale in paper if scale.name == "gpt2-350m"], search=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The command on the micro model, everything as if tuned; its folder, and what it printed."""
    folder = tmp_path_factory.mktemp("sensitivity")
    text = folder / "text.txt"
    text.write_text(" ".join(random.Random(0).choices(["step", "and", "matrix", "waits", "\n"], k=2000)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "tiny", (MICRO,))
        patch.setattr(Study, "tune", lambda study, kinds: _tuning())
        options = ["--data", text, "--out", folder, "--jobs", 1, "--seeds", 0, 1]
        assert command.main(["sensitivity", *map(str, options)]) == 0
    return folder


def test_differences_are_paired_by_seed(results):
    rows = _rows(results / "sensitivity.csv")
    losses = {
        (r["varied"], r["value"], r["optimizer"], r["start"]): [float(x) for x in r["validation_loss_per_seed"].split()]
        for r in rows
    }
    # Under "steps" at the scale's own length, and under "start", Pro-KLShampoo from 0.1 is one and the same.
    assert losses["steps", "4", PRO, "0.1"] == losses["start", "0.1", PRO, "0.1"]
    assert losses["steps", "16", PRO, "0.1"] != losses["start", "0.1", PRO, "0.1"]
    by_start = {r["start"]: r for r in rows if (r["varied"], r["optimizer"]) == ("start", PRO)}
    muon = statistics.fmean(losses["start", "0.1", PRO, "0.1"]) - float(by_start["0.1"]["difference"])
    for start, row in by_start.items():
        own = statistics.fmean(losses["start", start, PRO, start])
        # The single losses are written with five decimals.
        assert own - float(row["difference"]) == pytest.approx(muon, abs=2e-5)
        assert row["decided"] in ("yes", "no") and float(row["difference_se"]) >= 0
    assert len({row["validation_loss"] for row in by_start.values()}) == len(by_start)


def test_a_start_is_forgotten_along_the_run(results):
    traces = {}
    for row in _rows(results / "sensitivity-eigenvalues.csv"):
        traces.setdefault(row["start"], {})[int(row["step"])] = float(row["tail_variance"])
    assert list(traces) == ["0.1", "0.01", "0.001", "0.0001", "auto"]
    # The weights in front of those that start at zero get their first gradient in the second step, and with it their
    # start; in the third they learn from it.
    assert all(list(trace) in ([2, 3, 4], [3, 4]) for trace in traces.values())
    # After t steps L and mu still have 0.95^t of their start at least, whatever the gradients are.
    assert traces["0.1"][4] >= (0.95**4 * 0.1) ** 2
    assert traces["0.1"][4] < traces["0.1"][3]
    assert traces["0.1"][4] > traces["0.01"][4] > traces["0.0001"][4]


def test_eigenvalues_at_the_floor_of_the_clip_are_counted():
    shapes = [(6, 12), (12, 6)]
    for start, size, share in ((0.1, 1.0, 0.0), (1e-9, 1e-9, 1.0), ("auto", 1e-9, 0.0)):
        stream = [[size * g for g in gs] for gs in gradient_stream(shapes, 3)]
        weights, optimizer = run(OPTIMIZER, stream, rank=2, init_eigenvalue=start)
        names = [f"group0.{i}" for i in range(len(shapes))]
        found = diagnostics.eigenvalues(optimizer)
        figures = sensitivity.eigenvalue_figures(optimizer, dict(zip(names, weights, strict=True)), found)
        assert {key: float(value) for key, value in figures.items() if key != "tail_variance"} == {
            key: share for key in ("clipped_L", "clipped_S", "clipped_mu")
        }


def test_only_what_is_asked_for_is_varied(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SCALES, "tiny", (MICRO,))
    monkeypatch.setattr(Study, "tune", lambda study, kinds: _tuning())
    options = ["--data", results / "text.txt", "--out", tmp_path, "--jobs", 1, "--seeds", 0, "--vary", "rank"]
    assert command.main(["sensitivity", *map(str, options)]) == 0
    assert {row["varied"] for row in _rows(tmp_path / "sensitivity.csv")} == {"rank"}
    assert not (tmp_path / "sensitivity-eigenvalues.csv").exists()
    assert (tmp_path / "sensitivity.png").read_bytes().startswith(PNG)
    assert "start" not in capsys.readouterr().out.partition("| model")[2].partition("Results")[0]


def test_tables_and_figure_come_from_the_rows(results):
    assert (results / "sensitivity.png").read_bytes().startswith(PNG)
    rows = _rows(results / "sensitivity.csv")
    table = sensitivity_table(rows, "steps")
    assert "steps 4" in table and "steps 16" in table and table.count("\n") == 4
    assert "| Pro-KLShampoo, r = 8, start 0.1 − Muon" in table
    table = sensitivity_table([row | {"decided": "yes", "difference": "-0.25"} for row in rows], "rank")
    assert "Smok-Hop − KL-Shampoo" in table and table.count("-0.2500 ± ") == table.count(" *") == 3
