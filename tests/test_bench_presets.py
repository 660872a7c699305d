"""The paper's hyper-parameters and run lengths, against its text."""

import pytest

from bench.models import CONFIGS
from bench.optimizers import Hyper
from bench.presets import RUNS, SELECTED, preset

PAPER = ("gpt2-124m", "gpt2-350m", "llama-134m", "llama-450m")


def test_the_paper_has_these_methods_at_these_ranks():
    every = {(m, None) for m in ("adamw", "muon", "kl-shampoo")} | {("cosmos", 64), ("cosmos", 128)}
    every |= {("pro-klshampoo", rank) for rank in (32, 64, 128)}
    ablations = {("subspace-only", 128), ("complement-only", 128)}
    more = {"gpt2-350m": set(), "llama-450m": {("smok-hop", 128)}}
    for model in PAPER:
        having = every | more.get(model, {("smok-hop", 128)} | ablations)
        assert {(method, rank) for method, of, rank in SELECTED if of == model} == having


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
    assert tuple(RUNS) == PAPER and set(RUNS) < set(CONFIGS)
    assert [run.steps for run in RUNS.values()] == [5100, 13_000, 5000, 6250]
    tokens = [run.steps * run.batch * CONFIGS[name].context / 1e9 for name, run in RUNS.items()]
    assert tokens == pytest.approx([2.7, 6.8, 5, 10], rel=0.05)
