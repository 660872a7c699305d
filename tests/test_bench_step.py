"""The benchmark of whole steps: who is compared with whom, that nothing wrong is reported, and what is left out."""

import re
from dataclasses import replace

import pytest
import torch

from bench import rows
from bench.rates import Rates, machine_rates
from bench.shapes import ASPECTS, ParameterSet
from bench.timing import __main__ as timing
from bench.timing import agreement, entries, kernels, peers
from bench.timing import steps as step
from bench.timing.entries import EAGER, PERIOD, Float32Muon, aspect_entries, model_entries, muon, pro
from bench.timing.problem import Problem
from bench.timing.runs import TimedRun, enter, take_turns
from prokl import ProKLShampoo
from prokl.backends import triton_pairs
from prokl.kernels import launch
from prokl.pair import Pair
from tests.commands import ROOT, read, run_python

CPU = torch.device("cpu")
TINY = ParameterSet("tiny", ((2, 8, 12), (1, 12, 8), (1, 8, 8)), (2, 3, 4))
RATES = Rates(2e12, 1e12, 1e11)
QUICK = ["steps", "--sets", "tiny", "--seconds", "0.001", "--rounds", "3"]


@pytest.fixture
def tiny(monkeypatch):
    """The set "tiny" without peers, and rates that are not measured."""
    monkeypatch.setitem(timing.EVERY, "tiny", TINY)
    monkeypatch.setattr("bench.rates.measure_rates", lambda device: RATES)
    monkeypatch.setattr(step, "peers", lambda rank, polar: [])
    here = {column: "x" for column in rows.SAME} | {"date": "2000-01-01"}
    monkeypatch.setattr(rows, "environment", lambda device: here)
    return here


def test_muon_in_float32_does_what_torch_does_in_bfloat16():
    g = torch.Generator().manual_seed(0)
    starts = [torch.randn(s, generator=g) for s in ((8, 12), (12, 8), (8, 8))]
    gradients = [torch.randn(s.shape, generator=g) for s in starts]
    theirs = torch.optim._muon._zeropower_via_newtonschulz
    ends = []
    for kind in (torch.optim.Muon, Float32Muon):
        Ws = [torch.nn.Parameter(W.clone()) for W in starts]
        for W, G in zip(Ws, gradients, strict=True):
            W.grad = G
        kind(Ws, lr=1.0, weight_decay=0.0).step()
        ends.append([W.detach() - start for W, start in zip(Ws, starts, strict=True)])
        assert torch.optim._muon._zeropower_via_newtonschulz is theirs
    for bf16, fp32 in zip(*ends, strict=True):
        difference = torch.linalg.vector_norm(bf16 - fp32) / torch.linalg.vector_norm(fp32)
        # Some ten roundings of 2^-9, magnified by the quintic's slope; measured: 0.006 to 0.01.
        assert 1e-4 < difference < 0.04


@pytest.mark.parametrize("polar", [torch.float32, torch.bfloat16])
def test_the_entries_are_distinct_and_only_two_have_the_other_dtype(polar):
    entries = model_entries(TINY, CPU, polar)
    assert len({entry.key for entry in entries}) == len(entries)
    other = [entry.optimizer for entry in entries if entry.polar not in (None, polar)]
    assert sorted(other) == ["muon", "pro-klshampoo"] and entries[0] == muon(polar)
    assert [e.rank for e in entries if e.optimizer == "pro-klshampoo" and e.backend == "torch"] == [2, 3, 4, 3]


def test_on_a_gpu_the_middle_rank_is_also_stepped_without_graphs():
    entries = model_entries(TINY, torch.device("cuda"), torch.bfloat16)
    eager = [entry for entry in entries if entry.eager]
    assert len({entry.key for entry in entries}) == len(entries)
    assert [(entry.optimizer, entry.rank, entry.note) for entry in eager] == [("pro-klshampoo", 3, EAGER)]
    weights = [torch.nn.Parameter(torch.zeros(8, 12))]
    for entry in entries:
        if entry.backend == "torch":
            assert entry.build(weights).param_groups[0]["cuda_graphs"] is not entry.eager
    assert not any(entry.eager for entry in model_entries(TINY, CPU, torch.bfloat16))


@pytest.mark.parametrize("shape", [(12, 8), (8, 8), (4, 64)])
def test_every_optimizer_of_this_package_agrees_with_the_reference(shape):
    own = [entry for entry in model_entries(TINY, CPU, torch.bfloat16) if entry.backend == "torch"]
    assert len(own) == 6
    assert [agreement.complaint(entry, shape, CPU) for entry in own] == [""] * 6


@pytest.fixture
def as_on_cuda(monkeypatch):
    """The entries of the kernels as CUDA has them by default: balanced."""
    monkeypatch.setattr(entries, "backends", lambda device: ["torch", "triton"])
    found = [entry for entry in model_entries(TINY, CPU, torch.bfloat16) if entry.backend == "triton"]
    return [replace(entry, settings=(*entry.settings, ("precision", "balanced"))) for entry in found]


interpreted = pytest.mark.skipif(not launch.INTERPRETED, reason="needs Triton's interpreter")


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("which", range(3, 6))  # those before them have Newton-Schulz in bfloat16, which hides much
def test_balanced_entries_of_the_kernels_err_as_pytorchs_form_of_the_same_pairs(which, as_on_cuda):
    assert len(as_on_cuda) == 6
    entry = as_on_cuda[which]
    assert entry.precision(CPU) == "balanced"
    assert agreement.complaint(entry, (12, 8), CPU) == ""


@pytest.mark.slow
@interpreted
def test_a_balanced_entry_whose_pairs_lost_a_half_does_not_enter(as_on_cuda, monkeypatch):
    smok_hop = next(entry for entry in as_on_cuda if entry.optimizer == "smok-hop")
    split = triton_pairs.split
    monkeypatch.setattr(triton_pairs, "split", lambda *a: Pair(split(*a).both * torch.tensor([1, 0]).view(2, 1, 1, 1)))
    assert "in float32, may be" in agreement.complaint.__wrapped__(smok_hop, (12, 8), CPU)  # not what is cached


class Off(ProKLShampoo):
    """Steps a little further than it was told."""

    def step(self):
        if self.param_groups[0]["backend"] != "reference":
            self.param_groups[0]["lr"] *= 1 + 1e-5
        return super().step()


class Coarse(ProKLShampoo):
    """Rounds its weights to half precision, in float32 alone."""

    def step(self):
        super().step()
        for W in self.param_groups[0]["params"]:
            if W.dtype == torch.float32 and self.param_groups[0]["backend"] != "reference":
                W.data = W.bfloat16().float()


class Alike(ProKLShampoo):
    """Gives all weights of a bucket the step of the first."""

    def step(self):
        ws = self.param_groups[0]["params"]
        before = [W.detach().clone() for W in ws]
        super().step()
        for W, start in zip(ws, before, strict=True):
            W.data = start + (ws[0].detach() - before[0])


class Broken(ProKLShampoo):
    def step(self):
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0][0, 0] = float("nan")


def fail():
    raise RuntimeError("no such\nkernel")


class Failing(ProKLShampoo):
    def step(self):
        fail()


def made_by(kind, **changed):
    return replace(pro("torch", 3, torch.float32), make=kind, **changed)


@pytest.mark.parametrize("kind, why", [(Off, "in float64, may be 1e-06"), (Coarse, "in float32, may"), (Alike, "64")])
def test_what_goes_elsewhere_than_the_reference_does_not_enter(kind, why):
    runs, left_out = enter([made_by(kind), muon(torch.float32)], Problem(TINY, CPU), 60)
    assert [run.entry.optimizer for run in runs] == ["muon"]
    ((entry, found),) = left_out
    assert entry.optimizer == "pro-klshampoo" and found.startswith("wrong: on 8x12: ") and why in found


def test_weights_that_end_not_finite_give_a_reason_and_no_figure():
    runs, left_out = enter([made_by(Broken, backend=""), muon(torch.float32)], Problem(TINY, CPU), 60)
    take_turns(runs, 1e-3, 1, 1)
    assert not left_out and [run.trouble for run in runs] == ["wrong: weights are not finite", None]
    found = step.set_rows(runs, [], TINY, RATES)
    assert ["median" in row for row in found] == [True, False]
    assert found[1]["note"].startswith("wrong: ") and found[1]["optimizer"] == "pro-klshampoo"


def test_what_raises_or_is_too_slow_costs_its_own_row_alone():
    problem, peer = Problem(TINY, CPU), made_by(Failing, backend="")
    runs, left_out = enter([peer, muon(torch.float32)], problem, 60)
    assert [why for _, why in left_out] == ["RuntimeError: no such kernel"] and len(runs) == 1
    own = made_by(ProKLShampoo, backend="reference")
    runs, _ = enter([own, muon(torch.float32)], problem, 60)
    for run in runs:
        run.optimizer.step = fail
    take_turns(runs, 1e-3, 1, 1)
    assert [run.trouble for run in runs] == ["wrong: RuntimeError: no such kernel", "RuntimeError: no such kernel"]
    runs, left_out = enter([muon(torch.float32)], problem, 0.0)
    assert not runs and left_out[0][1].startswith("too slow: a step took ")


@pytest.mark.parametrize(
    "entry", aspect_entries(TINY, CPU, torch.float32)[1:], ids=lambda e: f"{e.optimizer} {e.backend}"
)
def test_a_period_ends_with_its_refresh_and_leaves_gradients_and_start_alone(entry):
    problem = Problem(TINY, CPU)
    start, gradients = [W.clone() for W in problem.start], [G.clone() for G in problem.gradients[0]]
    run = TimedRun(entry, problem)
    run.warm_up(60)
    assert len(run.steps(PERIOD)) == PERIOD and run.took > 0
    assert all(run.optimizer.state[W]["step"] % PERIOD == 0 for W in run.weights)
    assert all(not torch.equal(W, s) and W.isfinite().all() for W, s in zip(run.weights, start, strict=True))
    assert all(map(torch.equal, problem.start, start)) and all(map(torch.equal, problem.gradients[0], gradients))


def test_runs_take_turns_and_fewer_rounds_are_spread_over_the_others():
    order = []

    class Fake:
        trouble, weights = None, ()

        def __init__(self, name, took):
            self.name, self.took, self.periods = name, took, []

        def steps(self, count):
            order.append(self.name)
            return [self.took / count] * count

    take_turns([Fake("a", 0.1), Fake("b", 0.25), Fake("c", 9.0)], 1.0, 3, 8)
    assert "".join(order) == "aabaabaabaabc"


def test_the_command_writes_ratios_to_muon_of_the_same_dtype_floors_and_goes_on(tiny, tmp_path, capsys):
    out = tmp_path / "rows.csv"
    arguments = [*QUICK, "--out", str(out), "--seconds", "5"]  # three periods, however busy the machine is
    assert timing.main(arguments) == 0
    found = read(out)
    assert [r["case"] for r in found[:3]] == ["machine"] * 3 and found[0]["median"] == "2000"
    steps = [r for r in found if r["metric"] == "step"]
    own = ["muon", "adamw", "pro-klshampoo", "pro-klshampoo", "pro-klshampoo"]
    assert [(r["optimizer"], r["rank"]) for r in steps[:5]] == [*zip(own, ["", "", "2", "3", "4"], strict=True)]
    medians = {r["dtype"]: float(r["median"]) for r in steps if r["optimizer"] == "muon"}
    assert set(medians) == {"float32", "float32, Newton-Schulz bfloat16"}
    for r in steps:
        against = medians[r["dtype"] if r["optimizer"] in ("muon", "pro-klshampoo") else steps[0]["dtype"]]
        assert float(r["ratio"]) == pytest.approx(float(r["median"]) / against, rel=1e-5)
        if r["optimizer"] != "smok-hop":
            assert 0 < float(r["floor"]) < float(r["median"])
        assert float(r["q1"]) <= float(r["median"]) <= float(r["q3"]) and int(r["rounds"]) >= 3
        assert (r["model"], r["shapes"], r["unit"]) == ("tiny", "2x8x12 1x12x8 1x8x8", "ms")
    adamw = next(r for r in steps if r["optimizer"] == "adamw")  # bytes of weight, gradient and two moments
    assert float(adamw["floor"]) == pytest.approx(1e3 * (3 + 4) * 4 * TINY.elements / 1e11, rel=1e-6)
    for metric in ("step without refresh", "refresh step"):
        assert len([r for r in found if r["metric"] == metric]) == len([r for r in steps if r["backend"]])
    capsys.readouterr()
    assert timing.main(arguments) == 0
    assert capsys.readouterr().out.startswith("tiny: in ") and read(out) == found
    assert timing.main([*arguments, "--again"]) == 0
    again = read(out)
    assert again != found and again[:3] == found[:3]  # the ceilings of the file stay
    assert [(r["optimizer"], r["metric"]) for r in again] == [(r["optimizer"], r["metric"]) for r in found]


def test_ceilings_of_another_commit_are_measured_anew(tiny, tmp_path):
    out = tmp_path / "rows.csv"
    assert machine_rates(CPU, out, tiny) == RATES and read(out)[0]["commit"] == "x"
    machine_rates(CPU, out, tiny | {"commit": "y"})
    assert [r["commit"] for r in read(out)] == ["y"] * 3


def test_something_wrong_gives_status_1_and_the_rows_of_what_is_right_are_kept(tiny, monkeypatch, capsys, tmp_path):
    out, right = tmp_path / "rows.csv", pro("torch", 2, torch.float32)
    monkeypatch.setattr(step, "model_entries", lambda s, device, polar: [muon(polar), made_by(Off), right])
    assert timing.main([*QUICK, "--out", str(out)]) == 1
    assert "pro-klshampoo torch r=3 step: wrong: on 8x12" in capsys.readouterr().out
    found = {(r["optimizer"], r["rank"]): r["median"] for r in read(out) if r["metric"] == "step"}
    assert [bool(median) for median in found.values()] == [True, True, False]
    assert list(found) == [("muon", ""), ("pro-klshampoo", "2"), ("pro-klshampoo", "3")]
    assert timing.main([*QUICK, "--out", str(out)]) == 1  # what was wrong is not taken as measured


def test_products_that_are_emulated_in_bfloat16_are_left_out_with_the_reason(tiny, monkeypatch, capsys):
    monkeypatch.setattr("bench.rates.measure_rates", lambda device: Rates(1e10, 1e11, 1e10))
    assert timing.main(QUICK) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert [line.partition(" step: ")[0] for line in lines] == ["tiny muon", "tiny pro-klshampoo torch r=3"]
    assert all("10.0 times as long as in float32" in line for line in lines)


def test_n_over_m_is_a_set_of_its_own(tiny, monkeypatch, tmp_path):
    monkeypatch.setitem(timing.EVERY, "n/m=2", ParameterSet("n/m=2", ((1, 8, 16),), (3,)))
    out = tmp_path / "rows.csv"
    assert "n/m=2" in ASPECTS and timing.main([*QUICK, "--sets", "n/m=2", "--out", str(out)]) == 0
    found = [(r["optimizer"], r["backend"]) for r in read(out) if r["metric"] == "step"]
    assert found == [("muon", ""), ("pro-klshampoo", "torch"), ("kl-shampoo", "torch"), ("kl-shampoo", "reference")]
    against = [r["optimizer"] for r in read(out) if r["metric"] == "step over klshampoo reference"]
    assert against == ["pro-klshampoo", "kl-shampoo"]


def test_kernels_are_listed_by_their_share(tiny, tmp_path):
    out = tmp_path / "rows.csv"
    assert timing.main(["kernels", "--sets", "tiny", "--out", str(out)]) == 0
    whole, total, calls, *own = read(out)
    assert [r["metric"] for r in (whole, total, calls)] == ["step", "kernel time", "kernel calls"]
    assert float(total["ratio"]) == pytest.approx(float(total["median"]) / float(whole["median"]), rel=1e-5)
    medians = [float(r["median"]) for r in own]
    assert len(own) == kernels.TOP and medians == sorted(medians, reverse=True)
    assert 0 < sum(medians) <= float(total["median"]) * (1 + 1e-6) and float(calls["median"]) > kernels.TOP
    assert any("calls a step: aten::bmm" in r["note"] for r in own) and whole["rank"] == "4"


def test_a_step_that_is_too_slow_or_wrong_has_no_kernels(tiny, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "SLOWEST", 0.0)
    assert timing.main(["kernels", "--sets", "tiny"]) == 1
    assert "kernel time: too slow" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--seconds", "0"], "must be more than 0"),
        (["--rounds", "2"], "at least 3"),
        (["--device", "cuda"], "no CUDA device"),
        (["--out", "f"], "columns a"),
        (["--sets", "nonsense"], "nonsense"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").write_text("a,b\n")
    assert timing.main(["steps", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer.name)
def test_a_peer_that_is_installed_steps_and_another_says_why_not(peer):
    g = torch.Generator().manual_seed(0)
    Ws = [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in ((8, 6), (6, 8), (6, 6))]
    before, gradients = [W.detach().clone() for W in Ws], [torch.randn(W.shape, generator=g) for W in Ws]
    if (version := rows.version(peer.distribution)) is None:
        with pytest.raises(peers.CannotRun, match=rf"not installed: pip install {peer.distribution}|needs Python"):
            peer.entry().build(Ws)
        return
    try:
        optimizer = peer.entry().build(Ws)
        for _ in range(11):  # some need a refresh before they move
            for W, G in zip(Ws, gradients, strict=True):
                W.grad = G.clone()
            optimizer.step()
    finally:
        torch.compiler.set_stance("default")
    assert all(W.isfinite().all() and not torch.equal(W, b) for W, b in zip(Ws, before, strict=True))
    assert f"{peer.distribution} {version}" in peer.entry().note


def test_a_peer_that_fails_is_told_in_one_short_line_and_one_for_another_python_before_it_is_imported():
    def fail(package, ws):
        raise RuntimeError("first\nsecond " + "x" * 500)

    with pytest.raises(peers.CannotRun) as caught:
        peers.Peer("", "torch", "torch", fail).build([])
    torch.compiler.set_stance("default")
    assert str(caught.value).startswith("RuntimeError: first second xxx") and len(str(caught.value)) == 200
    with pytest.raises(peers.CannotRun, match=r"^torch needs Python 99\.1, this is 3\.\d+$"):
        peers.Peer("", "torch", "none", fail, python=(99, 1)).build([])


def test_the_extra_has_every_peer():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^peers = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall(r'"([a-z-]+)', extra)) == {peer.distribution for peer in peers.PEERS}


OFFLINE = """
import sys
for name in ("pandas", "scipy", "tyro", "tqdm", "matplotlib", "tabulate", "datasets", "tokenizers"):
    sys.modules[name] = None
import bench.timing.__main__, bench.conftest, bench.micro.bench_micro
"""


@pytest.mark.slow
def test_what_runs_on_a_gpu_machine_needs_torch_triton_numpy_and_pytest_only():
    done = run_python("-c", OFFLINE)
    assert done.returncode == 0, done.stderr
