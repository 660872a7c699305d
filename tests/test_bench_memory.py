"""The memory benchmark: the paper's table is what it holds state to, and its workspace is that of a real step."""

import gc

import pytest
import torch

from bench import memory, records
from bench.shapes import SETS, ParameterSet
from bench.steps.peak import Peak
from prokl import update, update_kl

TINY = ParameterSet("tiny", ((2, 12, 12), (1, 20, 12), (2, 12, 20)), (4,))
STEPS = {"pro-klshampoo": update, "klshampoo": update_kl}


def paper(method, m, n, r):
    """The paper's table, summed."""
    return {
        "klshampoo": 2 * (m**2 + n**2) + m + n + m * n,
        "pro-klshampoo": 2 * (m**2 + r**2) + m + r + n * r + 1 + m * n,
        "muon": m * n,
        "adamw": 2 * m * n,
    }[method]


@pytest.mark.parametrize("dtype", memory.DTYPES, ids=str)
@pytest.mark.parametrize("method", memory.TABLE)
@pytest.mark.parametrize("m, n", [(12, 12), (12, 20)])
def test_state_is_the_papers_table_and_the_listed_scalars(method, m, n, dtype):
    found = memory.state(method, m, n, 4, dtype)
    assert found.table == paper(method, m, n, 4)
    kept = {"pro-klshampoo": (2, 8 + 4), "klshampoo": (2, 8 + 4), "adamw": (1, 4), "muon": (0, 0)}[method]
    assert (found.elements, found.bytes) == (found.table + kept[0], found.table * dtype.itemsize + kept[1])


@pytest.mark.parametrize("rank", [12, 128])
def test_a_rank_beyond_the_weight_counts_as_what_fits(rank):
    assert memory.state("pro-klshampoo", 12, 12, rank, torch.float32).table == paper("pro-klshampoo", 12, 12, 11)


@pytest.mark.parametrize("method", memory.TABLE)
def test_training_changes_nothing_in_the_size_of_the_state(method):
    W = torch.nn.Parameter(torch.randn(12, 20))
    optimizer = memory.optimizer_of(method, [W], 4)
    for _ in range(11):
        W.grad = torch.randn(12, 20)
        optimizer.step()
    assert W.isfinite().all()
    trained = memory.checked(method, optimizer.state[W], 12, 20, 4)
    assert trained == memory.state(method, 12, 20, 4, torch.float32)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: s.update(S=torch.zeros(5, 5)), "factors"),
        (lambda s: s.pop("Q_L"), "eigenbases"),
        (lambda s: s.update(spare=torch.zeros(3)), "spare"),
        (lambda s: s.update(spare=torch.zeros(())), "spare"),
        (lambda s: s.pop("skipped"), "skipped"),
        (lambda s: s.update(exp_avg_sq=torch.zeros(2)), "second moment"),
    ],
)
def test_a_state_that_is_not_the_tables_is_refused(change, says):
    W = memory.blank((12, 20), torch.float32)
    optimizer = memory.optimizer_of("pro-klshampoo", [W], 4)
    optimizer.step()
    state = dict(optimizer.state[W])
    change(state)
    with pytest.raises(ArithmeticError, match=says):
        memory.checked("pro-klshampoo", state, 12, 20, 4)


def test_the_peak_is_what_lives_at_one_time():
    with Peak() as peak:
        kept = torch.zeros(100)  # 400 bytes
        peak.restart()
        a = torch.ones(50) + 1  # the ones live until the sum is there: 400
        view = a[3:].reshape(-1)
        a.add_(1)
        kept.mul_(2)
        assert (peak.extra, peak.now - peak.start) == (400, 200)
        del a
        assert peak.now - peak.start == 200  # the view holds it
        del view
        gc.collect()
        assert (peak.extra, peak.now - peak.start) == (400, 0)


def test_products_in_bfloat16_are_left_out_and_take_the_same_memory():
    A, B = torch.ones(3, 4, 5), torch.ones(3, 5, 6)
    with Peak() as peak:
        full = [A @ B, A[0] @ B[0], torch.baddbmm(A @ B, A, B), torch.addmm(A[0] @ B[0], A[0], B[0])]
    A, B = A.bfloat16(), B.bfloat16()
    with Peak() as half:
        none = [A @ B, A[0] @ B[0], torch.baddbmm(A @ B, A, B), torch.addmm(A[0] @ B[0], A[0], B[0])]
    assert half.most == peak.most / 2
    for f, z in zip(full, none, strict=True):
        assert f.shape == z.shape and z.dtype == torch.bfloat16 and not z.any() and f.all()


@pytest.mark.parametrize("dtype", memory.DTYPES, ids=str)
@pytest.mark.parametrize("method", STEPS)
def test_workspace_is_that_of_a_state_from_training(method, dtype):
    weights = [torch.nn.Parameter(torch.randn(24, 40).to(dtype)) for _ in range(2)]
    optimizer = memory.optimizer_of(method, weights, 4)
    g = torch.Generator().manual_seed(0)
    found = []
    with Peak() as peak:
        for _ in range(memory.OLD + 1):
            for W in weights:
                W.grad = torch.randn(24, 40, generator=g).to(dtype)
            peak.restart()
            optimizer.step()
            found.append(peak.extra)
    assert optimizer.state[weights[0]]["step"] == memory.OLD
    assert memory.step_of(method, 24, 40, 4, dtype, 2) == tuple(found[-2:])


@pytest.mark.parametrize("dtype", memory.DTYPES, ids=str)
@pytest.mark.parametrize("method", STEPS)
def test_workspace_of_a_set_is_extrapolated_from_few_of_its_weights(method, dtype):
    s = ParameterSet("ten", ((7, 24, 40), (3, 40, 24)), (4,))
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in s.each]
    optimizer = memory.optimizer_of(method, weights, 4)
    for _ in range(memory.OLD - 1):
        for W in weights:
            W.grad = torch.randn_like(W)
        optimizer.step()
    found = []
    with Peak() as peak:
        for _ in range(2):
            peak.restart()
            optimizer.step()
            found.append(peak.extra)
    *expected, bound = memory.workspace(method, s, 4, dtype)
    assert bound == 10 * STEPS[method].workspace(24, 40, 4 if "pro" in method else 0) * 4
    for own, times in zip(found, expected, strict=True):
        assert own <= times < own * (1 if dtype == torch.float32 else 1.06) + 1  # rounded up


def test_muon_and_adamw_take_what_one_weight_takes_or_nothing():
    muon = memory.plain_workspace("muon", TINY, torch.float32)
    alone = memory.plain_workspace("muon", ParameterSet("one", ((1, 12, 20),), ()), torch.float32)
    assert muon == alone > 12 * 20 * 2
    assert memory.plain_workspace("adamw", TINY, torch.float32) == 0


def test_a_step_beyond_the_bound_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "step_of", lambda *_: (1, 10**9))
    with pytest.raises(ArithmeticError, match="2 of 12x12 take 2000000000 bytes; the bound is 28800"):
        memory.workspace("klshampoo", TINY, 4, torch.float32)


def test_the_rows_of_a_set_are_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SETS, "tiny", TINY)
    out = tmp_path / "memory.csv"
    assert memory.main(["--sets", "tiny", "--out", str(out)]) == 0
    rows = records.read(out)
    assert len(capsys.readouterr().out.splitlines()) == len(rows) == 2 * (2 * 3 + 2 * 5)
    assert list(rows[0]) == records.COLUMNS
    every = {(r["contender"], r["dtype"], r["metric"], r["unit"]): r for r in rows}
    assert len(every) == len(rows)
    for method in memory.TABLE:
        table = 2 * paper(method, 12, 12, 4) + 3 * paper(method, 12, 20, 4)
        elements = every[method, "float32", "state", "elements"]
        assert int(elements["floor"]) == table
        assert int(elements["median"]) - table == {"muon": 0, "adamw": 5}.get(method, 10)
        assert float(elements["ratio"]) == pytest.approx(int(elements["median"]) / (2 * 144 + 3 * 240), rel=1e-4)
        assert int(every[method, "bfloat16", "state", "bytes"]["floor"]) == 2 * table
    for r in rows:
        assert r["set"] == "tiny" and r["torch"] == torch.__version__ and r["rounds"] == ""


def test_a_counted_set_is_skipped_unless_asked_for_again(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SETS, "tiny", TINY)
    here = {column: "x" for column in records.SAME} | {"date": "2000-01-01"}
    monkeypatch.setattr(records, "environment", lambda device: here)
    arguments = ["--sets", "tiny", "--out", str(tmp_path / "memory.csv")]
    assert memory.main(arguments) == 0
    capsys.readouterr()
    assert memory.main(arguments) == 0
    assert capsys.readouterr().out.startswith("tiny: in ")
    assert memory.main([*arguments, "--again"]) == 0
    assert capsys.readouterr().out.startswith("tiny muon")


def test_no_figure_is_reported_of_a_state_that_is_not_the_tables(monkeypatch, tmp_path):
    monkeypatch.setitem(SETS, "tiny", TINY)
    monkeypatch.setitem(memory.TABLE, "klshampoo", lambda m, n, r: {"momentum": m * n})
    memory.state.cache_clear()
    out = tmp_path / "memory.csv"
    assert memory.main(["--sets", "tiny", "--out", str(out)]) == 1
    memory.state.cache_clear()
    wrong = [r for r in records.read(out) if r["contender"] == "klshampoo" and r["metric"] == "state"]
    assert [(r["median"], r["note"][:6]) for r in wrong] == [("", "wrong:")] * 2


def test_the_recorded_figures_are_those_of_the_table():
    rows = [r for r in records.read(records.ROOT / "bench" / "results" / "memory.csv") if r["unit"] == "elements"]
    assert {r["set"] for r in rows} == set(SETS)
    for r in rows:
        s, rank = SETS[r["set"]], int(r["rank"] or 0)
        table = sum(count * paper(r["contender"], m, n, rank) for (m, n), count in s.oriented.items())
        scalars = {"muon": 0, "adamw": 1}.get(r["contender"], 2) * s.matrices
        assert (int(r["floor"]), int(r["median"])) == (table, table + scalars)
