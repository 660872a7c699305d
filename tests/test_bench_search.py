"""Searches list their runs in order: the paper's comparisons, and every length."""

import math
from itertools import islice

import pytest

from bench.optimizers import PRO
from bench.rows import RESULTS, frame
from bench.study.comparisons import COMPARISONS, selected
from bench.study.lengths import FORMS, FURTHEST, LONG, tuned, units, wanted
from bench.study.scales import TINY

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


def loss_of(unit, best=0.01):
    """A loss with one minimum in the rate, which halves where runs are four times as long."""
    return math.log(unit.lr / (best * (400 / unit.steps) ** 0.5)) ** 2


def trained(lengths, forms, seeds, models=(MODEL,), loss=loss_of, at_once=2):
    """The losses of all that is wanted, in the order in which it was trained; no run twice."""
    losses = {}
    while batch := list(islice(dict.fromkeys(wanted(models, lengths, forms, seeds, losses)), at_once)):
        assert not losses.keys() & batch
        losses |= {unit: loss(unit) for unit in batch}
    return losses


def best(losses, steps, form, model=MODEL):
    return tuned(model, steps, form, losses)[0]


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


def test_other_lengths_or_models_leave_tuned_ones_alone():
    losses = trained((400,), ("adamw", "muon"), (0,), ("gpt2-tiny", "llama-tiny"))
    known = {model: best(losses, 400, "muon", model) for model in ("gpt2-tiny", "llama-tiny")}
    for steps, count in ((100, 5), (1600, 100)):
        for _ in range(count):
            for unit in islice(wanted((MODEL,), (steps,), ("adamw", "muon"), (0,), losses), 1):
                losses[unit] = loss_of(unit)
        assert {model: best(losses, 400, "muon", model) for model in known} == known
    assert best(losses, 1600, "muon") is not None


def test_a_search_without_a_minimum_goes_down_and_ends():
    for loss in (lambda unit: unit.lr, lambda unit: math.inf):
        losses = trained((400,), ("adamw",), (0,), loss=loss)
        assert len(losses) <= 2 * FURTHEST and best(losses, 400, "adamw").lr == min(unit.lr for unit in losses)
