"""The benchmark's models and schedules: the paper's parameter counts, and what makes each family itself."""

from collections import Counter

import pytest
import torch
from torch.nn import functional as F

import prokl
from bench import models, shapes
from bench.training.schedules import SCHEDULE, linear, modded_nanogpt

FAMILIES = {
    "gpt2": models.CONFIGS["gpt2-tiny"],
    "llama": models.CONFIGS["llama-tiny"],
    "byte-gpt": models.byte_gpt(2, 32, 2, 16),
}


def build(config, seed=0):
    torch.manual_seed(seed)
    return models.Transformer(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Layers * (4 attention + 2 or 3 MLP matrices), the embedding once where tied, norms where they have weights.
        ("gpt2-124m", 12 * (4 * 768**2 + 2 * 768 * 3072) + 50304 * 768),
        ("gpt2-350m", 24 * (4 * 1024**2 + 2 * 1024 * 4096) + 50304 * 1024),
        ("llama-134m", 12 * (4 * 768**2 + 3 * 768 * 2048) + 2 * 32000 * 768 + (2 * 12 + 1) * 768),
        ("llama-450m", 30 * (4 * 1024**2 + 3 * 1024 * 2816) + 2 * 32000 * 1024 + (2 * 30 + 1) * 1024),
    ],
)
def test_the_papers_models_have_its_parameter_counts(name, expected):
    with torch.device("meta"):
        model = models.Transformer(models.CONFIGS[name])
    assert sum(p.numel() for p in model.parameters()) == expected
    # "350M" is GPT-2 medium's usual name for 353.5M parameters; the others are rounded to the printed digits.
    assert abs(expected / 1e6 - float(name.split("-")[1].rstrip("m"))) < 4
    matrices = {n: p for n, p in model.named_parameters() if n.startswith("blocks.") and p.ndim == 2}
    assert Counter(tuple(p.shape) for p in matrices.values()) == {(m, n): k for k, m, n in shapes.SETS[name].shapes}
    routes = prokl.param_groups(model, lr=0.02, adamw_lr=2e-3, rank=4).routes
    assert {r.names[0] for r in routes if r.algorithm == "matrix"} == matrices.keys()


# Each family, from one seed and on the same tokens: loss, sum of all weights' sizes, norm of the gradient.
# byte-gpt's are of the class that bench.pretrain's recorded results were trained with, the others' of 0.5.0.
RECORDED = {
    "byte-gpt": (6.2510962, 10216.230, 2.2572343),
    "gpt2": (5.7035995, 29120.362, 5.6441207),
    "llama": (5.5439858, 8699.6034, 4.3446813),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_are_those_of_the_recorded_runs(family):
    model = build(FAMILIES[family])
    weights = list(model.parameters())
    if family == "gpt2":  # whose branches begin as zero, and whose norms have no weights
        assert model.embedding.weight is model.lm_head.weight and {p.ndim for p in weights} == {2}
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                assert not weight.any()
                torch.nn.init.normal_(weight, std=0.1)
    rows = torch.arange(34).reshape(2, 17) * 7 % 256
    loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
    loss.backward()
    sizes, norms = (torch.stack(its) for its in ([p.abs().sum() for p in weights], [p.grad.norm() for p in weights]))
    # Rounding alone: sums of up to 24576 values of order 1 in float32, in another machine's order.
    assert (loss.item(), sizes.sum().item(), norms.norm().item()) == pytest.approx(RECORDED[family], rel=1e-5)


def test_llama_warms_up_over_a_tenth_and_decays_to_zero():
    assert SCHEDULE == {"gpt2": modded_nanogpt, "llama": linear, "byte-gpt": linear}
    scales = [linear(step, 100) for step in range(100)]
    assert scales[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert scales[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])


def test_gpt2_decays_over_the_last_1450_of_5100_steps():
    scales = [modded_nanogpt(step, 5100) for step in range(5100)]
    assert scales[: 5100 - 1450 + 1] == [1.0] * 3651
    assert scales[3651:] == pytest.approx([(5100 - step) / 1450 for step in range(3651, 5100)])
    first = next(step for step in range(13_000) if modded_nanogpt(step, 13_000) < 1)
    assert first == 13_000 - round(13_000 * 1450 / 5100) + 1
