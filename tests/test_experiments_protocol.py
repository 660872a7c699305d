"""The tuning protocol: AdamW first, its rate for the rest of the model, one alpha_kl for all ranks."""

import math

import pytest

from bench.command import UsageError
from bench.experiments.protocol import ABLATIONS, PRO, Kind, kind, tuned
from bench.experiments.scales import SCALES
from bench.optimizers import Hyper
from bench.presets import RANGES, preset

TINY = {scale.name: scale for scale in SCALES["tiny"]}
PAPER = {scale.name: scale for scale in SCALES["paper"]}
BEST = {"adamw": 5e-3, "muon": 2e-2, "kl-shampoo": 1e-2, PRO: 2e-2, "smok-hop": 3e-3, "cosmos": 1e-3}


@pytest.fixture
def measure():
    """Losses with a known optimum per method; remembers what was asked for."""

    def run(hypers):
        run.asked += hypers
        return [math.log(h.lr / BEST[h.method]) ** 2 + math.log((h.alpha_kl or 1e-2) / 1e-2) ** 2 for h in hypers]

    run.asked = []
    return run


def _all(scale, start="auto"):
    methods = ("adamw", "muon", "kl-shampoo", "smok-hop", *ABLATIONS)
    return [*(kind(m, scale.largest, start) for m in methods), *(Kind(PRO, rank, start) for rank in scale.ranks)]


def test_adamw_is_tuned_first_and_its_rate_trains_the_rest_of_the_model_under_all_others(measure):
    scale = TINY["gpt2-tiny"]
    tuning = tuned(_all(scale), scale, True, measure)
    methods = [h.method for h in measure.asked]
    assert methods.count("adamw") == len([m for m in methods[: methods.index("muon")] if m == "adamw"])
    assert tuning.selected[Kind("adamw")].lr == BEST["adamw"]
    assert {h.adamw_lr for h in measure.asked if h.method != "adamw"} == {BEST["adamw"]}
    assert all(h.weight_decay == h.adamw_weight_decay == 0 for h in measure.asked)


def test_every_method_gets_its_own_optimum(measure):
    scale = TINY["llama-tiny"]
    tuning = tuned(_all(scale), scale, True, measure)
    for k, hyper in tuning.selected.items():
        if k.method not in ABLATIONS:
            assert (hyper.method, hyper.rank, hyper.init_eigenvalue) == (k.method, k.rank, k.start)
            assert hyper.lr == BEST[k.method]


def test_alpha_is_searched_with_the_rate_at_the_largest_rank_and_taken_over_by_the_others(measure):
    scale = TINY["gpt2-tiny"]
    tuned(_all(scale), scale, True, measure)
    tried = {rank: {(h.lr, h.alpha_kl) for h in measure.asked if (h.method, h.rank) == (PRO, rank)} for rank in (4, 16)}
    assert {(lr, alpha) for lr in (0.01, 0.02, 0.03) for alpha in (0.005, 0.01, 0.015)} <= tried[16]
    assert {alpha for _, alpha in tried[4]} == {0.01}


def test_ablations_have_pro_klshampoos_values_with_one_and_a_half_times_its_rate(measure):
    scale = TINY["gpt2-tiny"]
    wanted = [Kind(method, 16, start) for method in ABLATIONS for start in ("auto", 0.1)]
    tuning = tuned(wanted, scale, True, measure)
    assert not {h.method for h in measure.asked} & set(ABLATIONS)
    for k in wanted:
        assert tuning.selected[k] == Hyper(k.method, 0.03, BEST["adamw"], 0.0, 0.0, 16, 0.01, k.start)


def test_starts_are_searched_apart_and_methods_without_one_once(measure):
    scale = TINY["gpt2-tiny"]
    tuned([*_all(scale, "auto"), *_all(scale, 0.1)], scale, True, measure)
    by_start = {start: {h for h in measure.asked if h.init_eigenvalue == start} for start in ("auto", 0.1, None)}
    assert {h.method for h in by_start[None]} == {"adamw", "muon"}
    assert {h.method for h in by_start["auto"]} == {h.method for h in by_start[0.1]} == {"kl-shampoo", PRO, "smok-hop"}
    assert len(set(measure.asked)) == len(measure.asked)


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_models_take_its_selected_values_without_a_run(name, measure):
    scale = PAPER[name]
    kinds = [Kind("adamw"), Kind("muon"), Kind("kl-shampoo", None, 0.1), *(Kind(PRO, r, 0.1) for r in scale.ranks)]
    selected = tuned(kinds, scale, False, measure).selected
    assert not measure.asked
    for k in kinds:
        paper, hyper = preset(k.method, name, k.rank), selected[k]
        assert (hyper.lr, hyper.weight_decay, hyper.alpha_kl) == (paper.lr, paper.weight_decay, paper.alpha_kl)
        assert (hyper.adamw_lr, hyper.adamw_weight_decay) == (paper.adamw_lr, paper.adamw_weight_decay)


@pytest.mark.parametrize("search", [False, True])
def test_a_run_that_the_paper_does_not_have_is_refused(measure, search):
    with pytest.raises(UsageError, match="the paper .* no smok-hop.* on gpt2-350m; (choose|give)"):
        tuned([Kind("smok-hop", 128, 0.1)], PAPER["gpt2-350m"], search, measure)


def test_tuning_a_model_of_the_paper_tries_all_of_its_table(measure):
    scale = PAPER["gpt2-124m"]
    tuned([Kind("muon"), Kind(PRO, 32, 0.1)], scale, True, measure)
    for method, rank in (("adamw", None), ("muon", None), (PRO, 32)):
        table = RANGES[method, "gpt2-124m", rank]
        tried = {(h.lr, h.weight_decay) for h in measure.asked if h.method == method and h.rank == rank}
        assert {(lr, decay) for lr in table.lr for decay in table.weight_decay} <= tried
