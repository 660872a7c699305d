"""Temporary memory of a step is bounded: what a step takes, and that a large bucket is made as several."""

from types import SimpleNamespace

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.algorithm.shapes import MatrixShape
from prokl.backends.device import workspace
from prokl.backends.io import Member
from prokl.engine.weights import runs
from tests.peak import Peak
from tests.problems import VARIANTS, assert_runs_agree, gradient_stream, run

METHODS = [*((ProKLShampoo, {"variant": v, "rank": 16}) for v in VARIANTS), (KLShampoo, {})]
SHAPES = [(48, 48), (32, 128)]  # Newton-Schulz in its standard form and in Gram form
STATE_DTYPES = [None, torch.bfloat16]
CASES = [("torch", *method, shape, dtype) for method in METHODS for shape in SHAPES for dtype in STATE_DTYPES]
CASES += [("torch", ProKLShampoo, {"rank": 47}, SHAPES[0], torch.bfloat16)]  # nothing is as large as with a full rank
# Interpreted, two methods have one shape, and another in balanced precision; variants take a part of the first one's.
INTERPRETED = [(*METHODS[0], SHAPES[0], None), (*METHODS[-1], SHAPES[1], torch.bfloat16)]
INTERPRETED += [(ProKLShampoo, {**METHODS[0][1], "precision": "balanced"}, SHAPES[1], None)]
INTERPRETED += [(KLShampoo, {"precision": "balanced"}, SHAPES[0], None)]
CASES += [pytest.param("triton", *case, marks=pytest.mark.slow) for case in INTERPRETED]


@pytest.mark.parametrize("backend, cls, kwargs, shape, state_dtype", CASES)
def test_a_step_takes_no_more_than_the_workspace_says(cls, kwargs, shape, state_dtype, backend):
    if cls is ProKLShampoo:
        kwargs = {**kwargs, "ns_dtype": torch.float32}
    shapes, most = [shape] * 2, []
    peak = Peak()

    def observe(t, parameters, optimizer):
        most.append(peak.most - peak.now)
        peak.restart()

    with peak:
        run(cls, gradient_stream(shapes, 3, dtype=torch.float32), dtype=torch.float32, backend=backend,
            precondition_frequency=2, init_eigenvalue=0.1, state_dtype=state_dtype, observe=observe,
            absent=lambda i, t: (i, t) == (1, 1), **kwargs)  # fmt: skip
    allowed = len(shapes) * cls.method.workspace(*shape, kwargs.get("rank", 16)) * 4
    assert max(most[1:]) <= allowed  # one lacks a gradient, the last is a refresh
    assert max(most[1:]) >= allowed / 5  # and the bound is no arbitrary one; measured: 0.25 to 0.92 of it


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_bucket_beyond_the_budget_is_split_without_a_change(backend, monkeypatch):
    shapes = [(6, 10), (10, 6), (2, 6, 10), (8, 8)]
    stream = gradient_stream(shapes, 3)
    kwargs = {"rank": 3, "precondition_frequency": 2, "backend": backend}
    whole = run(ProKLShampoo, stream, **kwargs)
    monkeypatch.setattr("prokl.backends.device.WORKSPACE", 2 * ProKLShampoo.method.workspace(6, 10, 3) * 8)
    parts = run(ProKLShampoo, stream, **kwargs)
    for (_, optimizer), sizes in ((whole, [3, 1]), (parts, [2, 1, 1])):
        assert [len(bucket.members) for bucket in optimizer.engine.buckets] == sizes
    assert_runs_agree(parts, whole, 1e-12)


def stacks(*counts):
    return [Member(torch.empty(c, 4, 6), str(c), MatrixShape(c, 4, 6)) for c in counts]


@pytest.mark.parametrize(
    "counts, most, sizes",
    [
        ((1,) * 96, 28, [24, 24, 24, 24]),  # not 28, 28, 28, 12
        ((1,) * 24, 24, [24]),
        ((1,) * 7, 3, [3, 2, 2]),
        ((5, 5, 5), 6, [5, 5, 5]),
        ((9, 1, 1), 4, [9, 2]),  # one parameter is never split
        ((1, 1), 0, [1, 1]),
        ((40_000, 40_000), 10**6, [40_000, 40_000]),  # more than a launch has blocks
    ],
)
def test_a_shape_is_cut_into_equal_parts(counts, most, sizes):
    given = stacks(*counts)
    found = runs(given, 10, 10 * most + 9)
    assert [sum(piece.shape.count for piece in run) for run in found] == sizes
    assert [piece for run in found for piece in run] == given


def test_the_workspace_is_a_share_of_the_devices_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    assert workspace(torch.device("cuda", 1)) == 8 * 2**30
    assert workspace(torch.device("cpu")) == 2 * 2**30
