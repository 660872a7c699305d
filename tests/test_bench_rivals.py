"""Optimizers of other packages are built as the comparison says; the packages need not be installed."""

import sys
from functools import partial
from types import ModuleType

import pytest
import torch

import prokl
from bench import optimizers, rivals
from bench.command import UsageError
from bench.optimizers import Hyper
from prokl.algorithm.settings import cpu_has_bfloat16


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


def test_each_rival_has_the_matrices_their_rate_and_its_packages_settings(packages):
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


@pytest.mark.parametrize("instructions", [True, False])
def test_their_newton_schulz_is_in_float32_only_where_bfloat16_would_be_emulated(packages, monkeypatch, instructions):
    monkeypatch.setattr(rivals, "cpu_has_bfloat16", lambda: instructions)
    base, _ = packages
    built("normuon"), built("muon-polar-express")  # twice: it is changed once
    assert base.zero_power_via_newton_schulz_5(None) == (torch.bfloat16 if instructions else torch.float32)
    if not instructions:
        assert not isinstance(base.zero_power_via_newton_schulz_5.func, partial)
    assert type(built("muon")) is (torch.optim.Muon if instructions else rivals.Float32Muon)
    assert built("cosmos", rank=2).defaults["ns_dtype"] == (torch.bfloat16 if instructions else torch.float32)
    assert built("muon", momentum=0.9).param_groups[0]["momentum"] == 0.9
    assert built("muon").param_groups[0]["momentum"] == 0.95


def test_all_newton_schulz_is_in_float32_where_that_is_asked_for(packages, monkeypatch):
    monkeypatch.setattr(rivals, "cpu_has_bfloat16", lambda: True)
    base, _ = packages
    built("normuon", float32=True), built("muon-polar-express", float32=True)
    assert base.zero_power_via_newton_schulz_5(None) == torch.float32
    assert type(built("muon", float32=True)) is rivals.Float32Muon
    assert built("cosmos", rank=2, float32=True).defaults["ns_dtype"] == torch.float32
    for float32, dtype in ((True, torch.float32), (False, None)):
        (ours,) = optimizers.build(model(), Hyper("pro-klshampoo", 0.01, 0.002, rank=2, float32=float32), None)
        assert ours.defaults["ns_dtype"] == dtype
    (ours,) = optimizers.build(model(), Hyper("kl-shampoo", 0.01, 0.002, float32=True), None)
    assert type(ours) is prokl.KLShampoo  # which has no such setting


@pytest.mark.parametrize("method", ["kl-shampoo", "pro-klshampoo"])
def test_beta2_and_momentum_are_the_methods_own_unless_they_are_given(method):
    (own,), (given,) = (
        optimizers.build(model(), Hyper(method, 0.01, 0.002, **more), None)
        for more in ({}, {"momentum": 0.8, "beta2": 0.7})
    )
    plain = type(own)([torch.ones(2, 2)], lr=0.01)
    for name, value in (("momentum", 0.8), ("beta2", 0.7)):
        assert given.defaults[name] == value and own.defaults[name] == plain.defaults[name]


def test_online_kl_shampoo_has_its_authors_settings_unless_others_are_given():
    own, given = built("online-kl-shampoo"), built("online-kl-shampoo", momentum=0.9, beta2=0.8)
    found = [[o.defaults[name] for name in ("momentum", "beta2", "weight_decay")] for o in (own, given)]
    assert found == [[0.9684, 0.9482, 0.0], [0.9, 0.8, 0.0]] and own.param_groups[0]["lr"] == 0.01


def test_cpus_are_asked(monkeypatch):
    assert rivals.emulated(torch.device("cpu")) != cpu_has_bfloat16()
    assert not rivals.emulated(torch.device("meta"))


def test_a_missing_package_is_said_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UsageError, match=r"pip install pytorch-optimizer, or -e .\[peers\]"):
        built("soap")
