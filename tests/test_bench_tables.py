"""The documents' tables are what the recorded rows give."""

import math

import pandas
import pytest

from bench import markdown, tables


@pytest.mark.slow
def test_the_documents_show_what_the_rows_give(capsys):
    assert tables.main(["--check"]) == 0, f"run python -m bench.tables:\n{capsys.readouterr().out}"
    texts = [document.read_text(encoding="utf-8") for document in tables.DOCUMENTS]
    assert set(tables.TABLES) == {found[2] for text in texts for found in tables.BLOCK.finditer(text)}


def test_a_figure_changed_by_hand_is_found_and_put_right(tmp_path, monkeypatch, capsys):
    document = tmp_path / "document.md"
    right = tables.rendered("Before.\n\n<!-- table results -->\n<!-- end -->\n\nAfter.\n")
    wrong = right.replace("Muon  ", "Noum  ", 1)
    assert wrong != right
    document.write_text(wrong, encoding="utf-8")
    monkeypatch.setattr(tables, "DOCUMENTS", (document,))
    drawn = []
    monkeypatch.setattr(tables, "draw", lambda: drawn.append(True))
    assert tables.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "-| Noum" in printed and "+| Muon" in printed
    assert document.read_text(encoding="utf-8") == wrong
    assert not drawn and tables.main([]) == 0 and drawn
    assert document.read_text(encoding="utf-8") == right


def test_a_table_that_there_is_not_is_an_error():
    with pytest.raises(KeyError, match="nonsense"):
        tables.rendered("<!-- table nonsense -->\n<!-- end -->")


def test_columns_are_aligned_and_figures_to_the_right():
    frame = pandas.DataFrame({"name": ["a", "longer"], "ms": ["1.25", "10.00"]})
    assert markdown.table(frame, 1) == (
        "| name   |    ms |\n|:-------|------:|\n| a      |  1.25 |\n| longer | 10.00 |\n"
    )


def test_what_there_is_not_is_a_dash_and_one_seed_has_no_error():
    assert [markdown.figure(value, 1) for value in (1.25, None, math.nan, pandas.NA)] == ["1.2", "-", "-", "-"]
    assert [markdown.with_error(2.0, error, 2, "+") for error in (math.nan, 0.125)] == ["+2.00", "+2.00 ± 0.12"]
