"""Sets that are measured, and the operations and bytes of a step: held against PyTorch's counter and a real step."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import prokl.qr
from bench import costs, rates
from bench.costs import Cost, cost, floor, terms, total
from bench.rates import Rates
from bench.shapes import PAPER, SETS, SMALL, SWEEPS
from prokl import KLShampoo, ProKLShampoo

TAU = 3
OPTIMIZERS = {"pro-klshampoo": ProKLShampoo, "klshampoo": KLShampoo}


def test_the_sets_are_the_papers_models():
    assert [SETS[name].matrices for name in PAPER] == [72, 144, 84, 210]
    assert [SETS[name].elements for name in PAPER] == [84_934_656, 301_989_888, 84_934_656, 385_351_680]
    assert all(SETS[name].ranks == (32, 64, 128) for name in PAPER)


@pytest.mark.parametrize("small, name", [*zip(SMALL, PAPER, strict=True)])
def test_the_small_sets_have_the_models_proportions(small, name):
    quarter = {(m // 4, n // 4) for m, n in SETS[name].oriented}
    assert set(SETS[small].oriented) == quarter
    assert SETS[small].ranks == tuple(r // 4 for r in SETS[name].ranks)
    share = {shape: count / SETS[small].matrices for shape, count in SETS[small].oriented.items()}
    for (m, n), count in SETS[name].oriented.items():
        assert share[m // 4, n // 4] == count / SETS[name].matrices


def test_a_sweep_changes_what_it_says_and_nothing_else():
    for variable, sweep in SWEEPS.items():
        found = []
        for value, s in sweep.points:
            ((count, m, n),) = s.shapes
            (r,) = s.ranks
            found.append({"weights": count, "m": m, "n": n, "n/m": n / m, "r": r})
            assert found[-1][variable] == value and r <= m <= n
        free = {"n", "n/m"} if variable in ("n", "n/m") else {variable}
        assert {key for key in found[0] if len({f[key] for f in found}) > 1} == free
    assert [value for value, _ in SWEEPS["n/m"].points] == [1, 2, 4, 8, 16]


def stepped(method, backend, shape, rank):
    """An optimizer after two steps, so that the third one is a refresh and the others are not; its weight."""
    g = torch.Generator().manual_seed(1)
    W = torch.nn.Parameter(torch.randn(shape, generator=g))
    settings = {"backend": backend, "precondition_frequency": TAU} | ({"rank": rank} if "pro" in method else {})
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


@pytest.mark.parametrize("shape", [(24, 24), (24, 32), (20, 60), (60, 20)], ids=str)
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("method", OPTIMIZERS)
def test_every_product_of_a_step_is_counted(method, backend, shape):
    # FlopCounterMode knows products alone, no factorisation.
    optimizer, W = stepped(method, backend, shape, 5)
    every = [t for t in terms(method, backend, min(shape), max(shape), 5) if t.kind != "factorisation"]
    ordinary = sum(t.flops for t in every if not t.refresh)
    refresh = sum(t.flops for t in every if t.refresh)
    found = []
    for _ in range(TAU):
        W.grad = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        found.append(counted(optimizer.step))
    assert found == [ordinary, ordinary + refresh, ordinary]
    assert optimizer.state[W]["step"] == 4


@pytest.mark.parametrize("shape", [(24, 24), (20, 60), (60, 20)], ids=str)
def test_every_product_of_muon_is_counted_and_all_of_them_are_newton_schulz(shape):
    W = torch.nn.Parameter(torch.randn(shape))
    W.grad = torch.randn(shape)
    optimizer = torch.optim.Muon([W])
    c = cost((1, *shape), 8, TAU, "muon")
    assert (counted(optimizer.step), 0) == (c.flops_ns, c.flops_rest)


@pytest.mark.parametrize("m, n", [(24, 24), (20, 60)])
def test_newton_schulz_is_counted_apart(m, n):
    X = torch.randn(1, m, n)
    h = ProKLShampoo([torch.nn.Parameter(X[0])]).defaults

    def run():
        Q, Y = prokl.polar.newton_schulz_factors(X, costs.NS_STEPS, h["ns_coefficients"])
        return Y if Q is None else Q @ Y

    assert h["ns_steps"] == costs.NS_STEPS
    assert counted(run) == cost((1, m, n), 8, TAU, "pro-klshampoo").flops_ns


@pytest.mark.parametrize("m, n, r", [(24, 24, 5), (20, 60, 4), (768, 3072, 128)])
def test_totals_are_those_of_the_docstring(m, n, r):
    standard, gram = 10 * (2 * m * m * n + m**3), 2 * (6 * m * m * n + 11 * m**3)
    pro = 12 * m * n * r + 4 * m * m * n + 4 * m**3 + 8 * m * m * r + 10 * m * r * r + 8 * n * r * r + 6 * r**3
    kl = 10 * m * n * n + 8 * m * m * n

    def refresh(k):
        return 2 * k**3 + 8 / 3 * k**3

    c = cost((1, m, n), r, 10, "pro-klshampoo")
    assert c.flops_ns == (gram if n >= 1.5 * m else standard)
    assert c.flops_rest == pytest.approx(pro - 4 / 3 * r**3 + (refresh(m) + refresh(r)) / 10, rel=1e-12)
    c = cost((1, m, n), r, 10, "klshampoo")
    assert (c.flops_ns, c.flops_rest) == (0, pytest.approx(kl + (refresh(m) + refresh(n)) / 10, rel=1e-12))
    assert cost((1, m, n), r, 10, "muon").flops_ns == standard


@pytest.mark.parametrize("method", ["pro-klshampoo", "klshampoo", "muon"])
def test_the_least_form_saves_half_of_the_symmetric_products_and_has_one_cholesky_pass_a_qr(method):
    def saved_by_qr(n, k):
        # Householder's R and Q against W^T W by half, its factor, and the solve.
        return 4 * n * k**2 - 4 / 3 * k**3 - (n * k**2 + k**3 / 3 + n * k**2)

    every = terms(method, "torch", 20, 60, 4)
    saved = sum(t.flops for t in every if t.kind == "symmetric") / 2
    qr = {"pro-klshampoo": [(60, 4), (20, 20), (4, 4)], "klshampoo": [(20, 20), (60, 60)], "muon": []}[method]
    assert all(saved_by_qr(*size) > 0 for size in qr)
    saved += sum(saved_by_qr(*size) for size in qr)
    full, least = (cost((1, 20, 60), 4, 1, method, form) for form in ("torch", "least"))
    assert saved > 0
    assert least.flops_ns + least.flops_rest == pytest.approx(full.flops_ns + full.flops_rest - saved, rel=1e-12)
    assert least.bytes == full.bytes


def versions(tensors):
    return {key: t.clone() for key, t in tensors.items() if isinstance(t, torch.Tensor) and t.is_floating_point()}


def traffic(optimizer, W):
    """Bytes of gradient, weight and state that a step reads, and of those that it changes."""
    before = versions(optimizer.state[W])
    W.grad = torch.randn_like(W)
    optimizer.step()
    after = versions(optimizer.state[W])
    left_out = {"lambda_0", "step"}  # single numbers
    return 3 * W.nbytes + sum(
        before[key].nbytes * (1 + (not torch.equal(before[key], after[key]))) for key in before.keys() - left_out
    )


@pytest.mark.parametrize("method", OPTIMIZERS)
def test_bytes_are_those_that_a_step_reads_and_changes(method):
    shape, rank = (12, 20), 4
    optimizer, W = stepped(method, "torch", shape, rank)
    always = traffic(optimizer, W)
    at_refresh = traffic(optimizer, W)
    assert optimizer.state[W]["step"] == TAU < always < at_refresh
    for tau, bytes_ in ((1, at_refresh), (10, always + (at_refresh - always) / 10)):
        assert cost((1, *shape), rank, tau, method).bytes == pytest.approx(bytes_, rel=1e-12)


@pytest.mark.parametrize("method", ["muon", "adamw"])
def test_bytes_of_the_simpler_optimizers_are_those_that_a_step_reads_and_changes(method):
    W = torch.nn.Parameter(torch.randn(12, 20))
    optimizer = torch.optim.Muon([W]) if method == "muon" else torch.optim.AdamW([W])
    W.grad = torch.randn_like(W)
    optimizer.step()
    assert traffic(optimizer, W) == cost((1, 12, 20), 4, 10, method).bytes


def test_a_set_costs_what_its_weights_cost_whichever_way_they_lie():
    s = SETS["gpt2-124m/4"]
    for method in costs.METHODS:
        whole = total(s, 32, 10, method)
        for field in ("flops_ns", "flops_rest", "bytes"):
            one_by_one = sum(getattr(cost((1, cols, rows), 32, 10, method), field) for rows, cols in s.each)
            assert getattr(whole, field) == pytest.approx(one_by_one, rel=1e-12)


def test_narrow_storage_moves_half_the_bytes():
    c = cost((1, 20, 60), 4, 10, "pro-klshampoo", item=2, state_item=2)
    assert c.bytes == pytest.approx(cost((1, 20, 60), 4, 10, "pro-klshampoo").bytes / 2, rel=1e-12)


def test_the_floor_is_the_slower_of_arithmetic_and_traffic():
    found = Rates(half=100.0, single=10.0, bandwidth=5.0)
    assert floor(Cost(1000.0, 50.0, 1.0), found) == 1000 / 100 + 50 / 10
    assert floor(Cost(1000.0, 50.0, 500.0), found) == 500 / 5
    assert floor(Cost(1000.0, 50.0, 1.0), Rates(1.0, 10.0, 5.0)) == 1050 / 10  # a CPU that only emulates bfloat16


def test_what_is_not_counted_is_refused():
    with pytest.raises(ValueError, match="method='muon', form='reference'"):
        terms("muon", "reference", 8, 16, 4)
    with pytest.raises(ValueError, match="method='soap'"):
        cost((1, 8, 16), 4, 10, "soap")


def test_measuring_the_ceilings_puts_torchs_settings_back():
    settings = torch.get_num_threads(), torch.get_float32_matmul_precision()
    found = rates.measure_rates(torch.device("cpu"), 1, sides=(32, 64), elements=2**12, rounds=2)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == settings
    assert min(found.half, found.single, found.bandwidth) > 0


def test_no_larger_product_is_tried_after_one_that_took_long(monkeypatch):
    tried = []

    def took(seconds):
        def fastest(run, device, rounds):
            tried.append(run().shape[0])
            return seconds

        return fastest

    for seconds, sides in ((rates.QUICK / 2, [8, 8, 16, 16]), (rates.QUICK * 2, [8, 8])):
        tried.clear()
        monkeypatch.setattr(rates, "_fastest", took(seconds))
        rate = rates._product_rate(torch.float32, (8, 16), torch.device("cpu"), 1)
        assert tried == sides and rate == 2 * sides[-1] ** 3 / seconds
