"""The result files: one schema, rows measured anew in place of old ones, what was measured told from what was not."""

import math
import subprocess

import torch

from bench import rows

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


def test_a_file_has_the_columns_of_its_rows_and_no_nan(tmp_path):
    path = tmp_path / "rows.csv"
    rows.write(path, [row("a", math.nan, rank=None), {"note": "x", "model": "b", "lr": 1 / 3, "rounds": 7}])
    assert path.read_text() == "model,rank,metric,rounds,median,lr,note\na,,step,,,,\nb,,,7,,0.3333333,x\n"


def test_a_frame_has_numbers_text_and_what_is_missing_of_each(tmp_path):
    path = tmp_path / "rows.csv"
    rows.write(path, [{"model": "a", "value": 0.1, "rank": 8, "lr": 0.5}, {"value": "auto", "note": "0"}])
    found = rows.frame(path)
    assert list(found["value"]) == ["0.1", "auto"] and list(found["note"]) == ["", "0"]
    assert found["rank"][0] == 8 and found.isna()["rank"][1] and math.isnan(found["lr"][1])
    assert rows.frame(tmp_path / "none.csv").empty


def test_columns_of_an_older_file_stay(tmp_path):
    (tmp_path / "a.csv").write_text("colour,model\nred,a\n")
    rows.upsert(tmp_path / "a.csv", [row("b", 1.0)], ("model",))
    assert (tmp_path / "a.csv").read_text() == "model,metric,median,colour\na,,,red\nb,step,1,\n"


def test_a_key_counts_as_measured_on_the_same_machine_and_commit(tmp_path):
    path = tmp_path / "rows.csv"
    changes = ({}, True), ({"date": "y"}, True), *(({name: "y"}, False) for name in rows.SAME)
    for found, of in (([row("a", 1.0)], True), ([row("a", 1.0), {"model": "a", "note": "wrong: NaN"}], False)):
        rows.write(path, [its | HERE for its in found])
        for change, known in changes:
            assert rows.measured(path, {"model": "a"}, HERE | change) is (known and of)
            assert not rows.measured(path, {"model": "b"}, HERE | change)
    assert not rows.measured(path, {"model": "a"}, HERE | {"commit": ""})


def test_the_environment_fills_its_columns():
    here = rows.environment(torch.device("cpu"))
    assert here.keys() <= rows.PROVENANCE.keys() and here["device"] == "cpu" and here["cpu"] and here["cuda"] == ""
    assert (here["torch"], here["threads"]) == (torch.__version__, str(torch.get_num_threads()))


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
