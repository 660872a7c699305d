"""The optimizers of other packages: what cannot run says why, and COSMOS does what its description says."""

import re
import sys
from pathlib import Path

import pytest
import torch

from bench import records
from bench.steps import peers
from bench.training.cosmos import Cosmos, orthogonalised

ROOT = Path(__file__).parent.parent
EXCUSES: dict[str, tuple[str, ...]] = {}
"""By distribution: parts of the reasons for which it may fail to be built where it is installed; none is known."""


def weights(*shapes, seed=0):
    g = torch.Generator().manual_seed(seed)
    found = [torch.nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
    for W in found:
        W.grad = torch.randn(W.shape, generator=g)
    return found


@pytest.mark.parametrize("peer", peers.PEERS, ids=lambda peer: peer[0])
def test_a_peer_that_is_installed_steps(peer):
    name, distribution, *_ = peer
    if records.version(distribution) is None:
        pytest.skip(f"{distribution} is not installed")
    if sys.version_info < peers.PYTHON.get(distribution, (0, 0)):
        pytest.skip(f"{distribution} is not for this Python")
    (contender,) = (c for c in peers.peers(2, torch.float32) if c.name == name)
    Ws = weights((8, 6), (6, 8), (6, 6))
    before = [W.detach().clone() for W in Ws]
    try:
        optimizer = contender.make(Ws)
    except peers.CannotRun as error:
        if not any(why in str(error) for why in EXCUSES.get(distribution, ())):
            raise
        pytest.skip(str(error))
    finally:
        torch.compiler.set_stance("default")
    gradients = [W.grad.clone() for W in Ws]
    with torch.compiler.set_stance("force_eager"):
        for _ in range(11):  # some need a refresh before they move
            for W, G in zip(Ws, gradients, strict=True):
                W.grad = G.clone()
            optimizer.step()
    assert all(W.isfinite().all() and not torch.equal(W, b) for W, b in zip(Ws, before, strict=True))
    assert f"{distribution} {records.version(distribution)}" in contender.note


def test_a_missing_package_is_named_with_the_remedy():
    with pytest.raises(peers.CannotRun, match=r"^not installed: pip install no-such-package, or -e \.\[peers\]$"):
        peers.build("no-such-package", "none", lambda package, ws: None, [])


def test_a_python_that_is_too_old_is_named_before_anything_is_imported(monkeypatch):
    monkeypatch.setitem(peers.PYTHON, "torch", (99, 1))
    with pytest.raises(peers.CannotRun, match=r"^torch needs Python 99\.1, this is 3\.\d+$"):
        peers.build("torch", "none", lambda package, ws: None, [])


def test_a_failure_of_another_package_becomes_one_short_line():
    def fail(package, ws):
        raise RuntimeError("first\nsecond " + "x" * 500)

    with pytest.raises(peers.CannotRun) as caught:
        peers.build("torch", "torch", fail, [])
    torch.compiler.set_stance("default")
    assert str(caught.value).startswith("RuntimeError: first second xxx") and len(str(caught.value)) == 200


def test_the_extra_has_every_peer():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^peers = \[(.*?)^\]", text, re.DOTALL | re.MULTILINE)[1]
    assert set(re.findall(r'"([a-z-]+)', extra)) == {distribution for _, distribution, *_ in peers.PEERS}


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (6, 3)])
def test_cosmos_moves_by_lr_and_leaves_the_gradient_alone(shape):
    (W,) = weights(shape)
    optimizer = Cosmos([W], lr=0.01, rank=4, ns_dtype=torch.float32)
    for t in range(5):
        before, G = W.detach().clone(), W.grad.clone()
        optimizer.step()
        assert torch.equal(W.grad, G)
        # Rounding of W of size 1 against an update of 0.01: 100 eps.
        assert (W.detach() - before).square().mean().sqrt() == pytest.approx(0.01, rel=1e-4)
        P = optimizer.state[W]["P"]
        torch.testing.assert_close(P.mT @ P, torch.eye(P.shape[1]), atol=1e-5, rtol=0)
        W.grad = torch.randn(shape, generator=torch.Generator().manual_seed(t))


def test_cosmos_finds_the_subspace_of_its_gradients():
    g = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(20, 3, generator=g)).Q
    W = torch.nn.Parameter(torch.zeros(12, 20))
    optimizer = Cosmos([W], rank=3, ns_dtype=torch.float32)
    W.grad = torch.randn(12, 20, generator=g)  # starts elsewhere
    for _ in range(60):
        optimizer.step()
        W.grad = torch.randn(12, 3, generator=g) @ basis.mT
    # The first gradient's share of S fades by 0.95 a step, and every step is a power iteration beside.
    P = optimizer.state[W]["P"]
    assert torch.linalg.matrix_norm(P - basis @ (basis.mT @ P)) < 0.02


def test_orthogonalised_has_unit_root_mean_square_and_nearly_equal_singular_values():
    X = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    for G in (X, X.mT):
        Y = orthogonalised(G, torch.float32)
        assert Y.square().mean().sqrt() == pytest.approx(1.0, rel=1e-5)
        s = torch.linalg.svdvals(Y)
        assert s[0] / s[-1] < 1.9  # the quintic leaves values between 0.68 and 1.13
        assert torch.linalg.svdvals(G)[0] / torch.linalg.svdvals(G)[-1] > 3
