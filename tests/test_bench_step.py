"""The step benchmark: what it writes, that nothing wrong is reported, and that it refuses to measure nothing."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from bench import kernels, step
from prokl import ProKLShampoo
from tests.commands import interpreted, read, run

TINY = ["--device", "cpu", "--sets", "tiny", "--rank", "4", "--frequency", "2", "--seconds", "0"]


def contender(optimizer, backend="", graphs=False):
    return next(c for c in step.CONTENDERS if (c.optimizer, c.backend, c.graphs) == (optimizer, backend, graphs))


@pytest.mark.slow
def test_every_optimizer_gives_its_rows(tmp_path):
    done = run("bench.step", *TINY, "--out", str(tmp_path / "rows.csv"), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "no times below are measurements" in done.stdout
    rows = read(tmp_path / "rows.csv")
    assert list(rows[0]) == step.COLUMNS
    assert [(r["metric"], r["what"]) for r in rows[:2]] == [("ceiling", "bfloat16 bmm"), ("ceiling", "copy")]
    assert [r["what"] for r in rows if r["metric"] == "floor"] == ["all bfloat16", "tf32x3", "memory traffic"]
    (left_out,) = (r for r in rows if r["metric"] == "left out")
    assert (left_out["graphs"], left_out["reason"]) == ("1", "graphs need a CUDA device")
    times = [r for r in rows if r["metric"] == "step time"]
    wanted = [c for c in step.CONTENDERS if c.timed and not c.graphs]
    assert [(r["optimizer"], r["backend"]) for r in times] == [(c.optimizer, c.backend) for c in wanted]
    for r, c in zip(times, wanted, strict=True):
        assert (r["set"], r["unit"], r["rank"], r["frequency"], r["dtype"]) == ("tiny", "ms", "4", "2", "float32")
        assert r["rounds"] == ("1" if c.each else "3") and float(r["median"]) > 0
        assert c.each or float(r["q1"]) <= float(r["median"]) <= float(r["q3"])
        if c.backend not in ("", "torch"):
            assert float(r["error"]) < 1e-3  # float32 throughout here; measured: 2e-6
    parts = [r for r in rows if r["metric"] == "kernel time"]
    assert parts[0]["what"] == "all kernels" and len(parts) > 5
    assert all(float(r["median"]) > 0 and float(r["calls"]) > 0 for r in parts)
    assert [float(r["median"]) for r in parts[1:]] == sorted((float(r["median"]) for r in parts[1:]), reverse=True)
    for r in rows:
        assert "no measurement" in r["device"] and r["torch"] == torch.__version__ and r["date"]


class Off(ProKLShampoo):
    """Steps a tenth further than it was told."""

    def load_state_dict(self, state_dict):
        state_dict["param_groups"][0]["lr"] *= 1.1
        super().load_state_dict(state_dict)


class Broken(ProKLShampoo):
    def step(self):
        super().step()
        with torch.no_grad():
            self.param_groups[0]["params"][0][0, 0] = float("nan")


@interpreted
@pytest.mark.parametrize("wrong", [Off, Broken])
def test_what_goes_elsewhere_is_not_reported(wrong, monkeypatch, tmp_path, capsys):
    right = contender("pro-klshampoo", "torch")

    def make(parameters, rank, **settings):
        return wrong(parameters, rank=rank, **settings | {"backend": "torch"})

    broken = replace(right, backend="triton", make=make)
    monkeypatch.setattr(step, "CONTENDERS", (right, broken, contender("adamw")))
    assert step.main([*TINY, "--out", str(tmp_path / "rows.csv")]) == 1
    times = [row for row in read(tmp_path / "rows.csv") if row["metric"] == "step time"]
    assert [(row["optimizer"], row["backend"]) for row in times] == [("pro-klshampoo", "torch"), ("adamw", "")]
    assert "tiny pro-klshampoo triton wrong: " in capsys.readouterr().err


@interpreted
def test_what_takes_too_long_is_left_out_and_what_needs_it_to_compare_with_too(monkeypatch, tmp_path):
    right = contender("pro-klshampoo", "torch")
    monkeypatch.setattr(step, "CONTENDERS", (right, replace(right, backend="reference", each=True), contender("muon")))
    monkeypatch.setattr(step, "SLOW", 0.0)
    assert step.main([*TINY, "--out", str(tmp_path / "rows.csv")]) == 0
    reasons = [row["reason"] for row in read(tmp_path / "rows.csv") if row["metric"] == "left out"]
    assert "a period took" in reasons[0] and "one step took" in reasons[1] and "a period took" in reasons[2]
    monkeypatch.setattr(step, "CONTENDERS", (replace(right, backend="reference"),))
    monkeypatch.setattr(step, "SLOW", 100.0)
    assert step.main([*TINY, "--out", str(tmp_path / "rows.csv")]) == 0
    (row,) = (row for row in read(tmp_path / "rows.csv") if row["metric"] == "left out")
    assert "to compare with" in row["reason"]


def test_every_weight_starts_from_the_settled_state_of_its_shape():
    shapes = [(6, 10), (10, 6), (6, 10), (4, 4)]
    settings = {"precondition_frequency": 10, "ns_dtype": torch.float32}
    p = step.problem(shapes, 3, torch.float32, torch.device("cpu"), settings, {})
    parameters, optimizer = step.begin(contender("pro-klshampoo", "torch"), p)
    assert set(p.states) == {("pro-klshampoo", (6, 10)), ("pro-klshampoo", (4, 4))}
    for W, start in zip(parameters, p.start, strict=True):
        assert torch.equal(W, start)
        state = optimizer.state[W]
        assert state["step"] == 20
        settled = p.states["pro-klshampoo", step.oriented(W.shape)]
        assert all(torch.equal(state[k], v) for k, v in settled.items() if isinstance(v, torch.Tensor))
    step.period(parameters, optimizer, p)
    assert all(p.isfinite().all() and optimizer.state[p]["step"] == 30 for p in parameters)


@interpreted
@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "no CUDA device here"),
        (["--device", "cpu"], "takes --sets tiny"),
        ([*TINY, "--dtype", "bfloat16"], "takes --sets tiny"),
        ([*TINY, "--frequency", "0"], "must be at least"),
    ],
)
def test_what_would_measure_nothing_is_refused_in_one_line(arguments, message, capsys):
    assert step.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", step.MODELS)
def test_the_sets_are_those_of_the_kernel_benchmark(name):
    buckets = Counter(step.oriented(shape) for shape in step.shapes_of(name))
    assert buckets == {(m, n): count for count, m, n in kernels.SETS[name]}


def test_floors_add_up_over_the_weights_and_are_those_of_the_machine():
    top = kernels.Ceiling(flops=1e15, bytes=4e12)
    one, two = (step.floors([(768, 3072)] * k, 128, 10, 4, top) for k in (1, 2))
    assert all(two[k] == pytest.approx(2 * one[k]) for k in one)
    assert one["memory traffic"] <= one["all bfloat16"] <= one["tf32x3"]
    # Newton-Schulz of GPT-2 124M is 0.945e12 operations: 48 (5 + 15) + 24 (11 + 9 * 4) of 768^3.
    fast = kernels.Ceiling(flops=1e15, bytes=1e30)
    gpt2 = step.floors(step.shapes_of("gpt2-124m"), 128, 10, 4, fast)
    assert 0.945e-3 < gpt2["all bfloat16"] < 1.5e-3
