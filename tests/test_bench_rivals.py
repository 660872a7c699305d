"""Optimizers of other packages are built as the comparison says; the packages need not be installed."""

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


def test_query_and_key_have_the_pieces_and_the_rate_asked_for():
    hyper = Hyper("pro-klshampoo", 0.01, 0.003, qk_pieces=6, qk_rate=2.0)
    found = {}
    for group in optimizers.split(llama(), hyper):
        for name, _ in group["params"]:
            found[name.split(".")[-2]] = group["algorithm"], group["lr"], group.get("split")
    others = dict.fromkeys(("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), ("matrix", 0.01, None))
    qk = dict.fromkeys(("q_proj", "k_proj"), ("matrix", 0.02, 6))
    assert found.items() >= (others | qk).items() and found["embedding"][:2] == ("adamw", 0.003)


@pytest.mark.parametrize("method, count", [("adamw", 1), ("muon", 2), ("kl-shampoo", 1)])
def test_every_method_has_the_rate_of_query_and_key(method, count):
    own = llama()
    rest = None if method == "adamw" else 0.003
    matrices, *others = optimizers.build(own, Hyper(method, 0.01, rest, qk_rate=4.0), None)
    rates = [group["lr"] for group in matrices.param_groups for _ in group["params"]]
    assert len(others) == count - 1
    assert rates.count(0.04) == 2 * own.config.layers and set(rates) <= {0.04, 0.01, 0.003}


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
