"""``bench.study lengths``: what is trained is fixed before it is, and found by rules."""

import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from bench import rows
from bench.rows import frame
from bench.study import __main__ as study
from bench.study import lengths_figure as figure
from bench.study import lengths_tables as tables
from bench.study import policies, queue, units
from bench.study.lengths import (
    ADAMW_LR,
    FORMS,
    FURTHEST,
    LONG,
    STEP,
    Unit,
    at_default,
    power,
    rounded,
    tuned,
    wanted,
)
from bench.training.run import Record

MODEL = "gpt2-tiny"


def loss_of(unit, best=0.01, alpha=0.02):
    """A loss with one minimum in the rate, which halves where runs are four times as long, and one in alpha_kl."""
    at = math.log(unit.lr / (best * (400 / unit.steps) ** 0.5))
    return at**2 + (math.log(unit.alpha_kl / alpha) ** 2 if unit.alpha_kl else 0) + 0.01 * unit.seed


def trained(lengths_, forms, seeds, models=(MODEL,)):
    """Return the losses by a formula of all that is wanted, and the order in which it was."""
    losses, order = {}, []
    while batch := list(dict.fromkeys(wanted(models, lengths_, forms, seeds, losses))):
        for unit in batch[:2]:
            assert unit not in losses
            losses[unit] = loss_of(unit)
            order.append(unit)
    return losses, order


@pytest.mark.parametrize("form", FORMS)
def test_the_best_is_a_minimum_among_neighbours_at_every_length(form):
    losses, _ = trained((400, 1600), ("adamw", form), (0, 1))
    for steps in (400, 1600):
        unit = tuned(MODEL, steps, form, losses).unit
        base = FORMS[form].default.lr
        k = power(unit.lr, base)
        beside = [replace(unit, lr=rounded(base * STEP**i)) for i in (k - 1, k + 1)]
        if FORMS[form].alpha:
            start = FORMS[form].default.alpha_kl
            alphas = [rounded(start * STEP**i) for i in (power(unit.alpha_kl, start) + j for j in (-1, 1))]
            beside = [replace(unit, alpha_kl=value) for value in alphas]
        assert all(losses[one] > losses[unit] for one in beside)
        assert abs(math.log(unit.lr / (0.01 if steps == 400 else 0.005))) <= math.log(STEP) / 2 + 1e-3


def test_the_best_and_the_defaults_are_trained_on_all_seeds_and_nothing_twice():
    losses, order = trained((400,), ("adamw", "muon"), (0, 1, 2))
    assert len(order) == len(set(order))
    for form in ("adamw", "muon"):
        unit = tuned(MODEL, 400, form, losses).unit
        for seed in (0, 1, 2):
            assert replace(unit, seed=seed) in losses and at_default(MODEL, 400, form, seed) in losses
    others = {unit.adamw_lr for unit in losses if unit.form == "muon"}
    assert others == {tuned(MODEL, 400, "adamw", losses).unit.lr, ADAMW_LR}


@pytest.mark.parametrize("better", [True, False])
def test_readmes_rate_beside_the_matrices_stays_where_it_is_better(better):
    losses, _ = trained((400,), ("adamw", "muon"), (0,))
    first = tuned(MODEL, 400, "adamw", losses).unit.lr
    found = tuned(MODEL, 400, "muon", losses).unit
    assert found.adamw_lr == first != ADAMW_LR
    losses[replace(found, adamw_lr=ADAMW_LR)] += -1.0 if better else 1.0
    assert tuned(MODEL, 400, "muon", losses).unit == replace(found, adamw_lr=ADAMW_LR if better else first)


@pytest.mark.parametrize("form", ["adamw", "pro-klshampoo-paper"])
def test_a_search_begins_at_the_best_of_the_shorter_length(form):
    losses, order = trained((400, 1600), dict.fromkeys(("adamw", form)), (0,))
    shorter = tuned(MODEL, 400, form, losses).unit
    default = at_default(MODEL, 1600, form, 0)
    first = [unit for unit in order if unit.steps == 1600 and unit.form == form and unit != default][:3]
    assert shorter.lr in {unit.lr for unit in first} and {unit.alpha_kl for unit in first} == {shorter.alpha_kl}
    assert shorter.alpha_kl != default.alpha_kl or form == "adamw"


def test_long_runs_are_tried_at_the_trends_rate_and_the_next_lower_one_beside_the_defaults():
    losses, _ = trained((400, 1600), ("adamw", "muon"), (0,))
    powers = [power(tuned(MODEL, steps, "muon", losses).unit.lr, 0.02) for steps in (400, 1600)]
    assert powers == [-2, -3]  # 0.01 and 0.005 by the formula
    default = at_default(MODEL, LONG, "muon", 0)
    first = tuned(MODEL, LONG, "muon", losses).wanted
    assert set(first) == {default, *(replace(default, lr=rounded(0.02 * STEP**k)) for k in (-4, -5))}
    losses |= {unit: loss_of(unit) for unit in first}
    assert tuned(MODEL, LONG, "muon", losses).unit == min(first, key=losses.get) != default
    assert tuned(MODEL, LONG, "muon", losses | {default: -1.0}).unit == default
    seeds = list(wanted((MODEL,), (LONG,), ("muon",), (0, 1), losses))
    assert {(unit.seed, unit.lr) for unit in seeds} == {(1, 0.02), (1, tuned(MODEL, LONG, "muon", losses).unit.lr)}


def test_of_a_trend_no_more_than_one_power_is_followed():
    losses, _ = trained((400, 1600), ("adamw", "muon"), (0,))
    best = tuned(MODEL, 1600, "muon", losses).unit
    far = replace(best, lr=rounded(0.02 * STEP**-7))
    losses |= {replace(best, lr=rounded(0.02 * STEP**k)): k - 9.0 for k in range(-8, -3)}
    losses |= {far: -50.0, replace(far, adamw_lr=ADAMW_LR): 0.0}
    assert tuned(MODEL, 1600, "muon", losses).unit == far
    rates = {rounded(0.02 * STEP**k) for k in (0, -8, -9)}
    assert {unit.lr for unit in tuned(MODEL, LONG, "muon", losses).wanted} == rates


def test_a_command_of_other_lengths_or_models_leaves_what_is_tuned():
    losses, _ = trained((400,), ("adamw", "muon"), (0,), ("gpt2-tiny", "llama-tiny"))
    known = {model: tuned(model, 400, "muon", losses).unit for model in ("gpt2-tiny", "llama-tiny")}
    for steps, unfinished in ((100, 5), (1600, None)):
        for _ in range(unfinished or 100):
            if batch := list(wanted((MODEL,), (steps,), ("adamw", "muon"), (0,), losses)):
                losses[batch[0]] = loss_of(batch[0])
        assert {model: tuned(model, 400, "muon", losses).unit for model in known} == known
    assert tuned(MODEL, 1600, "muon", losses).unit is not None


def test_the_defaults_are_the_best_where_nothing_that_was_tried_is_lower():
    losses, _ = trained((400,), ("adamw", "muon"), (0,))
    default = at_default(MODEL, 400, "muon", 0)
    assert tuned(MODEL, 400, "muon", losses).unit != default
    assert tuned(MODEL, 400, "muon", losses | {default: -1.0}).unit == default


def test_a_search_without_a_minimum_ends():
    losses, count = {}, 0
    while batch := list(wanted((MODEL,), (400,), ("adamw",), (0,), losses)):
        losses[batch[0]] = batch[0].lr
        count += 1
    assert count <= 2 * FURTHEST and tuned(MODEL, 400, "adamw", losses).unit.lr == min(unit.lr for unit in losses)


def test_a_diverged_run_is_never_the_best():
    losses, _ = trained((400,), ("adamw",), (0,))
    best = tuned(MODEL, 400, "adamw", losses).unit
    again = tuned(MODEL, 400, "adamw", losses | {best: math.inf})
    assert again.unit != best


def test_powers_are_those_of_recorded_rates():
    assert [power(rounded(0.003 * STEP**k), 0.003) for k in range(-4, 5)] == list(range(-4, 5))


def recorded(job, folder):
    """What training a job returns, by the formula."""
    h = job.hyper
    unit = Unit(job.scale.name, job.steps, job.name, h.lr, h.adamw_lr, h.alpha_kl, job.seed)
    losses = [(0, 5.0), (unit.steps, loss_of(unit))]
    record = Record(losses=[1.0] * unit.steps, model_seconds=[0.1] * unit.steps, optimizer_seconds=[0.1] * unit.steps,
                    validation=losses)  # fmt: skip
    return units.Result(record, 0, {}, ""), {"data": "text"}


def test_runs_are_written_as_they_end_and_not_trained_again(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "one_run_each", ThreadPoolExecutor)
    monkeypatch.setattr(queue, "train", recorded)
    arguments = [f"--out={tmp_path}", "--models", MODEL, "--lengths", "400", "--forms", "adamw", "muon", "--seeds", "0"]
    assert study.main(["lengths", *arguments, "--jobs", "2"]) == 0
    found = tables.units(frame(tmp_path / "lengths.csv"))
    assert not list(wanted((MODEL,), (400,), ("adamw", "muon"), (0,), found))
    assert found == {unit: pytest.approx(loss_of(unit), rel=1e-6) for unit in found}
    curve = rows.read(tmp_path / "lengths-curves.csv")
    assert len(curve) == 2 * len(found) and curve[1]["seconds"] == "80"
    monkeypatch.setattr(queue, "train", lambda *job: pytest.fail("trained again"))
    assert study.main(["lengths", *arguments]) == 0


def test_a_run_that_is_killed_between_its_files_is_trained_again(tmp_path, monkeypatch):
    written = []

    def killed(path, rows, key):
        if written:
            raise KeyboardInterrupt
        written.append(path.name)

    monkeypatch.setattr(queue, "one_run_each", ThreadPoolExecutor)
    monkeypatch.setattr(queue, "train", recorded)
    monkeypatch.setattr(rows, "upsert", killed)
    arguments = [f"--out={tmp_path}", "--models", MODEL, "--lengths", "400", "--forms", "adamw", "--seeds", "0"]
    assert study.main(["lengths", *arguments, "--jobs", "1"]) == 130
    assert written == ["lengths-curves.csv"]  # lengths.csv says what is done


def row_of(unit, loss):
    named = {"model": unit.model, "steps": unit.steps, "optimizer": unit.form, "seed": unit.seed, "lr": unit.lr}
    named |= {"adamw_lr": unit.adamw_lr, "alpha_kl": unit.alpha_kl, "validation_loss": loss}
    return named | {"model_ms": 30.0, "optimizer_ms": 20.0, "state_mb": 2.0}


def test_the_tables_pair_seeds_leave_out_the_selecting_one_and_show_only_what_is_known(tmp_path):
    losses, _ = trained((400,), ("adamw", "muon", "kl-shampoo"), (0, 1, 2))
    of_one_seed, _ = trained((400,), ("adamw", "soap"), (0,))
    former = replace(at_default(MODEL, 400, "cosmos", 1), lr=0.0123)  # of defaults that have changed since
    beside = replace(at_default(MODEL, 400, "muon", 0), lr=0.0123)  # no rate of the grid
    every = [row_of(*one) for one in (of_one_seed | losses | {former: 1.0, beside: 9.0}).items()]
    every += 2 * [row | {"model_ms": 90.0, "optimizer_ms": 1e3} for row in every if row["optimizer"] == "muon"]
    rows.write(tmp_path / "rows.csv", every)
    found = frame(tmp_path / "rows.csv")
    muon = tuned(MODEL, 400, "muon", losses).unit
    default = at_default(MODEL, 400, "muon", 0)
    for selecting, more, error, seeds in ((True, 0.0, "", 1), (False, 0.015, " ± 0.005", 2)):
        shown = tables.losses_table(found, selecting).splitlines()
        (line,) = (line for line in shown if "| Muon " in line)
        assert f"{losses[default] + more:.3f}{error} / {losses[muon] + more:.3f}{error}" in line
        assert line.endswith(f" {seeds} |") and line.split("|")[4].strip() == "20"  # ms, of the quick runs alone
        assert any("SOAP" in line for line in shown) is selecting and not any("COSMOS" in line for line in shown)
    shown = tables.settings_table(found).splitlines()
    (line,) = (line for line in shown if "| Muon " in line)
    # The formula's seeds differ by 0.01 everywhere, so that paired differences have no error.
    assert f"{losses[default] - losses[muon]:+.3f} ± 0.000" in line and line.endswith(" 2 |")
    assert "0.0133" in line and "0.0123" not in line
    (line,) = (line for line in shown if "| SOAP " in line)  # on the seed that it shares with Muon
    assert f"{loss_of_soap(of_one_seed) - losses[muon]:+.3f} |" in line and line.endswith(" 1 |")
    short = [row_of(*one) for one in losses.items() if one[0].form != "muon" or one[0].lr != muon.lr]
    rows.write(tmp_path / "short.csv", short)
    assert "| Muon " not in tables.settings_table(frame(tmp_path / "short.csv"))


def test_lengths_come_in_order_and_the_rest_behind_them_whichever_method_has_which(tmp_path):
    short, _ = trained((400,), ("adamw", "soap"), (0, 1))
    longer, _ = trained((400, 1600), ("muon",), (0, 1))
    rows.write(tmp_path / "rows.csv", [row_of(*one) for one in (short | longer).items()])
    shown = tables.losses_table(frame(tmp_path / "rows.csv"), True).splitlines()
    title = [cell.strip() for cell in shown[0].split("|")[1:-1]]
    assert title == ["optimizer", "to tune", f"{MODEL}, 400", f"{MODEL}, 1,600", "step, ms", "state, MB", "seeds"]
    (line,) = (line for line in shown if "SOAP" in line)
    assert line.split("|")[4].strip() == "-"


def loss_of_soap(losses):
    return losses[tuned(MODEL, 400, "soap", losses).unit]


def test_shares_of_steps_to_a_loss_are_interpolated_and_seconds_do_not_depend_on_the_machine(tmp_path, monkeypatch):
    losses, _ = trained((400,), ("adamw", "muon"), (0,))
    curves, found, slower = [], [], {"adamw": 1.0, "muon": 1.0}
    for unit in losses:
        for step, loss in ((0, 4.0), (200, 2.0), (400, 1.0 if unit.form == "adamw" else 1.5)):
            curves.append(row_of(unit, loss) | {"step": step})
        own = {"model_ms": 30.0, "optimizer_ms": 70.0 if unit.form == "adamw" else 20.0}
        found.append(row_of(unit, losses[unit]) | {name: ms * slower[unit.form] for name, ms in own.items()})
        slower[unit.form] *= 3.0  # as others share the machine
    rows.write(tmp_path / "rows.csv", found)
    rows.write(tmp_path / "curves.csv", [{k: v for k, v in row.items() if "_m" not in k} for row in curves])
    shown = tables.reached_table(frame(tmp_path / "rows.csv"), tmp_path / "curves.csv").splitlines()
    (line,) = (line for line in shown if "AdamW" in line)
    assert [cell.strip() for cell in line.split("|")[4:6]] == ["0.75", "1.50"]  # 300 steps of 100 ms, not of 50
    (line,) = (line for line in shown if "| Muon " in line)
    assert [cell.strip() for cell in line.split("|")[4:6]] == ["-", "-"]
    untimed = [row | ({"model_ms": None, "optimizer_ms": None} if row["optimizer"] == "adamw" else {}) for row in found]
    rows.write(tmp_path / "untimed.csv", untimed)  # the runs of a machine that does other things
    shown = tables.reached_table(frame(tmp_path / "untimed.csv"), tmp_path / "curves.csv").splitlines()
    (line,) = (line for line in shown if "AdamW" in line)
    assert [cell.strip() for cell in line.split("|")[4:6]] == ["0.75", "-"]
    (line,) = (x for x in tables.losses_table(frame(tmp_path / "untimed.csv"), True).splitlines() if "AdamW" in x)
    assert line.split("|")[4].strip() == "-"
    drawn = []
    monkeypatch.setattr(figure, "save", lambda it, path: drawn.extend(axes.get_lines() for axes in it.axes))
    for x in ("step", "seconds"):
        figure.draw(tmp_path / "loss.png", frame(tmp_path / "rows.csv"), frame(tmp_path / "curves.csv"), x, 400)
    assert [[(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines] for lines in drawn] == [
        [(400, 1.0), (400, 1.5)],  # AdamW, Muon: steps
        [(pytest.approx(40), 1.0), (pytest.approx(20), 1.5)],  # seconds
    ]


@pytest.mark.slow
def test_the_command_trains_in_processes_of_its_own(tmp_path):
    """As users start it, where all but one run are done: what processes import is not the command itself."""
    missing = at_default(MODEL, 1, "adamw", 0)
    losses, _ = trained((1,), ("adamw",), (0,))
    rows.write(tmp_path / "lengths.csv", [row_of(*one) for one in losses.items() if one[0] != missing])
    names = ["--models", MODEL, "--lengths", "1", "--forms", "adamw", "--seeds", "0", "--jobs", "2"]
    command = [sys.executable, "-m", "bench.study", "lengths", f"--out={tmp_path}", f"--folder={tmp_path}", *names]
    found = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=rows.ROOT)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("gpt2-tiny, 1 steps, adamw lr 0.001, seed 0: ") and found.stdout.count("\n") == 1
    assert tables.units(frame(tmp_path / "lengths.csv")).keys() == losses.keys()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["adamw", "muon", "pro-klshampoo-paper", "cosmos", "online-kl-shampoo-0.9"])
def test_a_unit_is_trained_with_its_settings(form, tmp_path):
    threads = torch.get_num_threads()
    unit = replace(at_default(MODEL, 1, form, 0), lr=1e-3)
    try:
        result, data = queue.train(policies.Lengths(policies.LengthsOptions(out=tmp_path)).job(unit), tmp_path)
    finally:
        torch.set_num_threads(threads)
    row, curve = policies.rows_of(unit, result, data)
    assert row["lr"] == 1e-3 and row["optimizer"] == form and row["state_mb"] > 0 and row["threads"] == "1"
    assert [one["step"] for one in curve] == [0, 1] and row["validation_loss"] == curve[-1]["validation_loss"] > 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--lengths", "0"], "--lengths 0: must be a whole number >= 1"),
        (["--seeds", "1", "1"], "--seeds names one twice"),
    ],
)
def test_wrong_input_is_refused_in_one_line(arguments, says, capsys):
    assert study.main(["lengths", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_the_unit_of_a_row_is_the_one_that_was_trained(tmp_path):
    unit = Unit(MODEL, 400, "pro-klshampoo-paper", 0.01333, 0.00225, 0.015, 1)
    row = {"model": unit.model, "steps": 400, "optimizer": unit.form, "seed": 1, "validation_loss": 2.0}
    rows.write(tmp_path / "rows.csv", [row | {"lr": unit.lr, "adamw_lr": unit.adamw_lr, "alpha_kl": 0.015}])
    assert tables.units(frame(tmp_path / "rows.csv")) == {unit: 2.0}
