"""The batched step against the reference path: many weights of several shapes in one optimizer."""

import statistics

import pytest
import torch

from prokl import KLShampoo, ProKLShampoo
from prokl.pair import Pair
from tests.inputs import forbid_host_reads
from tests.problems import VARIANTS, assert_runs_agree, gradient_stream, held, held_each, relative, run, ways

# Two of one shape, its transpose, a square, a stack, vectors, a wide one and a flattened convolution.
SHAPES = [(6, 10), (6, 10), (10, 6), (8, 8), (3, 6, 10), (1, 5), (5, 1), (12, 40), (16, 4, 3, 3)]
MATRICES = SHAPES[:-1]


def late_and_missing(i: int, t: int) -> bool:
    return (i == 1 and t < 4) or (i == 3 and t % 5 == 2) or (i == 4 and t == 7)


def stream_of(steps):
    stream = gradient_stream([*SHAPES[:-1], (16, 36)], steps)
    return [[*g[:-1], g[-1].reshape(SHAPES[-1])] for g in stream]


CASES = [
    *((ProKLShampoo, {"variant": variant, "rank": 4}) for variant in VARIANTS),
    *((ProKLShampoo, {"rank": rank}) for rank in (1, 5, 6, 7, 9, 128)),  # the least, about the short sides, the largest
    # A subspace part without weight, which is never counted as bounded.
    (ProKLShampoo, {"rank": 4, "alpha_kl": 0.0, "momentum": 0.0}),
    (KLShampoo, {}),
]


@pytest.mark.parametrize("cls, kwargs", CASES)
def test_a_batched_step_is_the_references_in_float64(cls, kwargs):
    """Starts, scales and clips meet both of them beside the transcription, in tests/test_against_paper.py."""
    kwargs = {"weight_decay": 0.1, "precondition_frequency": 5, "absent": late_and_missing, **kwargs}
    batched, reference = (run(cls, stream_of(12), backend=backend, **kwargs) for backend in ("torch", "reference"))
    assert_runs_agree(batched, reference, 1e-9)  # measured: mostly 2e-13; slack for other LAPACKs
    assert not any([*batched[1].skipped().values(), *reference[1].skipped().values()])


LOW = [(24, 40), (40, 24), (32, 32), (16, 128)]


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    "cls, kwargs",
    [
        *((ProKLShampoo, {"rank": 8, "variant": v}) for v in VARIANTS),
        (ProKLShampoo, {"rank": 8, "ns_dtype": torch.float32}),
        (KLShampoo, {}),
    ],
)
def test_low_precision_error_is_at_most_twice_the_references(cls, kwargs, state_dtype):
    """Both in float32 against float64: the mean over the weights, in the distance moved; initialising moves nothing."""
    kwargs, stream = {**kwargs, "state_dtype": state_dtype}, gradient_stream(LOW, 14, dtype=torch.float32)
    exact, _ = run(cls, stream, backend="reference", dtype=torch.float64, **kwargs)
    start, _ = run(cls, stream[:1], backend="reference", dtype=torch.float32, **kwargs)

    def error(backend):
        low, _ = run(cls, stream, backend=backend, dtype=torch.float32, **kwargs)
        triples = zip(exact, low, start, strict=True)
        return statistics.fmean(relative(q.double() - w.double(), p - w.double()) for p, q, w in triples)

    assert error("torch") <= 2 * error("reference")  # measured: 0.69 to 1.44; on seeds 1 and 2 0.28 to 1.25


# Where the host must not read, which also chooses the QR, both optimizers; every variant where it may.
@pytest.mark.parametrize(
    "cls, variant, blind",
    [*((ProKLShampoo, v, False) for v in VARIANTS), (KLShampoo, None, False)]
    + [(ProKLShampoo, VARIANTS[0], True), (KLShampoo, None, True)],
)
def test_balanced_steps_err_within_the_bounds_of_pairs(cls, variant, blind, monkeypatch):
    """Measured: 0.03 to 0.31 of what they may, with one half alone 2.9 to 26 times it."""
    if blind:
        forbid_host_reads(monkeypatch)
    kwargs = {"precondition_frequency": 3, "weight_decay": 0.1, "absent": late_and_missing}
    kwargs |= {"variant": variant, "rank": 4, "ns_dtype": torch.float32} if variant else {}
    stream = [[g.float() for g in gradients] for gradients in stream_of(9)]
    stream[7][0] *= 1e4
    found = ways(cls, stream, backend="torch", precision="balanced", **kwargs)
    split = Pair.split
    monkeypatch.setattr(Pair, "split", lambda t: Pair(split(t).both * torch.tensor([1, 0]).view(2, *[1] * t.ndim)))
    one_half = ways(cls, stream, backend="torch", precision="balanced", **kwargs)
    whole, half = held_each([found, one_half], cls, stream, "balanced", **kwargs)
    assert whole <= 1 < half


@pytest.mark.slow
@pytest.mark.parametrize("cls, kwargs", [(ProKLShampoo, {"rank": 8, "ns_dtype": torch.float32}), (KLShampoo, {})])
def test_errors_of_a_hundred_balanced_steps_do_not_add_up(cls, kwargs):
    stream = gradient_stream([(24, 40), (16, 48)], 101, dtype=torch.float32)
    found = ways(cls, stream, backend="torch", precision="balanced", **kwargs)
    assert held(found, cls, stream, "balanced", **kwargs) <= 1
