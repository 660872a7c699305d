"""The paper's hyper-parameters, against its four tables as printed."""

import re

import pytest

from bench.command import UsageError
from bench.models import CONFIGS
from bench.presets import RANGES, RUNS, preset

# Method | learning rates (selected) | weight decays (selected), on GPT-2 | alpha_kl (selected)
PRINTED = {
    "gpt2-124m": """
    AdamW | 1e-3, 2e-3, 3e-3 (2e-3) | 2e-2, 5e-2, 1e-1 (5e-2) | --
    Muon | 1e-2, 2e-2, 3e-2 (2e-2) | 0, 2e-2, 3e-2, 5e-2, 1e-1 (2e-2) | --
    KL-Shampoo | 1e-3, 2e-3, 3e-3 (2e-3) | 5e-2, 1e-1, 1.5e-1, 2e-1, 2.5e-1, 3e-1 (2.5e-1) | --
    COSMOS (r=64) | 2e-4, 5e-4, 1e-3, 2e-3 (5e-4) | 1e-1, 2.5e-1, 5e-1 (2.5e-1) | --
    COSMOS (r=128) | 2e-4, 5e-4, 1e-3, 2e-3 (5e-4) | 1e-1, 2.5e-1, 5e-1 (2.5e-1) | --
    Pro-KLShampoo (r=32) | 1e-2, 2e-2, 3e-2 (2e-2) | 1e-2, 2e-2, 3e-2, 5e-2, 1e-1 (3e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Pro-KLShampoo (r=64) | 1e-2, 2e-2, 3e-2 (2e-2) | 1e-2, 2e-2, 3e-2, 5e-2, 1e-1 (3e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Pro-KLShampoo (r=128) | 1e-2, 2e-2, 3e-2 (2e-2) | 1e-2, 2e-2, 3e-2, 5e-2, 1e-1 (3e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Smok-Hop (r=128) | uses KL-Shampoo's selected lr (2e-3) | 2.5e-1 | --
    """,
    "gpt2-350m": """
    AdamW | 1e-3, 2e-3, 3e-3 (2e-3) | 5e-2, 1e-1, 1.5e-1 (5e-2) | --
    Muon | 1e-2, 2e-2, 3e-2, 5e-2 (2e-2) | 0, 2e-2, 3e-2, 5e-2, 1e-1 (3e-2) | --
    KL-Shampoo | 1e-3, 2e-3, 3e-3 (2e-3) | 5e-2, 1e-1, 1.5e-1, 2e-1, 2.5e-1, 3e-1 (1.5e-1) | --
    COSMOS (r=64) | 2e-4, 5e-4, 1e-3, 2e-3 (1e-3) | 2e-1, 3e-1, 5e-1 (5e-1) | --
    COSMOS (r=128) | 2e-4, 5e-4, 1e-3, 2e-3 (1e-3) | 2e-1, 3e-1, 5e-1 (5e-1) | --
    Pro-KLShampoo (r=32) | 1e-2, 2e-2, 3e-2 (2e-2) | 1e-2, 2e-2, 3e-2, 5e-2, 1e-1 (3e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Pro-KLShampoo (r=64) | 1e-2, 2e-2, 3e-2 (2e-2) | 1e-2, 2e-2, 3e-2, 5e-2, 1e-1 (3e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Pro-KLShampoo (r=128) | 1e-2, 2e-2, 3e-2 (2e-2) | 1e-2, 2e-2, 3e-2, 5e-2, 1e-1 (3e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    """,
    "llama-134m": """
    AdamW | 1e-3, 2e-3, 3e-3, 5e-3 (3e-3) | --
    Muon | 5e-3, 1e-2, 2e-2, 3e-2 (2e-2) | --
    KL-Shampoo | 2e-3, 3e-3, 4e-3, 5e-3, 8e-3 (5e-3) | --
    COSMOS (r=64) | 2e-4, 5e-4, 1e-3, 2e-3 (1e-3) | --
    COSMOS (r=128) | 2e-4, 5e-4, 1e-3, 2e-3 (1e-3) | --
    Pro-KLShampoo (r=32) | 1e-2, 2e-2, 3e-2 (2e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Pro-KLShampoo (r=64) | 1e-2, 2e-2, 3e-2 (2e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Pro-KLShampoo (r=128) | 1e-2, 2e-2, 3e-2 (3e-2) | 5e-3, 1e-2, 1.5e-2 (1e-2)
    Smok-Hop (r=128) | 2e-3, 3e-3, 5e-3 (3e-3) | --
    """,
    "llama-450m": """
    AdamW | 2e-3, 3e-3, 5e-3 (2e-3) | --
    Muon | 2e-2, 3e-2, 5e-2 (2e-2) | --
    KL-Shampoo | 2e-3, 3e-3, 5e-3 (3e-3) | --
    COSMOS (r=64) | 2e-4, 5e-4, 1e-3, 2e-3 (5e-4) | --
    COSMOS (r=128) | 2e-4, 5e-4, 1e-3, 2e-3 (5e-4) | --
    Pro-KLShampoo (r=32) | 2e-2, 3e-2 (2e-2) | 5e-3, 1e-2 (5e-3)
    Pro-KLShampoo (r=64) | 2e-2, 3e-2 (2e-2) | 5e-3, 1e-2 (5e-3)
    Pro-KLShampoo (r=128) | 2e-2, 3e-2 (2e-2) | 5e-3, 1e-2 (5e-3)
    Smok-Hop (r=128) | uses KL-Shampoo's selected lr (3e-3) | --
    """,
}


def numbers(cell):
    return tuple(float(number) for number in re.findall(r"\d[\d.e-]*", cell))


def swept(cell):
    """The values and the selected one, of "1e-3, 2e-3 (2e-3)", "2.5e-1" or "--"."""
    if "selected lr" in cell:
        cell = cell[cell.index("(") + 1 : -1]
    tried, _, chosen = cell.partition(" (")
    values = numbers(tried)
    return values, (numbers(chosen) or values or (None,))[0]


def printed_rows():
    for model, table in PRINTED.items():
        for line in table.strip().splitlines():
            name, *cells = (cell.strip() for cell in line.split("|"))
            if len(cells) == 2:  # LLaMA's tables have no weight decay, which is 0
                cells.insert(1, "0")
            method, _, rank = name.partition(" (r=")
            yield model, method.lower(), int(rank[:-1]) if rank else None, cells


ROWS = list(printed_rows())


@pytest.mark.parametrize(("model", "method", "rank", "cells"), ROWS)
def test_every_printed_row_is_a_preset(model, method, rank, cells):
    (lrs, lr), (decays, decay), (alphas, alpha) = (swept(cell) for cell in cells)
    found, tried = preset(method, model, rank), RANGES[method, model, rank]
    assert (found.lr, found.weight_decay, found.alpha_kl) == (lr, decay, alpha)
    assert (tried.lr, tried.weight_decay, tried.alpha_kl) == (lrs, decays, alphas)
    assert f"tab:sweep-{model.replace('gpt2-', 'gpt').replace('-', '')}" in found.table


def test_nothing_but_the_printed_rows_and_the_ablations_is_a_preset():
    printed = {(method, model, rank) for model, method, rank, _ in ROWS}
    ablations = {
        (method, model, 128) for method in ("subspace-only", "complement-only") for model in ("gpt2-124m", "llama-134m")
    }
    assert set(RANGES) == printed | ablations


@pytest.mark.parametrize("variant", ["subspace-only", "complement-only"])
@pytest.mark.parametrize(("model", "lr"), [("gpt2-124m", 0.03), ("llama-134m", 0.045)])
def test_ablation_variants_have_pro_klshampoos_values_with_the_rate_times_1_5(variant, model, lr):
    found, whole = preset(variant, model, 128), preset("pro-klshampoo", model, 128)
    assert found.lr == pytest.approx(lr, rel=1e-12) == 1.5 * whole.lr
    assert (found.weight_decay, found.alpha_kl) == (whole.weight_decay, whole.alpha_kl)


@pytest.mark.parametrize("key", RANGES)
def test_embedding_and_head_have_the_adamw_rows_values(key):
    method, model, rank = key
    found, adamw = preset(method, model, rank), preset("adamw", model, None)
    assert (found.adamw_lr, found.adamw_weight_decay) == (adamw.lr, adamw.weight_decay)


def test_runs_are_as_long_as_the_paper_says():
    assert set(RUNS) == set(PRINTED) < set(CONFIGS)
    assert {name: run.steps for name, run in RUNS.items()} == {
        "gpt2-124m": 5100,
        "gpt2-350m": 13_000,
        "llama-134m": 5000,
        "llama-450m": 6250,
    }
    tokens = {name: run.tokens / 1e9 for name, run in RUNS.items()}
    assert (round(tokens["gpt2-124m"], 1), round(tokens["gpt2-350m"], 1)) == (2.7, 6.8)
    assert tokens["llama-134m"] == pytest.approx(5, rel=0.05)
    assert tokens["llama-450m"] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        (("adamw", "gpt2-tiny", None), "tune on gpt2-tiny instead"),
        (("adamw", "gpt2-124m", 32), "adamw takes no rank; leave it out"),
        (("cosmos", "llama-450m", 32), "choose rank 64 or 128, or tune"),
        (("pro-klshampoo", "llama-450m", None), "choose rank 32 or 64 or 128"),
        (("smok-hop", "gpt2-350m", 128), "choose from adamw, muon, kl-shampoo, cosmos, pro-klshampoo, or tune"),
    ],
)
def test_what_the_paper_did_not_run_is_refused_with_what_it_ran(key, remedy):
    with pytest.raises(UsageError, match=re.escape(remedy)):
        preset(*key)
