"""``bench.study size``: what is trained is fixed, goes on where it was stopped, and is what it says."""

import math
from dataclasses import replace

import pytest
import torch

from bench import rows
from bench.study import __main__ as study
from bench.study import policies, queue, size, units
from bench.study.size import CHANGES, PRO, RATES, Trial


def all_of(wanted, loss):
    """Train all that is wanted by a formula; return it in its order."""
    known, order = {}, []
    while missing := [trial for trial in wanted(known) if trial.key not in known]:
        order.append(missing[0])
        known[missing[0].key] = loss(missing[0])
    return order


def test_of_the_size_every_method_has_its_first_rate_before_any_has_its_second():
    order = all_of(size.size, lambda trial: trial.hyper.lr)
    each = len(RATES)
    for i in range(3):
        its = order[i * each : (i + 1) * each]
        assert [trial.hyper.lr for trial in its] == [rates[i] for rates in RATES.values()]
    assert len({trial.key for trial in order}) == len(order) == 3 * each + len(CHANGES) + 2


def test_changes_are_made_at_the_best_rate_and_the_two_best_methods_have_a_second_seed():
    best = {PRO: 0.02, "muon": 0.008889}
    order = all_of(size.size, lambda trial: abs(trial.hyper.lr - best.get(trial.hyper.method, 9.0)))
    changed = [trial for trial in order if trial.base]
    assert {(trial.case, trial.hyper.lr, trial.base) for trial in changed} == {
        (case, 0.02, "Pro-KLShampoo") for case in CHANGES
    }
    default = next(trial.hyper for trial in order if trial.case == "Pro-KLShampoo" and trial.hyper.lr == 0.02)
    for trial in changed:
        assert trial.hyper == replace(default, **CHANGES[trial.case])
    # of Pro-KLShampoo, its paper's form, Muon and Muon with 0.9, which all have a loss of 0, the first two
    second = [(trial.case, trial.hyper.lr) for trial in order if trial.seed == 1]
    assert second == [("Pro-KLShampoo", 0.02), ("Muon", 0.008889)]


@pytest.mark.slow
def test_the_command_trains_what_is_missing_writes_its_row_and_does_not_repeat_it(tmp_path, monkeypatch, capsys):
    wanted = [Trial("llama-tiny", 2, "a change", "base", size.FORMS[PRO].default)]
    monkeypatch.setattr(policies, "size", lambda known: iter(wanted))
    arguments = ["--out", str(tmp_path), "--folder", str(tmp_path / "runs"), "--jobs", "1"]
    assert study.main(["size", *arguments]) == 0
    (row,) = rows.read(tmp_path / "size.csv")
    assert row["case"] == "a change" and row["base"] == "base" and row["threads"] == "1"
    assert 2 < float(row["validation_loss"]) < 6
    assert capsys.readouterr().out.count("\n") == 1
    assert study.main(["size", *arguments]) == 0 and capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_loss(tmp_path, monkeypatch):
    trial = Trial("llama-tiny", 6, "a change", "base", size.FORMS[PRO].default)
    job = policies.Size(policies.SizeOptions(out=tmp_path)).job(trial)
    threads = torch.get_num_threads()
    try:
        whole, _ = queue.train(job, tmp_path / "whole")
        monkeypatch.setattr(queue, "CHECKPOINT_SECONDS", 0.0)
        advance, left = units.Run.advance, [3]

        def interrupted(run):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            advance(run)

        monkeypatch.setattr(units.Run, "advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            queue.train(job, tmp_path / "parts")
        left[0] = 3  # what remains, and no more
        again, _ = queue.train(job, tmp_path / "parts")
    finally:
        torch.set_num_threads(threads)
    assert again.record.final_loss == whole.record.final_loss


def test_the_table_has_what_is_known_of_the_grid_and_dashes_for_a_methods_other_rates():
    def row(case, lr, loss, base="", seed=0):
        return {"case": case, "base": base, "lr": lr, "validation_loss": loss, "seed": seed}

    found = [row("Muon", 0.02, 2.5), row("Muon", 0.01333, math.nan), row("KL-Shampoo", 0.005, 2.0)]
    found += [row("KL-Shampoo", 0.003333, 0.1, seed=1), row("Pro-KLShampoo", 0.02, 1.5)]
    found += [row("r = 24", 0.02, 1.75, base="Pro-KLShampoo")]
    shown = size.size_table(size.DataFrame(found)).splitlines()[2:]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in shown}
    assert cells == {
        "Pro-KLShampoo": ["0.00889: -, 0.0133: -, 0.02: 1.500", "-0.500", ""],
        "KL-Shampoo": ["0.00333: -, 0.005: 2.000, 0.0075: -", "+0.000", ""],
        "Muon": ["0.00889: -, 0.0133: inf, 0.02: 2.500", "+0.500", ""],
        "Pro-KLShampoo, r = 24": ["0.02: 1.750", "", "+0.250"],
    }
    without = [one for one in found if one["case"] != "KL-Shampoo"]
    assert "| 0.00889: -, 0.0133: inf, 0.02: 2.500 |" in size.size_table(size.DataFrame(without))
    assert "|" not in size.size_table(size.DataFrame())


def test_a_diverged_run_is_known_and_above_all(tmp_path):
    trial = next(size.size({}))
    key = dict(zip(size.KEY, trial.key, strict=True))
    rows.write(tmp_path / "rows.csv", [key | {"validation_loss": math.nan, "note": "diverged at step 7"}])
    assert size.losses_of(tmp_path / "rows.csv") == {trial.key: math.inf}
