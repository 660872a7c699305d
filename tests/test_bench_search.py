"""What is searched for and in which order: the one search, the paper's protocol, every length, and the size."""

import math
from dataclasses import replace
from itertools import islice

import pytest

from bench import presets
from bench.command import UsageError
from bench.optimizers import Hyper
from bench.presets import RANGES, Range, preset
from bench.study import size
from bench.study.comparisons import COMPARISONS
from bench.study.lengths import ADAMW_LR, FORMS, LONG, at_default, tuned, wanted
from bench.study.protocol import ABLATIONS, PRO, Kind, Search, kind
from bench.study.protocol import tuned as by_protocol
from bench.study.scales import SCALES
from bench.study.search import FURTHEST, STEP, WIDEST, neighbours, power, powers, rounded

SCALE = {scale.name: scale for scales in SCALES.values() for scale in scales}
TINY, MODEL = SCALE["gpt2-tiny"], "gpt2-tiny"


# One search


def found(lr, alpha=(), loss=lambda h: 0.0, decay=(0.0,)):
    """A search run to its end, and all that was measured, in order."""
    losses = {}
    while wanted := (search := Search(Hyper(PRO, 0.0, 1e-3), Range(lr, decay, alpha), losses)).found.wanted:
        losses[wanted[-1]] = loss(wanted[-1])  # runs end in any order
    return search, search.found.tried


def near(lr, alpha=None):
    """A loss with its minimum at these values, in a logarithmic scale."""
    return lambda h: math.log(h.lr / lr) ** 2 + (0 if alpha is None else math.log(h.alpha_kl / alpha) ** 2)


@pytest.mark.parametrize(
    ("optimum", "more"),
    [(0.02, []), (0.1, [0.05, 0.1, 0.2]), (0.006, [0.005, 0.003]), (0.002, [0.005, 0.003, 0.002, 0.001])],
)
def test_a_range_grows_by_the_grid_until_the_best_has_worse_neighbours(optimum, more):
    search, tried = found((0.01, 0.02, 0.03), loss=near(optimum))
    assert [h.lr for h in tried] == [0.01, 0.02, 0.03, *more]
    rates = sorted(h.lr for h in tried)
    assert 0 < rates.index(search.found.best.lr) < len(rates) - 1 and not search.edges


def test_rates_between_those_of_the_grid_have_neighbours_too():
    values = (0.002, 0.003, 0.004, 0.005, 0.008)
    assert [neighbours(x, values) for x in (0.004, 0.008, 0.002)] == [[0.003, 0.005], [0.005, 0.01], [0.001, 0.003]]
    assert [power(rounded(0.003 * STEP**k), 0.003) for k in range(-4, 5)] == list(range(-4, 5))


def test_learning_rate_and_alpha_grow_together_and_decay_or_what_has_a_single_value_does_not():
    search, tried = found((0.01, 0.02), (0.005, 0.01), loss=near(0.05, 0.05))
    assert (search.found.best.lr, search.found.best.alpha_kl) == (0.05, 0.05)
    every = {(h.lr, h.alpha_kl) for h in tried}
    assert len(every) == len(tried) and {(0.03, 0.05), (0.1, 0.05), (0.05, 0.03), (0.05, 0.1)} <= every
    search, tried = found((0.01, 0.02, 0.03), (0.01,), lambda h: near(0.02)(h) - h.weight_decay, (0.0, 0.1))
    assert len(tried) == 6 and search.found.best.weight_decay == 0.1 and {h.alpha_kl for h in tried} == {0.01}


def test_a_search_ends_at_its_limit_and_says_in_what():
    search, tried = found((0.01, 0.02, 0.03), loss=near(1e-9))
    assert min(h.lr for h in tried) == pytest.approx(0.01 / WIDEST) and search.edges == ["lr"]
    search, tried = found((0.01, 0.02, 0.03), (0.005, 0.01), loss=near(0.02, 100.0))
    assert max(h.alpha_kl for h in tried) == pytest.approx(0.01 * WIDEST) and search.edges == ["alpha_kl"]


def test_a_diverged_rate_is_never_best_and_everything_diverged_is_an_error():
    search, _ = found((0.01, 0.02, 0.03), loss=lambda h: math.inf if h.lr > 0.01 else -h.lr)
    assert search.found.best.lr == 0.01 and not search.edges
    with pytest.raises(UsageError, match=r"pro-klshampoo diverged at every learning rate tried: \[0.001, .*0.02\]"):
        found((0.01, 0.02), loss=lambda h: math.inf)


# The paper's protocol

BEST = {"adamw": 5e-3, "muon": 2e-2, "kl-shampoo": 1e-2, PRO: 2e-2, "smok-hop": 3e-3, "cosmos": 1e-3}


def protocol(kinds, scale, search=True):
    """What is selected by losses with a known optimum per method, and all that was tried, in order."""
    losses = {}
    while (tuning := by_protocol(kinds, scale, search, losses)).wanted:
        for h in tuning.wanted:
            assert h not in losses
            losses[h] = math.log(h.lr / BEST[h.method]) ** 2 + math.log((h.alpha_kl or 1e-2) / 1e-2) ** 2
    return tuning.selected, list(losses)


def everything(scale, start="auto"):
    methods = ("adamw", "muon", "kl-shampoo", "smok-hop", *ABLATIONS)
    return [*(kind(m, scale.largest, start) for m in methods), *(Kind(PRO, rank, start) for rank in scale.ranks)]


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_adamw_is_tuned_first_and_every_method_gets_its_own_optimum(name):
    selected, tried = protocol(everything(SCALE[name]), SCALE[name])
    methods = [h.method for h in tried]
    assert "adamw" not in methods[methods.index("muon") :] and not set(methods) & set(ABLATIONS)
    assert {h.adamw_lr for h in tried if h.method != "adamw"} == {BEST["adamw"]}
    assert all(h.weight_decay == h.adamw_weight_decay == 0 for h in tried)
    for k, hyper in selected.items():
        assert (hyper.method, hyper.rank, hyper.init_eigenvalue) == (k.method, k.rank, k.start)
        # The ablation variants have Pro-KLShampoo's values with one and a half times its rate.
        assert hyper.lr == pytest.approx(1.5 * BEST[PRO] if k.method in ABLATIONS else BEST[k.method])


def test_alpha_is_searched_at_the_largest_rank_and_starts_apart():
    _, tried = protocol([*everything(TINY), *everything(TINY, 0.1)], TINY)
    of = {rank: {(h.lr, h.alpha_kl) for h in tried if (h.method, h.rank) == (PRO, rank)} for rank in (4, 16)}
    assert {(lr, alpha) for lr in (0.01, 0.02, 0.03) for alpha in (0.005, 0.01, 0.015)} <= of[16]
    assert {alpha for _, alpha in of[4]} == {0.01}
    by_start = {start: {h.method for h in tried if h.init_eigenvalue == start} for start in ("auto", 0.1, None)}
    assert by_start == {None: {"adamw", "muon"}, **dict.fromkeys(("auto", 0.1), {"kl-shampoo", PRO, "smok-hop"})}


@pytest.mark.parametrize("scale", SCALES["paper"], ids=lambda scale: scale.name)
def test_the_papers_models_take_its_selected_values_or_search_all_of_its_table(scale):
    kinds = [Kind("adamw"), Kind("muon"), Kind("kl-shampoo", None, 0.1), *(Kind(PRO, r, 0.1) for r in scale.ranks)]
    selected, tried = protocol(kinds, scale, search=False)
    assert not tried
    for k, hyper in selected.items():
        paper = preset(k.method, scale.name, k.rank)
        assert (hyper.lr, hyper.weight_decay, hyper.alpha_kl) == (paper.lr, paper.weight_decay, paper.alpha_kl)
        assert (hyper.adamw_lr, hyper.adamw_weight_decay) == (paper.adamw_lr, paper.adamw_weight_decay)
        assert not hyper.bounded
    _, tried = protocol([Kind("muon"), Kind(PRO, 32, 0.1)], scale)
    for method, rank in (("adamw", None), ("muon", None), (PRO, 32)):
        table = RANGES[method, scale.name, rank]
        of = {(h.lr, h.weight_decay) for h in tried if h.method == method and h.rank == rank}
        assert {(lr, decay) for lr in table.lr for decay in table.weight_decay} <= of
    assert not any(h.bounded for h in tried if h.method == PRO)


def test_what_the_paper_does_not_have_is_known_before_anything_trains(monkeypatch):
    for search in (False, True):
        with pytest.raises(UsageError, match="the paper .* no smok-hop.* on gpt2-350m; (choose|give)"):
            by_protocol([Kind("smok-hop", 128, 0.1)], SCALE["gpt2-350m"], search, {})
    with pytest.raises(UsageError, match="gpt2-124m trains on FineWeb-10B; give its token shards with --data"):
        SCALE["gpt2-124m"].open(None)
    monkeypatch.delitem(presets.RANGES, ("muon", "llama-450m", None))
    with pytest.raises(UsageError, match="no muon on llama-450m; .* it did: gpt2-124m, gpt2-350m, llama-134m"):
        COMPARISONS["main"].possible([SCALE["llama-134m"], SCALE["llama-450m"]], (0.1,), search=True)


def test_every_claim_is_about_methods_of_its_table_and_the_paper_has_all_that_they_need():
    for comparison in COMPARISONS.values():
        for scale in SCALE.values():
            kinds, claims = comparison.kinds(scale, 0.1), comparison.claims(scale, 0.1)
            assert {k for claim in claims for k in claim} <= set(kinds) and len(set(kinds)) == len(kinds)
            # The paper has no ablation on GPT-2 350M.
            assert bool(claims) == bool(kinds) == ((comparison.name, scale.name) != ("ablation", "gpt2-350m"))
    for model, runs in (("gpt2", ["gpt2-124m"]), ("llama", ["llama-134m", "llama-450m"])):
        scales = [scale for scale in SCALES["paper"] if scale.name.startswith(model)]
        for search in (False, True):
            possible = COMPARISONS["ablation"].possible(scales, (0.1,), search)
            assert [scale.name for scale in possible] == runs


# Every length


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


@pytest.mark.parametrize("form", FORMS)
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


def test_of_the_size_every_method_has_its_first_rate_before_any_has_its_second():
    order, each = sized(lambda trial: trial.hyper.lr), len(size.RATES)
    for i in range(3):
        its = order[i * each : (i + 1) * each]
        assert [trial.hyper.lr for trial in its] == [rates[i] for rates in size.RATES.values()]
    assert len({trial.key for trial in order}) == len(order) == 3 * each + len(size.CHANGES) + 2


def test_changes_are_made_at_the_best_rate_and_the_two_best_methods_have_a_second_seed():
    lowest = {PRO: 0.02, "muon": 0.008889}
    order = sized(lambda trial: abs(trial.hyper.lr - lowest.get(trial.hyper.method, 9.0)))
    default = next(trial.hyper for trial in order if trial.case == "Pro-KLShampoo" and trial.hyper.lr == 0.02)
    changed = {trial.case: (trial.base, trial.hyper) for trial in order if trial.base}
    assert changed == {case: ("Pro-KLShampoo", replace(default, **its)) for case, its in size.CHANGES.items()}
    # of Pro-KLShampoo, its paper's form, Muon and Muon with 0.9, which all have a loss of 0, the first two
    second = [(trial.case, trial.hyper.lr) for trial in order if trial.seed == 1]
    assert second == [("Pro-KLShampoo", 0.02), ("Muon", 0.008889)]
