"""Tables and figures of ``bench.study lengths``: what ``bench.tables --check`` does not hold."""

import math

import pytest
from pandas import concat

from bench import rows
from bench.rows import RESULTS, frame
from bench.study import figures
from bench.study import lengths_tables as tables
from bench.study.lengths import Unit, at_default, units
from bench.study.scales import TINY
from tests.test_bench_search import MODEL


def test_the_figure_shows_tuned_runs_in_one_machines_seconds(tmp_path, monkeypatch):
    found, curves = frame(RESULTS / "lengths.csv"), frame(RESULTS / "lengths-curves.csv")
    drawn = {}

    def save(figure, path, dpi):
        drawn[path] = [axes.get_lines() for axes in figure.axes]

    monkeypatch.setattr(figures.Figure, "savefig", save)
    for x in ("step", "seconds"):
        figures.lengths(x, found, curves, x)
    every, ms = tables.best_units(found), tables.step_ms(found)
    for i, model in enumerate(TINY):
        for form, of_steps, of_seconds in zip(tables.DRAWN, drawn["step"][i], drawn["seconds"][i], strict=True):
            best = tables.by_seed(found, every[model, figures.STEPS][form])
            loss = pytest.approx(best[tables.judged(best.index)].mean(), rel=1e-5)
            assert (of_steps.get_xdata()[-1], of_steps.get_ydata()[-1]) == (figures.STEPS, loss)
            seconds = figures.STEPS * ms[model, form] / 1e3
            assert (of_seconds.get_xdata()[-1], of_seconds.get_ydata()[-1]) == (pytest.approx(seconds), loss)


def test_costs_stand_in_the_order_of_the_models():
    found = frame(RESULTS / "lengths.csv")
    later = (found["optimizer"] == "muon") & (found["model"] == next(iter(TINY)))
    assert tables.losses_table(concat([found[~later], found[later]])) == tables.losses_table(found)
    online = next(line for line in tables.losses_table(found).splitlines() if line.startswith("| Online"))
    of_form = found[found["optimizer"] == "online-kl-shampoo-0.9"].groupby("model")["state_mb"].median()
    assert online.split("|")[-2].strip() == " / ".join(f"{of_form[model]:.1f}" for model in TINY)


def test_the_unit_of_a_row_is_the_one_that_was_trained(tmp_path):
    unit = Unit(MODEL, 400, "pro-klshampoo-paper", 0.01333, 0.00225, 0.015, 1)
    row = {"model": unit.model, "steps": 400, "optimizer": unit.form, "seed": 1, "validation_loss": 2.0}
    diverged = at_default(MODEL, 400, "muon", 0)
    other = {"model": MODEL, "steps": 400, "optimizer": "muon", "seed": 0, "lr": 0.02, "adamw_lr": 0.003}
    rows.write(tmp_path / "rows.csv", [other, row | {"lr": unit.lr, "adamw_lr": unit.adamw_lr, "alpha_kl": 0.015}])
    assert units(frame(tmp_path / "rows.csv")) == {diverged: math.inf, unit: 2.0}
