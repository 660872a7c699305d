"""What runs on a device whose values the host may not read: same results, no host reads.

The path is chosen by ``is_host_readable``; saying no on a CPU runs it here. What bad gradients do on it is in
tests/test_bad_gradients.py.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prokl import KLShampoo, ProKLShampoo
from tests.inputs import HOST_READS, forbid_host_reads
from tests.problems import VARIANTS, assert_runs_agree, gradient_stream, run

SHAPES = [(6, 10), (6, 10), (10, 6), (3, 6, 10), (8, 8), (12, 40)]
TAU = {"precondition_frequency": 3}
METHODS = [(ProKLShampoo, {"variant": v, "rank": 4, **TAU}) for v in VARIANTS] + [(KLShampoo, TAU)]


@pytest.fixture
def no_branching(monkeypatch):
    forbid_host_reads(monkeypatch)


class ForbidHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in HOST_READS, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_same_weights_and_state_in_float64(cls, kwargs, monkeypatch):
    def late(i, t):
        return (i == 1 and t < 3) or (i == 4 and t % 5 == 2)

    stream = gradient_stream(SHAPES, 12)
    for t, size in ((7, 1e5), (8, 1e-6), (10, 0.0)):  # bounded, tiny, none
        for i in (0, 3, 5):  # of a bucket some, the weight alone in its bucket, and a stack
            stream[t][i] *= size
    parameters, optimizer = plain = run(cls, stream, absent=late, **kwargs)
    forbid_host_reads(monkeypatch)
    assert_runs_agree(run(cls, stream, absent=late, **kwargs), plain, 1e-9)  # measured: 5e-14
    assert all(optimizer.state[parameters[i]]["clipped"].min() > 0 for i in (0, 3, 5))


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_no_host_read_once_every_weight_has_begun(cls, kwargs, no_branching):
    stream = gradient_stream(SHAPES, 8, dtype=torch.float32)
    parameters, optimizer = run(cls, stream[:1], dtype=torch.float32, **kwargs)
    for gradients in stream[1:]:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        with ForbidHostReads():
            optimizer.step()
    assert all(p.isfinite().all() for p in parameters)
