"""A CPU computes panels of a symmetric matrix up to the diagonal, and copies matrices that lie transposed."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from prokl.algorithm.algebra import PANEL, PANELS, Algebra
from prokl.backends.io import _fill

CPU, ELSEWHERE = Algebra(host_readable=True), Algebra(host_readable=False)
SIZES = (1, PANEL - 1, PANEL, PANEL + 1, 2 * PANEL, 3 * PANEL + 5)
WEIGHTS = {
    "plain": {},
    "numbers": {"alpha": 0.7, "beta": -2.0},
    "per matrix": {"alpha": torch.tensor([0.7, 0.0]).double(), "beta": 3.0},
}


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("given", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("m", SIZES)
def test_panels_give_the_full_product_mirrored(m, given):
    A = drawn(2, m, PANEL + 1)
    C = A @ A.mT
    symmetric = (C + C.mT) / 2
    for operation, factors, addend in (
        ("symmetric_product", (A,), None),
        ("symmetric_product", (A,), symmetric),
        ("symmetric_polynomial", (symmetric, symmetric), symmetric),
    ):
        found, full = (getattr(ops, operation)(*factors, C=addend, **given) for ops in (CPU, ELSEWHERE))
        torch.testing.assert_close(found, full, rtol=0, atol=1e-14 * float(full.abs().max()) + 1e-300)
        assert torch.equal(found[:, PANEL:, :PANEL], found[:, :PANEL, PANEL:].mT)
    transposed = drawn(2, PANEL + 1, m).mT
    torch.testing.assert_close(CPU.symmetric_product(transposed), transposed @ transposed.mT, rtol=0, atol=1e-11)


def flops(ops, A):
    with FlopCounterMode(display=False) as counter:
        ops.symmetric_product(A)
    return counter.get_total_flops()


def test_four_panels_take_five_eighths_of_a_product():
    A = drawn(3, 4 * PANEL, 2 * PANEL, dtype=torch.float32)
    full = 2 * A.numel() * 4 * PANEL
    assert flops(CPU, A) == full * 5 / 8
    assert flops(CPU, A[:, :, :PANEL]) == full / 2  # too thin to pay
    larger = drawn(1, 2 * PANEL * PANELS, 2 * PANEL, dtype=torch.float32)
    assert flops(CPU, larger) == 2 * larger.numel() * larger.shape[1] * (PANELS + 1) / (2 * PANELS)
    assert flops(CPU, A.bfloat16()) == flops(ELSEWHERE, A) == flops(CPU, A[:, :PANEL]) * 16 == full


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("into_transposed", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_copied_however_either_side_lies(count, into_transposed, transposed):
    values = drawn(count, 5, 7).mT if transposed else drawn(count, 7, 5)
    into = torch.empty(count, 5, 7).double().mT if into_transposed else torch.empty(count, 7, 5).double()
    assert _fill(into, values) is into and into.equal(values)
