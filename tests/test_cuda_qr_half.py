"""State stored in bfloat16 beside the extension's QR: rounding leaves L definite, so that Householder takes no matrix.

In the weight's coordinates rounding made L of such gradients indefinite, and each matrix was factored by itself.
"""

from collections import Counter

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.algebra import Algebra
from prokl.algorithm.coordinates import in_weight_coordinates
from prokl.backends import cuda_qr
from prokl.backends.io import TorchIO
from prokl.backends.select import Backend
from prokl.cuda_qr import Used
from prokl.engine.engine import Engine


class WithExtension(Algebra):
    """PyTorch's products, the extension's QRs, and what these did to every factor that was refreshed."""

    def __init__(self):
        super().__init__(host_readable=False)
        self.done, self.least = Counter(), torch.inf

    def track(self, *given):
        return cuda_qr.track(self, *given).Q

    def coordinates_qr(self, S, Q):
        return cuda_qr.coordinates_qr(self, S, Q).Q

    def semidefinite_qr(self, L):
        Q, used = cuda_qr.semidefinite_qr(self, L)
        self.done.update(used.tolist())
        values = torch.linalg.eigvalsh(L.double())
        self.least = min(self.least, float((values[:, 0] / values[:, -1]).min()))
        return Q, self.product(Q.mT, L)


def drawn(kind, m, g):
    """A gradient m x m."""
    G = torch.randn(m, m, generator=g)
    if kind == "half of the rows idle":
        G[m // 2 :] = 0
    if kind == "graded in a random basis":
        basis = torch.linalg.qr(torch.randn(m, m, generator=g))[0]
        G = basis * torch.logspace(0, -3, m) @ G
    return G


KINDS = ("normal", "half of the rows idle", "graded in a random basis")


@pytest.mark.parametrize("again", [True, False], ids=["the same", "new ones"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "cls, m, steps",
    [(ProKLShampoo, 64, 61), (KLShampoo, 64, 61), pytest.param(ProKLShampoo, 256, 51, marks=pytest.mark.slow)],
)
def test_rounding_sends_no_factor_to_householder(cls, m, steps, kind, again, extension_on_cpu, monkeypatch):
    ops, g = WithExtension(), torch.Generator().manual_seed(0)
    backend = Backend("torch", ops, TorchIO, host_readable=False, graphs=False)
    monkeypatch.setattr(Engine, "select", staticmethod(lambda *_: backend))
    W = torch.nn.Parameter(torch.zeros(m, m))
    optimizer = cls([W], state_dtype=torch.bfloat16, precondition_frequency=5)
    G = drawn(kind, m, g)
    for t in range(steps):
        W.grad = (G if again or t == 0 else drawn(kind, m, g)).clone()
        optimizer.step()
    print(f"least eigenvalue over the largest: {ops.least:.1e}")
    assert ops.done.total() == (steps - 1) // 5 * (1 if cls is ProKLShampoo else 2)  # the first one starts
    assert not any(Used(used) & (Used.HOUSEHOLDER | Used.LOST | Used.NONFINITE) for used in ops.done)
    assert W.isfinite().all()
    L = in_weight_coordinates({key: v.float()[None] for key, v in optimizer.state[W].items() if key[1:2] == "_"})["L"]
    rounded = cuda_qr.semidefinite_qr(ops, L.bfloat16().float())
    assert bool(rounded.used & int(Used.LOST)) == (again and kind != KINDS[1])  # as it was stored before
