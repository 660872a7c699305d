"""From runs to tables: verdicts on the paper's orderings, time to a matched loss, what Markdown shows."""

import math

import pytest

from bench.experiments import results, tables
from bench.experiments.protocol import Kind
from bench.experiments.units import Result
from bench.run import Record
from tests.experiments import MICRO

LOWER, HIGHER = Kind("pro-klshampoo", 8, "auto"), Kind("kl-shampoo", None, "auto")


class _Study:
    scale, seeds = MICRO, (0, 1, 2)


def _results(losses):
    return [Result(Record(losses=[1.0], validation=[(0, 9.0), (1, loss)]), 0, {}, "") for loss in losses]


def _ordering(lower, higher):
    found = {LOWER: _results(lower), HIGHER: _results(higher)}
    (row,) = results.ordering_rows(_Study, "auto", [(LOWER, HIGHER)], found)
    return row


def test_a_difference_is_paired_by_seed_and_decided_beyond_twice_its_error():
    # Differences 0.1, 0.2, 0.3: mean 0.2, standard error 0.1 / sqrt(3).
    row = _ordering([1.0, 2.0, 3.0], [1.1, 2.2, 3.3])
    assert row["difference"] == pytest.approx(0.2) and row["difference_se"] == pytest.approx(0.1 / math.sqrt(3))
    assert row["verdict"] == "agrees"
    assert _ordering([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])["verdict"] == "contradicts"
    assert _ordering([1.0, 2.0, 3.0], [1.1, 2.0, 3.01])["verdict"] == "undecided"


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
    rows = results.curve_rows(_Study, {LOWER: [Result(record, 0, {}, "")] * 3})
    assert [(r["step"], r["validation_loss"], r["train_loss"], r["seconds"]) for r in rows[:3]] == [
        (0, 6.0, None, 0.0), (2, 4.0, 4.0, 3.0), (4, 2.5, 1.5, 6.0),
    ]  # fmt: skip
    assert [r["seed"] for r in rows] == [0] * 3 + [1] * 3 + [2] * 3


def test_files_have_no_nan_and_are_written_whole(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    results.write(path, [{"a": math.nan, "b": None, "c": 1 / 3, "d": 7, "e": "x"}])
    assert path.read_text() == "a,b,c,d,e\n,,0.3333333,7,x\n"
    assert [p.name for p in path.parent.iterdir()] == ["rows.csv"]


def _main_row(**changes):
    row = {"model": "m", "start": "auto", "optimizer": "pro-klshampoo", "rank": "8", "lr": "0.02", "alpha_kl": "0.01"}
    row |= {"validation_loss": "1.23456", "validation_loss_se": "0.00123", "diverged_at": "", "state_mb": "1.5"}
    row |= {"model_ms": "10.04", "optimizer_ms": "2.06", "peak_gib": "", "seconds_to_kl_shampoo_loss": ""}
    return row | changes


def test_the_main_table_shows_what_there_is_and_no_column_without_a_figure():
    lines = tables.main_table([_main_row(), _main_row(optimizer="adamw", rank="", alpha_kl="")]).splitlines()
    assert "GPU peak GiB" not in lines[0] and "s to KL-Shampoo's loss" not in lines[0]
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells == ["m", "auto", "Pro-KLShampoo, r = 8", "0.02", "0.01", "1.2346 ± 0.0012", "10.0", "2.1", "1.50"]
    assert "| AdamW" in lines[3]
    timed = tables.main_table([_main_row(peak_gib="2.5", seconds_to_kl_shampoo_loss="33.33")])
    assert "GPU peak GiB" in timed and "33.3" in timed
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
