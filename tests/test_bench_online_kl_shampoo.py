"""Online KL-Shampoo, written from its formulas: the same as these, term by term, in float64."""

import math

import pytest
import torch

from bench.training.online_kl_shampoo import OnlineKLShampoo


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


def gradients_of(shape, count):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(count)]


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


def test_factors_short_of_rank_give_finite_roots():
    start = torch.ones(3, 64)
    W, state = stepped(start, 30 * [torch.ones(3, 64)], lr=0.1)
    assert W.isfinite().all() and state["P_b"].isfinite().all()
