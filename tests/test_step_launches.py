"""A step, traced without a GPU, has the launches of the real one, and no more than there were.

If a bound is exceeded the step launches more than it did; if launches go, tighten it.
"""

import re
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from bench.compile_report import trace
from bench.shapes import SETS, ParameterSet
from prokl import ProKLShampoo
from prokl.algorithm.settings import PRECISIONS
from prokl.backends.cuda_qr import Kind
from prokl.kernels import launch
from tests import host_extension
from tests.commands import ROOT
from tests.inputs import forbid_host_reads, normal, weight

MOST = {"balanced": {"ordinary": 47, "refresh": 178}, "faithful": {"ordinary": 47, "refresh": 172}}
"""Launches of a bucket of the paper's models."""


def steps(parameters, dtype, rank, precision):
    """Launches by kind of step and bucket."""
    return trace.steps_of(parameters, dtype, partial(ProKLShampoo, rank=rank, precision=precision))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_bucket_launches_more_than_it_did(precision):
    for name in ("gpt2-124m", "gpt2-350m"):
        found = steps(SETS[name], torch.bfloat16, 128, precision)
        for kind, most in MOST[precision].items():
            assert max(map(len, found[kind])) <= most


@pytest.mark.slow
def test_a_step_launches_every_kernel():
    kernels = {
        name
        for path in (ROOT / "kernels").glob("*.py")
        for name in re.findall(r"@triton\.jit\ndef (\w+)_kernel\(", path.read_text())
    }
    both = [steps(SETS["gpt2-124m"], torch.float32, 128, precision) for precision in PRECISIONS]
    assert {e.kernel for found in both for bucket in found["refresh"] for e in bucket if e.launch} == kernels


@pytest.mark.slow
@pytest.mark.parametrize("shape, precision", zip([(24, 40), (20, 20)], PRECISIONS, strict=True))
def test_a_step_that_computes_launches_what_is_traced(shape, precision, extension_on_cpu, monkeypatch):
    forbid_host_reads(monkeypatch)
    weights = [weight(*shape, seed=i) for i in range(2)]
    # bfloat16 as on a GPU, whatever this CPU has instructions for.
    optimizer = ProKLShampoo(weights, rank=4, backend="triton", precision=precision, ns_dtype=torch.bfloat16)
    for i, W in enumerate(weights):
        W.grad = normal(*shape, seed=i)
    optimizer.step()  # which begins
    events, start = [], launch.start

    def noted(kernel, *given, **constants):
        events.append(trace.Event(kernel.__name__.removesuffix("_kernel")))
        with _disable_current_modes():  # the interpreter's own tensors
            start(kernel, *given, **constants)

    monkeypatch.setattr(launch, "start", noted)
    (bucket,) = optimizer.engine.buckets
    for kind, (expected,) in steps(ParameterSet("two", ((2, *shape),), (4,)), torch.float32, 4, precision).items():
        found = trace.execute(bucket, kind, events)
        assert [e.kernel for e in found] == [e.kernel for e in expected]
    assert all(W.isfinite().all() for W in weights)


@pytest.mark.parametrize(
    "run, launches",
    [
        (lambda x, mask: x.mT[:, None].contiguous(), 1),
        (lambda x, mask: x.mT[:, None].reshape(4, 3, 2).view(24), 1),
        (lambda x, mask: x.expand(5, 2, 3, 4).sum(0), 1),
        (lambda x, mask: x.mul_(x), 1),
        (lambda x, mask: x.masked_fill(mask, 0.0), 2),
        (lambda x, mask: torch.empty_like(x).mT.detach(), 0),
    ],
)
def test_only_operators_that_compute_count_as_launches(run, launches):
    with trace.tracing() as events:
        x, mask = torch.empty(2, 3, 4), torch.empty(2, 3, 1, dtype=torch.bool)
        with trace.Operators(events):
            run(x, mask)
    assert len(events) == launches


@pytest.mark.parametrize("k", [16, 128, 129, 300])
def test_launches_of_the_extension_are_its_own(extension_on_cpu, k):
    N, A, used = torch.empty(2, k, k), torch.empty(2, k + 100, k), torch.zeros(2, dtype=torch.int32)
    operators = torch.ops.prokl
    operators.factor(torch.ones(1, 1, 1), Kind.PASS, None)  # the first call of a process tries a launch besides
    for call in (
        lambda: operators.factor(N, Kind.PASS, None),
        lambda: operators.factor(N, Kind.SETTLE, used),
        lambda: operators.semidefinite_inverse(N),
        lambda: operators.semidefinite_root(N),
        lambda: operators.finish(A, A, N, None, None),
        lambda: operators.finish(A, A, None, None, None),
    ):
        events, before = [], host_extension.launches(extension_on_cpu)
        with trace.Operators(events):
            call()
        own = [e for e in events if e.kernel.startswith(trace.EXTENSION)]
        assert host_extension.launches(extension_on_cpu) - before == len(own)
