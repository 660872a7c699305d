"""The settings in which PyTorch's own optimizer tests are asked of both optimizers, and the problem they train.

Two of PyTorch's own optimizers stand beside them, so that every check is known to be one which AdamW and Muon pass;
Muon and the matrix groups take no vectors. Errors are PyTorch's list, of a module which needs expecttest.

Importing PyTorch's module keeps the process from setting torch.backends.cudnn's flags afterwards.
"""

import copy
from collections.abc import Iterable

import pytest
import torch
from torch.optim import AdamW, Muon, lr_scheduler
from torch.optim.swa_utils import SWALR

import prokl
from tests.inputs import normal, weight

pytest.importorskip("expecttest", reason="PyTorch's tests need it")

from torch.testing._internal.common_optimizers import get_error_inputs_for_all_optims  # noqa: E402

COMMON = {
    "default": {},
    "lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.001)},
    "weight decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "maximize, weight decay": {"maximize": True, "weight_decay": 0.1},
    "momentum": {"momentum": 0.8},
    "no momentum": {"momentum": 0.0},
    "refresh at every step": {"precondition_frequency": 1},
    "as published": {"init_eigenvalue": 0.1, "clip_threshold": None},
    "half-precision state": {"state_dtype": torch.bfloat16},
    "AdamW's units": {"adjust_lr_fn": "match_rms_adamw"},
    "cautious weight decay": {"weight_decay": 0.1, "cautious_weight_decay": True},
    "masters": {"bf16_weights": "master"},
    "without graphs": {"cuda_graphs": False},
    "balanced products": {"precision": "balanced"},
    "reference": {"backend": "reference"},
}
PRO_ONLY = {
    "rank": {"rank": 2},
    "smok-hop": {"variant": "smok-hop"},
    "subspace alone": {"variant": "subspace-only", "alpha_kl": 1.0},
    "complement alone": {"variant": "complement-only"},
    "Newton-Schulz": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "ns_dtype": torch.float64},
}
SCHEDULERS = {
    "LambdaLR": [lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1))],
    "StepLR": [lambda o: lr_scheduler.StepLR(o, step_size=3, gamma=0.9)],
    "LinearLR": [lambda o: lr_scheduler.LinearLR(o, start_factor=0.1, total_iters=4)],
    "CyclicLR": [lambda o: lr_scheduler.CyclicLR(o, base_lr=1e-4, max_lr=1e-2, step_size_up=4)],
    "OneCycleLR": [lambda o: lr_scheduler.OneCycleLR(o, max_lr=[g["lr"] for g in o.param_groups], total_steps=20)],
    "ReduceLROnPlateau": [lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9)],
    "SequentialLR": [
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
        )
    ],
    "ChainedScheduler": [
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)])
    ],
    "SWALR": [lambda o: SWALR(o, swa_lr=5e-3, anneal_epochs=4)],
    "StepLR and ReduceLROnPlateau": [lambda o: lr_scheduler.StepLR(o, 3, 0.9), lr_scheduler.ReduceLROnPlateau],
    "ExponentialLR, LinearLR and ReduceLROnPlateau": [
        lambda o: lr_scheduler.ExponentialLR(o, 0.9),
        lr_scheduler.LinearLR,
        lr_scheduler.ReduceLROnPlateau,
    ],
}


def of_two_rows(params, known):
    """PyTorch's samples are 1x1 matrices; give them a second row, and what is the same tensor the same one."""
    if isinstance(params, torch.Tensor):
        return known.setdefault(params, torch.nn.Parameter(torch.zeros(2, 1)))
    if isinstance(params, dict):
        return {k: of_two_rows(v, known) for k, v in params.items()}
    return type(params)(of_two_rows(v, known) for v in params) if isinstance(params, (list, tuple)) else params


def errors():
    """PyTorch's list of errors for every optimizer; test_bad_settings has what the matrix method cannot take."""
    everyones = get_error_inputs_for_all_optims("cpu", torch.float32)
    for error in everyones:
        error.optimizer_error_input.params = of_two_rows(error.optimizer_error_input.params, {})
        error.error_regex = error.error_regex.replace("Tensor lr must be 1-element", "Invalid lr=.* with one such elem")
    return everyones


OURS, THEIRS = (prokl.ProKLShampoo, prokl.KLShampoo), (AdamW, Muon)
of_all = pytest.mark.parametrize("cls", OURS + THEIRS)
OUR_SETTINGS = [
    pytest.param(cls, settings, id=f"{cls.__name__}-{name}")
    for cls, known in zip(OURS, (COMMON | PRO_ONLY, COMMON), strict=True)
    for name, settings in known.items()
]
of_our_settings = pytest.mark.parametrize("cls, settings", OUR_SETTINGS)
of_all_settings = pytest.mark.parametrize("cls, settings", [*OUR_SETTINGS, *((cls, {}) for cls in THEIRS)])


def grouped(cls, matrices, vectors, named=False):
    """Return ``params`` for the optimizer: vectors go to its AdamW group, beside the matrices, or nowhere.

    Args:
        cls: whose. matrices, vectors: of weights. named: by name, "0", "1", ... in this order.
    """
    everyone = [*matrices, *vectors]
    entries = [(str(i), p) for i, p in enumerate(everyone)] if named else everyone
    first, rest = entries[: len(matrices)], entries[len(matrices) :]
    if cls in OURS:
        return [{"params": first}, {"params": rest, "algorithm": "adamw", "lr": 1e-3}]
    return first if cls is Muon else entries


class Problem:
    """A line fitted to a point: the loss is the squared length of ``weight @ point + bias``.

    Args:
        cls: of the optimizer. settings: for its constructor. named: parameters by name.
    """

    def __init__(self, cls, settings, named=False):
        self.weight, self.bias, self.point = weight(10, 5), weight(10, seed=1), normal(5)
        self.cls, self.settings = cls, settings
        params = grouped(cls, [self.weight], [self.bias], named)
        self.optimizer = cls(params, **copy.deepcopy(settings))

    def loss(self):
        self.optimizer.zero_grad()
        loss = (self.weight.mv(self.point) + self.bias).square().sum()
        loss.backward()
        return loss

    def steps(self, count, schedulers: Iterable = ()):
        for _ in range(count):
            loss = self.optimizer.step(self.loss)
            for scheduler in schedulers:
                scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        return self

    def twin(self, **settings):
        """Return a problem of its own whose weights are as this one's are now; its optimizer is new."""
        twin = Problem(self.cls, {**self.settings, **settings})
        with torch.no_grad():
            twin.weight.copy_(self.weight)
            twin.bias.copy_(self.bias)
        return twin
