"""torch.set_default_device is for a user's own tensors: an optimizer's are with its weights, its clocks on the CPU.

"meta" stands for a GPU: what lands there by default has no values, and cannot be pinned.
"""

import copy
from types import SimpleNamespace

import pytest
import torch

from prokl import diagnostics
from prokl.backends.pointers import PointerTable
from prokl.diagnostics.report import _spectrum_of
from prokl.distributed.waves import not_finite
from tests.inputs import KL, PRO, normal, weight

SHAPES = [(6, 9), (9, 6), (3, 4, 5), (6, 4)]
SETTINGS = {
    "Pro-KLShampoo": (PRO, torch.float32, {"rank": 3}),
    "Pro-KLShampoo, float64": (PRO, torch.float64, {"rank": 3}),
    "Pro-KLShampoo, rounded at random": (PRO, torch.bfloat16, {"rank": 3}),
    "Pro-KLShampoo, master": (PRO, torch.bfloat16, {"rank": 3, "bf16_weights": "master"}),
    "Pro-KLShampoo, reference": (PRO, torch.float32, {"rank": 3, "backend": "reference"}),
    "Pro-KLShampoo, paper": (PRO, torch.float32, {"rank": 3, "preset": "paper"}),
    "Smok-Hop": (PRO, torch.float32, {"rank": 3, "variant": "smok-hop"}),
    "KL-Shampoo": (KL, torch.float32, {}),
    "KL-Shampoo, reference": (KL, torch.float32, {"backend": "reference"}),
}


def trained(setting, device):
    """Train under a default device, by way of a checkpoint; return weights, state and what is seen of them."""
    cls, dtype, settings = SETTINGS[setting]
    weights = [weight(*shape, seed=i, dtype=dtype) for i, shape in enumerate(SHAPES)]
    bias = torch.nn.Parameter(normal(5))
    groups = [{"params": weights[:3]}, {"params": weights[3:], "split": 2}]
    gradients = [[normal(*p.shape, seed=10 * t + i, dtype=p.dtype) for i, p in enumerate(weights)] for t in range(13)]
    gradients[3][0].fill_(torch.nan)
    torch.set_default_device(device)
    try:
        optimizer = cls([*groups, {"params": [bias], "algorithm": "adamw", "lr": 0.01}], lr=0.02, **settings)
        for t, own in enumerate(gradients):
            for p, g in zip(weights, own, strict=True):
                p.grad = g
            bias.grad = torch.ones(5, device="cpu")
            optimizer.step()
            if t == 5:
                loaded = copy.deepcopy(optimizer.state_dict())
                assert all(t.device.type == "cpu" for own in loaded["state"].values() for t in own.values())
                optimizer.load_state_dict(loaded)
        seen = [optimizer.skipped(), optimizer.clipped(), diagnostics.scalars(optimizer)]
    finally:
        torch.set_default_device(None)
    return [*weights, bias], [optimizer.state[p] for p in (*weights, bias)], seen


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_default_device_changes_nothing(setting):
    weights, states, seen = trained(setting, None)
    others, their_states, theirs = trained(setting, "meta")
    assert all(torch.equal(p, q) for p, q in zip(weights, others, strict=True))
    for own, other in zip(states, their_states, strict=True):
        assert own.keys() == other.keys()
        for key, value in own.items():
            assert torch.is_tensor(value) == torch.is_tensor(other[key])
            assert torch.equal(value, other[key]) if torch.is_tensor(value) else value == other[key]
    assert seen == theirs


def test_what_only_kernels_processes_and_failed_runs_need_of_the_host_is_made_there():
    """Of which no step above comes by."""
    W, table = normal(2, 3, 4), PointerTable(2, "cpu")
    phi = torch.full((3, 3), torch.nan)
    torch.set_default_device("meta")
    try:
        table.update([W], [2])
        made = _spectrum_of(phi, "W", 3)
    finally:
        torch.set_default_device(None)
    assert table.table[0].tolist() == [W.data_ptr(), W.data_ptr() + 3 * 4 * W.element_size()]
    assert made.device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_rank_says_of_a_gradient_that_it_lacks_is_made_where_the_weight_is(device):
    """A copy from the host would make a divided step wait for the device."""
    absent = SimpleNamespace(stand_in=None, shapes=[(3, 4), (3, 4)], p=torch.empty(2, 3, 4, device=device))
    assert not_finite(absent).device.type == device
