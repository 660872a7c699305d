"""From runs to rows: time to a matched loss, means and standard errors."""

import math

import pytest

from bench.optimizers import Hyper
from bench.study import results
from bench.study.study import by_key
from bench.study.units import Result
from bench.training.run import Record
from tests.experiments import MICRO

SELECTED = by_key([Hyper("kl-shampoo", 0.1), Hyper("pro-klshampoo", 0.1, rank=8)])


class Study:
    scale, seeds = MICRO, (0, 1, 2)

    plan = {"steps": MICRO.steps}


def of(*losses, **more):
    return [Result(Record([1.0], [0.5], [0.25], [(0, 9.0), (1, loss)], **more), 0, {}, "") for loss in losses]


def test_where_a_loss_is_reached_is_interpolated():
    losses, at = [5.0, 3.0, 2.0], [0.0, 3.0, 6.0]
    assert [results.reached(losses, at, loss) for loss in (3.0, 2.5, 5.0, 6.0)] == [3.0, 4.5, 0.0, 0.0]
    assert math.isnan(results.reached(losses, at, 1.9)) and math.isnan(results.reached(losses, at, math.nan))


def test_rows_have_means_and_errors_over_seeds_and_times_without_the_first_step():
    record = Record([1.0] * 3, [9.0, 1.0, 2.0], [8.0, 3.0, 5.0], [(0, 9.0), (3, 2.0)], state_bytes=5_000_000)
    found = {"kl-shampoo": [Result(record, 0, {"cpu": "x"}, "")] * 3, "pro-klshampoo-r8": of(1.0, 2.0, 4.5)}
    kl, pro = results.rows_of(Study(), SELECTED, found)
    assert (kl["model_ms"], kl["optimizer_ms"], kl["seconds_to_kl_shampoo_loss"]) == (1500.0, 4000.0, 28.0)
    assert (kl["state_mb"], kl["cpu"], kl["lr"]) == (5.0, "x", 0.1)
    assert pro["validation_loss"] == 2.5 and pro["validation_loss_se"] == pytest.approx(1.0408, abs=1e-4)
    # One of its seeds did not reach KL-Shampoo's loss, so there is no mean.
    assert math.isnan(pro["seconds_to_kl_shampoo_loss"]) and math.isnan(pro["optimizer_ms"])


def test_curves_have_the_loss_and_the_seconds_of_every_evaluation():
    record = Record([5.0, 3.0, 2.0, 1.0], [1.0] * 4, [0.5] * 4, [(0, 6.0), (2, 4.0), (4, 2.5)])
    rows = results.curve_rows(Study(), SELECTED, dict.fromkeys(SELECTED, [Result(record, 0, {}, "")] * 3))
    found = [(r["rank"], r["seed"], r["step"], r["validation_loss"], r["seconds"]) for r in rows]
    every = [(0, 6.0, 0.0), (2, 4.0, 3.0), (4, 2.5, 6.0)]
    assert found == [(rank, seed, *its) for rank in (None, 8) for seed in (0, 1, 2) for its in every]
