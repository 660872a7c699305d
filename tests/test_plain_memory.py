"""Weights and gradients that are no plain memory: stepped as what they stand for, or refused by name, unmoved.

The kernels go by addresses, where a lazily negated tensor has the opposite values and a wrapper nothing.
"""

from itertools import product

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.inputs import BACKENDS, KL, PRO, both, normal, same_bits, step, weight
from tests.problems import relative
from tests.training import differences, fine_and_odd, give, gradients, refused, train, weights_of

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the weights are on the CPU")
SLOW_ON_CPU = [ON_CPU, pytest.mark.slow]


def built(cls, backend=None, calls=2, **settings):
    """Weights of one batch, fine and odd, and those of AdamW."""
    optimizer = fine_and_odd(cls, (6, 4), calls=0)
    optimizer.param_groups[0].update(backend=backend, **settings)
    train(optimizer, range(calls))
    return optimizer, weights_of(optimizer)


def imaginary(G):
    """G as autograd gives it: the gradient of an imaginary part whose conjugate was taken."""
    w = torch.zeros_like(G, requires_grad=True)
    product = torch.complex(torch.zeros_like(G), w).conj() * torch.complex(torch.zeros_like(G), G)
    (g,) = torch.autograd.grad(product.real.sum(), w)
    assert g.is_neg() and torch.equal(g, G)
    return g


LAZY = [(lambda G: torch._neg_view(-G), {}), (imaginary, {"split": 2})]


LAZY_CASES = [(cls, backend, *lazy) for cls in (PRO, KL) for backend in BACKENDS for lazy in LAZY]
INTERPRETED = [pytest.param(cls, "triton", *lazy, marks=SLOW_ON_CPU) for cls, lazy in ((KL, LAZY[0]), (PRO, LAZY[1]))]


@pytest.mark.slow
@pytest.mark.parametrize("cls, backend, lazy, settings", LAZY_CASES + INTERPRETED)
def test_a_lazily_negated_gradient_steps_as_its_values_do(cls, backend, lazy, settings):
    (one, weights), (two, twins) = (built(cls, backend, calls=0, **settings) for _ in range(2))
    for call in range(2 if backend == "triton" else 4):
        give(weights, call)
        for p, q in zip(weights, twins, strict=True):
            q.grad = lazy(p.grad) if call % 2 else p.grad.clone()  # one that had been plain, too
        one.step()
        two.step()
        assert differences(one, two) == set(), call
        assert all(q.grad.is_neg() for q in twins) or call % 2 == 0  # the gradient is the caller's


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def functional(t):
    kept = []
    torch.func.functionalize(lambda x: kept.append(x) or x + 1)(t)
    return kept[0]


NOT_PLAIN = {
    "two": (lambda t: TwoTensor(t.clone(), t.clone()), "TwoTensor, which stands for other tensors"),
    "functional": (functional, "without memory of its own"),
    "freed": (freed, "without memory of its own"),
}


@both
@pytest.mark.parametrize(
    "calls, backend",
    [(0, "torch"), (2, "torch"), (2, "reference"), pytest.param(2, "triton", marks=SLOW_ON_CPU)],
)
def test_a_gradient_without_memory_is_refused_by_name(cls, calls, backend):
    """It may be a matrix's or a plain weight's of AdamW; steps after all refusals are as if there were none."""
    (optimizer, weights), (other, twins) = (built(cls, backend, calls) for _ in range(2))
    given = gradients(weights, 5)
    for (make, says), (i, name) in product(NOT_PLAIN.values(), ((1, "odd"), (2, "bias"))):
        for p, G in zip(weights, given, strict=True):
            p.grad = G
        weights[i].grad = make(given[i])
        with refused(optimizer, f"^{name} has a gradient .*{says}.*plain tensor"):
            optimizer.step()
        weights[i].grad = given[i]
    if backend != "triton":  # of whose steps other tests have enough
        optimizer.step()
        step(other, twins, given)
        assert differences(optimizer, other) == set()


LATER = {
    "swapped": (
        lambda p: torch.utils.swap_tensors(p, torch.nn.Parameter(TwoTensor(p.detach().clone(), p.detach().clone()))),
        "TwoTensor",
    ),
    "negated": (lambda p: setattr(p, "data", torch._neg_view(-p.data)), "negation"),
    "expanded": (lambda p: setattr(p, "data", p.data[:1].expand(p.shape)), "several elements"),
    "freed": (lambda p: p.untyped_storage().resize_(0), "without memory"),
}


@pytest.mark.parametrize("cls, backend", [(PRO, "torch"), (PRO, "reference"), (KL, "torch"), (KL, "reference")])
@pytest.mark.parametrize("change, says", LATER.values(), ids=LATER)
def test_a_weight_that_loses_its_memory_is_told_first(cls, backend, change, says):
    optimizer, weights = built(cls, backend)
    fine, odd, *vectors = weights
    change(odd)
    give(weights, 5)
    with refused(optimizer, f"^odd (is|has) .*{says}", weights=[fine, *vectors]):
        optimizer.step()


def test_a_gradient_of_another_shape_is_told_first():
    """The fused AdamW would read past the end of it."""
    optimizer, weights = built(PRO, calls=0)
    give(weights, 5)
    for i, name in ((1, "odd"), (2, "bias")):
        whole = weights[i].data
        weights[i].data = torch.cat([whole, whole])
        with refused(optimizer, rf"^{name} .* and its gradient .* of shape .*zero_grad\(\)"):
            optimizer.step()
        weights[i].data = whole


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_may_have_any_real_dtype_and_no_complex_one(backend):
    (one, weights), (two, twins) = (built(PRO, backend) for _ in range(2))
    for p, q, G in zip(weights[:2], twins[:2], gradients(weights, 5), strict=False):
        p.grad, q.grad_dtype = G, None
        q.grad = G.double()
    one.step()
    two.step()
    assert differences(one, two) == set()
    twins[1].grad = torch.complex(twins[1].grad, twins[1].grad)
    with refused(two, "^odd .* its gradient torch.complex64|^odd .* its gradient torch.complex128"):
        two.step()


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_a_gradient_wider_than_its_weight_is_not_rounded(backend):
    """A flat part below the rounding of a large one is what a step whitens."""

    def moved(dtype, kept):
        p = torch.nn.Parameter(torch.zeros(6, 10, dtype=dtype))
        p.grad_dtype = None
        optimizer = PRO([p], rank=2, backend=backend, bf16_weights="master", ns_dtype=torch.float32)
        for call in range(4):
            G = 10 * normal(6, 1) @ normal(1, 10, seed=1) + 0.01 * normal(6, 10, seed=2 + call)
            p.grad = G.to(kept)
            optimizer.step()
        return optimizer.state[p]["master"] if dtype == torch.bfloat16 else p.detach()

    wide = moved(torch.float32, torch.float32)
    assert relative(moved(torch.bfloat16, torch.float32), wide) < 1e-4
    assert relative(moved(torch.bfloat16, torch.bfloat16), wide) > 0.1


def test_a_wrapper_in_an_adamw_group_steps_as_under_torchs():
    """The wrapper says by itself what its operations are."""
    wrapped = [torch.nn.Parameter(TwoTensor(normal(4, 6), normal(4, 6, seed=1))) for _ in range(2)]
    matrix = weight(4, 6)
    ours = PRO([{"params": [matrix]}, {"params": wrapped[:1], "algorithm": "adamw", "lr": 0.1, "betas": (0.9, 0.999)}])
    theirs = torch.optim.AdamW(wrapped[1:], lr=0.1, weight_decay=0.0)
    for call in range(3):
        matrix.grad = normal(4, 6, seed=call)
        for p in wrapped:
            p.grad = TwoTensor(normal(4, 6, seed=call), normal(4, 6, seed=10 + call))
        ours.step()
        theirs.step()
    assert same_bits(wrapped[0].a, wrapped[1].a) and same_bits(wrapped[0].b, wrapped[1].b)
    assert not torch.equal(wrapped[0].a, normal(4, 6))
