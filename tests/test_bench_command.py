"""``bench.command``: what is wrong with a command line is said in one line, before anything is trained."""

import pytest

from bench import command


@pytest.mark.parametrize(
    "seeds, said", [((), "has no value; give one at least, or leave it out"), ((0, 1, 0), "names one twice: 0 1 0; ")]
)
def test_an_option_without_a_value_or_with_one_twice_is_refused(seeds, said):
    command.some(seeds=(0, 1))
    with pytest.raises(command.UsageError, match=f"^--seeds {said}"):
        command.some(forms=("muon",), seeds=seeds)
