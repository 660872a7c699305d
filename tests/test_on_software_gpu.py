"""The adapter by which a software GPU takes the launches of a step, with the interpreter in its place."""

import pytest
import torch

import prokl
from prokl.kernels import launch
from tests.on_software_gpu import on_software_gpu

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="the launcher here is the interpreter")


def stepped(cls, steps=2, **kwargs):
    g = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(size, generator=g)) for size in ((6, 10), (10, 6))]
    optimizer = cls(weights, **kwargs)
    for _ in range(steps):
        for W in weights:
            W.grad = torch.randn(W.shape, generator=g)
        optimizer.step()
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("cls, precision", [(prokl.ProKLShampoo, "balanced"), (prokl.KLShampoo, "faithful")])
def test_launches_that_are_redirected_give_the_backends_results(cls, precision):
    own = {"precision": precision}
    launched, seen, start = [], set(), launch.start

    def launcher(kernel, grid, device, *arguments, **constants):
        launched.append(kernel.__name__)
        start(kernel, grid, device, *arguments, **constants)

    with on_software_gpu(launcher, lambda t: seen.add(t.data_ptr()), host_readable=True):
        found = stepped(cls, **own)
        before = len(launched)
        stepped(cls, **own, backend="torch")
        assert len(launched) == before > 0  # who asks for another backend has it
    wanted = stepped(cls, **own, backend="triton")
    assert len(launched) == before and launch.start is start and launch.DEVICES == ("cuda", "cpu")
    assert all(map(torch.equal, found, wanted))
    assert {W.data_ptr() for W in found} | {W.grad.data_ptr() for W in found} <= seen


def test_nothing_is_left_where_the_launcher_raises():
    def failing(*_, **__):
        raise ZeroDivisionError("the launcher's own")

    start = launch.start
    with pytest.raises(ZeroDivisionError, match="the launcher's own"), on_software_gpu(failing, host_readable=True):
        stepped(prokl.ProKLShampoo)
    assert launch.start is start
    stepped(prokl.KLShampoo)  # in PyTorch again, which launches nothing
