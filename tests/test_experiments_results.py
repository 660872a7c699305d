"""From runs to tables: verdicts on the paper's orderings, time to a matched loss, what Markdown shows."""

import math
from dataclasses import replace

import pytest
import torch

from bench.experiments import results, tables
from bench.experiments.protocol import Kind, Tuning
from bench.experiments.search import Search
from bench.experiments.units import Result
from bench.markdown import read_rows
from bench.presets import Range
from bench.training.run import Record
from bench.training.settings import Hyper
from tests.experiments import MICRO

LOWER, HIGHER = Kind("pro-klshampoo", 8, "auto"), Kind("kl-shampoo", None, "auto")


class _Study:
    scale, seeds = MICRO, (0, 1, 2)

    def plan(self, curve):
        return {"steps": self.scale.steps}


def _results(losses):
    return [Result(Record(losses=[1.0], validation=[(0, 9.0), (1, loss)]), 0, {}, "") for loss in losses]


def _ordering(lower, higher):
    found = {LOWER: _results(lower), HIGHER: _results(higher)}
    (row,) = results.ordering_rows(_Study, "auto", [(LOWER, HIGHER)], found)
    return row


def test_a_difference_is_paired_by_seed_and_decided_beyond_students_quantile():
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3), 3.46 times; of three seeds 4.30 are needed.
    row = _ordering([1.0, 2.0, 3.0], [1.1, 2.2, 3.3])
    assert row["difference"] == pytest.approx(0.2) and row["difference_se"] == pytest.approx(0.1 / math.sqrt(3))
    assert (row["verdict"], row["confidence"]) == ("undecided", 0.95)
    # 0.2, 0.3, 0.4: 5.2 times.
    assert _ordering([1.0, 2.0, 3.0], [1.2, 2.3, 3.4])["verdict"] == "agrees"
    assert _ordering([1.2, 2.3, 3.4], [1.0, 2.0, 3.0])["verdict"] == "contradicts"


def test_the_quantiles_leave_a_twentieth_of_students_t_outside():
    for n, quantile in enumerate(results.T_QUANTILES, 1):
        x = torch.linspace(0, quantile, 100_001, dtype=torch.float64)
        constant = math.gamma((n + 1) / 2) / (math.sqrt(n * math.pi) * math.gamma(n / 2))
        inside = 2 * torch.trapezoid(constant * (1 + x**2 / n) ** (-(n + 1) / 2), x).item()
        # The table's three decimals: half of the last one times the density there.
        assert inside == pytest.approx(results.CONFIDENCE, abs=5e-5)


def test_one_that_diverged_decides_nothing():
    row = _ordering([1.0, math.nan, 3.0], [1.1, 2.2, 3.3])
    assert math.isnan(row["difference"]) and row["verdict"] == "undecided"


def test_curves_have_the_mean_training_loss_since_the_evaluation_before():
    record = Record(
        losses=[5.0, 3.0, 2.0, 1.0],
        model_seconds=[1.0] * 4,
        optimizer_seconds=[0.5] * 4,
        validation=[(0, 6.0), (2, 4.0), (4, 2.5)],
    )
    found = {LOWER: [Result(record, 0, {}, "")] * 3}
    rows = results.curve_rows(_Study, found, timed=True)
    assert [(r["step"], r["validation_loss"], r["train_loss"], r["seconds"]) for r in rows[:3]] == [
        (0, 6.0, None, 0.0), (2, 4.0, 4.0, 3.0), (4, 2.5, 1.5, 6.0),
    ]  # fmt: skip
    assert [r["seed"] for r in rows] == [0] * 3 + [1] * 3 + [2] * 3
    untimed = results.curve_rows(_Study, found, timed=False)
    assert untimed == [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_a_row_names_every_commit_and_day_that_its_units_are_of():
    made = [{"commit": c, "date": d, "cpu": "A B"} for c, d in (("bb", "2"), ("aa", "2"), ("bb", "1"))]
    found = results.environment_of([Result(Record(), 0, environment, "") for environment in made])
    assert found == {"commit": "aa bb", "date": "1 2", "cpu": "A B"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "yes"),
        ({"lr": 0.05}, "no: lr"),
        ({"alpha_kl": 0.02}, "no: alpha_kl"),
        # GPT-2's decay is above 0 in the paper; scaled-down models have none, and none is searched.
        ({"weight_decay": 0.0, "lr": 0.005}, "no: lr"),
    ],
)
def test_the_sweep_says_what_lies_outside_the_papers_range(changes, said):
    hyper = replace(Hyper("pro-klshampoo", 0.02, 1e-3, 0.03, 0.0, 8, 0.01, "auto"), **changes)
    search = Search(hyper, Range((hyper.lr,), (hyper.weight_decay,), (hyper.alpha_kl,)), {hyper: 1.0})
    study = _Study()
    study.swept = {hyper: Result(Record(), 0, {"commit": "abc"}, "")}
    (row,) = results.sweep_rows(study, Tuning({LOWER: hyper}, {LOWER: search}))
    assert row["in_paper_range"] == said
    assert (row["commit"], row["steps"]) == ("abc", MICRO.steps)


def test_files_have_no_nan_and_are_written_whole(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    results.write(path, [{"a": math.nan, "b": None, "c": 1 / 3, "d": 7}, {"a": 1.0, "e": "x"}])
    assert path.read_text() == "a,b,c,d,e\n,,0.3333333,7,\n1,,,,x\n"
    assert [p.name for p in path.parent.iterdir()] == ["rows.csv"]


def _main_row(**changes):
    row = {"model": "m", "start": "auto", "optimizer": "pro-klshampoo", "rank": "8", "lr": "0.02", "alpha_kl": "0.01"}
    row |= {"validation_loss": "1.23456", "validation_loss_se": "0.00123", "diverged_at": "", "state_mb": "1.5"}
    row |= {"model_ms": "10.04", "optimizer_ms": "2.06", "peak_gib": "", "seconds_to_kl_shampoo_loss": ""}
    row["seconds_to_muon_loss"] = ""
    return row | changes


def test_the_main_table_shows_what_there_is_and_no_column_without_a_figure():
    lines = tables.main_table([_main_row(), _main_row(optimizer="adamw", rank="", alpha_kl="")]).splitlines()
    assert not any(name in lines[0] for name in ("GPU peak GiB", "s to KL-Shampoo's loss", "s to Muon's loss"))
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["m", "auto", "Pro-KLShampoo, r = 8", "0.02", "0.01", "1.2346 ± 0.0012", "10.0", "2.1", "1.50"]
    assert "| AdamW" in lines[3]
    times = {"seconds_to_kl_shampoo_loss": "33.33", "seconds_to_muon_loss": "44.44"}
    timed = tables.main_table([_main_row(peak_gib="2.5", **times)]).splitlines()
    assert [cell.strip() for cell in timed[0].strip("|").split("|")][-3:] == [
        "GPU peak GiB",
        "s to KL-Shampoo's loss",
        "s to Muon's loss",
    ]
    assert [cell.strip() for cell in timed[2].strip("|").split("|")][-3:] == ["2.50", "33.3", "44.4"]
    assert "diverged at step 7" in tables.main_table([_main_row(diverged_at="7", validation_loss="")])


def test_the_ablation_table_has_a_line_per_model_and_start():
    rows = [_main_row(optimizer=m, start=s) for s in ("auto", "0.1") for m in ("subspace-only", "pro-klshampoo")]
    lines = tables.ablation_table(rows).splitlines()
    assert len(lines) == 4
    assert [cell.strip() for cell in lines[0].strip("|").split("|")] == [
        "model",
        "start",
        "subspace only",
        "Pro-KLShampoo",
    ]


def test_the_sweep_table_says_what_was_tried_selected_and_still_open():
    common = {"model": "m", "start": "auto", "optimizer": "pro-klshampoo", "rank": "8"}
    rows = [
        common | {"lr": "0.01", "alpha_kl": "0.1", "selected": ""},
        common | {"lr": "0.02", "alpha_kl": "0.1", "selected": "at the edge of alpha_kl"},
        common | {"lr": "0.02", "alpha_kl": "0.05", "selected": ""},
    ]
    cells = [cell.strip() for cell in tables.sweep_table(rows).splitlines()[2].strip("|").split("|")]
    assert cells[2:] == ["Pro-KLShampoo, r = 8", "0.01, 0.02", "0.02", "0.05, 0.1", "0.1 (edge)"]


def test_the_orderings_table_says_at_what_level_it_decides():
    row = {"model": "m", "start": "auto", "lower": "a", "higher": "b", "verdict": "agrees", "confidence": "0.95"}
    row |= {"difference": "0.2", "difference_se": "0.01"}
    lines = tables.orderings_table([row]).splitlines()
    assert lines[0].rstrip(" |").endswith("here, at 95%") and "0.2000 ± 0.0100" in lines[2]


def test_rows_of_a_command_replace_those_of_its_models_and_keep_others(tmp_path):
    path = tmp_path / "main.csv"
    results.merge(path, [{"model": "a", "loss": 1.0}, {"model": "b", "loss": 2.0}, {"model": "a", "loss": 3.0}])
    results.merge(path, [{"model": "a", "loss": 4.0, "peak": 5.0}, {"model": "c", "loss": 6.0}])
    rows = [(row["model"], row["loss"], row["peak"]) for row in read_rows(path)]
    assert rows == [("a", "4", "5"), ("b", "2", ""), ("c", "6", "")]


def test_the_table_of_cosmos_has_memory_of_the_gpu_where_it_was_measured():
    row = {"model": "m", "start": "auto", "rank": "8", "validation_loss": "2.0", "validation_loss_se": "0.1"}
    row |= {"diverged_at": "", "state_mb": "3.0", "peak_gib": ""}
    rows = [row | {"optimizer": method} for method in ("cosmos", "pro-klshampoo")]
    assert "GPU peak" not in tables.cosmos_table(rows) and "COSMOS state MB" in tables.cosmos_table(rows)
    assert "Pro GPU peak GiB" in tables.cosmos_table([r | {"peak_gib": "1.5"} for r in rows])
