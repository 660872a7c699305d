"""Attention's weights in pieces and at rates of their own: what a case is built with, and the order of the runs."""

import math
from dataclasses import replace
from itertools import islice

import pytest
import torch
from pandas import DataFrame

from bench import optimizers, rivals, rows
from bench.models import CONFIGS, build
from bench.optimizers import Hyper
from bench.study import attention, attention_tables
from bench.study.attention import HEADS, Trial, chosen, trials, wanted
from bench.study.runs import Options
from bench.study.scales import TINY


def model():
    torch.manual_seed(0)
    return build(replace(CONFIGS["llama-tiny"], vocabulary=32))


def settings(group):
    return {key: group.get(key) for key in ("lr", "split", "transposed", "rank")}


def test_groups_have_the_pieces_and_the_rates_that_the_case_says():
    own = model()
    names = {p: name for name, p in own.named_parameters()}
    hyper = Hyper("pro-klshampoo", 0.01, 0.003, qk_pieces=6, qk_rate=2.0, qk_rank=4, vo_pieces=3)
    groups = optimizers.split(own, hyper)
    found = {}
    for group in groups:
        for _, p in group["params"]:
            if group["algorithm"] == "matrix":
                found.setdefault(names.pop(p).split(".")[-2], settings(group))
            else:
                assert names.pop(p).split(".")[-2] not in optimizers.ROLES and group["lr"] == 0.003
    assert not names
    qk = {"lr": 0.02, "split": 6, "transposed": None, "rank": 4}
    other = {"lr": 0.01, "split": None, "transposed": None, "rank": None}
    assert found == {
        **dict.fromkeys(("q_proj", "k_proj"), qk),
        "v_proj": other | {"split": 3},
        "o_proj": other | {"split": 3, "transposed": True},
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), other),
    }
    whole = optimizers.split(own, Hyper("pro-klshampoo", 0.01, 0.003))
    assert [settings(group) for group in whole if group["algorithm"] == "matrix"] == [other]


@pytest.mark.parametrize("method, count", [("adamw", 1), ("muon", 2), ("kl-shampoo", 1)])
def test_every_method_has_the_rate_of_query_and_key(method, count):
    own = model()
    rest = None if method == "adamw" else 0.003
    built = optimizers.build(own, Hyper(method, 0.01, rest, qk_rate=4.0), None)
    assert len(built) == count
    rates = [group["lr"] for group in built[0].param_groups for _ in group["params"]]
    assert rates.count(0.04) == 2 * own.config.layers and set(rates) <= {0.04, 0.01, 0.003}


def test_muon_steps_a_piece_as_a_weight_of_its_own_bit_for_bit():
    own, other, start = model(), model(), model()
    hyper = Hyper("muon", 0.01, 0.003, float32=True, momentum=0.9, qk_pieces=6, qk_rate=2.0, vo_pieces=3)
    built = optimizers.build(own, hyper, None)
    cuts = {"qk": lambda t: t.split(16), "v": lambda t: t.split(32), "o": lambda t: t.mT.split(32)}
    alone = {}
    for name, p in other.named_parameters():
        if role := optimizers.ROLES.get(name.split(".")[-2]):
            parts = [torch.nn.Parameter(part) for part in cuts[role](p.detach())]
            lr = 0.02 if role == "qk" else 0.01
            alone[name] = cuts[role], parts, rivals.Float32Muon(parts, lr, weight_decay=0.0, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        own.zero_grad()
        for name, p in own.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            if name in alone:
                cut, parts, its = alone[name]
                for part, grad in zip(parts, cut(p.grad), strict=True):
                    part.grad = grad
                its.step()
        for optimizer in built:
            optimizer.step()
    assert len(alone) == 4 * own.config.layers
    for name in alone:
        assert torch.equal(own.get_parameter(name), other.get_parameter(name))
    assert not any(torch.equal(p, start.get_parameter(name)) for name, p in own.named_parameters())


def test_the_order_goes_on_and_asks_for_nothing_twice():
    known = {}
    best = {(3, 2.0), (1, 4.0)}

    def loss(trial):
        return (1.0 if (trial.qk_pieces, trial.qk_rate) in best else 2.0) + 0.1 * math.log(trial.qk_pieces)

    while batch := list(islice((trial for trial in wanted(known) if trial.key not in known), 7)):
        known |= {trial.key: loss(trial) for trial in batch}
    assert known == {trial.key: loss(trial) for trial in wanted(known)}
    assert set(chosen(400, known, 2)) == best
    confirmed = {trial.key for case in best for seed in (1, 2, 3) for trial in trials(400, *case, seed=seed)}
    assert confirmed <= known.keys()
    grid = {trial.key for p in (1, 3, 6, 12) for rate in (0.5, 1.0, 2.0, 4.0) for trial in trials(400, p, rate)}
    assert grid <= known.keys()


def test_what_is_not_known_of_both_models_is_not_chosen():
    gpt2, llama = trials(400, HEADS, 2.0)
    assert chosen(400, {gpt2.key: 0.0}, 2) == []
    assert chosen(400, {gpt2.key: 0.0, llama.key: math.inf}, 2) == [(HEADS, 2.0)]


def cells(text):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]


def test_the_table_has_differences_by_seed_and_their_mean():
    def row(model, loss, seed=0, form="pro-klshampoo", qk=1, **other):
        own = {"model": model, "steps": 400, "optimizer": form, "qk_pieces": qk, "qk_rate": 1.0, "vo_pieces": 1}
        return own | {"lr": 0.01333, "seed": seed, "validation_loss": loss, "qk_rank": math.nan} | other

    found = [row("llama-tiny", loss, seed, qk=qk) for qk, seed, loss in ((1, 0, 2.0), (1, 1, 2.5), (6, 0, 1.75))]
    found += [row("llama-tiny", loss, seed, qk=6) for seed, loss in ((1, 2.25), (2, 9.0))]  # 2 has no whole one
    found += [
        row("gpt2-tiny", loss - (qk == 6) / 4, seed, qk=qk) for qk in (1, 6) for seed, loss in enumerate((1, 2, 4))
    ]
    others = {"qk_rate": 2.0}, {"vo_pieces": 3}, {"qk_rank": 4.0}, {"lr": 0.02}, {"steps": 1600, "lr": 0.008889}
    found += [row("gpt2-tiny", 0.5, **other) for other in others]
    found += [row("llama-288", 0.5, qk=qk) for qk in (1, 6)]
    found += [row("gpt2-tiny", math.nan, form="muon-0.9", qk=6), row("gpt2-tiny", 2.0, form="muon-0.9")]
    found += [row("gpt2-tiny", 2.0, form="adamw", lr=0.00225)]
    assert cells(attention_tables.heads_table(DataFrame(found), [400])) == [
        ["Pro-KLShampoo", "whole", "1.000; 3.000 ± 1.000 (2)", "2.000; 2.500 (1)"],
        ["Pro-KLShampoo", "by heads", "-0.250; -0.250 ± 0.000 (2)", "-0.250; -0.250 (1)"],
        ["Muon, momentum 0.9", "whole", "2.000", "-"],
        ["Muon, momentum 0.9", "by heads", "+inf", "-"],
    ]


@pytest.mark.slow
def test_a_run_leaves_a_row_and_the_next_call_finds_it(tmp_path, monkeypatch):
    trial = Trial("llama-tiny", 12, "muon-0.9", HEADS, 2.0, None, 1, 0.02, 0)
    monkeypatch.setitem(TINY, "llama-tiny", replace(TINY["llama-tiny"], eval_windows=4))
    monkeypatch.setattr(attention, "wanted", lambda known: iter([trial]))
    o = Options(out=tmp_path, folder=tmp_path / "runs", jobs=1)
    attention.run(o)
    (row,) = rows.read(tmp_path / "attention.csv")
    assert tuple(row[name] for name in attention.KEY) == trial.key
    assert (row["optimizer"], row["qk_pieces"], row["qk_rate"], row["lr"]) == ("muon-0.9", "6", "2", "0.02")
    assert 2.0 < float(row["validation_loss"]) < 5.6 and float(row["optimizer_per_model"]) > 0
    monkeypatch.setattr(attention.runs, "Task", None)  # which a second run would call
    attention.run(o)
    assert rows.read(tmp_path / "attention.csv") == [row]
