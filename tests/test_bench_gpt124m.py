"""``bench.study gpt-124m``: its order, what a killed command leaves, how it keeps its time, rows and tables."""

import lzma
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from pandas import concat

from bench import optimizers
from bench.command import UsageError
from bench.models import gpt2
from bench.rows import frame, read
from bench.study import __main__ as command
from bench.study import figures, gpt124m, gpt124m_tables
from bench.study.gpt124m import ADAMW, KL, MUON_9, OURS, SCALES, planned, searched, trials
from bench.training.compiled import Compiled
from bench.training.shards import write_shard
from tests.experiments import MICRO

FULL = SCALES["full"]
SMALL = replace(MICRO, steps=12, evaluations=4)
LARGER = replace(SMALL, name="gpt2-micro, larger", config=gpt2(2, 16, 2, context=16))


def test_adamw_is_tuned_first_and_every_run_is_made_once():
    order = planned({}, FULL)
    assert [trial.case for trial in order[:4]] == [ADAMW, ADAMW, OURS, MUON_9]
    assert len({trial.key for trial in order}) == len(order)
    assert [trial.case for trial in order if trial.seed] == [OURS, MUON_9, KL] * 2
    assert [trial.case for trial in order[-3:] if trial.scale == FULL[1]] == [OURS, MUON_9, KL]


def test_a_search_of_runs_that_all_diverge_ends():
    trial, known = trials({}, FULL).__next__(), {}
    while (found := searched(trial, known))[1] is None:
        known |= {its.key: math.inf for its in found[0]}
    assert len(known) == gpt124m.FURTHEST + 2


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Packed, as it is carried to a machine."""
    path = tmp_path_factory.mktemp("shards") / "tokens.bin"
    write_shard(path, np.random.default_rng(0).integers(0, 100, 4000))
    packed = path.with_name("tokens.bin.xz")
    packed.write_bytes(lzma.compress(path.read_bytes()))
    return packed


@pytest.fixture
def small(monkeypatch):
    """A model that trains in no time, and few runs of it."""
    monkeypatch.setitem(SCALES, "rehearsal", (SMALL, LARGER))
    monkeypatch.setattr(gpt124m, "FURTHEST", 0)  # two rates of a search
    every = gpt124m.trials

    def few(known, scales):
        own = [trial for trial in every(known, scales) if trial.case in (ADAMW, OURS)]
        yield from own
        if own[-1].case == OURS:
            yield replace(own[-1], scale=scales[1])

    monkeypatch.setattr(gpt124m, "trials", few)


def run(shard, out, *options):
    given = ["--rehearse", "--eager", "--data", shard, "--out", out, *options]
    return command.main(["gpt-124m", *map(str, given)])


TIMES = re.compile("seconds|_ms|tokens_per|tflops|date|commit")


def contents(folder):
    """The rows of runs and curves without what was timed."""
    return [
        [{name: value for name, value in row.items() if not TIMES.search(name)} for row in read_all(folder / file)]
        for file in (gpt124m.FILE, gpt124m.CURVES)
    ]


def read_all(path):
    return sorted(read(path), key=lambda row: [row.get(name, "") for name in (*gpt124m.KEY, "step")])


def test_a_command_killed_twice_gives_the_same_rows(small, shard, tmp_path, monkeypatch, capsys):
    assert run(shard, tmp_path / "whole") == 0
    whole = contents(tmp_path / "whole")
    assert len(whole[0]) == 5 and len(whole[1]) == 5 * 5
    assert [row["model"] for row in read(tmp_path / "whole" / gpt124m.FILE)] == [SMALL.name] * 4 + [LARGER.name]
    passed, original = [], Compiled._pass

    def killed(model, seed, step):
        passed.append(step)
        if len(passed) in (30, 60):
            raise KeyboardInterrupt  # as Ctrl-C does, which jobs in the background ignore
        return original(model, seed, step)

    monkeypatch.setattr(Compiled, "_pass", killed)
    capsys.readouterr()
    for done in (1, 2):
        assert run(shard, tmp_path / "halves") == 130
        assert len(read(tmp_path / "halves" / gpt124m.FILE)) == done
        output = capsys.readouterr()
        assert "the same command goes on" in output.err and " of it was not training" in output.out
    assert run(shard, tmp_path / "halves") == 0
    assert contents(tmp_path / "halves") == whole
    passed.clear()
    assert run(shard, tmp_path / "halves") == 0 and not passed  # nothing is left, nothing is compiled


def test_rows_of_other_data_or_another_vocabulary_are_not_these(small, shard, tmp_path, capsys):
    assert run(shard, tmp_path, "--minutes", 1) == 0
    other = tmp_path / "other.bin"
    write_shard(other, np.random.default_rng(1).integers(0, 100, 4000))
    capsys.readouterr()
    assert run(other, tmp_path, "--plan") == 0
    assert "trained" not in capsys.readouterr().out
    assert run(other, tmp_path) == 0
    assert len(read(tmp_path / gpt124m.FILE)) == 10
    assert run(shard, tmp_path, "--vocabulary", 200) == 0
    assert len(read(tmp_path / gpt124m.FILE)) == 15


def test_minutes_count_the_opening_of_the_data_too(small, shard, tmp_path, monkeypatch, capsys):
    original, now = gpt124m.opened, [0.0]
    monkeypatch.setattr(gpt124m, "perf_counter", lambda: now[0])
    monkeypatch.setattr(gpt124m, "opened", lambda o: now.append(now.pop() + 59.9999) or original(o))
    assert run(shard, tmp_path, "--minutes", 1) == 0
    assert "0 runs in 60 s" in capsys.readouterr().out


def test_no_run_is_begun_that_would_not_end(small, shard, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpt124m.Runner, "expected", lambda runner, trial: 50.0)
    monkeypatch.setattr(gpt124m.Runner, "left", lambda runner: 49.0 if runner.made else 51.0)
    assert run(shard, tmp_path) == 0
    assert len(read(tmp_path / gpt124m.FILE)) == 1
    next_one = "Next is AdamW: lr 0.006, seed 0, 12 steps of gpt2-micro: about 50 s, and 49 s are left."
    assert next_one in capsys.readouterr().out
    asked = []
    monkeypatch.setattr(gpt124m.Runner, "left", lambda runner: asked.append(1) or (51.0 if len(asked) == 1 else 0.0))
    assert run(shard, tmp_path) == 0
    assert len(read(tmp_path / gpt124m.FILE)) == 1 and "Given up, it would take" in capsys.readouterr().out


def test_time_is_expected_by_the_last_run_of_the_optimizer_here(shard, tmp_path):
    o = gpt124m.parse(["--rehearse", "--eager", "--data", str(shard), "--out", str(tmp_path)])
    runner = gpt124m.Runner(o)
    model = runner.prepared(SMALL)
    first, *_ = trials({}, (SMALL, LARGER))
    pro = replace(first, case=OURS, hyper=replace(gpt124m.FORMS[OURS], adamw_lr=1e-3))
    assert runner.expected(pro) == pytest.approx(gpt124m.ROOM * model.pass_seconds * 12)
    runner.train(model, first)
    speed = float(read(runner.path)[0]["tokens_per_second"])
    seconds = 12 * 4 * 16 / speed
    assert runner.expected(pro) == runner.expected(first) == pytest.approx(1.1 * seconds)
    runner.train(model, pro)
    own = float(read(runner.path)[1]["tokens_per_second"])
    assert runner.expected(pro) == pytest.approx(1.1 * 12 * 4 * 16 / own) and own != speed


def test_an_optimizer_that_fails_leaves_the_others_their_runs(small, shard, tmp_path, monkeypatch, capsys):
    build, errors = optimizers.build, {0.004: UsageError("no such package"), 0.006: ArithmeticError("no such luck")}

    def failing(model, hyper, dtype):
        if error := errors.get(hyper.lr):
            raise error
        return build(model, hyper, dtype)

    monkeypatch.setattr(optimizers, "build", failing)
    order = planned({}, SCALES["rehearsal"])[:3]
    monkeypatch.setattr(gpt124m, "trials", lambda known, scales: iter(order))
    assert run(shard, tmp_path) == 1
    assert [row["lr"] for row in read(tmp_path / gpt124m.FILE)] == ["0.03"]
    output = capsys.readouterr()
    assert "Left out: AdamW: lr 0.004, seed 0, 12 steps of gpt2-micro: no such package\n" in output.out
    assert "FAILED: AdamW: lr 0.006" in output.out and "no such luck" in output.err


def test_the_plan_lists_done_and_coming_runs_and_trains_none(small, shard, tmp_path, capsys):
    assert command.main(["gpt-124m", "--plan", "--out", str(tmp_path / "none")]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "1. AdamW: lr 0.004, seed 0, 800 steps of gpt2-124m" and last.startswith("A search goes on beyond")
    assert not (tmp_path / "none").exists()
    assert run(shard, tmp_path) == 0
    capsys.readouterr()
    assert run(shard, tmp_path, "--plan") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(": trained") for line in lines] == [True] * 5 + [False]


# Tables


def test_tables_have_rates_seeds_and_what_is_open(small, shard, tmp_path, monkeypatch):
    assert gpt124m_tables.shown(frame(tmp_path / gpt124m.FILE)) == "None of these runs has been made yet.\n"
    monkeypatch.setitem(SCALES, "full", SCALES["rehearsal"])
    assert run(shard, tmp_path) == 0
    found, curves = (frame(tmp_path / file) for file in (gpt124m.FILE, gpt124m.CURVES))
    again = found[found["case"] == OURS].assign(seed=1)
    again["validation_loss"] += 0.5
    third = found[found["case"] == ADAMW].tail(1).assign(lr=0.009, validation_loss=math.nan)
    monkeypatch.setattr(gpt124m, "FURTHEST", 6)
    text = gpt124m_tables.shown(concat([found, again, third], ignore_index=True))
    assert f"{SMALL.name}'s shape, 0.0M parameters with a vocabulary of 128; 12 steps of 4 × 16 tokens" in text
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    adamw, pro = cells[1], cells[2]
    assert adamw[0] == ADAMW and adamw[1].endswith("0.009: diverged") and adamw[2] == "0.006"
    assert pro[0] == OURS and " / " in pro[1] and pro[2].endswith(", search open") and pro[3] == ""
    assert adamw[3].endswith(", one seed")
    assert text.endswith("(../bench/results/gpt-124m-seconds.png)\n")
    diverged = found.drop(columns="tokens_per_second")  # as of runs that all diverge before the first validation
    assert "| - |" in re.sub(" +", " ", gpt124m_tables.shown(diverged))
    for x in gpt124m_tables.PICTURES:
        figures.gpt124m(tmp_path / f"{x}.png", found, curves, x)
        assert (tmp_path / f"{x}.png").read_bytes().startswith(b"\x89PNG")
