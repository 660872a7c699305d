"""The prediction of a divided step: nothing is lost or sent twice, and ranks that have more to do take longer."""

import math

import pytest

from bench import rows, scale
from bench.model import ranks
from bench.model.published import PUBLISHED, Published

SMALL = Published("small", 3, ((64, 64), (16, 64), (96, 64), (4, 32, 64)), ((100, 64), (64,)))
LAUNCHERS = pytest.mark.parametrize("launcher", scale.LAUNCHERS)


def total(ways):
    return [sum(own) for own in ways]


def traffic(p):
    return [p.adamw, *(way for wave in p.waves for way in wave.traffic)]


@LAUNCHERS
def test_all_matrices_have_owners_and_all_state_is_somewhere(launcher):
    p, alone = (ranks.plan(SMALL, world, launcher, 8) for world, launcher in ((16, launcher), (1, "ddp")))
    assert {wave.size: sum(wave.owned) for wave in p.waves} == {(64, 64): 3, (16, 64): 3, (64, 96): 3, (32, 64): 12}
    assert sum(p.costs) == pytest.approx(alone.costs[0])
    repeated = 16 // ranks.NODE if launcher == "hsdp" else 1  # AdamW's, by replicas
    adamw = 2 * ranks.DTYPE.itemsize * sum(map(math.prod, SMALL.adamw))
    assert sum(p.state) == alone.state[0] + (repeated - 1) * adamw


@LAUNCHERS
def test_what_is_sent_is_received(launcher):
    for way in traffic(ranks.plan(SMALL, 16, launcher, 8)):
        for near_or_far in (0, 1):
            assert sum(own[near_or_far] for own in way.sent) == sum(own[near_or_far] for own in way.received)


def test_one_rank_sends_nothing():
    assert not any(any(total(way.sent)) for way in traffic(ranks.plan(SMALL, 1, "ddp", 8)))


def test_of_sharded_weights_twice_the_bytes_come_and_once_they_go():
    p = ranks.plan(SMALL, 8, "fsdp2", 8)
    for wave in p.waves:
        assert [2 * given for given in total(wave.given.received)] == total(wave.lent.sent)
        assert not any(total(wave.copied.sent))
    (square,) = (wave for wave in p.waves if wave.size == (64, 64))
    elsewhere = 3 * 64 * 64 * 7 // 8  # an eighth of a matrix lies with its owner
    assert sum(total(square.given.sent)) == elsewhere * ranks.DTYPE.itemsize


def test_each_rank_of_hsdp_sends_about_what_others_do():
    """An owner gives each shard to one of its copies, which passes it on."""
    model = Published("even", 64, ((64, 64),), ())
    (wave,) = ranks.plan(model, 64, "hsdp", 8).waves
    sent = [sum(total(own)) for own in zip(*(way.sent for way in wave.traffic), strict=True)]
    assert max(sent) <= 1.05 * sum(sent) / len(sent)


def test_more_matrices_take_longer_and_messages_hide_behind_work(monkeypatch):
    monkeypatch.setattr(scale, "wave_seconds", lambda size, count: float(count))
    p = ranks.plan(SMALL, 2, "fsdp2", 8)
    work = sum(max(wave.owned) for wave in p.waves)
    assert work < scale.step_seconds(p) < work + 0.01
    monkeypatch.setattr(scale, "sending_seconds", lambda traffic: 100.0)
    ways = 2 * len(p.waves) + 1  # there and back, and copies of the last, which here are none
    assert 100 * ways <= scale.step_seconds(p)


def test_the_committed_rows_are_those_of_this_code():
    committed = [row for row in rows.read(rows.RESULTS / "scale.csv") if row["model"] == "llama-7b"]
    assert {row["case"] for row in committed} == {"alone", *scale.LAUNCHERS}
    found = list(scale.model_rows(PUBLISHED["llama-7b"], ("ddp", "fsdp2"), (8,)))
    wanted = [row for row in committed if row["case"] == "alone" or (row["ranks"] == "8" and row["case"] != "hsdp")]
    assert [float(row["median"]) for row in wanted] == pytest.approx([row["median"] for row in found], rel=1e-6), (
        "run python -m bench.scale --out bench/results/scale.csv, then python -m bench.tables"
    )


def test_a_model_that_is_not_known_is_refused(capsys):
    assert scale.main(["--models", "gpt-5"]) == 2
    assert "llama-7b" in capsys.readouterr().err
