"""The bracket on alpha_kl: the paper's 12 rows as printed, and which formula for k they follow."""

import math

import pytest
import torch

import prokl
from prokl.algorithm.settings import pro_hyper
from prokl.diagnostics import alpha_kl_bracket

RANK = 128
# rows m, columns n, c_a^2, k, and the bracket, as printed ("Numerical values").
TABLE = [
    ("GPT-2 124M attention", 768, 768, 1, 640, "0.0014", "0.036"),
    ("GPT-2 124M MLP up", 3072, 768, 4, 768, "0.0013", "0.037"),
    ("GPT-2 124M MLP down", 768, 3072, 1, 768, "0.00067", "0.018"),
    ("GPT-2 350M attention", 1024, 1024, 1, 896, "0.0010", "0.031"),
    ("GPT-2 350M MLP up", 4096, 1024, 4, 1024, "0.0010", "0.032"),
    ("GPT-2 350M MLP down", 1024, 4096, 1, 1024, "0.00050", "0.016"),
    ("LLaMA 134M attention", 768, 768, 1, 640, "0.0014", "0.036"),
    ("LLaMA 134M MLP up", 2048, 768, 8 / 3, 768, "0.0013", "0.037"),
    ("LLaMA 134M MLP down", 768, 2048, 1, 768, "0.00082", "0.023"),
    ("LLaMA 450M attention", 1024, 1024, 1, 896, "0.0010", "0.031"),
    ("LLaMA 450M MLP up", 2816, 1024, 11 / 4, 1024, "0.0010", "0.032"),
    ("LLaMA 450M MLP down", 1024, 2816, 1, 1024, "0.00060", "0.019"),
]


def as_printed(value, printed):
    """``value`` rounded to as many decimals as the paper prints."""
    return f"{value:.{len(printed.partition('.')[2])}f}"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row[0])
def test_calibration_the_papers_rows_to_the_printed_digits(row):
    _, rows, cols, c_a_squared, k, low, high = row
    found = alpha_kl_bracket(rows, cols, RANK)
    assert (as_printed(found[0], low), as_printed(found[1], high)) == (low, high)
    assert found[1] / found[0] == pytest.approx(math.sqrt(k), rel=1e-14)  # "multiplicative width sqrt(k)"
    m, n = min(rows, cols), max(rows, cols)
    assert found[0] ** 2 * m * (n - RANK) == pytest.approx(c_a_squared, rel=1e-14)
    matched = alpha_kl_bracket(rows, cols, RANK, adjust_lr_fn="match_rms_adamw")  # has no c_a
    assert matched[0] ** 2 * m * (n - RANK) == pytest.approx(1, rel=1e-14)


def test_calibration_intersects_all_rows_as_printed():
    brackets = [alpha_kl_bracket(rows, cols, RANK) for _, rows, cols, *_ in TABLE]
    low, high = max(b[0] for b in brackets), min(b[1] for b in brackets)
    assert (f"{low:.1e}", f"{high:.1e}") == ("1.4e-03", "1.6e-02")
    # The main text's [1e-3, 2e-2] is no intersection: it is wider at both ends.
    assert low > 1e-3 and high < 2e-2
    assert all(low < alpha < high for alpha in (0.005, 0.01, 0.015))


def test_the_automatic_alpha_kl_lies_in_the_papers_brackets():
    """Without c_a it is the geometric mean of square weights' ends, and stays above the lower end of tall ones'."""
    settings = prokl.ProKLShampoo([torch.nn.Parameter(torch.zeros(2, 2))], rank=RANK).defaults
    assert settings["alpha_kl"] == "auto"
    for _, rows, cols, *_ in TABLE:
        m, n = sorted((rows, cols))
        low, high = alpha_kl_bracket(rows, cols, RANK)
        c_a = max(1.0, rows / cols) ** 0.5
        alpha = pro_hyper(settings, m, n, torch.float32, torch.device("cpu")).alpha_kl
        assert alpha == pytest.approx((low * high) ** 0.5 / c_a, rel=1e-14) and low < alpha < high


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 5, 1), "Invalid rows=0: must be an integer of at least 1"),
        ((5, -1, 1), "Invalid cols=-1: must be an integer of at least 1"),
        ((1, 1, 1), r"Invalid rows \* cols=1: must be at least 2"),
        ((5, 5, 0), 'Invalid rank=0: must be "auto" or an integer of at least 1'),
        ((5, 5, None), 'Invalid rank=None: must be "auto" or an integer'),
        ((5.0, 5, 1), "Invalid rows=5.0: must be an integer of at least 1"),
    ],
)
def test_calibration_sizes_out_of_bounds_raise(arguments, message):
    with pytest.raises(ValueError, match=message):
        alpha_kl_bracket(*arguments)


def test_calibration_clamps_the_rank_as_the_optimizer():
    assert alpha_kl_bracket(6, 4, 100) == alpha_kl_bracket(6, 4, 4)
    assert alpha_kl_bracket(96, 384, "auto") == alpha_kl_bracket(96, 384, 16)
    assert alpha_kl_bracket(4, 4, 100) == alpha_kl_bracket(4, 4, 3)
