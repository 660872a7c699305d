"""``bench.command``: what is wrong with a command line is said in one line, before anything is trained."""

import pytest

from bench import command, digits, robustness
from bench.lengths import __main__ as lengths_main


@pytest.mark.parametrize("values", [{"seeds": ()}, {"forms": ("muon",), "seeds": []}])
def test_an_option_without_a_value_is_refused(values):
    with pytest.raises(command.UsageError, match="^--seeds has no value; give one at least, or leave it out$"):
        command.some(**values)


def test_a_value_that_is_given_twice_is_refused_and_others_are_not():
    command.distinct(seeds=(0, 1))
    with pytest.raises(command.UsageError, match="^--seeds names one twice: 0 1 0; give each once$"):
        command.distinct(seeds=(0, 1, 0))


@pytest.mark.parametrize("module", [digits, robustness])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_trained(module, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "trained", lambda *given: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    for out, says in ((tmp_path, "is a folder; name a file in it"), (tmp_path / "file" / "x.csv", "cannot be made")):
        assert module.main([f"--out={out}"]) == 2
        assert says in capsys.readouterr().err


def test_the_folder_of_a_file_is_made(tmp_path):
    command.make_file(tmp_path / "a" / "b" / "rows.csv")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("module", [digits, lengths_main])
def test_help_has_no_word_of_the_type_checkers(module, capsys):
    with pytest.raises(SystemExit):
        module.main(["--help"])
    assert "type: ignore" not in capsys.readouterr().out
