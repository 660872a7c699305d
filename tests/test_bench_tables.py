"""The documents' tables are what the recorded rows give, and the result files have one schema."""

import math
import subprocess

import pandas
import pytest

from bench import markdown, rows, tables
from bench.shapes import PAPER, SMALL
from bench.timing.entries import BATCHED, EAGER


@pytest.mark.slow
def test_the_documents_show_what_the_rows_give(capsys):
    assert tables.main(["--check"]) == 0, f"run python -m bench.tables:\n{capsys.readouterr().out}"
    texts = [document.read_text(encoding="utf-8") for document in tables.DOCUMENTS]
    assert set(tables.TABLES) == {found[2] for text in texts for found in tables.BLOCK.finditer(text)}


def test_a_figure_changed_by_hand_is_found_and_put_right(tmp_path, monkeypatch, capsys):
    document = tmp_path / "document.md"
    right = tables.rendered("Before.\n\n<!-- table results -->\n<!-- end -->\n\nAfter.\n")
    wrong = right.replace("SOAP  ", "Soap  ", 1)
    assert wrong != right
    document.write_text(wrong, encoding="utf-8")
    monkeypatch.setattr(tables, "DOCUMENTS", (document,))
    drawn = []
    monkeypatch.setattr(tables, "draw", lambda: drawn.append(True))
    assert tables.main(["--check"]) == 1
    printed = capsys.readouterr().out
    assert "-| Soap" in printed and "+| SOAP" in printed
    assert document.read_text(encoding="utf-8") == wrong
    assert not drawn and tables.main([]) == 0 and drawn
    assert document.read_text(encoding="utf-8") == right


def test_what_there_is_not_is_a_dash_and_one_seed_has_no_error():
    assert [markdown.figure(value, 1) for value in (1.25, None, math.nan, pandas.NA)] == ["1.2", "-", "-", "-"]
    assert [markdown.with_error(2.0, error, 2, "+") for error in (math.nan, 0.125)] == ["+2.00", "+2.00 ± 0.12"]


# Steps: what the recorded rows have no case of.

PRO = {"backend": "torch", "rank": 8}


def step(model, optimizer, median=None, **values):
    given = {"model": model, "optimizer": optimizer, "metric": "step", "unit": "ms", "median": median}
    return dict.fromkeys(("backend", "rank", "ratio", "note"), "") | given | {"dtype": "float32"} | values


def shown(path, found, capsys):
    """The cells of the table of these rows."""
    rows.write(path, found)
    assert tables.main(["--steps", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]


def test_every_optimizer_that_ran_has_a_line(tmp_path, capsys):
    given = [
        step(SMALL[0], "muon", 10.04, ratio=1),
        step(SMALL[0], "pro-klshampoo", 15.5, ratio=1.544, **PRO),
        step(SMALL[1], "pro-klshampoo", 31, ratio=1.2, **PRO),
        step(SMALL[0], "pro-klshampoo", 20, ratio=2, note=EAGER, **PRO),
        step(SMALL[0], "muon", 99, ratio=1, dtype="float32, Newton-Schulz bfloat16"),
        step(SMALL[0], "emerging", note="needs Python 3.12"),
    ]
    assert [line[:3] for line in shown(tmp_path / "rows.csv", given, capsys)[2:]] == [
        ["Muon", "10.0 (1.00)", "-"],
        ["Pro-KLShampoo, r = 8", "15.5 (1.54)", "31.0 (1.20)"],
        ["Pro-KLShampoo, r = 8, without CUDA graphs", "20.0 (2.00)", "-"],
        ["Muon, Newton–Schulz in bfloat16", "99.0 (1.00)", "-"],
    ]
    # Rows of a GPU have the paper's own sets, ratios to Muon in batches, and Muon may have failed.
    half = "float32, Newton-Schulz bfloat16"
    given = [
        step(PAPER[0], "muon", 25, ratio=1, dtype=half),
        step(PAPER[0], "pro-klshampoo", 9, ratio=0.36, **PRO | {"dtype": half}),
        step(PAPER[0], "pro-klshampoo", 27, ratio=0.47, **PRO),
        step(PAPER[0], BATCHED, 6, dtype=half),
    ]
    head, _, *lines = shown(tmp_path / "rows.csv", given, capsys)
    assert head[0] == f"ms a step (ratio to {BATCHED})"
    assert [line[1] for line in lines] == ["25.0 (4.17)", "9.0 (1.50)", "27.0 (-)", "6.0 (1.00)"]
    given = [step(PAPER[1], "pro-klshampoo", 31, **PRO), step(PAPER[0], "muon", note="no memory")]
    head, _, line = shown(tmp_path / "rows.csv", given, capsys)
    assert head[1:] == [PAPER[1]] and line[1:] == ["31.0 (-)"]


# The result files


HERE = {column: "x" for column in rows.SAME} | {"commit": "0" * 40}


def row(model, value, **others):
    return {"model": model, "metric": "step", "median": value, **others}


def test_rows_measured_anew_replace_those_of_the_same_key(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    rows.upsert(path, [row("a", 1.0), row("b", 3.0), row("a", 2.0)], ("model",))
    rows.upsert(path, [row("c", 6.0), row("a", 4.0, note="x"), row("a", 5.0), row("a", 7.0)], ("model",))
    found = [(r["model"], r["median"], r["note"]) for r in rows.read(path)]
    assert found == [("a", "4", "x"), ("a", "5", ""), ("a", "7", ""), ("b", "3", ""), ("c", "6", "")]
    assert [p.name for p in path.parent.iterdir()] == ["rows.csv"]


def test_columns_of_an_older_file_stay_and_no_nan_is_written(tmp_path):
    (tmp_path / "a.csv").write_text("colour,model\nred,a\n")
    rows.upsert(tmp_path / "a.csv", [row("b", 1.0), row("c", math.nan)], ("model",))
    assert (tmp_path / "a.csv").read_text() == "model,metric,median,colour\na,,,red\nb,step,1,\nc,step,,\n"


def test_a_frame_has_numbers_text_and_what_is_missing_of_each(tmp_path):
    path = tmp_path / "rows.csv"
    rows.write(path, [{"model": "a", "value": 0.1, "rank": 8, "lr": 0.5}, {"value": "auto", "note": "0"}])
    found = rows.frame(path)
    assert list(found["value"]) == ["0.1", "auto"] and list(found["note"]) == ["", "0"]
    assert found["rank"][0] == 8 and found.isna()["rank"][1] and math.isnan(found["lr"][1])
    assert rows.frame(tmp_path / "none.csv").empty


def test_a_key_counts_as_measured_on_the_same_machine_and_commit(tmp_path):
    path = tmp_path / "rows.csv"
    changes = ({}, True), ({"date": "y"}, True), *(({name: "y"}, False) for name in rows.SAME)
    for found, of in (([row("a", 1.0)], True), ([row("a", 1.0), {"model": "a", "note": "wrong: NaN"}], False)):
        rows.write(path, [its | HERE for its in found])
        for change, known in changes:
            assert rows.measured(path, {"model": "a"}, HERE | change) is (known and of)
            assert not rows.measured(path, {"model": "b"}, HERE | change)
    assert not rows.measured(path, {"model": "a"}, HERE | {"commit": ""})


def test_only_code_that_changed_makes_a_tree_dirty(tmp_path, monkeypatch):
    def git(*command):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(rows, "ROOT", tmp_path)
    assert rows.commit() == ""  # no repository
    (tmp_path / "code.py").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    clean = rows.commit()
    assert len(clean) == 40
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "rows.csv").write_text("1")
    assert rows.commit() == clean
    (tmp_path / "new.py").write_text("1")
    assert rows.commit() == clean + "-dirty"
    (tmp_path / "new.py").unlink()
    (tmp_path / "code.py").write_text("2")
    assert rows.commit() == clean + "-dirty"


def test_one_value_has_no_quartiles():
    assert rows.quartiles([2.0]) == {"median": 2.0}
    assert rows.quartiles([1.0, 2.0, 3.0]) == {"q1": 1.5, "median": 2.0, "q3": 2.5}
