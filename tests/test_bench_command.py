"""``bench.command``: what is wrong with a command line is said in one line, before anything is trained."""

import pytest

from bench import command


@pytest.mark.parametrize("values", [{"seeds": ()}, {"forms": ("muon",), "seeds": []}])
def test_an_option_without_a_value_is_refused(values):
    with pytest.raises(command.UsageError, match="^--seeds has no value; give one at least, or leave it out$"):
        command.some(**values)


def test_a_value_that_is_given_twice_is_refused_and_others_are_not():
    command.distinct(seeds=(0, 1))
    with pytest.raises(command.UsageError, match="^--seeds names one twice: 0 1 0; give each once$"):
        command.distinct(seeds=(0, 1, 0))
