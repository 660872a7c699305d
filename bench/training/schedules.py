"""Schedules: factors of the learning rates, by step.

The paper names linear warm-up and linear decay with 10 % warm-up for LLaMA. For GPT-2 it names only the framework,
modded-nanogpt; assumed is that framework's schedule in its record of 2024-10-14, the first of 5100 iterations
(https://github.com/KellerJordan/modded-nanogpt, records/track_1_short/2024-10-14_ModernArch): no warm-up, constant,
then 1450 iterations of linear decay. For the 13000 iterations of the 350M model the share of the decay is kept.
"""

from collections.abc import Callable

WARMDOWN = 1450 / 5100  # of the steps


def linear(step: int, steps: int, warmups: int = 10) -> float:
    """Return a linear warm-up over 1 / ``warmups`` of the steps, then linear decay that would reach 0 after them."""
    warmup = max(1, steps // warmups)
    return min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


def modded_nanogpt(step: int, steps: int) -> float:
    """Return 1, then over the last 1450 of 5100 steps linear decay that would reach 0 at step ``steps``."""
    return min(1.0, (steps - step) / max(1, round(WARMDOWN * steps)))


SCHEDULE: dict[str, Callable[[int, int], float]] = {"gpt2": modded_nanogpt, "llama": linear, "byte-gpt": linear}
"""Schedules by family of :mod:`bench.models`: (step from 0, steps) -> factor. Scaled-down ones have their family's."""
