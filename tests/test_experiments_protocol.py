"""What each comparison has, and how it is tuned: AdamW first, one alpha_kl for all ranks, ranges that grow."""

import math

import pytest

from bench import presets
from bench.command import UsageError
from bench.optimizers import Hyper
from bench.presets import RANGES, Range, preset
from bench.study.comparisons import COMPARISONS
from bench.study.protocol import ABLATIONS, PRO, Kind, kind, tuned
from bench.study.scales import SCALES
from bench.study.search import WIDEST, Search, beside, search_all

SCALE = {scale.name: scale for scales in SCALES.values() for scale in scales}
BEST = {"adamw": 5e-3, "muon": 2e-2, "kl-shampoo": 1e-2, PRO: 2e-2, "smok-hop": 3e-3, "cosmos": 1e-3}


@pytest.fixture
def measure():
    """Losses with a known optimum per method; remembers what was asked for."""

    def run(hypers):
        run.asked += hypers
        return [math.log(h.lr / BEST[h.method]) ** 2 + math.log((h.alpha_kl or 1e-2) / 1e-2) ** 2 for h in hypers]

    run.asked = []
    return run


def everything(scale, start="auto"):
    methods = ("adamw", "muon", "kl-shampoo", "smok-hop", *ABLATIONS)
    return [*(kind(m, scale.largest, start) for m in methods), *(Kind(PRO, rank, start) for rank in scale.ranks)]


@pytest.mark.parametrize("name", ["gpt2-tiny", "llama-tiny"])
def test_adamw_is_tuned_first_and_every_method_gets_its_own_optimum(measure, name):
    scale = SCALE[name]
    selected = tuned(everything(scale), scale, True, measure).selected
    methods = [h.method for h in measure.asked]
    assert "adamw" not in methods[methods.index("muon") :] and not set(methods) & set(ABLATIONS)
    assert {h.adamw_lr for h in measure.asked if h.method != "adamw"} == {BEST["adamw"]}
    assert all(h.weight_decay == h.adamw_weight_decay == 0 for h in measure.asked)
    for k, hyper in selected.items():
        assert (hyper.method, hyper.rank, hyper.init_eigenvalue) == (k.method, k.rank, k.start)
        # The ablation variants have Pro-KLShampoo's values with one and a half times its rate.
        assert hyper.lr == pytest.approx(1.5 * BEST[PRO] if k.method in ABLATIONS else BEST[k.method])


def test_alpha_is_searched_with_the_rate_at_the_largest_rank_and_taken_over_by_the_others(measure):
    tuned(everything(SCALE["gpt2-tiny"]), SCALE["gpt2-tiny"], True, measure)
    tried = {rank: {(h.lr, h.alpha_kl) for h in measure.asked if (h.method, h.rank) == (PRO, rank)} for rank in (4, 16)}
    assert {(lr, alpha) for lr in (0.01, 0.02, 0.03) for alpha in (0.005, 0.01, 0.015)} <= tried[16]
    assert {alpha for _, alpha in tried[4]} == {0.01}


def test_starts_are_searched_apart_and_methods_without_one_once(measure):
    scale = SCALE["gpt2-tiny"]
    tuned([*everything(scale, "auto"), *everything(scale, 0.1)], scale, True, measure)
    by_start = {start: {h.method for h in measure.asked if h.init_eigenvalue == start} for start in ("auto", 0.1, None)}
    assert by_start == {None: {"adamw", "muon"}, **dict.fromkeys(("auto", 0.1), {"kl-shampoo", PRO, "smok-hop"})}
    assert len(set(measure.asked)) == len(measure.asked)


@pytest.mark.parametrize("scale", SCALES["paper"], ids=lambda scale: scale.name)
def test_the_papers_models_take_its_selected_values_without_a_run(scale, measure):
    kinds = [Kind("adamw"), Kind("muon"), Kind("kl-shampoo", None, 0.1), *(Kind(PRO, r, 0.1) for r in scale.ranks)]
    for k, hyper in tuned(kinds, scale, False, measure).selected.items():
        paper = preset(k.method, scale.name, k.rank)
        assert (hyper.lr, hyper.weight_decay, hyper.alpha_kl) == (paper.lr, paper.weight_decay, paper.alpha_kl)
        assert (hyper.adamw_lr, hyper.adamw_weight_decay) == (paper.adamw_lr, paper.adamw_weight_decay)
        assert not hyper.bounded
    assert not measure.asked


def test_tuning_a_model_of_the_paper_tries_all_of_its_table(measure):
    tuned([Kind("muon"), Kind(PRO, 32, 0.1)], SCALE["gpt2-124m"], True, measure)
    for method, rank in (("adamw", None), ("muon", None), (PRO, 32)):
        table = RANGES[method, "gpt2-124m", rank]
        tried = {(h.lr, h.weight_decay) for h in measure.asked if h.method == method and h.rank == rank}
        assert {(lr, decay) for lr in table.lr for decay in table.weight_decay} <= tried
    assert not any(h.bounded for h in measure.asked if h.method == PRO)


def test_what_the_paper_does_not_have_is_known_before_anything_trains(measure, monkeypatch):
    for search in (False, True):
        with pytest.raises(UsageError, match="the paper .* no smok-hop.* on gpt2-350m; (choose|give)"):
            tuned([Kind("smok-hop", 128, 0.1)], SCALE["gpt2-350m"], search, measure)
    with pytest.raises(UsageError, match="gpt2-124m trains on FineWeb-10B; give its token shards with --data"):
        SCALE["gpt2-124m"].open(None)
    monkeypatch.delitem(presets.RANGES, ("muon", "llama-450m", None))
    with pytest.raises(UsageError, match="no muon on llama-450m; .* it did: gpt2-124m, gpt2-350m, llama-134m"):
        COMPARISONS["main"].possible([SCALE["llama-134m"], SCALE["llama-450m"]], (0.1,), search=True)


def test_every_claim_is_about_methods_of_its_table():
    for comparison in COMPARISONS.values():
        for scale in SCALE.values():
            kinds, claims = comparison.kinds(scale, 0.1), comparison.claims(scale, 0.1)
            assert {k for claim in claims for k in claim} <= set(kinds) and len(set(kinds)) == len(kinds)
            # The paper has no ablation on GPT-2 350M.
            assert bool(claims) == bool(kinds) == ((comparison.name, scale.name) != ("ablation", "gpt2-350m"))


@pytest.mark.parametrize(("model", "runs"), [("gpt2", ["gpt2-124m"]), ("llama", ["llama-134m", "llama-450m"])])
@pytest.mark.parametrize("search", [False, True])
def test_the_ablation_of_the_papers_models_has_all_it_needs_where_the_paper_has_it(model, runs, search):
    scales = [scale for scale in SCALES["paper"] if scale.name.startswith(model)]
    assert [scale.name for scale in COMPARISONS["ablation"].possible(scales, (0.1,), search)] == runs
    assert COMPARISONS["main"].possible(scales, (0.1,), search) == tuple(scales)


# One search.


def found(lr, alpha=(), loss=lambda h: 0.0, decay=(0.0,)):
    """A search run to its end, and all that was measured, in order."""
    search, measured = Search(Hyper(PRO, 0.0, 1e-3), Range(lr, decay, alpha)), []

    def measure(hypers):
        measured.extend(hypers)
        return [loss(h) for h in hypers]

    search_all([search], measure)
    return search, measured


def near(lr, alpha=None):
    """A loss with its minimum at these values, in a logarithmic scale."""
    return lambda h: math.log(h.lr / lr) ** 2 + (0 if alpha is None else math.log(h.alpha_kl / alpha) ** 2)


@pytest.mark.parametrize(
    ("optimum", "more"),
    [(0.02, []), (0.1, [0.05, 0.1, 0.2]), (0.006, [0.005, 0.003]), (0.002, [0.005, 0.003, 0.002, 0.001])],
)
def test_a_range_grows_by_the_grid_until_the_best_has_worse_neighbours(optimum, more):
    search, measured = found((0.01, 0.02, 0.03), loss=near(optimum))
    assert [h.lr for h in measured] == [0.01, 0.02, 0.03, *more]
    rates = sorted(h.lr for h in measured)
    assert 0 < rates.index(search.best.lr) < len(rates) - 1 and not search.edges


def test_rates_between_those_of_the_grid_have_neighbours_too():
    values = (0.002, 0.003, 0.004, 0.005, 0.008)
    assert [beside(x, values) for x in (0.004, 0.008, 0.002)] == [[0.003, 0.005], [0.005, 0.01], [0.001, 0.003]]


def test_learning_rate_and_alpha_grow_together_and_decay_or_what_has_a_single_value_does_not():
    search, measured = found((0.01, 0.02), (0.005, 0.01), loss=near(0.05, 0.05))
    assert (search.best.lr, search.best.alpha_kl) == (0.05, 0.05)
    tried = {(h.lr, h.alpha_kl) for h in measured}
    assert len(tried) == len(measured) and {(0.03, 0.05), (0.1, 0.05), (0.05, 0.03), (0.05, 0.1)} <= tried
    search, measured = found((0.01, 0.02, 0.03), (0.01,), lambda h: near(0.02)(h) - h.weight_decay, (0.0, 0.1))
    assert len(measured) == 6 and search.best.weight_decay == 0.1 and {h.alpha_kl for h in measured} == {0.01}


def test_a_search_ends_at_its_limit_and_says_in_what():
    search, measured = found((0.01, 0.02, 0.03), loss=near(1e-9))
    assert min(h.lr for h in measured) == pytest.approx(0.01 / WIDEST) and search.edges == ["lr"]
    search, measured = found((0.01, 0.02, 0.03), (0.005, 0.01), loss=near(0.02, 100.0))
    assert max(h.alpha_kl for h in measured) == pytest.approx(0.01 * WIDEST) and search.edges == ["alpha_kl"]


def test_a_diverged_rate_is_never_best_and_everything_diverged_is_an_error():
    search, _ = found((0.01, 0.02, 0.03), loss=lambda h: math.nan if h.lr > 0.01 else -h.lr)
    assert search.best.lr == 0.01 and not search.edges
    with pytest.raises(UsageError, match=r"pro-klshampoo diverged at every learning rate tried: \[0.01, 0.02\]"):
        found((0.01, 0.02), loss=lambda h: math.nan)
