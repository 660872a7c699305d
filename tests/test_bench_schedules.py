"""The learning rate's schedules."""

import pytest

from bench.models import CONFIGS, FAMILIES
from bench.training.schedules import SCHEDULE, linear, modded_nanogpt


def test_linear_warms_up_over_a_tenth_and_decays_to_zero():
    scales = [linear(step, 100) for step in range(100)]
    assert scales[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert scales[10:] == pytest.approx([(100 - step) / 90 for step in range(10, 100)])
    assert max(scales) == 1.0
    assert linear(0, 1) == 1.0


def test_modded_nanogpt_is_constant_and_then_decays_over_1450_of_5100_steps():
    scales = [modded_nanogpt(step, 5100) for step in range(5100)]
    assert scales[: 5100 - 1450 + 1] == [1.0] * 3651
    assert scales[3651:] == pytest.approx([(5100 - step) / 1450 for step in range(3651, 5100)])


def test_modded_nanogpt_keeps_the_decays_share_at_other_lengths():
    first = next(step for step in range(13_000) if modded_nanogpt(step, 13_000) < 1)
    assert first == 13_000 - round(13_000 * 1450 / 5100) + 1
    assert modded_nanogpt(0, 1) == 1.0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [1, 2, 7, 600])
def test_every_family_has_a_schedule_that_moves_in_every_step(family, steps):
    assert all(0 < SCHEDULE[family](step, steps) <= 1 for step in range(steps))


def test_llama_warms_up_and_gpt2_does_not():
    assert {SCHEDULE[c.family] for name, c in CONFIGS.items() if name.startswith("llama")} == {linear}
    assert {SCHEDULE[c.family] for name, c in CONFIGS.items() if name.startswith("gpt2")} == {modded_nanogpt}
