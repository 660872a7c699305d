"""The tables and figures of ``bench.study lengths`` and ``size`` from rows: seeds paired, shares interpolated."""

import math
from dataclasses import replace

import pytest
from pandas import DataFrame

from bench import rows
from bench.rows import frame
from bench.study import figures, size
from bench.study import lengths_tables as tables
from bench.study.lengths import Unit, at_default, units
from tests.test_bench_search import MODEL, best, trained


def row_of(unit, loss):
    named = {"model": unit.model, "steps": unit.steps, "optimizer": unit.form, "seed": unit.seed, "lr": unit.lr}
    named |= {"adamw_lr": unit.adamw_lr, "alpha_kl": unit.alpha_kl, "validation_loss": loss}
    return named | {"model_ms": 30.0, "optimizer_ms": 20.0, "state_mb": 2.0}


def test_the_tables_pair_seeds_leave_out_the_selecting_one_and_show_only_what_is_known(tmp_path):
    losses = trained((400,), ("adamw", "muon", "kl-shampoo"), (0, 1, 2))
    of_one_seed = trained((400,), ("adamw", "soap"), (0,))
    former = replace(at_default(MODEL, 400, "cosmos", 1), lr=0.0123)  # of defaults that have changed since
    every = [row_of(*one) for one in (of_one_seed | losses | {former: 1.0}).items()]
    every += 2 * [row | {"model_ms": 90.0, "optimizer_ms": 1e3} for row in every if row["optimizer"] == "muon"]
    rows.write(tmp_path / "rows.csv", every)
    found = frame(tmp_path / "rows.csv")
    muon = best(losses, 400, "muon")
    default = at_default(MODEL, 400, "muon", 0)
    shown = tables.losses_table(found).splitlines()
    (line,) = (line for line in shown if "| Muon " in line)
    both = (f"{loss + 0.015:.3f} ± 0.005" for loss in (losses[default], losses[muon]))  # of seeds 1 and 2
    assert " / ".join(both) in line
    assert line.split("|")[3].strip() == "20"  # ms, of the quick runs alone
    assert not any("SOAP" in line or "COSMOS" in line for line in shown)
    shown = tables.settings_table(found, 400).splitlines()
    (line,) = (line for line in shown if "| Muon " in line)
    # The formula's seeds differ by 0.01 everywhere, so that paired differences have no error.
    assert f"{losses[default] - losses[muon]:+.3f} ± 0.000" in line
    assert f" {muon.lr:.3g} " in line
    (line,) = (line for line in shown if "| SOAP " in line)  # of the one seed that there is
    apart = of_one_seed[at_default(MODEL, 400, "soap", 0)] - of_one_seed[best(of_one_seed, 400, "soap")]
    assert f"{apart:+.3f} |" in line
    short = [row_of(*one) for one in losses.items() if one[0].form != "muon" or one[0].lr != muon.lr]
    rows.write(tmp_path / "short.csv", short)
    assert "| Muon " not in tables.settings_table(frame(tmp_path / "short.csv"), 400)
    assert "AdamW" not in tables.settings_table(found, 1600)


def test_shares_of_steps_to_a_loss_are_interpolated_and_seconds_do_not_depend_on_the_machine(tmp_path, monkeypatch):
    losses = trained((400,), ("adamw", "muon"), (0,))
    curves, found, slower = [], [], {"adamw": 1.0, "muon": 1.0}
    for unit in losses:
        for step, loss in ((0, 4.0), (200, 2.0), (400, 1.0 if unit.form == "adamw" else 1.5)):
            curves.append(row_of(unit, loss) | {"step": step})
        own = {"model_ms": 30.0, "optimizer_ms": 70.0 if unit.form == "adamw" else 20.0}
        found.append(row_of(unit, losses[unit]) | {name: ms * slower[unit.form] for name, ms in own.items()})
        slower[unit.form] *= 3.0  # as others share the machine
    rows.write(tmp_path / "rows.csv", found)
    rows.write(tmp_path / "curves.csv", [{k: v for k, v in row.items() if "_m" not in k} for row in curves])
    shown = tables.reached_table(frame(tmp_path / "rows.csv"), 400, tmp_path / "curves.csv").splitlines()
    (line,) = (line for line in shown if "AdamW" in line)
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["0.75", "1.50"]  # 300 steps of 100 ms, not of 50
    untimed = [row | ({"model_ms": None, "optimizer_ms": None} if row["optimizer"] == "adamw" else {}) for row in found]
    rows.write(tmp_path / "untimed.csv", untimed)  # the runs of a machine that does other things
    shown = tables.reached_table(frame(tmp_path / "untimed.csv"), 400, tmp_path / "curves.csv").splitlines()
    (line,) = (line for line in shown if "AdamW" in line)
    assert [cell.strip() for cell in line.split("|")[2:4]] == ["0.75", "-"]
    drawn = []
    monkeypatch.setattr(figures, "save", lambda it, path: drawn.extend(axes.get_lines() for axes in it.axes))
    for x in ("step", "seconds"):
        figures.lengths(tmp_path / "loss.png", frame(tmp_path / "rows.csv"), frame(tmp_path / "curves.csv"), x, 400)
    assert [[(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines] for lines in drawn] == [
        [(400, 1.0), (400, 1.5)],  # AdamW, Muon: steps
        [(pytest.approx(40), 1.0), (pytest.approx(20), 1.5)],  # seconds
    ]


def test_the_unit_of_a_row_is_the_one_that_was_trained(tmp_path):
    unit = Unit(MODEL, 400, "pro-klshampoo-paper", 0.01333, 0.00225, 0.015, 1)
    row = {"model": unit.model, "steps": 400, "optimizer": unit.form, "seed": 1, "validation_loss": 2.0}
    diverged = at_default(MODEL, 400, "muon", 0)
    other = {"model": MODEL, "steps": 400, "optimizer": "muon", "seed": 0, "lr": 0.02, "adamw_lr": 0.003}
    rows.write(tmp_path / "rows.csv", [other, row | {"lr": unit.lr, "adamw_lr": unit.adamw_lr, "alpha_kl": 0.015}])
    assert units(frame(tmp_path / "rows.csv")) == {diverged: math.inf, unit: 2.0}


def test_the_table_has_what_is_known_of_the_grid_and_dashes_for_a_methods_first_two_rates():
    def row(case, lr, loss, base="", seed=0):
        return {"case": case, "base": base, "lr": lr, "validation_loss": loss, "seed": seed}

    found = [row("Muon", 0.02, 2.5), row("Muon", 0.01333, math.nan), row("KL-Shampoo", 0.005, 2.0)]
    found += [row("KL-Shampoo", 0.003333, 0.1, seed=1), row("Pro-KLShampoo", 0.02, 1.5)]
    found += [row("r = 24", 0.02, 1.75, base="Pro-KLShampoo")]
    shown = size.size_table(DataFrame(found)).splitlines()[2:]
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in shown}
    assert cells == {
        "Pro-KLShampoo": ["0.0133: -, 0.02: 1.500", "-0.500", ""],
        "KL-Shampoo": ["0.00333: -, 0.005: 2.000", "+0.000", ""],
        "Muon": ["0.00889: -, 0.0133: inf, 0.02: 2.500", "+0.500", ""],
        "Pro-KLShampoo, r = 24": ["0.02: 1.750", "", "+0.250"],
    }
    without = [one for one in found if one["case"] != "KL-Shampoo"]
    assert "| 0.00889: -, 0.0133: inf, 0.02: 2.500 |" in size.size_table(DataFrame(without))
    assert "|" not in size.size_table(DataFrame())


def test_a_diverged_run_is_known_and_above_all(tmp_path):
    trial = next(size.size({}))
    key = dict(zip(size.KEY, trial.key, strict=True))
    rows.write(tmp_path / "rows.csv", [key | {"validation_loss": math.nan, "note": "diverged at step 7"}])
    assert size.losses_of(tmp_path / "rows.csv") == {trial.key: math.inf}
