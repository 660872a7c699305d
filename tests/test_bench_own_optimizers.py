"""Optimizers that bench has written: COSMOS does what its description says, Online KL-Shampoo is its formulas."""

import math

import pytest
import torch

from bench.training.cosmos import Cosmos
from bench.training.online_kl_shampoo import OnlineKLShampoo


def gradients_of(shape, count, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=dtype) for _ in range(count)]


# COSMOS


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (6, 3)])
def test_cosmos_moves_by_lr_and_leaves_the_gradient_alone(shape):
    start, *gradients = gradients_of(shape, 6, torch.float32)
    W = torch.nn.Parameter(start)
    optimizer = Cosmos([W], lr=0.01, rank=4, ns_dtype=torch.float32)
    for G in gradients:
        before, W.grad = W.detach().clone(), G.clone()
        optimizer.step()
        assert torch.equal(W.grad, G)
        # Rounding of W of size 1 against an update of 0.01: 100 eps.
        assert (W.detach() - before).square().mean().sqrt() == pytest.approx(0.01, rel=1e-4)
        P = optimizer.state[W]["P"]
        torch.testing.assert_close(P.mT @ P, torch.eye(P.shape[1]), atol=1e-5, rtol=0)


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


# Online KL-Shampoo


def root(S):
    """S^(-1/2) by the product form of Denman and Beavers, which takes no eigenvalues."""
    Y, Z = S, torch.eye(len(S), dtype=S.dtype)
    for _ in range(40):
        Y, Z = (Y + torch.linalg.inv(Z)) / 2, (Z + torch.linalg.inv(Y)) / 2
    return Z


def transcribed(W, gradients, lr, beta1, beta2, eps):
    """The formulas in their authors' order, sums of outer products one by one."""
    (m, n), M = W.shape, torch.zeros_like(W)
    G = gradients[0]
    S_a, S_b = (torch.zeros(k, k, dtype=W.dtype) for k in (m, n))
    for j in range(n):
        S_a += math.sqrt(m / (n * G.square().sum())) * torch.outer(G[:, j], G[:, j])
    for i in range(m):
        S_b += math.sqrt(n / (m * G.square().sum())) * torch.outer(G[i], G[i])
    for S in (S_a, S_b):
        S += (torch.linalg.eigvalsh(S).square().mean().sqrt() + eps) * torch.eye(len(S), dtype=W.dtype)
    P_a, P_b = root(S_a), root(S_b)
    for G in gradients:
        M = beta1 * M + (1 - beta1) * G
        ahead = (1 - beta1) * G + beta1 * M
        left, right = G @ P_b, P_a @ G  # by the roots of the step before
        S_a = beta2 * S_a + (1 - beta2) / n * sum(torch.outer(left[:, j], left[:, j]) for j in range(n))
        S_b = beta2 * S_b + (1 - beta2) / m * sum(torch.outer(right[i], right[i]) for i in range(m))
        S_a, S_b = (S + eps * torch.eye(len(S), dtype=W.dtype) for S in (S_a, S_b))
        P_a, P_b = root(S_a), root(S_b)
        corrected = math.sqrt((1 - beta1) / (1 + beta1) * (1 + 2 * beta1 - 2 * beta1**3))
        W = W - lr * math.sqrt(m / n) / (math.sqrt(m) + math.sqrt(n)) / corrected * P_a @ ahead @ P_b
    return W


def stepped(W, gradients, **settings):
    W = torch.nn.Parameter(W.clone())
    optimizer = OnlineKLShampoo([W], **settings)
    for G in gradients:
        W.grad = G.clone()
        optimizer.step()
        assert torch.equal(W.grad, G)
    return W.detach(), optimizer.state[W]


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
def test_every_step_is_the_formulas(shape):
    start, *gradients = gradients_of(shape, 8)
    for count in (1, 7):
        own, _ = stepped(start, gradients[:count], lr=0.03, momentum=0.9, beta2=0.8, eps=1e-6)
        want = transcribed(start, gradients[:count], 0.03, 0.9, 0.8, 1e-6)
        torch.testing.assert_close(own, want, rtol=0, atol=1e-12)  # of a weight of size 1, in float64


def test_a_zero_gradient_begins_nothing():
    start, *gradients = gradients_of((4, 6), 3)
    with_zero, state = stepped(start, [torch.zeros_like(start), *gradients])
    without, _ = stepped(start, gradients)
    assert torch.equal(with_zero, without) and state["S_a"].isfinite().all()
