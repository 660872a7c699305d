"""``bench.command``: what is wrong with a command line is said in one line, before anything is trained."""

import pytest

from bench import command
from bench.ablations import __main__ as ablations
from bench.study import __main__ as study


@pytest.mark.parametrize("values", [{"seeds": ()}, {"forms": ("muon",), "seeds": []}])
def test_an_option_without_a_value_is_refused(values):
    with pytest.raises(command.UsageError, match="^--seeds has no value; give one at least, or leave it out$"):
        command.some(**values)


def test_a_value_that_is_given_twice_is_refused_and_others_are_not():
    command.distinct(seeds=(0, 1))
    with pytest.raises(command.UsageError, match="^--seeds names one twice: 0 1 0; give each once$"):
        command.distinct(seeds=(0, 1, 0))


def test_the_folder_of_a_file_is_made(tmp_path):
    command.make_file(tmp_path / "a" / "b" / "rows.csv")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(command.UsageError, match="is a folder; name a file in it"):
        command.make_file(tmp_path)


@pytest.mark.parametrize("main, name", [(ablations.main, []), (study.main, []), (study.main, ["lengths"])])
def test_help_has_no_word_of_the_type_checkers(main, name, capsys):
    with pytest.raises(SystemExit):
        main([*name, "--help"])
    assert "type: ignore" not in capsys.readouterr().out
