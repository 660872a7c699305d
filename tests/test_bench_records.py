"""Records: rows of the sets measured anew replace the old ones, and what was measured is told from what was not."""

import subprocess

import pytest
import torch

from bench import records
from bench.errors import UsageError

HERE = {column: "x" for column in records.SAME} | {"commit": "0" * 40}


def row(name, value, **others):
    return {"set": name, "metric": "step", "median": value, **others}


def test_merging_replaces_whole_sets_in_their_place_and_keeps_the_others(tmp_path):
    path = tmp_path / "new" / "rows.csv"
    records.write(path, [row("a", 1.0), row("a", 2.0), row("b", 3.0)])
    records.merge(path, [row("c", 6.0), row("a", 4.0), row("a", 5.0), row("a", 7.0)])
    found = [(r["set"], r["median"]) for r in records.read(path)]
    assert found == [("a", "4"), ("a", "5"), ("a", "7"), ("b", "3"), ("c", "6")]
    assert [p.name for p in path.parent.iterdir()] == ["rows.csv"]


def test_what_a_row_does_not_have_is_empty_and_numbers_have_five_digits():
    written = records.text(row("a", 1.23456789, q1=None, rounds=3))
    assert list(written) == records.COLUMNS
    assert (written["median"], written["q1"], written["rounds"], written["note"]) == ("1.2346", "", "3", "")


def test_other_columns_are_refused_on_both_ways(tmp_path):
    with pytest.raises(ValueError, match=r"Invalid columns \['colour'\]"):
        records.text(row("a", 1.0, colour="red"))
    old = tmp_path / "old.csv"
    old.write_text("group,name\nstep,muon\n")
    with pytest.raises(UsageError, match=r"old\.csv: must be set,contender.* Remove or convert"):
        records.read(old)


@pytest.mark.parametrize(
    "change, known",
    [
        ({}, True),
        ({"commit": "1" * 40}, False),
        ({"torch": "y"}, False),
        ({"threads": "y"}, False),
        ({"date": "y"}, True),
    ],
)
def test_a_set_is_measured_when_commit_versions_and_machine_are_the_same(change, known, tmp_path):
    path = tmp_path / "rows.csv"
    records.write(path, [row("a", 1.0) | HERE])
    assert records.measured(path, "a", HERE | change) is known
    assert not records.measured(path, "b", HERE | change)


def test_a_set_with_something_wrong_is_measured_again(tmp_path):
    path = tmp_path / "rows.csv"
    records.write(path, [row("a", 1.0) | HERE, {"set": "a", "note": "wrong: NaN"} | HERE])
    assert not records.measured(path, "a", HERE)


@pytest.mark.parametrize("commit", ["", "0" * 40 + "-dirty"])
def test_a_changed_or_unknown_tree_is_never_measured_already(commit, tmp_path):
    path = tmp_path / "rows.csv"
    records.write(path, [row("a", 1.0) | HERE | {"commit": commit}])
    assert not records.measured(path, "a", HERE | {"commit": commit})


def test_the_environment_fills_its_columns():
    here = records.environment(torch.device("cpu"))
    assert set(here) <= set(records.COLUMNS) and here["device"] == "cpu" and here["cpu"] and here["cuda"] == ""
    assert (here["torch"], here["threads"]) == (torch.__version__, str(torch.get_num_threads()))


def test_a_tree_with_changed_or_new_files_is_dirty_and_one_with_new_records_is_not(tmp_path, monkeypatch):
    def git(*command):
        who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", *who, *command], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.commit() == ""  # no repository
    (tmp_path / "code.py").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "x")
    clean = records.commit()
    assert len(clean) == 40
    (tmp_path / "bench" / "results").mkdir(parents=True)
    (tmp_path / "bench" / "results" / "rows.csv").write_text("1")
    assert records.commit() == clean
    (tmp_path / "new.py").write_text("1")
    assert records.commit() == clean + "-dirty"
    (tmp_path / "new.py").unlink()
    (tmp_path / "code.py").write_text("2")
    assert records.commit() == clean + "-dirty"


def test_one_value_has_no_quartiles():
    assert records.quartiles([2.0]) == {"median": 2.0}
    assert records.quartiles([1.0, 2.0, 3.0]) == {"q1": 1.5, "median": 2.0, "q3": 2.5}
