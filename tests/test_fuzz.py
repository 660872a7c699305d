"""Random cases of tests.fuzz; its command runs as many as wanted."""

import pytest

from tests.fuzz import chunks, examine, failures


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chunks(100, 20))
def test_whatever_comes_steps_are_bounded_and_the_state_is_sound(seeds):
    assert failures(examine, seeds) == []


FOUND = {
    "float32 cannot hold KL-Shampoo's L": 38513,
    "bfloat16 cannot hold the inverse roots of float64 gradients": 79410,
    "L is of 1e-187": 23774,
    "R is of 1e-218": 58444,
}
"""Seeds to 100,000 that once failed."""


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND)
def test_what_was_found_once(seed):
    assert examine(seed) == []
