"""COSMOS, written from its description: it does what that says."""

import pytest
import torch

from bench.training.cosmos import Cosmos, orthogonalised


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (6, 3)])
def test_cosmos_moves_by_lr_and_leaves_the_gradient_alone(shape):
    g = torch.Generator().manual_seed(0)
    W = torch.nn.Parameter(torch.randn(shape, generator=g))
    W.grad = torch.randn(shape, generator=g)
    optimizer = Cosmos([W], lr=0.01, rank=4, ns_dtype=torch.float32)
    for t in range(5):
        before, G = W.detach().clone(), W.grad.clone()
        optimizer.step()
        assert torch.equal(W.grad, G)
        # Rounding of W of size 1 against an update of 0.01: 100 eps.
        assert (W.detach() - before).square().mean().sqrt() == pytest.approx(0.01, rel=1e-4)
        P = optimizer.state[W]["P"]
        torch.testing.assert_close(P.mT @ P, torch.eye(P.shape[1]), atol=1e-5, rtol=0)
        W.grad = torch.randn(shape, generator=torch.Generator().manual_seed(t))


def test_cosmos_finds_the_subspace_of_its_gradients():
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 3, generator=g)).Q
    W = torch.nn.Parameter(torch.zeros(12, 20))
    optimizer = Cosmos([W], rank=3, ns_dtype=torch.float32)
    W.grad = torch.randn(12, 20, generator=g)  # starts elsewhere
    for _ in range(60):
        optimizer.step()
        W.grad = torch.randn(12, 3, generator=g) @ basis.mT
    # The first gradient's share of S fades by 0.95 a step, and every step is a power iteration beside.
    P = optimizer.state[W]["P"]
    assert torch.linalg.matrix_norm(P - basis @ (basis.mT @ P)) < 0.02


def test_orthogonalised_has_unit_root_mean_square_and_nearly_equal_singular_values():
    X = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    for G in (X, X.mT):
        Y = orthogonalised(G, torch.float32)
        assert Y.square().mean().sqrt() == pytest.approx(1.0, rel=1e-5)
        s = torch.linalg.svdvals(Y)
        assert s[0] / s[-1] < 1.9  # the quintic leaves values between 0.68 and 1.13
        assert torch.linalg.svdvals(G)[0] / torch.linalg.svdvals(G)[-1] > 3
