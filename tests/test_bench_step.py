"""The benchmark of whole steps: who is compared with whom, that nothing wrong is reported, and what is left out."""

import re
from dataclasses import replace

import pytest
import torch

from bench import rows
from bench.rivals import BatchedMuon, Float32Muon
from bench.rows import frame
from bench.shapes import SETS, ParameterSet
from bench.timing import __main__ as timing
from bench.timing import entries, steps
from bench.timing.agreement import complaint
from bench.timing.entries import BATCHED, CAPTURED, EAGER, HEADS, PERIOD, model_entries, muon, pro
from bench.timing.runs import failure
from prokl import ProKLShampoo
from tests.commands import ROOT, read, run_python

CPU = torch.device("cpu")
TINY = ParameterSet("tiny", ((2, 8, 12), (1, 12, 8), (1, 8, 8), (1, 4, 64)), (2, 3, 4))


@pytest.fixture
def tiny(monkeypatch):
    """The set "tiny" without peers, on a machine with bfloat16."""
    monkeypatch.setitem(SETS, "tiny", TINY)
    monkeypatch.setattr(steps, "emulated", lambda device: False)
    monkeypatch.setattr(steps, "peers", lambda rank, polar: [])
    here = {column: "x" for column in rows.SAME} | {"date": "2000-01-01"}
    monkeypatch.setattr(rows, "environment", lambda device: here)
    return here


@pytest.mark.parametrize(
    "kind, steps, least, most",
    [
        # Some ten roundings of 2^-9, magnified by the quintic's slope; measured: 0.012 to 0.019.
        (Float32Muon, 1, 1e-4, 0.04),
        # The same bits were measured; in another order of sums ten such roundings would differ.
        (BatchedMuon, 3, 0.0, 0.03),
    ],
)
def test_another_muon_goes_where_torch_s_does(kind, steps, least, most):
    g = torch.Generator().manual_seed(0)
    starts = [torch.randn(s, generator=g) for s in ((8, 12), (12, 8), (8, 12), (8, 8))]
    gradients = [[torch.randn(s.shape, generator=g) for s in starts] for _ in range(steps)]
    theirs = torch.optim._muon._zeropower_via_newtonschulz
    ends = []
    for cls in (torch.optim.Muon, kind):
        Ws = [torch.nn.Parameter(W.clone()) for W in starts]
        optimizer = cls(Ws, lr=0.3, weight_decay=0.1)
        for own in gradients:
            for W, G in zip(Ws, own, strict=True):
                W.grad = G
            optimizer.step()
        ends.append([W.detach() - start for W, start in zip(Ws, starts, strict=True)])
        assert torch.optim._muon._zeropower_via_newtonschulz is theirs
    for usual, found in zip(*ends, strict=True):
        assert least <= torch.linalg.vector_norm(found - usual) / torch.linalg.vector_norm(usual) <= most


@pytest.mark.slow
def test_kernels_have_their_launches_and_their_share_of_a_step(tiny, tmp_path):
    out = tmp_path / "kernels.csv"
    assert timing.main(["kernels", "--sets", "tiny", "--out", str(out)]) == 0
    found = frame(out)
    of = found.groupby(["optimizer", "note", "metric"], dropna=False)
    assert len(of) == 6 and (of["median"].sum() > 0).all() and (of["launches"].sum() > 10).all()
    assert (of["kernel"].last() == "others").all() and (found["median"] >= 0).all()
    refresh = found[found["metric"] == "refresh step"]
    qr = refresh[refresh["kernel"].str.contains("eigh|cholesky|qr")]
    assert {*qr["optimizer"]} == {"pro-klshampoo"}  # which alone factors anything


def test_the_timed_entries_are_distinct():
    for device in (CPU, torch.device("cuda")):
        found = model_entries(TINY, device, torch.bfloat16)
        assert len({entry.key for entry in found}) == len(found) and found[0] == muon(torch.bfloat16)
        assert [e.optimizer for e in found if e.polar == torch.float32] == ["muon", "pro-klshampoo"]
        own = [e for e in found if e.optimizer == "pro-klshampoo" and e.backend == "torch"]
        assert {CAPTURED, BATCHED} & {e.optimizer for e in found} == (
            {CAPTURED, BATCHED} if device.type == "cuda" else set()
        )
        assert [e.backend for e in found if e.backend == "reference"] == ["reference"] * 2 * (device.type == "cpu")
        eager = [3] * (device.type == "cuda")
        assert [e.rank for e in own] == [2, 3, 4, 3, *eager] and [e.rank for e in own if e.note == EAGER] == eager
        weights = [torch.nn.Parameter(torch.zeros(8, 12))]
        assert all(e.build(weights).param_groups[0]["cuda_graphs"] is (e.note != EAGER) for e in own)


@pytest.mark.slow
def test_a_step_by_heads_goes_where_its_reference_goes():
    own = [e for e in model_entries(replace(TINY, heads=2), CPU, torch.float32) if e.note == HEADS]
    assert own and not any(complaint(e, shape, CPU) for e in own for shape in TINY.each)


def off(optimizer):
    """Steps a little further than it was told."""
    for group in optimizer.param_groups:
        group["lr"] *= 1 + 1e-5
    ProKLShampoo.step(optimizer)


def coarse(optimizer):
    """Rounds its weights to half precision, in float32 alone."""
    ProKLShampoo.step(optimizer)
    for W in optimizer.param_groups[0]["params"]:
        if W.dtype == torch.float32:
            W.data = W.bfloat16().float()


def alike(optimizer):
    """Gives all weights of a bucket the step of the first."""
    weights = optimizer.param_groups[0]["params"]
    before = [W.detach().clone() for W in weights]
    ProKLShampoo.step(optimizer)
    for W, start in zip(weights, before, strict=True):
        W.data = start + (weights[0].detach() - before[0])


def broken(optimizer):
    ProKLShampoo.step(optimizer)
    with torch.no_grad():
        optimizer.param_groups[0]["params"][0][0, 0] = float("nan")


def failing(optimizer):
    raise RuntimeError("no such\nkernel")


def late(optimizer):
    """Fails after the warm-up."""
    (state, *_) = optimizer.state.values() or [{"step": 0}]
    if state["step"] > PERIOD:
        failing(optimizer)
    ProKLShampoo.step(optimizer)


def stepping(step, **changed):
    """Pro-KLShampoo that steps so, but where it is the reference."""

    class Changed(ProKLShampoo):
        def step(self):
            of_reference = self.param_groups[0]["backend"] == "reference"
            return super().step() if of_reference else step(self)

    return replace(pro("torch", 3, torch.float32), make=Changed, note=step.__name__, **changed)


WRONG = {
    off: "wrong: on 8x12: .* in float64, may be 1e-06",
    coarse: "wrong: on 8x12: error .* in float32, may be ",
    alike: "wrong: on 8x12: .* in float64, may be 1e-06",
    broken: "wrong: weights are not finite",
    late: "wrong: RuntimeError: no such kernel",
}


def test_a_step_that_cannot_be_timed_has_a_reason(tiny, monkeypatch, capsys):
    """It costs its own row alone; what is wrong of this package gives status 1."""
    right = [muon(torch.float32), pro("torch", 2, torch.float32)]
    others = [*map(stepping, WRONG), stepping(failing, backend="")]
    monkeypatch.setattr(steps, "model_entries", lambda *_: [right[0], *others, right[1]])
    arguments = ["steps", "--sets", "tiny", "--seconds", "0.001"]
    assert timing.main(arguments) == 1
    output = capsys.readouterr().out
    for step, why in WRONG.items():
        assert re.search(f"^tiny pro-klshampoo torch r=3 step: {why}.*; {step.__name__}$", output, re.MULTILINE), step
    assert "tiny pro-klshampoo r=3 step: RuntimeError: no such kernel; failing" in output  # as a peer
    timed = re.findall(r"^tiny (\S+(?: torch r=2)?) step: \S+ ms", output, re.MULTILINE)
    assert timed == ["muon", "pro-klshampoo torch r=2"]
    monkeypatch.setattr(steps, "SLOWEST", 0.0)
    assert timing.main(["steps", "--sets", "tiny"]) == 1
    assert "tiny muon step: too slow: a step took " in capsys.readouterr().out
    assert failure(others[0], ValueError("x" * 300)) == "wrong: ValueError: ..."


@pytest.mark.slow
def test_the_command_writes_ratios_to_muon_of_the_same_dtype(tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "rows.csv"
    monkeypatch.setattr(steps, "MOST", 3)
    arguments = ["steps", "--sets", "tiny", "--out", str(out), "--seconds", "5"]  # three periods each
    assert timing.main(arguments) == 0
    found = read(out)
    whole = [r for r in found if r["metric"] == "step"]
    own = ["muon", "adamw", "pro-klshampoo", "pro-klshampoo", "pro-klshampoo"]
    assert [(r["optimizer"], r["rank"]) for r in whole[:5]] == [*zip(own, ["", "", "2", "3", "4"], strict=True)]
    medians = {r["dtype"]: float(r["median"]) for r in whole if r["optimizer"] == "muon"}
    assert set(medians) == {"float32", "float32, Newton-Schulz bfloat16"}
    for r in whole:
        against = medians[r["dtype"] if r["optimizer"] in ("muon", "pro-klshampoo") else whole[0]["dtype"]]
        assert float(r["ratio"]) == pytest.approx(float(r["median"]) / against, rel=1e-5)
        assert float(r["q1"]) <= float(r["median"]) <= float(r["q3"]) and int(r["rounds"]) >= 3
        assert (r["model"], r["shapes"], r["unit"]) == ("tiny", "2x8x12 1x12x8 1x8x8 1x4x64", "ms")
    ours = [r for r in whole if r["backend"]]
    for metric in ("step without refresh", "refresh step"):
        assert len([r for r in found if r["metric"] == metric]) == len(ours)
    assert timing.main(arguments) == 0 and read(out) == found
    assert capsys.readouterr().out.splitlines()[-1].startswith("tiny: in ")


def test_the_extra_has_every_peer():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^peers = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall(r'"([a-z-]+)', extra)) == {distribution for distribution, *_ in entries.PEERS.values()}


OFFLINE = """
import sys
for name in ("pandas", "tyro", "tqdm", "matplotlib", "tabulate", "datasets", "tokenizers"):
    sys.modules[name] = None
import bench.timing.__main__, bench.conftest, bench.micro.bench_micro, bench.first
assert bench.first.main(["--device", "cpu", "--seconds", "0"]) == 0
import bench.study.__main__
assert bench.study.__main__.main(["gpt-124m", "--rehearse", "--eager", "--minutes", "0.05", "--out", "rows"]) == 0
"""


@pytest.mark.slow
def test_the_commands_for_gpu_machines_need_few_packages(tmp_path):
    done = run_python("-c", OFFLINE, cwd=tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
