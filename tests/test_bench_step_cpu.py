"""The benchmark of whole steps: who is compared with whom, that nothing wrong is reported, and what is skipped."""

from dataclasses import replace

import pytest
import torch

from bench import records, step_cpu
from bench.rates import Rates, machine_rows
from bench.shapes import SWEEPS, ParameterSet, Sweep
from bench.steps import gate
from bench.steps import problem as step_problem
from bench.steps.contenders import PERIOD, Float32Muon, main_contenders, muon, pro, sweep_contenders
from bench.steps.exponents import exponent, predicted
from bench.steps.gate import Gate, complaint
from bench.steps.lanes import Lane, enter, take_turns
from bench.steps.problem import Problem
from prokl import ProKLShampoo
from tests.commands import read

CPU = torch.device("cpu")
TINY = ParameterSet("tiny", ((2, 8, 12), (1, 12, 8), (1, 8, 8)), (2, 3, 4))
QUICK = ["--seconds", "0.001", "--rounds", "3"]


@pytest.fixture
def tiny(monkeypatch):
    """The set "tiny", a sweep of two points, and rates that are not measured."""
    monkeypatch.setitem(step_cpu.SETS, "tiny", TINY)
    points = tuple((n, ParameterSet(f"n={n}", ((1, 8, n),), (3,))) for n in (12, 24))
    monkeypatch.setitem(step_cpu.SWEEPS, "n", Sweep("n", "m=8", points))
    monkeypatch.setattr(step_cpu, "measure_rates", lambda device, threads: Rates(2e12, 1e12, 1e11))
    monkeypatch.setattr(step_cpu, "peers", lambda rank, polar: [])
    here = {column: "x" for column in records.SAME} | {"date": "2000-01-01"}
    monkeypatch.setattr(step_cpu.records, "environment", lambda device: here)


def test_muon_in_float32_does_what_torch_does_in_bfloat16():
    g = torch.Generator().manual_seed(0)
    starts = [torch.randn(s, generator=g) for s in ((8, 12), (12, 8), (8, 8))]
    gradients = [torch.randn(s.shape, generator=g) for s in starts]
    module = torch.optim._muon
    theirs = module._zeropower_via_newtonschulz
    ends = []
    for kind in (torch.optim.Muon, Float32Muon):
        Ws = [torch.nn.Parameter(W.clone()) for W in starts]
        for W, G in zip(Ws, gradients, strict=True):
            W.grad = G
        kind(Ws, lr=1.0, weight_decay=0.0).step()
        ends.append([W.detach() - start for W, start in zip(Ws, starts, strict=True)])
        assert module._zeropower_via_newtonschulz is theirs
    for bf16, fp32 in zip(*ends, strict=True):
        difference = torch.linalg.vector_norm(bf16 - fp32) / torch.linalg.vector_norm(fp32)
        # Some ten roundings of 2^-9, magnified by the quintic's slope; measured: 0.006 to 0.01.
        assert 1e-4 < difference < 0.04


@pytest.mark.parametrize("polar", [torch.float32, torch.bfloat16])
def test_the_contenders_are_distinct_and_only_two_have_the_other_dtype(polar):
    contenders = main_contenders(TINY, CPU, polar)
    assert len({c.key for c in contenders}) == len(contenders)
    other = [c.name for c in contenders if c.polar not in (None, polar)]
    assert sorted(other) == ["muon", "pro-klshampoo"]
    assert [c.rank for c in contenders if c.name == "pro-klshampoo" and c.backend == "torch"] == [2, 3, 4, 3]
    assert contenders[0] == replace(muon(polar), make=contenders[0].make)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (8, 8), (4, 64)])
def test_every_contender_of_this_package_agrees_with_the_reference(shape):
    own = [c for c in main_contenders(TINY, CPU, torch.bfloat16) if c.own and c.backend != "reference"]
    assert len(own) == 6
    assert [complaint(c, shape, CPU) for c in own] == [""] * 6


class Off(ProKLShampoo):
    """Steps a little further than it was told, unless it is the reference."""

    def step(self):
        if self.param_groups[0]["backend"] != "reference":
            self.param_groups[0]["lr"] *= 1 + 1e-5
        return super().step()


class Broken(ProKLShampoo):
    def step(self):
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0][0, 0] = float("nan")


def made_by(kind):
    c = pro("torch", 3, torch.float32)
    return replace(c, make=lambda ws: kind(ws, **c.own[1]), own=(kind, c.own[1]))


def test_what_goes_elsewhere_does_not_enter():
    lanes, left_out = enter([made_by(Off), muon(torch.float32)], Problem(TINY, CPU), Gate(), 60)
    assert [lane.contender.name for lane in lanes] == ["muon"]
    ((contender, why),) = left_out
    assert contender.name == "pro-klshampoo" and "from the reference on 8x12 in float64, may be 1e-06" in why


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


@pytest.mark.parametrize(
    "kind, why", [(Coarse, "from the float64 reference on 8x12 in float32, may be"), (Alike, "in float64")]
)
def test_what_is_wrong_in_the_timed_dtype_or_in_a_bucket_alone_does_not_enter(kind, why):
    _, ((_, found),) = enter([made_by(kind)], Problem(TINY, CPU), Gate(), 60)
    assert found.startswith("wrong: ") and why in found


def test_a_shape_is_compared_once(monkeypatch):
    asked = []
    monkeypatch.setattr(gate, "complaint", lambda c, shape, device: asked.append(shape) or "")
    own = Gate()
    for contender in (made_by(ProKLShampoo), made_by(ProKLShampoo), pro("torch", 3, torch.bfloat16)):
        own.check(contender, Problem(TINY, CPU))
    assert asked == [(8, 12), (12, 8), (8, 8)] * 2


def test_weights_that_end_not_finite_give_a_reason_and_no_figure():
    broken = replace(made_by(Broken), own=None)
    lanes, left_out = enter([broken, muon(torch.float32)], Problem(TINY, CPU), Gate(), 60)
    take_turns(lanes, 1e-3, 1, 1)
    assert not left_out and [lane.trouble for lane in lanes] == ["wrong: weights are not finite", None]
    rows = step_cpu.rows_of(lanes, [], TINY, Rates(2e12, 1e12, 1e11))
    assert ["median" in row for row in rows] == [True, False]
    assert rows[1]["note"].startswith("wrong: ") and rows[1]["contender"] == "pro-klshampoo"


def test_a_contender_that_raises_or_is_too_slow_costs_its_own_row_alone():
    class Failing(torch.optim.SGD):
        def step(self):
            raise RuntimeError("no such\nkernel")

    failing = replace(muon(torch.float32), name="failing", make=lambda ws: Failing(ws, lr=1.0))
    problem = Problem(TINY, CPU)
    lanes, left_out = enter([failing, muon(torch.float32)], problem, Gate(), 60)
    assert [why for _, why in left_out] == ["RuntimeError: no such kernel"] and len(lanes) == 1
    own = replace(failing, own=(ProKLShampoo, {}), backend="reference")
    assert enter([own], problem, Gate(), 60)[1][0][1] == "wrong: RuntimeError: no such kernel"
    lanes, left_out = enter([muon(torch.float32)], problem, Gate(), 0.0)
    assert not lanes and left_out[0][1].startswith("too slow: a step took ")


@pytest.mark.parametrize(
    "contender", sweep_contenders(3, CPU, torch.float32)[1:], ids=lambda c: f"{c.name} {c.backend}"
)
def test_a_period_ends_with_its_refresh_and_leaves_gradients_and_start_alone(contender):
    problem = Problem(TINY, CPU)
    start, gradients = [W.clone() for W in problem.start], [G.clone() for G in problem.gradients[0]]
    lane = Lane(contender, problem)
    assert all(torch.equal(W, start) for W, start in zip(lane.weights, start, strict=True))
    lane.warm_up(60)
    assert len(lane.steps(PERIOD)) == PERIOD and lane.took > 0
    assert all(lane.optimizer.state[W]["step"] % PERIOD == 0 for W in lane.weights)
    assert all(not torch.equal(W, s) and W.isfinite().all() for W, s in zip(lane.weights, start, strict=True))
    assert all(map(torch.equal, problem.start, start)) and all(map(torch.equal, problem.gradients[0], gradients))


def test_lanes_take_turns_and_fewer_rounds_are_spread_over_the_others(monkeypatch):
    order = []

    class Fake:
        trouble = None

        def __init__(self, name, took):
            self.name, self.took, self.periods = name, took, []

        def steps(self, count):
            order.append(self.name)
            return [self.took / count] * count

        def finite(self):
            return True

    lanes = [Fake("a", 0.1), Fake("b", 0.25), Fake("c", 9.0)]
    take_turns(lanes, 1.0, 3, 8)
    assert "".join(order) == "aabaabaabaabc"
    assert [len(lane.periods) for lane in lanes] == [8, 4, 1]


def test_rows_have_ratios_to_muon_of_the_same_dtype_and_floors(tiny, tmp_path):
    out = tmp_path / "rows.csv"
    assert step_cpu.main(["--sets", "tiny", "--out", str(out), "--seconds", "0.3"]) == 0
    rows = read(out)
    assert list(rows[0]) == records.COLUMNS
    assert [r["metric"] for r in rows[:3]] == ["product rate bfloat16", "product rate float32", "copy bandwidth"]
    steps = [r for r in rows if r["metric"] == "step"]
    assert [(r["contender"], r["rank"]) for r in steps[:5]] == [
        ("muon", ""),
        ("adamw", ""),
        *(("pro-klshampoo", r) for r in ("2", "3", "4")),
    ]
    medians = {r["dtype"]: float(r["median"]) for r in steps if r["contender"] == "muon"}
    assert set(medians) == {"float32", "float32, Newton-Schulz bfloat16"}
    for r in steps:
        own = r["contender"] in ("muon", "pro-klshampoo")
        against = medians[r["dtype"] if own else steps[0]["dtype"]]
        assert float(r["ratio"]) == pytest.approx(float(r["median"]) / against, rel=1e-3)
        if r["contender"] != "smok-hop":
            assert 0 < float(r["floor"]) < float(r["median"])
        assert float(r["q1"]) <= float(r["median"]) <= float(r["q3"]) and int(r["rounds"]) >= 3
        assert r["shapes"] == "2x8x12 1x12x8 1x8x8" and r["unit"] == "ms"
    for metric in ("step without refresh", "refresh step"):
        assert len([r for r in rows if r["metric"] == metric]) == len([r for r in steps if r["backend"]])


def test_a_measured_set_is_skipped_unless_asked_for_again(tiny, tmp_path, capsys):
    arguments = ["--sets", "n", "--out", str(tmp_path / "rows.csv"), *QUICK]
    assert step_cpu.main(arguments) == 0
    before = read(tmp_path / "rows.csv")
    capsys.readouterr()
    assert step_cpu.main(arguments) == 0
    assert capsys.readouterr().out.startswith("n: in ") and read(tmp_path / "rows.csv") == before
    assert step_cpu.main([*arguments, "--again"]) == 0
    after = read(tmp_path / "rows.csv")
    assert [(r["set"], r["contender"], r["metric"]) for r in after] == [
        (r["set"], r["contender"], r["metric"]) for r in before
    ]
    assert after != before


def test_an_own_contender_that_fails_while_it_is_timed_is_wrong_and_a_peer_cannot_run():
    lanes, _ = enter([made_by(ProKLShampoo), muon(torch.float32)], Problem(TINY, CPU), Gate(), 60)

    def fail():
        raise RuntimeError("out of order")

    for lane in lanes:
        lane.optimizer.step = fail
    take_turns(lanes, 1e-3, 1, 1)
    assert [lane.trouble for lane in lanes] == ["wrong: RuntimeError: out of order", "RuntimeError: out of order"]


def test_an_own_contender_that_fails_gives_status_1(tiny, monkeypatch, capsys):
    class Failing(ProKLShampoo):
        def step(self):
            raise RuntimeError("no such kernel")

    failing = replace(made_by(Failing), backend="reference")
    failing = replace(failing, own=(ProKLShampoo, failing.own[1]))
    monkeypatch.setattr(step_cpu, "main_contenders", lambda s, device, polar: [muon(polar), failing])
    assert step_cpu.main(["--sets", "tiny", *QUICK]) == 1
    assert "wrong: RuntimeError: no such kernel" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_ceilings_of_the_file(tiny, tmp_path, monkeypatch):
    out = tmp_path / "rows.csv"
    here = step_cpu.records.environment(CPU)
    records.merge(out, [row | here for row in machine_rows(Rates(4e12, 3e12, 2e11))])
    monkeypatch.setattr(step_cpu, "measure_rates", lambda device, threads: pytest.fail("measured anew"))
    monkeypatch.setattr(step_cpu, "main_contenders", lambda *given: main_contenders(*given)[:2])  # Muon and AdamW
    before = read(out)
    assert step_cpu.main(["--sets", "tiny", "--out", str(out), *QUICK]) == 0
    rows = read(out)
    assert rows[:3] == before
    adamw = next(r for r in rows if r["contender"] == "adamw" and r["metric"] == "step")
    elements = TINY.elements
    assert float(adamw["floor"]) == pytest.approx(1e3 * (3 + 4) * 4 * elements / 2e11, rel=1e-4)
    monkeypatch.setattr(step_cpu, "measure_rates", lambda device, threads: Rates(1e12, 1e12, 1e11))
    monkeypatch.setattr(step_cpu.records, "environment", lambda device: here | {"commit": "y"})
    assert step_cpu.main(["--sets", "tiny", "--out", str(out), *QUICK]) == 0
    assert read(out)[0]["median"] == "1000"


def test_a_sweep_has_measured_exponents_beside_predicted_ones(tiny, tmp_path):
    assert step_cpu.main(["--sets", "n", "--out", str(tmp_path / "rows.csv"), *QUICK]) == 0
    found = {(r["contender"], r["backend"], r["metric"]): r["median"] for r in read(tmp_path / "rows.csv")}
    for c in sweep_contenders(3, CPU, torch.bfloat16):
        assert (c.name, c.backend, "exponent of n") in found
        assert (c.name, c.backend, "exponent of n, paper's count") in found
    assert found["muon", "", "exponent of n, paper's count"] == "1"


def test_products_that_are_emulated_in_bfloat16_are_left_out_with_the_reason(tiny, monkeypatch, capsys):
    monkeypatch.setattr(step_cpu, "measure_rates", lambda device, threads: Rates(1e10, 1e11, 1e10))
    assert step_cpu.main(["--sets", "tiny", *QUICK]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert [line.partition(" step: ")[0] for line in lines] == ["tiny muon", "tiny pro-klshampoo torch r=3"]
    assert all("10.0 times as long as in float32" in line for line in lines)


def test_the_exponent_is_the_slope_in_logarithms():
    assert exponent([(x, 7 * x**1.5) for x in (1, 2, 5, 30)]) == pytest.approx(1.5)


def test_predicted_exponents_are_those_of_the_leading_terms():
    def points(n):
        return [(k, ParameterSet(f"{k}", ((3, 64, k),), (16,))) for k in (n, 2 * n)]

    assert predicted("muon", points(512), 10) == pytest.approx(1)
    assert predicted("pro-klshampoo", points(2**20), 10) == pytest.approx(1, abs=1e-4)
    assert predicted("klshampoo", points(2**20), 10) == pytest.approx(3, abs=1e-2)  # n^3 / tau beside m n^2
    # m n^2 and n^3 / tau are 2^24 and 2^27 / 10 at n = 512, 2^26 and 2^30 / 10 at 1024, beside m^3 / tau.
    one, two = 2**24 + 2**27 / 10 + 2**18 / 10, 2**26 + 2**30 / 10 + 2**18 / 10
    assert 2 ** predicted("klshampoo", points(512), 10) == pytest.approx(two / one)
    for sweep in SWEEPS.values():
        assert 0 <= predicted("pro-klshampoo", sweep.points, 10) <= 3


@pytest.mark.parametrize(
    "arguments, message",
    [(["--seconds", "0"], "must be more than 0"), (["--rounds", "2"], "at least 3"), (["--device", "cuda"], "no CUDA")],
)
def test_what_cannot_be_measured_is_refused_in_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert step_cpu.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_a_record_of_other_columns_is_refused_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text("group,name\n")
    assert step_cpu.main(["--out", str(tmp_path / "rows.csv")]) == 2
    assert "Remove or convert" in capsys.readouterr().err


def test_all_weights_of_an_oriented_shape_start_from_one_state_in_memory_of_their_own():
    problem = Problem(TINY, CPU)
    lane = Lane(pro("reference", 3, torch.float32), problem)
    a, b, tall, _ = (lane.optimizer.state[W] for W in lane.weights)
    assert a["step"] == step_problem.SETTLING - 1
    assert torch.equal(a["L"], b["L"]) and torch.equal(a["L"], tall["L"])
    assert a["L"].data_ptr() != b["L"].data_ptr()
