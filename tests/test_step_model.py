"""The modelled step: launches of the real one, operations that agree with the counts, rows that are those of this code.

Where a bound on launches is exceeded the step launches more than it did; where launches go, tighten it.
"""

import re

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from bench import costs, rows
from bench.compile_report import __main__ as compile_report
from bench.compile_report import model, qr_counts, trace
from bench.compile_report.launch_counts import MOVED, Work
from bench.counts import pro_klshampoo
from bench.shapes import PAPER, SETS, ParameterSet
from prokl import ProKLShampoo
from prokl.algorithm.shapes import effective_rank
from prokl.backends.cuda_qr import Kind
from prokl.kernels import launch
from prokl.kernels.launch import Tile
from prokl.kernels.symmetric_product import symmetric_product
from tests.capture_factors import DATA, INPUTS, PLAN
from tests.commands import ROOT
from tests.host_extension import counting
from tests.inputs import forbid_host_reads, normal, weight
from tests.problems import made
from tests.qr_forms import refresh_basis, track

MOST = {"ordinary": 60, "refresh": 180}
"""Launches of a bucket of the paper's models; 60 is what a step is to take, whatever its precision."""
MOST_OF_A_MODEL = {"ordinary": 120, "refresh": 360}
RANK = 128


def traced(m, n, count=3, dtype=torch.bfloat16, rank=RANK, precision="balanced"):
    """Launches of a bucket of such weights by kind of step."""
    found = trace.steps(ParameterSet("some", ((count, m, n),), (rank,)), dtype, rank, precision)
    assert all(len(buckets) == 1 for buckets in found.values())
    return {kind: buckets[0] for kind, buckets in found.items()}


@pytest.fixture(scope="module", params=model.PRECISIONS)
def paper(request):
    """Launches of GPT-2 124M, bucket by bucket."""
    return trace.steps(SETS["gpt2-124m"], torch.bfloat16, RANK, request.param)


@pytest.mark.slow
def test_every_kernel_has_its_work_counted():
    files = [path.read_text() for path in (ROOT / "kernels").glob("*.py")]
    kernels = {name for text in files for name in re.findall(r"@triton\.jit\ndef (\w+)_kernel\(", text)}
    assert set(MOVED) == kernels
    both = [trace.steps(SETS["gpt2-124m"], torch.bfloat16, RANK, precision) for precision in model.PRECISIONS]
    launched = [e for found in both for bucket in found["refresh"] for e in bucket if e.launch]
    assert {e.kernel for e in launched} == kernels
    multiply = ("tl.dot", "add_product(")
    with_dot = {
        name
        for text in files
        if any(word in text for word in multiply)
        for name in re.findall(r"def (\w+)_kernel\(", text)
    }
    assert {e.kernel for e in launched if e.work.flops} == with_dot


@pytest.mark.slow
@pytest.mark.parametrize("shape, precision", zip([(24, 40), (20, 20)], model.PRECISIONS, strict=True))
def test_a_step_that_computes_launches_what_is_traced(shape, precision, extension_on_cpu, monkeypatch):
    forbid_host_reads(monkeypatch)
    weights = [weight(*shape, seed=i) for i in range(2)]
    optimizer = made(ProKLShampoo, weights, rank=4, backend="triton", precision=precision)
    for i, W in enumerate(weights):
        W.grad = normal(*shape, seed=i)
    optimizer.step()  # which begins
    events, start = [], launch.start

    def noted(kernel, *given, **constants):
        events.append(trace.Event(kernel.__name__.removesuffix("_kernel"), Work(0.0)))
        with _disable_current_modes():  # the interpreter's own tensors
            start(kernel, *given, **constants)

    monkeypatch.setattr(launch, "start", noted)
    (bucket,) = optimizer.engine.buckets()
    for kind, expected in traced(*shape, count=2, dtype=torch.float32, rank=4, precision=precision).items():
        found = trace.execute(bucket, kind, events)
        assert list(map(comparable, found)) == list(map(comparable, expected))
    assert all(W.isfinite().all() for W in weights)


def comparable(event):
    return event.kernel, event.work.bytes if event.kernel == trace.TORCH else None


@pytest.mark.parametrize("precision", model.PRECISIONS)
@pytest.mark.parametrize("m, n, rank", [(768, 3072, 128), (768, 768, 128), (100, 300, 37), (130, 131, 16)])
def test_products_are_those_of_the_counts(m, n, rank, precision):
    count, r = 3, effective_rank(rank, m, n)
    events = traced(m, n, count, rank=rank, precision=precision)
    terms = [t for t in pro_klshampoo(m, n, r, balanced=precision == "balanced") if t.kind != "factorisation"]
    expected = count * sum(t.flops for t in terms if not t.refresh)
    # Columns V chol(K)^-T, two passes of Cholesky QR over Gram matrices, and a look at a third.
    expected += count * 6 * 2.0 * n * r * r
    if any(e.kernel == "precondition" for e in events["ordinary"]):  # goes into the eigenbasis and back, without S^-1/2
        expected += count * (2.0 * m * r * r - 2.0 * r**3)
    assert sum(e.work.products for e in events["ordinary"]) == expected
    for e in events["refresh"]:  # tiles may be more than the product, and lower tiles half of it
        assert sum(e.work.flops.values()) >= e.work.products * (0.5 if e.kernel == "symmetric_product" else 1.0)
    # The counts have L Q of a refresh; the extension's form takes Q^T L Q, Q C, two passes and a look besides.
    on_top = sum(t.flops for t in terms if t.refresh) + 7 * 2.0 * m**3
    assert sum(e.work.products for e in events["refresh"]) == expected + count * on_top


def test_tiles_compute_whole_products_and_the_lower_tiles_of_symmetric_ones(paper):
    for e in (e for bucket in paper["refresh"] for e in bucket if e.launch and e.work.flops):
        given = e.launch.by_name
        side = given["M"] // given.get("TILE_M", given.get("TILE"))  # the sizes are multiples of the tiles
        half = (side + 1) / (2 * side) if e.kernel == "symmetric_product" else 1.0
        assert sum(e.work.flops.values()) == pytest.approx(half * e.work.products, rel=1e-12), e.kernel


@pytest.mark.parametrize("precision", model.PRECISIONS)
def test_newton_schulz_alone_is_in_bfloat16_and_large_products_of_a_balanced_step_are_those_of_pairs(precision):
    m, n, count = 768, 3072, 3
    done = {}
    for e in traced(m, n, count, precision=precision)["ordinary"]:
        if e.kernel != "apply":
            for path in e.work.flops:
                done[path] = done.get(path, 0.0) + e.work.products / len(e.work.flops)
    every = pro_klshampoo(m, n, RANK, balanced=precision == "balanced")
    newton_schulz = sum(t.flops for t in every if t.newton_schulz)
    assert done.pop("bf16") == count * (newton_schulz - 2.0 * m * m * n)  # of which apply has the last one
    assert set(done) - {"tf32x3", "fp32"} == (
        {"bf16x2 chained", "bf16x3", "bf16x3 chained"} if precision == "balanced" else set()
    )
    exact = done["tf32x3"] + done["fp32"]
    assert exact == sum(done.values()) if precision == "faithful" else exact < sum(done.values()) / 2


def test_a_pair_is_read_and_stored_as_two_planes_and_rows_energies_store_no_product():
    count, m, n = 3, 768, 3072
    events = {}
    for e in traced(m, n, count, dtype=torch.float32)["ordinary"]:
        events.setdefault(e.kernel, []).append(e.work.bytes)
    assert events["split_two"][0] == count * (n * RANK + m * m) * (4 + 2 * 2)  # U and Q_L
    residual = count * (4 * m * RANK + 4 * n * RANK + 4 * m * n + 4 * m * n)  # G~, U, G, G_perp
    energies = count * (4 * m * m + 4 * m * n + 4 * m * n // 128)  # Q_L, G_perp; a number for each row of a tile
    assert {residual, energies} <= set(events["product"])
    assert count * (4 * m * n + 4 * m * m) in events["symmetric_product"]
    assert count * (3 * 4 * m * n + 4 * (m + n) * RANK + 4 * m * n) <= events["momentum"][0]


@pytest.mark.parametrize(
    "run, expected",
    [
        (lambda x, mask: x.mT[:, None].contiguous(), [2 * 24]),
        (lambda x, mask: x.mT[:, None].reshape(4, 3, 2).view(24), [2 * 24]),
        (lambda x, mask: x.expand(5, 2, 3, 4).sum(0), [2 * 24]),
        (lambda x, mask: x.copy_(mask), [24 + 6 / 4]),
        (lambda x, mask: x.mul_(x), [3 * 24]),
        (lambda x, mask: x.masked_fill(mask, 0.0), [2 * 24, 2 * 24 + 6 / 4]),
        (lambda x, mask: torch.where(mask, 0.0, x), [1, 2 * 24 + 1 + 6 / 4]),
        (lambda x, mask: torch.empty_like(x).mT.detach(), []),
    ],
)
def test_what_pytorch_launches_is_counted_and_views_and_new_memory_are_not(run, expected):
    with trace.tracing() as events:
        x, mask = torch.empty(2, 3, 4), torch.empty(2, 3, 1, dtype=torch.bool)
        with trace.Operators(events):
            run(x, mask)
    assert [e.work.bytes for e in events] == [4 * elements for elements in expected]


def test_a_tensor_that_a_launch_is_given_twice_is_read_once():
    gram = [e for e in traced(768, 3072)["ordinary"] if e.launch and e.launch.by_name.get("K") == 3072]
    gram = [e for e in gram if e.kernel == "symmetric_product" and {*e.work.flops} == {"bf16"}]
    assert len(gram) == 3 and {e.work.bytes for e in gram} == {2.0 * 3 * (768 * 3072 + 768 * 768)}


@pytest.mark.parametrize("m", [64, 96, 130])
def test_the_lower_tiles_of_what_a_symmetric_product_adds_are_read(m):
    A, C, tile = torch.empty(2, m, 32), torch.empty(2, m, m), Tile(64, 64, 32, 4, 2)
    lower = sum(min(m, (row // 64 + 1) * 64) for row in range(m))
    with trace.tracing() as events:
        symmetric_product(A, C=C, tile=tile)
    assert [e.work.bytes for e in events if e.launch] == [2 * 4 * (m * 32 + lower + m * m)]


# QR.


@pytest.mark.parametrize("k", [16, 37, 128, 129, 200, 768, 1024])
def test_launches_of_factorisations_are_the_extensions(extension_on_cpu, k):
    N, used, operators = torch.empty(2, k, k), torch.zeros(2, dtype=torch.int32), torch.ops.prokl
    for call, launches in (
        (lambda: operators.factor(N, Kind.PASS, None), qr_counts.factor(2, k)),
        (lambda: operators.factor(N, Kind.SETTLE, used), qr_counts.factor(2, k, settles=True)),
        (lambda: operators.semidefinite_inverse(N), qr_counts.semidefinite(2, k, True)),
        (lambda: operators.semidefinite_root(N), qr_counts.semidefinite(2, k, False)),
    ):
        with counting(extension_on_cpu) as counted:
            call()
        assert_counted(list(launches), counted)


@pytest.mark.parametrize("n, k", [(300, 37), (3072, 128), (1024, 1024)])
def test_launches_of_the_end_are_the_extensions(extension_on_cpu, n, k):
    A, N = torch.empty(2, n, k), torch.empty(2, k, k)
    for looked, launches in ((N, qr_counts.finish(2, n, k, 1)), (None, qr_counts.finish(2, n, k, 0))):
        with counting(extension_on_cpu) as counted:
            torch.ops.prokl.finish(A, A, looked, None, None)
        assert_counted(list(launches), counted)


def assert_counted(launches, counted):
    assert (counted[0], counted[2]) == (len(launches), 0)


def test_a_launch_takes_its_arithmetic_or_its_memory_and_two_microseconds():
    def seconds(**work):
        return model.seconds(trace.Event("", Work(**work)))

    assert seconds(bytes=0.0) == 2e-6 and seconds(bytes=4.3e12) == pytest.approx(1 + 2e-6, rel=1e-9)
    both = {"bf16": 350e12, "tf32x3": 55e12}  # half a second each
    assert seconds(bytes=2e12, flops=both) == pytest.approx(1 + 2e-6, rel=1e-9)


def test_captured_factors_are_no_exceptions(extension_on_cpu):
    """What is counted holds of them: no shift, no raised pivot, and Householder only of what is small."""
    with np.load(DATA) as file:
        arrays = {key: torch.from_numpy(file[key])[None] for key in file if key != "about"}
    functions = {"tracking_qr": track, "refresh_basis": refresh_basis}
    for (of, name), steps in PLAN.items():
        for step in steps if name in functions else ():
            inputs = (arrays[f"{step} {of} {x}"] for x in INPUTS[name])
            assert functions[name](*inputs).used == 0, (of, name, step)


def test_no_bucket_launches_more_than_it_did(paper):
    for kind, most in MOST.items():
        assert max(map(len, paper[kind])) <= most


@pytest.mark.slow
@pytest.mark.parametrize("precision", model.PRECISIONS)
@pytest.mark.parametrize("name", PAPER)
def test_the_committed_rows_are_those_of_this_code(name, precision):
    committed = [row for row in rows.read(rows.RESULTS / "model.csv") if row["model"] == name]
    committed = [row for row in committed if row["precision"] == precision]
    found = [row for dtype in model.DTYPES for row in model.set_rows(SETS[name], dtype, precision)]
    # Another torch may make other operators of an expression.
    if committed[0]["torch"].partition("+")[0] == torch.__version__.partition("+")[0]:
        fresh = [{key: rows.text(value) for key, value in row.items()} for row in found]
        remedy = "run python -m bench.compile_report model --out bench/results, then python -m bench.tables"
        assert [{key: row[key] for key in fresh[0]} for row in committed] == fresh, remedy


@pytest.mark.slow
def test_the_command_writes_the_rows_of_either_kind_of_step(tmp_path, monkeypatch):
    monkeypatch.setattr(model.report, "__defaults__", (("gpt2-124m/4",),))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    assert compile_report.main(["model", "--out", str(tmp_path)]) == 0
    written = rows.read(tmp_path / "model.csv")
    named = [(row["dtype"], row["precision"], row["case"]) for row in written]
    assert named == [
        (dtype, precision, kind)
        for dtype in ("bfloat16", "float32")
        for precision in model.PRECISIONS
        for kind in trace.KINDS
    ]
    assert {row["device"] for row in written} == {model.MODELLED}


def test_the_committed_rows_are_of_all_models_and_within_the_bounds():
    committed = rows.read(rows.RESULTS / "model.csv")
    assert tuple(dict.fromkeys(row["model"] for row in committed)) == PAPER
    assert {row["rank"] for row in committed} == {str(RANK)} and costs.NS_STEPS == 5
    for row in committed:
        most = min(MOST[row["case"]] * int(row["buckets"]), MOST_OF_A_MODEL[row["case"]])
        assert int(row["launches"]) <= most
