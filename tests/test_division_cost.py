"""Division deals out work by the operations of a step, counted by PyTorch, and those of its QRs."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.io import Member
from prokl.distributed.division import matrix_cost

TAU = 3


def counted(run):
    def baddbmm(C, A, B, **_):
        return 2 * math.prod(A) * B[-1]

    in_place = {torch.ops.aten.baddbmm_: baddbmm}  # torch's counter does not know it
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return counter.get_total_flops()


def householder(n, k):
    """R and Q (n,k) of n x k: 2 nk^2 - 2/3 k^3 each (Golub and Van Loan, Matrix Computations, section 5.2)."""
    return 4 * n * k * k - 4 / 3 * k**3


@pytest.mark.parametrize(
    "newton_schulz", [{"ns_steps": 1}, {}, {"ns_steps": 7}, {"ns_coefficients": "polar-express"}], ids=str
)
@pytest.mark.parametrize("shape", [(24, 24), (24, 32), (60, 20)], ids=str)
@pytest.mark.parametrize("cls", [ProKLShampoo, KLShampoo])
def test_a_matrix_costs_its_products_and_amortised_qrs(cls, shape, newton_schulz):
    (m, n), r, g = sorted(shape), 5, torch.Generator().manual_seed(1)
    W = torch.nn.Parameter(torch.randn(shape, generator=g))
    own = {"rank": r, **newton_schulz} if cls is ProKLShampoo else {}
    optimizer = cls([W], backend="torch", precondition_frequency=TAU, **own)
    products = []
    for _ in range(2 + TAU):
        W.grad = torch.randn(shape, generator=g)
        products.append(counted(optimizer.step))
    ordinary, refresh, after = products[2:]  # the first one initialises
    assert after == ordinary < refresh
    bases, every = ((m, r), householder(n, r)) if own else ((m, n), 0)
    in_refreshes = refresh - ordinary + sum(householder(k, k) for k in bases)
    piece = Member(W.detach(), "W", MatrixShape.of(W))
    found = matrix_cost(piece, cls.method, optimizer.param_groups[0])
    assert found == pytest.approx(ordinary + every + in_refreshes / TAU, rel=1e-12)
