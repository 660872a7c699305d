"""What is trained and in which order: the paper's comparisons, every length, and the size."""

import math
from dataclasses import replace
from itertools import islice

import pytest

from bench.optimizers import PRO
from bench.presets import preset
from bench.study import size
from bench.study.comparisons import COMPARISONS, possible
from bench.study.lengths import (
    ADAMW_LR,
    FORMS,
    FURTHEST,
    LONG,
    STEP,
    at_default,
    power,
    powers,
    rounded,
    tuned,
    wanted,
)
from bench.study.scales import PAPER

MODEL = "gpt2-tiny"


# The paper's comparisons


def test_the_paper_has_all_that_is_compared():
    for name, compared in COMPARISONS.items():
        for scale in possible(name, PAPER):
            assert all(preset(method, scale.name, rank).rank == rank for method, rank in compared(scale))
    pairs = [(method, rank) for rank in (64, 128) for method in ("cosmos", PRO)]
    assert COMPARISONS["cosmos"](PAPER[0]) == pairs  # at matched ranks


# Every length


def test_a_rate_is_the_power_of_the_step_that_it_was_made_as():
    assert [power(rounded(0.003 * STEP**k), 0.003) for k in range(-4, 5)] == list(range(-4, 5))


def loss_of(unit, best=0.01, alpha=0.02):
    """A loss with one minimum in the rate, which halves where runs are four times as long, and one in alpha_kl."""
    at = math.log(unit.lr / (best * (400 / unit.steps) ** 0.5))
    return at**2 + (math.log(unit.alpha_kl / alpha) ** 2 if unit.alpha_kl else 0) + 0.01 * unit.seed


def trained(lengths, forms, seeds, models=(MODEL,), loss=loss_of):
    """The losses by a formula of all that is wanted, in the order in which it was trained; no run twice."""
    losses = {}
    while batch := list(islice(dict.fromkeys(wanted(models, lengths, forms, seeds, losses)), 2)):
        assert not losses.keys() & batch
        losses |= {unit: loss(unit) for unit in batch}
    return losses


def best(losses, steps, form, model=MODEL):
    return tuned(model, steps, form, losses).unit


@pytest.mark.parametrize("form", ["adamw", "kl-shampoo", "pro-klshampoo-paper"])
def test_the_best_is_a_minimum_among_neighbours_at_every_length(form):
    losses = trained((400, 1600), ("adamw", form), (0, 1))
    for steps in (400, 1600):
        unit, own = best(losses, steps, form), FORMS[form].default
        for name in ("lr", "alpha_kl") if FORMS[form].alpha else ("lr",):
            k = power(getattr(unit, name), base := getattr(own, name))
            beside = [replace(unit, **{name: value}) for value in powers(base, k - 1, k + 1)]
            # alpha_kl is searched at the best rate, the rate at the first alpha_kl
            assert name == "lr" and FORMS[form].alpha or all(losses[one] > losses[unit] for one in beside)
        assert abs(math.log(unit.lr / (0.01 if steps == 400 else 0.005))) <= math.log(STEP) / 2 + 1e-3


def test_the_best_and_the_defaults_are_trained_on_all_seeds():
    losses = trained((400,), ("adamw", "muon"), (0, 1, 2))
    for form in ("adamw", "muon"):
        for seed in (0, 1, 2):
            assert replace(best(losses, 400, form), seed=seed) in losses
            assert at_default(MODEL, 400, form, seed) in losses
    others = {unit.adamw_lr for unit in losses if unit.form == "muon"}
    assert others == {best(losses, 400, "adamw").lr, ADAMW_LR}


def test_readmes_rate_beside_the_matrices_or_the_defaults_are_the_best_where_they_are_lower():
    losses = trained((400,), ("adamw", "muon"), (0,))
    unit, default = best(losses, 400, "muon"), at_default(MODEL, 400, "muon", 0)
    assert unit.adamw_lr == best(losses, 400, "adamw").lr != ADAMW_LR and unit != default
    beside = replace(unit, adamw_lr=ADAMW_LR)
    assert best(losses | {beside: -1.0}, 400, "muon") == beside
    assert best(losses | {beside: 9.0}, 400, "muon") == unit
    assert best(losses | {default: -1.0}, 400, "muon") == default
    assert best(losses | {unit: math.inf}, 400, "muon") != unit


@pytest.mark.parametrize("form", ["adamw", "pro-klshampoo-paper"])
def test_a_search_begins_at_the_best_of_the_shorter_length(form):
    losses = trained((400, 1600), dict.fromkeys(("adamw", form)), (0,))
    shorter, default = best(losses, 400, form), at_default(MODEL, 1600, form, 0)
    first = [unit for unit in losses if unit.steps == 1600 and unit.form == form and unit != default][:3]
    assert shorter.lr in {unit.lr for unit in first} and {unit.alpha_kl for unit in first} == {shorter.alpha_kl}
    assert shorter.alpha_kl != default.alpha_kl or form == "adamw"


def test_long_runs_are_tried_at_the_trends_rate_and_the_next_lower_one_beside_the_defaults():
    losses = trained((400, 1600), ("adamw", "muon"), (0,))
    assert [power(best(losses, steps, "muon").lr, 0.02) for steps in (400, 1600)] == [-2, -3]  # 0.01, 0.005
    default = at_default(MODEL, LONG, "muon", 0)
    first = tuned(MODEL, LONG, "muon", losses).wanted
    assert set(first) == {default, *(replace(default, lr=lr) for lr in powers(0.02, -4, -5))}
    losses |= {unit: loss_of(unit) for unit in first}
    lowest = min(first, key=losses.get)
    assert best(losses, LONG, "muon") == lowest != default
    seeds = list(wanted((MODEL,), (LONG,), ("muon",), (0, 1), losses))
    assert {(unit.seed, unit.lr) for unit in seeds} == {(1, 0.02), (1, lowest.lr)}


def test_of_a_trend_no_more_than_one_power_is_followed():
    losses = trained((400, 1600), ("adamw", "muon"), (0,))
    unit = best(losses, 1600, "muon")
    far = replace(unit, lr=rounded(0.02 * STEP**-7))
    losses |= {replace(unit, lr=rounded(0.02 * STEP**k)): k - 9.0 for k in range(-8, -3)}
    losses |= {far: -50.0, replace(far, adamw_lr=ADAMW_LR): 0.0}
    assert best(losses, 1600, "muon") == far
    assert {unit.lr for unit in tuned(MODEL, LONG, "muon", losses).wanted} == set(powers(0.02, 0, -8, -9))


def test_a_command_of_other_lengths_or_models_leaves_what_is_tuned():
    losses = trained((400,), ("adamw", "muon"), (0,), ("gpt2-tiny", "llama-tiny"))
    known = {model: best(losses, 400, "muon", model) for model in ("gpt2-tiny", "llama-tiny")}
    for steps, count in ((100, 5), (1600, 100)):
        for _ in range(count):
            for unit in islice(wanted((MODEL,), (steps,), ("adamw", "muon"), (0,), losses), 1):
                losses[unit] = loss_of(unit)
        assert {model: best(losses, 400, "muon", model) for model in known} == known
    assert best(losses, 1600, "muon") is not None


def test_a_search_without_a_minimum_or_of_runs_that_all_diverge_goes_down_and_ends():
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


def test_of_the_size_first_rates_come_before_changes_of_the_defaults_and_these_before_second_rates():
    order, each = sized(lambda trial: trial.hyper.lr), len(size.RATES)
    changes, seconds = order[each:][: len(size.CHANGES)], order[each + len(size.CHANGES) :][:each]
    assert [trial.hyper.lr for trial in order[:each]] == [first for first, second in size.RATES.values()]
    default = replace(FORMS[PRO].default, rank=None)
    made = {trial.case: (trial.base, trial.hyper) for trial in changes}
    assert made == {case: ("Pro-KLShampoo", replace(default, **its)) for case, its in size.CHANGES.items()}
    assert [trial.hyper.lr for trial in seconds] == [second for first, second in size.RATES.values()]
    assert len({trial.key for trial in order}) == len(order) == 3 * each + len(size.CHANGES) + 1 + 2


def test_of_the_size_a_third_rate_lies_beyond_the_better_and_longer_runs_and_second_seeds_have_the_best():
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
