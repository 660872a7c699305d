"""Training on a device that has no float64, as MPS and some Intel GPUs: a CPU that refuses it stands in."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prokl import ProKLShampoo
from prokl.algorithm import evidence, shapes
from prokl.backends import select
from prokl.engine.bucket import Bucket
from tests.inputs import METHODS, normal
from tests.problems import gradient_stream, relative, state_tensors

every_method = pytest.mark.parametrize("cls, settings", METHODS.values(), ids=METHODS)
SHAPES = [(8, 20), (20, 8), (2, 6, 9), (8, 20)]


class Refuses(TorchDispatchMode):
    """Raises as MPS does for every operator that makes float64; ``allowed`` while the start is made on the CPU."""

    allowed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, tuple | list) else (out,)) if isinstance(t, torch.Tensor)]
        if not self.allowed and any(t.dtype == torch.float64 for t in made):
            raise TypeError(f"Cannot convert a MPS Tensor to float64 dtype ({func})")
        return out


@pytest.fixture
def refuses(monkeypatch):
    """A mode under which nobody knows what the CPU has; it must be asked."""
    mode, initialise = Refuses(), Bucket._initialise

    def on_the_cpu(self, rows, G):
        mode.allowed = True
        initialise(self, rows, G)
        mode.allowed = False

    monkeypatch.setattr(Bucket, "_initialise", on_the_cpu)
    yield mode
    shapes.widest.cache_clear()


def ask(mode, monkeypatch):
    monkeypatch.setattr(shapes, "WITH_FLOAT64", ("cuda",))
    shapes.widest.cache_clear()
    with mode:
        assert shapes.widest(torch.device("cpu")) == torch.float32


def trained(cls, stream, mode, monkeypatch, dtype=torch.float32, **settings):
    """Weights and optimizer after a stream of gradients, every step under a mode, or without one."""
    if mode is not None:
        ask(mode, monkeypatch)
    start = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(G.shape, generator=start).to(dtype)) for G in stream[0]]
    ns = {"ns_dtype": dtype} if cls is ProKLShampoo else {}
    optimizer = cls(weights, precondition_frequency=3, **ns, **{"backend": "torch", **settings})
    for gradients in stream:
        for W, G in zip(weights, gradients, strict=True):
            W.grad = G.to(dtype, copy=True)
        with mode or nullcontext():
            optimizer.step()
    return weights, optimizer


@every_method
@pytest.mark.parametrize("kappa", [5.0, None])
def test_a_training_equals_that_with_float64_to_rounding(cls, settings, kappa, refuses, monkeypatch):
    stream = gradient_stream(SHAPES, 8, dtype=torch.float32)
    stream[5][0] *= 1e4  # bounded
    stream[6][1].fill_(torch.nan)
    wide, own = (trained(cls, stream, m, monkeypatch, clip_threshold=kappa, **settings) for m in (None, refuses))
    for p, q in zip(wide[0], own[0], strict=True):
        assert relative(q, p) <= 5e-6  # eigenvalues rounded once more, 6e-8, go with each of 8 steps: at most 8e-7 seen
        for key, value in state_tensors(own[1].state[q]).items():
            if key in ("skipped", "clipped"):
                torch.testing.assert_close(value, state_tensors(wide[1].state[p])[key], rtol=1e-5, atol=1e-6)


def one_way(sizes, noise=0.3):
    """Gradients of these norms of one rank, but for noise, which do not turn back."""
    drawn = gradient_stream(SHAPES, len(sizes), noise=noise, signal_rank=1)
    turned = [[G * torch.sign((G * old).sum()) for G, old in zip(each, drawn[0], strict=True)] for each in drawn]
    return [[(size * G / G.norm()).float() for G in each] for size, each in zip(sizes, turned, strict=True)]


@every_method
@pytest.mark.parametrize(
    "first, then, noise",
    [(1e-15, 1e8, 0.0), (1.0, 1e-20, 0.0), (1.5e19, 1.5e19, 0.0), (3e-20, 3e-20, 0.3)],
)
def test_sizes_with_overflowing_squares_are_judged_the_same(cls, settings, first, then, noise, refuses, monkeypatch):
    stream = one_way([first] * 4 + [then] * 2, noise)
    wide, own = (trained(cls, stream, m, monkeypatch, **settings) for m in (None, refuses))
    for p, q in zip(wide[0], own[0], strict=True):
        assert q.isfinite().all() and relative(q, p) <= 5e-6
        theirs, ours = (state_tensors(o.state[w]) for o, w in ((wide[1], p), (own[1], q)))
        for key, value in ours.items():
            assert value.isfinite().all(), key
        torch.testing.assert_close(ours["clipped"], theirs["clipped"])
        torch.testing.assert_close(ours["lambda_0"], theirs["lambda_0"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "backend, has_float64", [("torch", False), ("torch", True), pytest.param("triton", True, marks=pytest.mark.slow)]
)
def test_a_momentum_with_huge_squares_keeps_its_complement(backend, has_float64, refuses, monkeypatch):
    stream = one_way([8e18] * 6)
    exact, _ = trained(ProKLShampoo, stream, None, monkeypatch, torch.float64, rank=3)
    mode = None if has_float64 else refuses
    own, _ = trained(ProKLShampoo, stream, mode, monkeypatch, rank=3, backend=backend)
    for p, q in zip(exact, own, strict=True):
        assert relative(q, p) <= 5e-6


def test_the_reference_is_refused(refuses, monkeypatch):
    ask(refuses, monkeypatch)
    with refuses, pytest.raises(ValueError, match="backend='reference': it needs float64, which cpu has not"):
        select.select("reference", torch.device("cpu"))


@pytest.mark.parametrize("size", [1.0, 1e17])  # whitened, its square is beyond float32
@pytest.mark.parametrize("beside", [0.1, 10.0])  # the subspace decides, then what lies beside it
def test_a_gradient_is_measured_as_in_float64(size, beside):
    B, m, n, r = 3, 5, 11, 2
    a = evidence.Roots(*(100 * (normal(*shape).abs() + 0.5) for shape in ((B, m), (B, r), (B,))))
    A, e_res = size * normal(B, m, r), (size * beside * normal(B, m, seed=1)).square()
    exact = evidence.measured(A.double(), e_res.double(), evidence.Roots(*(s.double() for s in a)), n)
    *sums, unit, sizes = evidence.measured(A, e_res, a, n)
    squares = [value * (unit * unit.double())[:, None] for value in sums]
    for wide, own in zip((*exact[:3], *exact[-1]), (*squares, *sizes), strict=True):
        torch.testing.assert_close(own.double(), wide, rtol=1e-5, atol=0)
