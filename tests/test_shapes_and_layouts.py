"""Vectors, odd sizes, convolutions and weights that are not contiguous."""

import math

import pytest
import torch

from tests.inputs import BACKENDS, PRO, TAU, normal, weight
from tests.training import contents, differences, train

SHAPES = [
    (1, 7), (7, 1), (2, 2), (7, 13), (31, 2), (2, 3, 1), (3, 1, 4), (1, 4, 6), (4, 3, 2, 2), (8, 1, 1, 1),
    (1, 2, 3, 2), (4, 2, 2, 3, 2),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_odd_shapes_work_on_both_paths_alike(method, shape):
    cls, kwargs = method
    m, n = sorted((shape[-2], shape[-1]) if len(shape) == 3 else (shape[0], math.prod(shape[1:])))
    # KL-Shampoo's R has at most m more dimensions a step: refreshed sooner, its null space is left to rounding.
    tau = TAU if cls is PRO else max(TAU, n // m)
    final = {}
    for backend in BACKENDS:
        w = weight(*shape, dtype=torch.float64)
        train(cls([w], backend=backend, precondition_frequency=tau, **kwargs), range(tau + 5))
        final[backend] = w.detach()
    moved = (final["reference"] - weight(*shape, dtype=torch.float64).detach()).norm()
    assert moved > 1e-5
    # Paths agree to 1e-13; Newton-Schulz multiplies the rounding of small singular values by 3.4 an iteration.
    assert (final["torch"] - final["reference"]).norm() < 1e-9 * moved


LAYOUTS = {
    "transposed": ((6, 4), lambda t: t.mT.contiguous().mT),
    "every other column": ((2, 4, 6), lambda t: torch.stack([t, t + 1], dim=-1).flatten(-2)[..., ::2]),
    "offset view": ((4, 3, 2, 2), lambda t: torch.cat([torch.ones(3, dtype=t.dtype), t.flatten()])[3:].view(t.shape)),
    "channels last": ((4, 3, 2, 2), lambda t: t.to(memory_format=torch.channels_last)),
    "channels last, 3-D": ((4, 3, 2, 2, 2), lambda t: t.to(memory_format=torch.channels_last_3d)),
}


@pytest.mark.parametrize("shape, arranged", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("path", BACKENDS)
def test_memory_layout_of_weight_and_gradient_does_not_matter(method, path, arranged, shape):
    cls, kwargs = method
    final = []
    for arrange in (torch.Tensor.contiguous, arranged):
        w = torch.nn.Parameter(arrange(weight(*shape).detach()))
        strides = w.stride()
        optimizer = cls([w], backend=path, **kwargs)
        for t in range(5):
            w.grad = arrange(normal(*shape, seed=t))
            optimizer.step()
        assert w.stride() == strides
        final.append(contents(optimizer))
    assert differences(*final) == set()


def test_a_sliced_weight_leaves_the_rest_of_its_storage_alone(method, path):
    cls, kwargs = method
    whole = normal(8, 12)
    before = whole.clone()
    w = torch.nn.Parameter(whole[2:6, ::2])
    train(cls([w], backend=path, **kwargs), range(3))
    inside = torch.zeros(8, 12, dtype=torch.bool)
    inside[2:6, ::2] = True
    assert torch.equal(whole[~inside], before[~inside])
    assert not torch.equal(whole[inside], before[inside])
