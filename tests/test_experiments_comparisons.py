"""Which models and methods each comparison has, what the paper claims of them, and what they need."""

import pytest

from bench import presets
from bench.command import UsageError
from bench.experiments.comparisons import COMPARISONS
from bench.experiments.scales import SCALES


def test_a_model_of_the_paper_asks_for_its_data():
    with pytest.raises(UsageError, match="gpt2-124m trains on FineWeb-10B; give its token shards with --data"):
        SCALES["paper"][0].open(None)


def test_every_claim_is_about_methods_of_its_table():
    for comparison in COMPARISONS.values():
        for scale in (scale for scales in SCALES.values() for scale in scales):
            kinds = comparison.kinds(scale, 0.1)
            claims = comparison.claims(scale, 0.1)
            if (comparison.name, scale.name) == ("ablation", "gpt2-350m"):  # which the paper does not have
                assert not kinds and not claims
                continue
            assert claims and {k for claim in claims for k in claim} <= set(kinds)
            assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize(("model", "runs"), [("gpt2", ["gpt2-124m"]), ("llama", ["llama-134m", "llama-450m"])])
@pytest.mark.parametrize("search", [False, True])
def test_the_ablation_of_the_papers_models_has_all_it_needs_where_the_paper_has_it(model, runs, search):
    scales = [scale for scale in SCALES["paper"] if scale.name.startswith(model)]
    assert [scale.name for scale in COMPARISONS["ablation"].possible(scales, (0.1,), search)] == runs
    assert COMPARISONS["main"].possible(scales, (0.1,), search) == tuple(scales)


def test_what_one_model_lacks_is_known_before_another_trains(monkeypatch):
    key = ("muon", "llama-450m", None)
    monkeypatch.delitem(presets.RANGES, key)
    scales = [scale for scale in SCALES["paper"] if scale.config.family == "llama"]
    with pytest.raises(UsageError, match="no muon on llama-450m; .* it did: gpt2-124m, gpt2-350m, llama-134m"):
        COMPARISONS["main"].possible(scales, (0.1,), search=True)


def test_smok_hop_is_in_the_main_table_of_the_small_scale():
    for scale in (scale for scales in SCALES.values() for scale in scales):
        methods = [(k.method, k.rank) for k in COMPARISONS["main"].kinds(scale, 0.1)]
        assert (("smok-hop", 128) in methods) == (scale in SCALES["small"])
