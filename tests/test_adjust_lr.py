"""``adjust_lr_fn``: torch.optim.Muon's names and factors, so that one lr serves matrices and AdamW groups."""

import pytest
import torch

from tests.inputs import BACKENDS, KL, PRO, normal, step, weight
from tests.training import refused, train
from tests.transcription import relative_error

NAMES = ("original", "match_rms_adamw")
MATCHED = "match_rms_adamw"
SHAPES = [(12, 40), (40, 12), (24, 24)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_has_the_size_of_torchs_muon_and_its_decay(shape, name, backend):
    """The method is Muon from a state whose eigenvalues are all equal, with a gradient beside the subspace."""
    long = 0 if shape[0] > shape[1] else 1
    first, G = torch.zeros(shape), normal(*shape)
    first.select(long, 0).fill_(3.0)  # spans the subspace of rank 1
    G.select(long, 0).zero_()
    settings = {"lr": 0.1, "weight_decay": 0.3, "adjust_lr_fn": name}
    own = {"variant": "complement-only", "rank": 1, "clip_threshold": None, "backend": backend}
    ours, theirs = weight(*shape), weight(*shape)
    start, optimizer = ours.detach().clone(), PRO([ours], **settings, **own)
    step(optimizer, [ours], [first])
    step(optimizer, [ours], [G])
    step(torch.optim.Muon([theirs], **settings), [theirs], [G])
    ours, theirs = ((p.detach() - (1 - 0.1 * 0.3) * start) / 0.1 for p in (ours, theirs))
    # Both are five steps in bfloat16, each with rounding of its own. Measured: at most 0.037, and 0.007 of the size.
    assert relative_error(ours, theirs) < 0.08
    assert float(ours.norm()) == pytest.approx(float(theirs.norm()), rel=0.02)


def rms_of_an_update(cls, shape, **kw):
    p = weight(*shape, dtype=torch.float64)
    optimizer = train(cls([p], lr=1.0, adjust_lr_fn=MATCHED, **kw), range(59))
    before = p.detach().clone()
    train(optimizer, [59])
    return float((before - p.detach()).square().mean().sqrt())


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
def test_updates_have_the_rms_of_adamws_with_any_momentum(cls, kw, shape, low, high):
    assert low < rms_of_an_update(cls, shape, **kw) < high


def test_near_full_rank_the_subspace_makes_the_update_large():
    complement, whole = (
        rms_of_an_update(PRO, (32, 32), variant=v, rank=31) for v in ("complement-only", "pro-klshampoo")
    )
    assert complement < 0.05 and 0.4 < whole < 0.6


def test_a_variant_sized_by_alpha_kl_is_refused_first():
    complaint = r"adjust_lr_fn='match_rms_adamw' with variant='subspace-only'.* Use adjust_lr_fn='original'"
    with pytest.raises(ValueError, match=complaint):
        PRO([weight(4, 6)], variant="subspace-only", adjust_lr_fn=MATCHED)
    optimizer = train(PRO([weight(4, 6)], variant="subspace-only", rank=2), range(2))
    optimizer.param_groups[0]["adjust_lr_fn"] = MATCHED
    with refused(optimizer, complaint):
        train(optimizer, [2])
