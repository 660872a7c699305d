"""The search for learning rates: it covers the range, grows past its edges, and ends past an optimum."""

import math

import pytest

from bench.command import UsageError
from bench.experiments.search import WIDEST, Search, beside, search_all
from bench.optimizers import Hyper
from bench.presets import Range

BASE = Hyper("pro-klshampoo", 0.0, 1e-3)


def found(lr, alpha=(), loss=lambda h: 0.0, decay=(0.0,)):
    """A search run to its end, and all that was measured, in order."""
    search, measured = Search(BASE, Range(lr, decay, alpha)), []

    def measure(hypers):
        measured.extend(hypers)
        return [loss(h) for h in hypers]

    search_all([search], measure)
    return search, measured


def near(lr, alpha=None):
    """A loss with its minimum at these values, in a logarithmic scale."""

    def loss(h):
        return math.log(h.lr / lr) ** 2 + (0 if alpha is None else math.log(h.alpha_kl / alpha) ** 2)

    return loss


def test_an_interior_optimum_needs_the_range_alone():
    search, measured = found((0.01, 0.02, 0.03), loss=near(0.02))
    assert [h.lr for h in measured] == [0.01, 0.02, 0.03]
    assert search.best.lr == 0.02 and not search.edges


@pytest.mark.parametrize(
    ("optimum", "more"), [(0.1, [0.05, 0.1, 0.2]), (0.006, [0.005, 0.003]), (0.002, [0.005, 0.003, 0.002, 0.001])]
)
def test_a_range_grows_by_the_grid_until_the_best_has_worse_neighbours(optimum, more):
    search, measured = found((0.01, 0.02, 0.03), loss=near(optimum))
    assert [h.lr for h in measured] == [0.01, 0.02, 0.03, *more]
    rates = sorted(h.lr for h in measured)
    assert 0 < rates.index(search.best.lr) < len(rates) - 1
    assert not search.edges


def test_rates_between_those_of_the_grid_have_neighbours_too():
    assert beside(0.004, (0.002, 0.003, 0.004, 0.005, 0.008)) == [0.003, 0.005]
    assert beside(0.008, (0.002, 0.003, 0.004, 0.005, 0.008)) == [0.005, 0.01]
    assert beside(0.002, (0.002, 0.003, 0.004, 0.005, 0.008)) == [0.001, 0.003]
    assert beside(0.1, (0.01, 0.02, 0.03)) == [0.05, 0.2]


def test_learning_rate_and_alpha_grow_together():
    search, measured = found((0.01, 0.02), (0.005, 0.01), loss=near(0.05, 0.05))
    assert (search.best.lr, search.best.alpha_kl) == (0.05, 0.05)
    tried = {(h.lr, h.alpha_kl) for h in measured}
    assert len(tried) == len(measured)  # nothing twice
    assert {(0.03, 0.05), (0.1, 0.05), (0.05, 0.03), (0.05, 0.1)} <= tried


def test_what_has_a_single_value_is_not_searched():
    _, measured = found((0.01, 0.02, 0.03), (0.01,), loss=near(0.02, 0.05), decay=(0.1,))
    assert [(h.lr, h.alpha_kl, h.weight_decay) for h in measured] == [(lr, 0.01, 0.1) for lr in (0.01, 0.02, 0.03)]


def test_weight_decay_is_searched_with_every_rate_and_does_not_grow():
    search, measured = found((0.01, 0.02, 0.03), loss=lambda h: near(0.02)(h) - h.weight_decay, decay=(0.0, 0.1))
    assert len(measured) == 6
    assert search.best.weight_decay == 0.1


def test_a_search_ends_at_its_limit_and_says_in_what():
    search, measured = found((0.01, 0.02, 0.03), loss=near(1e-9))
    assert min(h.lr for h in measured) == pytest.approx(0.01 / WIDEST)
    assert search.edges == ["lr"]
    search, measured = found((0.01, 0.02, 0.03), (0.005, 0.01), loss=near(0.02, 100.0))
    assert max(h.alpha_kl for h in measured) == pytest.approx(0.01 * WIDEST)
    assert search.edges == ["alpha_kl"]


def test_a_diverged_rate_is_never_best_and_counts_as_worse():
    search, _ = found((0.01, 0.02, 0.03), loss=lambda h: math.nan if h.lr > 0.01 else -h.lr)
    assert search.best.lr == 0.01
    assert not search.edges


def test_everything_diverged_is_an_error_that_names_the_rates():
    with pytest.raises(UsageError, match=r"pro-klshampoo diverged at every learning rate tried: \[0.01, 0.02\]"):
        found((0.01, 0.02), loss=lambda h: math.nan)


def test_searches_side_by_side_are_measured_together():
    first, second = (Search(BASE, Range((lr, 2 * lr, 3 * lr), (0.0,), ())) for lr in (0.01, 0.1))
    batches = []

    def measure(hypers):
        batches.append(len(hypers))
        return [near(0.05)(h) for h in hypers]

    search_all([first, second], measure)
    assert batches[0] == 6
    assert first.best.lr == second.best.lr == 0.05
