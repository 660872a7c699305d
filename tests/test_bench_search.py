"""The paper's values and run lengths against its text; searches list their runs in order; what their tables show."""

import inspect
import math
from itertools import islice

import pytest

from bench import rows
from bench.models import CONFIGS
from bench.optimizers import OPTIMIZERS, OWN, PRO, Hyper
from bench.presets import RUNS, preset
from bench.rows import RESULTS, frame
from bench.study import figures
from bench.study import lengths_tables as tables
from bench.study.comparisons import COMPARISONS, selected
from bench.study.lengths import FORMS, FURTHEST, LONG, Unit, at_default, tuned, units, wanted
from bench.study.scales import TINY
from tests.commands import ROOT

MODEL = "gpt2-tiny"


# The paper's comparisons


def test_the_paper_has_all_that_is_compared():
    found = {name: [(h.method, h.rank) for h in selected(name, "gpt2-124m")] for name in COMPARISONS}
    pro = [(PRO, rank) for rank in (32, 64, 128)]
    assert found["main"] == [("adamw", None), ("muon", None), ("kl-shampoo", None), *pro]
    ranked = [(method, 128) for method in ("subspace-only", "complement-only", "smok-hop", PRO)]
    assert found["ablation"] == [("kl-shampoo", None), *ranked]
    assert found["cosmos"] == [(method, rank) for rank in (64, 128) for method in ("cosmos", PRO)]  # at matched ranks
    others = {h.method for h in selected("ablation", "llama-450m")}
    assert others == {"smok-hop", PRO, "kl-shampoo"} and selected("ablation", "gpt2-350m") == []


# Every length


def trained(lengths, forms, seeds, models, loss, at_once=2):
    """The losses of all that is wanted, in the order in which it was trained; no run twice."""
    losses = {}
    while batch := list(islice(dict.fromkeys(wanted(models, lengths, forms, seeds, losses)), at_once)):
        assert not losses.keys() & batch
        losses |= {unit: loss(unit) for unit in batch}
    return losses


@pytest.mark.parametrize(
    "lengths, forms, seeds",
    [
        ((400, 1600), [form for form in FORMS if not form.startswith("online-")], (0, 1, 2, 3)),
        ((400, 1600, LONG), ["muon-0.9", "kl-shampoo", "pro-klshampoo"], (0, 1)),
    ],
    ids=["400 and 1,600 steps", "6,400 steps"],
)
def test_finished_searches_have_the_runs_that_the_rules_ask_for(lengths, forms, seeds):
    """Methods whose searches have ended: rates, alpha_kl, the defaults and README's rate, on all seeds."""
    recorded = units(frame(RESULTS / "lengths.csv"))
    losses = trained(lengths, forms, seeds, TINY, recorded.__getitem__, at_once=None)
    of_forms = {unit for unit in recorded if unit.steps in lengths and unit.form in forms and unit.seed in seeds}
    former = {unit for unit in of_forms if (unit.form, unit.steps, unit.lr) == (PRO, 400, 0.015)}  # default of before
    assert {unit for unit in losses if unit.form in forms} == of_forms - former


def test_results_say_which_default_rate_is_not_the_classs():
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for form in FORMS.values():
        if form.default.method in OWN and form.default.preset is None:
            own = inspect.signature(OPTIMIZERS[form.default.method].make).parameters["lr"].default
            if form.default.lr != own:
                assert f"`lr` of {form.default.lr}, not its default {own}" in " ".join(results.split())


def test_a_search_without_a_minimum_goes_down_and_ends():
    for loss in (lambda unit: unit.lr, lambda unit: math.inf):
        losses = trained((400,), ("adamw",), (0,), (MODEL,), loss)
        assert len(losses) <= 2 * FURTHEST
        assert tuned(MODEL, 400, "adamw", losses)[0].lr == min(unit.lr for unit in losses)


# The paper's values


@pytest.mark.parametrize(
    ("key", "selected"),
    [
        # One row of every form that the printed tables have: with and without decay, alpha_kl, ranks that differ. Last
        # are AdamW's values, which embedding and head have.
        (("adamw", "gpt2-124m", None), (2e-3, 0.05, None, 2e-3, 0.05)),
        (("cosmos", "gpt2-350m", 64), (1e-3, 0.5, None, 2e-3, 0.05)),
        (("pro-klshampoo", "gpt2-124m", 32), (0.02, 0.03, 0.01, 2e-3, 0.05)),
        (("pro-klshampoo", "llama-134m", 128), (0.03, 0.0, 0.01, 3e-3, 0.0)),
        (("kl-shampoo", "llama-450m", None), (3e-3, 0.0, None, 2e-3, 0.0)),
        (("smok-hop", "gpt2-124m", 128), (2e-3, 0.25, None, 2e-3, 0.05)),
        # Pro-KLShampoo's values with the rate times 1.5.
        (("subspace-only", "gpt2-124m", 128), (0.03, 0.03, 0.01, 2e-3, 0.05)),
        (("complement-only", "llama-134m", 128), (0.045, 0.0, 0.01, 3e-3, 0.0)),
    ],
)
def test_rows_are_as_printed_and_methods_in_the_papers_form(key, selected):
    method, model, rank = key
    lr, decay, alpha, adamw_lr, adamw_decay = selected
    found = preset(method, model, rank)
    assert found.lr == pytest.approx(lr, rel=1e-12)  # 1.5 * 0.02 is rounded
    assert found == Hyper(method, found.lr, adamw_lr, decay, adamw_decay, rank, alpha, preset="paper", bounded=False)


def test_runs_are_as_long_as_the_paper_says():
    assert tuple(RUNS) == ("gpt2-124m", "gpt2-350m", "llama-134m", "llama-450m") and set(RUNS) < set(CONFIGS)
    assert [run.steps for run in RUNS.values()] == [5100, 13_000, 5000, 6250]
    tokens = [run.steps * run.batch * CONFIGS[name].context / 1e9 for name, run in RUNS.items()]
    assert tokens == pytest.approx([2.7, 6.8, 5, 10], rel=0.05)


# Tables and figures of every length: what bench.tables --check does not hold


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


def test_the_unit_of_a_row_is_the_one_that_was_trained(tmp_path):
    unit = Unit(MODEL, 400, "pro-klshampoo-paper", 0.01333, 0.00225, 0.015, 1)
    row = {"model": unit.model, "steps": 400, "optimizer": unit.form, "seed": 1, "validation_loss": 2.0}
    diverged = at_default(MODEL, 400, "muon", 0)
    other = {"model": MODEL, "steps": 400, "optimizer": "muon", "seed": 0, "lr": 0.02, "adamw_lr": 0.003}
    rows.write(tmp_path / "rows.csv", [other, row | {"lr": unit.lr, "adamw_lr": unit.adamw_lr, "alpha_kl": 0.015}])
    assert units(frame(tmp_path / "rows.csv")) == {diverged: math.inf, unit: 2.0}
