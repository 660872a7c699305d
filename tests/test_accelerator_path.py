"""What runs on a device whose values the host may not read: same results, no host reads, bad gradients masked.

The path is chosen by ``is_host_readable``; saying no on a CPU runs it here.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prokl import KLShampoo, ProKLShampoo
from tests.inputs import forbid_host_reads
from tests.problems import VARIANTS, gradient_stream, relative, run, state_tensors

SHAPES = [(6, 10), (6, 10), (10, 6), (3, 6, 10), (8, 8), (12, 40)]
METHODS = [(ProKLShampoo, {"variant": v, "rank": 4}) for v in VARIANTS] + [(KLShampoo, {})]
READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal")


@pytest.fixture
def no_branching(monkeypatch):
    forbid_host_reads(monkeypatch)


class ForbidHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name not in READS, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_same_weights_and_state_in_float64(cls, kwargs, monkeypatch):
    def late(i, t):
        return (i == 1 and t < 3) or (i == 4 and t % 5 == 2)

    stream = gradient_stream(SHAPES, 24)
    for t, size in ((18, 1e5), (20, 1e-6), (22, 0.0)):  # bounded, tiny, none
        for i in (0, 3, 5):  # of a bucket some, the weight alone in its bucket, and a stack
            stream[t][i] *= size
    plain, one = run(cls, stream, absent=late, **kwargs)
    forbid_host_reads(monkeypatch)
    masked, two = run(cls, stream, absent=late, **kwargs)
    assert all(one.state[plain[i]]["clipped"].min() > 0 for i in (0, 3, 5))
    for p, q in zip(plain, masked, strict=True):
        assert relative(q, p) <= 1e-9  # measured: 5e-14
        for key, value in state_tensors(one.state[p]).items():
            assert relative(two.state[q][key], value) <= 1e-9, key


@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_no_host_read_once_every_weight_has_begun(cls, kwargs, no_branching):
    stream = gradient_stream(SHAPES, 22, dtype=torch.float32)
    parameters, optimizer = run(cls, stream[:1], dtype=torch.float32, **kwargs)
    for gradients in stream[1:]:
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        with ForbidHostReads():
            optimizer.step()
    assert all(p.isfinite().all() for p in parameters)


@pytest.mark.parametrize("step", [0, 3, 10], ids=["first", "ordinary", "refresh"])
@pytest.mark.parametrize("cls, kwargs", METHODS)
def test_bad_gradient_touches_nothing_and_the_others_move_alike(cls, kwargs, step, no_branching):
    stream = gradient_stream(SHAPES, 13, dtype=torch.float32)
    before = {}

    def observe(t, parameters, optimizer):
        kept = {k: v.clone() for k, v in state_tensors(optimizer.state[parameters[0]]).items()}
        before[t] = (parameters[0].detach().clone(), kept)

    bad = [[g.clone() for g in gradients] for gradients in stream]
    bad[step][0][2, 3] = float("nan")
    spoiled, optimizer = run(cls, bad, dtype=torch.float32, observe=observe, **kwargs)
    clean, _ = run(cls, stream, dtype=torch.float32, absent=lambda i, t: i == 0 and t == step, **kwargs)
    for p, q in zip(spoiled[1:], clean[1:], strict=True):
        assert torch.equal(p, q)
    if step:
        (w0, s0), (w1, s1) = before[step - 1], before[step]
        assert torch.equal(w0, w1) and all(torch.equal(s0[k], s1[k]) for k in s0)
    assert optimizer.skipped()["parameter 0 of group 0"] == 1
