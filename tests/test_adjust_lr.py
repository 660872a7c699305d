"""``adjust_lr_fn``: torch.optim.Muon's names and factors, so that one lr serves matrices and AdamW groups."""

import math

import pytest
import torch

from prokl import diagnostics
from tests.inputs import BACKENDS, KL, PRO, normal, step, weight
from tests.problems import made
from tests.training import refused
from tests.transcription import relative_error

NAMES = ("original", "match_rms_adamw")
MATCHED = "match_rms_adamw"
SHAPES = [(12, 40), (40, 12), (24, 24)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_is_torchs_muons_in_size_and_decays_at_the_plain_lr(shape, name, backend):
    """From a state whose eigenvalues are all equal, with a gradient beside the subspace, the method is Muon."""
    long = 0 if shape[0] > shape[1] else 1
    first, G = torch.zeros(shape), normal(*shape)
    first.select(long, 0).fill_(3.0)  # spans the subspace of rank 1
    G.select(long, 0).zero_()
    settings = {"lr": 0.1, "weight_decay": 0.3, "adjust_lr_fn": name}
    own = {"variant": "complement-only", "rank": 1, "clip_threshold": None, "backend": backend}
    ours, theirs = weight(*shape), weight(*shape)
    start, optimizer = ours.detach().clone(), made(PRO, [ours], **settings, **own)
    step(optimizer, [ours], [first])
    step(optimizer, [ours], [G])
    step(torch.optim.Muon([theirs], **settings), [theirs], [G])
    ours, theirs = ((p.detach() - (1 - 0.1 * 0.3) * start) / 0.1 for p in (ours, theirs))
    # Both are five steps in bfloat16, each with rounding of its own. Measured: at most 0.037, and 0.007 of the size.
    assert relative_error(ours, theirs) < 0.08
    assert float(ours.norm()) == pytest.approx(float(theirs.norm()), rel=0.02)


def directions(shape, steps, backend="torch", cls=PRO, **kw):
    """(W - W') / lr of the last of so many steps, in float64."""
    p = weight(*shape, dtype=torch.float64)
    optimizer = made(cls, [p], lr=1.0, backend=backend, **kw)
    for t in range(steps):
        before = p.detach().clone()
        step(optimizer, [p], [normal(*shape, seed=t, dtype=torch.float64)])
    return before - p.detach()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_balance_of_the_two_parts_is_that_before_the_scaling(backend):
    kw = {"rank": 4, "alpha_kl": 0.3, "backend": backend}
    plain, matched = (directions((12, 20), 6, adjust_lr_fn=name, **kw) for name in NAMES)
    assert relative_error(matched, 0.2 * math.sqrt(20) * plain) < 1e-12
    without = directions((12, 20), 6, adjust_lr_fn=MATCHED, **kw | {"alpha_kl": 0.0})
    assert relative_error(matched, without) > 0.1  # the subspace part counts


# Independent gradients, steps on which the eigenvalues have settled. Newton-Schulz's singular values are around 0.9, of
# which square weights lack r of n; eigenvalues that follow noise add some to a whitened part.
@pytest.mark.parametrize(
    "shape, low, high",
    [((24, 96), 0.16, 0.24), ((96, 24), 0.16, 0.24), ((48, 48), 0.14, 0.24)],
    ids=str,
)
@pytest.mark.parametrize(
    "cls, kw",
    [
        (PRO, {"variant": "pro-klshampoo", "rank": 8}),
        (PRO, {"variant": "complement-only", "rank": 8}),
        *((PRO, {"variant": "smok-hop", "rank": 8, "momentum": m}) for m in (0.0, 0.95)),
        *((KL, {"momentum": m}) for m in (0.0, 0.85, 0.95)),
    ],
    ids=str,
)
def test_updates_have_the_root_mean_square_of_adamws_whatever_the_momentum(cls, kw, shape, low, high):
    D = directions(shape, 60, cls=cls, adjust_lr_fn=MATCHED, **kw)
    assert low < float(D.square().mean().sqrt()) < high


@pytest.mark.parametrize("name", NAMES)
def test_the_coming_update_is_foreseen_and_the_bracket_has_no_c_a_that_the_direction_lacks(name):
    p = weight(20, 12, dtype=torch.float64)
    optimizer = PRO([p], lr=0.5, rank=4, adjust_lr_fn=name)
    for t in range(3):
        step(optimizer, [p], [normal(20, 12, seed=t, dtype=torch.float64)])
    p.grad = normal(20, 12, seed=9, dtype=torch.float64)
    found, before = diagnostics.scalars(optimizer), p.detach().clone()
    optimizer.step()
    rms = float((before - p.detach()).square().mean().sqrt()) / 0.5
    assert found["prokl/group0.0/update_rms"] == pytest.approx(rms, rel=1e-9)
    low = math.sqrt(20 / 12 if name == "original" else 1.0) / math.sqrt(12 * 16)
    assert found["prokl/group0.0/alpha_kl_low"] == pytest.approx(low, rel=1e-12)
    assert diagnostics.alpha_kl_bracket(20, 12, 4, adjust_lr_fn=name)[0] == pytest.approx(low, rel=1e-12)


def test_a_variant_whose_size_is_alpha_kls_is_refused_before_anything_moves():
    complaint = r"adjust_lr_fn='match_rms_adamw' with variant='subspace-only'.* Use adjust_lr_fn='original'"
    with pytest.raises(ValueError, match=complaint):
        PRO([weight(4, 6)], variant="subspace-only", adjust_lr_fn=MATCHED)
    p = weight(4, 6)
    optimizer = PRO([p], variant="subspace-only", rank=2)
    for t in range(2):
        step(optimizer, [p], [normal(4, 6, seed=t)])
    optimizer.param_groups[0]["adjust_lr_fn"] = MATCHED
    with refused(optimizer, complaint):
        step(optimizer, [p], [normal(4, 6, seed=2)])


@pytest.mark.parametrize("cls", [PRO, KL])
def test_a_checkpoint_keeps_the_units_of_its_lr_and_an_older_ones_are_the_original(cls):
    saved = cls([weight(4, 6)], adjust_lr_fn=MATCHED).state_dict()
    other = cls([weight(4, 6)])
    other.load_state_dict(saved)
    assert other.param_groups[0]["adjust_lr_fn"] == MATCHED
    del saved["param_groups"][0]["adjust_lr_fn"]
    other.load_state_dict(saved)
    assert other.param_groups[0]["adjust_lr_fn"] == "original"
