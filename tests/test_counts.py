"""The counts of operations and bytes of a step: held against PyTorch's counter and a real step."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import costs, counts
from bench.counts import Cost, step_cost
from bench.rates import Rates
from bench.shapes import ASPECTS, PAPER, SETS, SMALL, ParameterSet
from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.newton_schulz import newton_schulz_factors
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.torch_ops import TorchStages
from prokl.distributed.division import matrix_cost
from prokl.engine.pieces import Piece

TAU = 3
OPTIMIZERS = {"pro-klshampoo": ProKLShampoo, "kl-shampoo": KLShampoo}


def cost(m, n, rank, tau, method, **more):
    return step_cost(costs.terms(method, m, n, rank), costs.traffic(method, m, n, rank, tau), m, n, tau, **more)


def test_the_sets_are_the_papers_models():
    assert [SETS[name].matrices for name in PAPER] == [72, 144, 84, 210]
    assert [SETS[name].elements for name in PAPER] == [84_934_656, 301_989_888, 84_934_656, 385_351_680]
    assert all(SETS[name].ranks == (32, 64, 128) for name in PAPER)
    assert [max(n / m for m, n in s.oriented) for s in ASPECTS.values()] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("small, name", [*zip(SMALL, PAPER, strict=True)])
def test_the_small_sets_have_the_models_proportions(small, name):
    assert set(SETS[small].oriented) == {(m // 4, n // 4) for m, n in SETS[name].oriented}
    assert SETS[small].ranks == tuple(r // 4 for r in SETS[name].ranks)
    share = {shape: count / SETS[small].matrices for shape, count in SETS[small].oriented.items()}
    for (m, n), count in SETS[name].oriented.items():
        assert share[m // 4, n // 4] == count / SETS[name].matrices


def stepped(method, shape, rank):
    """An optimizer after two steps, so that the third one is a refresh and the others are not; its weight."""
    g = torch.Generator().manual_seed(1)
    W = torch.nn.Parameter(torch.randn(shape, generator=g))
    settings = {"backend": "torch", "precondition_frequency": TAU} | ({"rank": rank} if "pro" in method else {})
    optimizer = OPTIMIZERS[method]([W], **settings)
    for _ in range(2):  # the first one initialises
        W.grad = torch.randn(shape, generator=g)
        optimizer.step()
    return optimizer, W


def counted(run):
    def baddbmm(C, A, B, **_):
        return 2 * math.prod(A) * B[-1]

    in_place = {torch.ops.aten.baddbmm_: baddbmm}  # torch's counter does not know it
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", [(24, 24), (24, 32), (60, 20)], ids=str)
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_every_product_of_a_step_is_counted(method, shape):
    # FlopCounterMode knows products alone, no factorisation.
    optimizer, W = stepped(method, shape, 5)
    every = [t for t in costs.terms(method, min(shape), max(shape), 5) if t.kind != "factorisation"]
    assert all(t.stage for t in every)
    ordinary = sum(t.flops for t in every if not t.refresh)
    refresh = sum(t.flops for t in every if t.refresh)
    found = []
    for _ in range(TAU):
        W.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        found.append(counted(optimizer.step))
    assert found == [ordinary, ordinary + refresh, ordinary]


def test_every_product_of_muon_is_counted_and_all_of_them_are_newton_schulz():
    W = torch.nn.Parameter(torch.randn(60, 20))
    W.grad = torch.randn(60, 20)
    c = cost(20, 60, 8, TAU, "muon")
    assert (counted(torch.optim.Muon([W]).step), 0) == (c.flops_ns, c.flops_rest)


@pytest.mark.parametrize("m, n", [(24, 24), (20, 60)])
def test_newton_schulz_is_counted_apart(m, n):
    h = ProKLShampoo([torch.nn.Parameter(torch.zeros(m, n))]).defaults

    def run():
        X = torch.randn(1, m, n)
        Q, Y, _ = newton_schulz_factors(X, None, h["ns_steps"], h["ns_coefficients"], TorchStages(True))
        return Y if Q is None else Q @ Y

    assert h["ns_steps"] == costs.NS_STEPS
    assert counted(run) == cost(m, n, 8, TAU, "pro-klshampoo").flops_ns


@pytest.mark.parametrize("m, n, r", [(24, 24, 5), (20, 60, 4), (768, 3072, 128)])
def test_totals_are_those_of_the_docstring(m, n, r):
    standard, gram = 10 * (2 * m * m * n + m**3), 2 * (6 * m * m * n + 11 * m**3)
    pro = 12 * m * n * r + 4 * m * m * n + 4 * m**3 + 8 * m * m * r + 8 * m * r * r + 8 * n * r * r + 8 * r**3
    kl = 10 * m * n * n + 8 * m * m * n

    def refresh(k):
        return 2 * k**3 + 8 / 3 * k**3

    c = cost(m, n, r, 10, "pro-klshampoo")
    assert c.flops_ns == (gram if n >= 1.5 * m else standard)
    assert c.flops_rest == pytest.approx(pro - 4 / 3 * r**3 + (refresh(m) + refresh(r)) / 10, rel=1e-12)
    c = cost(m, n, r, 10, "kl-shampoo")
    assert (c.flops_ns, c.flops_rest) == (0, pytest.approx(kl + (refresh(m) + refresh(n)) / 10, rel=1e-12))
    assert cost(m, n, r, 10, "muon").flops_ns == standard


@pytest.mark.parametrize("method", ["pro-klshampoo", "kl-shampoo", "muon"])
def test_the_least_is_half_of_the_symmetric_products_and_one_cholesky_pass_a_qr(method):
    def saved_by_qr(n, k):
        # Householder's R and Q against W^T W by half, its factor, and the solve.
        return 4 * n * k**2 - 4 / 3 * k**3 - (n * k**2 + k**3 / 3 + n * k**2)

    saved = sum(t.flops for t in costs.terms(method, 20, 60, 4) if t.kind == "symmetric") / 2
    qr = {"pro-klshampoo": [(60, 4), (20, 20), (4, 4)], "kl-shampoo": [(20, 20), (60, 60)], "muon": []}[method]
    assert all(saved_by_qr(*size) > 0 for size in qr)
    saved += sum(saved_by_qr(*size) for size in qr)
    full, least = cost(20, 60, 4, 1, method), cost(20, 60, 4, 1, method, least=True)
    assert least.flops_ns + least.flops_rest == pytest.approx(full.flops_ns + full.flops_rest - saved, rel=1e-12)
    assert saved > 0 and least.bytes == full.bytes


def traffic(optimizer, W):
    """Bytes of gradient, weight and state that a step reads, and of those that it changes."""

    def versions():
        state = optimizer.state[W].items()
        return {k: t.clone() for k, t in state if isinstance(t, torch.Tensor) and t.is_floating_point()}

    before = versions()
    W.grad = torch.randn_like(W)
    optimizer.step()
    after = versions()
    left_out = {"lambda_0", "clipped", "step"}  # single numbers
    return 3 * W.nbytes + sum(
        before[key].nbytes * (1 + (not torch.equal(before[key], after[key]))) for key in before.keys() - left_out
    )


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_bytes_are_those_that_a_step_reads_and_changes(method):
    optimizer, W = stepped(method, (12, 20), 4)
    always = traffic(optimizer, W)
    at_refresh = traffic(optimizer, W)
    assert optimizer.state[W]["step"] == TAU < always < at_refresh
    for tau, bytes_ in ((1, at_refresh), (10, always + (at_refresh - always) / 10)):
        assert cost(12, 20, 4, tau, method).bytes == pytest.approx(bytes_, rel=1e-12)
        assert cost(12, 20, 4, tau, method, item=2, state_item=2).bytes == pytest.approx(bytes_ / 2, rel=1e-12)


@pytest.mark.parametrize("method", ["muon", "adamw"])
def test_bytes_of_the_simpler_optimizers_are_those_that_a_step_reads_and_changes(method):
    W = torch.nn.Parameter(torch.randn(12, 20))
    optimizer = torch.optim.Muon([W]) if method == "muon" else torch.optim.AdamW([W])
    W.grad = torch.randn_like(W)
    optimizer.step()
    assert traffic(optimizer, W) == cost(12, 20, 4, 10, method).bytes


def test_a_set_costs_what_its_weights_cost_whichever_way_they_lie():
    s = ParameterSet("s", ((2, 24, 24), (1, 60, 20), (3, 20, 60)), (100,))
    for method in costs.METHODS:
        apart = sum((cost(24, 24, 23, 10, method) * 2, cost(20, 60, 20, 10, method) * 4), Cost())
        assert costs.total(s, 100, 10, method) == apart


def test_the_floor_is_the_slower_of_arithmetic_and_traffic():
    found = Rates(half=100.0, single=10.0, bandwidth=5.0)
    assert costs.floor(Cost(1000.0, 50.0, 1.0), found) == 1000 / 100 + 50 / 10
    assert costs.floor(Cost(1000.0, 50.0, 500.0), found) == 500 / 5
    assert costs.floor(Cost(1000.0, 50.0, 1.0), Rates(1.0, 10.0, 5.0)) == 1050 / 10  # a CPU that emulates bfloat16


@pytest.mark.parametrize("m, n, r", [(8, 32, 3), (96, 96, 16), (96, 384, 16), (768, 3072, 128), (2, 2, 1)])
@pytest.mark.parametrize("ns_steps", [1, 2, 3, 5, 7])
def test_division_deals_out_work_by_the_sum_of_the_terms(m, n, r, ns_steps):
    group = {"precondition_frequency": TAU, "ns_steps": ns_steps, "rank": r}
    piece = Piece(torch.zeros(m, n), "W", MatrixShape.of(torch.empty(m, n)))
    for method, terms in (
        (ProKLShampoo.method, counts.pro_klshampoo(m, n, min(r, m, n - 1), ns_steps)),
        (KLShampoo.method, counts.klshampoo(m, n)),
    ):
        counted = sum(term.flops / (TAU if term.refresh else 1) for term in terms)
        assert matrix_cost(piece, method, group) == pytest.approx(counted, rel=1e-12)
