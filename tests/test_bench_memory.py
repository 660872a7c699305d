"""The memory benchmark: state is the paper's table exactly, and workspace is that of a real step, within its bound."""

import gc

import pytest
import torch

from bench import rows
from bench.shapes import SETS, ParameterSet
from bench.timing import __main__ as timing
from bench.timing import memory
from bench.timing.peak import Peak

TINY = ParameterSet("tiny", ((2, 12, 12), (1, 20, 12), (2, 12, 20)), (4,))
LINES = {
    **dict.fromkeys(("L", "S", "R"), "factors"),
    **dict.fromkeys(("Q_L", "Q_S", "Q_R"), "eigenbases"),
    **dict.fromkeys(("inv_sqrt_lambda_L", "inv_sqrt_lambda_S", "inv_sqrt_lambda_R"), "eigenvalues"),
    "U": "subspace basis",
    "inv_sqrt_mu": "complement scalar",
    **dict.fromkeys(("M", "momentum_buffer", "exp_avg"), "momentum"),
    "exp_avg_sq": "second moment",
}
"""Line of the paper's table that a tensor of the state belongs to."""


def paper(method, m, n, r):
    """The paper's table, summed."""
    return {
        "kl-shampoo": 2 * (m**2 + n**2) + m + n + m * n,
        "pro-klshampoo": 2 * (m**2 + r**2) + m + r + n * r + 1 + m * n,
        "muon": m * n,
        "adamw": 2 * m * n,
    }[method]


@pytest.mark.parametrize("dtype", memory.DTYPES, ids=str)
@pytest.mark.parametrize("method", memory.TABLE)
@pytest.mark.parametrize("m, n, rank", [(12, 12, 128), (12, 20, 4)])
def test_a_trained_state_is_the_papers_table_line_by_line_and_the_listed_scalars(method, m, n, rank, dtype):
    W = torch.nn.Parameter(torch.randn(m, n).to(dtype))
    optimizer = memory.build(method, [W], rank)
    for _ in range(11):
        W.grad = torch.randn(m, n).to(dtype)
        optimizer.step()
    r = min(rank, m, n - 1)
    table = memory.TABLE[method](m, n, r)
    found, scalars = dict.fromkeys(table, 0), []
    for key, value in optimizer.state[W].items():
        if key in LINES:
            found[LINES[key]] += value.numel()
            assert value.dtype == dtype
        else:
            scalars.append(key)
            assert not isinstance(value, torch.Tensor) or value.numel() == 1
    assert found == table and sum(found.values()) == paper(method, m, n, r)
    assert tuple(sorted(scalars)) == memory.SCALARS[method]
    own = (3, 8 + 2 * 4)  # two numbers in the arithmetic dtype beside a count
    kept = {"pro-klshampoo": own, "kl-shampoo": own, "adamw": (1, 4), "muon": (0, 0)}[method]
    total = sum(table.values())
    assert memory.state(method, m, n, rank, dtype) == (total + kept[0], total * dtype.itemsize + kept[1])


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
@pytest.mark.parametrize("method", memory.OWN)
def test_workspace_is_that_of_trained_weights_within_the_bound_and_extrapolated_from_few(method, dtype):
    s = ParameterSet("ten", ((7, 24, 40), (3, 40, 24)), (4,))
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in s.each]
    optimizer = memory.build(method, weights, 4)
    found = []
    with Peak() as peak:
        for _ in range(memory.FREQUENCY + 1):
            for W in weights:
                W.grad = torch.randn_like(W)
            peak.restart()
            optimizer.step()
            found.append(peak.extra)
    assert optimizer.state[weights[0]]["step"] == memory.FREQUENCY
    *expected, bound = memory.workspace(method, s, 4, dtype)
    assert bound == 10 * memory.OWN[method].method.workspace(24, 40, 4 if "pro" in method else 0) * 4
    assert max(found[-2:]) <= max(expected) <= bound
    for own, times in zip(found[-2:], expected, strict=True):
        assert own <= times < own * (1 if dtype == torch.float32 else 1.06) + 1  # rounded up


def test_the_rows_of_a_set_are_the_tables_and_the_listed_scalars(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(SETS, "tiny", TINY)
    monkeypatch.setitem(timing.EVERY, "tiny", TINY)
    assert timing.main(["memory", "--sets", "tiny", "--out", str(tmp_path / "memory.csv")]) == 0
    found = rows.read(tmp_path / "memory.csv")
    assert len(capsys.readouterr().out.splitlines()) == len(found) == 2 * (2 * 3 + 2 * 5)
    every = {(r["optimizer"], r["dtype"], r["metric"], r["unit"]): r for r in found}
    assert len(every) == len(found) and {r["model"] for r in found} == {"tiny"}
    for method in memory.TABLE:
        table = 2 * paper(method, 12, 12, 4) + 3 * paper(method, 12, 20, 4)
        elements = every[method, "float32", "state", "elements"]
        assert int(elements["floor"]) == table
        assert int(elements["median"]) - table == {"muon": 0, "adamw": 5}.get(method, 15)
        assert float(elements["ratio"]) == pytest.approx(int(elements["median"]) / (2 * 144 + 3 * 240), rel=1e-6)
        assert int(every[method, "bfloat16", "state", "bytes"]["floor"]) == 2 * table
    one = every["muon", "float32", "workspace", "bytes"]["median"]  # two weights of a shape take what one of them does
    assert int(one) == memory.plain_workspace("muon", ParameterSet("one", ((1, 12, 20),), ()), torch.float32) > 480
    assert every["adamw", "float32", "workspace", "bytes"]["median"] == "0"


def test_the_recorded_figures_are_those_of_the_table():
    found = [r for r in rows.read(rows.RESULTS / "memory.csv") if r["unit"] == "elements"]
    assert {r["model"] for r in found} == set(SETS)
    for r in found:
        s, rank = SETS[r["model"]], int(r["rank"] or 0)
        table = sum(count * paper(r["optimizer"], m, n, rank) for (m, n), count in s.oriented.items())
        listed = r["note"].partition("for each weight: ")[2].partition(" (")[0].split(", ")
        scalars = len({*listed} - {"", *(["step"] if "not counted" in r["note"] else [])}) * s.matrices
        assert (int(r["floor"]), int(r["median"])) == (table, table + scalars)
    bounds = [r for r in rows.read(rows.RESULTS / "memory.csv") if r["note"] == "ratio is over the bound"]
    assert bounds and all(float(r["ratio"]) <= 1 for r in bounds)
