"""Diagnostics of the coming update agree with the step that is then made, in float64."""

import math

import pytest
import torch

from prokl import diagnostics
from prokl.diagnostics import report
from tests.inputs import KL, NAN, PRO, forbid_host_reads, normal, step, weight
from tests.problems import VARIANTS, gradient_stream, run
from tests.test_accelerator_path import ForbidHostReads

SHAPES = [(6, 10), (10, 6), (3, 6, 10), (8, 8), (4, 30)]
METHODS = [(PRO, {"variant": v, "rank": 3}) for v in VARIANTS] + [(KL, {})]
IDS = [*VARIANTS, "klshampoo"]


def moves(optimizer, parameters, gradients):
    """Diagnostics before a step, and the direction (W - W') / lr of that step by matrix."""
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    found = diagnostics.scalars(optimizer)
    before = [p.detach().clone() for p in parameters]
    optimizer.step()
    directions = {}
    for i, (p, old) in enumerate(zip(parameters, before, strict=True)):
        D = (old - p.detach()) / optimizer.param_groups[0]["lr"]
        directions |= {f"group0.{i}[{b}]": D[b] for b in range(len(D))} if D.ndim == 3 else {f"group0.{i}": D}
    return found, directions


@pytest.mark.parametrize(
    "cls, kwargs", [*METHODS, (PRO, {"rank": 3, "maximize": True, "backend": "reference"})], ids=[*IDS, "maximize"]
)
def test_sizes_of_the_update_are_those_of_the_step_that_follows(cls, kwargs):
    stream = gradient_stream(SHAPES, 14)
    parameters, optimizer = run(cls, stream[:4], lr=0.5, **kwargs)
    for gradients in stream[4:]:  # a refresh among them
        found, directions = moves(optimizer, parameters, gradients)
        for name, D in directions.items():
            # (W - W') / lr has lost what W's rounding, 1e-16, takes from a direction of 1e-2 and more.
            assert found[f"prokl/{name}/update_rms"] == pytest.approx(float(D.square().mean().sqrt()), rel=1e-9)
        assert all(math.isfinite(value) for value in found.values())


def test_a_gradient_wider_than_its_weight_is_not_rounded():
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        p = torch.nn.Parameter(torch.zeros(6, 10, dtype=dtype))
        p.grad_dtype, optimizer = None, PRO([p], rank=2)
        for call in range(4):
            p.grad = 10 * normal(6, 1) @ normal(1, 10, seed=1) + 0.01 * normal(6, 10, seed=2 + call)
            if call < 3:
                optimizer.step()
        found.append(diagnostics.scalars(optimizer))
    assert found[1] == pytest.approx(found[0], rel=2**-8)  # of the weight: stochastic rounding to 8 bits


SMALL_SQUARES = (1.0, 1.0, 1.0, 1.0, 1e-26)  # of the last one no float32


@pytest.mark.parametrize(
    "cls, kwargs, sizes, tolerance",
    [
        (PRO, {"rank": 3, "alpha_kl": 1.0, "lr": 0.5}, (1e-4, 1.0), 1e-9),  # the step bounds what outgrows its start
        (PRO, {"rank": 3}, SMALL_SQUARES, 1e-6),
        (KL, {}, SMALL_SQUARES, 1e-6),
    ],
)
def test_an_oversized_gradient_has_the_figure_of_its_step(cls, kwargs, sizes, tolerance):
    stream = [[size * g] for size, (g,) in zip(sizes, gradient_stream([(6, 10)], len(sizes)), strict=True)]
    parameters, optimizer = run(cls, stream[:-1], **kwargs)
    found, directions = moves(optimizer, parameters, stream[-1])
    rms = float(directions["group0.0"].square().mean().sqrt())
    assert rms > 0 and found["prokl/group0.0/update_rms"] == pytest.approx(rms, rel=tolerance)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("cls, kwargs", METHODS, ids=IDS)
def test_a_matrix_that_will_not_move_is_not_said_to(cls, kwargs, bounded):
    """A zero gradient under a bound moves nothing, momentum or not; one that is not finite stops its whole stack."""
    (experts,), optimizer = run(
        cls, gradient_stream([(3, 6, 10)], 4), **kwargs, **({} if bounded else {"clip_threshold": None})
    )
    names = [f"group0.0[{b}]" for b in range(3)]
    idle = gradient_stream([(3, 6, 10)], 5)[-1][0]
    idle[0] = 0
    found, directions = moves(optimizer, [experts], [idle])
    for name in names:
        assert (found[f"prokl/{name}/update_rms"] > 0) == bool(directions[name].any()), name
    assert bool(directions[names[0]].any()) != bounded
    torn = idle.clone()
    torn[0, 0, 0] = torch.nan
    found, directions = moves(optimizer, [experts], [torn])
    for name in names:
        assert math.isnan(found[f"prokl/{name}/update_rms"]) and not directions[name].any()


def test_rounding_of_a_stored_basis_counts_as_no_update():
    generator = torch.Generator().manual_seed(3)
    rows = torch.linalg.qr(torch.randn(64, 2, generator=generator)).Q.T
    weight = torch.nn.Parameter(torch.zeros(32, 64))
    optimizer = PRO([weight], lr=1.0, rank=2, state_dtype=torch.bfloat16)
    for t in range(12):
        weight.grad = torch.randn(32, 2, generator=generator) @ rows
        before = weight.detach().clone()
        found = diagnostics.scalars(optimizer) if t else {}
        optimizer.step()
        moved = float((weight.detach() - before).square().mean().sqrt())
        if t:
            assert found["prokl/group0.0/update_rms"] == pytest.approx(moved, rel=1e-4)  # of float32 weights of size 1


@pytest.mark.parametrize("cls, kwargs", [(PRO, {"rank": 3}), (KL, {})])
def test_whitened_size_says_what_the_step_is_about_to_bound(cls, kwargs):
    (p,), optimizer = run(cls, gradient_stream([(6, 10)], 40), **kwargs)
    name, sizes = "prokl/group0.0", []
    for factor in (1.0, 3.0, 1e3):
        p.grad = factor * gradient_stream([(6, 10)], 41)[-1][0]
        sizes.append(diagnostics.scalars(optimizer)[f"{name}/whitened_size"])
    assert sizes[1:] == pytest.approx([3 * sizes[0], 1e3 * sizes[0]], rel=1e-9)
    assert 0.2 < sizes[0] < 5 < sizes[2]
    before = diagnostics.scalars(optimizer)[f"{name}/clipped"]
    optimizer.step()
    assert diagnostics.scalars(optimizer)[f"{name}/clipped"] == before + 1


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_captured_energy_is_the_subspaces_share_of_the_gradient(share):
    (p,), optimizer = run(PRO, gradient_stream([(6, 10)], 5), rank=3)
    U = optimizer.state[p]["U"]
    inside, outside = normal(6, 10, dtype=torch.float64), normal(6, 10, seed=1, dtype=torch.float64)
    inside, outside = inside @ U @ U.mT, outside - outside @ U @ U.mT
    p.grad = (share / inside.square().sum()) ** 0.5 * inside + ((1 - share) / outside.square().sum()) ** 0.5 * outside
    found = diagnostics.scalars(optimizer)
    assert found["prokl/group0.0/captured_energy"] == pytest.approx(share, abs=1e-12)


def test_missing_gradients_have_no_figures_and_bad_ones_nan():
    weights = [weight(4, 6, dtype=torch.float64) for _ in range(3)]
    optimizer = PRO(weights, rank=2)
    for seed in range(2):
        step(optimizer, weights, [normal(4, 6, seed=seed + 10 * i, dtype=torch.float64) for i in range(3)])
    weights[0].grad = None
    weights[1].grad[2, 3] = NAN
    found = diagnostics.scalars(optimizer)
    figures = ("captured_energy", "update_rms", "subspace_share", "whitened_size")
    assert not any(f"prokl/group0.0/{figure}" in found for figure in figures)
    assert all(math.isnan(found[f"prokl/group0.1/{figure}"]) for figure in figures)
    assert all(math.isfinite(found[f"prokl/group0.2/{figure}"]) for figure in figures)
    assert all(f"prokl/group0.{i}/orthogonality_U" in found for i in range(3))


@pytest.mark.parametrize("cls, kwargs", METHODS, ids=IDS)
def test_the_device_is_waited_for_once(cls, kwargs, monkeypatch):
    """Everything is launched before the one place in which results are copied to the host."""
    forbid_host_reads(monkeypatch)
    stream = gradient_stream(SHAPES, 3, dtype=torch.float32)
    parameters, optimizer = run(cls, stream, dtype=torch.float32, **kwargs)
    copies, reading = [], report.on_host

    class Finished(Exception):
        pass

    def copied(found):
        copies.append(len(found))
        raise Finished

    monkeypatch.setattr(report, "on_host", copied)
    with pytest.raises(Finished), ForbidHostReads():
        diagnostics.scalars(optimizer)
    with pytest.raises(Finished), ForbidHostReads():
        diagnostics.spectra(optimizer)
    with ForbidHostReads():
        diagnostics.phi(optimizer)
    assert len(copies) == 2
    monkeypatch.setattr(report, "on_host", lambda found: copies.append(len(found)) or reading(found))
    assert diagnostics.scalars(optimizer)
    assert len(copies) == 3
