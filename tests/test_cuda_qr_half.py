"""State stored in bfloat16: rounding leaves L definite, so that the extension's Householder takes no matrix.

In the weight's coordinates rounding made L of such gradients indefinite, and each matrix was factored by itself.
Products are balanced, as on a GPU. PyTorch's form of the QR, asked beside, gives none of them up: Q would be I.
"""

from collections import Counter
from itertools import product

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.coordinates import in_weight_coordinates
from prokl.backends import cuda_qr
from prokl.backends.io import TorchIO
from prokl.backends.select import Backend
from prokl.backends.torch_pairs import PairedAlgebra
from prokl.cuda_qr import QRStatus
from prokl.engine.engine import Engine


class WithExtension(PairedAlgebra):
    """PyTorch's products, the extension's QRs, and what these did to every factor that was refreshed."""

    def __init__(self):
        super().__init__(host_readable=False)
        self.done, self.least, self.given_up = Counter(), torch.inf, False

    def track(self, *given):
        return cuda_qr.track(self, *given).Q

    def coordinates_qr(self, S, Q):
        return cuda_qr.coordinates_qr(self, S, Q).Q

    def semidefinite_qr(self, L):
        Q, status = cuda_qr.semidefinite_qr(self, L)
        self.done.update(status.tolist())
        values = torch.linalg.eigvalsh(L.double())
        self.least = min(self.least, float((values[:, 0] / values[:, -1]).min()))
        self.given_up |= torch.equal(super().semidefinite_qr(L)[0], torch.eye(L.shape[-1])[None])
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


SIZES = ((ProKLShampoo, 64, 61), (KLShampoo, 64, 61), (ProKLShampoo, 256, 51))
LARGEST = (ProKLShampoo, 1024, 11, KINDS[0], True)
CASES = [*((*size, kind, again) for size, kind, again in product(SIZES, KINDS, (True, False))), LARGEST]


@pytest.mark.parametrize(
    "cls, m, steps, kind, again",
    [pytest.param(*case, marks=[pytest.mark.slow] if case[1] > 64 else []) for case in CASES],
)
def test_rounding_sends_no_factor_to_householder(cls, m, steps, kind, again, extension_on_cpu, monkeypatch):
    """With ``again`` every gradient is the first one."""
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
    assert not any(
        QRStatus(status) & (QRStatus.HOUSEHOLDER | QRStatus.LOST | QRStatus.NONFINITE) for status in ops.done
    )
    assert W.isfinite().all() and not ops.given_up
    for Q in (optimizer.state[W][key].double() for key in ("Q_L", "Q_R") if key in optimizer.state[W]):
        assert torch.linalg.matrix_norm(Q.mT @ Q - torch.eye(m, dtype=Q.dtype)) <= 1e-5
    L = in_weight_coordinates({key: v.float()[None] for key, v in optimizer.state[W].items() if key[1:2] == "_"})["L"]
    rounded = cuda_qr.semidefinite_qr(ops, L.bfloat16().float())
    assert bool(rounded.status & int(QRStatus.LOST)) == (again and kind != KINDS[1])  # as it was stored before
