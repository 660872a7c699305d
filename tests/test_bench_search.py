"""Searches list their runs in order: the paper's comparisons, every length, and the size."""

import math
from dataclasses import replace
from itertools import islice

import pytest

from bench.optimizers import PRO
from bench.presets import preset
from bench.rows import RESULTS, frame
from bench.study import size
from bench.study.comparisons import COMPARISONS, possible
from bench.study.lengths import FORMS, FURTHEST, LONG, tuned, units, wanted
from bench.study.scales import PAPER, TINY

MODEL = "gpt2-tiny"


# The paper's comparisons


def test_the_paper_has_all_that_is_compared():
    for name, compared in COMPARISONS.items():
        for scale in possible(name, PAPER):
            assert all(preset(method, scale.name, rank).rank == rank for method, rank in compared(scale))
    pairs = [(method, rank) for rank in (64, 128) for method in ("cosmos", PRO)]
    assert COMPARISONS["cosmos"](PAPER[0]) == pairs  # at matched ranks


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
    return tuned(model, steps, form, losses).unit


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


# The size


def sized(loss):
    """All that is trained by a formula, in its order."""
    known, order = {}, []
    while missing := [trial for trial in size.size(known) if trial.key not in known]:
        order.append(missing[0])
        known[missing[0].key] = loss(missing[0])
    return order


def test_size_runs_have_first_rates_changes_then_second_rates():
    order, each = sized(lambda trial: trial.hyper.lr), len(size.RATES)
    changes, seconds = order[each:][: len(size.CHANGES)], order[each + len(size.CHANGES) :][:each]
    assert [trial.hyper.lr for trial in order[:each]] == [first for first, second in size.RATES.values()]
    default = replace(FORMS[PRO].default, rank=None)
    made = {trial.case: (trial.base, trial.hyper) for trial in changes}
    assert made == {case: ("Pro-KLShampoo", replace(default, **its)) for case, its in size.CHANGES.items()}
    assert [trial.hyper.lr for trial in seconds] == [second for first, second in size.RATES.values()]
    assert len({trial.key for trial in order}) == len(order) == 3 * each + len(size.CHANGES) + 1 + 2


def test_size_runs_add_a_third_rate_and_seeds_for_the_best():
    lowest = {PRO: 0.03, "muon": 0.005926}
    order = sized(lambda trial: abs(trial.hyper.lr - lowest.get(trial.hyper.method, 9.0)))
    rates = {}
    for trial in order:
        if not trial.base and trial.seed == 0 and not trial.longer:
            rates.setdefault(trial.case, []).append(trial.hyper.lr)
    assert (rates["Pro-KLShampoo"], rates["Muon"]) == ([0.01333, 0.02, 0.03], [0.01333, 0.008889, 0.005926])
    assert rates["SOAP"] == [0.0045, 0.003, 0.00675]  # the higher the better
    (longer,) = [trial for trial in order if trial.longer]
    assert (longer.case, longer.hyper.lr, longer.scale.steps) == ("Muon, momentum 0.9", 0.005926, 1124)
    # of Pro-KLShampoo, Muon with 0.9 and Muon, which all have a loss of 0, the first two
    second = [(trial.case, trial.hyper.lr) for trial in order if trial.seed == 1]
    assert second == [("Pro-KLShampoo", 0.03), ("Muon, momentum 0.9", 0.005926)]
