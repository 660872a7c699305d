"""Other packages' optimizers are built as the comparison says; those that bench has written are their formulas."""

import math
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import pytest
import torch

from bench import optimizers, rivals
from bench.command import UsageError
from bench.models import CONFIGS, Transformer
from bench.optimizers import Hyper
from bench.training.cosmos import Cosmos
from bench.training.online_kl_shampoo import OnlineKLShampoo
from prokl.algorithm.settings import pro_hyper


class Recorded:
    def __init__(self, weights, **settings):
        self.weights, self.settings = weights, settings


@pytest.fixture
def packages(monkeypatch):
    """Packages of the names that are imported, whose optimizers record what they are given."""
    theirs, base, heavyball = ModuleType("pytorch_optimizer"), ModuleType("base"), ModuleType("heavyball")
    theirs.SOAP = theirs.Muon = theirs.NorMuon = heavyball.AdamW = Recorded
    base.zero_power_via_newton_schulz_5 = lambda g, dtype=torch.bfloat16: dtype
    heavyball.utils = ModuleType("utils")
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", theirs)
    monkeypatch.setitem(sys.modules, "pytorch_optimizer.optimizer.muon.base", base)
    monkeypatch.setitem(sys.modules, "heavyball", heavyball)
    return base, heavyball


def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 5), torch.nn.Linear(5, 2))


def built(method, **settings):
    matrices, rest = optimizers.build(model(), Hyper(method, 0.01, 0.002, **settings), None)
    assert isinstance(rest, torch.optim.AdamW) and {group["lr"] for group in rest.param_groups} == {0.002}
    return matrices


def test_each_rival_has_its_packages_settings(packages):
    soap = built("soap")
    assert (
        soap.settings == {"lr": 0.01, "weight_decay": 0.0, "precondition_frequency": 10} and soap.weights[0].ndim == 2
    )
    normuon, express = built("normuon"), built("muon-polar-express")
    assert normuon.weights[0]["use_muon"] and normuon.settings == {"lr": 0.01, "weight_decay": 0.0}
    assert express.settings == normuon.settings | {"ns_coeffs": "polar_express"}
    cautious = built("adamw-cautious")
    assert cautious.settings["cautious_weight_decay"] and cautious.settings["weight_decay"] == rivals.CAUTIOUS_DECAY
    assert cautious.settings["betas"] == optimizers.ADAMW_BETAS and packages[1].utils.compile_mode is None
    assert built("adamw-cautious", weight_decay=0.3).settings["weight_decay"] == 0.3


@pytest.mark.parametrize("instructions, asked", [(True, False), (False, False), (True, True)])
def test_newton_schulz_is_float32_on_request_or_if_emulated(packages, monkeypatch, instructions, asked):
    monkeypatch.setattr(rivals, "cpu_has_bfloat16", lambda: instructions)
    assert not rivals.emulated(torch.device("cuda"))
    base, _ = packages
    wide = asked or not instructions
    dtype = torch.float32 if wide else torch.bfloat16
    built("normuon", float32=asked), built("muon-polar-express", float32=asked)  # twice: it is changed once
    assert base.zero_power_via_newton_schulz_5(None) == dtype
    assert not wide or not isinstance(base.zero_power_via_newton_schulz_5.func, partial)
    assert type(built("muon", float32=asked)) is (rivals.Float32Muon if wide else torch.optim.Muon)
    assert built("cosmos", rank=2, float32=asked).defaults["ns_dtype"] == dtype
    for method, own in (("pro-klshampoo", {"ns_dtype": torch.float32 if asked else None}), ("kl-shampoo", {})):
        (ours,) = optimizers.build(model(), Hyper(method, 0.01, 0.002, float32=asked), None)
        assert own.items() <= ours.defaults.items()  # KL-Shampoo has no such setting


@pytest.mark.parametrize("method", ["muon", "online-kl-shampoo", "kl-shampoo", "pro-klshampoo"])
def test_momentum_and_beta2_default_to_the_methods_own(method):
    others = {"momentum": 0.8, "beta2": 0.7}
    own, given = (optimizers.build(model(), Hyper(method, 0.01, 0.002, **more), None)[0] for more in ({}, others))
    plain = type(own)([torch.nn.Parameter(torch.ones(2, 2))], lr=0.01)
    for name in others.keys() & plain.defaults.keys():
        assert given.defaults[name] == others[name] != own.defaults[name] == plain.defaults[name]
    assert "momentum" in plain.defaults


def test_a_missing_package_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UsageError, match="pip install pytorch-optimizer$"):
        built("soap")


# Queries and keys in pieces and at a rate of their own


def llama():
    torch.manual_seed(0)
    return Transformer(replace(CONFIGS["llama-tiny"], vocabulary=32))


@pytest.mark.parametrize("method, count", [("adamw", 1), ("muon", 2), ("kl-shampoo", 1)])
def test_every_method_has_the_rate_of_query_and_key(method, count):
    own = llama()
    rest = None if method == "adamw" else 0.003
    matrices, *others = optimizers.build(own, Hyper(method, 0.01, rest, qk_rate=4.0), None)
    rates = [group["lr"] for group in matrices.param_groups for _ in group["params"]]
    assert len(others) == count - 1
    assert rates.count(0.04) == 2 * own.config.layers and set(rates) <= {0.04, 0.01, 0.003}


def test_queries_and_keys_have_so_many_times_the_weight_that_auto_gives_a_piece():
    own = llama()
    (optimizer,) = optimizers.build(own, Hyper(optimizers.PRO, 0.01, 0.003, qk_pieces=6, qk_alpha=8.0), None)
    query_key, rest = (group for group in optimizer.param_groups if group["algorithm"] == "matrix")
    assert len(query_key["params"]) == 2 * own.config.layers and rest["alpha_kl"] == "auto"
    auto = pro_hyper(query_key | {"alpha_kl": "auto"}, 16, 96, torch.float32, torch.device("cpu")).alpha_kl
    assert query_key["alpha_kl"] == pytest.approx(8 * auto)


def test_muon_steps_a_piece_as_a_weight_of_its_own_bit_for_bit():
    own, other, start = llama(), llama(), llama()
    matrices, _ = optimizers.build(own, Hyper("muon", 0.01, 0.003, float32=True, momentum=0.9, qk_pieces=6), None)
    alone = {}
    for name, p in other.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            parts = [torch.nn.Parameter(part) for part in p.detach().split(16)]
            alone[name] = parts, rivals.Float32Muon(parts, 0.01, weight_decay=0.0, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for name, p in own.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator)
            if name in alone:
                parts, its = alone[name]
                for part, grad in zip(parts, p.grad.split(16), strict=True):
                    part.grad = grad
                its.step()
        matrices.step()
    assert len(alone) == 2 * own.config.layers
    for name in alone:
        assert torch.equal(own.get_parameter(name), other.get_parameter(name))
        assert not torch.equal(own.get_parameter(name), start.get_parameter(name))


# COSMOS and Online KL-Shampoo, which bench has written


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
